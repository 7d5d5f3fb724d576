"""Where to put something so that the least is spoilt for what comes next.

The worth of a node is how much of its free devices the typical shapes could use: for each of them what it could use if
it came next, and what it could use if nothing but it came from now on. Devices left without the cpu to go with them, in
parts too small for anybody, or too few for those who need many, are worth little. Something goes where it takes away
the least worth; among equals, where the least room is left. Without devices, and before anything was learned, only the
latter counts: best fit.
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

REPEATED = 0.2  # how much it counts what a shape could use if only it came; the rest: what it could use if it came next
FIT_WEIGHT = 0.005  # devices' worth of a whole node's room: decides among equals, and little else
PLENTY = 1e18  # how often a shape fits, as far as a resource is concerned that it does not ask for
ALIKE_MIN = 32  # rows for which it pays to look for those that are in the same state
REMEMBERED_MAX = 20_000  # of each sort, before what is remembered is forgotten

PackingFloats = NDArray[np.float64]
TakenCapacity = list[tuple[int, tuple[int, ...]]]  # (device column, indices)


class ArrivalMix(ArrivalHistory):
    """What arrived, and what that means for the nodes there are."""

    def __init__(self) -> None:
        super().__init__()
        self._outlook: PackingOutlook | None = None
        self._outlook_version = -1

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
    """How good nodes are for one more of a shape that fits there: from 0 to 1, the higher the better. `marks`, where
    they are known, are those of the rows."""
    outlook = arrival_mix.outlook(fleet)
    if rows.size < ALIKE_MIN:
        return _rate(outlook, columns, fleet.need(shape), rows)
    if fingerprints is None:
        fingerprints = fingerprints_of(columns, rows)
    _, first, alike = np.unique(outlook.fingerprints(fingerprints, rows), return_index=True, return_inverse=True)
    return _rate(outlook, columns, fleet.need(shape), rows[first])[alike]


def _rate(outlook: PackingOutlook, columns: NodeColumns, need: Need, rows: Rows) -> PackingFloats:
    lost = np.maximum(outlook.loss(columns, need, rows), 0.0)
    score: PackingFloats = 1.0 / (1.0 + lost + FIT_WEIGHT * outlook.room_left(columns, need, rows))
    return score


def choose_devices(
    fleet: Fleet, columns: NodeColumns, row: int, shape: Shape, arrival_mix: ArrivalMix
) -> TakenCapacity:
    """The devices to take on a node: whole ones from the left, a share where it takes away the least worth."""
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
    """All that the rating of a node depends on: for two nodes of one key it is the same, whatever the shape."""
    return arrival_mix.outlook(fleet).state_key(columns, row)


# What is expected to come.


@dataclass(frozen=True, slots=True)
class Table:
    """The typical shapes that ask for one device resource. Arrays have an entry per shape unless they say otherwise."""

    device: int  # the device column
    useful: PackingFloats  # [part left of a device, size of share]: what of the part such a share could use
    size: NDArray[np.intp]  # which of the sizes of share is asked for; a whole device is one of them
    count: NDArray[np.int32]  # how many devices
    unit: PackingFloats  # the devices asked for, together
    per: PackingFloats  # [resource, shape]: one by what is asked for
    unasked: PackingFloats  # [resource, shape]: plenty, where nothing is
    weight: PackingFloats  # [kind of node, shape]: how likely it comes there; nothing where it may not run


@dataclass(slots=True)
class Rooms:
    """The free room of some nodes, as far as a table is concerned."""

    free: PackingFloats  # [resource, node]
    whole: NDArray[np.int32]  # whole devices
    useful: PackingFloats  # [node, size of share]
    kind: NDArray[np.intp]


class Layout:
    """What a fleet is, as it is described now: the same whatever is typical."""

    def __init__(self, fleet: Fleet) -> None:
        self._names, self._described = fleet.names, fleet.described
        self.scale = _scale(fleet)
        self._kinds: dict[tuple[Where, ...], tuple[NDArray[np.intp], Bools]] = {}

    def is_of(self, fleet: Fleet) -> bool:
        return self._described == fleet.described and self._names is fleet.names

    def kinds(self, fleet: Fleet, wheres: Sequence[Where]) -> tuple[NDArray[np.intp], Bools]:
        """The kind of each node, and which of these may run on each kind: nodes of one kind are right for the same."""
        distinct = tuple(dict.fromkeys(wheres))
        known = self._kinds.get(distinct)
        if known is None:
            known = _kinds(fleet, distinct)
            self._kinds = {distinct: known}  # The next outlook is most likely on the same.
        kinds, allowed = known
        return kinds, allowed[:, [distinct.index(where) for where in wheres]]


class PackingOutlook:
    """The typical shapes, set against a fleet as it is described now."""

    def __init__(
        self,
        fleet: Fleet,
        typical: Sequence[Typical],
        layout: Layout | None = None,
        *,
        repeated: float = REPEATED,
        pressing: bool = True,
    ) -> None:
        """`layout`: the fleet's, where it is known. `pressing`: whether what may use few devices only counts for more
        on these."""
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
        """How much worth nodes lose to one more of this, in devices."""
        lost = np.zeros(rows.size)
        for table in self._tables:
            capacities = self._capacities(table, columns, rows)
            lost += self._worth_before(table, columns, capacities, rows)
            lost -= self._worth_after(table, columns, capacities, need, rows)
        return lost

    def room_left(self, columns: NodeColumns, need: Need, rows: Rows) -> PackingFloats:
        """What is left of nodes, in parts of the largest node there is. Exclusive work leaves all it does not use."""
        free = columns.free[:, rows].astype(np.float64)
        if not need.exclusive:
            free -= self._asked(free, need)
        left: PackingFloats = self.layout.scale @ free
        return left

    def share_device(self, columns: NodeColumns, need: Need, row: int, device: int, part: int) -> int:
        """Where a share takes away the least worth; among equals the fullest device, then the first."""
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
        """A number for each node's state: those with the same number are in the same state."""
        prints: Numbers = scattered(fingerprints) + self._kinds[rows].astype(np.uint64)
        return prints

    # Worth.

    def _capacities(self, table: Table, columns: NodeColumns, rows: Rows) -> Rooms:
        parts = columns.devices[table.device][rows]
        return Rooms(
            free=columns.free[:, rows].astype(np.float64),
            whole=columns.whole[table.device, rows],
            useful=table.useful[np.maximum(parts, ABSENT)].sum(axis=1),
            kind=self._kinds[rows],
        )

    def _worth(self, table: Table, capacities: Rooms) -> PackingFloats:
        """What the typical shapes could use of the nodes' devices, in devices, each counting as often as it comes."""
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

    def _worth_before(self, table: Table, columns: NodeColumns, capacities: Rooms, rows: Rows) -> PackingFloats | float:
        """What nodes are worth as they are. For a single one it is remembered: every shape asks for it."""
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
        self, table: Table, columns: NodeColumns, capacities: Rooms, need: Need, rows: Rows
    ) -> PackingFloats:
        """What is left when one more is there; a share lies where it leaves most."""
        if need.exclusive:
            return np.zeros(rows.size)
        part = dict(need.shared).get(table.device)
        if part is None:
            capacities.free -= self._asked(capacities.free, need)
            taken = dict(need.whole).get(table.device, 0)
            capacities.whole = capacities.whole - np.int32(taken)
            capacities.useful = capacities.useful - taken * table.useful[WHOLE]
            return self._worth(table, capacities)
        # One try for each different part left on a node: devices with the same part left are alike.
        lines = np.sort(columns.devices[table.device][rows], axis=1)
        tried = lines >= part
        tried[:, 1:] &= lines[:, 1:] != lines[:, :-1]
        at, index = np.nonzero(tried)
        worth = self._worth_with_share(table, capacities, need, at, lines[at, index], part)
        return np.maximum.reduceat(worth, at.searchsorted(np.arange(rows.size)))

    def _worth_with_share(
        self, table: Table, capacities: Rooms, need: Need, at: Rows, left: NDArray[np.int32], part: int
    ) -> PackingFloats:
        """What nodes are worth when a share lies on a device of which so much was left."""
        free = capacities.free[:, at]
        free -= self._asked(free, need)
        useful = capacities.useful[at] + table.useful[left - part] - table.useful[left]
        return self._worth(table, Rooms(free, capacities.whole[at] - (left == WHOLE), useful, capacities.kind[at]))

    def _asked(self, free: PackingFloats, need: Need) -> PackingFloats:
        """What is asked for, as a column to be taken from the free room of nodes."""
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
    left[ABSENT] = 0  # The last entry: nothing is left of a device that is not there.
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
    """How much shapes count on each kind of node: nothing where they may not run, else by how few devices they may use.

    What insists on a scarce model is met there more often than its part of all work says; what may run anywhere counts
    as it is. `offered` are the devices on nodes of each kind.
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
    """One by the largest amount that a node has of each resource, together one for a node that has the most of all."""
    largest = fleet.allocatable.max(axis=1, initial=0)  # A node that is gone offers nothing.
    if PODS in fleet.column_of:
        largest[fleet.column_of[PODS]] = 0
    scale: PackingFloats = np.where(largest > 0, 1.0 / np.maximum(largest, 1), 0.0) / max(1, np.count_nonzero(largest))
    return scale
