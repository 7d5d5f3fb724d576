"""Node fingerprints: a hash of the free capacity of every node; equal hashes mean equal free capacity.

Clusters have thousands of nodes of few kinds, which go through the same states. So a query over all nodes is evaluated
once per fingerprint. Fingerprints are updated incrementally, only for nodes whose capacity changed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bursar.core.scheduling.state.fleet import Fleet, NodeColumns, Rows

Numbers = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MANY = 0.25  # the fraction of changed rows from which all are hashed again


class NodeFingerprints:
    """The current fingerprints of a fleet's nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shape: tuple[object, ...] = ()
        self._fingerprints: Numbers = np.empty(0, np.uint64)
        self._seen = 0

    def of(self, rows: Rows) -> Numbers:
        self.catch_up()
        return self._fingerprints[rows]

    def catch_up(self) -> None:
        """Update the fingerprints from the log of touched rows."""
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
        """Catch up before the log is dropped."""
        self.catch_up()
        self._seen = 0


def fingerprints_of(columns: NodeColumns, rows: Rows) -> Numbers:
    """The fingerprints of these rows; the order of devices on a node does not matter."""
    lines = [columns.free[:, rows].T]
    lines += [np.sort(devices[rows], axis=1) for devices in columns.devices]
    state = np.concatenate(lines, axis=1).astype(np.int64).view(np.uint64)
    fingerprints: Numbers = scattered(state) @ _factors(state.shape[1])
    return fingerprints


def scattered(numbers: Numbers) -> Numbers:
    """A bijective mixing function: close numbers are spread over the whole range."""
    spread: Numbers = (numbers ^ (numbers >> np.uint64(29))) * GOLDEN
    return spread


@lru_cache(64)
def _factors(count: int) -> Numbers:
    """Odd multipliers, spread over all 64 bits."""
    return np.array([pow(int(GOLDEN), power, 1 << 64) for power in range(1, count + 1)], np.uint64)
