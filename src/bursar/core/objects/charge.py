"""Charges: the exact amounts per dimension that an object adds to quota counters, and the facts for quota scopes.

The charge is stored with the object, so that a release subtracts exactly what was added, whatever has been edited
since. The facts and the tenant tree determine the counters. A change of the tree recomputes the counters of all
charges, so the two always agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Amounts = Mapping[str, int]  # dimension → amount, in the dimension's unit


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of an object that the scopes of a ResourceQuota match."""

    scoped: bool = False
    terminating: bool = False
    best_effort: bool = False
    priority_class: str = ""
    priority: int | None = None  # if the object names a number and no class


@dataclass(frozen=True, slots=True)
class Charge:
    """The amounts that an object adds to quota counters: `accepted` from its creation, `bound` from its placement.

    A gang is charged as a whole: until it is complete, the amounts of a member are `due` and count nowhere.
    """

    facts: Facts = Facts()
    accepted: Amounts = field(default_factory=dict)
    bound: Amounts = field(default_factory=dict)
    due: Amounts = field(default_factory=dict)
    # A cache of derived values, shared by all work of one template.
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def dimensions(self) -> frozenset[str]:
        return frozenset(self.accepted) | frozenset(self.bound)

    @property
    def empty(self) -> bool:
        return not any(self.accepted.values()) and not any(self.bound.values())


NOTHING = Charge()


def deferred(charge: Charge) -> Charge:
    """The charge of a member whose gang is not complete yet."""
    return replace(charge, accepted={}, due=charge.accepted)


def fallen_due(charge: Charge) -> Charge:
    """The charge of a member once its gang is complete."""
    return replace(charge, accepted=charge.due, due={}) if charge.due else charge


def unbound(charge: Charge) -> Charge:
    """The charge of evicted work that is pending again."""
    return replace(charge, bound={})
