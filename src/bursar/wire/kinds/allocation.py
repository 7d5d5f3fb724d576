"""Allocation: a claim on resources on one or more nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.allocation import ENDED, Gang, Phase, ResourceRequest
from bursar.core.objects.approval import PENDING_REQUESTS
from bursar.core.objects.charge import NOTHING, Charge, Facts
from bursar.core.objects.object import Stored
from bursar.core.quota.permit import NOTHING_ASKED, Asking
from bursar.core.values.access import READ, USING, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.duration import parse_seconds
from bursar.core.values.quantity import is_device
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.priorityclass import priority_faults
from bursar.wire.shared.affinity import contradiction_faults, toleration_of
from bursar.wire.shared.approval import SELECTABLE, ApprovalStatus
from bursar.wire.shared.command import EnvVar, command_faults
from bursar.wire.shared.kind import USER_FIELD, AllocationDemand, Column, Fields, Kind, column, read, user_field
from bursar.wire.shared.limits import amounts, amounts_faults
from bursar.wire.shared.meta import Condition, ObjectMeta, OwnerReference, Quantity, Text, Wire, given
from bursar.wire.shared.scheduling import (
    NODES_MAX,
    GangScheduling,
    Scheduling,
    duration_faults,
    gang_faults,
    node_selector_faults,
    scheduling_faults,
)

GANG_SIZE = "scheduler.example.com/gang-size"
MAX_WAIT = "scheduler.example.com/max-wait"
CHECKPOINT_INTERVAL = "bursar.io/checkpoint-interval"
DATA_READY = "bursar.io/data-ready"
STDIN_BYTES_MAX = 1 << 20
JOB_KIND = "Job"  # the kind of the owner of a job's allocations
JOB_INDEX = "bursar.io/job-index"  # the job index of an allocation; set at its creation

FAULTS_MAX = 50
# Dimensions of quotas that are not requested from a node.
COUNTED = frozenset({"allocations", "nodes", "pods", PENDING_REQUESTS})
PREEMPTION_POLICIES = ("PreemptLowerPriority", "Never")

_PART = re.compile(r"0(\.[0-9]{1,9})?|1(\.0{1,9})?")


class Resources(Wire):
    requests: dict[str, Quantity] | UnsetType = UNSET
    limits: dict[str, Quantity] | UnsetType = UNSET


class AllocationSpec(Wire):
    resources: Resources | UnsetType = UNSET
    nodes: int | UnsetType = UNSET
    exclusive: bool | UnsetType = UNSET
    sensitive: bool | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    priority_class: Text = UNSET
    preemption_policy: Text = UNSET
    queue: Text = UNSET
    scheduling: Scheduling | UnsetType = UNSET
    # Short forms, directly in the spec.
    node_selector: dict[str, str] | UnsetType = UNSET
    gang_scheduling: GangScheduling | UnsetType = UNSET
    ttl: str | int | UnsetType = UNSET
    command: list[str] | UnsetType = UNSET
    env: list[EnvVar] | dict[str, str] | UnsetType = UNSET
    working_dir: Text = UNSET
    stdin: bool | UnsetType = UNSET  # it starts only after its standard input was sent
    on_node_lost: Text = UNSET
    on_member_failure: Text = UNSET  # on several nodes or in a gang: stop (the default) or wait


class PlacedOn(Wire):
    name: str
    uid: Text = UNSET
    devices: dict[str, list[int]] | UnsetType = UNSET
    phase: Text = UNSET  # exit code of its process there; for a single node, only if it failed
    exit_code: int | UnsetType = UNSET
    reason: Text = UNSET
    message: Text = UNSET
    lease: Text = UNSET  # the credit lease of the placement
    frozen: bool | UnsetType = UNSET  # frozen, because its account exceeds its spend rate
    unpaid: Text = UNSET  # the reason why its lease is no longer extended
    paid_until: Text = UNSET  # the time at which its paid time ends


class EvictionNotice(Wire):
    """Notice of an eviction, with the deadline and the reason; with `requeue` it is pending again afterwards."""

    id: Text = UNSET
    reason: Text = UNSET
    rule: Text = UNSET
    by: Text = UNSET
    message: Text = UNSET
    grace_period_seconds: int | UnsetType = UNSET
    deadline: Text = UNSET
    requeue: bool | UnsetType = UNSET


class FirstFailure(Wire):
    """The first failure: its node and cause; `allocation` is the failed member of its gang, if it was another one."""

    node: str
    allocation: Text = UNSET
    exit_code: int | UnsetType = UNSET
    reason: Text = UNSET
    message: Text = UNSET


class Restart(Wire):
    """The reason and time of the last stop of an allocation that was requeued."""

    reason: Text = UNSET
    time: Text = UNSET


class Nomination(Wire):
    """Capacity reserved for an allocation on a node while the victims of its preemption stop."""

    node: str
    until: Text = UNSET


class AllocationStatus(Wire):
    phase: Text = UNSET
    user: Text = UNSET  # the authenticated submitter
    permitted_by: Text = UNSET  # the administrator whose request exempted it from the tenant's permits
    reason: Text = UNSET
    message: Text = UNSET
    conditions: list[Condition] | UnsetType = UNSET
    node_id: Text = UNSET
    node_name: Text = UNSET
    nodes: list[PlacedOn] | UnsetType = UNSET
    start_time: Text = UNSET
    end_time: Text = UNSET
    exit_code: int | UnsetType = UNSET
    failure: FirstFailure | UnsetType = UNSET
    restarts: int | UnsetType = UNSET  # number of times that it was stopped and requeued
    last_restart: Restart | UnsetType = UNSET
    allocated_resources: dict[str, Quantity] | UnsetType = UNSET
    queue_position: int | UnsetType = UNSET  # computed on reads while it is pending
    estimated_start_time: Text = UNSET
    priority: int | UnsetType = UNSET  # the effective priority; shown in tables
    scheduled_time: Text = UNSET  # time of the last placement
    rank: int | UnsetType = UNSET  # rank of its first node in its gang
    size: int | UnsetType = UNSET  # size of its gang in nodes
    epoch: int | UnsetType = UNSET  # number of placements so far: each has a higher epoch
    eviction: EvictionNotice | UnsetType = UNSET
    approval: ApprovalStatus | UnsetType = UNSET
    nominated: list[Nomination] | UnsetType = UNSET


class Allocation(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: AllocationSpec
    status: AllocationStatus | UnsetType = UNSET


# Values for the rules.


def requests_of(spec: AllocationSpec) -> dict[str, int]:
    """Requests by resource; if only a limit is given, the limit is the request, as in Kubernetes."""
    if not isinstance(spec.resources, Resources):
        return {}
    limits = amounts(spec.resources.limits)
    return {**limits, **amounts(spec.resources.requests)}


def gang_of(metadata: ObjectMeta, spec: AllocationSpec) -> Gang | None:
    """The gang of which this is a member. Annotations are defaults; the spec takes precedence."""
    gang = gang_spec(spec)
    if gang is None or not gang.group_id:
        return None
    notes = metadata.annotations if isinstance(metadata.annotations, dict) else {}
    size = gang.min_members if isinstance(gang.min_members, int) else int(notes.get(GANG_SIZE, "1"))
    wait = gang.timeout if not isinstance(gang.timeout, UnsetType) else notes.get(MAX_WAIT, "0")
    return Gang(gang.group_id, size, parse_seconds(wait))


def gang_spec(spec: AllocationSpec) -> GangScheduling | None:
    inner = spec.scheduling.gang_scheduling if isinstance(spec.scheduling, Scheduling) else UNSET
    gang = spec.gang_scheduling if isinstance(spec.gang_scheduling, GangScheduling) else inner
    return gang if isinstance(gang, GangScheduling) else None


class _Notes(msgspec.Struct):
    annotations: dict[str, str] = {}


class _Noted(msgspec.Struct):
    metadata: _Notes


_decode_notes = msgspec.json.Decoder(_Noted).decode


def job_index_in(doc: bytes) -> int:
    """The job index of a stored allocation; −1 if it has none."""
    said = _decode_notes(doc).metadata.annotations.get(JOB_INDEX, "") if JOB_INDEX.encode() in doc else ""
    return int(said) if said.isascii() and said.isdigit() and len(said) < 9 else -1


def queue_of(allocation: Allocation) -> str:
    """The queue of an allocation."""
    return allocation.spec.queue or "default"


def _demand(allocation: Allocation) -> AllocationDemand:
    gang = gang_of(allocation.metadata, allocation.spec)
    return AllocationDemand(allocation.spec, gang.min_members if gang is not None else 1)


def disown(metadata: ObjectMeta) -> None:
    """Remove the labels, annotations and owner that mark it as a job's allocation."""
    if isinstance(metadata.owner_references, list):
        metadata.owner_references = [one for one in metadata.owner_references if one.kind != JOB_KIND] or UNSET


