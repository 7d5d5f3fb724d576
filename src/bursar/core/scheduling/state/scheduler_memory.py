"""The scheduler's memory: results of earlier cycles, and caches.

Losing it changes no decision about correctness: a new leader starts with an empty memory and finds everything again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import PendingReason
from bursar.core.scheduling.state.credit_slow_start import CreditProbes
from bursar.core.scheduling.state.equivalence import UnitKey
from bursar.core.scheduling.state.fleet import Fleet
from bursar.core.scheduling.state.node_filter import NodeFilters
from bursar.core.scheduling.state.node_scores import NodeScoreCache
from bursar.core.scheduling.state.nomination import Nominations
from bursar.core.scheduling.state.packing import ArrivalMix


@dataclass(frozen=True, slots=True)
class Blocked:
    """The reason why a unit could not be placed, and the change that makes another attempt worthwhile."""

    reason: PendingReason
    freed: int
    limits_changed: int
    until: float
    reservable: bool = True  # false when no time is known at which there will be capacity
    moved: int | None = None  # with pod affinity or reservations, any placement or end may help
    firm: bool = False  # not to be tried before that time, whatever changes


@dataclass(frozen=True, slots=True)
class Reservation:
    """Capacity that will be free: (allocation, row) of each slot, from `start` on."""

    start: float
    slots: tuple[tuple[Ask, int], ...]


@dataclass(slots=True)
class SchedulerMemory:
    """Results of earlier cycles, and caches; a new leader starts without them."""

    arrival_mix: ArrivalMix
    node_filters: NodeFilters
    node_scores: NodeScoreCache
    # By the key of the equivalence class or the gang.
    blocked: dict[UnitKey, Blocked] = field(default_factory=dict)
    probes: CreditProbes = field(default_factory=CreditProbes)
    reserved_for: UnitKey | None = None
    reservation: Reservation | None = None
    reserved_at: float = 0.0
    reserved_moved: int = 0  # the cluster's `moved` at that time
    nominations: Nominations | None = None  # reservations of the last cycle for nominated work
    alike_nodes: tuple[int, int] = (-1, 0)  # (version of the fleet, nodes that offer the same)
    # Work beyond its tenant's target, for this version of the cluster and these targets.
    burst: tuple[tuple[int, frozenset[tuple[str, tuple[float, ...]]]], frozenset[str]] | None = None

    @classmethod
    def of(cls, fleet: Fleet, arrival_mix: ArrivalMix | None = None) -> SchedulerMemory:
        """An empty memory for a fleet."""
        arrival_mix = arrival_mix if arrival_mix is not None else ArrivalMix()
        node_filters = NodeFilters(fleet)
        return cls(arrival_mix, node_filters, NodeScoreCache(fleet, arrival_mix, node_filters))

    def copy(self, fleet: Fleet) -> SchedulerMemory:
        """The same memory for a copy of the fleet; caches derived from the fleet start empty."""
        trial = SchedulerMemory.of(fleet, self.arrival_mix.copy())
        for one in fields(SchedulerMemory):
            if one.name not in _WORKED_OUT_AGAIN:
                setattr(trial, one.name, getattr(self, one.name))
        trial.blocked = dict(self.blocked)
        trial.probes = CreditProbes(dict(self.probes.most))
        return trial


_WORKED_OUT_AGAIN = frozenset({"arrival_mix", "node_filters", "node_scores", "nominations"})
