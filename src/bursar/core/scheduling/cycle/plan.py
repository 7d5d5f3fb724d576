"""Input and output of a cycle: the policy, units (placed together), and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import PendingReason
from bursar.core.scheduling.cycle.preemption import Victim
from bursar.core.scheduling.state.cluster_state import Nomination
from bursar.core.scheduling.state.equivalence import EquivalenceClass, UnitKey
from bursar.core.scheduling.state.placed_columns import Spot


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """The settings of the scheduler."""

    min_runtime_seconds: float = 300.0
    grace_seconds: float = 30.0
    nomination_seconds: float = 60.0  # the time that nominated capacity is kept after the victims' deadline
    quota_backoff_seconds: float = 30.0
    preemption_retry_seconds: float = 5.0  # victims reach their minimum runtime without any other change
    reservation_seconds: float = 1.0  # the time after which a reservation is computed again
    placements_max: int = 400  # of one plan, so that committing it and making the next go side by side
    # Slots that could not be placed in one plan; further units are tried in the next. This bounds the time that a plan
    # takes, during which the leader neither renews its term nor receives changes.
    blocked_max: int = 500
    backfill: bool = True
    preemption: bool = True
    energy_price: float | None = None  # now, from 0 (the cheapest) to 1 (the dearest)


class Binding(Struct, frozen=True):
    """Allocations that are placed together or not at all, each with its spots."""

    members: tuple[tuple[Ask, tuple[Spot, ...]], ...]


@dataclass(frozen=True, slots=True)
class Preempting:
    """A preemption: victims that must stop by `deadline`, and the capacity nominated to the preemptors."""

    asks: tuple[Ask, ...]
    nominations: tuple[Nomination, ...]
    victims: tuple[Victim, ...]
    deadline: float
    priority: int


@dataclass(slots=True)
class Plan:
    """The result of a cycle: bindings, preemptions, and the reasons of pending work."""

    bindings: list[Binding] = field(default_factory=list)
    preemptions: list[Preempting] = field(default_factory=list)
    reasons: dict[UnitKey, PendingReason] = field(default_factory=dict)
    failed: list[tuple[Ask, PendingReason]] = field(default_factory=list)  # gangs that were not complete in time
    tried: int = 0
    more: bool = False  # there is more to decide than one plan holds


class Unit(Struct):
    """The allocations that are placed together."""

    key: UnitKey
    asks: tuple[Ask, ...]
    group: EquivalenceClass | None = None  # where the next one like it waits

    @property
    def tenant(self) -> str:
        return self.asks[0].tenant

    @property
    def nodes(self) -> int:
        return sum([ask.shape.nodes for ask in self.asks])
