"""Budget alerts: a tenant's budget of hours is nearly used, used up, or available again.

An alert is written to the tenant's status, where it can be watched; to the feed, from which Events are served; and as a
notice to its webhooks. All of that is one transaction, decided under the tenant's lock against its stored status, so
concurrent controllers report a crossing only once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import set_condition, status_of, unchanged
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
    budget_message,
    news,
    next_state,
)
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.tenant import BUDGET_EXHAUSTED, BUDGET_FIELD, BUDGET_WARNING, TENANT
from bursar.wire.shared.document import encode
from bursar.wire.to_scheduler.ask import tenant_share_of

BUDGETS: Final = "system:budgets"  # the actor in the audit log

# The verbs in the audit log and in Events.
VERBS: Final = {BudgetState.WITHIN: "restore", BudgetState.WARNING: "warn", BudgetState.EXHAUSTED: "exhaust"}
# The used fraction of the budget that raises each alert; a restored budget has no threshold of its own.
THRESHOLDS: Final = {BudgetNews.WARNING: PENALTY_FROM, BudgetNews.EXHAUSTED: EXHAUSTED_FROM, BudgetNews.RESTORED: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn(Command):
    """Report the state of a tenant's budget, if that has changed.

    The hours were read without a lock; the budget is the stored one, so that a budget raised in between is not reported
    as used up.
    """

    uid: str
    gpu_hours: float
    node_hours: float
    days: int
    source: str  # the source of the figures

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.uid != self.uid:
            return Refusal(Code.STALE, f"tenant {self.key.name} was deleted and created again")
        hours, was = self.hours(before), state_of(before)
        state = next_state(hours.fraction, was)
        if state is was:
            return unchanged(before)
        message = budget_message(hours, state)
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
    return Key(TENANT.name, "", name)


def state_of(tenant: Stored) -> BudgetState:
    """The budget state in a tenant's status."""
    return BudgetState(tenant.fields.get(BUDGET_FIELD, BudgetState.WITHIN))


def with_budget_state(tenant: Stored, state: BudgetState, message: str, at: str) -> Stored:
    """The tenant with this budget state in its status."""
    status = status_of(tenant)
    warned, exhausted = state is not BudgetState.WITHIN, state is BudgetState.EXHAUSTED
    for name, holds, yes, no in (
        (BUDGET_WARNING, warned, "BudgetUsedUp" if exhausted else "BudgetNearlyUsed", "BudgetHasRoom"),
        (BUDGET_EXHAUSTED, exhausted, "BudgetUsedUp", "BudgetNotUsedUp"),
    ):
        set_condition(status, name, str(holds), yes if holds else no, message, at)
    return replace(tenant, status=encode(status), fields={**tenant.fields, BUDGET_FIELD: str(state)})
