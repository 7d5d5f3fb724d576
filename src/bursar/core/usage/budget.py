"""Budgets: how much of a tenant's hours is used, and what that does to its place in the order.

A budget never refuses and never stops anything. It only lowers a score, gently at first, so that a tenant which has
used up its hours still runs when nobody else wants the room. Its people are told when it comes near the end, and when
it is there.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from msgspec import Struct

from bursar.core.usage.external_budget import INTERNAL
from bursar.core.values.wording import counted

PENALTY_FROM: Final = 0.8  # up to here a budget changes nothing
PENALTY_FLOOR: Final = 0.05  # what is left of a score when the budget is used up

EXHAUSTED_FROM: Final = 1.0
# So far must use fall below a mark before what was told there is taken back: it moves up and down by a little as the
# window moves on, and nobody wants to hear of that each time.
SLACK: Final = 0.02


def penalty(used_fraction: float) -> float:
    """What a score is multiplied with: 1 up to 80 % of the budget, down half a cosine to 0.05 at 100 %, and no further.

    A fraction that is no number counts as nothing used: a figure that is missing punishes nobody.
    """
    if math.isnan(used_fraction) or used_fraction <= PENALTY_FROM:
        return 1.0
    if used_fraction >= 1.0:
        return PENALTY_FLOOR
    fallen = (used_fraction - PENALTY_FROM) / (1.0 - PENALTY_FROM)
    return PENALTY_FLOOR + (1.0 - PENALTY_FLOOR) * (1.0 + math.cos(math.pi * fallen)) / 2.0


def used_fraction(gpu_hours: float, gpu_budget: float | None, node_hours: float, node_budget: float | None) -> float:
    """The worse of GPU-hours and node-hours used over their budgets; a budget that is not set is never used up."""
    return max(_used(gpu_hours, gpu_budget), _used(node_hours, node_budget))


def _used(hours: float, budget: float | None) -> float:
    """A budget of zero is used up before the first hour; hours below zero, or no number, count as none."""
    if budget is None or math.isnan(budget):
        return 0.0
    spent = max(0.0, hours)
    return spent / budget if budget > 0.0 else max(1.0, spent)


# How a tenant stands with its budget.


class BudgetState(StrEnum):
    """In order: each is worse than the one before."""

    WITHIN = "Within"
    WARNING = "Warning"
    EXHAUSTED = "Exhausted"


class BudgetNews(StrEnum):
    """What people are told of a budget, as notices call it."""

    WARNING = "budget.warning"
    EXHAUSTED = "budget.exhausted"
    RESTORED = "budget.restored"


def next_state(used_fraction: float, before: BudgetState) -> BudgetState:
    """Warned of from 80 % on, exhausted from 100 % on; what was told is taken back only well below that."""
    if _has_reached(used_fraction, EXHAUSTED_FROM, told=before is BudgetState.EXHAUSTED):
        return BudgetState.EXHAUSTED
    if _has_reached(used_fraction, PENALTY_FROM, told=before is not BudgetState.WITHIN):
        return BudgetState.WARNING
    return BudgetState.WITHIN


def _has_reached(used_fraction: float, mark: float, *, told: bool) -> bool:
    return used_fraction >= mark or (told and used_fraction > mark - SLACK)


def news(before: BudgetState, after: BudgetState) -> BudgetNews | None:
    """What people are told when it changed. That it is no longer exhausted, but still nearly so, is news to nobody."""
    if after is before:
        return None
    if after is BudgetState.EXHAUSTED:
        return BudgetNews.EXHAUSTED
    if after is BudgetState.WITHIN:
        return BudgetNews.RESTORED
    return BudgetNews.WARNING if before is BudgetState.WITHIN else None


class BudgetHours(Struct, frozen=True):
    """What a tenant and those below it have used of its budgets; None where it has none."""

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


def told(hours: BudgetHours, state: BudgetState) -> str:
    """How it stands, in words and with the numbers that say so: those of the budget that is used more."""
    if not hours.has_budget:
        return "it has no budget of hours any more"
    nodes_lead = _used(hours.node_hours, hours.node_budget) > _used(hours.gpu_hours, hours.gpu_budget)
    what, used, budget = (
        ("node-hours", hours.node_hours, hours.node_budget)
        if nodes_lead or hours.gpu_budget is None
        else ("GPU-hours", hours.gpu_hours, hours.gpu_budget)
    )
    since = f"in the last {counted(hours.days, 'day')}" if hours.source == INTERNAL else f"as {hours.source} has it"
    numbers = f"{used:,.1f} of {budget:,.10g} {what} {since}"
    if state is BudgetState.EXHAUSTED:
        return f"the budget is used up: {numbers}. New work runs when nobody else wants the room; what runs goes on"
    share = math.floor(min(hours.fraction, 10.0) * 100)
    return f"{share} % of the budget is used: {numbers}"
