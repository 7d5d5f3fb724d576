"""Queue positions: the order in which the cycle would take pending work.

The front of the queue is taken as the cycle takes it, as if every placement succeeded, so that shares move and tenants
alternate. Work far behind the front is ordered by submission, because the queue will have changed long before it is
tried. So the cost is bounded, however long the queue is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, nlargest, nsmallest

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.cycle.cycle import Cycle
from bursar.core.scheduling.cycle.plan import SchedulingPolicy, Unit
from bursar.core.scheduling.cycle.queue_traversal import QueueTraversal
from bursar.core.scheduling.explain.explain_types import FRESH_SECONDS, Ahead
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState, is_boosted
from bursar.core.scheduling.state.equivalence import EquivalenceClass, EquivalenceKey

FRONT_MAX = 1000
GROUPS_MAX = 1000  # groups visited by waiting time, and as many by urgency
SECONDS_PER_STEP = 5e-4  # how long a line stays good for each step that it took to make

QueueEntry = tuple[float, str]  # (submitted at, uid)


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A position in the queue, from 1 on, and the members of each equivalence class ahead of it."""

    overall: int
    in_queue: int
    before: tuple[tuple[EquivalenceClass, int], ...]

    @property
    def ahead(self) -> Ahead:
        """The number of these allocations and their total requests."""
        return self._sum(self.before)

    def ahead_of(self, tenant: str) -> Ahead:
        """The number of one tenant's allocations ahead and their total requests."""
        return self._sum([(group, count) for group, count in self.before if group.key.tenant == tenant])

    def _sum(self, before: Sequence[tuple[EquivalenceClass, int]]) -> Ahead:
        amounts: dict[str, int] = {}
        for group, count in before:
            for name, amount in group.key.shape.requests:
                amounts[name] = amounts.get(name, 0) + amount * group.key.shape.nodes * count
        return Ahead(sum(count for _, count in before), amounts)


@dataclass(slots=True)
class QueueOrder:
    """The positions of pending allocations in the queue, with the estimates that were computed from them."""

    made_at: float = 0.0
    steps: int = 0
    starts: dict[EquivalenceKey, float | None] = field(default_factory=dict)  # of the first member asked about
    _front: dict[str, int] = field(default_factory=dict)  # by uid, from 1 on
    _groups: list[EquivalenceClass] = field(default_factory=list)  # of each position of the front
    _rest: dict[int, tuple[EquivalenceClass, list[QueueEntry]]] = field(
        default_factory=dict
    )  # by the group's identity, in order

    def __len__(self) -> int:
        return len(self._front) + sum(len(entries) for _, entries in self._rest.values())

    def add(self, ask: Ask, group: EquivalenceClass) -> None:
        if ask.uid not in self._front:
            self._groups.append(group)
            self._front[ask.uid] = len(self._groups)

    def leave(self, group: EquivalenceClass, entries: Iterable[QueueEntry]) -> None:
        """Add members behind the front, in the order of submission."""
        rest = sorted(one for one in entries if one[1] in group.members and one[1] not in self._front)
        if rest:
            self._rest[id(group)] = (group, rest)

    def has(self, ask: Ask, group: EquivalenceClass) -> bool:
        if ask.uid in self._front:
            return True
        _, entries = self._rest.get(id(group), (group, []))
        place = bisect_left(entries, (ask.submitted_at, ask.uid))
        return place < len(entries) and entries[place][1] == ask.uid

    def position(self, ask: Ask, group: EquivalenceClass) -> QueuePosition | None:
        """The position of an allocation; none if it is not in the queue."""
        if not self.has(ask, group):
            return None
        place = self._front.get(ask.uid)
        before = self._before_front(len(self._groups) if place is None else place - 1)
        if place is None:
            before += self._before_rest((ask.submitted_at, ask.uid))
        ahead = sum(count for _, count in before)
        same = sum(count for one, count in before if one.key.queue == ask.queue)
        return QueuePosition(ahead + 1, same + 1, tuple(before))

    def _before_front(self, count: int) -> list[tuple[EquivalenceClass, int]]:
        some = self._groups[:count]
        known = {id(group): group for group in some}
        return [(known[which], number) for which, number in Counter(map(id, some)).items()]

    def _before_rest(self, entry: QueueEntry) -> list[tuple[EquivalenceClass, int]]:
        counted = ((group, bisect_left(entries, entry)) for group, entries in self._rest.values())
        return [(group, count) for group, count in counted if count]


def order_queue(cluster: ClusterState, policy: SchedulingPolicy, now: float) -> QueueOrder:
    """The queue order of all pending work that could be placed; incomplete gangs have no position."""
    return _Count(Cycle(cluster, policy, now)).run()


