"""Commands on nodes: their objects, and the capacity that the scheduler uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bursar.commands.command import Result
from bursar.commands.nodes.claim import keep_claim
from bursar.commands.nodes.drain import keep_drain
from bursar.commands.nodes.node_conditions import is_silent, keep_silence
from bursar.commands.objects.object import (
    ChangeObject,
    CreateObject,
    DeleteObject,
    ObjectChange,
    ObjectDeletion,
    changed_draft,
    not_found,
)
from bursar.commands.objects.removal import finish, remove
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.node import CapacityRise, NodeCapacity, NodeGate, device_list, is_traceless
from bursar.core.objects.charge import Amounts
from bursar.core.objects.object import Stored
from bursar.core.quota.permit import unknown_tenants
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.node import Node, NodeSpec, allocatable_of, cap_by_spec, gate_of, is_schedulable
from bursar.wire.shared.document import finalizers_of, is_ending


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
    """Change a node. Its capacity or its rules may change, which makes earlier plans for it stale."""

    allocatable: Amounts
    schedulable: bool = True
    plans_stale: bool = True  # whether labels or taints changed
    gate: NodeGate | None = None

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def _save(self, batch: UnitOfWork, before: Stored) -> Result:
        capacity = batch.nodes[self.key.name]
        # Tenants that the gate named before stay, even if they would be refused now.
        added = _tenants(self.gate) - _tenants(capacity.gate)
        if refusal := unknown_tenants(batch.tree, "spec.tenants", added):
            return refusal
        if self.origin.actor == f"node:{self.key.name}" and capacity.allocatable:
            batch.rises += _rises(capacity, self.allocatable)
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
                    # Running work may have been started under the new gate.
                    dirty=capacity.dirty or (any(capacity.allocated.values()) and not is_traceless(self.gate)),
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


def _rises(capacity: NodeCapacity, allocatable: Amounts) -> list[CapacityRise]:
    """The rises in capacity. A node that reports more than before may not be the registered one."""
    before = ((name, capacity.allocatable.get(name, 0), value) for name, value in sorted(allocatable.items()))
    return [CapacityRise(capacity.name, name, was, value) for name, was, value in before if value > was]


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
            # It accepts no new work until it is removed.
            if capacity.schedulable:
                batch.set_node(replace(capacity, generation=capacity.generation + 1, schedulable=False))
        elif capacity is not None:
            batch.remove_node(self.key.name)
        return remove(batch, before, self.origin)


def change_node(change: ObjectChange) -> ChangeNode:
    """The command that stores the next version and its capacity."""
    before, node = change.before, change.one
    assert isinstance(node, Node)
    if change.spec_changed and _capacity(node) != _capacity(msgspec.json.decode(before.doc, type=Node)):
        # The capacity reported before is limited by the new spec at once.
        cap_by_spec(node)
    allocatable, schedulable, gate = allocatable_of(node), is_schedulable(node), gate_of(node)
    draft = changed_draft(change.kind, before, node, spec_changed=change.spec_changed, keep_charge=True)
    return ChangeNode(
        key=before.key, origin=change.origin, idempotency_key=change.idempotency_key, draft=draft,
        expected=before.revision, allocatable=allocatable, schedulable=schedulable,
        plans_stale=change.spec_changed or draft.labels != before.labels, gate=gate,
    )  # fmt: skip


def delete_node(deletion: ObjectDeletion) -> DeleteNode:
    return DeleteNode(
        key=deletion.before.key, origin=deletion.origin, idempotency_key=deletion.idempotency_key,
        preconditions=deletion.preconditions,
    )  # fmt: skip


def _capacity(node: Node) -> object:
    return node.spec.capacity if isinstance(node.spec, NodeSpec) else None


def in_use(capacity: NodeCapacity | None, name: str) -> Refusal | None:
    """The refusal to delete a node that is in use; None if it may be deleted."""
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
            f'nodes "{name}" is claimed for sensitive work, or not wiped after it',
            f"Release it first, and have it wiped: bursar node release {name}",
        )
    return None
