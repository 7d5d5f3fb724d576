"""Conversion of stored documents to scheduler values: asks, nodes, shares, queues and priority classes.

Jobs create thousands of allocations with the same spec, byte for byte. A spec is interpreted once, and all its
allocations share one Shape, so that results computed for the shape are shared as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache

import msgspec
from msgspec import UNSET, UnsetType

from bursar.core.nodes.node import SIMULATED
from bursar.core.objects import ask
from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask, Effect, Shape, Toleration, Where
from bursar.core.objects.charge import Charge
from bursar.core.quota.permit import has_fractions, may_name, permit_of, permitted, priority_in_force
from bursar.core.quota.tenant_tree import Tree
from bursar.core.values.duration import DurationError, parse_seconds
from bursar.core.values.quantity import is_device
from bursar.wire.kinds.allocation import (
    CHECKPOINT_INTERVAL,
    SPEC_KEPT_BYTES_MAX,
    SPECS_KEPT,
    Allocation,
    AllocationSpec,
    charge_of,
    data_ready,
    gang_of,
    gang_spec,
    requests_of,
)
from bursar.wire.kinds.job import JOB_LABEL
from bursar.wire.kinds.node import NOT_ISOLATED, STDIN_LABEL, whole_only
from bursar.wire.shared.affinity import where_of
from bursar.wire.shared.meta import ObjectMeta, OwnerReference, given
from bursar.wire.shared.scheduling import GangScheduling

QUEUE_DEFAULT = "default"
PROFILE_DEFAULT = "default"
UID_SECONDS_OFF_MAX = 60.0  # the largest plausible difference between a uid's time and the creation


@dataclass(frozen=True, slots=True)
class PriorityClassView:
    """A priority class as the scheduler sees it."""

    value: int = 0
    global_default: bool = False
    preempts: bool = True
    cross_tenant: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """The fields of a node that constraints refer to."""

    labels: dict[str, str]
    taints: tuple[ask.Taint, ...] = ()
    ready: bool = True
    unschedulable: bool = False
    tenants: tuple[str, ...] = ()  # dedicated to these tenants; empty: for all
    whole_only: bool | None = None  # refuses fractions of devices; None: the system's setting
    isolated: bool = False  # its agent isolates tenants


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's fair share settings; None: not set. A target is a fraction of the whole system."""

    parent: str = ""
    weight: float | None = None  # default: that of its tier
    fair_share_target: float | None = None
    burst_allowance: float = 1.0
    gpu_hours_budget: float | None = None
    node_hours_budget: float | None = None
    tier: str = ""

    @property
    def has_budget(self) -> bool:
        return self.gpu_hours_budget is not None or self.node_hours_budget is not None


NO_CLASS = PriorityClassView()


# Asks.


@dataclass(frozen=True, slots=True)
class _Meaning:
    """Everything that follows from a spec alone."""

    shape: Shape
    charge: Charge
    queue: str
    ttl_seconds: int
    priority: int | None
    priority_class: str
    preempts: bool | None
    gang: Gang | None
    gang_open: GangScheduling | None  # a gang that annotations complete


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    creation_timestamp: str = ""
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []


class _Document(msgspec.Struct):
    metadata: _Metadata
    spec: msgspec.Raw


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_spec = msgspec.json.Decoder(AllocationSpec).decode


def ask_of(
    doc: bytes,
    *,
    uid: str,
    tenant: str,
    labels: Mapping[str, str],
    priorities: Mapping[str, PriorityClassView],
    charge: Charge | None = None,
    tree: Tree | None = None,
    exempt: bool = False,
) -> Ask:
    """The ask of a stored allocation. Its charge is the given one, or else the charge on acceptance. If the tree is
    given, the tenant's permissions apply, unless the allocation is exempt from them."""
    document = _decode_document(doc)
    metadata, meaning = document.metadata, _meaning(bytes(document.spec))
    by_class = priorities.get(meaning.priority_class) if meaning.priority_class else None
    if by_class is None:
        by_class = global_default(priorities)
    notes, shape = metadata.annotations, meaning.shape
    priority = by_class.value if meaning.priority is None else meaning.priority
    crosses = by_class.cross_tenant and priority <= by_class.value
    if tree is not None:
        permit = permit_of(tree, tenant)
        named = tree.classes.get(meaning.priority_class)
        if not exempt:
            priority = priority_in_force(permit, meaning.priority, named, priority)
            crosses = crosses and (named is None or may_name(permit, named))
        if shape.where.tolerations or permit.isolated or permit.whole_only:
            shape = permitted(shape, permit, exempt)
    return Ask(
        uid,
        metadata.namespace,
        metadata.name,
        tenant,
        shape,
        submitted_at(metadata.creation_timestamp, uid),
        priority,
        by_class.preempts if meaning.preempts is None else meaning.preempts,
        meaning.queue,
        meaning.ttl_seconds,
        meaning.gang if meaning.gang_open is None else _annotated(meaning.gang_open, notes),
        _job(metadata.owner_references, labels),
        labels,
        meaning.charge if charge is None else charge,
        _seconds(notes[CHECKPOINT_INTERVAL]) if CHECKPOINT_INTERVAL in notes else 0,
        data_ready(notes) if notes else None,
        owner=next((one.uid for one in metadata.owner_references if one.kind == "Job"), ""),
        cross_tenant=crosses,
    )


