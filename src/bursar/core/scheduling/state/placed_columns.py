"""Placed work as columns: one line for each allocation on each of its nodes.

Backfill and preemption query all of it at once: the work that ends before a time, the victims on each node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.fleet import Need, NodeColumns

NEVER = float("inf")

DeviceSets = tuple[tuple[int, tuple[int, ...]], ...]  # (device column, indices)


class Spot(Struct, frozen=True):
    """The place of an allocation, or of one of its parts: the row of a node and the devices taken there."""

    row: int
    devices: tuple[tuple[int, tuple[int, ...]], ...] = ()


def devices_of(spots: Sequence[Spot]) -> DeviceSets:
    """The devices of several spots on one node, merged."""
    if len(spots) == 1:
        return spots[0].devices
    taken: dict[int, tuple[int, ...]] = {}
    for spot in spots:
        for column, indices in spot.devices:
            taken[column] = taken.get(column, ()) + indices
    return tuple(taken.items())


class Placed(Struct):
    """A placed allocation. `ends_at` is its latest known end."""

    ask: Ask
    need: Need
    spots: tuple[Spot, ...]
    since: float
    ends_at: float = NEVER
    ending: bool = False  # evicted already: never a victim again
    nodes_bound: int = 0  # thousandths of nodes that it was counted for when it was placed
    lines: list[int] = field(default_factory=list)  # in the columns, one for each spot


class PlacedLines:
    """The columns. A line whose row is −1 is free."""

    def __init__(self, count: int) -> None:
        self.row: NDArray[np.intp] = np.full(count, -1, np.intp)
        self.ends_at: NDArray[np.float64] = np.full(count, NEVER)
        self.since: NDArray[np.float64] = np.zeros(count)
        self.priority: NDArray[np.int64] = np.zeros(count, np.int64)
        self.tenant: NDArray[np.int32] = np.zeros(count, np.int32)
        self.free_to_stop: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.exclusive: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.amounts: NDArray[np.int64] = np.zeros((0, count), np.int64)
        self.devices: list[NDArray[np.int32]] = []

    def copy(self) -> PlacedLines:
        trial = PlacedLines(0)
        for name in _FLAT:
            setattr(trial, name, getattr(self, name).copy())
        trial.amounts, trial.devices = self.amounts.copy(), [one.copy() for one in self.devices]
        return trial

    def grow(self, count: int) -> None:
        """Grow to at least twice as many lines, and at least this many more."""
        more = PlacedLines(self.row.shape[0] + count)
        for name in _FLAT:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(more, name)]))
        spare = more.row.shape[0]
        self.amounts = np.concatenate([self.amounts, np.zeros((self.amounts.shape[0], spare), np.int64)], axis=1)
        self.devices = [np.concatenate([one, np.zeros((spare, one.shape[1]), np.int32)]) for one in self.devices]

    def fit_to(self, columns: NodeColumns) -> None:
        """Widen to the number of resources and devices of the fleet."""
        count = self.row.shape[0]
        if (missing := columns.free.shape[0] - self.amounts.shape[0]) > 0:
            self.amounts = np.concatenate([self.amounts, np.zeros((missing, count), np.int64)])
        for column, one in enumerate(columns.devices):
            width = one.shape[1]
            if column >= len(self.devices):
                self.devices.append(np.zeros((count, width), np.int32))
            elif width > self.devices[column].shape[1]:
                wider = np.zeros((count, width), np.int32)
                wider[:, : self.devices[column].shape[1]] = self.devices[column]
                self.devices[column] = wider


_FLAT = ("row", "ends_at", "since", "priority", "tenant", "free_to_stop", "exclusive")


class PlacedColumns:
    """Columns of placed work. New placements are entered when the columns are next read, many at a time."""

    def __init__(self, lines: int = 256) -> None:
        self.on_row: dict[int, set[str]] = {}
        self.tenants: dict[str, int] = {}  # the code of every tenant so far
        self._lines = PlacedLines(lines)
        self._unused = list(range(lines - 1, -1, -1))
        self._new: dict[str, Placed] = {}
        self._columns: NodeColumns | None = None

    @property
    def lines(self) -> PlacedLines:
        if self._new:
            self._enter()
        return self._lines

    def copy(self) -> PlacedColumns:
        trial = PlacedColumns(0)
        trial._lines = self.lines.copy()
        trial.tenants = dict(self.tenants)
        trial.on_row = {row: set(uids) for row, uids in self.on_row.items()}
        trial._unused = list(self._unused)
        return trial

    def fit_to(self, columns: NodeColumns) -> None:
        """Widen to the number of resources and devices of the fleet."""
        self._columns = columns
        self._lines.fit_to(columns)

    def add(self, placed: Placed, columns: NodeColumns) -> None:
        self._columns = columns
        self._new[placed.ask.uid] = placed
        for spot in placed.spots:
            there = self.on_row.get(spot.row)
            if there is None:
                self.on_row[spot.row] = {placed.ask.uid}
            else:
                there.add(placed.ask.uid)

    def add_many(self, many: Sequence[Placed], row: int, columns: NodeColumns) -> None:
        """Add several allocations on one node."""
        self._columns = columns
        uids = [one.ask.uid for one in many]
        self._new.update(zip(uids, many, strict=True))
        self.on_row.setdefault(row, set()).update(uids)

    def remove(self, placed: Placed) -> None:
        if self._new.pop(placed.ask.uid, None) is None:
            gone, lines = placed.lines, self._lines
            lines.row[gone], lines.ends_at[gone], lines.free_to_stop[gone] = -1, NEVER, False
            lines.amounts[:, gone] = 0
            for one in lines.devices:
                one[gone] = 0
            self._unused.extend(gone)
            placed.lines = []
        for spot in placed.spots:
            there = self.on_row[spot.row]
            there.discard(placed.ask.uid)
            if not there:
                del self.on_row[spot.row]

    def restate(self, placed: Placed) -> None:
        """Update the end of an allocation, and whether it is being evicted."""
        at, lines = placed.lines, self._lines
        if placed.ask.uid in self._new:
            self._new[placed.ask.uid] = placed
        elif at:
            lines.ends_at[at], lines.since[at] = placed.ends_at, placed.since
            lines.free_to_stop[at] = not placed.ending
            lines.priority[at] = placed.ask.priority

    def ends(self) -> NDArray[np.float64]:
        """The times at which something ends, in order, each once."""
        lines = self.lines
        return np.unique(lines.ends_at[np.isfinite(lines.ends_at) & (lines.row >= 0)])

    def released_by(self, columns: NodeColumns, at: float) -> NodeColumns:
        """Free capacity at a time, after all work that ends by then."""
        later, lines = columns.copy(), self.lines
        gone = np.flatnonzero((lines.row >= 0) & (lines.ends_at <= at))
        if not gone.size:
            return later
        rows = lines.row[gone]
        np.subtract.at(later.placed, rows, 1)
        for column in range(min(lines.amounts.shape[0], later.free.shape[0])):
            np.add.at(later.free[column], rows, lines.amounts[column, gone])
        touched = np.unique(rows)
        for column, taken in enumerate(lines.devices):
            np.add.at(later.devices[column], rows, taken[gone])
            left = later.devices[column][touched]
            later.widest[column, touched] = np.maximum(left.max(axis=1, initial=0), 0)
            later.whole[column, touched] = np.count_nonzero(left == WHOLE, axis=1)
        later.exclusive[rows[lines.exclusive[gone]]] = False
        return later

    def _enter(self) -> None:
        new, self._new = list(self._new.values()), {}
        count = sum(len(one.spots) for one in new)
        if count > len(self._unused):
            before = self._lines.row.shape[0]
            self._lines.grow(count)
            self._unused.extend(range(self._lines.row.shape[0] - 1, before - 1, -1))
        lines = self._lines
        assert self._columns is not None
        lines.fit_to(self._columns)
        taken = [self._unused.pop() for _ in range(count)]
        spots = [(one, spot) for one in new for spot in one.spots]
        for line, (one, _) in zip(taken, spots, strict=True):
            one.lines.append(line)
        lines.row[taken] = [spot.row for _, spot in spots]
        lines.ends_at[taken] = [one.ends_at for one, _ in spots]
        lines.since[taken] = [one.since for one, _ in spots]
        lines.priority[taken] = [one.ask.priority for one, _ in spots]
        codes = self.tenants
        lines.tenant[taken] = [codes.setdefault(one.ask.tenant, len(codes)) for one, _ in spots]
        lines.free_to_stop[taken] = [not one.ending for one, _ in spots]
        lines.exclusive[taken] = [one.need.exclusive for one, _ in spots]
        self._enter_amounts(taken, spots)

    def _enter_amounts(self, taken: Sequence[int], spots: Sequence[tuple[Placed, Spot]]) -> None:
        """Give back released capacity by need, because few needs are shared by many; exclusive work frees its node."""
        by_need: dict[int, tuple[Need, list[int]]] = {}
        given: dict[int, tuple[list[int], list[int], list[int]]] = {}  # device column → lines, devices, parts
        for line, (one, spot) in zip(taken, spots, strict=True):
            if one.need.exclusive:
                continue
            by_need.setdefault(id(one.need), (one.need, []))[1].append(line)
            for column, indices in spot.devices:
                part = next((part for shared, part in one.need.shared if shared == column), WHOLE)
                at, devices, parts = given.setdefault(column, ([], [], []))
                at.extend([line] * len(indices))
                devices.extend(indices)
                parts.extend([part] * len(indices))
        for need, some in by_need.values():
            for column, amount in need.plain:
                self._lines.amounts[column, some] = amount
        for column, (at, devices, parts) in given.items():
            self._lines.devices[column][at, devices] = parts
