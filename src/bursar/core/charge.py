"""What an object holds: exact amounts per dimension, and the facts by which quotas recognise it.

The charge is stored with the object, so that giving back returns exactly what was taken, whatever has been edited
since. Which counters were raised follows from the facts and the tree; the tree cannot change under a charge without
recomputing its counters, so the two always agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Amounts = Mapping[str, int]  # dimension → amount, in the dimension's unit


@dataclass(frozen=True, slots=True)
class Facts:
    """What scopes of a ResourceQuota may ask about."""

    scoped: bool = False
    terminating: bool = False
    best_effort: bool = False
    priority_class: str = ""


@dataclass(frozen=True, slots=True)
class Charge:
    """`accepted` from the moment the object is let in; `bound` from the moment it is placed."""

    facts: Facts = Facts()
    accepted: Amounts = field(default_factory=dict)
    bound: Amounts = field(default_factory=dict)

    @property
    def dimensions(self) -> frozenset[str]:
        return frozenset(self.accepted) | frozenset(self.bound)

    @property
    def empty(self) -> bool:
        return not any(self.accepted.values()) and not any(self.bound.values())


NOTHING = Charge()


def plus(left: Amounts, right: Amounts) -> dict[str, int]:
    total = dict(left)
    for dimension, amount in right.items():
        total[dimension] = total.get(dimension, 0) + amount
    return total


def times(amounts: Amounts, factor: int) -> dict[str, int]:
    return {dimension: amount * factor for dimension, amount in amounts.items()}
