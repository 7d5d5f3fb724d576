"""Cluster state: the nodes, the work placed on them, pending work, and the tenants.

The informer loads it once and then applies each change. A plan enters it while it is decided, so that the next decision
sees the last one; bindings that could not be committed are taken out again. Results of earlier cycles and caches are
not part of it: `SchedulerMemory` has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from heapq import heappush

from bursar.core.nodes.node_claim import SENSITIVE
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.ask import Ask, Taint, claiming, for_tenants
from bursar.core.objects.charge import Amounts, Charge
from bursar.core.scheduling.state.equivalence import EquivalenceClass, EquivalenceKey, GangState, UnitKey
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.fleet import UNCLAIMED, Fleet
from bursar.core.scheduling.state.placed_columns import NEVER, Placed, PlacedColumns, Spot, devices_of
from bursar.core.scheduling.state.quota_forecast import QuotaForecast
from bursar.core.scheduling.state.scheduler_memory import SchedulerMemory
from bursar.core.scheduling.state.topology_counts import TopologyCounts, match_key_of
from bursar.core.values.replace import replace


@dataclass(frozen=True, slots=True)
class Nomination:
    """A nomination: capacity that preemption frees on these nodes, kept for the preemptor until a time."""

    nodes: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class ActiveBoost:
    """A boosted priority of a job that is in force until a time."""

    priority: int
    until: float
    uid: str = ""  # of the job: it does not apply to allocations that merely name the job


@dataclass(slots=True)
class ClusterState:
    """The scheduler's copy of the cluster: nodes, placed and pending work, tenants and quotas."""

    fleet: Fleet = field(default_factory=Fleet)
    running: PlacedColumns = field(default_factory=PlacedColumns)
    placed: dict[str, Placed] = field(default_factory=dict)
    waiting: dict[str, EquivalenceClass] = field(default_factory=dict)  # by uid
    groups: dict[EquivalenceKey, EquivalenceClass] = field(default_factory=dict)
    gangs: dict[GangKey, GangState] = field(default_factory=dict)
    nominated: dict[str, Nomination] = field(default_factory=dict)  # by uid
    tenants: dict[str, ShareOf] = field(default_factory=dict)
    profiles: dict[str, str] = field(default_factory=dict)  # queue → profile
    boosts: dict[tuple[str, str], ActiveBoost] = field(default_factory=dict)  # by (namespace, job)
    limits: QuotaForecast = field(default_factory=QuotaForecast)
    used: dict[str, dict[str, int]] = field(default_factory=dict)  # by tenant, without child tenants
    capacity: dict[str, int] = field(default_factory=dict)
    moved: int = 0  # rises with every placement and every end
    freed: int = 0  # rises when capacity is freed or a node changes
    topology_counts: TopologyCounts = field(init=False)
    memory: SchedulerMemory = field(init=False)

    def __post_init__(self) -> None:
        self.topology_counts = TopologyCounts(self.fleet)
        self.memory = SchedulerMemory.of(self.fleet)

    def copy(self) -> ClusterState:
        """A copy for simulations, valid while the original does not change.

        Allocations may be added, placed and evicted in it; its nodes must not be changed. It shares descriptions of
        nodes and tenants, and all values that are replaced rather than mutated. Copying twenty thousand
        allocations on five thousand nodes takes some milliseconds.
        """
        groups = {id(group): group.copy() for group in self.groups.values()}
        trial = ClusterState(
            fleet=dataclass_replace(self.fleet, now=self.fleet.now.copy()),
            running=self.running.copy(),
            placed=dict(self.placed),
            waiting={uid: groups[id(group)] for uid, group in self.waiting.items()},
            groups={group.key: group for group in groups.values()},
            gangs={key: gang.copy() for key, gang in self.gangs.items()},
            nominated=dict(self.nominated),
            tenants=self.tenants,
            profiles=self.profiles,
            boosts=dict(self.boosts),
            limits=self.limits.copy(),
            used={tenant: dict(amounts) for tenant, amounts in self.used.items()},
            capacity=self.capacity,
            moved=self.moved,
            freed=self.freed,
        )
        trial.topology_counts = self.topology_counts.copy(trial.fleet)
        trial.memory = self.memory.copy(trial.fleet)
        return trial

    def pretend(self, ask: Ask) -> None:
        """Add a hypothetical pending allocation to a copy; it does not count as an arrival."""
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
        whole_only: bool | None = None,
        isolated: bool = False,
    ) -> None:
        """Add or update a node; placed work stays."""
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
        """Remove a node, and the parts of placed work on it."""
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
        """Add a pending allocation: a new one, or one that was stopped and is requeued."""
        known = self.waiting.get(ask.uid)
        if known is None:
            if ask.uid in self.placed:
                self.forget(ask.uid)
            else:
                self.memory.arrival_mix.learn(ask.shape)
        elif known.members[ask.uid] != ask:
            self._stop_waiting(ask.uid)
        if ask.uid not in self.waiting:
            self._start_waiting(ask)
        if nomination is not None:
            self.nominated[ask.uid] = nomination
        if again and ask.gang is not None:
            self._gang_of(ask).started = True

    def as_user(self, ask: Ask, user: str) -> Ask:
        """The ask with its user as claimant. Users without claims keep the generic shape, so that cached scores are
        shared. Work in a queue for sensitive work is sensitive."""
        where = ask.shape.where
        sensitive = where.sensitive or self.profiles.get(ask.queue) == SENSITIVE
        claimant = user if sensitive or self.fleet.holds_any(user) else ""
        if (where.claimant, where.sensitive) == (claimant, sensitive):
            return ask
        return replace(ask, shape=claiming(ask.shape, claimant, sensitive))

    def as_tenant(self, ask: Ask, lineage: Sequence[str]) -> Ask:
        """The ask with the tenants of its lineage that nodes are dedicated to. Without such nodes it keeps the generic
        shape."""
        tenants = tuple(sorted(self.fleet.named.intersection(lineage))) if self.fleet.named else ()
        return ask if ask.shape.where.tenants == tenants else replace(ask, shape=for_tenants(ask.shape, tenants))

    def renounce(self, uid: str) -> None:
        """Drop a nomination: the allocation goes back to the queue."""
        self.nominated.pop(uid)
        group = self.waiting[uid]
        heappush(group.order, (group.members[uid].submitted_at, uid))

    def place(
        self, ask: Ask, spots: Iterable[Spot], *, since: float, ends_at: float = NEVER, ending: bool = False
    ) -> None:
        """Place an allocation on these nodes."""
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
        # An allocation that left some of its nodes is charged for all of them until it left the last.
        counted = known.nodes_bound if known is not None else 0
        self.forget(ask.uid)
        one = Placed(ask, self.fleet.need(ask.shape), spots, since, ends_at, ending, counted)
        self.placed[ask.uid] = one
        self._enter(one)
        if ask.gang is not None:
            gang = self._gang_of(ask)
            gang.placed.add(ask.uid)
            gang.started = True

    def assume(self, ask: Ask, spots: tuple[Spot, ...], now: float) -> None:
        """Enter a binding of a plan before it is committed, so that later decisions see it."""
        self.place(ask, spots, since=now, ends_at=now + ask.ttl_seconds if ask.ttl_seconds else NEVER)

    def assume_many(self, asks: Sequence[Ask], spots: Sequence[tuple[Spot, ...]], now: float) -> None:
        """Assume members of one class on one node, none of which shares a device."""
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
            self._gang_of(first).begin(uids)
        if self.limits.cells:
            for one in many:
                self._count_bound(one, 1)
        self.running.add_many(many, row, self.fleet.now)
        self.fleet.now.take_many(row, need, devices_of([at[0] for at in spots]), count)
        self.topology_counts.come(first, group.key.match_key, row, count)
        used = self.used.setdefault(first.tenant, {})
        for name, amount in first.shape.requests:
            used[name] = used.get(name, 0) + amount * count

    def unassume(self, ask: Ask) -> None:
        """Undo an assumed binding that was not committed: the allocation is pending again."""
        self.forget(ask.uid)
        self._start_waiting(ask)

    def end_soon(self, uid: str, at: float) -> None:
        """Mark an allocation as evicted: it will have stopped by then."""
        # Replaced and not mutated: copies of the cluster state share placed work.
        known = self.placed[uid]
        one = self.placed[uid] = replace(known, ending=True, ends_at=min(known.ends_at, at))
        self._restate(one, ends_otherwise=True)

    def _restate(self, one: Placed, *, ends_otherwise: bool) -> None:
        """Record a changed end. The node itself is unchanged, but reservations on it must be computed again."""
        self.running.restate(one)
        if ends_otherwise:
            self.fleet.now.touched.extend([spot.row for spot in one.spots])

    def forget(self, uid: str) -> None:
        """Remove an allocation, pending or placed."""
        if uid in self.waiting:
            self._stop_waiting(uid)
        one = self.placed.get(uid)
        if one is not None:
            self._leave(one)
            self._unplace(one)
            self.freed += 1

    def unit_key(self, uid: str) -> UnitKey:
        """The key of the unit of a pending allocation: its gang until that has begun, else its equivalence class."""
        return self.unit_of(self.waiting[uid])

    def unit_of(self, group: EquivalenceClass) -> UnitKey:
        key = group.key
        return key.gang if key.gang is not None and not self.has_begun(key.gang) else key

    def alike_nodes(self) -> int:
        """The size of the largest group of nodes with equal capacity."""
        if self.memory.alike_nodes[0] != self.fleet.described:
            offers = self.fleet.allocatable[:, list(self.fleet.row_of.values())].T.tolist()
            self.memory.alike_nodes = (self.fleet.described, max(Counter(map(tuple, offers)).values(), default=0))
        return self.memory.alike_nodes[1]

    def has_begun(self, gang: GangKey) -> bool:
        """Whether a gang is placed, so that later members are placed one by one; false while it is being stopped."""
        placed = self.gangs[gang].placed
        return bool(placed) and any(not self.placed[uid].ending for uid in placed)

    def ask(self, uid: str) -> Ask | None:
        """The ask of an allocation, pending or placed."""
        if uid in self.waiting:
            return self.waiting[uid].members[uid]
        return self.placed[uid].ask if uid in self.placed else None

    def priority(self, ask: Ask, now: float) -> int:
        """The priority in force: a boost replaces the own priority until it expires."""
        boost = self.boosts.get((ask.namespace, ask.job)) if ask.job else None
        return boost.priority if boost is not None and is_boosted(boost, ask.owner, now) else ask.priority

    def amounts(self, ask: Ask, rows: Sequence[int]) -> Sequence[tuple[str, int]]:
        """The amounts that it holds on these nodes: whole nodes if it is exclusive."""
        if not ask.shape.exclusive and len(rows) == 1:
            return ask.shape.requests
        if not ask.shape.exclusive:
            return [(name, amount * len(rows)) for name, amount in ask.shape.requests]
        return [
            (name, int(self.fleet.allocatable[column, list(rows)].sum()))
            for name, column in self.fleet.column_of.items()
            if name in self.capacity
        ]

    # Keep the parts consistent.

    def _on(self, name: str) -> list[Placed]:
        row = self.fleet.row_of.get(name)
        uids = self.running.on_row.get(row, ()) if row is not None else ()
        return [self.placed[uid] for uid in sorted(uids)]

    def _unplace(self, one: Placed) -> None:
        del self.placed[one.ask.uid]
        if one.ask.gang is not None:
            gang = self._gang_of(one.ask)
            gang.placed.discard(one.ask.uid)
            self._drop_if_empty(gang)

    def _take(self, one: Placed, spot: Spot) -> None:
        """Take capacity of a node; devices that the node has lost since still count as taken."""
        for column, indices in spot.devices:
            self.fleet.now.widen(column, max(indices, default=-1) + 1)
        self.fleet.now.take(spot.row, one.need, spot.devices)

    def _restate_needs(self) -> None:
        """Recompute the needs of placed work after a resource is offered for the first time."""
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
        match_key = match_key_of(one.ask)
        for spot in one.spots:
            self._take(one, spot)
            self.topology_counts.come(one.ask, match_key, spot.row)
        self.running.add(one, self.fleet.now)
        self._count_used(one, 1)
        self._count_bound(one, 1)

    def _leave(self, one: Placed) -> None:
        self.moved += 1
        match_key = match_key_of(one.ask)
        self._count_bound(one, -1)
        self._count_used(one, -1)
        self.running.remove(one)
        for spot in one.spots:
            self.fleet.now.give_back(spot.row, one.need, spot.devices)
            self.topology_counts.come(one.ask, match_key, spot.row, -1)

    def _count_bound(self, one: Placed, sign: int) -> None:
        """Count bound nodes. A node's capacity may change, so an end subtracts the amount counted at the start."""
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
        """Count exclusive work, whose usage is the capacity of its node."""
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
            ask.tenant, match_key_of(ask), ask.queue, ask.priority, ask.preempts, ask.ttl_seconds,
            ask.checkpoint_seconds, ask.data_ready, ask.shape, ask.job,
            (ask.namespace, ask.gang.group_id) if ask.gang else None, _charged(ask.charge), ask.payer, ask.owner,
            ask.cross_tenant,
        )  # fmt: skip
        if ask.gang is not None:
            self._gang_of(ask).come(ask)
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
            gang = self._gang_of(ask)
            gang.leave(uid)
            self._drop_if_empty(gang)

    def _drop_group(self, group: EquivalenceClass) -> None:
        self.groups.pop(group.key, None)
        self.memory.blocked.pop(group.key, None)

    def _gang_of(self, ask: Ask) -> GangState:
        assert ask.gang is not None
        key = (ask.namespace, ask.gang.group_id)
        gang = self.gangs.get(key)
        if gang is None:
            gang = self.gangs[key] = GangState(key, ask.gang.min_members, ask.gang.timeout_seconds)
        return gang

    def _drop_if_empty(self, gang: GangState) -> None:
        if not gang.waiting and not gang.placed:
            self.gangs.pop(gang.key, None)
            self.memory.blocked.pop(gang.key, None)


def is_boosted(boost: ActiveBoost, owner: str, now: float) -> bool:
    """Whether a boost applies to allocations of a job with this uid."""
    return boost.until > now and boost.uid == owner


def _charged(charge: Charge) -> Hashable:
    """The part of a charge that decides admission; equal for work of one template."""
    known: Hashable = charge.known.get("alike")
    if known is None:
        known = charge.known["alike"] = (charge.facts, frozenset({**charge.accepted, **charge.due}.items()))
    return known
