"""Quota arithmetic: counters of used amounts against hard limits, in every scope that an object charges.

A counter is one row of (scope, dimension). Only increases are checked: after a limit was lowered, usage may exceed it
and running work continues; it just may not grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from bursar.core.objects.approval import PENDING_REQUESTS
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.quota.tenant_tree import (
    SYSTEM_SCOPE,
    Enforcement,
    PriorityClass,
    ResourceQuota,
    Row,
    Tree,
    children_of,
    enforcement_of,
    hard_of,
    limits_of,
    lineage,
    matches,
    namespace_scope,
    rows_of,
    soft_of,
    tenant_scope,
    uncovered,
)
from bursar.core.values.quantity import AMOUNT_MAX, UNLIMITED


@dataclass(frozen=True, slots=True)
class Counter:
    """The limits and the used amounts of one (scope, dimension)."""

    hard: int = UNLIMITED
    soft: int | None = None
    accepted: int = 0
    bound: int = 0


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A hard limit that a request would exceed, with the numbers."""

    scope: str
    dimension: str
    limit: int
    used: int
    requested: int


class Move(Struct, frozen=True):
    """The change of an object's charge by a command."""

    namespace: str
    before: Charge = NOTHING
    after: Charge = NOTHING


ScopePair = tuple[int, int]  # (accepted, bound)


@dataclass(slots=True)
class _Cell:
    """A counter while a batch is decided, with the ceiling on the accepted amount."""

    hard: int
    soft: int | None
    accepted: int
    bound: int
    ceiling: int
    start: ScopePair


_Step: TypeAlias = tuple[Row, _Cell, int, int]  # a counter, and the changes of accepted and bound


@dataclass(slots=True)
class Delta:
    """The change of one counter."""

    accepted: int = 0
    bound: int = 0


class Counters:
    """The counters of one batch after the commands decided so far.

    A refused move changes nothing, so each command sees exactly the effects of the commands before it.
    """

    def __init__(self, tree: Tree, rows: Mapping[Row, Counter]) -> None:
        self.tree = tree
        self._cells = {row: _cell(tree, row, counter) for row, counter in rows.items()}
        self._known: dict[tuple[str, int, int], tuple[Move, Sequence[_Step]]] = {}
        self._covered = tree.covered

    def __getitem__(self, row: Row) -> Counter:
        cell = self._cells[row]
        return Counter(cell.hard, cell.soft, cell.accepted, cell.bound)

    def move(self, moves: Sequence[Move]) -> list[Exceeded]:
        """Apply all moves, or none if a limit has no headroom; return the exceeded limits, nearest scope first."""
        if self._covered and (bare := self._uncovered(moves)):
            return bare
        if len(moves) == 1 and moves[0].before is NOTHING and not moves[0].after.bound:
            return self._accept(moves[0].namespace, moves[0].after)
        steps = self._steps(moves[0]) if len(moves) == 1 else self._steps_together(moves)
        if exceeded := [
            _exceeded(row, cell, accepted, bound)
            for row, cell, accepted, bound in steps
            if (accepted > 0 and cell.accepted + accepted > cell.ceiling)
            or (bound > 0 and cell.bound + bound > cell.hard)
        ]:
            return nearest_first(self.tree, exceeded)
        for _, cell, accepted, bound in steps:
            cell.accepted += accepted
            cell.bound += bound
        return []

    def _uncovered(self, moves: Sequence[Move]) -> list[Exceeded]:
        """The increases that no quota limits, in namespaces that require one."""
        return [
            one for move in moves if move.namespace in self._covered for one in uncovered_increases(self.tree, move)
        ]

    def _steps(self, move: Move) -> Sequence[_Step]:
        """The changes of a move, cached: work of one template shares its charges."""
        key = (move.namespace, id(move.before), id(move.after))
        if key not in self._known:
            # The cache keeps the move, so that no other charge gets the same id().
            self._known[key] = (move, self._steps_together([move]))
        return self._known[key][1]

    def _steps_together(self, moves: Sequence[Move]) -> Sequence[_Step]:
        cells = self._cells
        return [
            (row, cells[row], delta.accepted, delta.bound)
            for row, delta in deltas(self.tree, moves).items()
            if delta.accepted or delta.bound
        ]

    def _accept(self, namespace: str, charge: Charge) -> list[Exceeded]:
        """Charge a new object, which is by far the most frequent move."""
        accepted = charge.accepted
        if not accepted:
            return []
        touched = [(self._cells[row], accepted[row[1]], row) for row in rows_of(self.tree, namespace, charge)]
        exceeded = [
            Exceeded(*row, cell.hard, cell.accepted, amount)
            for cell, amount, row in touched
            if amount > 0 and cell.accepted + amount > cell.ceiling
        ]
        if not exceeded:
            for cell, amount, _ in touched:
                cell.accepted += amount
        return exceeded

    def changes(self) -> dict[Row, ScopePair]:
        """The total change of each changed counter."""
        return {
            row: (cell.accepted - cell.start[0], cell.bound - cell.start[1])
            for row, cell in self._cells.items()
            if (cell.accepted, cell.bound) != cell.start
        }


