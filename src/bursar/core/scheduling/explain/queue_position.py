"""Who stands where in the line: the order in which the cycle would take everything that waits.

The front of the line is walked as the cycle walks it, as if each were placed in turn, so that shares move and tenants
alternate. Who comes far behind that stands in the order of submission: long before it is their turn, everything will
have changed anyway. So the cost of a line is bounded, however long it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, nlargest, nsmallest

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.cycle.cycle import Cycle
from bursar.core.scheduling.cycle.fair_queue import Factors, score, waiting_factor
from bursar.core.scheduling.cycle.plan import SchedulingPolicy, Unit
from bursar.core.scheduling.explain.explain_types import Ahead
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState, is_boosted
from bursar.core.scheduling.state.equivalence import EquivalenceClass, GangState

WALK_MAX = 1000
GROUPS_MAX = 1000  # that are walked for having waited longest, and as many for being the most urgent
FRESH_SECONDS = 1.0
SECONDS_PER_STEP = 5e-4  # how long a line stays good for each step that it took to make

QueueEntry = tuple[float, str]  # (submitted at, uid)


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where something stands, from 1 on, and how many of each group stand before it."""

    overall: int
    in_queue: int
    before: tuple[tuple[EquivalenceClass, int], ...]

    @property
    def ahead(self) -> Ahead:
        """How many allocations these are, and what they ask for together."""
        return self._sum(self.before)

    def ahead_of(self, tenant: str) -> Ahead:
        """The same of one tenant's."""
        return self._sum([(group, count) for group, count in self.before if group.key.tenant == tenant])

    def _sum(self, before: Sequence[tuple[EquivalenceClass, int]]) -> Ahead:
        amounts: dict[str, int] = {}
        for group, count in before:
            for name, amount in group.key.shape.requests:
                amounts[name] = amounts.get(name, 0) + amount * group.key.shape.nodes * count
        return Ahead(sum(count for _, count in before), amounts)


@dataclass(slots=True)
class QueueOrder:
    made_at: float = 0.0
    steps: int = 0
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
        """These stand behind the front, in the order of submission."""
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
        """Where one stands; nothing for whoever is not in line."""
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
    """Everything that could be taken. Gangs that are not complete do not stand in line."""
    return _Walk(Cycle(cluster, policy, now)).run()


def order_boosted(
    cluster: ClusterState, policy: SchedulingPolicy, now: float, job: tuple[str, str], priority: int, uid: str = ""
) -> QueueOrder:
    """The line as it would be with a job's priority replaced."""
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
    """The last line, for as long as it is good enough: it is not made anew for everybody who asks."""

    def __init__(self) -> None:
        self._cluster: ClusterState | None = None
        self._line = QueueOrder()

    def of(self, cluster: ClusterState, policy: SchedulingPolicy, now: float, uid: str = "") -> QueueOrder:
        """The line; for somebody who is not in it yet it is made anew sooner."""
        good_for = self._line.steps * SECONDS_PER_STEP
        group = cluster.waiting.get(uid)
        if group is None or self._line.has(group.members[uid], group):
            good_for += FRESH_SECONDS
        if self._cluster is not cluster or not 0 <= now - self._line.made_at <= good_for:
            self._cluster, self._line = cluster, order_queue(cluster, policy, now)
        return self._line


class _Walk:
    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.cluster = cycle.cluster
        self.queue_order = QueueOrder(cycle.now)
        self._orders: dict[
            int, tuple[EquivalenceClass, list[QueueEntry]]
        ] = {}  # what of each group was not pushed yet: a heap
        self._factors: dict[int, Factors[float]] = {}

    def run(self) -> QueueOrder:
        self.cycle.scoring.count_depths()
        for promised in self.cycle.nominated():
            self._take(promised)
        for band in self.cluster.bands.values():
            self._push_band(band)
        groups = [group for group in self.cluster.groups.values() if self._is_single(group)]
        self._orders = {id(group): (group, list(group.order)) for group in groups}
        for group in self._promising(groups):
            self._push(group)
        self._run_batch()
        self._leave_the_rest()
        return self.queue_order

    def _is_single(self, group: EquivalenceClass) -> bool:
        return group.key.gang is None or self.cluster.has_begun(group.key.gang)

    def _promising(self, groups: list[EquivalenceClass]) -> Iterable[EquivalenceClass]:
        """The groups that may be at the front: those that waited longest, and the most urgent."""
        if len(groups) <= 2 * GROUPS_MAX:
            return groups
        oldest = nsmallest(GROUPS_MAX, groups, key=lambda group: group.order[0] if group.order else (float("inf"), ""))
        urgent = nlargest(GROUPS_MAX, groups, key=self._urgency)
        return {id(group): group for group in (*oldest, *urgent)}.values()

    def _urgency(self, group: EquivalenceClass) -> int:
        key = group.key
        boost = self.cluster.boosts.get((key.kin[0], key.job)) if key.job else None
        return boost.priority if boost is not None and is_boosted(boost, key.owner, self.cycle.now) else key.priority

    def _run_batch(self) -> None:
        turns, shares = self.cycle.turns, self.cycle.shares
        self.queue_order.steps = len(turns)
        for _ in range(WALK_MAX):
            unit = turns.next()
            if unit is None:
                return
            self.queue_order.steps += 1
            self._take(unit)
            for ask in unit.asks:
                shares.add(ask.tenant, self.cluster.amounts(ask, [0] * ask.shape.nodes))
            if unit.group is not None:
                self._push(unit.group)

    def _take(self, unit: Unit) -> None:
        for ask in unit.asks:
            self.queue_order.add(ask, self.cluster.waiting[ask.uid])

    def _push(self, group: EquivalenceClass) -> None:
        ask = self._next(group)
        if ask is None:
            return
        unit = Unit(group.key, (ask,), group)
        factors = self._factors.get(id(group))
        if factors is None:
            factors = self._factors[id(group)] = self.cycle.scoring.factors(unit)
        factors = factors._replace(
            waiting=waiting_factor(self.cycle.now - ask.submitted_at), deficit=self.cycle.shares.deficit(ask.tenant)
        )
        self._line_push(unit, factors)

    def _next(self, group: EquivalenceClass) -> Ask | None:
        order = self._orders[id(group)][1]
        while order:
            uid = heappop(order)[1]
            if uid in group.members and uid not in self.cluster.nominated:
                return group.members[uid]
        return None

    def _push_band(self, band: GangState) -> None:
        """All members of a complete gang stand together; those beyond its size come right behind."""
        if band.placed or not band.waiting or not band.complete:
            return
        members = sorted(band.waiting.values(), key=lambda ask: (ask.submitted_at, ask.uid))
        unit = Unit(band.key, tuple(members))
        self._line_push(unit, self.cycle.scoring.factors(Unit(band.key, tuple(members[: band.min_members]))))

    def _line_push(self, unit: Unit, factors: Factors[float]) -> None:
        points = score(self.cycle.scoring.profile(unit), factors, self.cycle.scoring.penalty(unit))
        self.cycle.turns.enter(unit, points)

    def _leave_the_rest(self) -> None:
        while (unit := self.cycle.turns.next()) is not None:
            for ask in unit.asks:
                group = self.cluster.waiting[ask.uid]
                self._orders.setdefault(id(group), (group, []))[1].append((ask.submitted_at, ask.uid))
        for group, entries in self._orders.values():
            self.queue_order.leave(group, entries)
