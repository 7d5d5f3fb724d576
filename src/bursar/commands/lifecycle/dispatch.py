"""The registry of change and delete commands: kinds for which these do more than store the object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bursar.commands.approval.revise import revise_request
from bursar.commands.command import Command
from bursar.commands.nodes.node import change_node, delete_node
from bursar.commands.objects.namespace import terminate_namespace
from bursar.commands.objects.object import (
    DeletePreconditions,
    ObjectChange,
    ObjectDeletion,
    change_object,
    delete_object,
)
from bursar.commands.workloads.allocation import release_allocation
from bursar.commands.workloads.job import delete_job
from bursar.commands.workloads.revise import change_allocation
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.job import JOB
from bursar.wire.kinds.namespace import NAMESPACE
from bursar.wire.kinds.node import NODE
from bursar.wire.shared.kind import Kind, Object


@dataclass(frozen=True, slots=True)
class KindCommands:
    change: Callable[[ObjectChange], Command | Refusal] = change_object
    delete: Callable[[ObjectDeletion], Command] = delete_object


COMMANDS: Final[Mapping[str, KindCommands]] = {
    ALLOCATION.name: KindCommands(change_allocation, release_allocation),
    JOB.name: KindCommands(delete=delete_job),
    NAMESPACE.name: KindCommands(delete=terminate_namespace),
    NODE.name: KindCommands(change_node, delete_node),
}
COMMON: Final = KindCommands()
REQUEST: Final = KindCommands(revise_request)  # of kinds that pass approval gates and whose spec may change


def commands_of(kind: Kind) -> KindCommands:
    return COMMANDS.get(kind.name, REQUEST if kind.requestable and kind.mutable_spec else COMMON)


def change_command(
    kind: Kind,
    before: Stored,
    one: Object,
    origin: Origin,
    idempotency_key: IdempotencyKey | None = None,
    *,
    spec_changed: bool,
    status: bool = False,
    admin: bool = False,
) -> Command | Refusal:
    """The command for the next version of an object. A `status` write changes nothing but the status."""
    if not status:
        kind.keep(before, one)
    change = ObjectChange(
        kind, before, one, origin, idempotency_key, spec_changed=spec_changed, status=status, admin=admin
    )
    return commands_of(kind).change(change)


def delete_command(
    kind: Kind,
    before: Stored,
    origin: Origin,
    idempotency_key: IdempotencyKey | None = None,
    *,
    preconditions: DeletePreconditions,
    grace_seconds: int | None = None,
    orphan: bool = False,
) -> Command:
    # Delete only the object that was read: no other one of its name, and not if its tenant has changed.
    preconditions = replace(preconditions, uid=preconditions.uid or before.uid, tenant=before.tenant)
    deletion = ObjectDeletion(before, origin, idempotency_key, preconditions, grace_seconds, orphan=orphan)
    return commands_of(kind).delete(deletion)
