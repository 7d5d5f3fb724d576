"""The roll-up of usage into hourly buckets, and the tenants' use of their budgets.

Any number of controllers may roll up: a lock admits one at a time. Each roll-up is one transaction, from taking steps
to adding buckets, so a controller that is killed in between has changed nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from bursar.core.batch.placement_billing import gpus_in
from bursar.core.quota.tenant_tree import Tree, subtree
from bursar.core.usage.external_budget import Remaining, hours_used, source_of
from bursar.core.usage.usage_levels import (
    DAY,
    EVERYBODY,
    HOUR,
    NODES,
    Bucket,
    Level,
    LevelStep,
    Meter,
    fold,
    hours,
    used_by_steps,
)
from bursar.store.db.database import Connection, Database
from bursar.store.objects import object as object_store
from bursar.store.usage import budget as budget_store
from bursar.store.usage import usage_levels as store
from bursar.wire.kinds.settings import (
    BUDGET_PERIOD_DAYS,
    RECORD_DAYS,
    SETTINGS_KEY,
    budget_period_days_of,
    record_days_of,
)
from bursar.wire.to_scheduler.ask import TenantShare, tenant_share_of

STEPS_MAX = 20_000  # in one transaction
LEVELS_MAX = 2_000
DAY_AT_MOST = timedelta(days=1)  # bounds the work after a long outage
STRIDE = 600  # seconds for which cached sums serve while the budget window moves on; it divides an hour
CLOCKS_APART = timedelta(hours=1)  # the largest clock difference between controllers
LAG_SECONDS = 2  # the latest seconds are left out: other processes may still write steps of them


async def roll(database: Database, until: datetime | None = None, *, steps_max: int = STEPS_MAX) -> int:
    """Roll usage up to `until` into buckets, at most a day at a time; return the number of steps and levels. 0 means
    that all is rolled up, or that another process does it. Buckets are final, so the clock that is behind decides."""
    async with database.reader() as db, db.transaction():
        if (rolled := await store.lock_rolled(db)) is None:
            return 0
        before, now = rolled
        until = until or min(now, datetime.now(UTC)) - timedelta(seconds=LAG_SECONDS)
        if before.timestamp() > 0:
            until = min(until, before + DAY_AT_MOST)
        steps, count = await store.take_steps(db, until, steps_max)
        levels = await store.load_levels(db, steps)
        boundary = _floor(until, HOUR)
        if count == steps_max or boundary <= before:
            await _enter(db, levels, steps, 0)
            return count
        # All steps before the hour's end are in buckets; usage that goes on is added up to there as well.
        behind = await store.load_levels_behind(db, boundary, LEVELS_MAX)
        await _enter(db, {**behind, **levels}, steps, int(boundary.timestamp()))
        if len(behind) < LEVELS_MAX:
            await store.save_rolled(db, boundary)
        return count + len(behind)


async def _enter(
    db: Connection, levels: Mapping[Meter, Level], steps: Mapping[Meter, list[LevelStep]], until: int
) -> None:
    if not levels and not steps:
        return
    tariffs = await store.load_tariffs(db)
    after: dict[Meter, Level] = {}
    hourly: dict[tuple[Meter, int], Bucket] = {}
    daily: dict[tuple[Meter, int], Bucket] = {}
    for meter in {*levels, *steps}:
        level, came, tariff = levels.get(meter, Level()), steps.get(meter, []), tariffs.of(meter.resource, meter.klass)
        after[meter], days = fold(level, came, until, DAY, tariff)
        daily |= {(meter, at): bucket for at, bucket in days.items()}
        if meter.user == EVERYBODY:
            _, parts = fold(level, came, until, HOUR, tariff)
            hourly |= {(meter, at): bucket for at, bucket in parts.items()}
    await store.save_levels(db, after)
    if hourly:
        await store.add_hours(db, hourly)
    if daily:
        await store.add_days(db, daily)
    today = _floor(datetime.now(UTC), DAY).timestamp()
    if any(at < today for _, at in daily):
        await store.change_past(db)


def _floor(at: datetime, size: int) -> datetime:
    return datetime.fromtimestamp(int(at.timestamp()) // size * size, UTC)


# Budgets.


class BudgetUse(Struct, frozen=True):
    """The use of a tenant and its children in the budget's window, and the source of the figures."""

    gpu_hours: float = 0.0
    node_hours: float = 0.0
    source: str = "internal"


