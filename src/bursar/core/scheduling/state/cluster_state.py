"""The world as the scheduler sees it: the nodes, what is placed on them, and what waits.

It is loaded once and from then on told what changed. A plan enters it while it is decided, so that the next decision
sees the last one; what could not be committed is taken out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush
from typing import TYPE_CHECKING

from bursar.core.nodes.node_claim import SENSITIVE
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.ask import Ask, Taint, claiming, welcome_at
from bursar.core.objects.charge import Amounts, Charge
from bursar.core.objects.pending_reason import PendingReason
from bursar.core.scheduling.state.credit_slow_start import CreditProbes
from bursar.core.scheduling.state.equivalence import EquivalenceClass, EquivalenceKey, GangState
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.fleet import UNCLAIMED, Fleet
from bursar.core.scheduling.state.node_filter import NodeFilters
from bursar.core.scheduling.state.node_scores import NodeScoreCache
from bursar.core.scheduling.state.packing import ArrivalMix
from bursar.core.scheduling.state.placed_columns import NEVER, Placed, PlacedColumns, Spot, devices_of
from bursar.core.scheduling.state.quota_forecast import QuotaForecast
from bursar.core.scheduling.state.topology_counts import TopologyCounts, kin_of
from bursar.core.values.replace import replace

if TYPE_CHECKING:
    from bursar.core.scheduling.cycle.nomination import Nominations


@dataclass(frozen=True, slots=True)
class Nomination:
    """Room that is being cleared for somebody: on these nodes, and until when they are kept for it."""

    nodes: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class ActiveBoost:
    priority: int
    until: float
    uid: str = ""  # of the job: allocations that merely name it have none of it


@dataclass(frozen=True, slots=True)
class Blocked:
    """What was found when something could not be placed, and what must change before it is worth trying again."""

    reason: PendingReason
    freed: int
    limits_changed: int
    until: float
    reservable: bool = True  # false when no time is known at which there will be room
    moved: int | None = None  # where company or what is held for others matters: anything that came or went may help
    firm: bool = False  # not to be tried before that time, whatever changes


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room that will be there: (allocation, row) of each slot, from `start` on."""

    start: float
    slots: tuple[tuple[Ask, int], ...]


