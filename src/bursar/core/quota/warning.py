"""Warnings about limits: the marks at which a tenant is warned, the highest one reached, and the message.

A warning never refuses anything. It is withdrawn only when usage is clearly below its mark, so that work that starts
and ends around the mark does not repeat it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bursar.core.quota.quota_messages import dimension_label
from bursar.core.quota.tenant_tree import Tree
from bursar.core.quota.units import EVERY_DIMENSION
from bursar.core.values.quantity import UNLIMITED, format_amount

# Hysteresis: usage must fall this many percentage points below a mark before its warning is withdrawn.
SLACK: Final = 2


class QuotaNews(StrEnum):
    """The type of a notification about limits."""

    WARNING = "quota.warning"  # usage has reached a mark


def marks_of(tree: Tree, tenant: str, dimension: str) -> tuple[int, ...]:
    """The percentages of a limit at which to warn: by the tenant, else its tier, else the settings. Each may name the
    dimension, or all that it does not name."""
    owner = tree.tenants[tenant]
    tier = tree.tiers.get(owner.tier)
    for said in (owner.warn_at, tier.warn_at if tier is not None else None, tree.quota_policy.warn_at):
        if said is not None and (marks := said.get(dimension, said.get(EVERY_DIMENSION))) is not None:
            return marks
    return ()


def reached(used: int, limit: int, marks: tuple[int, ...], before: int = 0) -> int:
    """The highest mark that usage has reached, given the mark that was reported before; 0 for none."""
    if limit == UNLIMITED:
        return 0
    if limit == 0:
        return max(marks, default=0) if used else 0
    slack = {mark: SLACK if mark <= before else 0 for mark in marks}
    return max((mark for mark in marks if _is_at(used, limit, mark, slack[mark])), default=0)


def _is_at(used: int, limit: int, mark: int, slack: int) -> bool:
    return used * 100 > (mark - slack) * limit if slack else used * 100 >= mark * limit


def warning_message(dimension: str, used: int, limit: int) -> str:
    """The message of a warning, with the numbers."""
    share = f"{used * 100 // limit} % of" if limit else "more than"
    numbers = f"{format_amount(dimension, used)} of {format_amount(dimension, limit)}"
    return f"{share} the limit on {dimension_label(dimension)} is used: {numbers}"
