"""Watches: every change once, in commit order, from a revision on.

A watch joins the process's feed first and reads what lies between its revision and that point from the database, so
nothing falls between. Changes are rendered once per format and shared by all watchers. One that does not keep up is let
go: it resumes from the last revision it saw.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from bursar.api import metrics
from bursar.api.problem import body_of
from bursar.api.route import JSON, Call, Outcome, Stream
from bursar.api.show import JOINED, documents, show
from bursar.api.table import table, wants_table
from bursar.core.access import Reach, reach
from bursar.core.refusal import Code, Refusal, invalid
from bursar.core.selector import matches, matches_fields
from bursar.core.tree import lineage
from bursar.ops.feed import FedChange, Follower, Lagging
from bursar.store import change as change_store
from bursar.store import listing
from bursar.store.database import AWAY, Unavailable
from bursar.store.listing import Item, Query
from bursar.wire.document import encode, render
from bursar.wire.kind import Kind

SSE = "text/event-stream"
CATCH_UP = 1000
BOOKMARK_SECONDS = 30.0
KEEPALIVE_SECONDS = 15.0
TIMEOUT_SECONDS = 3600
INITIAL_END = "k8s.io/initial-events-end"


@dataclass(slots=True)
class Watch:
    call: Call
    kind: Kind
    query: Query
    format: str  # lines, sse, or table
    bookmarks: bool
    until: float
    seen: int = 0  # the last revision that was sent, or passed over
    columns_sent: bool = False

    @property
    def as_table(self) -> bool:
        return self.format == "table"


async def watch(call: Call, query: Query) -> Outcome:
    assert call.route.kind is not None
    accept = call.headers.get("accept", "")
    shape = "table" if wants_table(accept) else "sse" if SSE in accept else "lines"
    text = call.query.get("timeoutSeconds", "") or str(TIMEOUT_SECONDS)
    version = call.query.get("resourceVersion", "") or call.headers.get("last-event-id", "")
    for name, value in (("timeoutSeconds", text), ("resourceVersion", version or "0")):
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            return invalid(f"{name} must be a number")
    one = Watch(
        call,
        call.route.kind,
        query,
        shape,
        bookmarks=call.query.get("allowWatchBookmarks", "") in ("true", "1"),
        until=time.monotonic() + min(int(text), TIMEOUT_SECONDS),
    )
    initial = call.query.get("sendInitialEvents", "") in ("true", "1")
    start = int(version or "0")
    if start and not initial:
        if refusal := await _too_old(call, start):
            return refusal
        one.seen = start
    follower = await call.house.feed.follow(query.kind, query.namespace, one.seen or None)
    media = SSE if shape == "sse" else JSON
    return Stream(_events(one, follower, from_state=not start or initial, mark_end=initial), media)


async def _too_old(call: Call, revision: int) -> Refusal | None:
    async with call.house.database.reader() as db:
        position = await change_store.load_position(db)
    if position.floor <= revision <= position.revision:
        return None
    return expired(revision, position.floor, position.revision)


def expired(revision: int, floor: int, newest: int) -> Refusal:
    return Refusal(
        Code.GONE,
        f"too old or unknown resource version: {revision} ({floor} to {newest} can be watched from)",
        "List again, and watch from the list's resourceVersion.",
    )


async def _events(one: Watch, follower: Follower, *, from_state: bool, mark_end: bool) -> AsyncGenerator[bytes, None]:
    metrics.WATCHERS.inc()
    try:
        if from_state:
            async for piece in _current_state(one, mark_end=mark_end):
                yield piece
        async for piece in _catch_up(one, follower.after):
            yield piece
        async for piece in _follow(one, follower):
            yield piece
    except Lagging:
        metrics.WATCHERS_LET_GO.inc()
    except AWAY:
        return  # The client resumes from where it was.
    finally:
        one.call.house.feed.leave(follower)
        metrics.WATCHERS.dec()


async def _current_state(one: Watch, *, mark_end: bool) -> AsyncGenerator[bytes, None]:
    """What there is now, as ADDED events; the watch goes on from the revision of that state."""
    async with one.call.house.database.reader() as db:
        page = await listing.load_page(db, one.query)
    for item in page.items:
        yield await _piece(one, "ADDED", item)
    one.seen = page.revision
    if mark_end:
        yield _bookmark(one, {INITIAL_END: "true"})


async def _catch_up(one: Watch, until: int) -> AsyncGenerator[bytes, None]:
    """What happened between the watch's revision and the moment it joined the feed."""
    while one.seen < until:
        async with one.call.house.database.reader() as db:
            floor = (await change_store.load_position(db)).floor
            changes = await change_store.load_between(
                db, one.seen, until, one.query.kind, one.query.namespace, CATCH_UP
            )
        if one.seen < floor:
            yield _error(one, expired(one.seen, floor, until))
            raise Unavailable("compacted while catching up")
        for change in changes:
            if (piece := await _event(one, FedChange(change))) is not None:
                yield piece
            one.seen = change.revision
        if len(changes) < CATCH_UP:
            one.seen = until