def uncovered_increases(tree: Tree, move: Move) -> list[Exceeded]:
    """The amounts of a move, accepted or bound, that no ResourceQuota of its namespace limits."""
    more = _increases(move)
    return [
        Exceeded(namespace_scope(move.namespace), dimension, 0, 0, more[dimension])
        for dimension in (uncovered(tree, move.namespace, move.after.facts, more) if more else ())
    ]


def _increases(move: Move) -> dict[str, int]:
    """The dimensions of which a move takes more, accepted or bound, with the amounts."""
    pairs = ((move.after.accepted, move.before.accepted), (move.after.bound, move.before.bound))
    more: dict[str, int] = {}
    for after, before in pairs:
        for name, value in after.items():
            if value > before.get(name, 0):
                more[name] = max(more.get(name, 0), value - before.get(name, 0))
    return more


def _cell(tree: Tree, row: Row, counter: Counter) -> _Cell:
    # Undecided requests are never queued for headroom: they are in a queue already.
    rejects = row[1] == PENDING_REQUESTS or enforcement_of(tree, row[0]) is Enforcement.REJECT
    ceiling = counter.hard if rejects else AMOUNT_MAX
    start = (counter.accepted, counter.bound)
    return _Cell(counter.hard, counter.soft, counter.accepted, counter.bound, ceiling, start)


def _exceeded(row: Row, cell: _Cell, accepted: int, bound: int) -> Exceeded:
    if accepted > 0 and cell.accepted + accepted > cell.ceiling:
        return Exceeded(*row, cell.hard, cell.accepted, accepted)
    return Exceeded(*row, cell.hard, cell.bound, bound)


def nearest_first(tree: Tree, faults: Iterable[Exceeded]) -> list[Exceeded]:
    """Sort by scope: the namespace and its quotas, its tenant, the ancestors upwards, the system; then by dimension."""

    def distance(fault: Exceeded) -> tuple[int, int, str, str]:
        kind, _, name = fault.scope.partition(":")
        depth = sum(1 for _ in lineage(tree, name)) if kind == "tenant" else 0
        return ("namespace", "quota", "tenant", "system").index(kind), -depth, fault.scope, fault.dimension

    return sorted(faults, key=distance)


def deltas(tree: Tree, moves: Iterable[Move]) -> dict[Row, Delta]:
    """The total change of each counter by these moves."""
    changes: dict[Row, Delta] = {}
    for move in moves:
        _add(changes, tree, move.namespace, move.after, 1)
        _add(changes, tree, move.namespace, move.before, -1)
    return changes


def _add(changes: dict[Row, Delta], tree: Tree, namespace: str, charge: Charge, sign: int) -> None:
    if charge is NOTHING:
        return
    accepted, bound = charge.accepted, charge.bound
    for row in rows_of(tree, namespace, charge):
        delta = changes.get(row)
        if delta is None:
            delta = changes[row] = Delta()
        delta.accepted += sign * accepted.get(row[1], 0)
        if bound:
            delta.bound += sign * bound.get(row[1], 0)


# Recounting after a change of the tree.


def needs_recount(old: Tree, new: Tree) -> bool:
    """Whether a change of the tree moves usage between counters, and does not only change limits.

    A tenant without children counts the same with and without a limit.
    """
    if frozenset(old.system) != frozenset(new.system):
        return True
    parents = {tenant.parent for tree in (old, new) for tenant in tree.tenants.values()}
    return any(_moved(old, new, name, name in parents) for name in old.tenants)


def _moved(old: Tree, new: Tree, name: str, is_parent: bool) -> bool:
    if name not in new.tenants:
        return False
    if old.tenants[name].parent != new.tenants[name].parent:
        return True
    return is_parent and frozenset(limits_of(old, name)) != frozenset(limits_of(new, name))


def recount(old: Tree, new: Tree, rows: Mapping[Row, Counter]) -> dict[Row, Counter]:
    """The counters of tenants and the system under the new tree, computed from those of the old tree.

    `rows` must contain all existing counters of the recounted dimensions.
    """
    own = _own_usage(old, rows)
    dimensions = sorted(recounted_dimensions(old, new))
    totals = _totals(new, own, dimensions)
    result: dict[Row, Counter] = {}
    for name in new.tenants:
        limited = limits_of(new, name)
        for dimension in dimensions:
            row = (tenant_scope(name), dimension)
            accepted, bound = totals[row] if dimension in limited else own.get(row, (0, 0))
            if dimension in limited or row in rows:
                result[row] = Counter(hard_of(new, row), soft_of(new, row), accepted, bound)
    roots = [name for name, tenant in new.tenants.items() if tenant.parent not in new.tenants]
    for dimension, hard in new.system.items():
        accepted, bound = _sum([totals[(tenant_scope(name), dimension)] for name in roots])
        result[(SYSTEM_SCOPE, dimension)] = Counter(hard, None, accepted, bound)
    return result