class Past(Struct):
    """A cache of the tenants' use up to the last full day, shared by all budget requests of a process.

    This is nearly all of the window, and it rarely changes: it is summed again when the window's begin has moved to
    another stride, or when usage of past days was rolled up. The sum starts where the stride begins; the use from there
    to the window's begin is computed to the second from the steps within the stride, and subtracted.
    """

    key: object = None  # the inputs of the cached sums
    used: store.HourTotals = {}
    steps: store.Steps = {}  # within the stride

    async def load(
        self, db: Connection, tenants: Iterable[str], begin: datetime, now: datetime
    ) -> Sequence[store.HourTotals]:
        """The use of tenants in a window until now, to the second, as parts to add up. Call it in a snapshot: added and
        subtracted parts must be of the same moment."""
        # The clock of the controller that rolls up may be behind ours.
        until = _floor(now - CLOCKS_APART, DAY)
        stride = _floor(begin, STRIDE)
        names = sorted(tenants)
        version, is_open = await store.load_past(db, until)
        if is_open or begin >= until:
            return [_totals(await store.load_window(db, names, begin, now=now))]
        created = await store.load_created(db, names)
        key = (stride, until, version, names, created)
        if self.key != key:
            used = _totals(await store.load_window(db, names, stride, until, now=now))
            steps = await store.load_steps_from(db, names, stride, stride + timedelta(seconds=STRIDE))
            self.used, self.steps, self.key = used, steps, key
        used, early = self.used, _early(self.steps, names, created, stride, begin)
        # Another tenant may have had the same name earlier that day.
        young = {name for name, at in created.items() if at > until}
        recent = await store.load_days_window(db, [name for name in names if name not in young], until, now)
        if young:
            recent |= _totals(await store.load_window(db, young, until, now=now))
        return [used, early, recent]


def _early(
    steps: store.Steps, tenants: Iterable[str], created: Mapping[str, datetime], stride: datetime, begin: datetime
) -> store.HourTotals:
    """The part to subtract: the use in the stride before the window begins, as negative numbers."""
    found: store.HourTotals = {}
    for tenant in tenants:
        since, end = int(max(stride, created.get(tenant, stride)).timestamp()), int(begin.timestamp())
        found[tenant] = {name: -used_by_steps(some, since, end) for name, some in steps.get(tenant, {}).items()}
    return found


def _totals(windows: store.Windows) -> store.HourTotals:
    found: store.HourTotals = {}
    for tenant, used in windows.items():
        totals = found[tenant] = defaultdict(int)
        for (resource, _), one in used.items():
            totals[resource] += one.total
    return found


async def load_budgets(
    db: Connection, tree: Tree, now: datetime | None = None, *, past: Past | None = None
) -> dict[str, BudgetUse]:
    """The use of every tenant that has a budget, over the window in the settings, to the second. A caller that keeps
    `past` saves summing up past days again."""
    now = now or datetime.now(UTC)
    budgeted = await load_budgeted(db)
    below = {name: subtree(tree, name) for name in budgeted if name in tree.tenants}
    if not below:
        return {}
    begin = _floor(now - timedelta(days=await load_budget_days(db)), 1)
    tenants = {one for names in below.values() for one in names}
    async with db.transaction(isolation="repeatable_read", readonly=True):
        parts = await (past or Past()).load(db, tenants, begin, now)
    left = await budget_store.load_remaining(db, below)
    counted = {name: _use(part[one] for one in names for part in parts) for name, names in below.items()}
    return {name: believed(use, budgeted[name], left.get(name)) for name, use in counted.items()}


def believed(counted: BudgetUse, budget: TenantShare, left: Remaining | None) -> BudgetUse:
    """The external budget system's figures while they are fresh, else the figures counted here."""
    if left is None:
        return counted
    gpu, node = budget.gpu_hours_budget, budget.node_hours_budget
    return BudgetUse(
        hours_used(counted.gpu_hours, gpu, left.gpu_hours),
        hours_used(counted.node_hours, node, left.node_hours),
        source_of(left, gpu, node),
    )


async def load_budgeted(db: Connection) -> dict[str, TenantShare]:
    """The tenants that have a budget, with their share."""
    shares = {name: tenant_share_of(doc) for name, doc in (await store.load_tenants(db)).items()}
    return {name: share for name, share in shares.items() if share.has_budget}


async def load_budget_days(db: Connection) -> int:
    settings = await object_store.get(db, SETTINGS_KEY)
    return budget_period_days_of(settings.doc) if settings is not None else BUDGET_PERIOD_DAYS


async def load_record_days(db: Connection) -> int:
    settings = await object_store.get(db, SETTINGS_KEY)
    return record_days_of(settings.doc) if settings is not None else RECORD_DAYS


def _use(parts: Iterable[Mapping[str, int]]) -> BudgetUse:
    totals: dict[str, int] = defaultdict(int)
    for one in parts:
        for resource, total in one.items():
            totals[resource] += total
    return BudgetUse(hours(gpus_in(totals)), hours(totals[NODES]))
