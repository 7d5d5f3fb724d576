"""Namespaces: deleting one empties it first."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import DeleteObject, ObjectDeletion, not_found
from bursar.commands.objects.status import set_condition, status_of, unchanged
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.wire.shared.document import encode, is_ending

REMAINING = "NamespaceContentRemaining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(DeleteObject):
    """Mark a namespace as terminating: nothing new may be created in it, and a loop empties and removes it."""

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        if is_ending(before.doc):
            return unchanged(before)
        document = msgspec.json.decode(before.doc)
        document["metadata"].setdefault("deletionTimestamp", timestamp(batch.now))
        fields = {**before.fields, "status.phase": "Terminating"}
        after = replace(before, doc=encode(document), status=encode({"phase": "Terminating"}), fields=fields)
        return batch.put(after, self.origin)


def terminate_namespace(deletion: ObjectDeletion) -> Terminate:
    return Terminate(
        key=deletion.before.key, origin=deletion.origin, idempotency_key=deletion.idempotency_key,
        preconditions=deletion.preconditions,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteRemaining(Command):
    """Note in a terminating namespace's status which objects remain."""

    message: str

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        status = status_of(before)
        told = [one.get("message") for one in status.get("conditions", ()) if one["type"] == REMAINING]
        if not is_ending(before.doc) or self.message in told:
            return unchanged(before)
        set_condition(status, REMAINING, "True", "SomeResourcesRemain", self.message, timestamp(batch.now))
        return batch.put(replace(before, status=encode(status)), self.origin)
