"""Watches: every change once, in commit order, from a revision on.

A watch joins the process's feed first, and then reads the changes between its revision and that point from the
database, so that none is missed. Changes are rendered once per format and shared by all watchers. A slow watcher is
disconnected: it resumes from the last revision it saw. Each watch is authenticated again periodically.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from bursar.api.http import metrics
from bursar.api.http.problem import body_of
from bursar.api.http.route import JSON, Call, Outcome, Stream
from bursar.api.http.seats import party
from bursar.api.http.spool import SpoolFull
from bursar.api.objects.figures import JOINS
from bursar.api.objects.render import conceals, rows, show
from bursar.api.objects.table import table, wants_table
from bursar.core.quota.tenant_tree import is_current, saw
from bursar.core.values.access import Reach, reach
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.core.values.selector import matches, matches_fields
from bursar.ops.runtime.feed import READ_START, FedChange, FeedLagging, Follower, next_limit
from bursar.store.db.database import AWAY
from bursar.store.objects import change as change_store
from bursar.store.objects import listing
from bursar.store.objects.change import Change
from bursar.store.objects.listing import ListedObject, Query
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import EMPTY, encode, render
from bursar.wire.shared.kind import Kind

SSE = "text/event-stream"
CATCH_UP = 1000
BOOKMARK_SECONDS = 30.0
KEEPALIVE_SECONDS = 15.0
# A watch begins with an identity of up to two seconds ago, and authenticates again when that has passed. From then on
# a change of its credentials recalls it.
FIRST_CHECK_SECONDS = 3.0
TIMEOUT_SECONDS = 3600
WATCHES_PER_TENANT_MAX = 1000
WATCHES_MAX = 20_000
STATE_PAGE = 200
INITIAL_END = "k8s.io/initial-events-end"


@dataclass(slots=True, kw_only=True)
class OpenWatch:
    """A watch as its seat and its periodic authentication see it, whatever it sends."""

    call: Call
    until: float
    follower: Follower | None = None
    check_seconds: float = field(default_factory=lambda: KEEPALIVE_SECONDS)  # between authentications
    check_at: float = field(default_factory=lambda: time.monotonic() + min(FIRST_CHECK_SECONDS, KEEPALIVE_SECONDS))

    def recall(self) -> None:
        """Authenticate the caller again now."""
        self.check_at = 0.0
        if self.follower is not None:
            self.follower.wake()

    def pause_seconds(self) -> float:
        """How long to wait for changes before the caller is authenticated again, or the watch ends."""
        now = time.monotonic()
        return max(0.0, min(self.until - now, self.check_at - now, KEEPALIVE_SECONDS))


@dataclass(slots=True, kw_only=True)
class Watch(OpenWatch):
    kind: Kind
    query: Query
    format: str  # lines, sse, or table
    bookmarks: bool
    seen: int = 0  # the last revision that was sent or skipped
    columns_sent: bool = False

    @property
    def as_table(self) -> bool:
        return self.format == "table"


class WatchOver(Exception):
    """The watch ends here; the watcher gets the reason."""

    def __init__(self, refusal: Refusal | None) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class WatchEvents:
    """The pieces of a watch. Its seat is released at the end, also if reading never begins."""

    def __init__(self, one: OpenWatch, pieces: AsyncGenerator[bytes, None]) -> None:
        self._one = one
        self._pieces = pieces
        self._seat = party(one.call.identity)
        self._taken = True
        self._recall = one.recall
        one.call.context.watches[self._seat] += 1
        one.call.context.streams.add(one.call.identity, self._recall)
        metrics.WATCHERS.inc()

    def __aiter__(self) -> WatchEvents:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except BaseException:
            self._give_back()
            raise

    async def aclose(self) -> None:
        try:
            await self._pieces.aclose()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if not self._taken:
            return
        self._taken = False
        context = self._one.call.context
        context.streams.remove(self._one.call.identity, self._recall)
        context.watches[self._seat] -= 1
        if not context.watches[self._seat]:
            del context.watches[self._seat]
        if self._one.follower is not None:
            context.feed.leave(self._one.follower)
        metrics.WATCHERS.dec()


async def watch(call: Call, query: Query) -> Outcome:
    assert call.route.kind is not None
    if refusal := no_seat(call):
        return refusal
    options = watch_options(call)
    if isinstance(options, Refusal):
        return options
    shape = "table" if wants_table(call.headers.get("accept", "")) else options.shape
    one = Watch(
        call=call, kind=call.route.kind, query=query, format=shape, bookmarks=options.bookmarks, until=options.until
    )
    start, initial = options.start, options.initial
    if start and not initial:
        if refusal := await too_old(call, start):
            return refusal
        one.seen = start
        one.follower = await call.context.feed.follow(query.kind, query.namespace, start)
    if refusal := no_seat(call):  # Other watches may have taken the seats meanwhile.
        if one.follower is not None:
            call.context.feed.leave(one.follower)
        return refusal
    media = SSE if shape == "sse" else JSON
    return Stream(WatchEvents(one, _events(one, from_state=not start or initial, mark_end=initial)), media)


class WatchOptions(NamedTuple):
    """The options of a watch, from its query and headers."""

    shape: str  # lines or sse
    start: int  # the revision to watch from; 0 for none
    initial: bool  # begin with the current state although a revision is given
    bookmarks: bool
    until: float


def watch_options(call: Call) -> WatchOptions | Refusal:
    text = call.query.get("timeoutSeconds", "") or str(TIMEOUT_SECONDS)
    version = call.query.get("resourceVersion", "") or call.headers.get("last-event-id", "")
    for name, value in (("timeoutSeconds", text), ("resourceVersion", version or "0")):
        if not (value.isascii() and value.isdigit() and len(value) <= 18):
            return invalid(f"{name} must be a number")
    return WatchOptions(
        "sse" if SSE in call.headers.get("accept", "") else "lines",
        int(version or "0"),
        call.query.get("sendInitialEvents", "") in ("true", "1"),
        call.query.get("allowWatchBookmarks", "") in ("true", "1"),
        time.monotonic() + min(int(text), TIMEOUT_SECONDS),
    )


def is_watch(call: Call) -> bool:
    return call.query.get("watch", "") in ("true", "1")


def no_seat(call: Call) -> Refusal | None:
    """Refuse a watch beyond the limits, in total or per tenant: every watch holds memory while it lasts."""
    watches, hint = call.context.watches, "End watches that are not needed, or retry later."
    if watches[party(call.identity)] >= WATCHES_PER_TENANT_MAX:
        message = f"you have {WATCHES_PER_TENANT_MAX} open watches here, the maximum"
        return Refusal(Code.RATE_LIMITED, message, hint, retry_after_seconds=10)
    if watches.total() >= WATCHES_MAX:
        return Refusal(
            Code.OVERLOADED, f"{WATCHES_MAX} watches are open here, the maximum", hint, retry_after_seconds=10
        )
    return None


async def too_old(call: Call, revision: int) -> Refusal | None:
    async with call.context.database.reader() as db:
        position = await change_store.load_position(db)
    if position.floor <= revision <= position.revision:
        return None
    return expired(revision)


def expired(revision: int) -> Refusal:
    return Refusal(
        Code.GONE,
        f"too old or unknown resource version: {revision}",
        "List again, and watch from the list's resourceVersion.",
    )


async def _events(one: Watch, *, from_state: bool, mark_end: bool) -> AsyncGenerator[bytes, None]:
    try:
        if from_state:
            async with aclosing(_current_state(one, mark_end=mark_end)) as pieces:
                async for piece in pieces:
                    yield piece
        if one.follower is None:
            # Join the feed only now: changes while the state was sent are read when catching up.
            one.follower = await one.call.context.feed.follow(one.query.kind, one.query.namespace, one.seen)
        async for piece in _catch_up(one, one.follower.after):
            yield piece
        async for piece in _follow(one, one.follower):
            yield piece
    except WatchOver as over:
        if over.refusal is not None:
            yield _error(one, over.refusal)
    except FeedLagging:
        metrics.WATCHERS_LET_GO.inc()
    except AWAY:
        return  # The client resumes from its last revision.


async def check_identity(one: OpenWatch) -> None:
    """End the watch of a caller who is no longer authorized. While the database is away, no watch is ended."""
    now = time.monotonic()
    if now < one.check_at:
        return
    # While the database is away, it is asked again soon.
    one.check_at = now + min(FIRST_CHECK_SECONDS, one.check_seconds)
    try:
        identity = await one.call.context.authenticate(one.call.headers)
    except AWAY:
        return
    if one.check_at > now:
        one.check_at = now + one.check_seconds
    if isinstance(identity, Refusal):
        raise WatchOver(identity)
    if identity != one.call.identity:
        raise WatchOver(None)  # The identity has changed: visibility is resolved on reconnect.


async def _current_state(one: Watch, *, mark_end: bool) -> AsyncGenerator[bytes, None]:
    """Send the current objects as ADDED events; the watch continues from the revision of that state."""
    context = one.call.context
    spool = context.spools.open(party(one.call.identity))
    try:
        # Spooled before anything is sent, so that a slow client holds no seat and no connection.
        async with (
            context.states.taken(one.call.identity),
            context.database.reader() as db,
            aclosing(listing.load_all(db, one.query, STATE_PAGE)) as pages,
        ):
            async for page in pages:
                revision = page.revision
                if page.items:
                    await spool.write(b"".join(await _rendered(one, "ADDED", page.items)))
        async with aclosing(spool.read()) as pieces:
            async for piece in pieces:
                yield piece
                await check_identity(one)
    except SpoolFull as full:
        raise WatchOver(full.refusal) from None
    finally:
        spool.close()
    one.seen = revision
    if mark_end:
        yield _bookmark(one, {INITIAL_END: "true"})


async def _catch_up(one: Watch, until: int) -> AsyncGenerator[bytes, None]:
    """Send the changes between the watch's revision and the moment it joined the feed."""
    limit = min(READ_START, CATCH_UP)
    while one.seen < until:
        await check_identity(one)
        async with one.call.context.database.reader() as db:
            changes = await change_store.load_between(db, one.seen, until, one.query.kind, one.query.namespace, limit)
            # Read after the changes: the floor rises before changes are dropped, so nothing above it was missing.
            floor = (await change_store.load_position(db)).floor
        if one.seen < floor:
            raise WatchOver(expired(one.seen))
        for change in changes:
            if (piece := await _event(one, FedChange(change))) is not None:
                yield piece
            one.seen = change.revision
        if len(changes) < limit:
            one.seen = until
        limit = next_limit(limit, changes, CATCH_UP)


