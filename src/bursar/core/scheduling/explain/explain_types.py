"""Answers of the scheduler: values that travel from the leader to API processes.

Amounts are numbers in their dimension's unit, times are seconds since the epoch; the API formats them. Nothing here
needs the scheduler's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bursar.core.objects.pending_reason import PendingReason
from bursar.core.scheduling.explain.wait_stats import Wait

NO_WAIT = Wait()
# How old a position, an estimate or the length of a queue may be, wherever it is shown.
FRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FactorTerm:
    """One factor of a score, with its weight."""

    factor: str
    value: float
    weight: float


@dataclass(frozen=True, slots=True)
class Score:
    """(Σ weight · value) × penalty."""

    total: float
    penalty: float
    profile: str
    terms: tuple[FactorTerm, ...]


@dataclass(frozen=True, slots=True)
class ShareFigures:
    """A tenant's actual share of the cluster and its targets."""

    tenant: str
    actual: float
    target: float
    effective: float
    deficit: float
    penalty: float


@dataclass(frozen=True, slots=True)
class Holding:
    """Placed work: its tenant's share, and whether this work is burst."""

    share: ShareFigures
    burst: bool = False


@dataclass(frozen=True, slots=True)
class Ahead:
    """The pending work ahead in the queue: number of allocations and their total requests."""

    allocations: int = 0
    amounts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReservedFor:
    """Capacity kept for an allocation on these nodes: from `at` on if reserved, until `at` if nominated."""

    nodes: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class ExplainAnswer:
    """Explanation of a pending allocation. Positions count from 1; allocations outside the queue have none."""

    uid: str
    reason: PendingReason
    others: tuple[PendingReason, ...] = ()
    queue: str = ""
    position: int | None = None  # within its queue
    position_overall: int | None = None
    ahead: Ahead = Ahead()
    ahead_own: Ahead = Ahead()  # the part of its own tenant
    score: Score | None = None
    share: ShareFigures | None = None
    starts_at: float | None = None  # an estimate
    nomination: ReservedFor | None = None
    reservation: ReservedFor | None = None


@dataclass(frozen=True, slots=True)
class ProposedPlacement:
    """A node and its devices where an explained allocation could run."""

    node: str
    devices: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A victim of a simulated preemption, with the rule that allows it."""

    namespace: str
    name: str
    tenant: str
    rule: str


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """The outcome of a simulated submission."""

    uid: str
    namespace: str
    name: str
    runs_now: bool = False
    places: tuple[ProposedPlacement, ...] = ()  # where it would run, now or after preemption
    victims: tuple[Evicted, ...] = ()
    starts_at: float | None = None  # an estimate, unless it runs now
    waits: ExplainAnswer | None = None  # why it would be pending


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """The depth and the wait times of one queue."""

    name: str
    depth: int = 0
    oldest_at: float | None = None
    wait: Wait = NO_WAIT


@dataclass(frozen=True, slots=True)
class Figures:
    """The scheduler in numbers."""

    queues: tuple[QueueFigures, ...] = ()
    waiting: int = 0
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    per_second: float = 0.0
    latency: Wait = NO_WAIT
    preemptions: int = 0
    revision: int = 0  # of the last change that is counted here


@dataclass(frozen=True, slots=True)
class QueueEstimate:
    """The position of a pending allocation in its queue, and its estimated start."""

    position: int | None = None
    starts_at: float | None = None