def _keep(before: Stored, allocation: Allocation) -> None:
    """Keep the stored reference to its job, whatever a client sends."""
    metadata = allocation.metadata
    stored = _decode_owners(before.doc).metadata.owner_references if b"ownerReferences" in before.doc else []
    made = [one for one in stored if one.kind == JOB_KIND]
    said = list(metadata.owner_references or ())
    if [one for one in said if one.kind == JOB_KIND] != made:
        metadata.owner_references = [*(one for one in said if one.kind != JOB_KIND), *made] or UNSET


class _Owners(msgspec.Struct, rename="camel"):
    owner_references: list[OwnerReference] = []


class _Owned(msgspec.Struct):
    metadata: _Owners


_decode_owners = msgspec.json.Decoder(_Owned).decode


def facts_of(spec: AllocationSpec) -> Facts:
    return Facts(
        scoped=True,
        terminating=given(spec.ttl),
        best_effort=not isinstance(spec.resources, Resources) or not (spec.resources.requests or spec.resources.limits),
        priority_class=spec.priority_class or "",
        priority=spec.priority if isinstance(spec.priority, int) else None,
    )


def charge_of(allocation: Allocation) -> Charge:
    """The charge of an allocation from its acceptance on."""
    return _judged(allocation.spec)[1]


def asking_of(allocation: Allocation) -> Asking:
    """The parts of the spec that need a permit."""
    return _judged(allocation.spec)[2]