async def _follow(one: Watch, follower: Follower) -> AsyncGenerator[bytes, None]:
    marked = time.monotonic()
    while time.monotonic() < one.until:
        fed = await follower.wait(one.pause_seconds())
        handed_out = one.call.context.feed.revision  # before anything is awaited: later changes are in the queue
        await check_identity(one)
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
                one.seen = max(one.seen, handed_out)
                yield _bookmark(one, {})


# One change, as this watcher sees it.


async def _event(one: Watch, fed: FedChange) -> bytes | None:
    sight = await visibility(one.call, fed)
    kind_of_event = event_type(one.query, fed, sight)
    if kind_of_event is None:
        return None
    change = fed.change
    is_hidden = not sight.after and change.type != "DELETED" and not one.call.identity.node
    if is_hidden or one.kind.name in JOINS or one.as_table or conceals(one.kind, one.call.identity):
        (piece,) = await _rendered(one, kind_of_event, [_gone(change) if is_hidden else _item(change)])
        return piece
    # Rendered once for all watchers of this format.
    known = fed.rendered.get((one.format, kind_of_event))
    if known is None:
        body = render(change.doc, change.status, change.revision)
        known = wrapped(one.format, kind_of_event, body, change.revision)
        fed.rendered[one.format, kind_of_event] = known
    return known


