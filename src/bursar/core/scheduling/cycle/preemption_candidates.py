"""Preemption candidates: the capacity that each node could free, counted once and updated where it changed.

Preemption needs it of every node for every preemptor. Nodes with the least urgent work come first: preempting there
costs least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fleet import Bools, Need
from bursar.core.scheduling.state.placed_columns import Placed

URGENCY_WEIGHT = 1e6  # one step of priority outweighs any age
AGE_MAX = 999_999.0


class PreemptionCandidates:
    """Candidates for one kind of preemptor: work past its minimum runtime that is less urgent than `below`, or is in
    `also`, whatever its urgency. With a tenant, only that tenant's work is a candidate for being less urgent."""

    def __init__(
        self,
        cluster: ClusterState,
        now: float,
        min_runtime_seconds: float,
        below: int,
        also: frozenset[str] = frozenset(),
        tenant: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._now = now
        self._latest = now - min_runtime_seconds
        self._below = below
        self._also = also
        self._tenant = tenant
        self._count()

    def rows(self, need: Need, right: Bools, avoid: Sequence[int], most: int) -> list[int]:
        """The nodes on which the slot would fit, least urgent work first, then youngest; at most `most`."""
        now = self._cluster.fleet.now
        capacity = right & now.open & (self.counts > 0)
        if need.exclusive:
            capacity &= now.placed <= self.counts
        else:
            capacity &= ~now.exclusive | self.whole
            for column, amount in need.plain:
                capacity &= now.free[column] + self.freed[column] >= amount
        capacity[list(avoid)] = False
        return _least(np.flatnonzero(capacity), self.rank, most)

    def look_again(self, rows: Iterable[int], gone: Collection[str]) -> None:
        """Recount these rows, without the work that is evicted already."""
        cluster, lines = self._cluster, self._cluster.running.lines
        for row in rows:
            there = [
                (line, one)
                for uid in cluster.running.on_row.get(row, ())
                if uid not in gone
                for one in (cluster.placed[uid],)
                for line in one.lines
                if lines.row[line] == row and self._may_go(one)
            ]
            some = [line for line, _ in there]
            self.counts[row] = len(some)
            self.freed[:, row] = lines.amounts[:, some].sum(axis=1)
            self.whole[row] = bool(lines.exclusive[some].any())
            urgency = sum(cluster.priority(one.ask, self._now) for _, one in there)
            age = sum(self._now - one.since for _, one in there)
            self.rank[row] = _rank(urgency, age, max(1, len(some)))

    def _may_go(self, one: Placed) -> bool:
        if one.ending or one.since > self._latest:
            return False
        if one.ask.uid in self._also:
            return True
        mine = self._tenant in (None, one.ask.tenant)
        return mine and self._cluster.priority(one.ask, self._now) < self._below

    def _count(self) -> None:
        lines, size = self._cluster.running.lines, self._cluster.fleet.now.placed.shape[0]
        priority = self._priorities()
        less = priority < self._below
        if self._tenant is not None:
            less &= lines.tenant == self._cluster.running.tenants.get(self._tenant, -1)
        if self._also and not less[lines.row >= 0].all():
            less[[line for uid in self._also for line in self._cluster.placed[uid].lines]] = True
        may_go = (lines.row >= 0) & lines.free_to_stop & (lines.since <= self._latest) & less
        some = np.flatnonzero(may_go)
        rows = lines.row[some]
        self.counts = np.bincount(rows, minlength=size)
        self.whole: Bools = np.bincount(rows[lines.exclusive[some]], minlength=size) > 0
        self.freed = np.zeros((self._cluster.fleet.now.free.shape[0], size), np.int64)
        self._add_up(rows, some)
        urgency = np.bincount(rows, weights=priority[some], minlength=size)
        age = np.bincount(rows, weights=self._now - lines.since[some], minlength=size)
        count = np.maximum(self.counts, 1)
        self.rank = URGENCY_WEIGHT * urgency / count + np.minimum(age / count, AGE_MAX)

    def _add_up(self, rows: NDArray[np.signedinteger], some: NDArray[np.intp]) -> None:
        """The capacity that would be free again, row by row, as exact integers."""
        if not some.size:
            return
        order = np.argsort(rows, kind="stable")
        there, first = np.unique(rows[order], return_index=True)
        for column in range(min(self._cluster.running.lines.amounts.shape[0], self.freed.shape[0])):
            amounts = self._cluster.running.lines.amounts[column, some[order]]
            self.freed[column, there] = np.add.reduceat(amounts, first)

    def _priorities(self) -> NDArray[np.int64]:
        """The priorities of all running work, including current boosts."""
        cluster = self._cluster
        priority = cluster.running.lines.priority
        boosted = {job for job, boost in cluster.boosts.items() if boost.until > self._now}
        if not boosted:
            return priority
        priority = priority.copy()
        for one in cluster.placed.values():
            if (one.ask.namespace, one.ask.job) in boosted:
                priority[one.lines] = cluster.priority(one.ask, self._now)
        return priority


def _rank(urgency: float, age: float, count: int) -> float:
    return URGENCY_WEIGHT * urgency / count + min(age / count, AGE_MAX)


def _least(rows: NDArray[np.intp], rank: NDArray[np.float64], most: int) -> list[int]:
    """The rows of the lowest rank, equals in their order; without sorting those that are not wanted."""
    if rows.size > most:
        ranks = rank[rows]
        last = np.partition(ranks, most - 1)[most - 1]
        below = rows[ranks < last]
        rows = np.concatenate([below, rows[ranks == last][: most - below.size]])
    return [int(row) for row in rows[np.lexsort((rows, rank[rows]))]]
