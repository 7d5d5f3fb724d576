"""What an allocation asks of the scheduler, in the form in which it is compared, cached and decided.

Everything here is a value that can be hashed: thousands of allocations of one template share one `Shape`, and what was
worked out for a shape once need not be worked out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from bursar.core.objects.allocation import Gang
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.values.selector import EVERYTHING, Selector


class Operator(StrEnum):
    """What a requirement asks of a node's label; the last four compare integers."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    ABSENT = "DoesNotExist"
    ABOVE = "Gt"
    BELOW = "Lt"
    AT_LEAST = "Gte"
    AT_MOST = "Lte"


class Effect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True)
class Requirement:
    key: str
    operator: Operator
    values: tuple[str, ...] = ()


Requirements = tuple[Requirement, ...]  # all of them must hold


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: Effect = Effect.NO_SCHEDULE


@dataclass(frozen=True, slots=True)
class Toleration:
    """Tolerates taints with this key, value and effect; an empty key or effect stands for every one."""

    key: str = ""
    exists: bool = False  # any value will do
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class InterPodTerm:
    """Allocations in the same domain of a topology: wanted near, or wanted apart. No namespaces means one's own."""

    topology_key: str
    selector: Selector = EVERYTHING
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """How evenly the selected allocations lie over a topology's domains; without a selector: the gang, or the job."""

    topology_key: str
    skew_max: int = 1
    hard: bool = True
    selector: Selector | None = None


@dataclass(frozen=True, slots=True)
class Where:
    """Where something may run, where it would rather, and with whom."""

    node_labels: tuple[tuple[str, str], ...] = ()
    required: tuple[Requirements, ...] = ()  # any one of them; none at all asks for nothing
    preferred: tuple[tuple[int, Requirements], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    near: tuple[InterPodTerm, ...] = ()
    apart: tuple[InterPodTerm, ...] = ()
    rather_near: tuple[tuple[int, InterPodTerm], ...] = ()
    rather_apart: tuple[tuple[int, InterPodTerm], ...] = ()
    spreads: tuple[Spread, ...] = ()
    sensitive: bool = False  # it goes to nodes that its user has claimed, and to no others
    claimant: str = ""  # its user, where that makes a difference: it may also go to nodes that they have claimed
    reserved: tuple[str, ...] = ()  # keys of taints that no toleration without a key tolerates
    tenants: tuple[str, ...] = ()  # of the tenants that nodes are kept for, those whose nodes it may use
    fractional: bool = False  # it asks for a part of a device
    isolated: bool = False  # it goes only to nodes whose agents isolate tenants from each other


ANYWHERE = Where()


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked of each of `nodes` nodes, and of which nodes. Requests are sorted by name, without zeros."""

    requests: tuple[tuple[str, int], ...]
    nodes: int = 1
    exclusive: bool = False
    where: Where = ANYWHERE
    # It is looked up with every decision: what it hashes to is worked out once.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.requests, self.nodes, self.exclusive, self.where)))

    def __hash__(self) -> int:
        return self._hash


@lru_cache(4096)
def claiming(shape: Shape, claimant: str, sensitive: bool) -> Shape:
    """The same for somebody who has claimed nodes, or may not go elsewhere."""
    return replace(shape, where=replace(shape.where, claimant=claimant, sensitive=sensitive))


@lru_cache(4096)
def welcome_at(shape: Shape, tenants: tuple[str, ...]) -> Shape:
    """The same for somebody who may use the nodes that are kept for these tenants."""
    return replace(shape, where=replace(shape.where, tenants=tenants))


@dataclass(frozen=True, slots=True)
class Ask:
    """One allocation that wants room, or has it. Times are seconds since the epoch."""

    uid: str
    namespace: str
    name: str
    tenant: str
    shape: Shape
    submitted_at: float
    priority: int = 0
    preempts: bool = True
    queue: str = "default"
    ttl_seconds: int = 0  # 0: nobody knows how long it runs
    gang: Gang | None = None
    job: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    charge: Charge = field(default=NOTHING, hash=False)
    checkpoint_seconds: int = 0  # how often it saves its work; 0: never
    data_ready: float | None = None  # the part of its data that is where it is needed
    payer: str = ""  # who submitted it, where it is paid for beforehand
    owner: str = ""  # the uid of the Job that made it
    cross_tenant: bool = False  # its priority counts against other tenants' work as well
