"""What an object holds: exact amounts per dimension, and the facts by which quotas recognise it.

The charge is stored with the object, so that giving back returns exactly what was taken, whatever has been edited
since. Which counters were raised follows from the facts and the tree; the tree cannot change under a charge without
recomputing its counters, so the two always agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Amounts = Mapping[str, int]  # dimension → amount, in the dimension's unit


@dataclass(frozen=True, slots=True)
class Facts:
    """What scopes of a ResourceQuota may ask about."""

    scoped: bool = False
    terminating: bool = False
    best_effort: bool = False
    priority_class: str = ""
    priority: int | None = None  # where it is given as a number


@dataclass(frozen=True, slots=True)
class Charge:
    """`accepted` from the moment the object is let in; `bound` from the moment it is placed.

    A gang is charged as a set: until it is complete, what a member will be charged is `due`, and counts nowhere.
    """

    facts: Facts = Facts()
    accepted: Amounts = field(default_factory=dict)
    bound: Amounts = field(default_factory=dict)
    due: Amounts = field(default_factory=dict)
    # What was worked out from it before. Work of one template shares one charge, so it is worked out once for all.
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def dimensions(self) -> frozenset[str]:
        return frozenset(self.accepted) | frozenset(self.bound)

    @property
    def empty(self) -> bool:
        return not any(self.accepted.values()) and not any(self.bound.values())


NOTHING = Charge()


def deferred(charge: Charge) -> Charge:
    return replace(charge, accepted={}, due=charge.accepted)


def fallen_due(charge: Charge) -> Charge:
    return replace(charge, accepted=charge.due, due={}) if charge.due else charge


def unbound(charge: Charge) -> Charge:
    """What a stopped object keeps when it waits to run again."""
    return replace(charge, bound={})
