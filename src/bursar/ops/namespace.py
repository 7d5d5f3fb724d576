"""Namespaces: deleting one empties it first."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bursar.core.sheet import Sheet
from bursar.core.value import replace
from bursar.ops.command import Result
from bursar.ops.object import Delete, not_found
from bursar.ops.office import timestamp
from bursar.wire.document import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(Delete):
    """Mark a namespace as ending: nothing new may be created in it, and a loop empties and removes it."""

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        document = msgspec.json.decode(before.doc)
        document["metadata"].setdefault("deletionTimestamp", timestamp(sheet.now))
        fields = {**before.fields, "status.phase": "Terminating"}
        after = replace(before, doc=encode(document), status=encode({"phase": "Terminating"}), fields=fields)
        return sheet.put(after, self.origin)
