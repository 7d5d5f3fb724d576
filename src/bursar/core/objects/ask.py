"""Scheduling requests: the resources and constraints of an allocation as hashable values.

Thousands of allocations of one template share one `Shape`, and the scheduler caches its results per shape.
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
    """An operator of a requirement on a node's label; the last four compare integers."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    ABSENT = "DoesNotExist"
    ABOVE = "Gt"
    BELOW = "Lt"
    AT_LEAST = "Gte"
    AT_MOST = "Lte"


class Effect(StrEnum):
    """The effect of a taint, as in Kubernetes."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition on one label of a node (node affinity)."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()


Requirements = tuple[Requirement, ...]  # all of them must hold


@dataclass(frozen=True, slots=True)
class Taint:
    """A mark on a node that keeps off work without a matching toleration."""

    key: str
    value: str = ""
    effect: Effect = Effect.NO_SCHEDULE


@dataclass(frozen=True, slots=True)
class Toleration:
    """Lets work onto nodes with taints of this key, value and effect; an empty key or effect matches all."""

    key: str = ""
    exists: bool = False  # matches any value
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class InterPodTerm:
    """A term of inter-pod affinity or anti-affinity: the selected allocations, and the topology of their domain.

    Without namespaces it selects in the allocation's own.
    """

    topology_key: str
    selector: Selector = EVERYTHING
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """A topology spread constraint: the largest skew between domains. Without a selector it counts the gang or job."""

    topology_key: str
    skew_max: int = 1
    hard: bool = True
    selector: Selector | None = None


@dataclass(frozen=True, slots=True)
class Where:
    """Placement constraints: node affinity, tolerations, inter-pod affinity, topology spread and node claims."""

    node_labels: tuple[tuple[str, str], ...] = ()
    required: tuple[Requirements, ...] = ()  # one of them must hold; without any, every node matches
    preferred: tuple[tuple[int, Requirements], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    near: tuple[InterPodTerm, ...] = ()
    apart: tuple[InterPodTerm, ...] = ()
    rather_near: tuple[tuple[int, InterPodTerm], ...] = ()
    rather_apart: tuple[tuple[int, InterPodTerm], ...] = ()
    spreads: tuple[Spread, ...] = ()
    sensitive: bool = False  # it runs only on nodes that its user has claimed
    claimant: str = ""  # its user, if they have claimed nodes, which it may use as well
    reserved: tuple[str, ...] = ()  # keys of taints that only tolerations with that key tolerate
    tenants: tuple[str, ...] = ()  # tenants whose reserved nodes it may use
    fractional: bool = False  # it requests a fraction of a device
    isolated: bool = False  # it runs only on nodes whose agents isolate tenants from each other
    whole_only: bool = False  # it requests a fraction of a device, and nodes that do not say take none


ANYWHERE = Where()


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a scheduling request that all allocations of a template share: requests per node and constraints.

    Requests are sorted by name, without zeros.
    """

    requests: tuple[tuple[str, int], ...]
    nodes: int = 1
    exclusive: bool = False
    where: Where = ANYWHERE
    # Every scheduling decision looks shapes up in dictionaries, so the hash is computed once.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.requests, self.nodes, self.exclusive, self.where)))

    def __hash__(self) -> int:
        return self._hash


@lru_cache(4096)
def claiming(shape: Shape, claimant: str, sensitive: bool) -> Shape:
    """The shape with a claimant: it may use the nodes that they have claimed, or only these if it is sensitive."""
    return replace(shape, where=replace(shape.where, claimant=claimant, sensitive=sensitive))


@lru_cache(4096)
def for_tenants(shape: Shape, tenants: tuple[str, ...]) -> Shape:
    """The shape that may use nodes reserved for these tenants."""
    return replace(shape, where=replace(shape.where, tenants=tenants))


@dataclass(frozen=True, slots=True)
class Ask:
    """The scheduling request of one allocation, pending or placed. Times are seconds since 1970."""

    uid: str
    namespace: str
    name: str
    tenant: str
    shape: Shape
    submitted_at: float
    priority: int = 0
    preempts: bool = True
    queue: str = "default"
    ttl_seconds: int = 0  # 0: its run time is unknown
    gang: Gang | None = None
    job: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    charge: Charge = field(default=NOTHING, hash=False)
    checkpoint_seconds: int = 0  # the interval of its checkpoints; 0: none
    data_ready: float | None = None  # the fraction of its data that is staged
    payer: str = ""  # its user, if it is prepaid
    owner: str = ""  # the uid of the Job that made it
    cross_tenant: bool = False  # it may preempt other tenants' work by priority
