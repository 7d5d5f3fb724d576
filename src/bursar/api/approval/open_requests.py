"""Undecided requests of all kinds, as a list and as a watch: one item per request at a gate that the caller sees.

The watch has the guarantees of the watches of objects (api/objects/watch.py): every change once, in commit order, from
a revision on. A request is ADDED when it reaches a gate that the caller sees, MODIFIED while it is there, and DELETED
when it is decided, passes to another gate, or ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from bursar.api.http import metrics
from bursar.api.http.route import JSON, Call, Outcome, Stream
from bursar.api.objects.watch import (
    BOOKMARK_SECONDS,
    CATCH_UP,
    INITIAL_END,
    SSE,
    STATE_PAGE,
    OpenWatch,
    Sight,
    WatchEvents,
    WatchOver,
    check_identity,
    error_piece,
    expired,
    no_seat,
    too_old,
    visibility,
    watch_options,
    wrapped,
)
from bursar.commands.objects.gate import requested_amounts
from bursar.core.objects.approval import GATE_FIELD, SINCE_FIELD
from bursar.core.objects.object import Key
from bursar.core.values.access import EVERY, Identity, Role
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.feed import READ_START, FedChange, FeedLagging, Follower, next_limit
from bursar.store.db.database import AWAY
from bursar.store.objects import approval as store
from bursar.store.objects import change as change_store
from bursar.store.objects.approval import After, OpenRequest, RequestCharge
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode, render
from bursar.wire.shared.meta import API_VERSION


class OpenApproval(msgspec.Struct, rename="camel", omit_defaults=True):
    """An undecided request: where it is decided next, and the amounts that its approval would charge."""

    kind: str
    namespace: str
    name: str
    tenant: str
    gate: str
    since: str
    requested: dict[str, str]
    object: msgspec.Raw
    gang: str = ""  # the members of a gang are decided as a set


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """The requests that a caller asked for and may see."""

    tenants: tuple[str, ...] | None  # None: all
    gates: tuple[str, ...] | None
    tenant: str = ""  # the only tenant that the caller asked for

    def covers(self, gate: str, tenant: str) -> bool:
        return bool(gate) and (self.gates is None or gate in self.gates) and self.tenant in ("", tenant)


async def filter_of(call: Call) -> RequestFilter:
    tenants = await call.context.visible_tenants(call.identity)
    wanted = call.query.get("tenant", "")
    if wanted:
        tenants = (wanted,) if tenants is None or wanted in tenants else ()
    gates = visible_gates(call.identity)
    if gate := call.query.get("gate", ""):
        gates = (gate,) if gates is None or gate in gates else ()
    return RequestFilter(tenants, gates, wanted)


def visible_gates(identity: Identity) -> tuple[str, ...] | None:
    """The gates whose requests an identity sees: its own, for approvers of some gates only; None for all."""
    return identity.gates if identity.role is Role.APPROVER and EVERY not in identity.gates else None


def shown(one: OpenRequest) -> OpenApproval:
    body = render(one.doc, one.status, one.revision)
    return OpenApproval(
        *one.key, one.tenant, one.gate, one.since, _requested(one.key, one.doc, RequestCharge(one.charge, one.gang)),
        msgspec.Raw(body), one.gang,
    )  # fmt: skip


def _requested(key: Key, doc: bytes, charge: RequestCharge | None) -> dict[str, str]:
    if charge is None:
        return {}
    amounts = requested_amounts(BY_NAME[key.kind], doc, charge.charge)
    return {name: format_amount(name, value) for name, value in sorted(amounts.items())}


# The watch.

_GATE = GATE_FIELD.encode()


class _AtGates(Follower):
    """A follower of requests: it gets only changes of objects that are at a gate, or were before."""

    def offer(self, fed: FedChange) -> None:
        # The raw fields are searched, because most changes are of other objects and need not be decoded.
        if _GATE in fed.change.fields or _GATE in (fed.change.before_fields or b""):
            super().offer(fed)


@dataclass(slots=True, kw_only=True)
class _RequestWatch(OpenWatch):
    wanted: RequestFilter
    shape: str
    bookmarks: bool
    seen: int = 0

    async def join(self, after: int) -> Follower:
        return await self.call.context.feed.join(lambda at: _AtGates("", "", at), after)

    def bookmark(self, annotations: dict[str, str]) -> bytes:
        metadata = {"resourceVersion": str(self.seen), **({"annotations": annotations} if annotations else {})}
        return wrapped(self.shape, "BOOKMARK", encode({"kind": "Approval", "metadata": metadata}), self.seen)


async def watch_open(call: Call) -> Outcome:
    if refusal := no_seat(call):
        return refusal
    options = watch_options(call)
    if isinstance(options, Refusal):
        return options
    wanted = await filter_of(call)
    one = _RequestWatch(call=call, wanted=wanted, shape=options.shape, bookmarks=options.bookmarks, until=options.until)
    from_state = not options.start or options.initial
    if not from_state:
        if refusal := await too_old(call, options.start):
            return refusal
        one.seen = options.start
        one.follower = await one.join(options.start)
    if refusal := no_seat(call):  # Other watches may have taken the seats meanwhile.
        if one.follower is not None:
            call.context.feed.leave(one.follower)
        return refusal
    pieces = _events(one, from_state=from_state, mark_end=options.initial)
    return Stream(WatchEvents(one, pieces), SSE if one.shape == "sse" else JSON)


async def _events(one: _RequestWatch, *, from_state: bool, mark_end: bool) -> AsyncGenerator[bytes, None]:
    try:
        if from_state:
            async for piece in _current_state(one):
                yield piece
            if mark_end:
                yield one.bookmark({INITIAL_END: "true"})
        if one.follower is None:
            one.follower = await one.join(one.seen)
        async for piece in _catch_up(one, one.follower.after):
            yield piece
        async for piece in _follow(one, one.follower):
            yield piece
    except WatchOver as over:
        if over.refusal is not None:
            yield error_piece(one.shape, over.refusal, one.call.request_id, one.seen)
    except FeedLagging:
        metrics.WATCHERS_LET_GO.inc()
    except AWAY:
        return  # The client resumes from its last revision.


async def _current_state(one: _RequestWatch) -> AsyncGenerator[bytes, None]:
    """Send the open requests as ADDED events. The watch continues from a revision before that state: a change while
    the pages are read is in both, or only in the changes that follow."""
    context, after = one.call.context, After()
    async with context.database.reader() as db:
        one.seen = (await change_store.load_position(db)).revision
    while True:
        async with context.states.taken(one.call.identity), context.database.reader() as db:
            page = await store.list_open(db, one.wanted.tenants, one.wanted.gates, after, STATE_PAGE)
        if page:
            # Without a revision to resume from: a client that loses the connection here begins again.
            yield b"".join(wrapped(one.shape, "ADDED", encode(shown(each)), 0) for each in page)
            await check_identity(one)
        if len(page) < STATE_PAGE:
            return
        after = After(page[-1].since, *page[-1].key)


async def _catch_up(one: _RequestWatch, until: int) -> AsyncGenerator[bytes, None]:
    """Send the changes between the watch's revision and the moment it joined the feed."""
    limit = min(READ_START, CATCH_UP)
    while one.seen < until:
        await check_identity(one)
        async with one.call.context.database.reader() as db:
            changes = await change_store.load_with_field(db, one.seen, until, GATE_FIELD, limit)
            # Read after the changes: the floor rises before changes are dropped, so nothing above it was missing.
            floor = (await change_store.load_position(db)).floor
        if one.seen < floor:
            raise WatchOver(expired(one.seen))
        if piece := await _pieces(one, [FedChange(change) for change in changes]):
            yield piece
        one.seen = changes[-1].revision if len(changes) == limit else until
        limit = next_limit(limit, changes, CATCH_UP)


