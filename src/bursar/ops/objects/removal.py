"""Removing objects: the one way out of the store, for whoever deletes.

What has finalizers is marked instead and stays until the list is empty. What it held is given back before this is
asked: nothing counts for an object that only waits for somebody to clean up.
"""

from __future__ import annotations

import msgspec

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import ENDED
from bursar.core.objects.finalizer import ORPHAN
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.replace import replace
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Result, Written
from bursar.wire.shared.document import encode, finalizers_of, is_ending


def remove(batch: UnitOfWork, before: Stored, origin: Origin, last: Stored | None = None) -> Result:
    """Remove an object, or mark it where it has finalizers; `last` is its final state, where that differs."""
    if not finalizers_of(before.doc):
        return batch.remove(before.key, origin, last)
    after = last or before
    if not is_ending(before.doc):
        after = marked(after, timestamp(batch.now))
    elif (after.doc, after.status) == (before.doc, before.status):
        return Written(before.key, before.doc, before.status, before.revision)
    return batch.put(after, origin)


def finish(batch: UnitOfWork, last: Stored, origin: Origin) -> Result:
    """Remove what was marked, now that `may_go` says so."""
    return batch.remove(last.key, origin, last)


def marked(one: Stored, at: str, *more: str) -> Stored:
    """An object that is to go once its finalizers are gone, and with them those that are added here."""
    document = msgspec.json.decode(one.doc)
    metadata = document["metadata"]
    metadata.setdefault("deletionTimestamp", at)
    metadata.setdefault("deletionGracePeriodSeconds", 0)
    if more:
        metadata["finalizers"] = [*metadata.get("finalizers", ()), *more]
    return replace(one, doc=encode(document))


def may_go(before: Stored, after: Stored) -> bool:
    """Whether a change took the last finalizer of what waited for nothing else. Jobs wait for their allocations and
    namespaces for what is in them; their controllers remove them."""
    were = finalizers_of(before.doc)
    left = finalizers_of(after.doc)
    if not were or not is_ending(before.doc) or set(left) - {ORPHAN}:
        return False
    match before.key.kind:
        case "Allocation":
            return before.fields.get("status.phase") in ENDED
        case "Job":
            return ORPHAN in were
        case "Namespace":
            return False
    return True
