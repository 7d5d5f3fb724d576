"""Node reservations: capacity kept for the first blocked unit, and for nominated preemptors.

A reservation describes a node at the time when its owner starts: work that ends until then is gone, and the owner is
placed. Other work may use the node meanwhile if it ends in time, or if it also fits beside the owner. So backfilled
work never delays an owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bursar.core.nodes import node
from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.fleet import Bools, Fleet, Need, NodeColumns, Rows
from bursar.core.scheduling.state.placed_columns import NEVER, Placed, PlacedColumns, Spot


@dataclass(slots=True)
class NodeReservations:
    """Capacity reserved on nodes: other work may use it only if it delays no owner."""

    fleet: Fleet
    placed: Mapping[str, Placed]
    running: PlacedColumns
    later: NodeColumns | None = None  # the rows that are held, as they will be
    starts: dict[int, float] = field(default_factory=dict)  # when the first owner on a row starts
    _owners_on: dict[int, list[Ask]] = field(default_factory=dict)

    def add(self, slots: Sequence[tuple[Ask, int]], start: float) -> None:
        """Reserve the capacity that these (allocation, row) need from `start` on."""
        if self.later is None:
            self.later = self.fleet.now.copy()
        for row in dict.fromkeys(row for _, row in slots):
            if start < self.starts.get(row, NEVER):
                # At an earlier start, less of the running work has ended.
                self._look_ahead(self.later, row, start)
                for ask in self._owners_on.get(row, ()):
                    self._settle(self.later, ask, row)
                self.starts[row] = start
            self.fleet.now.touched.append(row)
        for ask, row in slots:
            self._settle(self.later, ask, row)
            self._owners_on.setdefault(row, []).append(ask)

    @property
    def owners(self) -> Iterator[tuple[Ask, int]]:
        """The owners of reservations, row by row in the order of their start."""
        return ((ask, row) for row, asks in self._owners_on.items() for ask in asks)

    def drop(self, rows: Iterable[int]) -> None:
        """Drop all reservations on these rows."""
        for row in rows:
            if self.starts.pop(row, None) is not None:
                del self._owners_on[row]

    def matches(self) -> bool:
        """Whether the columns of nodes are unchanged; a new resource or more nodes replace them."""
        return self.later is None or self.later.has_shape_of(self.fleet.now)

    def _settle(self, later: NodeColumns, ask: Ask, row: int) -> None:
        need = self.fleet.need(ask.shape)
        later.take(row, need, free_devices(later, row, need))

    def mask(self, need: Need, ends_at: float) -> Bools | None:
        """The nodes where work that ends then delays no owner; none without reservations."""
        if not self.starts or self.later is None:
            return None
        rows = np.fromiter(self.starts, np.intp, len(self.starts))
        starts = np.fromiter(self.starts.values(), np.float64, len(self.starts))
        rows = rows[starts < ends_at]
        allowed = np.ones(self.fleet.now.placed.shape[0], np.bool_)
        allowed[rows] = self._fits_beside(rows, need)
        return allowed

    def allows(self, row: int, need: Need, ends_at: float) -> bool:
        """The same question about one node."""
        start = self.starts.get(row)
        return start is None or ends_at <= start or bool(self._fits_beside(np.array([row]), need)[0])

    def devices(self, row: int, need: Need, ends_at: float) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
        """On a reserved row: devices that are free now and stay free; none where no reservation matters."""
        start = self.starts.get(row)
        if start is None or ends_at <= start or self.later is None:
            return None
        return free_devices(self.later, row, need, self.fleet.now)

    def take(self, spot: Spot, need: Need, ends_at: float, sign: int = 1) -> None:
        """Count work that outlasts the start of the reservation on its row."""
        start = self.starts.get(spot.row)
        if start is not None and self.later is not None and ends_at > start:
            move = self.later.take if sign > 0 else self.later.give_back
            move(spot.row, need, spot.devices)

    def _look_ahead(self, later: NodeColumns, row: int, start: float) -> None:
        """Copy the row as it is now, without the work that ends until then."""
        now = self.fleet.now
        for name in ("free", "whole", "widest"):
            getattr(later, name)[:, row] = getattr(now, name)[:, row]
        for name in ("placed", "exclusive", "open"):
            getattr(later, name)[row] = getattr(now, name)[row]
        for column, one in enumerate(now.devices):
            later.devices[column][row] = one[row]
        for uid in self.running.on_row.get(row, ()):
            one_placed = self.placed[uid]
            if one_placed.ends_at <= start:
                for spot in one_placed.spots:
                    if spot.row == row:
                        later.give_back(row, one_placed.need, spot.devices)

    def _fits_beside(self, rows: Rows, need: Need) -> Bools:
        """Whether it fits now, and also beside the owner later."""
        assert self.later is not None
        later, now = self.later, self.fleet.now
        fits: Bools = ~(later.exclusive[rows] | now.exclusive[rows])
        if need.exclusive:
            return np.zeros_like(fits)
        for column, amount in need.plain:
            fits &= np.minimum(later.free[column, rows], now.free[column, rows]) >= amount
        for column, count in need.whole:
            both = np.minimum(later.devices[column][rows], now.devices[column][rows])
            fits &= np.count_nonzero(both == WHOLE, axis=1) >= count
        for column, part in need.shared:
            both = np.minimum(later.devices[column][rows], now.devices[column][rows])
            fits &= both.max(axis=1, initial=0) >= part
        return fits


def free_devices(
    columns: NodeColumns, row: int, need: Need, both: NodeColumns | None = None
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Devices that are free in these columns, and in the other ones if they are given."""
    if need.exclusive:
        return ()
    chosen = []
    for column, amount in [(column, count * WHOLE) for column, count in need.whole] + list(need.shared):
        free = columns.devices[column][row]
        if both is not None:
            free = np.minimum(free, both.devices[column][row])
        found = node.choose_devices([WHOLE - int(part) for part in free], amount, None)
        if found is not None:
            chosen.append((column, found))
    return tuple(chosen)
