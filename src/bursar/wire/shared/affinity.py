"""Node and pod affinity, converted from the wire to values that the scheduler compares.

Reads both the long spelling of Kubernetes and the short one. The caller has checked the spec for faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import UnsetType

from bursar.core.nodes.node_affinity import contradiction
from bursar.core.objects import ask
from bursar.core.objects.ask import ANYWHERE, InterPodTerm, Operator, Requirement, Requirements, Spread, Where
from bursar.core.values.refusal import Cause, field_fault
from bursar.core.values.selector import EVERYTHING, Op, Selector, SelectorTerm
from bursar.wire.shared.meta import LabelSelector
from bursar.wire.shared.scheduling import (
    Affinity,
    NodeAffinity,
    NodeSelector,
    NodeSelectorTerm,
    PodAffinity,
    PodAffinityTerm,
    Scheduling,
    Toleration,
    TopologySpread,
)


def where_of(node_selector: dict[str, str] | UnsetType, scheduling: Scheduling | UnsetType) -> Where:
    """All placement constraints; the nodeSelector may be in the spec or in its scheduling."""
    if not isinstance(scheduling, Scheduling):
        return Where(node_labels=_pairs(node_selector)) if node_selector else ANYWHERE
    affinity = scheduling.affinity if isinstance(scheduling.affinity, Affinity) else Affinity()
    nodes = affinity.node_affinity if isinstance(affinity.node_affinity, NodeAffinity) else NodeAffinity()
    near = affinity.pod_affinity if isinstance(affinity.pod_affinity, PodAffinity) else PodAffinity()
    apart = affinity.pod_anti_affinity if isinstance(affinity.pod_anti_affinity, PodAffinity) else PodAffinity()
    return Where(
        node_labels=_pairs(node_selector or scheduling.node_selector),
        required=_required(nodes),
        preferred=tuple(_preferred(nodes)),
        tolerations=tuple(toleration_of(one) for one in scheduling.tolerations or ()),
        near=_companies(near),
        apart=_companies(apart),
        rather_near=_rather(near),
        rather_apart=_rather(apart),
        spreads=tuple(_spread(one) for one in scheduling.topology_spread_constraints or ()),
    )


def contradiction_faults(
    path: str, node_selector: dict[str, str] | UnsetType, scheduling: Scheduling
) -> Iterator[Cause]:
    """Faults of constraints that no node can satisfy; call only for a spec without other faults."""
    if not isinstance(scheduling.affinity, Affinity):
        return
    if fault := contradiction(where_of(node_selector, scheduling)):
        yield field_fault(f"{path}.affinity.nodeAffinity.requiredDuringScheduling", f"contradicts itself: {fault}")


def selector_of(selector: LabelSelector) -> Selector:
    """Sort values and remove duplicates, so that equal conditions are equal."""
    terms = [SelectorTerm(key, Op.IN, (value,)) for key, value in sorted((selector.match_labels or {}).items())]
    terms += [
        SelectorTerm(one.key, Op(one.operator), _distinct(one.values)) for one in selector.match_expressions or ()
    ]
    return Selector(tuple(terms))


def _pairs(labels: dict[str, str] | UnsetType) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((labels or {}).items()))


def _distinct(values: Iterable[str] | UnsetType) -> tuple[str, ...]:
    return tuple(sorted(set(values or ())))


def _required(nodes: NodeAffinity) -> tuple[Requirements, ...]:
    for one in (nodes.required_during_scheduling, nodes.required_during_scheduling_ignored_during_execution):
        if isinstance(one, NodeSelector):
            return tuple(_requirements(term) for term in one.node_selector_terms)
    return ()


def _preferred(nodes: NodeAffinity) -> Iterator[tuple[int, Requirements]]:
    both = nodes.preferred_during_scheduling or nodes.preferred_during_scheduling_ignored_during_execution
    for one in both or ():
        # An empty preference prefers nothing.
        if requirements := _requirements(one.preference):
            yield one.weight, requirements


def _requirements(term: NodeSelectorTerm) -> Requirements:
    return tuple(
        Requirement(one.key, Operator(one.operator), _distinct(one.values)) for one in term.match_expressions or ()
    )


def toleration_of(one: Toleration) -> ask.Toleration:
    return ask.Toleration(one.key or "", one.operator == "Exists", one.value or "", one.effect or "")


def _companies(pods: PodAffinity) -> tuple[InterPodTerm, ...]:
    both = pods.required_during_scheduling or pods.required_during_scheduling_ignored_during_execution
    return tuple(_inter_pod(one) for one in both or ())


def _rather(pods: PodAffinity) -> tuple[tuple[int, InterPodTerm], ...]:
    both = pods.preferred_during_scheduling or pods.preferred_during_scheduling_ignored_during_execution
    return tuple((one.weight, _inter_pod(one.pod_affinity_term)) for one in both or ())


def _inter_pod(term: PodAffinityTerm) -> InterPodTerm:
    selector = selector_of(term.label_selector) if isinstance(term.label_selector, LabelSelector) else EVERYTHING
    return InterPodTerm(term.topology_key, selector, _distinct(term.namespaces))


def _spread(one: TopologySpread) -> Spread:
    selector = selector_of(one.label_selector) if isinstance(one.label_selector, LabelSelector) else None
    return Spread(one.topology_key, one.max_skew, one.when_unsatisfiable != "ScheduleAnyway", selector)