class Sight(NamedTuple):
    """Whether the caller may see an object as it was before a change, and as it is after it."""

    before: bool
    after: bool


async def visibility(call: Call, fed: FedChange) -> Sight:
    """Resolve the visibility of each change, because the tree changes."""
    whose: Reach = reach(call.identity)
    tenant, before = fed.change.tenant, fed.change.before_tenant
    if whose.everything or not tenant:
        return Sight(True, True)
    if whose.node:
        return Sight(whose.sees_bound(fed.before_nodes), whose.sees_bound(fed.nodes))
    after = await _saw(call, whose, tenant, fed.change.revision)
    return Sight(after if before in (None, tenant) else await _saw(call, whose, before, fed.change.revision), after)


async def _saw(call: Call, whose: Reach, tenant: str, revision: int) -> bool:
    tree = await call.context.tree_for(whose)
    if tenant not in tree.tenants:
        tree = await call.context.tree(fresh=True)  # Another process may have created the tenant just now.
    if not is_current(tree, whose):
        raise WatchOver(None)  # The caller's tenant was deleted, and another one has its name.
    return saw(tree, whose, tenant, revision)


def event_type(query: Query, fed: FedChange, sight: Sight) -> str | None:
    """The event of a watcher: an object that leaves its selectors or visibility is DELETED, a new one is ADDED."""
    type_ = fed.change.type
    before = (
        type_ != "ADDED"
        and sight.before
        and matches(query.labels, fed.before_labels or {})
        and matches_fields(query.fields, fed.before_fields or {})
    )
    after = (
        type_ != "DELETED"
        and sight.after
        and matches(query.labels, fed.labels)
        and matches_fields(query.fields, fed.fields)
    )
    if after:
        return "MODIFIED" if before else "ADDED"
    return "DELETED" if before else None


