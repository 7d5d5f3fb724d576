"""Bin packing: rate nodes and devices by the least fragmentation for work that typically arrives.

The worth of a node is the amount of its free devices that the typical shapes could use: for each, if it came next, and
if only it came from now on. Devices without enough free cpu, in fractions too small for any shape, or too few for
large shapes are worth little. An allocation goes where it costs the least worth; among equals, where the least capacity
is left. Without devices, and before any arrival, only the latter counts: best fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Shape, Where
from bursar.core.scheduling.state.arrival_history import ArrivalHistory, Typical
from bursar.core.scheduling.state.fleet import ABSENT, PODS, Bools, Fleet, Need, NodeColumns, Rows
from bursar.core.scheduling.state.node_filter import survey
from bursar.core.scheduling.state.node_fingerprint import Numbers, fingerprints_of, scattered

REPEATED = 0.2  # the weight of the case that only one shape arrives; the rest is the case that it arrives next
FIT_WEIGHT = 0.005  # weight of a whole node's capacity, in devices: a tie-breaker
PLENTY = 1e18  # the number that fits, for resources that a shape does not request
ALIKE_MIN = 32  # the number of rows from which grouping equal states pays
REMEMBERED_MAX = 20_000  # entries of a cache before it is cleared

PackingFloats = NDArray[np.float64]
TakenCapacity = list[tuple[int, tuple[int, ...]]]  # (device column, indices)


class ArrivalMix(ArrivalHistory):
    """The mix of arrivals, and the packing outlook that it gives for the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self._outlook: PackingOutlook | None = None
        self._outlook_version = -1

    def copy(self) -> ArrivalMix:
        """An independent copy of the history. The outlook only caches figures of nodes, and is shared."""
        trial = ArrivalMix()
        trial.copy_history(self)
        trial._outlook, trial._outlook_version = self._outlook, self._outlook_version
        return trial

    def outlook(self, fleet: Fleet) -> PackingOutlook:
        known = self._outlook
        layout = known.layout if known is not None and known.layout.is_of(fleet) else None
        if known is None or layout is None or self._outlook_version != self.version:
            known = self._outlook = PackingOutlook(fleet, self.typical, layout)
            self._outlook_version = self.version
        return known


def rate(
    fleet: Fleet,
    columns: NodeColumns,
    shape: Shape,
    rows: Rows,
    arrival_mix: ArrivalMix,
    *,
    fingerprints: Numbers | None = None,
) -> PackingFloats:
    """The packing score of nodes for one more of a shape that fits: from 0 to 1, higher is better. `fingerprints`, if
    known, belong to the rows."""
    outlook = arrival_mix.outlook(fleet)
    if rows.size < ALIKE_MIN:
        return _rate(outlook, columns, fleet.need(shape), rows)
    if fingerprints is None:
        fingerprints = fingerprints_of(columns, rows)
    _, first, alike = np.unique(outlook.fingerprints(fingerprints, rows), return_index=True, return_inverse=True)
    return _rate(outlook, columns, fleet.need(shape), rows[first])[alike]


def _rate(outlook: PackingOutlook, columns: NodeColumns, need: Need, rows: Rows) -> PackingFloats:
    lost = np.maximum(outlook.loss(columns, need, rows), 0.0)
    score: PackingFloats = 1.0 / (1.0 + lost + FIT_WEIGHT * outlook.capacity_left(columns, need, rows))
    return score


def choose_devices(
    fleet: Fleet, columns: NodeColumns, row: int, shape: Shape, arrival_mix: ArrivalMix
) -> TakenCapacity:
    """The devices to take on a node: whole ones from the left, a fraction where it costs the least worth."""
    need = fleet.need(shape)
    chosen: TakenCapacity = []
    for column, count in need.whole:
        found = columns.whole_devices(column, row)
        assert len(found) >= count, "devices are chosen where there are enough"
        chosen.append((column, tuple(found[:count])))
    for column, part in need.shared:
        chosen.append((column, (arrival_mix.outlook(fleet).share_device(columns, need, row, column, part),)))
    return chosen


def state_key(fleet: Fleet, columns: NodeColumns, row: int, arrival_mix: ArrivalMix) -> Hashable:
    """The state of a node that its packing score depends on: nodes with equal keys have equal scores for any shape."""
    return arrival_mix.outlook(fleet).state_key(columns, row)


