"""Telling a tenant's people that its budget of hours is nearly used, or used up, or that it has room again.

It stands in the tenant's status, where it can be watched; it is in the feed, which Events are served from; and it is a
notice for whoever asked for them. All of that is one transaction, decided under the tenant's lock from what its status
says already: so a crossing is told once, however many look.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.charge import Charge
from bursar.core.objects.notification import Notification
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.usage.budget import (
    EXHAUSTED_FROM,
    PENALTY_FROM,
    BudgetHours,
    BudgetNews,
    BudgetState,
    news,
    next_state,
    told,
)
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import not_found
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Command, Reply, Result
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import set_condition, status_of, unchanged
from bursar.wire.kinds.tenant import BUDGET_EXHAUSTED, BUDGET_FIELD, BUDGET_WARNING
from bursar.wire.shared.document import encode
from bursar.wire.to_scheduler.ask import tenant_share_of

BUDGETS: Final = "system:budgets"  # who tells it, in the audit log

# What was done, as the audit log and Events have it.
VERBS: Final = {BudgetState.WITHIN: "restore", BudgetState.WARNING: "warn", BudgetState.EXHAUSTED: "exhaust"}
# From how much of the budget on it is told; that it has room again has no mark of its own.
THRESHOLDS: Final = {BudgetNews.WARNING: PENALTY_FROM, BudgetNews.EXHAUSTED: EXHAUSTED_FROM, BudgetNews.RESTORED: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn(Command):
    """Say how a tenant stands with its budget, where that is news.

    The hours are what was read without a lock; the budget is the one that stands, so that one which was raised in
    between is not told to be used up.
    """

    uid: str
    gpu_hours: float
    node_hours: float
    days: int
    source: str  # where the figures come from

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.uid != self.uid:
            return Refusal(Code.STALE, f"tenant {self.key.name} is another one now")
        hours, was = self.hours(before), state_of(before)
        state = next_state(hours.fraction, was)
        if state is was:
            return unchanged(before)
        message = told(hours, state)
        if (what := news(was, state)) is not None:
            batch.notifications.append(
                Notification(what, self.key.name, self.key.name, encode(self._data(hours, what, message)))
            )
        origin = Origin(self.origin.actor, VERBS[state], message)
        return batch.put(with_budget_state(before, state, message, timestamp(batch.now)), origin)

    def hours(self, tenant: Stored) -> BudgetHours:
        budget = tenant_share_of(tenant.doc)
        return BudgetHours(
            self.gpu_hours, budget.gpu_hours_budget, self.node_hours, budget.node_hours_budget, self.days, self.source
        )

    def _data(self, hours: BudgetHours, what: BudgetNews, message: str) -> dict[str, Any]:
        return {
            "tenant": self.key.name,
            "threshold": THRESHOLDS[what],
            "utilization": round(hours.fraction, 4),
            "gpu_hours_used": round(hours.gpu_hours, 4),
            "gpu_hours_budget": hours.gpu_budget,
            "node_hours_used": round(hours.node_hours, 4),
            "node_hours_budget": hours.node_budget,
            "budget_period_days": hours.days,
            "source": self.source,
            "message": message,
        }


def tenant_key(name: str) -> Key:
    return Key("Tenant", "", name)


def state_of(tenant: Stored) -> BudgetState:
    """As its status says."""
    return BudgetState(tenant.fields.get(BUDGET_FIELD, BudgetState.WITHIN))


def with_budget_state(tenant: Stored, state: BudgetState, message: str, at: str) -> Stored:
    """The tenant with this said of its budget in its status."""
    status = status_of(tenant)
    warned, exhausted = state is not BudgetState.WITHIN, state is BudgetState.EXHAUSTED
    for name, holds, yes, no in (
        (BUDGET_WARNING, warned, "BudgetUsedUp" if exhausted else "BudgetNearlyUsed", "BudgetHasRoom"),
        (BUDGET_EXHAUSTED, exhausted, "BudgetUsedUp", "BudgetNotUsedUp"),
    ):
        set_condition(status, name, str(holds), yes if holds else no, message, at)
    return replace(tenant, status=encode(status), fields={**tenant.fields, BUDGET_FIELD: str(state)})


async def warn(runtime: Runtime, command: Warn) -> Reply:
    """It holds the tree as it is, and changes nothing of it: no other writer waits for it."""
    return await runtime.changing.submit(command, command.key.name)
