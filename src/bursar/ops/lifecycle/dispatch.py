"""Which command a verb on an object is: most kinds share theirs, allocations and nodes have their own."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.core.objects.charge import NOTHING
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.lifecycle.namespace import Terminate
from bursar.ops.nodes.node import ChangeNode, DeleteNode, RegisterNode
from bursar.ops.objects.object import (
    ChangeObject,
    CreateObject,
    DeleteObject,
    DeletePreconditions,
    changed_draft,
    new_draft,
    submitter,
)
from bursar.ops.runtime.command import Command
from bursar.ops.workloads.allocation import GRACE_SECONDS, Release
from bursar.ops.workloads.job import create_job, delete_job
from bursar.ops.workloads.revise import Revise, revisable
from bursar.store.db.idempotency import IdempotencyKey
from bursar.wire.kinds.allocation import GANG_SIZE, MAX_WAIT, Allocation, asking_of, facts_of, gang_of
from bursar.wire.kinds.job import disown, keep_owner
from bursar.wire.kinds.namespace import TENANT_LABEL, tenant_of
from bursar.wire.kinds.node import Node, NodeSpec, allocatable_of, cap_by_spec, gate_of, said_at_joining
from bursar.wire.shared.kind import Kind, Object


def create_command(
    kind: Kind,
    one: Object,
    origin: Origin,
    claim: IdempotencyKey | None = None,
    *,
    seen_tenant: str | None = None,
    admin: bool = False,
) -> CreateObject:
    """Everything that can be worked out before locks are taken is worked out here. An administrator may let in what a
    tenant's own users may not ask for."""
    match kind.name:
        case "Allocation":
            return _create_allocation(kind, one, origin, claim, seen_tenant, admin=admin)
        case "Job":
            return create_job(one, origin, claim, seen_tenant, admin=admin)
        case "Node":
            assert isinstance(one, Node)
            # A new node offers what its spec says, or what it says itself where that is silent. Its agent says how it
            # keeps tenants apart before any work comes.
            one.status = said_at_joining(one)
            allocatable, schedulable, gate = allocatable_of(one), is_schedulable(one), gate_of(one)
            draft = new_draft(kind, one)
            return RegisterNode(
                key=draft.key, origin=origin, claim=claim, draft=draft, allocatable=allocatable,
                schedulable=schedulable, gate=gate,
            )  # fmt: skip
    tenant = owner_of(kind, one)
    draft = new_draft(kind, one, tenant=tenant or seen_tenant or "")
    return CreateObject(
        key=draft.key, origin=origin, claim=claim, draft=draft, subject=kind.singular, seen_tenant=seen_tenant
    )


def owner_of(kind: Kind, one: Object) -> str:
    """The tenant that an object without a namespace belongs to."""
    if kind.name == "Tenant":
        return str(one.metadata.name)
    return tenant_of(one) if kind.name == "Namespace" else ""


def _create_allocation(
    kind: Kind, one: Allocation, origin: Origin, claim: IdempotencyKey | None, seen_tenant: str | None, *, admin: bool
) -> CreateObject:
    gang = gang_of(one.metadata, one.spec)
    wants = (("spec.queue", Key("Queue", "", one.spec.queue)),) if one.spec.queue else ()
    # Those of a job are made with it: nobody else's is taken for one of them.
    disown(one.metadata)
    asking = asking_of(one)
    draft = new_draft(kind, one, tenant=seen_tenant or "", user=submitter(origin))
    if gang is not None and gang.min_members > 1:
        draft = replace(draft, gang=gang.group_id)
    else:
        gang = None
    return CreateObject(
        key=draft.key,
        origin=origin,
        claim=claim,
        draft=draft,
        gang=gang,
        wants=wants,
        subject="allocation",
        seen_tenant=seen_tenant,
        asking=asking,
        admin=admin,
    )


def is_schedulable(node: Node) -> bool:
    return not (isinstance(node.spec, NodeSpec) and node.spec.unschedulable is True)


def _capacity(node: Node) -> object:
    return node.spec.capacity if isinstance(node.spec, NodeSpec) else None


