"""External budgets: remaining hours reported by another system, such as a marketplace, converted to used hours.

If another system keeps the hours of a contract, its figure takes precedence while it is fresh: it includes usage in
other places, and knows the period. Budgets that it does not report are counted by Bursar.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

INTERNAL: Final = "internal"  # the source of figures that Bursar counted


class Remaining(Struct, frozen=True):
    """The remaining hours of a tenant's budgets according to a source; None for a budget that it does not report."""

    gpu_hours: float | None = None
    node_hours: float | None = None
    source: str = ""


def hours_used(counted: float, budget: float | None, left: float | None) -> float:
    """The used hours of a budget: the budget minus the reported remainder, else the hours that Bursar counted.

    A remainder above the budget counts as no use. Without a budget, or with a remainder that is not finite, the counted
    hours apply.
    """
    if budget is None or left is None or not math.isfinite(left):
        return counted
    return max(0.0, budget - left)


def source_of(remaining: Remaining | None, gpu_budget: float | None, node_budget: float | None) -> str:
    """The source of a tenant's used hours: the external one if it reports at least one of its budgets."""
    if remaining is None:
        return INTERNAL
    reported = ((gpu_budget, remaining.gpu_hours), (node_budget, remaining.node_hours))
    external = any(budget is not None and left is not None and math.isfinite(left) for budget, left in reported)
    return remaining.source if external else INTERNAL
