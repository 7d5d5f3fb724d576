"""The capacity that a node reports: it goes to the status, which the scheduler uses.

The spec is set by an administrator. A resource that the node does not report stays as the spec has it, and a report
cannot raise the capacity or the allocatable amount that the spec gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from bursar.commands.command import Command, Reply, Unchanged
from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.objects.status import set_condition
from bursar.core.nodes.node import CapacityRise
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Refusal
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime import metrics
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import STDIN_LABEL, Node, NodeStatus, cap_by_spec, isolation_condition, node_key
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.limits import amounts, dimension_name
from bursar.wire.shared.meta import Quantity

log = structlog.get_logger()

NODE = BY_NAME["Node"]


async def report_capacity(
    runtime: Runtime, name: str, capacity: Mapping[str, str], features: Collection[str] = ()
) -> Reply:
    """Store a node's capacity and its agent's capabilities, unless they are stored already."""
    said = {dimension_name(resource): value for resource, value in capacity.items()}
    edit = _CapacityEdit(said, sorted(set(features)))
    return await object_ops.change(runtime, node_key(name), edit.next, tenant="")


async def report_isolation(runtime: Runtime, name: str, isolation: str, why: str) -> Reply:
    """Store how a node's agent isolates tenants, unless that is stored already."""
    return await object_ops.change(runtime, node_key(name), _IsolationEdit(isolation, why).next, tenant="")


@dataclass(frozen=True, slots=True)
class _CapacityEdit:
    capacity: Mapping[str, str]
    features: Sequence[str]

    def next(self, before: Stored, document: dict[str, Any]) -> Unchanged | Command | Refusal:
        reads, known = "stdin" in self.features, document.get("status", {}).get("features") or []
        if (
            not _differs(document, self.capacity)
            and (before.labels.get(STDIN_LABEL) == "true") is reads
            and known == self.features
        ):
            return Unchanged(before)
        document.setdefault("status", {})["features"] = self.features
        labels = document["metadata"].setdefault("labels", {})
        labels.pop(STDIN_LABEL, None)
        if reads:
            labels[STDIN_LABEL] = "true"
        one = _offering(document, self.capacity)
        cap_by_spec(one)
        return _status_written(before, one, "capacity")


@dataclass(frozen=True, slots=True)
class _IsolationEdit:
    isolation: str
    why: str

    def next(self, before: Stored, document: dict[str, Any]) -> Unchanged | Command | Refusal:
        status = document.setdefault("status", {})
        if not _is_news(status, self.isolation, self.why):
            return Unchanged(before)
        status["isolation"] = self.isolation
        set_condition(status, *isolation_condition(self.isolation, self.why), timestamp(now()))
        return _status_written(before, msgspec.convert(document, Node), "isolation")


def _status_written(before: Stored, one: Node, reason: str) -> Command | Refusal:
    origin = Origin(f"node:{before.key.name}", reason)
    return change_command(NODE, before, one, origin, spec_changed=False, status=True)


def cap(node: Node) -> None:
    """Limit a node's reported capacity to that of its spec, and log a warning of resources that it exceeds."""
    if claimed := cap_by_spec(node):
        metrics.NODE_RISES.inc(len(claimed))
        log.warning(
            "capacity_exceeds_spec", message="a node reports more than its spec.capacity", node=node.metadata.name,
            resources=claimed,
        )  # fmt: skip


def warn_of_rises(rises: Sequence[CapacityRise]) -> None:
    for one in rises:
        metrics.NODE_RISES.inc()
        before, now = (format_amount(one.resource, amount) for amount in (one.before, one.after))
        log.warning(
            "capacity_rose", message="a node offers more than before", node=one.node, resource=one.resource,
            before=before, now=now,
        )  # fmt: skip


def _is_news(status: Mapping[str, Any], isolation: str, why: str) -> bool:
    kind, _, _, message = isolation_condition(isolation, why)
    told = next((one.get("message", "") for one in status.get("conditions", ()) if one["type"] == kind), None)
    return (status.get("isolation"), told) != (isolation, message)


def _differs(document: Mapping[str, Any], said: Mapping[str, str]) -> bool:
    stored, offering = msgspec.convert(document.get("status", {}), NodeStatus), _offering(document, said)
    cap(offering)
    assert isinstance(offering.status, NodeStatus)
    return _figures(stored) != _figures(offering.status)


def _figures(status: NodeStatus) -> tuple[dict[str, int], dict[str, int]]:
    return amounts(status.capacity), amounts(status.allocatable)


def _offering(document: Mapping[str, Any], said: Mapping[str, str]) -> Node:
    """The node with this reported capacity, not yet limited by its spec."""
    spec = document.get("spec") or {}
    allowed: Mapping[str, Quantity] = spec.get("allocatable") or {}
    capacity: dict[str, Quantity] = {**(spec.get("capacity") or allowed), **said}
    allocatable = {**capacity, **allowed}
    most = amounts(said)
    for name, amount in amounts(allowed).items():
        if name in most and most[name] < amount:
            allocatable[name] = said[name]
    status = {**(document.get("status") or {}), "capacity": capacity, "allocatable": allocatable}
    return msgspec.convert({**document, "status": status}, Node)
