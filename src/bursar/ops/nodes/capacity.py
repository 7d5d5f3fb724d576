"""What a node says it has: its status, which is what schedules.

The spec is what an administrator says, and the node's word starts from it. What the node does not speak of stays as the
spec has it, and where the spec says how much there is, or how much may be given, the node cannot raise that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Refusal
from bursar.ops.lifecycle.dispatch import change_command
from bursar.ops.nodes.node import cap
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Command, Reply
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import set_condition
from bursar.wire.kinds.node import STDIN_LABEL, Node, NodeStatus, cap_by_spec, isolation_condition
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.limits import amounts, dimension_name
from bursar.wire.shared.meta import Quantity

NODE = BY_NAME["Node"]


async def report_capacity(
    runtime: Runtime, name: str, capacity: Mapping[str, str], features: Collection[str] = ()
) -> Reply | None:
    """Write what a node has and its agent can do, where that differs from what is stored; None where it does not."""
    key = Key("Node", "", name)
    before = await object_ops.get(runtime, key)
    if isinstance(before, Refusal):
        return before
    said = {dimension_name(resource): value for resource, value in capacity.items()}
    reads, able = "stdin" in features, sorted(set(features))
    known = msgspec.json.decode(before.status).get("features") or []
    if not _differs(before, said) and (before.labels.get(STDIN_LABEL) == "true") is reads and known == able:
        return None

    def edit(before: Stored, document: dict[str, Any]) -> Command | Refusal:
        document.setdefault("status", {})["features"] = able
        labels = document["metadata"].setdefault("labels", {})
        labels.pop(STDIN_LABEL, None)
        if reads:
            labels[STDIN_LABEL] = "true"
        one = _offering(document, said)
        cap_by_spec(one)
        return change_command(NODE, before, one, Origin(f"node:{name}", "capacity"), spec_changed=False, status=True)

    return await object_ops.change(runtime, key, edit, tenant="", first=before)


async def report_isolation(runtime: Runtime, name: str, isolation: str, why: str) -> Reply | None:
    """Write how a node's agent keeps tenants apart, where that is news; None where it is not."""
    key = Key("Node", "", name)
    before = await object_ops.get(runtime, key)
    if isinstance(before, Refusal):
        return before
    if not _is_news(msgspec.json.decode(before.status), isolation, why):
        return None
    at = timestamp(datetime.now(UTC))

    def edit(before: Stored, document: dict[str, Any]) -> Command | Refusal:
        status = document.setdefault("status", {})
        status["isolation"] = isolation
        set_condition(status, *isolation_condition(isolation, why), at)
        one = msgspec.convert(document, Node)
        return change_command(NODE, before, one, Origin(f"node:{name}", "isolation"), spec_changed=False, status=True)

    return await object_ops.change(runtime, key, edit, tenant="", first=before)


def _is_news(status: Mapping[str, Any], isolation: str, why: str) -> bool:
    kind, _, _, message = isolation_condition(isolation, why)
    told = next((one.get("message", "") for one in status.get("conditions", ()) if one["type"] == kind), None)
    return (status.get("isolation"), told) != (isolation, message)


def _differs(before: Stored, said: Mapping[str, str]) -> bool:
    document: dict[str, Any] = {**msgspec.json.decode(before.doc), "status": msgspec.json.decode(before.status)}
    stored, offering = msgspec.convert(document["status"], NodeStatus), _offering(document, said)
    cap(offering)
    assert isinstance(offering.status, NodeStatus)
    return _figures(stored) != _figures(offering.status)


def _figures(status: NodeStatus) -> tuple[dict[str, int], dict[str, int]]:
    return amounts(status.capacity), amounts(status.allocatable)


def _offering(document: Mapping[str, Any], said: Mapping[str, str]) -> Node:
    """A node that says to have this, whatever its spec says of its capacity."""
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
