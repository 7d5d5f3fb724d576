"""Budgets: how much of a tenant's hours is used, and what that does to its place in the order.

A budget never refuses and never stops anything. It only lowers a score, gently at first, so that a tenant which has
used up its hours still runs when nobody else wants the room.
"""

from __future__ import annotations

import math
from typing import Final

PENALTY_FROM: Final = 0.8  # up to here a budget changes nothing
PENALTY_FLOOR: Final = 0.05  # what is left of a score when the budget is used up


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
