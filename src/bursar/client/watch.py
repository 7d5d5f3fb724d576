"""Watching: every change once and in order, through lost connections and compacted histories.

The first list says what there is; from its revision on, changes come as a stream. When the stream breaks it is opened
again from the last revision seen. When that revision is no longer kept (410), the objects are listed anew and compared
with what was given before, so that what was added, changed or deleted in between is given too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from bursar.client.calls import PAGE_ITEMS, ResourcePath, accepting, continuation, page, selection
from bursar.client.errors import ApiError, ConnectionFailed, Gone, api_error
from bursar.client.flow import Document, Feed, Flow, Give, HttpRequest, Open, Pause, Read, Response, error_of, not_ours

ADDED, MODIFIED, DELETED, BOOKMARK, ERROR = "ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"

# A server with nothing to tell sends bookmarks; one that sends nothing at all is taken for lost.
SILENCE_SECONDS_MAX = 90.0
# How long a server may be away before the watcher is told.
AWAY_SECONDS_MAX = 300.0
QUICK_SECONDS = 1.0


class Event(NamedTuple):
    """`type` is ADDED, MODIFIED or DELETED."""

    type: str
    object: Document


class _Position:
    """How far a watch has come: the revision of the last event, and what was given and not deleted since."""

    def __init__(self, revision: str) -> None:
        self.revision = revision
        self.heard_at = time.monotonic()
        self._known: dict[tuple[str, str], Document] = {}

    def advance(self, event: Event) -> bool:
        """Takes note of an event, and says whether it tells anything new.

        A list's later pages are read later than its first, whose revision is that of the list: what changed in between
        is in them already, and comes again in the stream.
        """
        metadata = metadata_of(event.object)
        self.revision = str(metadata.get("resourceVersion") or self.revision)
        if event.type == BOOKMARK:
            return False
        before = self._known.get(_identity(metadata))
        if before is not None and _number(before) >= _number(metadata):
            return False
        if event.type == DELETED:
            self._known.pop(_identity(metadata), None)
        else:
            self._known[_identity(metadata)] = _in_short(metadata)
        return True

    def changes(self, listed: list[Document], revision: str) -> Iterator[Event]:
        """What has happened between what was given before and a new list."""
        present = {_identity(metadata_of(one)) for one in listed}
        for identity in [known for known in self._known if known not in present]:
            yield Event(DELETED, {"metadata": self._known.pop(identity)})
        for one in listed:
            metadata = metadata_of(one)
            before = self._known.get(_identity(metadata))
            if before is None or before.get("uid") != metadata.get("uid"):
                if before is not None:
                    yield Event(DELETED, {"metadata": before})
                yield Event(ADDED, one)
            elif before.get("resourceVersion") != metadata.get("resourceVersion"):
                yield Event(MODIFIED, one)
            self._known[_identity(metadata)] = _in_short(metadata)
        self.revision = revision


def watch(
    place: ResourcePath,
    *,
    label_selector: str = "",
    field_selector: str = "",
    resource_version: str = "",
    timeout_seconds: float | None = None,
    as_table: bool = False,
) -> Feed[Event]:
    """What there is, as ADDED, and then every change; with a `resource_version`, only the changes since.

    It goes on through lost connections, until the caller stops or `timeout_seconds` have passed.
    """
    end = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    query = selection(label_selector, field_selector)
    position = _Position(resource_version)
    quick_rounds = 0
    while (started_at := time.monotonic()) < end:
        try:
            if not position.revision:
                yield from _list_again(place, query, position, as_table)
            yield from _follow(place, query, position, as_table, end)
        except Gone:
            position.revision = ""
        except (ConnectionFailed, ApiError) as trouble:
            if not trouble.passing or time.monotonic() - position.heard_at > AWAY_SECONDS_MAX:
                raise
        # A stream that ends at once, again and again, is asked for less and less often.
        quick_rounds = quick_rounds + 1 if time.monotonic() - started_at < QUICK_SECONDS else 0
        yield Pause(min(place.retries.pause_seconds(quick_rounds), max(0.0, end - time.monotonic())))


def _list_again(place: ResourcePath, query: Mapping[str, str], position: _Position, as_table: bool) -> Feed[Event]:
    first = yield from _page(place, query, "", as_table)
    listed = _items(first)
    continue_token = continuation(first)
    while continue_token:
        more = yield from _page(place, query, continue_token, as_table)
        listed += _items(more)
        continue_token = continuation(more)
    for event in position.changes(listed, str((first.get("metadata") or {}).get("resourceVersion") or "")):
        yield Give(event)


def _page(place: ResourcePath, query: Mapping[str, str], continue_token: str, as_table: bool) -> Flow[Document]:
    return page(
        place,
        label_selector=query.get("labelSelector", ""),
        field_selector=query.get("fieldSelector", ""),
        limit=PAGE_ITEMS,
        continue_token=continue_token,
        as_table=as_table,
    )


def _follow(
    place: ResourcePath, query: Mapping[str, str], position: _Position, as_table: bool, end: float
) -> Feed[Event]:
    """The changes after the position's revision, until the stream ends."""
    response = yield Open(_watch_request(place, query, position.revision, as_table, end))
    assert isinstance(response, Response)
    if response.status >= 300:
        raise error_of(response)
    position.heard_at = time.monotonic()
    rest = b""
    while (piece := (yield Read())) is not None:
        position.heard_at = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.strip():
                continue
            event = _event(line)
            if position.advance(event):
                yield Give(event)
        if time.monotonic() >= end:
            return


def _watch_request(
    place: ResourcePath, query: Mapping[str, str], revision: str, as_table: bool, end: float
) -> HttpRequest:
    asked = {**query, "watch": "true", "resourceVersion": revision, "allowWatchBookmarks": "true"}
    silence = SILENCE_SECONDS_MAX
    if end != math.inf:
        left = max(1, math.ceil(end - time.monotonic()))
        asked["timeoutSeconds"] = str(left)
        # The server ends the stream in time; this is for one that does not.
        silence = min(silence, left + 1.0)
    return HttpRequest("GET", place.path, asked, accepting(as_table), silence_seconds_max=silence)


def _event(line: bytes) -> Event:
    try:
        document = msgspec.json.decode(line)
        event = Event(str(document["type"]), document["object"])
    except (msgspec.DecodeError, KeyError, TypeError):
        raise not_ours("an event of the watch cannot be read") from None
    if event.type == ERROR:
        raise api_error(int(event.object.get("code") or 500), event.object, {})
    return event


def _items(found: Mapping[str, Any]) -> list[Document]:
    """A list's objects; a Table's rows, each as a Table of its own."""
    if found.get("kind") == "Table":
        return [{**found, "rows": [row]} for row in found.get("rows") or []]
    return list(found.get("items") or [])


def metadata_of(document: Mapping[str, Any]) -> Document:
    """An object's metadata; for a Table of one row, that of the object in it."""
    if document.get("kind") == "Table" and document.get("rows"):
        return dict((document["rows"][0].get("object") or {}).get("metadata") or {})
    return dict(document.get("metadata") or {})


def _identity(metadata: Mapping[str, Any]) -> tuple[str, str]:
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _number(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("resourceVersion") or 0)


def _in_short(metadata: Mapping[str, Any]) -> Document:
    """What is remembered of an object: enough to name it, whatever its size."""
    return {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion") if name in metadata}
