"""Node: a machine that offers resources. Administrators write its spec; its agent reports its status."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from bursar.core.nodes.liveness import Liveness
from bursar.core.nodes.node import NodeGate
from bursar.core.objects.ask import Effect
from bursar.core.objects.object import Key
from bursar.core.quota.visibility import HIDDEN
from bursar.core.values.access import JOINING, READ, USING, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.names import label_key, label_value
from bursar.core.values.quantity import amount, is_bytes
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Column, Kind, TenantGrant, column, read
from bursar.wire.shared.limits import amounts, amounts_faults, dimension_name
from bursar.wire.shared.meta import Condition, ObjectMeta, Quantity, Text, Wire
from bursar.wire.shared.scheduling import EFFECTS, count_faults

HOSTNAME_LABEL = "kubernetes.io/hostname"
STDIN_LABEL = "bursar.io/stdin"  # on nodes whose agents support standard input; set by the agents
ZONE_LABEL = "topology.kubernetes.io/zone"
TAINTS_MAX = 64
TENANTS_MAX = 256
FEATURES_MAX = 64

# Fractions of a device are enforced by the node (MIG, MPS), trusted, or refused.
REFUSED = "Refused"
TRUSTED = "Trusted"
FRACTIONS = (TRUSTED, "Enforced", REFUSED)

NOT_ISOLATED = "none"
# Features of agents that decide which work their nodes accept.
TRACELESS = "traceless"  # all files of a placement are removed with it
WIPES = "wipe"  # has a wipe hook

OPEN = NodeGate()

# Stored for a silent node: its readiness, and the time of its last heartbeat.
SILENT = "status.silent"
SILENT_SINCE = "status.silentSince"


class Taint(Wire):
    key: str
    value: Text = UNSET
    effect: Text = UNSET
    time_added: Text = UNSET


class NodeSpec(Wire):
    capacity: dict[str, Quantity] | UnsetType = UNSET
    allocatable: dict[str, Quantity] | UnsetType = UNSET
    taints: list[Taint] | UnsetType = UNSET
    unschedulable: bool | UnsetType = UNSET
    cpu_overcommit: int | float | UnsetType = UNSET
    provider_id: Text = UNSET
    tenants: list[str] | UnsetType = UNSET  # dedicated to these tenants and their descendants
    gpu_fractions: Text = UNSET  # Trusted, Enforced or Refused; default: the system's setting


class NodeDrain(Wire):
    """The drain of a node. Only the server writes it: a node's report does not change it."""

    state: Text = UNSET  # Draining, Drained or Cancelled
    started_at: Text = UNSET
    deadline: Text = UNSET
    ended_at: Text = UNSET
    grace_period_seconds: int | UnsetType = UNSET
    reason: Text = UNSET
    by: Text = UNSET
    total: int | UnsetType = UNSET
    force: bool | UnsetType = UNSET


class NodeFence(Wire):
    """The fence of a node: an administrator states that nothing runs on it any more. Only the server writes it."""

    at: Text = UNSET
    by: Text = UNSET
    reason: Text = UNSET


class NodeClaim(Wire):
    """The claim of a node for sensitive work, until it is wiped. Only the server writes it; its user is not shown."""

    id: Text = UNSET
    state: Text = UNSET  # Claimed, Wiping or WipeFailed
    since: Text = UNSET
    released: Text = UNSET
    attempt: int | UnsetType = UNSET


class NodeStatus(Wire):
    phase: Text = UNSET
    reason: Text = UNSET
    message: Text = UNSET
    lease_id: Text = UNSET
    token: Text = UNSET
    capacity: dict[str, Quantity] | UnsetType = UNSET
    allocatable: dict[str, Quantity] | UnsetType = UNSET
    allocated: dict[str, Quantity] | UnsetType = UNSET
    used: dict[str, Quantity] | UnsetType = UNSET
    conditions: list[Condition] | UnsetType = UNSET
    last_heartbeat_time: Text = UNSET
    drain: NodeDrain | UnsetType = UNSET
    silent_since: Text = UNSET  # last heartbeat of a NotReady or Lost node; written by the server
    fence: NodeFence | UnsetType = UNSET
    claim: NodeClaim | UnsetType = UNSET
    isolation: Text = UNSET  # isolation of tenants by its agent: bubblewrap or none
    features: list[str] | UnsetType = UNSET  # as reported by its agent


