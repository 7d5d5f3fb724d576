"""The traversal of the queue: pending units one by one, in the order in which a cycle takes them.

The fair queue holds complete gangs and, of each equivalence class, the member that has waited longest; the next one
enters when that one was taken. The cycle places what it takes, explain only counts it.

The owner of the reservation comes before the fair queue. Scores change with every wait, every queue and every node
that is freed: by scores alone, work that needs much capacity would lose it to small work again and again. Only work of
a tenant further below its share goes ahead of the owner and, between tenants of the same rank, more urgent work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.cycle.fair_queue import FairQueue
from bursar.core.scheduling.cycle.plan import Unit
from bursar.core.scheduling.cycle.priority_score import PriorityScore
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.equivalence import EquivalenceClass, GangState, UnitKey
from bursar.core.scheduling.state.fair_share import Shares


class QueueTraversal:
    """Takes pending units one by one, in the order of the fair queue."""

    def __init__(
        self,
        cluster: ClusterState,
        shares: Shares,
        scoring: PriorityScore,
        now: float,
        first_of: Callable[[EquivalenceClass], Ask | None],
    ) -> None:
        self._cluster = cluster
        self._shares = shares
        self._scoring = scoring
        self._now = now
        self._first_of = first_of
        self._queue: FairQueue[Unit] = FairQueue(shares)
        self._reserved_for = cluster.memory.reserved_for
        self._owner: Unit | None = None

    def __len__(self) -> int:
        return len(self._queue) + (self._owner is not None)

    def fill(self, groups: Iterable[EquivalenceClass], is_blocked: Callable[[UnitKey], bool] = lambda _: False) -> None:
        """Enter every gang that can start, and the first of each of these classes, without blocked ones."""
        self._scoring.count_depths()
        for gang in self._cluster.gangs.values():
            if can_start(gang) and not is_blocked(gang.key):
                self._enter_gang(gang)
        for group in groups:
            if self.is_single(group) and not is_blocked(group.key):
                self.enter_next(group)

    def enter_next(self, group: EquivalenceClass) -> None:
        """Enter the member of a class that has waited longest, once the one before it was taken."""
        first = self._first_of(group)
        if first is not None:
            self._enter(Unit(group.key, (first,), group), self._scoring.of_member(group, first.submitted_at))

    def next(self) -> Unit | None:
        """Take the next unit; none when the queue is empty."""
        if self._owner is not None:
            first = self._queue.peek()
            if first is None or not self._goes_before(first, self._owner):
                owner, self._owner = self._owner, None
                return owner
        return self._queue.pop()

    def next_score(self) -> float | None:
        """The score of the next unit in the fair queue; none when that is empty."""
        return self._queue.next_score()

    def is_single(self, group: EquivalenceClass) -> bool:
        """Whether the members of a class are placed one by one: they are of no gang, or of one that has begun."""
        return group.key.gang is None or self._cluster.has_begun(group.key.gang)

    def _enter_gang(self, gang: GangState) -> None:
        nominated = self._cluster.nominated
        if not nominated or not any(ask.uid in nominated for ask in gang.front):
            unit = Unit(gang.key, gang.front)
            self._enter(unit, self._scoring.of_gang(unit))

    def _enter(self, unit: Unit, score: float) -> None:
        """Of a class that owns the reservation, the first to enter has it; its other members queue."""
        if unit.key == self._reserved_for:
            self._owner, self._reserved_for = unit, None
        else:
            self._queue.push(unit.tenant, score, unit.asks[0].uid, unit)

    def _goes_before(self, unit: Unit, owner: Unit) -> bool:
        behind = self._shares.compare(unit.tenant, owner.tenant)
        return behind > 0 if behind else self._priority(unit) > self._priority(owner)

    def _priority(self, unit: Unit) -> int:
        return min(self._cluster.priority(ask, self._now) for ask in unit.asks)


def can_start(gang: GangState) -> bool:
    """Whether all that a gang needs is pending: its members are placed together."""
    return bool(gang.waiting) and not gang.placed and gang.complete