def global_default(priorities: Mapping[str, PriorityClassView]) -> PriorityClassView:
    """The class of work that names none: of several global defaults the lowest, as in Kubernetes; without any, zero."""
    marked = [one for one in priorities.values() if one.global_default]
    return min(marked, key=lambda one: one.value) if marked else NO_CLASS


def _meaning(raw: bytes) -> _Meaning:
    return _mean(raw) if len(raw) <= SPEC_KEPT_BYTES_MAX else _mean.__wrapped__(raw)


@lru_cache(SPECS_KEPT)
def _mean(raw: bytes) -> _Meaning:
    spec = _decode_spec(raw)
    allocation = Allocation(metadata=ObjectMeta(), spec=spec)
    return _Meaning(
        shape=_shared(_shape(spec)),
        charge=charge_of(allocation),
        queue=spec.queue or QUEUE_DEFAULT,
        ttl_seconds=parse_seconds(spec.ttl) if not isinstance(spec.ttl, UnsetType) else 0,
        priority=spec.priority if isinstance(spec.priority, int) else None,
        priority_class=spec.priority_class or "",
        preempts=spec.preemption_policy != "Never" if given(spec.preemption_policy) else None,
        gang=_several(gang_of(allocation.metadata, spec)),
        gang_open=_open(gang_spec(spec)),
    )


def _shape(spec: AllocationSpec) -> Shape:
    requests = tuple(sorted((name, amount) for name, amount in requests_of(spec).items() if amount))
    where = _tolerant(where_of(_selector(spec), spec.scheduling), _implied(spec, requests))
    return Shape(
        requests,
        spec.nodes if isinstance(spec.nodes, int) else 1,
        spec.exclusive is True,
        _special(spec, requests, where),
    )


def _special(spec: AllocationSpec, requests: tuple[tuple[str, int], ...], where: Where) -> Where:
    sensitive, fractional = spec.sensitive is True, has_fractions(requests)
    return replace(where, sensitive=sensitive, fractional=fractional) if sensitive or fractional else where


def tolerations_in(doc: bytes) -> tuple[tuple[Toleration, ...], bool]:
    """The tolerations of a stored allocation, and whether it requests a fraction of a device."""
    where = _meaning(bytes(_decode_document(doc).spec)).shape.where
    return where.tolerations, where.fractional


def may_cross_tenants(doc: bytes, tree: Tree, tenant: str, *, uid: str, exempt: bool) -> bool:
    """Whether a stored allocation may preempt other tenants' work by priority, by the classes and permits of now."""
    classes = {
        name: PriorityClassView(one.value, one.global_default, cross_tenant=one.cross_tenant)
        for name, one in tree.classes.items()
    }
    return ask_of(doc, uid=uid, tenant=tenant, labels={}, priorities=classes, tree=tree, exempt=exempt).cross_tenant


def _selector(spec: AllocationSpec) -> dict[str, str] | UnsetType:
    """The node selector; with stdin, it selects agents that support it: others would start the command without it."""
    if spec.stdin is not True:
        return spec.node_selector
    return {**(spec.node_selector or {}), STDIN_LABEL: "true"}


# Specs that differ only in irrelevant fields, such as the command or the gang's name, have equal shapes.
@lru_cache(SPECS_KEPT)
def _shared(shape: Shape) -> Shape:
    return shape


_ANY_NODE = Toleration(SIMULATED, exists=True)


def _implied(spec: AllocationSpec, requests: Iterable[tuple[str, int]]) -> list[Toleration]:
    """Implied tolerations: a request for an extended resource tolerates the taint of that name, which repels other
    work. Work without a command also tolerates simulated nodes."""
    implied = [Toleration(name, exists=True) for name, _ in requests if is_device(name)]
    return implied if spec.command else [*implied, _ANY_NODE]


def _tolerant(where: Where, implied: Iterable[Toleration]) -> Where:
    added = tuple(one for one in implied if one not in where.tolerations)
    return replace(where, tolerations=where.tolerations + added) if added else where


def _open(gang: GangScheduling | None) -> GangScheduling | None:
    return None if gang is None or (given(gang.min_members) and given(gang.timeout)) else gang


def _annotated(gang: GangScheduling, notes: dict[str, str]) -> Gang | None:
    return _several(gang_of(ObjectMeta(annotations=notes), AllocationSpec(gang_scheduling=gang)))


