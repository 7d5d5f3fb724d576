"""Entering hours in buckets, and what tenants have used of their budgets.

Any number of controllers may enter: one does at a time, and each time in one transaction, from taking steps to adding
buckets. Whoever is killed in between has done nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from bursar.core.batch.placement_billing import gpus_in
from bursar.core.objects.object import Key
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
from bursar.wire.kinds.settings import BUDGET_PERIOD_DAYS, RECORD_DAYS, SYSTEM, budget_period_days_of, record_days_of
from bursar.wire.to_scheduler.ask import TenantShare, tenant_share_of

STEPS_MAX = 20_000  # entered at a time
LEVELS_MAX = 2_000
DAY_AT_MOST = timedelta(days=1)  # after a long time away, what there is to enter is still bounded
STRIDE = 600  # seconds for which what was added up is kept while the window of budgets moves on; a part of an hour
CLOCKS_APART = timedelta(hours=1)  # at most
LAG_SECONDS = 2  # what happens now is not entered yet: others may have more to say about this second


async def roll(database: Database, until: datetime | None = None, *, steps_max: int = STEPS_MAX) -> int:
    """Enter what happened until then in buckets, at most a day's at a time; how many steps and levels that were. None:
    all is entered, or somebody else is at it. What is entered stays, so of two clocks the one behind counts."""
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
        # All that came before the hour's end is entered: what goes on is as well, up to there.
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
    """What a tenant and those below it used in the budget's window, and who says so."""

    gpu_hours: float = 0.0
    node_hours: float = 0.0
    source: str = "internal"


class Past(Struct):
    """What tenants used until a day that is over, kept in a process for all who ask for budgets.

    That is nearly all of it, and changes hardly ever: it is added up anew when the window's begin has come to another
    stride, or when something was entered for days that are over. It is added up from where the stride begins; what was
    used from there until the window begins is known to the second from the steps within the stride, and taken off.
    """

    key: object = None  # what it was added up for
    used: store.HourTotals = {}
    steps: store.Steps = {}  # within the stride

    async def load(
        self, db: Connection, tenants: Iterable[str], begin: datetime, now: datetime
    ) -> Sequence[store.HourTotals]:
        """What tenants used in a window until now, to the second, in parts that are to be added up. Call it in a
        snapshot: what is added up and what is taken off must be of one moment."""
        # Clocks of those who enter may be a little behind ours.
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
        # Somebody may have had the name of a young one earlier that day.
        young = {name for name, at in created.items() if at > until}
        recent = await store.load_days_window(db, [name for name in names if name not in young], until, now)
        if young:
            recent |= _totals(await store.load_window(db, young, until, now=now))
        return [used, early, recent]


def _early(
    steps: store.Steps, tenants: Iterable[str], created: Mapping[str, datetime], stride: datetime, begin: datetime
) -> store.HourTotals:
    """What is to be taken off: what was used before the window begins, by those that there were."""
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
    """Of the tenants that have a budget, over the window that the settings say, to the second. What was added up for
    one moment serves for the next ones as well: for those who keep it."""
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
    """What whoever keeps the budgets says, while that is fresh, else what was counted here."""
    if left is None:
        return counted
    gpu, node = budget.gpu_hours_budget, budget.node_hours_budget
    return BudgetUse(
        hours_used(counted.gpu_hours, gpu, left.gpu_hours),
        hours_used(counted.node_hours, node, left.node_hours),
        source_of(left, gpu, node),
    )


async def load_budgeted(db: Connection) -> dict[str, TenantShare]:
    """The tenants that have a budget, and in it how much."""
    shares = {name: tenant_share_of(doc) for name, doc in (await store.load_tenants(db)).items()}
    return {name: share for name, share in shares.items() if share.has_budget}


async def load_budget_days(db: Connection) -> int:
    settings = await object_store.get(db, Key("Settings", "", SYSTEM))
    return budget_period_days_of(settings.doc) if settings is not None else BUDGET_PERIOD_DAYS


async def load_record_days(db: Connection) -> int:
    settings = await object_store.get(db, Key("Settings", "", SYSTEM))
    return record_days_of(settings.doc) if settings is not None else RECORD_DAYS


def _use(parts: Iterable[Mapping[str, int]]) -> BudgetUse:
    totals: dict[str, int] = defaultdict(int)
    for one in parts:
        for resource, total in one.items():
            totals[resource] += total
    return BudgetUse(hours(gpus_in(totals)), hours(totals[NODES]))