async def _follow(one: Watch, follower: Follower) -> AsyncGenerator[bytes, None]:
    marked = time.monotonic()
    while (now := time.monotonic()) < one.until:
        pause = min(one.until - now, KEEPALIVE_SECONDS)
        fed = await follower.wait(pause)
        pieces = []
        for change in fed:
            if change.change.revision > one.seen:
                if (piece := await _event(one, change)) is not None:
                    pieces.append(piece)
                one.seen = change.change.revision
        if pieces:
            yield b"".join(pieces)
        elif not fed:
            if one.format == "sse":
                yield b": still here\n\n"
            elif one.bookmarks and time.monotonic() - marked > BOOKMARK_SECONDS:
                marked = time.monotonic()
                one.seen = max(one.seen, one.call.house.feed.revision)
                yield _bookmark(one, {})


# One change, as this watcher sees it.


async def _event(one: Watch, fed: FedChange) -> bytes | None:
    kind_of_event = event_type(one.query, fed, await visible(one.call, fed))
    if kind_of_event is None:
        return None
    change = fed.change
    if one.kind.name in JOINED or one.as_table:
        item = Item(change.key.namespace, change.key.name, change.tenant, change.revision, change.doc, change.status)
        return await _piece(one, kind_of_event, item)
    # The same for everybody who asked in this form: made once.
    known = fed.rendered.get((one.format, kind_of_event))
    if known is None:
        body = render(change.doc, change.status, change.revision)
        known = _wrapped(one.format, kind_of_event, body, change.revision)
        fed.rendered[one.format, kind_of_event] = known
    return known


async def visible(call: Call, fed: FedChange) -> bool:
    """Whether the caller may see the object; asked anew for each change, for trees change."""
    whose: Reach = reach(call.identity)
    tenant = fed.change.tenant
    if whose.everything or not tenant:
        return True
    if whose.node:
        return (
            fed.fields.get("spec.nodeName") == whose.node
            or (fed.before_fields or {}).get("spec.nodeName") == whose.node
        )
    tree = await call.house.tree()
    if tenant not in tree.tenants:
        tree = await call.house.tree(fresh=True)  # It may have been born through another process a moment ago.
    return whose.sees(lineage(tree, tenant)) or (whose.tenant == tenant)


def event_type(query: Query, fed: FedChange, is_visible: bool) -> str | None:
    """What a watcher with these selectors is told: leaving a selector is DELETED, entering it is ADDED."""
    if not is_visible:
        return None
    after = matches(query.labels, fed.labels) and matches_fields(query.fields, fed.fields)
    if fed.change.type == "ADDED":
        return "ADDED" if after else None
    before = matches(query.labels, fed.before_labels or {}) and matches_fields(query.fields, fed.before_fields or {})
    if fed.change.type == "DELETED":
        # How it ended may match no longer; whoever saw it before is told.
        return "DELETED" if before else None
    if after:
        return "MODIFIED" if before else "ADDED"
    return "DELETED" if before else None


async def _piece(one: Watch, kind_of_event: str, item: Item) -> bytes:
    if one.as_table:
        plain = await documents(one.call.house.database, one.kind, [item])
        body = encode(table(one.kind, plain, now_seconds=time.time(), with_columns=not one.columns_sent,
                            list_meta={"resourceVersion": str(item.revision)}))  # fmt: skip
        one.columns_sent = True
    else:
        (body,) = await show(one.call.house.database, one.kind, [item])
    return _wrapped(one.format, kind_of_event, body, item.revision)


def _wrapped(shape: str, kind_of_event: str, body: bytes, revision: int) -> bytes:
    line = b'{"type":"%s","object":%s}' % (kind_of_event.encode(), body)
    if shape == "sse":
        return b"id: %d\ndata: %s\n\n" % (revision, line)
    return line + b"\n"


def _bookmark(one: Watch, annotations: dict[str, str]) -> bytes:
    metadata: dict[str, Any] = {"resourceVersion": str(one.seen), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    body = encode({"kind": one.kind.name, "apiVersion": "v1", "metadata": metadata})
    return _wrapped(one.format, "BOOKMARK", body, one.seen)


def _error(one: Watch, refusal: Refusal) -> bytes:
    return _wrapped(one.format, "ERROR", msgspec.json.encode(body_of(refusal, one.call.request_id)), one.seen)
