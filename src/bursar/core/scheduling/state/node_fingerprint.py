"""A number for the room of every node: those with the same number have the same room left.

Nodes come in thousands of the same kind and go through the same states. Whoever has a question about all of them asks
it of one of each sort. The numbers are kept up to date: only the nodes that something was placed on are looked at.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bursar.core.scheduling.state.fleet import Fleet, NodeColumns, Rows

Numbers = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MANY = 0.25  # the part of all rows from which on they are all marked anew


class NodeFingerprints:
    """The marks of a fleet's nodes as they are now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shape: tuple[object, ...] = ()
        self._fingerprints: Numbers = np.empty(0, np.uint64)
        self._seen = 0

    def of(self, rows: Rows) -> Numbers:
        self.catch_up()
        return self._fingerprints[rows]

    def catch_up(self) -> None:
        """Read the log of what was touched."""
        now = self._fleet.now
        touched = now.touched[self._seen :]
        shape = (now.free.shape, *(one.shape for one in now.devices))
        if shape != self._shape or len(touched) > MANY * now.free.shape[1]:
            self._shape = shape
            self._fingerprints = fingerprints_of(now, np.arange(now.free.shape[1]))
        elif touched:
            rows = np.fromiter(dict.fromkeys(touched), np.intp)
            self._fingerprints[rows] = fingerprints_of(now, rows)
        self._seen = len(now.touched)

    def forget_log(self) -> None:
        """The log is about to be forgotten."""
        self.catch_up()
        self._seen = 0


def fingerprints_of(columns: NodeColumns, rows: Rows) -> Numbers:
    """The order in which devices lie on a node does not matter."""
    lines = [columns.free[:, rows].T]
    lines += [np.sort(devices[rows], axis=1) for devices in columns.devices]
    state = np.concatenate(lines, axis=1).astype(np.int64).view(np.uint64)
    fingerprints: Numbers = scattered(state) @ _factors(state.shape[1])
    return fingerprints


def scattered(numbers: Numbers) -> Numbers:
    """Other numbers for these, each for one alone; those that are close together no longer are."""
    spread: Numbers = (numbers ^ (numbers >> np.uint64(29))) * GOLDEN
    return spread


@lru_cache(64)
def _factors(count: int) -> Numbers:
    """Odd numbers that are spread over all of 64 bits."""
    return np.array([pow(int(GOLDEN), power, 1 << 64) for power in range(1, count + 1)], np.uint64)