# The expected arrivals.


@dataclass(frozen=True, slots=True)
class Table:
    """The typical shapes that ask for one device resource. Arrays have an entry per shape unless they say otherwise."""

    device: int  # the device column
    useful: PackingFloats  # [free part of a device, size of fraction]: the part that such a fraction could use
    size: NDArray[np.intp]  # index of the requested fraction size; a whole device is one of them
    count: NDArray[np.int32]  # number of devices
    unit: PackingFloats  # the requested devices in total
    per: PackingFloats  # [resource, shape]: 1 / request
    unasked: PackingFloats  # [resource, shape]: PLENTY for resources that are not requested
    weight: PackingFloats  # [kind of node, shape]: weight of the shape there; 0 where it may not run


@dataclass(slots=True)
class FreeCapacity:
    """The free capacity of some nodes, for one table."""

    free: PackingFloats  # [resource, node]
    whole: NDArray[np.int32]  # whole devices
    useful: PackingFloats  # [node, size of share]
    kind: NDArray[np.intp]


class Layout:
    """The kinds of nodes of a fleet, independent of the typical shapes."""

    def __init__(self, fleet: Fleet) -> None:
        self._names, self._described = fleet.names, fleet.described
        self.scale = _scale(fleet)
        self._kinds: dict[tuple[Where, ...], tuple[NDArray[np.intp], Bools]] = {}

    def is_of(self, fleet: Fleet) -> bool:
        return self._described == fleet.described and self._names is fleet.names

    def kinds(self, fleet: Fleet, wheres: Sequence[Where]) -> tuple[NDArray[np.intp], Bools]:
        """The kind of each node, and the shapes that may run on each kind: nodes of a kind admit the same shapes."""
        distinct = tuple(dict.fromkeys(wheres))
        known = self._kinds.get(distinct)
        if known is None:
            known = _kinds(fleet, distinct)
            self._kinds = {distinct: known}  # The next outlook most likely needs the same.
        kinds, allowed = known
        return kinds, allowed[:, [distinct.index(where) for where in wheres]]