def order_boosted(
    cluster: ClusterState, policy: SchedulingPolicy, now: float, job: tuple[str, str], priority: int, uid: str = ""
) -> QueueOrder:
    """The queue order if a job's priority were replaced."""
    before = cluster.boosts.get(job)
    cluster.boosts[job] = ActiveBoost(priority, float("inf"), uid)
    try:
        return order_queue(cluster, policy, now)
    finally:
        if before is None:
            del cluster.boosts[job]
        else:
            cluster.boosts[job] = before


class QueueOrders:
    """Caches the last queue order, with its estimates, while it is fresh enough."""

    def __init__(self) -> None:
        self._cluster: ClusterState | None = None
        self._line = QueueOrder()

    def of(self, cluster: ClusterState, policy: SchedulingPolicy, now: float, uid: str = "") -> QueueOrder:
        """The queue order; recomputed sooner if this allocation is not in it yet."""
        good_for = self._line.steps * SECONDS_PER_STEP
        group = cluster.waiting.get(uid)
        if group is None or self._line.has(group.members[uid], group):
            good_for += FRESH_SECONDS
        if self._cluster is not cluster or not 0 <= now - self._line.made_at <= good_for:
            self._cluster, self._line = cluster, order_queue(cluster, policy, now)
        return self._line


class _Count:
    """Consumes the queue like a cycle in which every placement succeeds, and records the order."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._cluster = cycle.cluster
        self._queue = QueueTraversal(cycle.cluster, cycle.shares, cycle.scoring, cycle.now, self._next)
        self._order = QueueOrder(cycle.now)
        # Of each class, the members that did not enter the queue yet: a heap.
        self._left: dict[int, tuple[EquivalenceClass, list[QueueEntry]]] = {}

    def run(self) -> QueueOrder:
        for unit in self._cycle.nominated():
            self._take(unit)
        groups = [group for group in self._cluster.groups.values() if self._queue.is_single(group)]
        self._left = {id(group): (group, list(group.order)) for group in groups}
        self._queue.fill(self._promising(groups))
        self._take_front()
        self._leave_the_rest()
        return self._order

    def _promising(self, groups: list[EquivalenceClass]) -> Iterable[EquivalenceClass]:
        """The classes that may be at the front: those that waited longest, and the most urgent."""
        if len(groups) <= 2 * GROUPS_MAX:
            return groups
        oldest = nsmallest(GROUPS_MAX, groups, key=lambda group: group.order[0] if group.order else (float("inf"), ""))
        urgent = nlargest(GROUPS_MAX, groups, key=self._urgency)
        return {id(group): group for group in (*oldest, *urgent)}.values()

    def _urgency(self, group: EquivalenceClass) -> int:
        key = group.key
        boost = self._cluster.boosts.get((key.match_key[0], key.job)) if key.job else None
        return boost.priority if boost is not None and is_boosted(boost, key.owner, self._cycle.now) else key.priority

    def _take_front(self) -> None:
        self._order.steps = len(self._queue)
        for _ in range(FRONT_MAX):
            unit = self._queue.next()
            if unit is None:
                return
            self._order.steps += 1
            for ask in self._take(unit):
                self._cycle.shares.add(ask.tenant, self._cluster.amounts(ask, [0] * ask.shape.nodes))
            if unit.group is not None:
                self._queue.enter_next(unit.group)

    def _take(self, unit: Unit) -> Sequence[Ask]:
        asks = self._members(unit)
        for ask in asks:
            self._order.add(ask, self._cluster.waiting[ask.uid])
        return asks

    def _members(self, unit: Unit) -> Sequence[Ask]:
        """All members of a unit; a gang's members beyond its minimum come right behind the others."""
        if isinstance(unit.key, EquivalenceKey):
            return unit.asks
        gang = self._cluster.gangs[unit.key]
        return sorted(gang.waiting.values(), key=lambda ask: (ask.submitted_at, ask.uid))

    def _next(self, group: EquivalenceClass) -> Ask | None:
        order = self._left[id(group)][1]
        while order:
            uid = heappop(order)[1]
            if uid in group.members and uid not in self._cluster.nominated:
                return group.members[uid]
        return None

    def _leave_the_rest(self) -> None:
        while (unit := self._queue.next()) is not None:
            for ask in self._members(unit):
                group = self._cluster.waiting[ask.uid]
                self._left.setdefault(id(group), (group, []))[1].append((ask.submitted_at, ask.uid))
        for group, entries in self._left.values():
            self._order.leave(group, entries)