@dataclass(slots=True)
class ClusterState:
    fleet: Fleet = field(default_factory=Fleet)
    running: PlacedColumns = field(default_factory=PlacedColumns)
    placed: dict[str, Placed] = field(default_factory=dict)
    waiting: dict[str, EquivalenceClass] = field(default_factory=dict)  # by uid
    groups: dict[EquivalenceKey, EquivalenceClass] = field(default_factory=dict)
    bands: dict[GangKey, GangState] = field(default_factory=dict)
    nominated: dict[str, Nomination] = field(default_factory=dict)  # by uid
    tenants: dict[str, ShareOf] = field(default_factory=dict)
    profiles: dict[str, str] = field(default_factory=dict)  # queue → profile
    boosts: dict[tuple[str, str], ActiveBoost] = field(default_factory=dict)  # by (namespace, job)
    limits: QuotaForecast = field(default_factory=QuotaForecast)
    arrival_mix: ArrivalMix = field(default_factory=ArrivalMix)
    used: dict[str, dict[str, int]] = field(default_factory=dict)  # by tenant, of its own
    capacity: dict[str, int] = field(default_factory=dict)
    # What earlier cycles found out, by the key of the group or the gang.
    blocked: dict[EquivalenceKey | GangKey, Blocked] = field(default_factory=dict)
    probes: CreditProbes = field(default_factory=CreditProbes)
    reserved_for: EquivalenceKey | GangKey | None = None
    reservation: Reservation | None = None
    reserved_at: float = 0.0
    reserved_moved: int = 0  # what had moved by then
    nominations: Nominations | None = None  # what the last cycle holds for those for whom room is being made
    uniform: tuple[int, int] = (-1, 0)  # (version of the fleet, nodes that are alike)
    # What ran beyond its tenant's target when that was last looked at, and when that was.
    burst: tuple[tuple[int, frozenset[tuple[str, tuple[float, ...]]]], frozenset[str]] | None = None
    moved: int = 0  # rises whenever anything came to a node, or left it
    freed: int = 0  # rises whenever room came back, or a node changed
    topology_counts: TopologyCounts = field(init=False)
    terrains: NodeFilters = field(init=False)
    views: NodeScoreCache = field(init=False)

    def __post_init__(self) -> None:
        self.topology_counts = TopologyCounts(self.fleet)
        self.terrains = NodeFilters(self.fleet)
        self.views = NodeScoreCache(self.fleet, self.arrival_mix, self.terrains)

    def pretend(self, ask: Ask) -> None:
        """An allocation waits in a copy of the world: nothing is learnt from it, for it may never come."""
        self._start_waiting(ask)

    # Nodes.

    def put_node(
        self,
        name: str,
        allocatable: Amounts,
        *,
        labels: Mapping[str, str],
        taints: tuple[Taint, ...] = (),
        generation: int = 1,
        ready: bool = True,
        cordoned: bool = False,
        claim: str = UNCLAIMED,
        tenants: tuple[str, ...] = (),
        whole_only: bool = False,
        isolated: bool = False,
    ) -> None:
        """A node came, or offers something else than before; what runs there goes on."""
        there, resources = self._on(name), len(self.fleet.column_of)
        for one in there:
            self._count_exclusive(one, -1)
        self._count_capacity(name, -1)
        row = self.fleet.put(
            name,
            allocatable,
            labels=labels,
            taints=taints,
            generation=generation,
            ready=ready,
            cordoned=cordoned,
            claim=claim,
            tenants=tenants,
            whole_only=whole_only,
            isolated=isolated,
        )
        self._count_capacity(name, 1)
        for one in there:
            self._count_exclusive(one, 1)
            for spot in one.spots:
                if spot.row == row:
                    self._take(one, spot)
        self.running.fit_to(self.fleet.now)
        if len(self.fleet.column_of) > resources:
            self._restate_needs()
        self.freed += 1

    def remove_node(self, name: str) -> None:
        """A node is gone, and with it its part in what ran there."""
        row = self.fleet.row_of[name]
        for one in self._on(name):
            self._leave(one)
            spots = tuple(spot for spot in one.spots if spot.row != row)
            if spots:
                one.spots = spots
                self._enter(one)
            else:
                self._unplace(one)
        self._count_capacity(name, -1)
        self.fleet.remove(name)
        self.freed += 1

    # Allocations.

    def wait(self, ask: Ask, nomination: Nomination | None = None, *, again: bool = False) -> None:
        """An allocation waits: it is new, or it was stopped and waits again."""
        known = self.waiting.get(ask.uid)
        if known is None:
            if ask.uid in self.placed:
                self.forget(ask.uid)
            else:
                self.arrival_mix.learn(ask.shape)
        elif known.members[ask.uid] != ask:
            self._stop_waiting(ask.uid)
        if ask.uid not in self.waiting:
            self._start_waiting(ask)
        if nomination is not None:
            self.nominated[ask.uid] = nomination
        if again and ask.gang is not None:
            self._band(ask).started = True

    def as_user(self, ask: Ask, user: str) -> Ask:
        """What somebody asks for, with what they have claimed. Who has claimed nothing asks as everybody does: only so
        is what is worked out for one shared by all. Work in a queue for sensitive work is sensitive."""
        where = ask.shape.where
        sensitive = where.sensitive or self.profiles.get(ask.queue) == SENSITIVE
        claimant = user if sensitive or self.fleet.holds_any(user) else ""
        if (where.claimant, where.sensitive) == (claimant, sensitive):
            return ask
        return replace(ask, shape=claiming(ask.shape, claimant, sensitive))

    def as_tenant(self, ask: Ask, lineage: Sequence[str]) -> Ask:
        """What somebody asks for, with the nodes that are kept for their tenant or one above it. Where none are, they
        ask as everybody does."""
        tenants = tuple(sorted(self.fleet.named.intersection(lineage))) if self.fleet.named else ()
        return ask if ask.shape.where.tenants == tenants else replace(ask, shape=welcome_at(ask.shape, tenants))

    def renounce(self, uid: str) -> None:
        """No room is being made for it any more: it waits like the others."""
        self.nominated.pop(uid)
        group = self.waiting[uid]
        heappush(group.order, (group.members[uid].submitted_at, uid))

    def place(
        self, ask: Ask, spots: Iterable[Spot], *, since: float, ends_at: float = NEVER, ending: bool = False
    ) -> None:
        """An allocation has room on these nodes."""
        spots = tuple(spots)
        known = self.placed.get(ask.uid)
        if (
            known is not None
            and known.ask == ask
            and {(spot.row, frozenset(spot.devices)) for spot in known.spots}
            == {(spot.row, frozenset(spot.devices)) for spot in spots}
        ):
            ends_otherwise = (ends_at, ending) != (known.ends_at, known.ending)
            known.since, known.ends_at, known.ending = since, ends_at, ending
            self._restate(known, ends_otherwise=ends_otherwise)
            return
        # What has left some of its nodes is counted for all of them until it has left the last.
        counted = known.nodes_bound if known is not None else 0
        self.forget(ask.uid)
        one = Placed(ask, self.fleet.need(ask.shape), spots, since, ends_at, ending, counted)
        self.placed[ask.uid] = one
        self._enter(one)
        if ask.gang is not None:
            band = self._band(ask)
            band.placed.add(ask.uid)
            band.started = True

    def assume(self, ask: Ask, spots: tuple[Spot, ...], now: float) -> None:
        """What a plan places is placed, as far as all later decisions are concerned."""
        self.place(ask, spots, since=now, ends_at=now + ask.ttl_seconds if ask.ttl_seconds else NEVER)

    def assume_many(self, asks: Sequence[Ask], spots: Sequence[tuple[Spot, ...]], now: float) -> None:
        """The same for members of one group on one node, none of which shares a device."""
        self.moved += 1
        first, row = asks[0], spots[0][0].row
        need, group, count = self.fleet.need(first.shape), self.waiting[first.uid], len(asks)
        ends_at = now + first.ttl_seconds if first.ttl_seconds else NEVER
        uids = [ask.uid for ask in asks]
        many = [Placed(ask, need, at, now, ends_at) for ask, at in zip(asks, spots, strict=True)]
        self.placed.update(zip(uids, many, strict=True))
        group.remove(*uids)
        if not group.members:
            self._drop_group(group)
        for uid in uids:
            del self.waiting[uid]
            self.nominated.pop(uid, None)
        if first.gang is not None:
            self._band(first).begin(uids)
        if self.limits.cells:
            for one in many:
                self._count_bound(one, 1)
        self.running.add_many(many, row, self.fleet.now)
        self.fleet.now.take_many(row, need, devices_of([at[0] for at in spots]), count)
        self.topology_counts.come(first, group.key.kin, row, count)
        used = self.used.setdefault(first.tenant, {})
        for name, amount in first.shape.requests:
            used[name] = used.get(name, 0) + amount * count

    def unassume(self, ask: Ask) -> None:
        """A plan that was not committed: it waits as before."""
        self.forget(ask.uid)
        self._start_waiting(ask)

    def end_soon(self, uid: str, at: float) -> None:
        """It was told to stop, and will have by then."""
        # Replaced and not changed: copies of the world share what is placed.
        known = self.placed[uid]
        one = self.placed[uid] = replace(known, ending=True, ends_at=min(known.ends_at, at))
        self._restate(one, ends_otherwise=True)

    def _restate(self, one: Placed, *, ends_otherwise: bool) -> None:
        """What ends at another time leaves its nodes as they are, but not for those who wait until it has ended."""
        self.running.restate(one)
        if ends_otherwise:
            self.fleet.now.touched.extend([spot.row for spot in one.spots])

    def forget(self, uid: str) -> None:
        """An allocation is gone, from wherever it was."""
        if uid in self.waiting:
            self._stop_waiting(uid)
        one = self.placed.get(uid)
        if one is not None:
            self._leave(one)
            self._unplace(one)
            self.freed += 1

    def unit_key(self, uid: str) -> EquivalenceKey | GangKey:
        """What a waiting allocation is decided with: its gang until that has begun, else those that are like it."""
        return self.unit_of(self.waiting[uid])

    def unit_of(self, group: EquivalenceClass) -> EquivalenceKey | GangKey:
        key = group.key
        return key.gang if key.gang is not None and not self.has_begun(key.gang) else key

    def alike_nodes(self) -> int:
        """The number of nodes that are alike in what they offer, of the kind of which there are most."""
        if self.uniform[0] != self.fleet.described:
            offers = self.fleet.allocatable[:, list(self.fleet.row_of.values())].T.tolist()
            self.uniform = (self.fleet.described, max(Counter(map(tuple, offers)).values(), default=0))
        return self.uniform[1]

    def has_begun(self, gang: GangKey) -> bool:
        """Whether a gang has its room: who comes later is placed alone. A gang that is being stopped has none."""
        placed = self.bands[gang].placed
        return bool(placed) and any(not self.placed[uid].ending for uid in placed)

    def ask(self, uid: str) -> Ask | None:
        """What an allocation asks for, whether it waits or has room."""
        if uid in self.waiting:
            return self.waiting[uid].members[uid]
        return self.placed[uid].ask if uid in self.placed else None

    def priority(self, ask: Ask, now: float) -> int:
        """A boost replaces an allocation's own priority until it expires."""
        boost = self.boosts.get((ask.namespace, ask.job)) if ask.job else None
        return boost.priority if boost is not None and is_boosted(boost, ask.owner, now) else ask.priority

    def amounts(self, ask: Ask, rows: Sequence[int]) -> Sequence[tuple[str, int]]:
        """What it holds of the cluster on these nodes: whole nodes when it is exclusive."""
        if not ask.shape.exclusive and len(rows) == 1:
            return ask.shape.requests
        if not ask.shape.exclusive:
            return [(name, amount * len(rows)) for name, amount in ask.shape.requests]
        return [
            (name, int(self.fleet.allocatable[column, list(rows)].sum()))
            for name, column in self.fleet.column_of.items()
            if name in self.capacity
        ]

    # Keeping the parts in step.

    def _on(self, name: str) -> list[Placed]:
        row = self.fleet.row_of.get(name)
        uids = self.running.on_row.get(row, ()) if row is not None else ()
        return [self.placed[uid] for uid in sorted(uids)]

    def _unplace(self, one: Placed) -> None:
        del self.placed[one.ask.uid]
        if one.ask.gang is not None:
            band = self._band(one.ask)
            band.placed.discard(one.ask.uid)
            self._drop_if_empty(band)

    def _take(self, one: Placed, spot: Spot) -> None:
        """Take a node's room; devices that the node has lost since are still those that it gave."""
        for column, indices in spot.devices:
            self.fleet.now.widen(column, max(indices, default=-1) + 1)
        self.fleet.now.take(spot.row, one.need, spot.devices)

    def _restate_needs(self) -> None:
        """A resource is offered for the first time: what runs takes of it as well."""
        for one in self.placed.values():
            need = self.fleet.need(one.ask.shape)
            if need != one.need:
                self.running.remove(one)
                for spot in one.spots:
                    self.fleet.now.give_back(spot.row, one.need, spot.devices)
                one.need = need
                for spot in one.spots:
                    self._take(one, spot)
                self.running.add(one, self.fleet.now)

    def _enter(self, one: Placed) -> None:
        self.moved += 1
        kin = kin_of(one.ask)
        for spot in one.spots:
            self._take(one, spot)
            self.topology_counts.come(one.ask, kin, spot.row)
        self.running.add(one, self.fleet.now)
        self._count_used(one, 1)
        self._count_bound(one, 1)

    def _leave(self, one: Placed) -> None:
        self.moved += 1
        kin = kin_of(one.ask)
        self._count_bound(one, -1)
        self._count_used(one, -1)
        self.running.remove(one)
        for spot in one.spots:
            self.fleet.now.give_back(spot.row, one.need, spot.devices)
            self.topology_counts.come(one.ask, kin, spot.row, -1)

    def _count_bound(self, one: Placed, sign: int) -> None:
        """What a node offers may change while something runs there; it gives back what it was counted for."""
        if self.limits.cells:
            if not one.nodes_bound:
                one.nodes_bound = sum(self.fleet.node_part(spot.row, one.ask.shape) for spot in one.spots)
            self.limits.bind(one.ask, one.nodes_bound, sign)
        if sign < 0:
            one.nodes_bound = 0

    def _count_used(self, one: Placed, sign: int) -> None:
        used = self.used.setdefault(one.ask.tenant, {})
        for name, amount in self.amounts(one.ask, [spot.row for spot in one.spots]):
            used[name] = used.get(name, 0) + sign * amount

    def _count_exclusive(self, one: Placed, sign: int) -> None:
        """What exclusive work holds depends on what its node offers."""
        if one.need.exclusive:
            self._count_used(one, sign)

    def _count_capacity(self, name: str, sign: int) -> None:
        row = self.fleet.row_of.get(name)
        if row is None:
            return
        for resource, column in self.fleet.column_of.items():
            if resource != "pods" and (amount := int(self.fleet.allocatable[column, row])):
                self.capacity[resource] = self.capacity.get(resource, 0) + sign * amount

    def _start_waiting(self, ask: Ask) -> None:
        key = EquivalenceKey(
            ask.tenant, kin_of(ask), ask.queue, ask.priority, ask.preempts, ask.ttl_seconds, ask.checkpoint_seconds,
            ask.data_ready, ask.shape, ask.job, (ask.namespace, ask.gang.group_id) if ask.gang else None,
            _charged(ask.charge), ask.payer, ask.owner, ask.cross_tenant,
        )  # fmt: skip
        if ask.gang is not None:
            self._band(ask).come(ask)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = EquivalenceClass(key, ask.charge)
        group.add(ask)
        self.waiting[ask.uid] = group

    def _stop_waiting(self, uid: str) -> None:
        group = self.waiting.pop(uid)
        ask = group.members[uid]
        group.remove(uid)
        self.nominated.pop(uid, None)
        if not group.members:
            self._drop_group(group)
        if ask.gang is not None:
            band = self._band(ask)
            band.leave(uid)
            self._drop_if_empty(band)

    def _drop_group(self, group: EquivalenceClass) -> None:
        self.groups.pop(group.key, None)
        self.blocked.pop(group.key, None)

    def _band(self, ask: Ask) -> GangState:
        assert ask.gang is not None
        key = (ask.namespace, ask.gang.group_id)
        band = self.bands.get(key)
        if band is None:
            band = self.bands[key] = GangState(key, ask.gang.min_members, ask.gang.timeout_seconds)
        return band

    def _drop_if_empty(self, band: GangState) -> None:
        if not band.waiting and not band.placed:
            self.bands.pop(band.key, None)
            self.blocked.pop(band.key, None)


def is_boosted(boost: ActiveBoost, owner: str, now: float) -> bool:
    """Whether a boost counts for what a job with this uid made."""
    return boost.until > now and boost.uid == owner


def _charged(charge: Charge) -> Hashable:
    """What two charges must have in common to be refused or let in alike; work of one template shares the answer."""
    known: Hashable = charge.known.get("alike")
    if known is None:
        known = charge.known["alike"] = (charge.facts, frozenset({**charge.accepted, **charge.due}.items()))
    return known
