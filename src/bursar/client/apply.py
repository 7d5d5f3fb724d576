"""Apply: a three-way merge that makes an object as described and keeps fields that others have set.

The last applied description is stored on the object, in kubectl's annotation, so that the two can be mixed. A field
that was applied before and is missing now is removed; a field that was never applied is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from bursar.client.calls import Given, ResourcePath, as_document, create, get, name_of, patch
from bursar.client.errors import Conflict, NotFound
from bursar.client.flow import Document, Flow
from bursar.core.values.redaction import LAST_APPLIED
from bursar.core.values.refusal import Code

# Others may create or delete the object between our read and our write; more often than this is no coincidence.
_ATTEMPTS_MAX = 3


class Applied(NamedTuple):
    object: Document
    outcome: Literal["created", "configured", "unchanged"]


def apply(place: ResourcePath, given: Given, *, dry_run: bool = False) -> Flow[Applied]:
    """Create the object, or change the fields that differ."""
    wanted = as_document(given)
    place = place.owning(wanted)
    name = name_of(wanted)
    annotated = with_last_applied(wanted)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        try:
            current = yield from get(place, name)
            return (yield from _change(place, name, annotated, current, dry_run))
        except NotFound:
            pass
        try:
            return Applied((yield from create(place, annotated, dry_run=dry_run)), "created")
        except Conflict as conflict:
            if conflict.code != Code.ALREADY_EXISTS or attempt == _ATTEMPTS_MAX:
                raise
    raise AssertionError("the last attempt either returns or raises")


def _change(place: ResourcePath, name: str, wanted: Document, current: Document, dry_run: bool) -> Flow[Applied]:
    changes = three_way(last_applied(current), wanted, current)
    if not changes:
        return Applied(current, "unchanged")
    after = yield from patch(place, name, changes, dry_run=dry_run)
    # The server may accept two spellings of one value, so only a new revision is a change.
    same = not dry_run and _revision(after) == _revision(current)
    return Applied(after, "unchanged" if same else "configured")


def with_last_applied(wanted: Mapping[str, Any]) -> Document:
    """The object with its own description in the last-applied annotation."""
    metadata = dict(wanted.get("metadata") or {})
    annotations = {name: value for name, value in (metadata.get("annotations") or {}).items() if name != LAST_APPLIED}
    plain = {**wanted, "metadata": {**metadata, "annotations": annotations}}
    text = msgspec.json.encode(plain, order="deterministic").decode() + "\n"
    return {**plain, "metadata": {**metadata, "annotations": {**annotations, LAST_APPLIED: text}}}


def last_applied(current: Mapping[str, Any]) -> Document:
    """The last applied description; empty if there is none or it cannot be read."""
    annotations = (current.get("metadata") or {}).get("annotations") or {}
    try:
        document = msgspec.json.decode(annotations.get(LAST_APPLIED) or b"{}")
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def three_way(last: Mapping[str, Any], wanted: Mapping[str, Any], current: Mapping[str, Any]) -> Document:
    """The merge patch that makes `current` like `wanted`, and removes fields that only `last` has."""
    changes: Document = {}
    for field, value in wanted.items():
        present = current.get(field)
        if isinstance(value, Mapping) and isinstance(present, Mapping):
            before = last.get(field)
            if inner := three_way(before if isinstance(before, Mapping) else {}, value, present):
                changes[field] = inner
        elif value is None:
            if field in current:
                changes[field] = None
        elif field not in current or not _same(value, present):
            changes[field] = value
    changes.update({field: None for field in last if field not in wanted and field in current})
    return changes


def _same(left: object, right: object) -> bool:
    """Equality in JSON: in Python true equals 1."""
    return msgspec.json.encode(left, order="deterministic") == msgspec.json.encode(right, order="deterministic")


def _revision(document: Mapping[str, Any]) -> object:
    return (document.get("metadata") or {}).get("resourceVersion")