def asked_in(path: str, spec: AllocationSpec) -> Asking:
    tolerations = spec.scheduling.tolerations if isinstance(spec.scheduling, Scheduling) else UNSET
    asked = Asking(
        ((f"{path}.priority", spec.priority),) if isinstance(spec.priority, int) else (),
        ((f"{path}.priorityClass", spec.priority_class),) if spec.priority_class else (),
        tuple(
            (f"{path}.scheduling.tolerations[{index}]", toleration_of(one))
            for index, one in enumerate(tolerations or ())
            if one.key
        ),
        tuple(
            (f"{path}.resources.requests[{name}]", name, value)
            for name, value in requests_of(spec).items()
            if 0 < value < WHOLE and is_device(name)
        ),
    )
    return NOTHING_ASKED if asked == NOTHING_ASKED else asked


# Jobs submit thousands of allocations with the same spec, which is validated once. The cache is bounded.
SPECS_KEPT = 512
SPEC_KEPT_BYTES_MAX = 4096

_encode_spec = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(AllocationSpec).decode


_Judged = tuple[tuple[Cause, ...], Charge, Asking]


def _judged(spec: AllocationSpec) -> _Judged:
    """Validate a spec: its faults, its charge if it has none, and the parts of it that need a permit."""
    raw = _encode_spec(spec)
    return _judge(raw) if len(raw) <= SPEC_KEPT_BYTES_MAX else _judge.__wrapped__(raw)


@lru_cache(SPECS_KEPT)
def _judge(raw: bytes) -> _Judged:
    spec = _decode_spec(raw)
    faults = tuple(islice(spec_faults("spec", spec), FAULTS_MAX))
    return (faults, NOTHING, NOTHING_ASKED) if faults else ((), _charge(spec), asked_in("spec", spec))


def _charge(spec: AllocationSpec) -> Charge:
    accepted: dict[str, int] = {}
    if isinstance(spec.resources, Resources):
        limits = amounts(spec.resources.limits)
        # If only a limit is given, the limit is the request, as in Kubernetes.
        accepted = {**limits, **amounts(spec.resources.requests)}
        accepted |= {f"limits.{name}": value for name, value in limits.items()}
    count = spec.nodes if isinstance(spec.nodes, int) else 1
    if count > 1:
        accepted = {name: value * count for name, value in accepted.items()}
    accepted["pods"] = accepted["allocations"] = WHOLE
    if spec.exclusive is True:
        accepted["nodes"] = WHOLE * count
    return Charge(facts_of(spec), accepted)


def request_of(allocation: Allocation) -> ResourceRequest:
    spec = allocation.spec
    return ResourceRequest(
        requests=requests_of(spec),
        nodes=spec.nodes if isinstance(spec.nodes, int) else 1,
        exclusive=spec.exclusive is True,
        sensitive=spec.sensitive is True,
    )


# Faults.