class PackingOutlook:
    """The worth of the fleet's nodes for the typical shapes."""

    def __init__(
        self,
        fleet: Fleet,
        typical: Sequence[Typical],
        layout: Layout | None = None,
        *,
        repeated: float = REPEATED,
        pressing: bool = True,
    ) -> None:
        """`layout`: the fleet's, if known. `pressing`: whether shapes that may use few devices weigh more on
        these."""
        self.layout = layout or Layout(fleet)
        self._repeated = repeated
        known = [(one, need) for one in typical if not (need := fleet.need(one.shape)).unknown]
        self._kinds, allowed = self.layout.kinds(fleet, [one.shape.where for one, _ in known])
        self._tables: list[Table] = []
        for resource, device in fleet.device_column_of.items():
            offered = np.bincount(self._kinds, fleet.allocatable[fleet.column_of[resource]]).astype(np.float64)
            weight = _pressure(allowed, offered) if pressing else allowed.astype(np.float64)
            if table := _table(fleet, device, known, weight):
                self._tables.append(table)
        self._choices: dict[Hashable, int] = {}
        self._worths: dict[Hashable, float] = {}
        self._columns_asked: dict[Need, PackingFloats] = {}

    def loss(self, columns: NodeColumns, need: Need, rows: Rows) -> PackingFloats:
        """The worth that nodes lose to one more of this, in devices."""
        lost = np.zeros(rows.size)
        for table in self._tables:
            capacities = self._capacities(table, columns, rows)
            lost += self._worth_before(table, columns, capacities, rows)
            lost -= self._worth_after(table, columns, capacities, need, rows)
        return lost

    def capacity_left(self, columns: NodeColumns, need: Need, rows: Rows) -> PackingFloats:
        """The free capacity left on nodes, in parts of the largest node. Exclusive work leaves the rest of its node."""
        free = columns.free[:, rows].astype(np.float64)
        if not need.exclusive:
            free -= self._asked(free, need)
        left: PackingFloats = self.layout.scale @ free
        return left

    def share_device(self, columns: NodeColumns, need: Need, row: int, device: int, part: int) -> int:
        """The device on which a fraction costs the least worth; among equals the fullest, then the first."""
        line: list[int] = columns.devices[device][row].tolist()
        parts = sorted({left for left in line if left >= part})
        if len(parts) == 1:
            return line.index(parts[0])
        key = (need, device, self.state_key(columns, row))
        left = self._choices.get(key)
        if left is None:
            if len(self._choices) >= REMEMBERED_MAX:
                self._choices.clear()
            left = self._choices[key] = self._best_part(columns, need, row, device, part, parts)
        return line.index(left)

    def state_key(self, columns: NodeColumns, row: int) -> Hashable:
        parts = [tuple(sorted(lines[row].tolist())) for lines in columns.devices]
        return (int(self._kinds[row]), columns.free[:, row].tobytes(), *parts)

    def fingerprints(self, fingerprints: Numbers, rows: Rows) -> Numbers:
        """A hash of each node's state: equal hashes mean equal states."""
        prints: Numbers = scattered(fingerprints) + self._kinds[rows].astype(np.uint64)
        return prints

    # Worth.

    def _capacities(self, table: Table, columns: NodeColumns, rows: Rows) -> FreeCapacity:
        parts = columns.devices[table.device][rows]
        return FreeCapacity(
            free=columns.free[:, rows].astype(np.float64),
            whole=columns.whole[table.device, rows],
            useful=table.useful[np.maximum(parts, ABSENT)].sum(axis=1),
            kind=self._kinds[rows],
        )

    def _worth(self, table: Table, capacities: FreeCapacity) -> PackingFloats:
        """The devices of the nodes that the typical shapes could use, weighted by their frequency."""
        usable = capacities.useful[:, table.size]
        usable[capacities.whole[:, None] < table.count] = 0.0
        fits = capacities.free[0][:, None] * table.per[0] + table.unasked[0]
        for resource in range(1, capacities.free.shape[0]):
            np.minimum(
                fits, capacities.free[resource][:, None] * table.per[resource] + table.unasked[resource], out=fits
            )
        many = np.minimum(fits * table.unit, usable)
        usable[fits < 1.0] = 0.0
        usable *= 1.0 - self._repeated
        usable += self._repeated * many
        worth: PackingFloats = np.vecdot(usable, table.weight[capacities.kind])
        return worth

    def _worth_before(
        self, table: Table, columns: NodeColumns, capacities: FreeCapacity, rows: Rows
    ) -> PackingFloats | float:
        """The worth of nodes before a placement; cached for single nodes, because every shape needs it."""
        if rows.size != 1:
            return self._worth(table, capacities)
        key = (table.device, self.state_key(columns, int(rows[0])))
        known = self._worths.get(key)
        if known is None:
            if len(self._worths) >= REMEMBERED_MAX:
                self._worths.clear()
            known = self._worths[key] = float(self._worth(table, capacities)[0])
        return known

    def _worth_after(
        self, table: Table, columns: NodeColumns, capacities: FreeCapacity, need: Need, rows: Rows
    ) -> PackingFloats:
        """The worth left after one more; a fraction takes the device that leaves most."""
        if need.exclusive:
            return np.zeros(rows.size)
        part = dict(need.shared).get(table.device)
        if part is None:
            capacities.free -= self._asked(capacities.free, need)
            taken = dict(need.whole).get(table.device, 0)
            capacities.whole = capacities.whole - np.int32(taken)
            capacities.useful = capacities.useful - taken * table.useful[WHOLE]
            return self._worth(table, capacities)
        # One try for each distinct free part on a node: devices with equal free parts are interchangeable.
        lines = np.sort(columns.devices[table.device][rows], axis=1)
        tried = lines >= part
        tried[:, 1:] &= lines[:, 1:] != lines[:, :-1]
        at, index = np.nonzero(tried)
        worth = self._worth_with_share(table, capacities, need, at, lines[at, index], part)
        return np.maximum.reduceat(worth, at.searchsorted(np.arange(rows.size)))

    def _worth_with_share(
        self, table: Table, capacities: FreeCapacity, need: Need, at: Rows, left: NDArray[np.int32], part: int
    ) -> PackingFloats:
        """The worth of nodes after a fraction took a device with this free part."""
        free = capacities.free[:, at]
        free -= self._asked(free, need)
        useful = capacities.useful[at] + table.useful[left - part] - table.useful[left]
        return self._worth(
            table, FreeCapacity(free, capacities.whole[at] - (left == WHOLE), useful, capacities.kind[at])
        )

    def _asked(self, free: PackingFloats, need: Need) -> PackingFloats:
        """The request as a column to subtract from the free capacity of nodes."""
        known = self._columns_asked.get(need)
        if known is None:
            if len(self._columns_asked) >= REMEMBERED_MAX:
                self._columns_asked.clear()
            known = self._columns_asked[need] = np.zeros((free.shape[0], 1))
            for column, amount in need.plain:
                known[column] += amount
        return known

    def _best_part(self, columns: NodeColumns, need: Need, row: int, device: int, part: int, parts: list[int]) -> int:
        for table in self._tables:
            if table.device == device:
                capacities = self._capacities(table, columns, np.array([row]))
                at = np.zeros(len(parts), np.intp)
                worth = self._worth_with_share(table, capacities, need, at, np.array(parts, np.int32), part)
                return parts[int(worth.round(9).argmax())]
        return parts[0]


