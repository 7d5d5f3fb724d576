"""Removal of objects: the only place that removes objects from the store.

An object with finalizers is marked instead, and stays until the list is empty. Its charge is released before this is
called: an object that only waits for its finalizers is not charged.
"""

from __future__ import annotations

import msgspec

from bursar.commands.command import Result, Written
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.finalizer import ORPHAN
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode, finalizers_of, is_ending


def remove(batch: UnitOfWork, before: Stored, origin: Origin, last: Stored | None = None) -> Result:
    """Remove an object, or mark it if it has finalizers; `last` is its final state, if that differs."""
    if not finalizers_of(before.doc):
        return batch.remove(before.key, origin, last)
    after = last or before
    if not is_ending(before.doc):
        after = marked(after, timestamp(batch.now))
    elif (after.doc, after.status) == (before.doc, before.status):
        return Written(before.key, before.doc, before.status, before.revision)
    return batch.put(after, origin)


def finish(batch: UnitOfWork, last: Stored, origin: Origin) -> Result:
    """Remove a marked object, after `may_go` allowed it."""
    return batch.remove(last.key, origin, last)


def marked(one: Stored, at: str, *more: str) -> Stored:
    """The object, marked for removal after its finalizers, including the ones added here."""
    document = msgspec.json.decode(one.doc)
    metadata = document["metadata"]
    metadata.setdefault("deletionTimestamp", at)
    metadata.setdefault("deletionGracePeriodSeconds", 0)
    if more:
        metadata["finalizers"] = [*metadata.get("finalizers", ()), *more]
    return replace(one, doc=encode(document))


def may_go(before: Stored, after: Stored) -> bool:
    """Whether a change removed the last finalizer of a marked object, and its kind has no other condition."""
    were = finalizers_of(before.doc)
    left = finalizers_of(after.doc)
    if not were or not is_ending(before.doc) or set(left) - {ORPHAN}:
        return False
    return BY_NAME[before.key.kind].may_go(before, were)
