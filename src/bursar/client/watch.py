"""Watches: every change once and in order, across lost connections and compacted history.

A list gives the existing objects; from its revision on, changes arrive as a stream. A broken stream resumes from the
last revision. If that revision is no longer stored (410), the objects are listed again and compared with the state
given before, so that changes in between are given too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from bursar.client.calls import PAGE_ITEMS, ResourcePath, accepting, every_page, selection
from bursar.client.errors import ApiError, ConnectionFailed, Gone, api_error
from bursar.client.flow import (
    Document,
    Feed,
    Flow,
    Give,
    HttpRequest,
    Open,
    Pause,
    Read,
    Response,
    Retries,
    error_of,
    not_bursar,
)

ADDED, MODIFIED, DELETED, BOOKMARK, ERROR = "ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"

# A server without changes sends bookmarks; one that sends nothing for so long counts as lost.
SILENCE_SECONDS_MAX = 90.0
# How long a server may be unreachable before the error is raised.
AWAY_SECONDS_MAX = 300.0
QUICK_SECONDS = 1.0


class Event(NamedTuple):
    """A change of an object; `type` is ADDED, MODIFIED or DELETED."""

    type: str
    object: Document


class Listed(NamedTuple):
    """The items of a list, and its revision."""

    items: list[Document]
    revision: str


def metadata_of(document: Mapping[str, Any]) -> Document:
    """The metadata of an object, or of the object in a Table of one row."""
    if document.get("kind") == "Table" and document.get("rows"):
        return dict((document["rows"][0].get("object") or {}).get("metadata") or {})
    return dict(document.get("metadata") or {})


def _only_metadata(metadata: Document) -> Document:
    return {"metadata": metadata}


@dataclass(slots=True)
class WatchSource:
    """The path of a watch, and how to list and to identify its items."""

    path: str
    retries: Retries
    relist: Callable[[], Flow[Listed]]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=lambda: accepting(as_table=False))
    metadata: Callable[[Mapping[str, Any]], Document] = metadata_of
    gone: Callable[[Document], Document] = _only_metadata  # an item of which only this metadata is known


class _Position:
    """The position of a watch: the revision of the last event, and the objects given and not deleted since."""

    def __init__(self, source: WatchSource, revision: str) -> None:
        self.revision = revision
        self.received_at = time.monotonic()
        self._source = source
        self._known: dict[tuple[str, str, str], Document] = {}

    def news(self, event: Event) -> Iterator[Event]:
        if self.advance(event):
            yield event

    def advance(self, event: Event) -> bool:
        """Record an event, and return whether it is new.

        The list has the revision of its first page. A change between the pages is already in a later page, and arrives
        again in the stream.
        """
        metadata = self._source.metadata(event.object)
        self.revision = str(metadata.get("resourceVersion") or self.revision)
        if event.type == BOOKMARK:
            return False
        before = self._known.get(_identity(metadata))
        if before is not None and _number(before) >= _number(metadata):
            return False
        if event.type == DELETED:
            self._known.pop(_identity(metadata), None)
        else:
            self._known[_identity(metadata)] = _identifying(metadata)
        return True

    def changes(self, listed: list[Document], revision: str) -> Iterator[Event]:
        """The events that lead from the objects given before to a new list."""
        metadata_of_one, gone = self._source.metadata, self._source.gone
        present = {_identity(metadata_of_one(one)) for one in listed}
        for identity in [known for known in self._known if known not in present]:
            yield Event(DELETED, gone(self._known.pop(identity)))
        for one in listed:
            metadata = metadata_of_one(one)
            before = self._known.get(_identity(metadata))
            if before is None or before.get("uid") != metadata.get("uid"):
                if before is not None:
                    yield Event(DELETED, gone(before))
                yield Event(ADDED, one)
            elif before.get("resourceVersion") != metadata.get("resourceVersion"):
                yield Event(MODIFIED, one)
            self._known[_identity(metadata)] = _identifying(metadata)
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
    """Watch objects: existing ones as ADDED, then every change; with a `resource_version`, only the changes since.

    It continues across lost connections, until the caller stops or `timeout_seconds` have passed.
    """
    query = selection(label_selector, field_selector)

    def relist() -> Flow[Listed]:
        pages = yield from every_page(place, label_selector, field_selector, PAGE_ITEMS, as_table=as_table)
        return Listed([item for one in pages for item in _items(one)], revision_of(pages[0]))

    source = WatchSource(place.path, place.retries, relist, query, accepting(as_table))
    return watch_source(source, resource_version=resource_version, timeout_seconds=timeout_seconds)


def watch_source(
    source: WatchSource, *, resource_version: str = "", timeout_seconds: float | None = None
) -> Feed[Event]:
    """Watch the items of a source: present ones as ADDED, then every change."""
    end = end_of(timeout_seconds)
    position = _Position(source, resource_version)

    def once() -> Feed[Event]:
        try:
            if not position.revision:
                items, revision = yield from source.relist()
                for event in position.changes(items, revision):
                    yield Give(event)
            query = {**source.query, "resourceVersion": position.revision}
            yield from stream(source.path, query, source.headers, end, position, position.news)
        except Gone:
            position.revision = ""

    return reopened(source.retries, end, position, once)


def end_of(timeout_seconds: float | None) -> float:
    return math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds


class Heard(Protocol):
    """The time at which a watch last received anything."""

    received_at: float


def reopened(retries: Retries, end: float, heard: Heard, once: Callable[[], Feed[Event]]) -> Feed[Event]:
    """Open a stream again and again until its end, across lost connections."""
    quick_rounds = 0
    while (started_at := time.monotonic()) < end:
        try:
            yield from once()
        except (ConnectionFailed, ApiError) as trouble:
            if not trouble.passing or time.monotonic() - heard.received_at > AWAY_SECONDS_MAX:
                raise
        # A stream that repeatedly ends at once is reopened with exponential backoff.
        quick_rounds = quick_rounds + 1 if time.monotonic() - started_at < QUICK_SECONDS else 0
        yield Pause(min(retries.pause_seconds(quick_rounds), max(0.0, end - time.monotonic())))


def stream(
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    end: float,
    heard: Heard,
    events: Callable[[Event], Iterable[Event]],
) -> Feed[Event]:
    """Give the events that follow from those of one connection, until the stream ends."""
    response = yield Open(_watch_request(path, query, headers, end))
    assert isinstance(response, Response)
    if response.status >= 300:
        raise error_of(response)
    heard.received_at = time.monotonic()
    rest = b""
    while (piece := (yield Read())) is not None:
        heard.received_at = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            for event in events(_event(line)) if line.strip() else ():
                yield Give(event)
        if time.monotonic() >= end:
            return


def _watch_request(path: str, query: Mapping[str, str], headers: Mapping[str, str], end: float) -> HttpRequest:
    asked = {**query, "watch": "true", "allowWatchBookmarks": "true"}
    silence = SILENCE_SECONDS_MAX
    if end != math.inf:
        left = max(1, math.ceil(end - time.monotonic()))
        asked["timeoutSeconds"] = str(left)
        # A limit for servers that do not end the stream in time.
        silence = min(silence, left + 1.0)
    return HttpRequest("GET", path, asked, headers, silence_seconds_max=silence)


def _event(line: bytes) -> Event:
    try:
        document = msgspec.json.decode(line)
        event = Event(str(document["type"]), document["object"])
    except (msgspec.DecodeError, KeyError, TypeError):
        raise not_bursar("a watch event cannot be read") from None
    if event.type == ERROR:
        raise api_error(int(event.object.get("code") or 500), event.object, {})
    return event


def _items(found: Mapping[str, Any]) -> list[Document]:
    """The objects of a list, or the rows of a Table, each as a Table of one row."""
    if found.get("kind") == "Table":
        return [{**found, "rows": [row]} for row in found.get("rows") or []]
    return list(found.get("items") or [])


def revision_of(found: Mapping[str, Any]) -> str:
    """The revision of a list."""
    return str((found.get("metadata") or {}).get("resourceVersion") or "")


def _identity(metadata: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(metadata.get("kind") or ""), str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _number(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("resourceVersion") or 0)


def _identifying(metadata: Mapping[str, Any]) -> Document:
    """The identity and revision of an object, which are all that is remembered of it."""
    fields = ("kind", "name", "namespace", "uid", "resourceVersion")
    return {name: metadata[name] for name in fields if name in metadata}
