"""A number for the room of every node: those with the same number have the same room left.

Nodes come in thousands of the same kind and go through the same states. Whoever has a question about all of them asks
it of one of each sort. The numbers are kept up to date: only the nodes that something was placed on are looked at.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bursar.core.fleet import Columns, Fleet, Ints, Rows

GOLDEN = np.int64(0x9E3779B97F4A7C15 - (1 << 64))
MANY = 0.25  # the part of all rows from which on they are all marked anew


class Marks:
    """The marks of a fleet's nodes as they are now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shape: tuple[object, ...] = ()
        self._marks: Ints = np.empty(0, np.int64)
        self._seen = 0

    def of(self, rows: Rows) -> Ints:
        self.catch_up()
        return self._marks[rows]

    def catch_up(self) -> None:
        """Read the log of what was touched."""
        now = self._fleet.now
        touched = now.touched[self._seen :]
        shape = (now.free.shape, *(one.shape for one in now.devices))
        if shape != self._shape or len(touched) > MANY * now.free.shape[1]:
            self._shape = shape
            self._marks = marks_of(now, np.arange(now.free.shape[1]))
        elif touched:
            rows = np.fromiter(dict.fromkeys(touched), np.intp)
            self._marks[rows] = marks_of(now, rows)
        self._seen = len(now.touched)

    def forget_log(self) -> None:
        """The log is about to be forgotten."""
        self.catch_up()
        self._seen = 0


def marks_of(columns: Columns, rows: Rows) -> Ints:
    """The order in which devices lie on a node does not matter."""
    lines = [columns.free[:, rows].T]
    lines += [np.sort(devices[rows], axis=1) for devices in columns.devices]
    state = np.concatenate(lines, axis=1).astype(np.int64)
    mixed: Ints = (state ^ (state >> 29)) @ _factors(state.shape[1])
    return mixed


@lru_cache(64)
def _factors(count: int) -> Ints:
    """Odd numbers that scatter states over all of 64 bits."""
    golden = int(GOLDEN)
    return np.array([pow(golden, power, 1 << 64) for power in range(1, count + 1)], np.uint64).astype(np.int64)