def change_command(
    kind: Kind,
    before: Stored,
    one: Object,
    origin: Origin,
    claim: IdempotencyKey | None = None,
    *,
    spec_changed: bool,
    status: bool = False,
    admin: bool = False,
) -> Command | Refusal:
    """The next version of an object. `status` writes leave everything but the status as it was."""
    if isinstance(one, Allocation) and not status:
        keep_owner(msgspec.json.decode(before.doc, type=Allocation).metadata, one.metadata)
        if spec_changed:
            return _revise(kind, before, one, origin, claim, admin=admin)
    if spec_changed and not kind.mutable_spec:
        return Refusal(
            Code.IMMUTABLE,
            f"the spec of {kind.singular} {before.key.name!r} cannot be changed after creation",
            f"Delete the {kind.singular} and create it anew; labels and annotations may be changed.",
        )
    if isinstance(one, Allocation) and not status and (refusal := _another_gang(kind, before, one)):
        return refusal
    if kind.name == "Node":
        assert isinstance(one, Node)
        if spec_changed and _capacity(one) != _capacity(msgspec.json.decode(before.doc, type=Node)):
            # What the node said before is held to it at once.
            cap_by_spec(one)
        allocatable, schedulable, gate = allocatable_of(one), is_schedulable(one), gate_of(one)
        draft = changed_draft(kind, before, one, spec_changed=spec_changed, keep_charge=True)
        return ChangeNode(
            key=before.key, origin=origin, claim=claim, draft=draft, expected=before.revision,
            allocatable=allocatable, schedulable=schedulable, plans_stale=spec_changed or draft.labels != before.labels,
            gate=gate,
        )  # fmt: skip
    if kind.name == "Namespace":
        # Leaving the label out does not move it.
        one.metadata.labels = {TENANT_LABEL: before.tenant, **(one.metadata.labels or {})}
    tenant = owner_of(kind, one) or before.tenant
    keep = before.charge is NOTHING or not kind.mutable_spec or status
    draft = changed_draft(kind, before, one, spec_changed=spec_changed, keep_charge=keep)
    draft = replace(draft, tenant=tenant)
    return ChangeObject(
        key=before.key, origin=origin, claim=claim, draft=draft, expected=before.revision, subject=kind.singular,
        keep_charge=keep,
    )  # fmt: skip


def _revise(
    kind: Kind, before: Stored, one: Allocation, origin: Origin, claim: IdempotencyKey | None, *, admin: bool
) -> Command | Refusal:
    if refusal := revisable(before, one) or _another_gang(kind, before, one):
        return refusal
    draft = changed_draft(kind, before, one, spec_changed=True, keep_charge=True)
    return Revise(
        key=before.key, origin=origin, claim=claim, draft=draft, expected=before.revision, subject=kind.singular,
        facts=facts_of(one.spec), asking=asking_of(one), admin=admin,
        wants=(("spec.queue", Key("Queue", "", one.spec.queue)),) if one.spec.queue else (),
    )  # fmt: skip


def _another_gang(kind: Kind, before: Stored, one: Allocation) -> Refusal | None:
    if _stays_in_its_gang(before, one):
        return None
    return Refusal(
        Code.IMMUTABLE,
        f"the gang of {kind.singular} {before.key.name!r} cannot be changed after creation",
        f"Leave the annotations {GANG_SIZE} and {MAX_WAIT} as they were, or delete it and create it anew.",
    )


def _stays_in_its_gang(before: Stored, one: Allocation) -> bool:
    """Annotations may change, but where a gang's size or wait is said by them."""
    if not before.gang:
        return True
    was = msgspec.json.decode(before.doc, type=Allocation)
    return gang_of(was.metadata, was.spec) == gang_of(one.metadata, one.spec)


def delete_command(
    kind: Kind,
    before: Stored,
    origin: Origin,
    claim: IdempotencyKey | None = None,
    *,
    preconditions: DeletePreconditions,
    grace_seconds: int | None = None,
    orphan: bool = False,
) -> Command:
    # What was looked at is what is deleted: not another of its name, and not once it is another's.
    preconditions = replace(preconditions, uid=preconditions.uid or before.uid, tenant=before.tenant)
    common: dict[str, Any] = {"key": before.key, "origin": origin, "claim": claim, "preconditions": preconditions}
    grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
    match kind.name:
        case "Allocation":
            return Release(**common, grace_seconds=grace, gang=before.gang)
        case "Job":
            return delete_job(before, origin, claim, preconditions, grace, orphan=orphan)
        case "Node":
            return DeleteNode(**common)
        case "Namespace":
            return Terminate(**common)
    return DeleteObject(**common)