async def _follow(one: _RequestWatch, follower: Follower) -> AsyncGenerator[bytes, None]:
    marked = time.monotonic()
    while time.monotonic() < one.until:
        fed = await follower.wait(one.pause_seconds())
        handed_out = one.call.context.feed.revision  # before anything is awaited: later changes are in the queue
        await check_identity(one)
        fresh = [each for each in fed if each.change.revision > one.seen]
        if piece := await _pieces(one, fresh):
            yield piece
        one.seen = max(one.seen, handed_out)
        if not fed and one.shape == "sse":
            yield b": still here\n\n"
        elif not fed and one.bookmarks and time.monotonic() - marked > BOOKMARK_SECONDS:
            marked = time.monotonic()
            yield one.bookmark({})


async def _pieces(one: _RequestWatch, changes: Sequence[FedChange]) -> bytes:
    """The events of some changes, as this caller sees them."""
    told = [(each, *event) for each in changes if (event := _event(one, each, await visibility(one.call, each)))]
    if not told:
        return b""
    async with one.call.context.database.reader() as db:
        charges = await store.load_charges(db, {each.change.key for each, _, hidden in told if not hidden})
    return b"".join(
        wrapped(one.shape, type_, encode(_gone(each) if hidden else _changed(each, type_, charges)), _revision(each))
        for each, type_, hidden in told
    )


def _event(one: _RequestWatch, fed: FedChange, sight: Sight) -> tuple[str, bool] | None:
    """The event of a change, and whether the caller does not see the request any more; None for none."""
    change = fed.change
    was = fed.before_fields or {}
    before_tenant = change.tenant if change.before_tenant is None else change.before_tenant
    before = change.type != "ADDED" and sight.before and one.wanted.covers(was.get(GATE_FIELD, ""), before_tenant)
    after = change.type != "DELETED" and sight.after and one.wanted.covers(_gate(fed), change.tenant)
    if not before and not after:
        return None
    hidden = not sight.after and change.type != "DELETED"
    return ("MODIFIED" if before else "ADDED") if after else "DELETED", hidden


def _gate(fed: FedChange) -> str:
    return fed.fields.get(GATE_FIELD, "")


def _revision(fed: FedChange) -> int:
    return fed.change.revision


def _changed(fed: FedChange, type_: str, charges: dict[Key, RequestCharge]) -> OpenApproval:
    change = fed.change
    fields = fed.fields if type_ != "DELETED" else fed.before_fields or {}
    charge = charges.get(change.key) if type_ != "DELETED" else None
    return OpenApproval(
        *change.key, change.tenant, fields.get(GATE_FIELD, ""), fields.get(SINCE_FIELD, ""),
        _requested(change.key, change.doc, charge), msgspec.Raw(render(change.doc, change.status, change.revision)),
        charge.gang if charge is not None else "",
    )  # fmt: skip


def _gone(fed: FedChange) -> OpenApproval:
    """The identifying fields of a request, sent to a caller who does not see it any more."""
    change, key = fed.change, fed.change.key
    metadata = {
        "name": key.name, "namespace": key.namespace, "uid": change.uid, "resourceVersion": str(change.revision),
    }  # fmt: skip
    body = encode({"apiVersion": API_VERSION, "kind": key.kind, "metadata": metadata})
    was = fed.before_fields or {}
    return OpenApproval(*key, "", was.get(GATE_FIELD, ""), was.get(SINCE_FIELD, ""), {}, msgspec.Raw(body))
