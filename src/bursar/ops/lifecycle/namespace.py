"""Namespaces: deleting one empties it first."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.values.replace import replace
from bursar.ops.objects.object import DeleteObject, not_found
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Command, Result
from bursar.ops.workloads.allocation import set_condition, status_of, unchanged
from bursar.wire.shared.document import encode, is_ending

REMAINING = "NamespaceContentRemaining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(DeleteObject):
    """Mark a namespace as ending: nothing new may be created in it, and a loop empties and removes it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWaiting(Command):
    """Say in a namespace that should be gone what it waits for."""

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
