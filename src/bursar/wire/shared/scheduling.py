"""Scheduling: constraints and preferences of an allocation for nodes, and for pods beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice

from msgspec import UNSET, UnsetType

from bursar.core.values.duration import SECONDS_MAX, DurationError, parse_seconds
from bursar.core.values.names import dns_subdomain, label_key, label_value
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.meta import LabelSelector, Text, Wire, given

NODE_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte")
LABEL_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
NODES_MAX = 100_000
TERMS_MAX = 64
SELECTOR_KEYS_MAX = 64
TOLERATIONS_MAX = 64
SPREADS_MAX = 16
VALUES_MAX = 1000


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
    # Kubernetes' own names of the two fields.
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


# Faults.


def scheduling_faults(path: str, scheduling: Scheduling) -> Iterator[Cause]:
    if isinstance(scheduling.node_selector, dict):
        yield from node_selector_faults(f"{path}.nodeSelector", scheduling.node_selector)
    if isinstance(scheduling.gang_scheduling, GangScheduling):
        yield from gang_faults(f"{path}.gangScheduling", scheduling.gang_scheduling)
    yield from toleration_list_faults(f"{path}.tolerations", scheduling.tolerations)
    spreads = scheduling.topology_spread_constraints
    yield from count_faults(f"{path}.topologySpreadConstraints", spreads, SPREADS_MAX)
    for index, spread in enumerate((spreads or [])[:SPREADS_MAX]):
        yield from _spread_faults(f"{path}.topologySpreadConstraints[{index}]", spread)
    if isinstance(scheduling.affinity, Affinity):
        yield from _affinity_faults(f"{path}.affinity", scheduling.affinity)


def count_faults(path: str, given_ones: Sized | UnsetType, count_max: int) -> Iterator[Cause]:
    """Bound lists and maps, because the scheduler evaluates every entry for each placement."""
    if not isinstance(given_ones, UnsetType) and len(given_ones) > count_max:
        yield field_fault(path, f"may have at most {count_max} entries, got {len(given_ones)}")


def toleration_list_faults(path: str, tolerations: list[Toleration] | UnsetType) -> Iterator[Cause]:
    yield from count_faults(path, tolerations, TOLERATIONS_MAX)
    for index, toleration in enumerate((tolerations or [])[:TOLERATIONS_MAX]):
        yield from _toleration_faults(f"{path}[{index}]", toleration)


def _toleration_faults(path: str, toleration: Toleration) -> Iterator[Cause]:
    if toleration.operator not in (UNSET, "Exists", "Equal"):
        yield field_fault(f"{path}.operator", "must be Exists or Equal")
    if toleration.operator == "Exists" and toleration.value:
        yield field_fault(f"{path}.value", "must be empty with operator Exists")
    if not toleration.key and toleration.operator != "Exists":
        yield field_fault(f"{path}.operator", "must be Exists when key is empty, which tolerates every taint")
    if toleration.effect and toleration.effect not in EFFECTS:
        yield field_fault(f"{path}.effect", f"must be one of {', '.join(EFFECTS)}")
    if isinstance(toleration.toleration_seconds, int) and abs(toleration.toleration_seconds) > SECONDS_MAX:
        yield field_fault(f"{path}.tolerationSeconds", f"must be between -{SECONDS_MAX} and {SECONDS_MAX}")
    if toleration.key:
        yield from (field_fault(f"{path}.key", fault) for fault in label_key(toleration.key))


def _spread_faults(path: str, spread: TopologySpread) -> Iterator[Cause]:
    if not 1 <= spread.max_skew <= NODES_MAX:
        yield field_fault(f"{path}.maxSkew", f"must be between 1 and {NODES_MAX}, got {spread.max_skew}")
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
    yield from _said_twice_faults(path, affinity)
    for required in (
        affinity.required_during_scheduling,
        affinity.required_during_scheduling_ignored_during_execution,
    ):
        if isinstance(required, NodeSelector):
            if not 1 <= len(required.node_selector_terms) <= TERMS_MAX:
                yield field_fault(f"{path}.requiredDuringScheduling.nodeSelectorTerms", f"needs 1 to {TERMS_MAX} terms")
            for index, term in enumerate(required.node_selector_terms[:TERMS_MAX]):
                yield from _term_faults(f"{path}.requiredDuringScheduling.nodeSelectorTerms[{index}]", term)
    preferred = affinity.preferred_during_scheduling or affinity.preferred_during_scheduling_ignored_during_execution
    yield from count_faults(f"{path}.preferredDuringScheduling", preferred, TERMS_MAX)
    for index, one in enumerate((preferred or [])[:TERMS_MAX]):
        yield from _weight_faults(f"{path}.preferredDuringScheduling[{index}]", one.weight)
        yield from _term_faults(f"{path}.preferredDuringScheduling[{index}].preference", one.preference)


def _said_twice_faults(path: str, affinity: NodeAffinity | PodAffinity) -> Iterator[Cause]:
    """Both names of a field are accepted; two different values are a fault."""
    for name, short, long in (
        (
            "requiredDuringScheduling",
            affinity.required_during_scheduling,
            affinity.required_during_scheduling_ignored_during_execution,
        ),
        (
            "preferredDuringScheduling",
            affinity.preferred_during_scheduling,
            affinity.preferred_during_scheduling_ignored_during_execution,
        ),
    ):
        if given(short) and given(long) and short != long:
            yield field_fault(f"{path}.{name}", f"contradicts {name}IgnoredDuringExecution: set only one")


def _term_faults(path: str, term: NodeSelectorTerm) -> Iterator[Cause]:
    yield from count_faults(f"{path}.matchExpressions", term.match_expressions, TERMS_MAX)
    for index, one in enumerate((term.match_expressions or [])[:TERMS_MAX]):
        where = f"{path}.matchExpressions[{index}]"
        yield from (field_fault(f"{where}.key", fault) for fault in label_key(one.key))
        yield from count_faults(f"{where}.values", one.values, VALUES_MAX)
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
    yield from _said_twice_faults(path, affinity)
    required = affinity.required_during_scheduling or affinity.required_during_scheduling_ignored_during_execution
    yield from count_faults(f"{path}.requiredDuringScheduling", required, TERMS_MAX)
    for index, term in enumerate((required or [])[:TERMS_MAX]):
        yield from _pod_term_faults(f"{path}.requiredDuringScheduling[{index}]", term)
    preferred = affinity.preferred_during_scheduling or affinity.preferred_during_scheduling_ignored_during_execution
    yield from count_faults(f"{path}.preferredDuringScheduling", preferred, TERMS_MAX)
    for index, one in enumerate((preferred or [])[:TERMS_MAX]):
        yield from _weight_faults(f"{path}.preferredDuringScheduling[{index}]", one.weight)
        yield from _pod_term_faults(f"{path}.preferredDuringScheduling[{index}].podAffinityTerm", one.pod_affinity_term)


def _pod_term_faults(path: str, term: PodAffinityTerm) -> Iterator[Cause]:
    yield from (field_fault(f"{path}.topologyKey", fault) for fault in label_key(term.topology_key))
    if isinstance(term.label_selector, LabelSelector):
        yield from _label_selector_faults(f"{path}.labelSelector", term.label_selector)


def _label_selector_faults(path: str, selector: LabelSelector) -> Iterator[Cause]:
    yield from node_selector_faults(f"{path}.matchLabels", selector.match_labels or {})
    yield from count_faults(f"{path}.matchExpressions", selector.match_expressions, TERMS_MAX)
    for index, one in enumerate((selector.match_expressions or [])[:TERMS_MAX]):
        where = f"{path}.matchExpressions[{index}]"
        if one.operator not in LABEL_OPERATORS:
            yield field_fault(f"{where}.operator", f"must be one of {', '.join(LABEL_OPERATORS)}")
        else:
            yield from _values_faults(where, one.operator, one.values or [])


def duration_faults(path: str, text: str | int) -> Iterator[Cause]:
    try:
        if parse_seconds(text) <= 0:
            yield field_fault(path, "must be longer than 0")
    except DurationError as error:
        yield field_fault(path, str(error))


def node_selector_faults(path: str, selector: dict[str, str]) -> Iterator[Cause]:
    yield from count_faults(path, selector, SELECTOR_KEYS_MAX)
    for key, value in islice(selector.items(), SELECTOR_KEYS_MAX):
        yield from (field_fault(f"{path}[{key[:63]}]", fault) for fault in [*label_key(key), *label_value(value)])


def gang_faults(path: str, gang: GangScheduling) -> Iterator[Cause]:
    if given(gang.group_id):
        yield from (field_fault(f"{path}.groupId", fault) for fault in dns_subdomain(str(gang.group_id)))
    if isinstance(gang.min_members, int) and not 1 <= gang.min_members <= NODES_MAX:
        yield field_fault(f"{path}.minMembers", f"must be between 1 and {NODES_MAX}, got {gang.min_members}")
    if not isinstance(gang.timeout, UnsetType):
        yield from duration_faults(f"{path}.timeout", gang.timeout)