def _several(gang: Gang | None) -> Gang | None:
    """Return the gang, or None if it has a single member."""
    return gang if gang is not None and gang.min_members > 1 else None


def _job(owners: Iterable[OwnerReference], labels: Mapping[str, str]) -> str:
    return next((one.name for one in owners if one.kind == "Job"), "") or labels.get(JOB_LABEL, "")


def _seconds(text: str) -> int:
    try:
        return parse_seconds(text)
    except DurationError:
        return 0


def submitted_at(created: str, uid: str) -> float:
    """The time of submission, to the millisecond if the uid contains it (UUIDv7). Creation timestamps have whole
    seconds, and most waits are shorter."""
    second = _epoch(created)
    if uid[-22:-21] != "7":
        return second
    try:
        moment = int(uid[-36:-28] + uid[-27:-23], 16) / 1000
    except ValueError:
        return second
    return moment if abs(moment - second) <= UID_SECONDS_OFF_MAX else second


# All submissions within a second have the same text.
@lru_cache(4096)
def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


# Nodes.


class _Taint(msgspec.Struct):
    key: str
    value: str = ""
    effect: str = Effect.NO_SCHEDULE


class _NodeSpec(msgspec.Struct, rename="camel"):
    taints: list[_Taint] = []
    unschedulable: bool = False
    tenants: list[str] = []
    gpu_fractions: str = ""


class _Labelled(msgspec.Struct):
    labels: dict[str, str] = {}


class _NodeDocument(msgspec.Struct):
    metadata: _Labelled
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)


class _Condition(msgspec.Struct):
    type: str
    status: str


class _NodeStatus(msgspec.Struct):
    phase: str = "Ready"
    conditions: list[_Condition] = []
    isolation: str = NOT_ISOLATED


_decode_node = msgspec.json.Decoder(_NodeDocument).decode
_decode_node_status = msgspec.json.Decoder(_NodeStatus).decode


def node_of(doc: bytes, status: bytes) -> NodeView:
    """Convert a node; it is ready unless its phase or its condition says otherwise."""
    document, state = _decode_node(doc), _decode_node_status(status)
    ready = all(one.status == "True" for one in state.conditions if one.type == "Ready")
    taints = tuple(ask.Taint(one.key, one.value, Effect(one.effect)) for one in document.spec.taints)
    return NodeView(
        document.metadata.labels,
        taints,
        ready and state.phase == "Ready",
        document.spec.unschedulable,
        tuple(sorted(set(document.spec.tenants))),
        whole_only(document.spec.gpu_fractions),
        state.isolation != NOT_ISOLATED,
    )


# Tenants, queues and priority classes.


class _TenantSpec(msgspec.Struct, rename="camel"):
    parent: str = ""
    tier: str = ""
    weight: float | None = None
    fair_share_target: float | None = None
    burst_allowance: float = 1.0
    gpu_hours_budget: float | None = None
    node_hours_budget: float | None = None


class _Tenant(msgspec.Struct):
    spec: _TenantSpec = msgspec.field(default_factory=_TenantSpec)


class _TierSpec(msgspec.Struct):
    weight: float | None = None


class _Tier(msgspec.Struct):
    spec: _TierSpec = msgspec.field(default_factory=_TierSpec)


class _QueueSpec(msgspec.Struct):
    profile: str = PROFILE_DEFAULT


class _Queue(msgspec.Struct):
    spec: _QueueSpec = msgspec.field(default_factory=_QueueSpec)


class _PriorityClass(msgspec.Struct, rename="camel"):
    value: int
    global_default: bool = False
    preemption_policy: str | UnsetType = UNSET
    cross_tenant: bool = False


_decode_tenant = msgspec.json.Decoder(_Tenant).decode
_decode_tier = msgspec.json.Decoder(_Tier).decode
_decode_queue = msgspec.json.Decoder(_Queue).decode
_decode_priority_class = msgspec.json.Decoder(_PriorityClass).decode


def tenant_share_of(doc: bytes) -> TenantShare:
    spec = _decode_tenant(doc).spec
    return TenantShare(
        spec.parent,
        spec.weight,
        spec.fair_share_target,
        spec.burst_allowance,
        spec.gpu_hours_budget,
        spec.node_hours_budget,
        spec.tier,
    )


def tier_weight_of(doc: bytes) -> float | None:
    """The weight of a tier's tenants without a weight of their own."""
    return _decode_tier(doc).spec.weight


def queue_profile_of(doc: bytes) -> str:
    return _decode_queue(doc).spec.profile


def priority_class_of(doc: bytes) -> PriorityClassView:
    one = _decode_priority_class(doc)
    return PriorityClassView(one.value, one.global_default, one.preemption_policy != "Never", one.cross_tenant)
