"""The registry of create commands: kinds for which creating an object is more than storing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from bursar.commands.approval.limits import RequestLimits
from bursar.commands.nodes.node import RegisterNode
from bursar.commands.objects.object import CreateObject, submitter
from bursar.core.objects.object import Key, Origin
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.replace import replace
from bursar.ops.objects.object import ObjectCreation, create_object, new_draft
from bursar.ops.workloads.job import create_job
from bursar.wire.kinds.allocation import ALLOCATION, Allocation, asking_of, disown, gang_of
from bursar.wire.kinds.job import JOB
from bursar.wire.kinds.node import NODE, Node, allocatable_of, gate_of, is_schedulable, said_at_joining
from bursar.wire.kinds.queue import QUEUE
from bursar.wire.kinds.quotarequest import QUOTA_REQUEST
from bursar.wire.shared.kind import Kind, Object


def create_command(
    kind: Kind,
    one: Object,
    origin: Origin,
    idempotency_key: IdempotencyKey | None = None,
    *,
    seen_tenant: str | None = None,
    admin: bool = False,
) -> CreateObject:
    """The command that creates an object. All that can be computed before locks are taken is computed here. An
    administrator may admit what a tenant's users may not ask for."""
    return CREATE.get(kind.name, create_object)(ObjectCreation(kind, one, origin, idempotency_key, seen_tenant, admin))


def _create_allocation(creation: ObjectCreation) -> CreateObject:
    one: Allocation = creation.one
    gang = gang_of(one.metadata, one.spec)
    wants = (("spec.queue", Key(QUEUE.name, "", one.spec.queue)),) if one.spec.queue else ()
    # Only a job's own command makes its members, so no other allocation may claim to be one.
    disown(one.metadata)
    asking = asking_of(one)
    draft = new_draft(creation.kind, one, tenant=creation.seen_tenant or "", user=submitter(creation.origin))
    if gang is not None and gang.min_members > 1:
        draft = replace(draft, gang=gang.group_id)
    else:
        gang = None
    return CreateObject(
        key=draft.key,
        origin=creation.origin,
        idempotency_key=creation.idempotency_key,
        draft=draft,
        gang=gang,
        wants=wants,
        subject=creation.kind.singular,
        seen_tenant=creation.seen_tenant,
        asking=asking,
        admin=creation.admin,
    )


def _register_node(creation: ObjectCreation) -> RegisterNode:
    """Register a node with the capacity of its spec or, where the spec gives none, of its status. Its agent reports how
    it isolates tenants before any work is placed there."""
    node: Node = creation.one
    node.status = said_at_joining(node)
    allocatable, schedulable, gate = allocatable_of(node), is_schedulable(node), gate_of(node)
    draft = new_draft(creation.kind, node)
    return RegisterNode(
        key=draft.key, origin=creation.origin, idempotency_key=creation.idempotency_key, draft=draft,
        allocatable=allocatable, schedulable=schedulable, gate=gate,
    )  # fmt: skip


def _request_limits(creation: ObjectCreation) -> RequestLimits:
    made = create_object(creation)
    return RequestLimits(
        key=made.key, origin=made.origin, idempotency_key=made.idempotency_key, draft=made.draft, subject=made.subject,
        seen_tenant=made.seen_tenant,
    )  # fmt: skip


CREATE: Final[Mapping[str, Callable[[ObjectCreation], CreateObject]]] = {
    ALLOCATION.name: _create_allocation,
    JOB.name: create_job,
    NODE.name: _register_node,
    QUOTA_REQUEST.name: _request_limits,
}
