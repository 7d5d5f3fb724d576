"""What somebody else says is left of a tenant's budgets, and how that becomes hours used.

Where a contract's hours are kept elsewhere, that figure is the one that counts for as long as it is fresh: it knows
what was used in other places and when its period began. What it does not say is counted here, as always.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

INTERNAL: Final = "internal"  # the source of a figure that was counted here


class Remaining(Struct, frozen=True):
    """Hours left of a tenant's budgets, by a source; None where it says nothing of that budget."""

    gpu_hours: float | None = None
    node_hours: float | None = None
    source: str = ""


def hours_used(counted: float, budget: float | None, left: float | None) -> float:
    """How much of a budget counts as used: all of it but what is said to be left, else what was counted here.

    So nothing left is a budget used up, whatever the budget is; more left than the budget is nothing used. Without a
    budget, or with a figure that is no number, what was counted stands.
    """
    if budget is None or left is None or not math.isfinite(left):
        return counted
    return max(0.0, budget - left)


def source_of(remaining: Remaining | None, gpu_budget: float | None, node_budget: float | None) -> str:
    """Whose figure the use of a tenant's budgets is: another's as soon as one of them is said by it."""
    if remaining is None:
        return INTERNAL
    said = ((gpu_budget, remaining.gpu_hours), (node_budget, remaining.node_hours))
    believed = any(budget is not None and left is not None and math.isfinite(left) for budget, left in said)
    return remaining.source if believed else INTERNAL
