"""Allocation: a claim on resources on one or more nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.allocation import Gang, Request
from bursar.core.charge import Charge, Facts
from bursar.core.duration import DurationError, parse_seconds
from bursar.core.names import dns_subdomain, label_key, label_value
from bursar.core.node import WHOLE, is_device
from bursar.core.quantity import amount
from bursar.core.refusal import Cause, field_fault
from bursar.wire.kind import Column, Fields, Kind, column, read
from bursar.wire.limits import amounts, amounts_faults, quantity_text
from bursar.wire.meta import Condition, LabelSelector, ObjectMeta, Quantity, Text, Wire, given
from bursar.wire.priorityclass import priority_faults

GANG_SIZE = "scheduler.example.com/gang-size"
MAX_WAIT = "scheduler.example.com/max-wait"

NODE_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte")
LABEL_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
PREEMPTION_POLICIES = ("PreemptLowerPriority", "Never")
NODES_MAX = 100_000
TERMS_MAX = 64


class Resources(Wire):
    requests: dict[str, Quantity] | UnsetType = UNSET
    limits: dict[str, Quantity] | UnsetType = UNSET


class NodeRequirement(Wire):
    key: str
    operator: str
    values: list[str] | UnsetType = UNSET


class NodeSelectorTerm(Wire):
    match_expressions: list[NodeRequirement] | UnsetType = UNSET


class NodeSelector(Wire):
    node_selector_terms: list[NodeSelectorTerm]


class PreferredNodes(Wire):
    weight: int
    preference: NodeSelectorTerm


class NodeAffinity(Wire):
    required_during_scheduling: NodeSelector | UnsetType = UNSET
    preferred_during_scheduling: list[PreferredNodes] | UnsetType = UNSET
    # Kubernetes' own names for the same two.
    required_during_scheduling_ignored_during_execution: NodeSelector | UnsetType = UNSET
    preferred_during_scheduling_ignored_during_execution: list[PreferredNodes] | UnsetType = UNSET


class PodAffinityTerm(Wire):
    topology_key: str
    label_selector: LabelSelector | UnsetType = UNSET
    namespaces: list[str] | UnsetType = UNSET


class PreferredPods(Wire):
    weight: int
    pod_affinity_term: PodAffinityTerm


class PodAffinity(Wire):
    required_during_scheduling: list[PodAffinityTerm] | UnsetType = UNSET
    preferred_during_scheduling: list[PreferredPods] | UnsetType = UNSET
    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm] | UnsetType = UNSET
    preferred_during_scheduling_ignored_during_execution: list[PreferredPods] | UnsetType = UNSET


class Affinity(Wire):
    node_affinity: NodeAffinity | UnsetType = UNSET
    pod_affinity: PodAffinity | UnsetType = UNSET
    pod_anti_affinity: PodAffinity | UnsetType = UNSET


class Toleration(Wire):
    key: Text = UNSET
    operator: Text = UNSET
    value: Text = UNSET
    effect: Text = UNSET
    toleration_seconds: int | UnsetType = UNSET


class TopologySpread(Wire):
    max_skew: int
    topology_key: str
    when_unsatisfiable: Text = UNSET
    label_selector: LabelSelector | UnsetType = UNSET


class GangScheduling(Wire):
    group_id: Text = UNSET
    min_members: int | UnsetType = UNSET
    timeout: str | int | UnsetType = UNSET


class Scheduling(Wire):
    node_selector: dict[str, str] | UnsetType = UNSET
    affinity: Affinity | UnsetType = UNSET
    tolerations: list[Toleration] | UnsetType = UNSET
    topology_spread_constraints: list[TopologySpread] | UnsetType = UNSET
    gang_scheduling: GangScheduling | UnsetType = UNSET


class EnvVar(Wire):
    name: str
    value: Text = UNSET


class AllocationSpec(Wire):
    resources: Resources | UnsetType = UNSET
    nodes: int | UnsetType = UNSET
    exclusive: bool | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    priority_class: Text = UNSET
    preemption_policy: Text = UNSET
    queue: Text = UNSET
    scheduling: Scheduling | UnsetType = UNSET
    # The short forms, directly in the spec.
    node_selector: dict[str, str] | UnsetType = UNSET
    gang_scheduling: GangScheduling | UnsetType = UNSET
    ttl: str | int | UnsetType = UNSET
    command: list[str] | UnsetType = UNSET
    env: list[EnvVar] | dict[str, str] | UnsetType = UNSET
    working_dir: Text = UNSET
    on_node_lost: Text = UNSET


class PlacedOn(Wire):
    name: str
    uid: Text = UNSET
    devices: dict[str, list[int]] | UnsetType = UNSET


class AllocationStatus(Wire):
    phase: Text = UNSET
    reason: Text = UNSET
    message: Text = UNSET
    conditions: list[Condition] | UnsetType = UNSET
    node_id: Text = UNSET
    node_name: Text = UNSET
    nodes: list[PlacedOn] | UnsetType = UNSET
    start_time: Text = UNSET
    end_time: Text = UNSET
    exit_code: int | UnsetType = UNSET
    allocated_resources: dict[str, Quantity] | UnsetType = UNSET
    queue_position: int | UnsetType = UNSET


class Allocation(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: AllocationSpec
    status: AllocationStatus | UnsetType = UNSET


# What the rules need of it.


def requests_of(spec: AllocationSpec) -> dict[str, int]:
    """Requests; where only a limit is given, the limit is the request, as in Kubernetes."""
    if not isinstance(spec.resources, Resources):
        return {}
    limits = amounts(spec.resources.limits)
    return {**limits, **amounts(spec.resources.requests)}


def gang_of(metadata: ObjectMeta, spec: AllocationSpec) -> Gang | None:
    """The gang this is a member of. Annotations are defaults; what the spec says wins."""
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


def facts_of(spec: AllocationSpec) -> Facts:
    return Facts(
        scoped=True,
        terminating=given(spec.ttl),
        best_effort=not isinstance(spec.resources, Resources) or not (spec.resources.requests or spec.resources.limits),
        priority_class=spec.priority_class or "",
    )


def charge_of(allocation: Allocation) -> Charge:
    """What an allocation holds from the moment it is accepted."""
    spec = allocation.spec
    count = spec.nodes if isinstance(spec.nodes, int) else 1
    accepted = {name: value * count for name, value in requests_of(spec).items()}
    if isinstance(spec.resources, Resources) and isinstance(spec.resources.limits, dict):
        for name, value in spec.resources.limits.items():
            accepted[f"limits.{name}"] = amount(name, quantity_text(value)) * count
    accepted["pods"] = accepted["allocations"] = WHOLE
    if spec.exclusive is True:
        accepted["nodes"] = WHOLE * count
    return Charge(facts_of(spec), accepted)


def request_of(allocation: Allocation) -> Request:
    spec = allocation.spec
    return Request(
        requests=requests_of(spec),
        nodes=spec.nodes if isinstance(spec.nodes, int) else 1,
        exclusive=spec.exclusive is True,
    )


# What may be wrong with it.


def _check(allocation: Allocation) -> list[Cause]:
    return [*spec_faults("spec", allocation.spec), *_annotation_gang_faults(allocation)]


def spec_faults(path: str, spec: AllocationSpec) -> Iterator[Cause]:
    if isinstance(spec.resources, Resources):
        yield from _resource_faults(f"{path}.resources", spec.resources)
    if isinstance(spec.nodes, int) and not 1 <= spec.nodes <= NODES_MAX:
        yield field_fault(f"{path}.nodes", f"must be between 1 and {NODES_MAX}, got {spec.nodes}")
    if isinstance(spec.priority, int):
        yield from priority_faults(f"{path}.priority", spec.priority)
    if spec.preemption_policy is not UNSET and spec.preemption_policy not in PREEMPTION_POLICIES:
        yield field_fault(f"{path}.preemptionPolicy", f"must be one of {', '.join(PREEMPTION_POLICIES)}")
    if not isinstance(spec.ttl, UnsetType):
        yield from _duration_faults(f"{path}.ttl", spec.ttl)
    if spec.on_node_lost is not UNSET and spec.on_node_lost not in ("requeue", "fail"):
        yield field_fault(f"{path}.onNodeLost", "must be requeue or fail")
    if isinstance(spec.node_selector, dict):
        yield from _node_selector_faults(f"{path}.nodeSelector", spec.node_selector)
    if isinstance(spec.gang_scheduling, GangScheduling):
        yield from _gang_faults(f"{path}.gangScheduling", spec.gang_scheduling)
    if isinstance(spec.scheduling, Scheduling):
        yield from _scheduling_faults(f"{path}.scheduling", spec.scheduling)
        yield from _said_twice_faults(path, spec, spec.scheduling)
    for index, word in enumerate(spec.command or ()):
        if "\0" in word:
            yield field_fault(f"{path}.command[{index}]", "must not contain a NUL character")


def _resource_faults(path: str, resources: Resources) -> Iterator[Cause]:
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


def _duration_faults(path: str, text: str | int) -> Iterator[Cause]:
    try:
        if parse_seconds(text) <= 0:
            yield field_fault(path, "must be longer than nothing")
    except DurationError as error:
        yield field_fault(path, str(error))


def _node_selector_faults(path: str, selector: dict[str, str]) -> Iterator[Cause]:
    for key, value in selector.items():
        yield from (field_fault(f"{path}[{key[:63]}]", fault) for fault in [*label_key(key), *label_value(value)])


def _gang_faults(path: str, gang: GangScheduling) -> Iterator[Cause]:
    if given(gang.group_id):
        yield from (field_fault(f"{path}.groupId", fault) for fault in dns_subdomain(str(gang.group_id)))
    if isinstance(gang.min_members, int) and not 1 <= gang.min_members <= NODES_MAX:
        yield field_fault(f"{path}.minMembers", f"must be between 1 and {NODES_MAX}, got {gang.min_members}")
    if not isinstance(gang.timeout, UnsetType):
        yield from _duration_faults(f"{path}.timeout", gang.timeout)


def _annotation_gang_faults(allocation: Allocation) -> Iterator[Cause]:
    notes = allocation.metadata.annotations
    if not isinstance(notes, dict):
        return
    if GANG_SIZE in notes:
        size = notes[GANG_SIZE]
        if not (size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= NODES_MAX and len(size) < 9):
            yield field_fault(f"metadata.annotations[{GANG_SIZE}]", f"must be a number from 1 to {NODES_MAX}")
        gang = gang_spec(allocation.spec)
        if size != "1" and (gang is None or not gang.group_id):
            yield field_fault(
                "spec.gangScheduling.groupId",
                f"is required with the annotation {GANG_SIZE}: it names the gang's members",
            )
    if MAX_WAIT in notes:
        yield from _duration_faults(f"metadata.annotations[{MAX_WAIT}]", notes[MAX_WAIT])


def _said_twice_faults(path: str, spec: AllocationSpec, scheduling: Scheduling) -> Iterator[Cause]:
    """Both places are accepted; two different answers are not."""
    for name, wire in (("node_selector", "nodeSelector"), ("gang_scheduling", "gangScheduling")):
        outer, inner = getattr(spec, name), getattr(scheduling, name)
        if given(outer) and given(inner) and outer != inner:
            yield field_fault(f"{path}.{wire}", f"differs from {path}.scheduling.{wire}: say it once")


def _scheduling_faults(path: str, scheduling: Scheduling) -> Iterator[Cause]:
    if isinstance(scheduling.node_selector, dict):
        yield from _node_selector_faults(f"{path}.nodeSelector", scheduling.node_selector)
    if isinstance(scheduling.gang_scheduling, GangScheduling):
        yield from _gang_faults(f"{path}.gangScheduling", scheduling.gang_scheduling)
    for index, toleration in enumerate(scheduling.tolerations or ()):
        yield from _toleration_faults(f"{path}.tolerations[{index}]", toleration)
    for index, spread in enumerate(scheduling.topology_spread_constraints or ()):
        yield from _spread_faults(f"{path}.topologySpreadConstraints[{index}]", spread)
    if isinstance(scheduling.affinity, Affinity):
        yield from _affinity_faults(f"{path}.affinity", scheduling.affinity)


def _toleration_faults(path: str, toleration: Toleration) -> Iterator[Cause]:
    if toleration.operator not in (UNSET, "Exists", "Equal"):
        yield field_fault(f"{path}.operator", "must be Exists or Equal")
    if toleration.operator == "Exists" and toleration.value:
        yield field_fault(f"{path}.value", "must be empty with operator Exists")
    if not toleration.key and toleration.operator != "Exists":
        yield field_fault(f"{path}.operator", "must be Exists when key is empty, which tolerates every taint")
    if toleration.effect and toleration.effect not in EFFECTS:
        yield field_fault(f"{path}.effect", f"must be one of {', '.join(EFFECTS)}")
    if toleration.key:
        yield from (field_fault(f"{path}.key", fault) for fault in label_key(toleration.key))


def _spread_faults(path: str, spread: TopologySpread) -> Iterator[Cause]:
    if spread.max_skew < 1:
        yield field_fault(f"{path}.maxSkew", f"must be at least 1, got {spread.max_skew}")
    yield from (field_fault(f"{path}.topologyKey", fault) for fault in label_key(spread.topology_key))
    if spread.when_unsatisfiable not in (UNSET, "DoNotSchedule", "ScheduleAnyway"):
        yield field_fault(f"{path}.whenUnsatisfiable", "must be DoNotSchedule or ScheduleAnyway")
    if isinstance(spread.label_selector, LabelSelector):
        yield from _label_selector_faults(f"{path}.labelSelector", spread.label_selector)


def _affinity_faults(path: str, affinity: Affinity) -> Iterator[Cause]:
    if isinstance(affinity.node_affinity, NodeAffinity):
        yield from _node_affinity_faults(f"{path}.nodeAffinity", affinity.node_affinity)
    for name, pods in (("podAffinity", affinity.pod_affinity), ("podAntiAffinity", affinity.pod_anti_affinity)):
        if isinstance(pods, PodAffinity):
            yield from _pod_affinity_faults(f"{path}.{name}", pods)


def _node_affinity_faults(path: str, affinity: NodeAffinity) -> Iterator[Cause]:
    long = affinity.required_during_scheduling_ignored_during_execution
    if given(affinity.required_during_scheduling) and given(long) and affinity.required_during_scheduling != long:
        yield field_fault(f"{path}.requiredDuringScheduling", "is said twice, differently: say it once")
    for required in (affinity.required_during_scheduling, long):
        if isinstance(required, NodeSelector):
            if not 1 <= len(required.node_selector_terms) <= TERMS_MAX:
                yield field_fault(f"{path}.requiredDuringScheduling.nodeSelectorTerms", f"needs 1 to {TERMS_MAX} terms")
            for index, term in enumerate(required.node_selector_terms):
                yield from _term_faults(f"{path}.requiredDuringScheduling.nodeSelectorTerms[{index}]", term)
    preferred = affinity.preferred_during_scheduling or affinity.preferred_during_scheduling_ignored_during_execution
    for index, one in enumerate(preferred or ()):
        yield from _weight_faults(f"{path}.preferredDuringScheduling[{index}]", one.weight)
        yield from _term_faults(f"{path}.preferredDuringScheduling[{index}].preference", one.preference)


def _term_faults(path: str, term: NodeSelectorTerm) -> Iterator[Cause]:
    for index, one in enumerate(term.match_expressions or ()):
        where = f"{path}.matchExpressions[{index}]"
        yield from (field_fault(f"{where}.key", fault) for fault in label_key(one.key))
        if one.operator not in NODE_OPERATORS:
            yield field_fault(f"{where}.operator", f"must be one of {', '.join(NODE_OPERATORS)}")
        elif one.operator in ("Gt", "Lt", "Gte", "Lte"):
            if len(one.values or ()) != 1 or not _is_integer((one.values or [""])[0]):
                yield field_fault(f"{where}.values", f"{one.operator} needs exactly one integer")
        else:
            yield from _values_faults(where, one.operator, one.values or [])


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 18


def _values_faults(where: str, operator: str, values: list[str]) -> Iterator[Cause]:
    if (operator in ("In", "NotIn")) != bool(values):
        yield field_fault(f"{where}.values", "In and NotIn need values, Exists and DoesNotExist take none")


def _weight_faults(path: str, weight: int) -> Iterator[Cause]:
    if not 1 <= weight <= 100:
        yield field_fault(f"{path}.weight", f"must be between 1 and 100, got {weight}")


def _pod_affinity_faults(path: str, affinity: PodAffinity) -> Iterator[Cause]:
    required = affinity.required_during_scheduling or affinity.required_during_scheduling_ignored_during_execution
    for index, term in enumerate(required or ()):
        yield from _pod_term_faults(f"{path}.requiredDuringScheduling[{index}]", term)
    preferred = affinity.preferred_during_scheduling or affinity.preferred_during_scheduling_ignored_during_execution
    for index, one in enumerate(preferred or ()):
        yield from _weight_faults(f"{path}.preferredDuringScheduling[{index}]", one.weight)
        yield from _pod_term_faults(f"{path}.preferredDuringScheduling[{index}].podAffinityTerm", one.pod_affinity_term)


def _pod_term_faults(path: str, term: PodAffinityTerm) -> Iterator[Cause]:
    yield from (field_fault(f"{path}.topologyKey", fault) for fault in label_key(term.topology_key))
    if isinstance(term.label_selector, LabelSelector):
        yield from _label_selector_faults(f"{path}.labelSelector", term.label_selector)


def _label_selector_faults(path: str, selector: LabelSelector) -> Iterator[Cause]:
    yield from _node_selector_faults(f"{path}.matchLabels", selector.match_labels or {})
    for index, one in enumerate(selector.match_expressions or ()):
        where = f"{path}.matchExpressions[{index}]"
        if one.operator not in LABEL_OPERATORS:
            yield field_fault(f"{where}.operator", f"must be one of {', '.join(LABEL_OPERATORS)}")
        else:
            yield from _values_faults(where, one.operator, one.values or [])


# How it shows.


def _fields(allocation: Allocation) -> Fields:
    status = allocation.status if isinstance(allocation.status, AllocationStatus) else AllocationStatus()
    return status_fields(status.phase or "Pending", status.node_name or "", allocation.spec)


def status_fields(phase: str, node: str, spec: AllocationSpec) -> Fields:
    return {
        "status.phase": phase,
        "status.nodeName": node,
        "spec.nodeName": node,
        "spec.queue": spec.queue or "default",
        "spec.priorityClass": spec.priority_class or "",
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


def _requested(resource: str) -> Column:
    def value(document: dict[str, Any]) -> str:
        resources = read(document, "spec.resources", {})
        asked = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        return str(asked) if asked is not None else "0"

    return Column(resource.rpartition("/")[2].upper(), value)


ALLOCATION = Kind(
    name="Allocation",
    plural="allocations",
    type=Allocation,
    namespaced=True,
    description="A claim on resources on one or more nodes.",
    short_names=("alloc", "al"),
    uid_prefix="alloc",
    check=_check,
    selectable=("status.phase", "status.nodeName", "spec.nodeName", "spec.queue", "spec.priorityClass"),
    fields=_fields,
    charge=charge_of,
    first_status=_first_status,
    columns=(
        column("Status", "status.phase", default="Pending"),
        Column("Reason", lambda document: str(read(document, "status.reason"))),
        _requested("nvidia.com/gpu"),
        _requested("cpu"),
        _requested("memory"),
        column("Node", "status.nodeName", default="<none>"),
        column("Queue", "spec.queue", default="default"),
        Column("Priority-Class", lambda document: str(read(document, "spec.priorityClass", "<none>")), wide=True),
    ),
    merge_keys={
        "spec.scheduling.tolerations": "key",
        "spec.scheduling.topologySpreadConstraints": "topologyKey",
        "spec.env": "name",
        "status.conditions": "type",
    },
    mutable_spec=False,
)
