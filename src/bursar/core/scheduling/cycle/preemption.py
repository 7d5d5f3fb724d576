"""Preemption: the smallest, cheapest set of victims for more urgent work, found by trial and undo.

Victims belong to the preemptor's tenant and have strictly lower priority, or are another tenant's burst work while the
preemptor stays within its own target. Only work of a priority class that crosses tenants evicts another tenant's work
for its lower priority; if it would itself be burst, it evicts only burst work: otherwise two could evict each other for
ever. Nothing is evicted within its minimum runtime, and sensitive work never. A gang is evicted as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bursar.core.nodes.eviction import EvictionRule
from bursar.core.objects.ask import Ask, Shape
from bursar.core.scheduling.cycle import inter_pod
from bursar.core.scheduling.cycle.placer import Placer, Slot
from bursar.core.scheduling.cycle.preemption_candidates import PreemptionCandidates
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fair_share import Shares, burst_marks
from bursar.core.scheduling.state.node_reservation import NodeReservations
from bursar.core.scheduling.state.placed_columns import NEVER, Placed
from bursar.core.scheduling.state.topology_counts import MatchKey, match_key_of
from bursar.core.usage.budget import PENALTY_FLOOR

ROWS_TRIED = 32  # nodes examined before the search for victims gives up
WAYS_MAX = 8  # alternative sets of victims that are compared


@dataclass(frozen=True, slots=True)
class Victim:
    """An allocation to evict, and the rule that allows it."""

    uid: str
    rule: EvictionRule


@dataclass(frozen=True, slots=True)
class Clearing:
    """A possible preemption: the victims, and the nodes of the preemptor's slots."""

    victims: tuple[Victim, ...]
    slots: tuple[tuple[Ask, int], ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Asker:
    """The preemptor: its tenant, its priority, and whether it would be burst or counts as such."""

    tenant: str
    priority: int
    burst: bool
    crosses: bool = False  # whether its priority counts against other tenants' work


@dataclass(frozen=True, slots=True)
class _Found:
    """The cheapest victims on one row; none if no eviction suffices."""

    victims: tuple[Victim, ...]
    worst: int  # the highest priority among them
    cost: float


@dataclass(frozen=True, slots=True)
class _Party:
    """Victims that are evicted together: one allocation or a gang, named after its first."""

    name: str
    members: list[tuple[Placed, EvictionRule]]
    worst: int
    cost: float


@dataclass(slots=True)
class Preemptor:
    """Finds the cheapest set of victims whose eviction lets a blocked unit fit."""

    cluster: ClusterState
    shares: Shares
    placer: Placer
    reservations: NodeReservations
    now: float
    min_runtime_seconds: float
    _burst: frozenset[str] | None = None
    _tried: dict[tuple[Shape, MatchKey, float, Asker], dict[int, _Found | None]] = field(default_factory=dict)
    _prospects: dict[tuple[int, bool, str | None], PreemptionCandidates] = field(default_factory=dict)
    _seen: int | None = None  # the position in the log of touched rows up to which caches are current; none at first
    _gone: set[str] = field(default_factory=set)  # victims of the slots before this one

    def clear(self, asks: Sequence[Ask], priority: int) -> Clearing | None:
        """The victims to evict so that all of these fit; the cluster state is left as it was."""
        amounts = [pair for ask in asks for pair in self._amounts_at_most(ask)]
        crosses = all(ask.cross_tenant for ask in asks)
        asker = Asker(asks[0].tenant, priority, self._counts_as_burst(asks[0].tenant, amounts), crosses)
        victims: dict[str, Victim] = {}
        slots: list[tuple[Ask, int]] = []
        undo: list[Callable[[], None]] = []
        cost = 0.0
        try:
            wanted = self.placer.slots(asks)
            for slot in wanted:
                avoid = [row for ask, row in slots if ask.uid == slot.ask.uid]
                found = self._slot(slot, asker, avoid, alone=len(wanted) == 1)
                if found is None:
                    return None
                row, on_row = found
                for victim in on_row.victims:
                    victims[victim.uid] = victim
                    self._gone.add(victim.uid)
                    self._lift(self.cluster.placed[victim.uid], undo)
                self._settle(slot, row, undo)
                slots.append((slot.ask, row))
                cost += on_row.cost
        finally:
            self._gone.clear()
            while undo:
                undo.pop()()
        if not victims or self._could_come_back(victims.values(), asker, amounts):
            return None
        return Clearing(tuple(sorted(victims.values(), key=lambda one: one.uid)), tuple(slots), cost)

    def _counts_as_burst(self, tenant: str, amounts: Sequence[tuple[str, int]]) -> bool:
        """Whether it would be burst, or counts as burst because its budget is used up."""
        used_up = any(seat.share.penalty <= PENALTY_FLOOR for seat in self.shares.seat(tenant).path)
        return used_up or not self.shares.within_target_after(tenant, amounts)

    def _amounts_at_most(self, ask: Ask) -> Sequence[tuple[str, int]]:
        """Upper bound of the amounts it will hold; for whole nodes, those of the largest matching node."""
        if not ask.shape.exclusive:
            return self.cluster.amounts(ask, [0] * ask.shape.nodes)
        fleet = self.cluster.fleet
        right = np.flatnonzero(self.cluster.memory.node_filters.of(ask.shape.where).allowed & fleet.now.open)
        return [
            (name, int(fleet.allocatable[column, right].max(initial=0)) * ask.shape.nodes)
            for name, column in fleet.column_of.items()
        ]

    def _could_come_back(
        self, victims: Iterable[Victim], asker: Asker, amounts: Sequence[tuple[str, int]]
    ) -> bool:  # fmt: skip
        """Whether a burst victim would no longer be burst afterwards, and could then evict the preemptor.

        Of several that exceed the target together, one alone may be within it.
        """
        units: dict[tuple[str, str], list[tuple[str, int]]] = {}
        gone: list[tuple[str, Sequence[tuple[str, int]]]] = []
        for victim in victims:
            one = self.cluster.placed[victim.uid]
            held = self.cluster.amounts(one.ask, [spot.row for spot in one.spots])
            gone.append((one.ask.tenant, held))
            if one.ask.tenant != asker.tenant and (asker.burst or victim.rule is EvictionRule.BURST):
                gang = f"{one.ask.namespace}/{one.ask.gang.group_id}" if one.ask.gang is not None else victim.uid
                units.setdefault((one.ask.tenant, gang), []).extend(held)
        if not units:
            return False
        for tenant, held in gone:
            self.shares.add(tenant, held, -1)
        self.shares.add(asker.tenant, amounts)
        try:
            return any(self.shares.within_target_after(tenant, held) for (tenant, _), held in units.items())
        finally:
            self.shares.add(asker.tenant, amounts, -1)
            for tenant, held in gone:
                self.shares.add(tenant, held)

    def evict(self, clearing: Clearing, by: float) -> None:
        """Evict the victims by that deadline, and reserve the capacity for the preemptor."""
        for victim in clearing.victims:
            one = self.cluster.placed[victim.uid]
            for spot in one.spots:
                self.reservations.take(spot, one.need, one.ends_at, -1)
            self.cluster.end_soon(victim.uid, by)
        self.reservations.add(clearing.slots, by)

    def is_burst(self, uid: str) -> bool:
        return uid in self._burst_marks()

    def _burst_marks(self) -> frozenset[str]:
        """Burst work, beyond its tenant's target; computed only for tenants that hold more than that."""
        if self._burst is None:
            over = {tenant: self._targets(tenant) for tenant in self.cluster.used if self._is_over(tenant)}
            # Without placements, ends or changed targets, the marks stay the same.
            key = (self.cluster.moved, frozenset(over.items()))
            if self.cluster.memory.burst is None or self.cluster.memory.burst[0] != key:
                self.cluster.memory.burst = (key, self._mark(over) if over else frozenset())
            self._burst = self.cluster.memory.burst[1]
        return self._burst

    def _mark(self, over: Container[str]) -> frozenset[str]:
        by_tenant: dict[str, list[tuple[float, str, Sequence[tuple[str, int]]]]] = {}
        for one in self.cluster.placed.values():
            if one.ask.tenant in over:
                amounts = self.cluster.amounts(one.ask, [spot.row for spot in one.spots])
                by_tenant.setdefault(one.ask.tenant, []).append((one.since, one.ask.uid, amounts))
        return burst_marks(self.shares, by_tenant)

    def _targets(self, tenant: str) -> tuple[float, ...]:
        return tuple(seat.target for seat in self.shares.seat(tenant).path)

    def _is_over(self, tenant: str) -> bool:
        return any(seat.actual > seat.base for seat in self.shares.seat(tenant).path)

    def rule(self, one: Placed, asker: Asker) -> EvictionRule | None:
        """The rule under which this may be evicted for the preemptor; none if it may not."""
        if one.ending or one.since >= self.now or one.since + self.min_runtime_seconds > self.now:
            return None
        if one.ask.shape.where.sensitive:
            return None
        lower = self.cluster.priority(one.ask, self.now) < asker.priority
        if one.ask.tenant == asker.tenant:
            return EvictionRule.LOWER_PRIORITY if lower else None
        if lower and asker.crosses:
            return EvictionRule.LOWER_PRIORITY if not asker.burst or self.is_burst(one.ask.uid) else None
        return EvictionRule.BURST if not asker.burst and self.is_burst(one.ask.uid) else None

    def price(self, one: Placed) -> float:
        """The cost of an eviction: the lost work, more if it is nearly done, half for burst."""
        ran = max(0.0, self.now - one.since)
        lost = min(ran, one.ask.checkpoint_seconds) if one.ask.checkpoint_seconds else ran
        done = ran / (one.ends_at - one.since) if NEVER > one.ends_at > one.since else 0.0
        size = sum(self.cluster.fleet.node_part(spot.row, one.ask.shape) for spot in one.spots)
        return (1.0 + lost) * size * (1.0 + min(1.0, done)) * (0.5 if self.is_burst(one.ask.uid) else 1.0)

    # One slot.

    def _slot(self, slot: Slot, asker: Asker, avoid: Sequence[int], *, alone: bool) -> tuple[int, _Found] | None:
        # A single slot did not fit without preemption, or it would have been placed.
        free = self.placer.free_row(slot, avoid) if not alone else None
        if free is not None:
            return free, _Found((), 0, 0.0)
        tried = self._known(slot, asker)
        ways: list[tuple[int, _Found]] = []
        for row in self._promising(slot, asker, avoid):
            if row not in tried:
                tried[row] = self._on_row(slot, row, asker)
            found = tried[row]
            if found is not None:
                ways.append((row, found))
                if len(ways) == WAYS_MAX:
                    break
        return min(ways, key=lambda way: _rank(way[1], way[0]), default=None)

    def _known(self, slot: Slot, asker: Asker) -> dict[int, _Found | None]:
        """Cached results of unchanged rows; empty with inter-pod rules, because they depend on other rows as well."""
        touched = self.cluster.fleet.now.touched
        rows = set(touched[self._seen :]) if self._seen is not None else set[int]()
        for found in self._tried.values():
            for row in rows & found.keys():
                del found[row]
        for prospects in self._prospects.values():
            prospects.look_again(rows, self._gone)
        self._seen = len(touched)
        if not inter_pod.is_free(slot.ask, self.cluster.topology_counts):
            return {}
        return self._tried.setdefault((slot.ask.shape, slot.match_key, slot.ends_at, asker), {})

    def _promising(self, slot: Slot, asker: Asker, avoid: Sequence[int]) -> list[int]:
        """The rows on which the slot fits once all candidates are evicted; those with the least urgent work first."""
        # Burst work may be evicted whatever its urgency, unless the preemptor would be burst itself.
        also = frozenset[str]() if asker.burst else self._burst_marks()
        tenant = None if asker.crosses else asker.tenant
        key = (asker.priority, asker.burst, tenant)
        prospects = self._prospects.get(key)
        if prospects is None:
            prospects = PreemptionCandidates(
                self.cluster, self.now, self.min_runtime_seconds, asker.priority, also, tenant
            )
            self._prospects[key] = prospects
        return prospects.rows(slot.need, self.placer.right_rows(slot), avoid, ROWS_TRIED)

    def _on_row(self, slot: Slot, row: int, asker: Asker) -> _Found | None:
        """Evict the cheapest until the slot fits, then spare victims that prove unnecessary."""
        parties = self._parties(row, asker)
        gone: list[_Party] = []
        undo: dict[str, list[Callable[[], None]]] = {}
        try:
            for party in parties:
                self._lift_all(party, undo)
                gone.append(party)
                if self._fits(slot, row):
                    break
            else:
                return None
            for party in reversed(gone[:-1]):
                _undo(undo[party.name])
                if self._fits(slot, row):
                    gone.remove(party)
                else:
                    self._lift_all(party, undo)
        finally:
            for steps in undo.values():
                _undo(steps)
            # The state is restored, so caches of the row stay valid.
            self._seen = len(self.cluster.fleet.now.touched)
        victims = tuple(Victim(one.ask.uid, rule) for party in gone for one, rule in party.members)
        return _Found(victims, max(party.worst for party in gone), sum(party.cost for party in gone))

    def _parties(self, row: int, asker: Asker) -> list[_Party]:
        """Possible victims on a row, each with its gang; the least urgent first, then the cheapest."""
        found: dict[str, _Party] = {}
        for uid in sorted(self.cluster.running.on_row.get(row, ())):
            members = self._party(self.cluster.placed[uid], asker) if uid not in self._gone else None
            if members:
                name = members[0][0].ask.uid
                worst = max(self.cluster.priority(one.ask, self.now) for one, _ in members)
                found[name] = _Party(name, members, worst, sum(self.price(one) for one, _ in members))
        return sorted(found.values(), key=lambda party: (party.worst, party.cost, party.name))

    def _party(self, one: Placed, asker: Asker) -> list[tuple[Placed, EvictionRule]] | None:
        """The members evicted with it: its gang, or itself. None if one of them may not be evicted."""
        others: Iterable[str] = (one.ask.uid,)
        if one.ask.gang is not None:
            others = sorted(self.cluster.gangs[one.ask.namespace, one.ask.gang.group_id].placed)
        party = []
        for uid in others:
            each = self.cluster.placed[uid]
            rule = self.rule(each, asker)
            if rule is None:
                return None
            party.append((each, rule))
        return party

    def _fits(self, slot: Slot, row: int) -> bool:
        fleet = self.cluster.fleet
        return fleet.now.fits_at(slot.need, fleet.allocatable, row) and self.placer.admits(slot, row)

    # Trying.

    def _lift_all(self, party: _Party, undo: dict[str, list[Callable[[], None]]]) -> None:
        for one, _ in party.members:
            self._lift(one, undo.setdefault(party.name, []))

    def _lift(self, one: Placed, undo: list[Callable[[], None]]) -> None:
        match_key = match_key_of(one.ask)
        for spot in one.spots:
            self.cluster.fleet.now.give_back(spot.row, one.need, spot.devices)
            self.cluster.topology_counts.come(one.ask, match_key, spot.row, -1)
            self.reservations.take(spot, one.need, one.ends_at, -1)

        def back() -> None:
            for spot in one.spots:
                self.cluster.fleet.now.take(spot.row, one.need, spot.devices)
                self.cluster.topology_counts.come(one.ask, match_key, spot.row)
                self.reservations.take(spot, one.need, one.ends_at)

        undo.append(back)

    def _settle(self, slot: Slot, row: int, undo: list[Callable[[], None]]) -> None:
        spot = self.placer.at(slot, row)
        self.placer.take(slot, spot)

        def back() -> None:
            self.placer.give_back(slot, spot)

        undo.append(back)


def _undo(steps: list[Callable[[], None]]) -> None:
    while steps:
        steps.pop()()


def _rank(found: _Found, row: int) -> tuple[int, float, int, int]:
    """The least urgent victims first, then the least loss, then the fewest."""
    return found.worst, found.cost, len(found.victims), row