def _item(change: Change) -> ListedObject:
    key = change.key
    return ListedObject(key.namespace, key.name, change.tenant, change.revision, change.doc, change.status)


def _gone(change: Change) -> ListedObject:
    """The identifying fields of an object, sent to a watcher who does not see it any more."""
    key = change.key
    metadata = {"name": key.name, "uid": change.uid, **({"namespace": key.namespace} if key.namespace else {})}
    doc = encode({"apiVersion": BY_NAME[key.kind].api_version, "kind": key.kind, "metadata": metadata})
    return ListedObject(key.namespace, key.name, "", change.revision, doc, EMPTY)


async def _rendered(one: Watch, kind_of_event: str, items: Sequence[ListedObject]) -> list[bytes]:
    if one.as_table:
        bodies = [
            _row(one, item, plain)
            for item, plain in zip(items, await rows(one.call.context, one.kind, items, one.call.identity), strict=True)
        ]
    else:
        bodies = await show(one.call.context, one.kind, items, one.call.identity)
    return [wrapped(one.format, kind_of_event, body, item.revision) for item, body in zip(items, bodies, strict=True)]


def _row(one: Watch, item: ListedObject, plain: dict[str, Any]) -> bytes:
    meta = {"resourceVersion": str(item.revision)}
    body = encode(table(one.kind, [plain], now_seconds=time.time(), with_columns=not one.columns_sent, list_meta=meta))
    one.columns_sent = True
    return body


def wrapped(shape: str, kind_of_event: str, body: bytes, revision: int) -> bytes:
    """An event as a line of JSON, or as a Server-Sent Event."""
    line = b'{"type":"%s","object":%s}' % (kind_of_event.encode(), body)
    if shape == "sse":
        return b"id: %d\ndata: %s\n\n" % (revision, line)
    return line + b"\n"


def _bookmark(one: Watch, annotations: dict[str, str]) -> bytes:
    metadata: dict[str, Any] = {"resourceVersion": str(one.seen), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    body = encode({"kind": one.kind.name, "apiVersion": "v1", "metadata": metadata})
    return wrapped(one.format, "BOOKMARK", body, one.seen)


def _error(one: Watch, refusal: Refusal) -> bytes:
    return error_piece(one.format, refusal, one.call.request_id, one.seen)


def error_piece(shape: str, refusal: Refusal, request_id: str, revision: int) -> bytes:
    """The last event of a watch that the server ends."""
    return wrapped(shape, "ERROR", msgspec.json.encode(body_of(refusal, request_id)), revision)
