"""Priority score: the nine factors of a unit in one cycle, and their weighted sum.

Pending work falls into few equivalence classes, whose members differ only in their waiting time. So all other factors
are computed once per class and cycle, however many are pending.
"""

from __future__ import annotations

from collections.abc import Hashable

from bursar.core.objects.ask import Shape
from bursar.core.scheduling.cycle.fair_queue import (
    DEFAULT_PROFILE,
    PROFILES,
    Factors,
    Profile,
    backlog_factor,
    checkpoint_factor,
    conformance_factor,
    data_factor,
    energy_factor,
    priority_factor,
    score,
    topology_factor,
    waiting_factor,
)
from bursar.core.scheduling.cycle.placer import LEVELS, capacity_by_domain, capacity_for
from bursar.core.scheduling.cycle.plan import Unit
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.equivalence import EquivalenceClass
from bursar.core.scheduling.state.fair_share import Shares
from bursar.core.scheduling.state.fleet import NOWHERE


class PriorityScore:
    """Computes the priority score of pending units from nine factors."""

    def __init__(self, cluster: ClusterState, shares: Shares, now: float, energy_price: float | None = None) -> None:
        self._cluster = cluster
        self._shares = shares
        self._now = now
        self._energy = energy_factor(energy_price)
        self._alike = cluster.alike_nodes()
        self._depths: dict[str, int] = {}
        self._together: dict[Shape, int | None] = {}
        # By the identity of classes, which live as long as any of their members is queued.
        self._of_groups: dict[int, tuple[float, float]] = {}  # the score without the wait, and the weight of the wait
        self._of_gangs: dict[Hashable, tuple[Profile, Factors, float]] = {}

    def count_depths(self) -> None:
        """Count the pending allocations of each queue."""
        for group in self._cluster.groups.values():
            depth = self._depths.get(group.key.queue, 0)
            self._depths[group.key.queue] = depth + len(group.members)

    def of_member(self, group: EquivalenceClass, submitted_at: float) -> float:
        """The score of a class's member that was submitted then."""
        known = self._of_groups.get(id(group))
        if known is None:
            unit = Unit(group.key, (next(iter(group.members.values())),))
            profile, penalty = self.profile(unit), self.penalty(unit)
            rest = score(profile, self.factors(unit)._replace(waiting=0.0), penalty)
            known = self._of_groups[id(group)] = (rest, profile.weights.waiting * penalty)
        return known[0] + known[1] * waiting_factor(self._now - submitted_at)

    def of_gang(self, unit: Unit) -> float:
        """The score of a gang while the queue is filled: no tenant's deficit changes before the first placement."""
        ask = unit.asks[0]
        priority = self._cluster.priority(ask, self._now)
        times = (ask.ttl_seconds, ask.checkpoint_seconds)
        kind = (ask.tenant, ask.queue, priority, times, ask.data_ready, ask.shape, unit.nodes)
        known = self._of_gangs.get(kind)
        if known is None:
            known = self._of_gangs[kind] = (self.profile(unit), self.factors(unit), self.penalty(unit))
        profile, alike, penalty = known
        return score(profile, Factors(alike[0], waiting_factor(self._now - ask.submitted_at), *alike[2:]), penalty)

    def profile(self, unit: Unit) -> Profile:
        return PROFILES.get(self._cluster.profiles.get(unit.asks[0].queue, ""), PROFILES[DEFAULT_PROFILE])

    def penalty(self, unit: Unit) -> float:
        share = self._cluster.tenants.get(unit.tenant)
        return share.penalty if share is not None else 1.0

    def factors(self, unit: Unit) -> Factors:
        ask, nodes = unit.asks[0], unit.nodes
        return Factors(
            priority=priority_factor(self._cluster.priority(ask, self._now)),
            waiting=waiting_factor(self._now - ask.submitted_at),
            deficit=self._shares.deficit(ask.tenant),
            topology=self._topology(ask.shape, nodes),
            data=data_factor(ask.data_ready),
            backlog=backlog_factor(self._depths.get(ask.queue, 0)),
            energy=self._energy,
            checkpoint=checkpoint_factor(ask.checkpoint_seconds, ask.ttl_seconds),
            conformance=conformance_factor(nodes, self._alike),
        )

    def _topology(self, shape: Shape, nodes: int) -> float:
        """The part of a unit that the best rack holds; a single node is always together."""
        if nodes == 1:
            return 1.0
        if shape not in self._together:
            self._together[shape] = self._nodes_together(shape)
        return topology_factor(nodes, self._together[shape])

    def _nodes_together(self, shape: Shape) -> int | None:
        """The number of these that the best rack would hold if it were empty; unknown without racks. Current usage must
        not count: in a full cluster, all other work would come before work that needs several nodes."""
        column = self._cluster.fleet.label(LEVELS[0])
        if not (column.codes != NOWHERE).any():
            return None
        fleet = self._cluster.fleet
        return int(capacity_by_domain(column, capacity_for(fleet, fleet.need(shape))).max())
