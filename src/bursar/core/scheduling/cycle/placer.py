"""Placement of a unit: all of its slots, or none.

A unit is placed together: one allocation, one that asks for several nodes, or a gang. Its slots are tried one after
another on the cluster state itself, and the state is restored afterwards. Identical slots without inter-pod rules are
placed greedily, which is exact; where shapes differ or inter-pod rules apply, a bounded search follows a failed greedy
try.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from msgspec import Struct

from bursar.core.objects.ask import Ask, Shape
from bursar.core.scheduling.cycle import inter_pod
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fleet import NOWHERE, Bools, Fleet, Ints, LabelColumn, Need, NodeColumns
from bursar.core.scheduling.state.node_filter import Floats
from bursar.core.scheduling.state.node_reservation import NodeReservations
from bursar.core.scheduling.state.node_scores import NO
from bursar.core.scheduling.state.packing import choose_devices
from bursar.core.scheduling.state.placed_columns import NEVER, DeviceSets, Spot, devices_of
from bursar.core.scheduling.state.topology_counts import MatchKey, match_key_of
from bursar.core.values.quantity import is_device

# The labels by which nodes are close together, the closest first.
LEVELS = ("rack", "topology.kubernetes.io/rack", "topology.kubernetes.io/zone")
DOMAINS_TRIED = 3
CAPACITY_MAX = 1 << 40  # for shapes without counted requests
SEARCH_SLOTS_MAX = 16
SEARCH_STEPS_MAX = 3000


class Slot(Struct, frozen=True):
    """One node's worth of an allocation."""

    ask: Ask
    need: Need
    match_key: MatchKey
    ends_at: float


Choice = list[tuple[Ask, tuple[Spot, ...]]]