class Node(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: NodeSpec | UnsetType = UNSET
    status: NodeStatus | UnsetType = UNSET


def node_key(name: str) -> Key:
    return Key("Node", "", name)


def cap_by_spec(node: Node) -> list[str]:
    """Cap the capacity in the status at the capacity in the spec, if that is given; resources that the spec does not
    name are removed. Return the capped resources."""
    capacity = node.spec.capacity if isinstance(node.spec, NodeSpec) else UNSET
    if not isinstance(capacity, dict) or not capacity or not isinstance(node.status, NodeStatus):
        return []
    most, claimed = amounts(capacity), set[str]()
    for name in ("capacity", "allocatable"):
        said = getattr(node.status, name)
        if isinstance(said, dict):
            claimed |= {one for one, value in amounts(said).items() if value > most.get(one, 0)}
            known = {resource: value for resource, value in said.items() if dimension_name(resource) in most}
            above = {one for one, value in amounts(known).items() if value > most[one]}
            kept = {one: value for one, value in known.items() if dimension_name(one) not in above}
            kept |= {one: value for one, value in capacity.items() if dimension_name(one) in above}
            setattr(node.status, name, kept)
    return sorted(claimed)


def describe_itself(node: Node) -> None:
    """Move the capacity of a node that registers itself into its status: its spec is for administrators."""
    if isinstance(node.spec, NodeSpec) and isinstance(node.spec.capacity, dict):
        status = node.status if isinstance(node.status, NodeStatus) else NodeStatus()
        status.capacity, node.spec.capacity, node.status = node.spec.capacity, UNSET, status


def said_at_joining(node: Node) -> NodeStatus:
    """The part of a new node's status that its agent decides: its isolation, and its capacity if the spec has none."""
    status = node.status if isinstance(node.status, NodeStatus) else NodeStatus()
    first = NodeStatus(isolation=status.isolation, features=status.features)
    if not (isinstance(node.spec, NodeSpec) and (node.spec.capacity or node.spec.allocatable)):
        first.capacity = first.allocatable = status.capacity
    return first


def isolation_condition(isolation: str, why: str = "") -> tuple[str, str, str, str]:
    """The condition that reports a node's isolation: its type, status, reason and message."""
    if isolation == NOT_ISOLATED:
        return "Isolated", "False", "NotIsolated", why
    return "Isolated", "True", "Sandboxed", ""


def whole_only(fractions: str) -> bool | None:
    """Whether a node accepts whole devices only; None if it has no setting."""
    return fractions == REFUSED if fractions else None


def is_schedulable(node: Node) -> bool:
    return not (isinstance(node.spec, NodeSpec) and node.spec.unschedulable is True)


def gate_of(node: Node) -> NodeGate | None:
    """The restrictions of a node: taints, tenants, isolation; None for a node without any."""
    spec = node.spec if isinstance(node.spec, NodeSpec) else NodeSpec()
    status = node.status if isinstance(node.status, NodeStatus) else NodeStatus()
    features = status.features or ()
    gate = NodeGate(
        tuple((one.key, one.value or "", one.effect or Effect.NO_SCHEDULE) for one in spec.taints or ()),
        tuple(sorted(set(spec.tenants or ()))),
        whole_only(spec.gpu_fractions or ""),
        (status.isolation or NOT_ISOLATED) != NOT_ISOLATED,
        TRACELESS in features,
        WIPES in features,
    )
    return None if gate == OPEN else gate


def allocatable_of(node: Node) -> dict[str, int]:
    """The allocatable amounts: of the status, else of the spec; cpu is scaled by the overcommit, memory never."""
    spec = node.spec if isinstance(node.spec, NodeSpec) else NodeSpec()
    status = node.status if isinstance(node.status, NodeStatus) else NodeStatus()
    result = {**amounts(spec.capacity), **amounts(spec.allocatable), **amounts(status.allocatable)}
    if isinstance(spec.cpu_overcommit, int | float) and "cpu" in result:
        result["cpu"] = int(result["cpu"] * spec.cpu_overcommit)
    return result


class _Offer(msgspec.Struct, rename="camel"):
    capacity: dict[str, Quantity] | UnsetType = UNSET
    allocatable: dict[str, Quantity] | UnsetType = UNSET
    cpu_overcommit: int | float = 1
    tenants: tuple[str, ...] | UnsetType = UNSET


class _Offered(msgspec.Struct):
    spec: _Offer = msgspec.field(default_factory=_Offer)


_decode_offered = msgspec.json.Decoder(_Offered).decode
_decode_offer = msgspec.json.Decoder(_Offer).decode


def allocatable_in(doc: bytes, status: bytes) -> dict[str, int]:
    """The allocatable amounts of a stored node; the same as `allocatable_of`, without decoding the whole node."""
    spec, now = _decode_offered(doc).spec, _decode_offer(status)
    result = {**amounts(spec.capacity), **amounts(spec.allocatable), **amounts(now.allocatable)}
    if "cpu" in result:
        result["cpu"] = int(result["cpu"] * spec.cpu_overcommit)
    return result


def dedicated_to(doc: bytes) -> tuple[str, ...]:
    """The tenants that a stored node is dedicated to; empty: for all tenants."""
    return _decode_offered(doc).spec.tenants or ()


def capacity_in(doc: bytes, status: bytes) -> dict[str, int]:
    """The capacity of a stored node, even if it is not allocatable now; cpu is scaled by the overcommit, memory never.

    If a node offers more than its capacity, its capacity is what it offers.
    """
    spec, now = _decode_offered(doc).spec, _decode_offer(status)
    result = {**amounts(spec.capacity), **amounts(now.capacity)}
    for name, value in {**amounts(spec.allocatable), **amounts(now.allocatable)}.items():
        result[name] = max(value, result.get(name, 0))
    if "cpu" in result:
        result["cpu"] = int(result["cpu"] * spec.cpu_overcommit)
    return result


def _check(node: Node) -> list[Cause]:
    faults: list[Cause] = []
    if isinstance(node.spec, NodeSpec):
        faults += _spec_faults(node.spec)
    if isinstance(node.status, NodeStatus):
        for name in ("capacity", "allocatable", "used"):
            faults += amounts_faults(f"status.{name}", getattr(node.status, name))
        faults += count_faults("status.features", node.status.features, FEATURES_MAX)
    return faults


def _spec_faults(spec: NodeSpec) -> list[Cause]:
    faults = amounts_faults("spec.capacity", spec.capacity) + amounts_faults("spec.allocatable", spec.allocatable)
    if not faults and isinstance(spec.capacity, dict) and isinstance(spec.allocatable, dict):
        capacity = amounts(spec.capacity)
        faults += [
            field_fault(f"spec.allocatable[{name}]", "is above the node's capacity")
            for name, value in amounts(spec.allocatable).items()
            if name in capacity and value > capacity[name]
        ]
    if isinstance(spec.cpu_overcommit, float | int) and not 1 <= spec.cpu_overcommit <= 100:
        faults.append(field_fault("spec.cpuOvercommit", "must be between 1 and 100"))
    faults += count_faults("spec.tenants", spec.tenants, TENANTS_MAX)
    if spec.gpu_fractions is not UNSET and spec.gpu_fractions not in FRACTIONS:
        faults.append(field_fault("spec.gpuFractions", f"must be one of {', '.join(FRACTIONS)}"))
    faults += count_faults("spec.taints", spec.taints, TAINTS_MAX)
    for index, taint in enumerate((spec.taints or [])[:TAINTS_MAX]):
        faults += [field_fault(f"spec.taints[{index}].key", fault) for fault in label_key(taint.key)]
        if taint.effect is not UNSET and taint.effect not in EFFECTS:
            faults.append(field_fault(f"spec.taints[{index}].effect", f"must be one of {', '.join(EFFECTS)}"))
        faults += [field_fault(f"spec.taints[{index}].value", fault) for fault in label_value(taint.value or "")]
    return faults


def _normalise(node: Node) -> None:
    """Add the labels that scheduling relies on, and remove fields that only responses have."""
    if isinstance(node.status, NodeStatus):
        # Especially the token: clients may send back a response, and stored objects are visible to all readers.
        node.status.token = node.status.last_heartbeat_time = UNSET
        node.status.allocated = UNSET
    labels = node.metadata.labels if isinstance(node.metadata.labels, dict) else {}
    labels = {HOSTNAME_LABEL: str(node.metadata.name), **labels}
    if "zone" in labels:
        labels.setdefault(ZONE_LABEL, labels["zone"])
    node.metadata.labels = labels


def _first_status(node: Node, now: str) -> dict[str, Any]:
    spec = node.spec if isinstance(node.spec, NodeSpec) else NodeSpec()
    said = node.status if isinstance(node.status, NodeStatus) else NodeStatus()
    capacity = spec.capacity or spec.allocatable or said.capacity or {}
    first: dict[str, Any] = {
        "phase": "Ready",
        "leaseId": f"lease-{node.metadata.name}",
        "capacity": dict(capacity),
        "allocatable": {**capacity, **(spec.allocatable or {})},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Registered", "lastTransitionTime": now}],
    }
    if said.features:
        first["features"] = sorted(set(said.features))
    if said.isolation:
        first["isolation"] = said.isolation
        type_, status, reason, _ = isolation_condition(said.isolation)
        first["conditions"].append({"type": type_, "status": status, "reason": reason, "lastTransitionTime": now})
    return first


def _fields(node: Node) -> dict[str, str]:
    status = node.status if isinstance(node.status, NodeStatus) else NodeStatus()
    phase = status.phase or "Ready"
    fields = {
        "status.phase": phase,
        "spec.unschedulable": str(isinstance(node.spec, NodeSpec) and node.spec.unschedulable is True).lower(),
    }
    if status.silent_since:
        fenced = isinstance(status.fence, NodeFence)
        fields |= {SILENT: Liveness.FENCED if fenced else phase, SILENT_SINCE: status.silent_since}
    return fields


def _state(document: dict[str, Any]) -> str:
    states = [str(read(document, "status.phase", "Unknown"))]
    if read(document, "status.fence", {}):
        states.append("Fenced")
    if claim := read(document, "status.claim.state", ""):
        states.append(str(claim))
    if read(document, "spec.unschedulable", False):
        states.append("SchedulingDisabled")
    return ",".join(states)


def _free(resource: str, label: str) -> Column:
    def value(document: dict[str, Any]) -> str:
        whole = read(document, "status.allocatable", {})
        if resource not in whole:
            return "<none>"
        allocated = read(document, "status.allocated", None)
        if allocated is None and HIDDEN in read(document, "spec.tenants", ()):
            return f"?/{_short(resource, whole[resource])}"
        given = (allocated or {}).get(resource, "0")
        return f"{_short(resource, given)}/{_short(resource, whole[resource])}"

    return Column(label, value)


def _short(resource: str, quantity: Any) -> str:
    """A quantity for people: bytes that are not whole MiB become tenths of a GiB."""
    text = str(quantity)
    if not is_bytes(resource) or not text.endswith("Ki"):
        return text
    return f"{amount(resource, text) / (1 << 30):.1f}Gi"


NODE = Kind(
    name="Node",
    plural="nodes",
    type=Node,
    namespaced=False,
    description="A machine with its resources, labels and taints.",
    short_names=("no",),
    uid_prefix="node",
    access=KindAccess(
        AccessGroup.CATALOGUE,
        (
            # The user who will work on a sensitive node claims it.
            RoleGrant(USING, ("claim", "release")),
            RoleGrant((Role.NODE,), ("get", "update", "patch"), ("status",)),
            RoleGrant((Role.NODE,), READ, ("evictions",)),
            RoleGrant((JOINING,), ("create",)),
        ),
    ),
    check=_check,
    selectable=("status.phase", "spec.unschedulable"),
    fields=_fields,
    first_status=_first_status,
    normalise=_normalise,
    columns=(
        Column("Status", _state),
        _free("nvidia.com/gpu", "GPU"),
        _free("cpu", "CPU"),
        _free("memory", "Memory"),
        column("GPU-Type", "metadata.labels.gpu-type", wide=True, default="<none>"),
        column("Isolation", "status.isolation", wide=True, default="<unknown>"),
        Column("Tenants", lambda document: ",".join(read(document, "spec.tenants", ())) or "<all>", wide=True),
    ),
    # Taints are replaced as a whole, as in Kubernetes: `kubectl taint node NAME KEY-` sends the remaining ones.
    merge_keys={"status.conditions": "type"},
    has_status=True,
    offers_resources=True,
    # All tenants see that a node is claimed, but not by which user.
    private_verbs=frozenset({"claim", "release"}),
    names_tenants=TenantGrant("spec.tenants", figures=("allocated", "used"), own=True),
    words={
        "NodeSpec.capacity": "Resources of the node.",
        "NodeSpec.allocatable": "Resources that work may be allocated.",
        "NodeSpec.taints": "Repel work that does not tolerate them.",
        "NodeSpec.unschedulable": "Whether it is cordoned: no new work is placed on it.",
    },
)
