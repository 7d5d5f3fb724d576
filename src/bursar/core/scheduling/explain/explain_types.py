"""What the scheduler answers when it is asked: values that travel from the leader to whoever wants to know.

Amounts are numbers in their dimension's unit, times are seconds since the epoch; how they are written is the business
of the doors. Nothing here needs the scheduler's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bursar.core.objects.pending_reason import PendingReason
from bursar.core.scheduling.explain.wait_stats import Wait

NO_WAIT = Wait()


@dataclass(frozen=True, slots=True)
class FactorTerm:
    """One of the factors of a score, and how much it counts."""

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
    """What a tenant holds of the cluster, and what it should hold."""

    tenant: str
    actual: float
    target: float
    effective: float
    deficit: float
    penalty: float


@dataclass(frozen=True, slots=True)
class Holding:
    """How something that is placed stands: what its tenant holds, and whether this is beyond what it should."""

    share: ShareFigures
    burst: bool = False


@dataclass(frozen=True, slots=True)
class Ahead:
    """What stands in the line before something: how many allocations, and what they ask for together."""

    allocations: int = 0
    amounts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReservedFor:
    """Room that is kept for somebody on these nodes: from a time on when it is reserved, until one when nominated."""

    nodes: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class ExplainAnswer:
    """Why something waits. A position counts from 1; what is not in line yet, such as part of a gang, has none."""

    uid: str
    reason: PendingReason
    others: tuple[PendingReason, ...] = ()
    queue: str = ""
    position: int | None = None  # within its queue
    position_overall: int | None = None
    ahead: Ahead = Ahead()
    ahead_own: Ahead = Ahead()  # what of that is its own tenant's
    score: Score | None = None
    share: ShareFigures | None = None
    starts_at: float | None = None  # an estimate
    nomination: ReservedFor | None = None
    reservation: ReservedFor | None = None


@dataclass(frozen=True, slots=True)
class ProposedPlacement:
    node: str
    devices: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evicted:
    """Who would have to go, and under which rule."""

    namespace: str
    name: str
    tenant: str
    rule: str


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """What would become of something if it were submitted now."""

    uid: str
    namespace: str
    name: str
    runs_now: bool = False
    places: tuple[ProposedPlacement, ...] = ()  # where it would go, or where room would be made for it
    victims: tuple[Evicted, ...] = ()
    starts_at: float | None = None  # an estimate, unless it runs now
    waits: ExplainAnswer | None = None  # why it would wait


@dataclass(frozen=True, slots=True)
class QueueFigures:
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
class Glimpse:
    """The little that is shown of something that waits whenever it is looked at."""

    position: int | None = None
    starts_at: float | None = None