def _check(allocation: Allocation) -> list[Cause]:
    return [*_judged(allocation.spec)[0], *_annotation_faults(allocation), *_group_faults(allocation)]


def spec_faults(path: str, spec: AllocationSpec) -> Iterator[Cause]:
    if isinstance(spec.resources, Resources):
        yield from _resource_faults(path, spec.resources)
    if isinstance(spec.nodes, int) and not 1 <= spec.nodes <= NODES_MAX:
        yield field_fault(f"{path}.nodes", f"must be between 1 and {NODES_MAX}, got {spec.nodes}")
    if isinstance(spec.priority, int):
        yield from priority_faults(f"{path}.priority", spec.priority)
    if spec.preemption_policy is not UNSET and spec.preemption_policy not in PREEMPTION_POLICIES:
        yield field_fault(f"{path}.preemptionPolicy", f"must be one of {', '.join(PREEMPTION_POLICIES)}")
    if not isinstance(spec.ttl, UnsetType):
        yield from duration_faults(f"{path}.ttl", spec.ttl)
    if spec.on_node_lost is not UNSET and spec.on_node_lost not in ("requeue", "fail"):
        yield field_fault(f"{path}.onNodeLost", "must be requeue or fail")
    if spec.on_member_failure is not UNSET and spec.on_member_failure not in ("stop", "wait"):
        yield field_fault(f"{path}.onMemberFailure", "must be stop or wait")
    if isinstance(spec.node_selector, dict):
        yield from node_selector_faults(f"{path}.nodeSelector", spec.node_selector)
    if isinstance(spec.gang_scheduling, GangScheduling):
        yield from gang_faults(f"{path}.gangScheduling", spec.gang_scheduling)
    if isinstance(spec.scheduling, Scheduling):
        yield from _scheduling_faults(path, spec, spec.scheduling)
    yield from command_faults(path, spec.command, spec.env, spec.working_dir)
    if spec.stdin is True and not spec.command:
        yield field_fault(f"{path}.stdin", "needs a command that reads it")


def _resource_faults(spec_path: str, resources: Resources) -> Iterator[Cause]:
    path = f"{spec_path}.resources"
    faults = amounts_faults(f"{path}.requests", resources.requests) + amounts_faults(f"{path}.limits", resources.limits)
    yield from faults
    if faults:
        return
    requests, limits = amounts(resources.requests), amounts(resources.limits)
    for name, value in requests.items():
        if name in limits and value > limits[name]:
            yield field_fault(f"{path}.requests[{name}]", f"is above the limit for {name}")
        if is_device(name) and name in limits and value != limits[name]:
            yield field_fault(f"{path}.limits[{name}]", f"must equal the request: {name} cannot be overcommitted")
    for name, value in {**limits, **requests}.items():
        if is_device(name) and value > WHOLE and value % WHOLE:
            yield field_fault(f"{path}.requests[{name}]", "must be a whole number of devices, or a fraction below one")
    for part, given_ones in (("requests", requests), ("limits", limits)):
        for name in sorted(COUNTED.intersection(given_ones)):
            instead = f"set {spec_path}.nodes" if name == "nodes" else "each allocation counts as one"
            yield field_fault(f"{path}.{part}[{name}]", f"is counted, and no resource of a node: {instead}")


def _annotation_faults(allocation: Allocation) -> Iterator[Cause]:
    notes = allocation.metadata.annotations
    if not isinstance(notes, dict):
        return
    if GANG_SIZE in notes:
        size = notes[GANG_SIZE]
        if not (size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= NODES_MAX and len(size) < 9):
            yield field_fault(f"metadata.annotations[{GANG_SIZE}]", f"must be a number from 1 to {NODES_MAX}")
    for name in (MAX_WAIT, CHECKPOINT_INTERVAL):
        if name in notes:
            yield from duration_faults(f"metadata.annotations[{name}]", notes[name])
    if DATA_READY in notes and data_ready(notes) is None:
        yield field_fault(
            f"metadata.annotations[{DATA_READY}]",
            "must be a part from 0 to 1, such as 0.25",
        )


def data_ready(notes: Mapping[str, str]) -> float | None:
    """The fraction of its data that is staged; None if it is not annotated."""
    said = notes.get(DATA_READY, "")
    return float(said) if _PART.fullmatch(said) else None


