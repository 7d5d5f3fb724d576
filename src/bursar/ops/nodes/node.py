"""Commands on nodes: their objects, and the room that schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from bursar.core.batch.unit_of_work import Sheet
from bursar.core.nodes.node import Gate, NodeRoom, device_list, is_traceless
from bursar.core.objects.charge import Amounts
from bursar.core.objects.object import Stored
from bursar.core.quota.permit import unknown_tenants
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.nodes.claim import keep_claim
from bursar.ops.nodes.drain import keep_drain
from bursar.ops.nodes.node_conditions import is_silent, keep_silence
from bursar.ops.objects.object import Change, Create, Delete, not_found
from bursar.ops.objects.removal import finish, remove
from bursar.ops.runtime import metrics
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Result
from bursar.wire.kinds.node import Node, cap_by_spec
from bursar.wire.shared.document import finalizers_of, is_ending

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode(Create):
    allocatable: Amounts
    schedulable: bool = True
    gate: Gate | None = None

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def _save(self, sheet: Sheet, draft: Stored) -> Result:
        if refusal := unknown_tenants(sheet.tree, "spec.tenants", _tenants(self.gate)):
            return refusal
        room = NodeRoom(
            self.key.name, 1, self.schedulable, self.allocatable, {}, device_list(self.allocatable, {}), gate=self.gate
        )  # fmt: skip
        sheet.set_node(room, draft.uid)
        return sheet.put(draft, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeNode(Change):
    """What the node offers or allows may have changed: plans made for it before are stale."""

    allocatable: Amounts
    schedulable: bool = True
    plans_stale: bool = True  # whether labels or taints changed
    gate: Gate | None = None

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def _save(self, sheet: Sheet, before: Stored) -> Result:
        room = sheet.nodes[self.key.name]
        # Those that were named before this was asked stay.
        added = _tenants(self.gate) - _tenants(room.gate)
        if refusal := unknown_tenants(sheet.tree, "spec.tenants", added):
            return refusal
        if self.origin.actor == f"node:{self.key.name}" and room.allocatable:
            _tell_rise(room, self.allocatable)
        schedulable = self.schedulable and not is_silent(before) and not is_ending(before.doc)
        offers = (dict(room.allocatable), room.schedulable) != (dict(self.allocatable), schedulable)
        if offers or self.plans_stale or self.gate != room.gate:
            sheet.set_node(
                replace(
                    room,
                    generation=room.generation + 1,
                    schedulable=schedulable,
                    allocatable=self.allocatable,
                    devices=device_list(self.allocatable, room.devices),
                    gate=self.gate,
                    # Work that is there now may have been started on the new terms.
                    soiled=room.soiled or (any(room.allocated.values()) and not is_traceless(self.gate)),
                )
            )
        after = keep_drain(before, self.draft, schedulable=self.schedulable, at=timestamp(sheet.now))
        return sheet.put(keep_claim(before, keep_silence(before, after)), self.origin)

    def _remove(self, sheet: Sheet) -> Result:
        if refusal := in_use(sheet.nodes.get(self.key.name), self.key.name):
            return refusal
        if self.key.name in sheet.nodes:
            sheet.remove_node(self.key.name)
        return finish(sheet, self.draft, self.origin)


def _tenants(gate: Gate | None) -> set[str]:
    return set(gate.tenants) if gate is not None else set()


def cap(node: Node) -> None:
    """Hold a node that speaks for itself to the capacity that its spec gives, and warn of what it claimed beyond."""
    if claimed := cap_by_spec(node):
        metrics.NODE_RISES.inc(len(claimed))
        log.warning("a node says to have more than its spec.capacity", node=node.metadata.name, resources=claimed)


def _tell_rise(room: NodeRoom, allocatable: Amounts) -> None:
    """A node that says to have more than before may not be the one that was registered."""
    risen = {name: value for name, value in allocatable.items() if value > room.allocatable.get(name, 0)}
    for name, value in sorted(risen.items()):
        metrics.NODE_RISES.inc()
        before, now = (format_amount(name, amount) for amount in (room.allocatable.get(name, 0), value))
        log.warning("a node offers more than before", node=room.name, resource=name, before=before, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNode(Delete):
    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        room = sheet.nodes.get(self.key.name)
        if refusal := in_use(room, self.key.name):
            return refusal
        if room is not None and finalizers_of(before.doc):
            # Until it is gone it takes nothing new.
            if room.schedulable:
                sheet.set_node(replace(room, generation=room.generation + 1, schedulable=False))
        elif room is not None:
            sheet.remove_node(self.key.name)
        return remove(sheet, before, self.origin)


def in_use(room: NodeRoom | None, name: str) -> Refusal | None:
    """Why a node cannot be deleted yet."""
    if room is None:
        return None
    if any(room.allocated.values()):
        return Refusal(
            Code.IN_USE,
            f'nodes "{name}" still runs allocations',
            f"Drain it first: kubectl drain {name}, or delete the allocations bound to it.",
        )
    if room.claim is not None:
        return Refusal(
            Code.IN_USE,
            f'nodes "{name}" is claimed for sensitive work, or is not wiped since',
            f"Release it first, and have it wiped: bursar node release {name}",
        )
    return None
