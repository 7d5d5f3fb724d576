"""Commands on nodes: their objects, and the room that schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.node import NodeCapacity, NodeGate, device_list, is_traceless
from bursar.core.objects.charge import Amounts
from bursar.core.objects.object import Stored
from bursar.core.quota.permit import unknown_tenants
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.nodes.claim import keep_claim
from bursar.ops.nodes.drain import keep_drain
from bursar.ops.nodes.node_conditions import is_silent, keep_silence
from bursar.ops.objects.object import ChangeObject, CreateObject, DeleteObject, not_found
from bursar.ops.objects.removal import finish, remove
from bursar.ops.runtime import metrics
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Result
from bursar.wire.kinds.node import Node, cap_by_spec
from bursar.wire.shared.document import finalizers_of, is_ending

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode(CreateObject):
    allocatable: Amounts
    schedulable: bool = True
    gate: NodeGate | None = None

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def _save(self, batch: UnitOfWork, draft: Stored) -> Result:
        if refusal := unknown_tenants(batch.tree, "spec.tenants", _tenants(self.gate)):
            return refusal
        capacity = NodeCapacity(
            self.key.name, 1, self.schedulable, self.allocatable, {}, device_list(self.allocatable, {}), gate=self.gate
        )  # fmt: skip
        batch.set_node(capacity, draft.uid)
        return batch.put(draft, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeNode(ChangeObject):
    """What the node offers or allows may have changed: plans made for it before are stale."""

    allocatable: Amounts
    schedulable: bool = True
    plans_stale: bool = True  # whether labels or taints changed
    gate: NodeGate | None = None

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def _save(self, batch: UnitOfWork, before: Stored) -> Result:
        capacity = batch.nodes[self.key.name]
        # Those that were named before this was asked stay.
        added = _tenants(self.gate) - _tenants(capacity.gate)
        if refusal := unknown_tenants(batch.tree, "spec.tenants", added):
            return refusal
        if self.origin.actor == f"node:{self.key.name}" and capacity.allocatable:
            _tell_rise(capacity, self.allocatable)
        schedulable = self.schedulable and not is_silent(before) and not is_ending(before.doc)
        offers = (dict(capacity.allocatable), capacity.schedulable) != (dict(self.allocatable), schedulable)
        if offers or self.plans_stale or self.gate != capacity.gate:
            batch.set_node(
                replace(
                    capacity,
                    generation=capacity.generation + 1,
                    schedulable=schedulable,
                    allocatable=self.allocatable,
                    devices=device_list(self.allocatable, capacity.devices),
                    gate=self.gate,
                    # Work that is there now may have been started on the new terms.
                    soiled=capacity.soiled or (any(capacity.allocated.values()) and not is_traceless(self.gate)),
                )
            )
        after = keep_drain(before, self.draft, schedulable=self.schedulable, at=timestamp(batch.now))
        return batch.put(keep_claim(before, keep_silence(before, after)), self.origin)

    def _remove(self, batch: UnitOfWork) -> Result:
        if refusal := in_use(batch.nodes.get(self.key.name), self.key.name):
            return refusal
        if self.key.name in batch.nodes:
            batch.remove_node(self.key.name)
        return finish(batch, self.draft, self.origin)


def _tenants(gate: NodeGate | None) -> set[str]:
    return set(gate.tenants) if gate is not None else set()


def cap(node: Node) -> None:
    """Hold a node that speaks for itself to the capacity that its spec gives, and warn of what it claimed beyond."""
    if claimed := cap_by_spec(node):
        metrics.NODE_RISES.inc(len(claimed))
        log.warning("a node says to have more than its spec.capacity", node=node.metadata.name, resources=claimed)


def _tell_rise(capacity: NodeCapacity, allocatable: Amounts) -> None:
    """A node that says to have more than before may not be the one that was registered."""
    risen = {name: value for name, value in allocatable.items() if value > capacity.allocatable.get(name, 0)}
    for name, value in sorted(risen.items()):
        metrics.NODE_RISES.inc()
        before, now = (format_amount(name, amount) for amount in (capacity.allocatable.get(name, 0), value))
        log.warning("a node offers more than before", node=capacity.name, resource=name, before=before, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNode(DeleteObject):
    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        capacity = batch.nodes.get(self.key.name)
        if refusal := in_use(capacity, self.key.name):
            return refusal
        if capacity is not None and finalizers_of(before.doc):
            # Until it is gone it takes nothing new.
            if capacity.schedulable:
                batch.set_node(replace(capacity, generation=capacity.generation + 1, schedulable=False))
        elif capacity is not None:
            batch.remove_node(self.key.name)
        return remove(batch, before, self.origin)


def in_use(capacity: NodeCapacity | None, name: str) -> Refusal | None:
    """Why a node cannot be deleted yet."""
    if capacity is None:
        return None
    if any(capacity.allocated.values()):
        return Refusal(
            Code.IN_USE,
            f'nodes "{name}" still runs allocations',
            f"Drain it first: kubectl drain {name}, or delete the allocations bound to it.",
        )
    if capacity.claim is not None:
        return Refusal(
            Code.IN_USE,
            f'nodes "{name}" is claimed for sensitive work, or is not wiped since',
            f"Release it first, and have it wiped: bursar node release {name}",
        )
    return None
