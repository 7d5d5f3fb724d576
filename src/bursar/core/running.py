"""What is placed, as columns: one line for each allocation on each of its nodes.

Plans ahead and preemption ask about all of it at once: what ends before a time, what could make room on which node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bursar.core.ask import Ask
from bursar.core.fleet import Columns, Need
from bursar.core.node import WHOLE

NEVER = float("inf")

DeviceColumns = Sequence[tuple[int, Sequence[int]]]  # (device column, indices)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where an allocation, or one of its parts, is: the row of a node, and the devices taken there."""

    row: int
    devices: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(slots=True)
class Placed:
    """An allocation that has room. `ends_at` is when it ends at the latest, as far as anybody knows."""

    ask: Ask
    need: Need
    spots: tuple[Spot, ...]
    since: float
    ends_at: float = NEVER
    ending: bool = False  # told to stop: it is nobody's victim any more
    lines: list[int] = field(default_factory=list)  # in the columns, one for each spot


class Running:
    def __init__(self, lines: int = 256) -> None:
        self.row: NDArray[np.intp] = np.full(lines, -1, np.intp)  # −1: the line is free
        self.ends_at: NDArray[np.float64] = np.full(lines, NEVER)
        self.since: NDArray[np.float64] = np.zeros(lines)
        self.priority: NDArray[np.int64] = np.zeros(lines, np.int64)
        self.free_to_stop: NDArray[np.bool_] = np.zeros(lines, np.bool_)
        self.exclusive: NDArray[np.bool_] = np.zeros(lines, np.bool_)
        self.amounts: NDArray[np.int64] = np.zeros((0, lines), np.int64)
        self.devices: list[NDArray[np.int32]] = []
        self.uid: list[str] = [""] * lines
        self.on_row: dict[int, set[str]] = {}
        self._unused = list(range(lines - 1, -1, -1))

    def copy(self) -> Running:
        twin = Running(0)
        twin.row, twin.ends_at, twin.since = self.row.copy(), self.ends_at.copy(), self.since.copy()
        twin.priority, twin.free_to_stop = self.priority.copy(), self.free_to_stop.copy()
        twin.exclusive, twin.amounts = self.exclusive.copy(), self.amounts.copy()
        twin.devices = [one.copy() for one in self.devices]
        twin.uid = list(self.uid)
        twin.on_row = {row: set(uids) for row, uids in self.on_row.items()}
        twin._unused = list(self._unused)
        return twin

    def add(self, placed: Placed, columns: Columns) -> None:
        self._fit_to(columns)
        for spot in placed.spots:
            if not self._unused:
                self._grow()
            line = self._unused.pop()
            placed.lines.append(line)
            self.uid[line] = placed.ask.uid
            self.row[line], self.ends_at[line], self.since[line] = spot.row, placed.ends_at, placed.since
            self.priority[line] = placed.ask.priority
            self.free_to_stop[line] = not placed.ending
            self.exclusive[line] = placed.need.exclusive
            if not placed.need.exclusive:
                for column, amount in placed.need.plain:
                    self.amounts[column, line] = amount
                shared = dict(placed.need.shared)
                for column, indices in spot.devices:
                    self.devices[column][line, list(indices)] = shared.get(column, WHOLE)
            self.on_row.setdefault(spot.row, set()).add(placed.ask.uid)

    def remove(self, placed: Placed) -> None:
        for line in placed.lines:
            self.row[line], self.ends_at[line], self.uid[line] = -1, NEVER, ""
            self.free_to_stop[line] = False
            self.amounts[:, line] = 0
            for one in self.devices:
                one[line] = 0
            self._unused.append(line)
        placed.lines.clear()
        for spot in placed.spots:
            there = self.on_row[spot.row]
            there.discard(placed.ask.uid)
            if not there:
                del self.on_row[spot.row]

    def restate(self, placed: Placed) -> None:
        """Its end, or that it was told to stop, is known better than before."""
        for line in placed.lines:
            self.ends_at[line], self.since[line] = placed.ends_at, placed.since
            self.free_to_stop[line] = not placed.ending
            self.priority[line] = placed.ask.priority

    def ends(self) -> NDArray[np.float64]:
        """The times at which something ends, in order, each once."""
        finite = self.ends_at[np.isfinite(self.ends_at) & (self.row >= 0)]
        return np.unique(finite)

    def released_by(self, columns: Columns, at: float) -> Columns:
        """The room as it will be when everything that ends by then has ended."""
        later = columns.copy()
        gone = np.flatnonzero((self.row >= 0) & (self.ends_at <= at))
        if not gone.size:
            return later
        rows = self.row[gone]
        np.subtract.at(later.placed, rows, 1)
        for column in range(min(self.amounts.shape[0], later.free.shape[0])):
            np.add.at(later.free[column], rows, self.amounts[column, gone])
        touched = np.unique(rows)
        for column, taken in enumerate(self.devices):
            np.add.at(later.devices[column], rows, taken[gone])
            lines = later.devices[column][touched]
            later.widest[column, touched] = np.maximum(lines.max(axis=1, initial=0), 0)
            later.whole[column, touched] = np.count_nonzero(lines == WHOLE, axis=1)
        later.exclusive[rows[self.exclusive[gone]]] = False
        return later

    def _fit_to(self, columns: Columns) -> None:
        """As many resources and devices as the fleet has by now."""
        lines = self.row.shape[0]
        if (missing := columns.free.shape[0] - self.amounts.shape[0]) > 0:
            self.amounts = np.concatenate([self.amounts, np.zeros((missing, lines), np.int64)])
        for column, one in enumerate(columns.devices):
            width = one.shape[1]
            if column >= len(self.devices):
                self.devices.append(np.zeros((lines, width), np.int32))
            elif width > self.devices[column].shape[1]:
                wider = np.zeros((lines, width), np.int32)
                wider[:, : self.devices[column].shape[1]] = self.devices[column]
                self.devices[column] = wider

    def _grow(self) -> None:
        lines = self.row.shape[0]
        self.row = np.concatenate([self.row, np.full(lines, -1, np.intp)])
        self.ends_at = np.concatenate([self.ends_at, np.full(lines, NEVER)])
        self.since = np.concatenate([self.since, np.zeros(lines)])
        self.priority = np.concatenate([self.priority, np.zeros(lines, np.int64)])
        self.free_to_stop = np.concatenate([self.free_to_stop, np.zeros(lines, np.bool_)])
        self.exclusive = np.concatenate([self.exclusive, np.zeros(lines, np.bool_)])
        self.amounts = np.concatenate([self.amounts, np.zeros_like(self.amounts)], axis=1)
        self.devices = [np.concatenate([one, np.zeros_like(one)]) for one in self.devices]
        self.uid += [""] * lines
        self._unused.extend(range(2 * lines - 1, lines - 1, -1))
