"""Apply: make an object as it is described, and leave alone what others have set.

What was applied last is kept on the object, in the annotation that kubectl uses too, so that the two can be mixed. A
field that was applied then and is not described now is removed; a field that was never applied here is not touched.
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

# Somebody may create or delete the object between our question and our write; more often than this is not chance.
_ATTEMPTS_MAX = 3


class Applied(NamedTuple):
    object: Document
    outcome: Literal["created", "configured", "unchanged"]


def apply(place: ResourcePath, given: Given, *, dry_run: bool = False) -> Flow[Applied]:
    """Creates the object, or changes it where it differs from what is given."""
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
    # The server may know two spellings of one value: only a new revision is a change.
    same = not dry_run and _revision(after) == _revision(current)
    return Applied(after, "unchanged" if same else "configured")


def with_last_applied(wanted: Mapping[str, Any]) -> Document:
    """The object with its own description in the annotation."""
    metadata = dict(wanted.get("metadata") or {})
    annotations = {name: value for name, value in (metadata.get("annotations") or {}).items() if name != LAST_APPLIED}
    plain = {**wanted, "metadata": {**metadata, "annotations": annotations}}
    text = msgspec.json.encode(plain, order="deterministic").decode() + "\n"
    return {**plain, "metadata": {**metadata, "annotations": {**annotations, LAST_APPLIED: text}}}


def last_applied(current: Mapping[str, Any]) -> Document:
    """What was applied last; nothing if that was never done, or can no longer be read."""
    annotations = (current.get("metadata") or {}).get("annotations") or {}
    try:
        document = msgspec.json.decode(annotations.get(LAST_APPLIED) or b"{}")
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def three_way(last: Mapping[str, Any], wanted: Mapping[str, Any], current: Mapping[str, Any]) -> Document:
    """The merge patch that makes `current` as `wanted`, and removes what only `last` has."""
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
    """Equality as JSON has it: in Python true is 1."""
    return msgspec.json.encode(left, order="deterministic") == msgspec.json.encode(right, order="deterministic")


def _revision(document: Mapping[str, Any]) -> object:
    return (document.get("metadata") or {}).get("resourceVersion")