def _group_faults(allocation: Allocation) -> Iterator[Cause]:
    """A gang needs a name, except in a job's template, where the job names it."""
    spec, gang, notes = allocation.spec, gang_spec(allocation.spec), allocation.metadata.annotations
    if gang is not None and gang.group_id:
        return
    if gang is not None and isinstance(gang.min_members, int):
        wanted, asked_by = gang.min_members > 1, "minMembers"
    else:
        wanted, asked_by = isinstance(notes, dict) and notes.get(GANG_SIZE, "1") != "1", f"the annotation {GANG_SIZE}"
    if wanted:
        inner = gang is not None and not given(spec.gang_scheduling)
        yield field_fault(
            f"spec.{'scheduling.' if inner else ''}gangScheduling.groupId",
            f"is required with {asked_by}: all members of a gang name the same groupId",
        )


def _scheduling_faults(path: str, spec: AllocationSpec, scheduling: Scheduling) -> Iterator[Cause]:
    understood = True
    said = scheduling_faults(f"{path}.scheduling", scheduling)
    for fault in chain(said, _said_twice_faults(path, spec, scheduling)):
        understood = False
        yield fault
    if understood:
        yield from contradiction_faults(f"{path}.scheduling", spec.node_selector, scheduling)


def _said_twice_faults(path: str, spec: AllocationSpec, scheduling: Scheduling) -> Iterator[Cause]:
    """A field may be in the spec or in its scheduling; two different values are a fault."""
    for name, wire in (("node_selector", "nodeSelector"), ("gang_scheduling", "gangScheduling")):
        outer, inner = getattr(spec, name), getattr(scheduling, name)
        if given(outer) and given(inner) and outer != inner:
            yield field_fault(f"{path}.{wire}", f"differs from {path}.scheduling.{wire}: set only one")


# Display.


def _fields(allocation: Allocation) -> Fields:
    status = allocation.status if isinstance(allocation.status, AllocationStatus) else AllocationStatus()
    node = status.node_name or ""
    return {
        "status.phase": status.phase or "Pending",
        "status.nodeName": node,
        "spec.nodeName": node,
        "spec.queue": allocation.spec.queue or "default",
        "spec.priorityClass": allocation.spec.priority_class or "",
        **user_field(status.user or ""),
    }


def _first_status(_: Allocation, now: str) -> dict[str, Any]:
    return {
        "phase": "Pending",
        "conditions": [
            {
                "type": "Scheduled",
                "status": "False",
                "reason": "Unscheduled",
                "message": "Waiting for scheduler",
                "lastTransitionTime": now,
            }
        ],
    }


def _reason(document: dict[str, Any]) -> str:
    """The reason for its phase; for a failure without a reason, the exit code."""
    code = read(document, "status.exitCode", None)
    failed = read(document, "status.phase") == Phase.FAILED and code is not None
    return str(read(document, "status.reason")) or (f"exit code {code}" if failed else "")


def _node(document: dict[str, Any]) -> str:
    """Its first node, and the number of the others."""
    first, more = str(read(document, "status.nodeName", "<none>")), len(read(document, "status.nodes", ())) - 1
    return f"{first} +{more}" if more > 0 else first


def _requested(resource: str) -> Column:
    def value(document: dict[str, Any]) -> str:
        resources = read(document, "spec.resources", {})
        asked = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        nodes = int(read(document, "spec.nodes", 1))
        return "0" if asked is None else f"{nodes}x{asked}" if nodes > 1 else str(asked)

    return Column(resource.rpartition("/")[2].upper(), value)