def recounted_dimensions(old: Tree, new: Tree) -> set[str]:
    """The dimensions limited anywhere in either tree; all others are counted by each tenant for itself."""
    return _limited_anywhere(old) | _limited_anywhere(new) | set(old.system) | set(new.system)


def _limited_anywhere(tree: Tree) -> set[str]:
    return {dimension for name in tree.tenants for dimension in limits_of(tree, name)}


def _own_usage(tree: Tree, rows: Mapping[Row, Counter]) -> dict[Row, ScopePair]:
    """The usage of each tenant's own namespaces: its counter minus the part of its descendants."""
    below = children_of(tree)
    totals: dict[Row, ScopePair] = {}
    own: dict[Row, ScopePair] = {}
    dimensions = sorted({dimension for _, dimension in rows})
    for name in _bottom_up(tree):
        limited = limits_of(tree, name)
        for dimension in dimensions:
            row = (tenant_scope(name), dimension)
            counter = rows.get(row, Counter())
            accepted, bound = _sum([totals[(tenant_scope(child), dimension)] for child in below.get(name, ())])
            if dimension in limited:
                totals[row] = (counter.accepted, counter.bound)
                own[row] = (counter.accepted - accepted, counter.bound - bound)
            else:
                totals[row] = (counter.accepted + accepted, counter.bound + bound)
                own[row] = (counter.accepted, counter.bound)
    return own


def _bottom_up(tree: Tree) -> list[str]:
    """All tenants, each after its descendants."""
    below = children_of(tree)
    order: list[str] = []
    queue = [name for name, tenant in tree.tenants.items() if tenant.parent not in tree.tenants]
    while queue:
        name = queue.pop()
        order.append(name)
        queue.extend(below.get(name, ()))
    return order[::-1]


def _totals(tree: Tree, own: Mapping[Row, ScopePair], dimensions: Sequence[str]) -> dict[Row, ScopePair]:
    """The usage of each tenant with its subtree."""
    below = children_of(tree)
    totals: dict[Row, ScopePair] = {}
    for name in _bottom_up(tree):
        for dimension in dimensions:
            row = (tenant_scope(name), dimension)
            parts = [own.get(row, (0, 0)), *(totals[(tenant_scope(child), dimension)] for child in below.get(name, ()))]
            totals[row] = _sum(parts)
    return totals


def _sum(pairs: Sequence[ScopePair]) -> ScopePair:
    return sum(accepted for accepted, _ in pairs), sum(bound for _, bound in pairs)


def count_quota(
    quota: ResourceQuota, charges: Iterable[Charge], classes: Mapping[str, PriorityClass]
) -> dict[Row, Counter]:  # fmt: skip
    """The counters of a ResourceQuota from all charges in its namespace."""
    counted = [charge for charge in charges if matches(quota, charge.facts, classes)]
    return {
        (quota.scope, dimension): Counter(
            quota.hard.get(dimension, UNLIMITED),
            quota.soft.get(dimension),
            sum(charge.accepted.get(dimension, 0) for charge in counted),
            sum(charge.bound.get(dimension, 0) for charge in counted),
        )
        for dimension in quota.dimensions
    }


def overrun(old: Tree, new: Tree, before: Mapping[Row, Counter], after: Mapping[Row, Counter]) -> list[Exceeded]:
    """The counters that moving a tenant would raise above their limit.

    A new or lowered limit raises no counter. An amount too large to count is refused in any case.
    """
    faults: list[Exceeded] = []
    for row, counter in after.items():
        was = before.get(row, Counter())
        if counter.accepted > AMOUNT_MAX:
            faults.append(Exceeded(*row, counter.hard, was.accepted, counter.accepted - was.accepted))
            continue
        if hard_of(old, row) == UNLIMITED:
            continue
        queued = enforcement_of(new, row[0]) is Enforcement.QUEUE
        if counter.accepted > max(was.accepted, counter.hard) and not queued:
            faults.append(Exceeded(*row, counter.hard, was.accepted, counter.accepted - was.accepted))
        elif counter.bound > max(was.bound, counter.hard):
            faults.append(Exceeded(*row, counter.hard, was.bound, counter.bound - was.bound))
    return nearest_first(new, faults)
