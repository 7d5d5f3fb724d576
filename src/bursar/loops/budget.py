"""Budget alerts: the leader compares tenants' used hours with their budgets now and then, and alerts their admins.

The alert itself is decided under the tenant's lock (`commands/usage/budget_alert.py`), so looking too often, or in two
processes at once, does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from bursar.commands.command import DEPOSED
from bursar.commands.usage.budget_alert import BUDGETS, Warn, state_of, tenant_key
from bursar.core.objects.object import Origin, Stored
from bursar.core.usage.budget import BudgetState, next_state
from bursar.core.values.refusal import Refusal
from bursar.core.values.selector import Op, Selector, SelectorTerm
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import BudgetUse, load_budget_days, load_budgets
from bursar.store.db.database import AWAY, RACES
from bursar.store.objects import listing
from bursar.store.objects import object as object_store
from bursar.store.objects.listing import Query
from bursar.wire.kinds.tenant import BUDGET_FIELD
from bursar.wire.to_scheduler.ask import tenant_share_of

log = structlog.get_logger()

REVIEW_SECONDS = 10.0
AT_ONCE = 200  # a changed window may alert every tenant at once; other commands use the same lane

REVIEWING = Origin(BUDGETS, "review")
# Tenants with an alert: it is cleared when they are below the marks, or have no budget any more.
_TOLD = Selector((SelectorTerm(BUDGET_FIELD, Op.IN, tuple(sorted((BudgetState.WARNING, BudgetState.EXHAUSTED)))),))


async def run_budgets(runtime: Runtime, fence: int) -> None:
    """Review budgets while this process leads; wait while the database is away."""
    while True:
        try:
            await review(runtime, fence)
        except (*AWAY, *RACES) as error:
            log.info("budgets_wait", message="the review of budgets waits for the database", error=repr(error))
        except Exception:
            log.exception("budgets_failed", message="the review of budgets failed and is tried again")
        await asyncio.sleep(REVIEW_SECONDS)


async def review(runtime: Runtime, fence: int | None = None) -> int:
    """Alert the tenants whose budget passed a mark since the last alert; return their number."""
    found = await _load(runtime)
    commands = [
        command
        for name, tenant in sorted(found.tenants.items())
        if _is_known(tenant, found.used)
        and _is_news(command := _command(tenant, found.used.get(name, BudgetUse()), found.days, fence), tenant)
    ]
    changed = 0
    for at in range(0, len(commands), AT_ONCE):
        # A change of an alert takes the tree's lock in shared mode, so no other writer waits for it.
        replies = await asyncio.gather(
            *(runtime.changing.submit(one, one.key.name) for one in commands[at : at + AT_ONCE])
        )
        if DEPOSED in replies:
            log.info("budgets_deposed", message="another controller leads and reports on budgets")
            break
        changed += sum(not isinstance(reply, Refusal) for reply in replies)
    return changed


@dataclass(frozen=True, slots=True)
class _Found:
    tenants: Mapping[str, Stored]
    used: Mapping[str, BudgetUse]
    days: int


async def _load(runtime: Runtime) -> _Found:
    async with runtime.database.reader() as db:
        tree = await runtime.trees.refresh(db)
        used, days = await load_budgets(db, tree, past=runtime.past_hours), await load_budget_days(db)
        told = (await listing.load_page(db, Query("Tenant", fields=_TOLD))).items
        tenants = await object_store.load(db, {tenant_key(name) for name in {*used, *(one.name for one in told)}})
    return _Found({key.name: one for key, one in tenants.items()}, used, days)


def _command(tenant: Stored, use: BudgetUse, days: int, fence: int | None) -> Warn:
    return Warn(
        key=tenant.key, origin=REVIEWING, fence=fence, uid=tenant.uid, gpu_hours=use.gpu_hours,
        node_hours=use.node_hours, days=days, source=use.source,
    )  # fmt: skip


def _is_news(command: Warn, tenant: Stored) -> bool:
    """Whether the budget state changes, checked without a lock, because it rarely does."""
    before = state_of(tenant)
    return next_state(command.hours(tenant).fraction, before) is not before


def _is_known(tenant: Stored, used: Mapping[str, BudgetUse]) -> bool:
    """Whether its used hours are known; a tenant without a budget needs none."""
    return tenant.key.name in used or not tenant_share_of(tenant.doc).has_budget
