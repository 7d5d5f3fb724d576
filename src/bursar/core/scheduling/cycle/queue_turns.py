"""Whose turn it is in one cycle: the line, and before it whoever has the reservation.

Scores come and go with every wait, every queue and every node that is freed. Were they all that counted, whoever needs
much room would see it taken by small work that happens to score higher at the moment it comes free, again and again. So
the reservation stands: only a tenant that is further behind its share goes before, and, where tenants are equal, work
that is more urgent.
"""

from __future__ import annotations

from bursar.core.scheduling.cycle.fair_queue import FairQueue
from bursar.core.scheduling.cycle.plan import Unit
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fair_share import Shares


class QueueTurns:
    def __init__(self, cluster: ClusterState, shares: Shares, now: float) -> None:
        self._cluster = cluster
        self._shares = shares
        self._now = now
        self._line: FairQueue[Unit] = FairQueue(shares)
        self._reserved_for = cluster.reserved_for
        self._holder: Unit | None = None

    def __len__(self) -> int:
        return len(self._line) + (self._holder is not None)

    def enter(self, unit: Unit, score: float) -> None:
        """Let a unit wait for its turn. The first of those that a reservation is for has it, others like it do not."""
        if unit.key == self._reserved_for:
            self._holder, self._reserved_for = unit, None
        else:
            self._line.push(unit.tenant, score, unit.asks[0].uid, unit)

    def next(self) -> Unit | None:
        """Take who is next; none when nobody waits."""
        if self._holder is not None:
            first = self._line.peek()
            if first is None or not self._goes_before(first, self._holder):
                holder, self._holder = self._holder, None
                return holder
        return self._line.pop()

    def next_score(self) -> float | None:
        """The score of who is next in the line; none when nobody is."""
        return self._line.next_score()

    def _goes_before(self, unit: Unit, holder: Unit) -> bool:
        behind = self._shares.compare(unit.tenant, holder.tenant)
        return behind > 0 if behind else self._priority(unit) > self._priority(holder)

    def _priority(self, unit: Unit) -> int:
        return min(self._cluster.priority(ask, self._now) for ask in unit.asks)
