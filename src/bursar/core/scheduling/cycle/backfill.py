"""Backfill: the earliest start of blocked work, from the known ends of running work.

Free capacity only grows as running work ends, so a binary search over the ends finds the earliest start. Inter-pod
rules are ignored, because future placements are unknown. Work without a known end is assumed never to end, so the start
is a conservative estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.cycle.placer import fit_counts
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fleet import NodeColumns
from bursar.core.scheduling.state.node_reservation import NodeReservations, free_devices
from bursar.core.scheduling.state.scheduler_memory import Reservation


def earliest(
    cluster: ClusterState, asks: Sequence[Ask], reservations: NodeReservations, now: float
) -> Reservation | None:
    """The earliest time at which all of these fit together, beside the reservations of others."""
    ends = np.maximum(cluster.running.ends(), now)
    if not ends.size:
        return None
    first, last = 0, len(ends) - 1
    found = capacity_at(cluster, asks, reservations, float(ends[last]))
    if found is None:
        return None
    while first < last:
        middle = (first + last) // 2
        earlier = capacity_at(cluster, asks, reservations, float(ends[middle]))
        if earlier is None:
            first = middle + 1
        else:
            found, last = earlier, middle
    return Reservation(float(ends[last]), found)


def capacity_at(
    cluster: ClusterState, asks: Sequence[Ask], reservations: NodeReservations, at: float
) -> tuple[tuple[Ask, int], ...] | None:
    """The slots in which all of these fit at that time; none if they do not."""
    fleet = cluster.fleet
    later = cluster.running.released_by(fleet.now, at)
    for ask, row in reservations.owners:
        _take(cluster, later, ask, row)
    slots: list[tuple[Ask, int]] = []
    for ask, times in _alike(asks):
        need = fleet.need(ask.shape)
        counts = np.where(cluster.memory.node_filters.of(ask.shape.where).allowed, fit_counts(fleet, later, need), 0)
        if ask.shape.nodes > 1:
            counts = np.minimum(counts, len(times))
        rows = _rows(counts, ask.shape.nodes, times)
        if rows is None:
            return None
        for one, row in rows:
            _take(cluster, later, one, row)
        slots.extend(rows)
    return tuple(slots)


def _alike(asks: Sequence[Ask]) -> list[tuple[Ask, list[Ask]]]:
    """The asks by shape: those that want whole nodes first, then the largest."""

    def size(ask: Ask) -> tuple[bool, int, str]:
        return not ask.shape.exclusive, -sum(amount for _, amount in ask.shape.requests), repr(ask.shape)

    ordered = sorted(asks, key=size)
    groups = [list(group) for _, group in groupby(ordered, key=lambda ask: ask.shape)]
    return [(group[0], group) for group in groups]


def _rows(
    counts: np.ndarray[tuple[int], np.dtype[np.int64]], nodes: int, asks: list[Ask]
) -> list[tuple[Ask, int]] | None:
    """Rows for all slots, those with the most free capacity first; an allocation's slots lie on different rows."""
    if int(counts.sum()) < nodes * len(asks):
        return None
    rows: list[tuple[Ask, int]] = []
    left = counts.copy()
    for ask in asks:
        best = np.argsort(-left, kind="stable")[:nodes]
        if left[best[-1]] < 1:
            return None
        left[best] -= 1
        rows.extend((ask, int(row)) for row in best)
    return rows


def _take(cluster: ClusterState, later: NodeColumns, ask: Ask, row: int) -> None:
    need = cluster.fleet.need(ask.shape)
    later.take(row, need, free_devices(later, row, need))