# Arrays of the typical shapes.


def _table(fleet: Fleet, device: int, known: Sequence[tuple[Typical, Need]], weight: PackingFloats) -> Table | None:
    asking = [
        (one, need, index)
        for index, (one, need) in enumerate(known)
        if not need.exclusive and device in dict(need.whole + need.shared)
    ]
    if not asking:
        return None
    counts = [dict(need.whole).get(device, 0) for _, need, _ in asking]
    shares = [dict(need.shared).get(device, WHOLE) for _, need, _ in asking]
    sizes, size = np.unique(shares, return_inverse=True)
    left = np.arange(WHOLE + 2)
    left[ABSENT] = 0  # The last entry: a device that does not exist has nothing free.
    per = np.zeros((fleet.now.free.shape[0], len(asking)))
    for entry, (_, need, _) in enumerate(asking):
        for column, amount in need.plain:
            per[column, entry] = 1.0 / amount
    return Table(
        device=device,
        useful=np.where(left[:, None] >= sizes, left[:, None] / WHOLE, 0.0),
        size=size,
        count=np.array(counts, np.int32),
        unit=np.array([max(count, 1) * share for count, share in zip(counts, shares, strict=True)]) / WHOLE,
        per=per,
        unasked=np.where(per > 0, 0.0, PLENTY),
        weight=weight[:, [index for *_, index in asking]] * np.array([one.weight for one, *_ in asking]),
    )


def _pressure(allowed: Bools, offered: PackingFloats) -> PackingFloats:
    """The weight of shapes on each kind of node: 0 where they may not run, else larger for fewer usable devices.

    Shapes that require a scarce model arrive there more often than their fraction of all work suggests; shapes that may
    run anywhere keep their weight. `offered` are the devices on nodes of each kind.
    """
    pressure: PackingFloats = allowed * (offered.sum() / np.maximum(offered @ allowed, 1.0))
    return pressure


def _kinds(fleet: Fleet, wheres: Sequence[Where]) -> tuple[NDArray[np.intp], Bools]:
    kinds = np.zeros(fleet.now.placed.shape[0], np.intp)
    masks = [survey(fleet, where).allowed for where in wheres]
    for mask in masks:
        kinds = np.unique(2 * kinds + mask, return_inverse=True)[1]
    _, first = np.unique(kinds, return_index=True)
    allowed = np.array([mask[first] for mask in masks], np.bool_).reshape(len(wheres), first.size).T
    return kinds, allowed


def _scale(fleet: Fleet) -> PackingFloats:
    """Scale per resource: 1 / the largest amount on a node, normalised to 1 for a node with all the largest amounts."""
    largest = fleet.allocatable.max(axis=1, initial=0)  # A removed node has no capacity.
    if PODS in fleet.column_of:
        largest[fleet.column_of[PODS]] = 0
    scale: PackingFloats = np.where(largest > 0, 1.0 / np.maximum(largest, 1), 0.0) / max(1, np.count_nonzero(largest))
    return scale