class Placer:
    """Finds nodes for units in a cluster state, beside the reservations of others."""

    def __init__(self, cluster: ClusterState, reservations: NodeReservations, now: float) -> None:
        self._cluster = cluster
        self.reservations = reservations
        self._now = now

    def choose(self, asks: Sequence[Ask], only: Bools | None = None) -> Choice | None:
        """Spots for all slots of these, or none. The cluster state is left as it was."""
        if len(asks) == 1 and asks[0].shape.nodes == 1:
            spot = self._spot(self.slot(asks[0]), (), only)
            return [(asks[0], (spot,))] if spot is not None else None
        slots = self.slots(asks)
        plain = self._plain(slots)
        for mask in self._regions(slots, only, plain=plain):
            found = self._all(slots, mask, plain=plain)
            if found is not None:
                return found
        return None

    def count(self, asks: Sequence[Ask]) -> int:
        """The number of slots that fit at once, by a first greedy try. The cluster state is left as it was."""
        slots = self.slots(asks)
        if not self._plain(slots):
            return len(self._in_turn(slots, None, to_the_end=True))
        fleet, first = self._cluster.fleet, slots[0]
        counts = np.where(self.scores(first) > NO, fit_counts(fleet, fleet.now, first.need), 0)
        return min(int(np.minimum(counts, len(asks)).sum()), len(slots))

    def slot(self, ask: Ask) -> Slot:
        ends_at = self._now + ask.ttl_seconds if ask.ttl_seconds else NEVER
        return Slot(ask, self._cluster.fleet.need(ask.shape), match_key_of(ask), ends_at)

    def slots(self, asks: Sequence[Ask]) -> list[Slot]:
        """The slots, largest first: demanding slots are placed while most capacity is free."""
        ordered = sorted(asks, key=lambda ask: (*_lightness(ask.shape), ask.submitted_at, ask.uid))
        return [slot for ask in ordered for slot in [self.slot(ask)] * ask.shape.nodes]

    def scores(self, slot: Slot) -> Floats:
        """The score of each node for a slot; minus infinity where it cannot go. Read only."""
        cluster, ask = self._cluster, slot.ask
        view = cluster.memory.node_scores.of(ask.shape)
        score = view.score
        free = inter_pod.is_free(ask, cluster.topology_counts)
        if (free and not self.reservations.starts) or score[score.argmax()] == NO:
            return score
        held = self.reservations.mask(slot.need, slot.ends_at)
        if held is not None:
            score = np.where(held, score, NO)
        if free:
            return score
        for _, mask in inter_pod.masks(ask, slot.match_key, view.node_filter, cluster.fleet, cluster.topology_counts):
            score = np.where(mask, score, NO)
        bonus = inter_pod.wishes(ask, view.node_filter, cluster.fleet, cluster.topology_counts)
        return score if bonus is None else score + bonus

    def run_length(self, shape: Shape, row: int) -> int:
        """The number of these that a node takes before its score falls; 0 for shared devices and exclusive nodes."""
        view = self._cluster.memory.node_scores.of(shape)
        if view.need.shared or view.need.exclusive:
            return 0
        return self._cluster.memory.node_scores.run_length(view, row)

    def devices_for(self, shape: Shape, row: int, count: int) -> list[DeviceSets]:
        """Whole devices for so many, from the left, as they would be chosen one by one."""
        fleet = self._cluster.fleet
        whole = fleet.need(shape).whole
        free = {column: fleet.now.whole_devices(column, row) for column, _ in whole}
        return [
            tuple([(column, tuple(free[column][number * each : (number + 1) * each])) for column, each in whole])
            for number in range(count)
        ]

    def free_row(self, slot: Slot, avoid: Sequence[int]) -> int | None:
        """The best node on which the slot fits without preemption."""
        score = self._restricted(slot, avoid, None)
        row = int(score.argmax())
        return row if score[row] > NO else None

    def right_rows(self, slot: Slot) -> Bools:
        """The nodes that match by labels and taints."""
        return self._cluster.memory.node_filters.of(slot.ask.shape.where).allowed

    def admits(self, slot: Slot, row: int) -> bool:
        """Whether a node meets the inter-pod rules, and its reservations would not be delayed."""
        cluster = self._cluster
        if not self.reservations.allows(row, slot.need, slot.ends_at):
            return False
        if inter_pod.is_free(slot.ask, cluster.topology_counts):
            return True
        node_filter = cluster.memory.node_filters.of(slot.ask.shape.where)
        return all(
            mask[row]
            for _, mask in inter_pod.masks(
                slot.ask, slot.match_key, node_filter, cluster.fleet, cluster.topology_counts
            )
        )

    # One slot.

    def _spot(self, slot: Slot, avoid: Sequence[int], only: Bools | None) -> Spot | None:
        score = self._restricted(slot, avoid, only)
        row = int(score.argmax())
        return self.at(slot, row) if score[row] > NO else None

    def _restricted(self, slot: Slot, avoid: Sequence[int], only: Bools | None) -> Floats:
        score = self.scores(slot)
        if only is not None:
            score = np.where(only, score, NO)
        if avoid:
            score = score.copy()
            score[list(avoid)] = NO
        return score[: max(1, self._cluster.fleet.size)]

    def at(self, slot: Slot, row: int) -> Spot:
        fleet = self._cluster.fleet
        devices = self.reservations.devices(row, slot.need, slot.ends_at)
        if devices is None and not slot.need.exclusive and (slot.need.whole or slot.need.shared):
            devices = tuple(choose_devices(fleet, fleet.now, row, slot.ask.shape, self._cluster.memory.arrival_mix))
        return Spot(row, devices or ())

    # All slots.

    def _all(self, slots: Sequence[Slot], only: Bools | None, *, plain: bool) -> Choice | None:
        taken = self._in_runs(slots, only) if plain and self._may_run(slots[0]) else self._in_turn(slots, only)
        if len(taken) == len(slots):
            return _gather(taken)
        if plain:
            return self._roomiest(slots, only) if slots[0].ask.shape.nodes > 1 else None
        if len(slots) > SEARCH_SLOTS_MAX:
            return None
        return self._search(slots, only) or (self._search_orders(slots, only) if _order_matters(slots) else None)

    def _plain(self, slots: Sequence[Slot]) -> bool:
        """Whether all slots are identical and no inter-pod rule applies, so that they are interchangeable."""
        return _alike(slots) and self._alone(slots)

    def _may_run(self, slot: Slot) -> bool:
        """Whether several identical slots may be placed on a node at once: no shared devices, no reservations."""
        need = slot.need
        return slot.ask.shape.nodes == 1 and not (need.shared or need.exclusive or self.reservations.starts)

    def _in_runs(self, slots: Sequence[Slot], only: Bools | None) -> list[tuple[Slot, Spot]]:
        """The result of `_in_turn`, for plain slots: the best node takes at once as many as it can before its score
        falls. Topology counts are not updated, because no inter-pod rule applies."""
        now, shape, need = self._cluster.fleet.now, slots[0].ask.shape, slots[0].need
        taken: list[tuple[Slot, Spot]] = []
        runs: list[tuple[int, Need, DeviceSets, int]] = []
        try:
            while len(taken) < len(slots):
                score = self._restricted(slots[0], (), only)
                row = int(score.argmax())
                if score[row] == NO:
                    break
                count = min(len(slots) - len(taken), self.run_length(shape, row))
                spots = [Spot(row, own) for own in self.devices_for(shape, row, count)]
                taken += zip(slots[len(taken) : len(taken) + count], spots, strict=True)
                runs.append((row, need, devices_of(spots), count))
                now.take_many(*runs[-1])
            return taken
        finally:
            for run in reversed(runs):
                now.give_back_many(*run)

    def _in_turn(
        self, slots: Sequence[Slot], only: Bools | None, *, to_the_end: bool = False
    ) -> list[tuple[Slot, Spot]]:
        """Place each slot on its best node, one after another, up to the first that has none, or `to_the_end`. The
        cluster state is restored."""
        taken: list[tuple[Slot, Spot]] = []
        try:
            for slot in slots:
                spot = self._spot(slot, _rows_of(slot, taken), only)
                if spot is None:
                    if to_the_end:
                        continue
                    break
                self.take(slot, spot)
                taken.append((slot, spot))
            return list(taken)
        finally:
            self._undo(taken)

    def _roomiest(self, slots: Sequence[Slot], only: Bools | None) -> Choice | None:
        """Place allocations of several distinct nodes each on the emptiest nodes, which leaves most to the next."""
        fleet = self._cluster.fleet
        taken: list[tuple[Slot, Spot]] = []
        try:
            for slot in slots:
                score = self._restricted(slot, _rows_of(slot, taken), only)
                capacity = np.where(score > NO, fit_counts(fleet, fleet.now, slot.need)[: score.shape[0]], 0)
                row = int(capacity.argmax())
                if not capacity[row]:
                    return None
                spot = self.at(slot, row)
                self.take(slot, spot)
                taken.append((slot, spot))
            return _gather(taken)
        finally:
            self._undo(taken)

    def _search(self, slots: Sequence[Slot], only: Bools | None) -> Choice | None:
        """Backtrack over nodes and devices of earlier slots, until all fit or the step limit is reached."""
        return self._explore(lambda taken: [slots[len(taken)]] if len(taken) < len(slots) else [], len(slots), only)

    def _search_orders(self, slots: Sequence[Slot], only: Bools | None) -> Choice | None:
        """Search over the order of slots as well: with inter-pod rules, the order decides what fits."""
        kinds: dict[tuple[Shape, MatchKey], list[Slot]] = {}
        for slot in slots:
            kinds.setdefault((slot.ask.shape, slot.match_key), []).append(slot)

        def next_of(taken: Sequence[tuple[Slot, Spot]]) -> list[Slot]:
            counts = Counter((slot.ask.shape, slot.match_key) for slot, _ in taken)
            return [some[counts[kind]] for kind, some in kinds.items() if counts[kind] < len(some)]

        return self._explore(next_of, len(slots), only)

    def _explore(
        self, next_of: Callable[[Sequence[tuple[Slot, Spot]]], Sequence[Slot]], count: int, only: Bools | None
    ) -> Choice | None:
        taken: list[tuple[Slot, Spot]] = []
        steps = 0

        def extend() -> bool:
            nonlocal steps
            if len(taken) == count:
                return True
            for slot in next_of(taken):
                for spot in self._options(slot, taken, only):
                    steps += 1
                    if steps > SEARCH_STEPS_MAX:
                        return False
                    self.take(slot, spot)
                    taken.append((slot, spot))
                    if extend():
                        return True
                    taken.pop()
                    self.give_back(slot, spot)
            return False

        found = extend()
        choice = _gather(taken) if found else None
        self._undo(taken)
        return choice

    def _options(self, slot: Slot, taken: Sequence[tuple[Slot, Spot]], only: Bools | None) -> Iterator[Spot]:
        score = self._restricted(slot, _rows_of(slot, taken), only).copy()
        if taken and self._is_copy(taken[-1][0], slot):
            # Slots that are alike may be given their nodes in any order: one order is enough.
            score[: taken[-1][1].row] = NO
        for row in np.argsort(-score, kind="stable"):
            if score[row] == NO:
                return
            best = self.at(slot, int(row))
            yield best
            yield from self._other_devices(slot, best)

    def _other_devices(self, slot: Slot, best: Spot) -> Iterator[Spot]:
        """A share may lie on any device with enough left; devices with the same part left are alike."""
        if not slot.need.shared or best.row in self.reservations.starts:
            return
        shared = dict(slot.need.shared)
        options = []
        for column, indices in best.devices:
            if column in shared:
                free = self._cluster.fleet.now.devices[column][best.row].tolist()
                by_left: dict[int, tuple[int, ...]] = {
                    left: (index,) for index, left in enumerate(free) if left >= shared[column]
                }
                by_left[free[indices[0]]] = tuple(indices)
                options.append([(column, which) for which in by_left.values()])
            else:
                options.append([(column, tuple(indices))])
        for devices in product(*options):
            if devices != best.devices:
                yield Spot(best.row, devices)

    def take(self, slot: Slot, spot: Spot) -> None:
        self._cluster.fleet.now.take(spot.row, slot.need, spot.devices)
        self._cluster.topology_counts.come(slot.ask, slot.match_key, spot.row)
        self.reservations.take(spot, slot.need, slot.ends_at)

    def give_back(self, slot: Slot, spot: Spot) -> None:
        self.reservations.take(spot, slot.need, slot.ends_at, -1)
        self._cluster.topology_counts.come(slot.ask, slot.match_key, spot.row, -1)
        self._cluster.fleet.now.give_back(spot.row, slot.need, spot.devices)

    def _undo(self, taken: Sequence[tuple[Slot, Spot]]) -> None:
        for slot, spot in reversed(taken):
            self.give_back(slot, spot)

    def _is_copy(self, one: Slot, other: Slot) -> bool:
        """Whether two slots are interchangeable."""
        return (
            one.ask.shape == other.ask.shape
            and one.ends_at == other.ends_at
            and (one.ask.shape.nodes == 1 or one.ask.uid == other.ask.uid)
            and self._alone((one, other))
        )

    def _alone(self, slots: Sequence[Slot]) -> bool:
        return all(inter_pod.is_free(slot.ask, self._cluster.topology_counts) for slot in slots)

    # Close together.

    def _regions(self, slots: Sequence[Slot], only: Bools | None, *, plain: bool) -> Iterator[Bools | None]:
        """Domains to try: single racks, single zones, then anywhere; of those that suffice, the tightest first."""
        if plain:
            shape, need = slots[0].ask.shape, slots[0].need
            counts = fit_counts(self._cluster.fleet, self._cluster.fleet.now, need)
            counts = np.where(self._cluster.memory.node_filters.of(shape.where).allowed, counts, 0)
            if shape.nodes > 1:
                counts = np.minimum(counts, len(slots) // shape.nodes)  # the slots of one lie on different nodes
            if only is not None:
                counts = np.where(only, counts, 0)
            if counts.sum() < len(slots):
                return
            for key in LEVELS:
                yield from self._tightest(key, counts, len(slots), only)
        yield only

    def _tightest(self, key: str, counts: Ints, wanted: int, only: Bools | None) -> Iterator[Bools]:
        column = self._cluster.fleet.label(key)
        if not column.values:
            return
        sums = capacity_by_domain(column, counts)
        enough = np.flatnonzero(sums >= wanted)
        for domain in enough[np.argsort(sums[enough], kind="stable")][:DOMAINS_TRIED]:
            inside: Bools = column.codes == domain
            yield inside if only is None else inside & only


def fit_counts(fleet: Fleet, columns: NodeColumns, need: Need) -> Ints:
    """The number of these that fit on each node."""
    if need.exclusive or need.unknown:
        return columns.fits(need, fleet.allocatable).astype(np.int64)
    capacity = np.where(columns.open & ~columns.exclusive, CAPACITY_MAX, 0)
    for column, amount in need.plain:
        if amount:
            np.minimum(capacity, columns.free[column] // amount, out=capacity)
    for column, count in need.whole:
        np.minimum(capacity, columns.whole[column] // count, out=capacity)
    for column, part in need.shared:
        np.minimum(capacity, (np.maximum(columns.devices[column], 0) // part).sum(axis=1), out=capacity)
    return np.maximum(capacity, 0)  # a node that lost some of what it offered may have given more than it has


def capacity_for(fleet: Fleet, need: Need) -> Ints:
    """The number of these that each node that accepts work would hold if it were empty."""
    capacity = np.where(fleet.now.open & (not need.unknown), 1 if need.exclusive else CAPACITY_MAX, 0)
    for column, amount in need.plain:
        if amount:
            np.minimum(capacity, fleet.allocatable[column] // amount, out=capacity)
    return capacity


def capacity_by_domain(column: LabelColumn, counts: Ints) -> Ints:
    """The sum of the counts of each domain's nodes."""
    sums = np.bincount(column.codes - NOWHERE, weights=counts, minlength=len(column.values) + 1)
    return sums[1:].astype(np.int64)  # without the nodes in none


@lru_cache(4096)
def _lightness(shape: Shape) -> tuple[int, ...]:
    """Sort key of slots: whole nodes first, then many devices, then large other requests."""
    devices = sum(amount for name, amount in shape.requests if is_device(name))
    return (0 if shape.exclusive else 1, -devices, -sum(amount for _, amount in shape.requests))


def _alike(slots: Sequence[Slot]) -> bool:
    first = slots[0]
    return all(slot.ask.shape == first.ask.shape and slot.ends_at == first.ends_at for slot in slots)


def _order_matters(slots: Sequence[Slot]) -> bool:
    """Whether slots may satisfy inter-pod rules of each other."""
    wheres = [slot.ask.shape.where for slot in slots]
    alike = all(slot.ask.shape == slots[0].ask.shape and slot.match_key == slots[0].match_key for slot in slots)
    return not alike and any(where.near or any(spread.hard for spread in where.spreads) for where in wheres)


def _rows_of(slot: Slot, taken: Sequence[tuple[Slot, Spot]]) -> list[int]:
    """The nodes of other slots of the same allocation, whose nodes must be distinct."""
    if slot.ask.shape.nodes == 1:
        return []
    return [spot.row for other, spot in taken if other.ask.uid == slot.ask.uid]


def _gather(taken: Sequence[tuple[Slot, Spot]]) -> Choice:
    spots: dict[str, list[Spot]] = {}
    asks: dict[str, Ask] = {}
    for slot, spot in taken:
        spots.setdefault(slot.ask.uid, []).append(spot)
        asks[slot.ask.uid] = slot.ask
    return [(asks[uid], tuple(found)) for uid, found in spots.items()]
