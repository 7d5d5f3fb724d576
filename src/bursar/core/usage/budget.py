"""Budgets of GPU-hours and node-hours: the used fraction, the penalty on the priority score, and the alerts.

A budget never refuses or stops work. It lowers the score, so that a tenant with an exhausted budget still runs on
capacity that nobody else wants. Its users get a notification when the budget is nearly used up, and when it is.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from msgspec import Struct

from bursar.core.usage.external_budget import INTERNAL
from bursar.core.values.wording import counted

PENALTY_FROM: Final = 0.8  # no penalty up to this fraction
PENALTY_FLOOR: Final = 0.05  # the factor at an exhausted budget

EXHAUSTED_FROM: Final = 1.0
# Hysteresis: usage must fall this far below a mark before the state is restored, because the rolling window moves it up
# and down.
SLACK: Final = 0.02


def penalty(used_fraction: float) -> float:
    """The factor of the score: 1 up to 80 % of the budget, then half a cosine down to 0.05 at 100 % and beyond.

    A fraction that is NaN counts as 0: a missing figure has no penalty.
    """
    if math.isnan(used_fraction) or used_fraction <= PENALTY_FROM:
        return 1.0
    if used_fraction >= 1.0:
        return PENALTY_FLOOR
    fallen = (used_fraction - PENALTY_FROM) / (1.0 - PENALTY_FROM)
    return PENALTY_FLOOR + (1.0 - PENALTY_FLOOR) * (1.0 + math.cos(math.pi * fallen)) / 2.0


def used_fraction(gpu_hours: float, gpu_budget: float | None, node_hours: float, node_budget: float | None) -> float:
    """The higher of the used fractions of the GPU-hour and node-hour budgets; a budget that is not set counts as 0."""
    return max(_used(gpu_hours, gpu_budget), _used(node_hours, node_budget))


def _used(hours: float, budget: float | None) -> float:
    """The used fraction of one budget. A budget of 0 is always exhausted; negative hours and NaN count as 0."""
    if budget is None or math.isnan(budget):
        return 0.0
    spent = max(0.0, hours)
    return spent / budget if budget > 0.0 else max(1.0, spent)


# The state of a tenant's budgets, and its notifications.


class BudgetState(StrEnum):
    """The state of a tenant's budgets, from the best to the worst."""

    WITHIN = "Within"  # less than 80 % is used
    WARNING = "Warning"  # 80 % or more is used, and the score is lowered
    EXHAUSTED = "Exhausted"  # the whole budget is used


class BudgetNews(StrEnum):
    """The type of a notification about a budget."""

    WARNING = "budget.warning"  # 80 % of the budget is used
    EXHAUSTED = "budget.exhausted"  # the budget is used up
    RESTORED = "budget.restored"  # usage fell below 80 % of the budget again


def next_state(used_fraction: float, before: BudgetState) -> BudgetState:
    """The state after a change of usage: a warning from 80 %, exhausted from 100 %, restored only well below."""
    if _has_reached(used_fraction, EXHAUSTED_FROM, before=before is BudgetState.EXHAUSTED):
        return BudgetState.EXHAUSTED
    if _has_reached(used_fraction, PENALTY_FROM, before=before is not BudgetState.WITHIN):
        return BudgetState.WARNING
    return BudgetState.WITHIN


def _has_reached(used_fraction: float, mark: float, *, before: bool) -> bool:
    return used_fraction >= mark or (before and used_fraction > mark - SLACK)


def news(before: BudgetState, after: BudgetState) -> BudgetNews | None:
    """The notification of a change of state. From exhausted to warning there is none."""
    if after is before:
        return None
    if after is BudgetState.EXHAUSTED:
        return BudgetNews.EXHAUSTED
    if after is BudgetState.WITHIN:
        return BudgetNews.RESTORED
    return BudgetNews.WARNING if before is BudgetState.WITHIN else None


class BudgetHours(Struct, frozen=True):
    """The hours that a tenant and its subtree have used of its budgets; a budget that it does not have is None."""

    gpu_hours: float
    gpu_budget: float | None
    node_hours: float
    node_budget: float | None
    days: int  # of the window
    source: str = INTERNAL

    @property
    def fraction(self) -> float:
        return used_fraction(self.gpu_hours, self.gpu_budget, self.node_hours, self.node_budget)

    @property
    def has_budget(self) -> bool:
        return self.gpu_budget is not None or self.node_budget is not None


def budget_message(hours: BudgetHours, state: BudgetState) -> str:
    """The message of a notification, with the numbers of the budget that is used more."""
    if not hours.has_budget:
        return "the tenant no longer has a budget of hours"
    nodes_lead = _used(hours.node_hours, hours.node_budget) > _used(hours.gpu_hours, hours.gpu_budget)
    what, used, budget = (
        ("node-hours", hours.node_hours, hours.node_budget)
        if nodes_lead or hours.gpu_budget is None
        else ("GPU-hours", hours.gpu_hours, hours.gpu_budget)
    )
    since = f"in the last {counted(hours.days, 'day')}" if hours.source == INTERNAL else f"according to {hours.source}"
    numbers = f"{used:,.1f} of {budget:,.10g} {what} {since}"
    if state is BudgetState.EXHAUSTED:
        return f"the budget is used up: {numbers}. Running work continues; new work runs on capacity nobody else wants"
    share = math.floor(min(hours.fraction, 10.0) * 100)
    return f"{share} % of the budget is used: {numbers}"