ALLOCATION = Kind(
    name="Allocation",
    plural="allocations",
    type=Allocation,
    namespaced=True,
    description="A claim on resources on one or more nodes.",
    short_names=("alloc", "al"),
    uid_prefix="alloc",
    access=KindAccess(
        AccessGroup.WORK,
        (
            RoleGrant(USING, ("update",), ("stdin",)),
            RoleGrant((Role.NODE,), READ, ("", "status")),
            RoleGrant((Role.NODE,), ("update", "patch"), ("status",)),
        ),
    ),
    check=_check,
    selectable=(
        "status.phase",
        USER_FIELD,
        "status.nodeName",
        "spec.nodeName",
        "spec.queue",
        "spec.priorityClass",
        *SELECTABLE,
    ),
    fields=_fields,
    charge=charge_of,
    first_status=_first_status,
    columns=(
        column("Status", "status.phase", default="Pending"),
        Column("Reason", _reason),
        _requested("nvidia.com/gpu"),
        _requested("cpu"),
        _requested("memory"),
        Column("Node", _node),
        column("Queue", "spec.queue", default="default"),
        Column("Priority", lambda document: str(read(document, "status.priority")), type="integer", wide=True),
        Column("Priority-Class", lambda document: str(read(document, "spec.priorityClass", "<none>")), wide=True),
        column("Message", "status.message", wide=True, default="<none>"),
    ),
    merge_keys={
        "spec.scheduling.tolerations": "key",
        "spec.scheduling.topologySpreadConstraints": "topologyKey",
        "spec.env": "name",
        "status.conditions": "type",
    },
    mutable_spec=False,
    requestable=True,
    refused=lambda reason, message, at: {
        "phase": str(Phase.FAILED),
        "reason": reason,
        "message": message,
        "endTime": at,
    },
    has_status=True,
    in_all=True,
    forbidden_by_quota=True,
    keep=_keep,
    may_go=lambda before, _: before.fields.get("status.phase") in ENDED,
    queue=queue_of,
    demand=_demand,
    placed=True,
    words={
        "Resources.requests": "Resources allocated on the node and charged to the quota.",
        "Resources.limits": "Limits of use, by resource; without a request the limit is the request.",
        "AllocationSpec.resources": "Resources on each of its nodes.",
        "AllocationSpec.nodes": "Number of nodes; default: 1.",
        "AllocationSpec.exclusive": "Whether no other work may share its nodes.",
        "AllocationSpec.sensitive": "Whether it runs only on nodes that its user has claimed.",
        "AllocationSpec.priority": "Higher priorities are placed first.",
        "AllocationSpec.priorityClass": "The name of a PriorityClass.",
        "AllocationSpec.preemptionPolicy": "PreemptLowerPriority or Never.",
        "AllocationSpec.queue": "The queue of the allocation; default: default.",
        "AllocationSpec.scheduling": "Constraints and preferences for nodes and for pods beside it.",
        "AllocationSpec.ttl": "Maximum run time, as in 7200s or 2h.",
        "AllocationSpec.command": "The command on each of its nodes; without one it only reserves capacity.",
        "AllocationSpec.env": "The command's environment, by name; the node adds its own, such as BURSAR_NODE.",
        "AllocationSpec.workingDir": "The command's directory on the node, as an absolute path.",
        "AllocationSpec.stdin": "true: start the command only when its standard input was sent, with PUT …/stdin.",
        "AllocationSpec.onNodeLost": "requeue or fail.",
        "AllocationSpec.onMemberFailure": "On several nodes or in a gang: stop the rest when one fails, or wait.",
        "AllocationStatus.reason": "The reason for the phase, from a closed list.",
        "AllocationStatus.queuePosition": "Position in its queue, from 1.",
        "AllocationStatus.allocatedResources": "The resources that it holds on all of its nodes together.",
        "AllocationStatus.failure": "The first failure: its node and cause.",
        "AllocationStatus.restarts": "Number of times that it was stopped and requeued.",
    },
    example={
        "metadata": {
            "name": "ml-training-job-42",
            "namespace": "ml-team",
            "labels": {"app": "model-training", "team": "ml-platform", "cost-center": "CC-1234"},
            "annotations": {"scheduler.example.com/gang-size": "4", "scheduler.example.com/max-wait": "300s"},
        },
        "spec": {
            "resources": {
                "requests": {"cpu": "8000m", "memory": "32Gi", "nvidia.com/gpu": "4"},
                "limits": {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "4"},
            },
            "priority": 100,
            "priorityClass": "high-priority",
            "preemptionPolicy": "PreemptLowerPriority",
            "scheduling": {
                "nodeSelector": {"gpu-type": "nvidia-a100", "zone": "us-east-1a"},
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringScheduling": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "gpu-memory", "operator": "Gte", "values": ["80"]}]}
                            ]
                        },
                        "preferredDuringScheduling": [
                            {
                                "weight": 50,
                                "preference": {
                                    "matchExpressions": [{"key": "network", "operator": "In", "values": ["rdma"]}]
                                },
                            }
                        ],
                    },
                    "podAntiAffinity": {
                        "requiredDuringScheduling": [
                            {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchLabels": {"app": "model-training"}},
                            }
                        ]
                    },
                },
                "tolerations": [{"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"}],
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "DoNotSchedule",
                    }
                ],
            },
            "ttl": "7200s",
            "gangScheduling": {"groupId": "training-gang-001", "minMembers": 4, "timeout": "300s"},
        },
    },
)
