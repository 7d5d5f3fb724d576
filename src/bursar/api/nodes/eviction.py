"""Evictions: the notices that nodes receive, and the eviction subresource of Kubernetes clients.

A notice is state: it is in the status of an allocation until its nodes have confirmed its end. A node that connects
gets all open notices first, and then new ones; receiving one twice has no further effect.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bursar.api.http import metrics
from bursar.api.http.action import faulty, grace_faults
from bursar.api.http.body import dry_run, read_document
from bursar.api.http.problem import body_of
from bursar.api.http.route import JSON, Answer, Call, Outcome, Stream
from bursar.api.nodes.node import others_node
from bursar.api.objects.object import find, key_of, kind_of
from bursar.api.objects.watch import (
    SSE,
    TIMEOUT_SECONDS,
    Watch,
    WatchEvents,
    WatchOver,
    check_identity,
    no_seat,
)
from bursar.api.workloads.pod import find_pod, pod_not_found, pod_uid
from bursar.commands.objects.status import status_of
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Code, Refusal, field_fault, invalid
from bursar.core.values.selector import parse_fields
from bursar.ops.runtime.feed import FedChange, FeedLagging
from bursar.ops.scheduling import placement as ops
from bursar.store.db.database import AWAY
from bursar.store.objects import listing
from bursar.store.objects.listing import Query
from bursar.wire.shared.document import encode
from bursar.wire.shared.meta import ObjectMeta
from bursar.wire.shared.reading import without_nulls

GRACE_SECONDS = 30

_TERMINATING = parse_fields("status.phase=Terminating", ("status.phase",))


class EvictionEvent(msgspec.Struct, rename="camel"):
    """An eviction notice to a node: the allocation, the reason and the deadline."""

    type: str
    namespace: str
    allocation: str
    uid: str
    reason: str
    grace_period_seconds: int
    deadline: str


class EvictionList(msgspec.Struct, rename="camel"):
    kind: str
    api_version: str
    metadata: dict[str, str]
    items: list[EvictionEvent]


class _Identity(msgspec.Struct):
    uid: str = ""


class _Document(msgspec.Struct):
    metadata: _Identity


class _Place(msgspec.Struct):
    name: str
    phase: str = ""


class _Told(msgspec.Struct, rename="camel"):
    message: str
    grace_period_seconds: int
    deadline: str


class _Status(msgspec.Struct):
    """The part of an allocation's status that a notice needs."""

    nodes: list[_Place] = []
    eviction: _Told | None = None


_decode_status = msgspec.json.Decoder(_Status).decode
_decode_document = msgspec.json.Decoder(_Document).decode


# Notices of a node.


async def list_or_watch(call: Call) -> Outcome:
    """List the open notices of a node; with watch=true, stream new ones as well."""
    if refusal := others_node(call):
        return refusal
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    if call.query.get("watch", "") in ("true", "1"):
        return _watch(call, found.key.name)
    notices, revision = await _open(call, found.key.name)
    meta = {"resourceVersion": str(revision)}
    return Answer(200, encode(EvictionList("EvictionList", "v1", meta, notices)))


async def _open(call: Call, node: str) -> tuple[list[EvictionEvent], int]:
    query = Query("Allocation", node=node, fields=_TERMINATING)
    async with call.context.database.reader() as db:
        page = await listing.load_page(db, query)
    found = [
        notice_of(Key("Allocation", one.namespace, one.name), one.doc, one.status, node=node) for one in page.items
    ]
    return [one for one in found if one is not None], page.revision


def notice_of(key: Key, doc: bytes, status: bytes, *, node: str) -> EvictionEvent | None:
    """The notice of an allocation for a node; None if there is none, or it has already ended there."""
    read = _decode_status(status)
    notice = read.eviction
    if notice is None or not any(place.name == node and not place.phase for place in read.nodes):
        return None
    uid = _decode_document(doc).metadata.uid
    return EvictionEvent(
        "EVICTION", key.namespace, key.name, uid, notice.message, notice.grace_period_seconds, notice.deadline
    )


@dataclass(slots=True)
class _Listener:
    """A watch of notices, with the notices already sent: deadlines by uid."""

    watch: Watch
    node: str
    sent: dict[str, str] = field(default_factory=dict)

    def news(self, change: FedChange) -> EvictionEvent | None:
        one = change.change
        if change.fields.get("status.phase") != "Terminating" or one.type == "DELETED":
            self.sent.pop(one.uid, None)
            return None
        notice = notice_of(one.key, one.doc, one.status, node=self.node)
        return notice if notice is not None and self.is_new(notice) else None

    def is_new(self, notice: EvictionEvent) -> bool:
        if self.sent.get(notice.uid) == notice.deadline:
            return False
        self.sent[notice.uid] = notice.deadline
        return True

    def wrapped(self, line: bytes, revision: int) -> bytes:
        return b"id: %d\ndata: %s\n\n" % (revision, line) if self.watch.format == "sse" else line + b"\n"


def _watch(call: Call, node: str) -> Outcome:
    if refusal := no_seat(call):
        return refusal
    text = call.query.get("timeoutSeconds", "") or str(TIMEOUT_SECONDS)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        return invalid("timeoutSeconds must be a number")
    shape = "sse" if SSE in call.headers.get("accept", "") else "lines"
    until = time.monotonic() + min(int(text), TIMEOUT_SECONDS)
    one = Watch(
        call=call, kind=kind_of(call), query=Query("Allocation", node=node), format=shape, bookmarks=False, until=until
    )
    return Stream(WatchEvents(one, _notices(_Listener(one, node))), SSE if shape == "sse" else JSON)


async def _notices(listener: _Listener) -> AsyncGenerator[bytes, None]:
    one = listener.watch
    feed = one.call.context.feed
    try:
        # Subscribe before reading the open notices: a notice given between the two is in both.
        one.follower = await feed.follow("Allocation")
        notices, one.seen = await _open(one.call, listener.node)
        for notice in notices:
            listener.is_new(notice)
            yield listener.wrapped(encode(notice), one.seen)
        while time.monotonic() < one.until:
            changes = await one.follower.wait(one.pause_seconds())
            await check_identity(one)
            for change in changes:
                revision = change.change.revision
                if revision > one.seen and (news := listener.news(change)) is not None:
                    yield listener.wrapped(encode(news), revision)
                one.seen = max(one.seen, revision)
            if not changes and one.format == "sse":
                yield b": still here\n\n"
    except WatchOver as over:
        if over.refusal is not None:
            error = {"type": "ERROR", "object": body_of(over.refusal, one.call.request_id)}
            yield listener.wrapped(encode(error), one.seen)
    except FeedLagging:
        metrics.WATCHERS_LET_GO.inc()
    except AWAY:
        return  # The node reconnects, and gets the open notices first.


# The eviction subresource.


class Preconditions(msgspec.Struct, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class EvictionOptions(msgspec.Struct, rename="camel"):
    grace_period_seconds: int | None = None
    preconditions: Preconditions = msgspec.field(default_factory=Preconditions)
    dry_run: list[str] = []


class Eviction(msgspec.Struct, rename="camel"):
    """Kubernetes' policy/v1 Eviction."""

    api_version: str = "policy/v1"
    kind: str = "Eviction"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    delete_options: EvictionOptions = msgspec.field(default_factory=EvictionOptions)


async def evict_pod(call: Call) -> Outcome:
    """Evict the allocation of a pod; it is pending again, and placed elsewhere if its node is cordoned."""
    document, dry = read_document(call) if call.body else {}, dry_run(call)
    if isinstance(document, Refusal):
        return document
    if isinstance(dry, Refusal):
        return dry
    try:
        wanted = msgspec.convert(without_nulls(document), Eviction)
    except msgspec.ValidationError as error:
        return invalid(f"the eviction is invalid: {error}")
    name, options = call.parameters["name"], wanted.delete_options
    if (wanted.metadata.name or name) != name:
        return invalid("the eviction names another pod than the path", field_fault("metadata.name", f"must be {name}"))
    grace = GRACE_SECONDS if options.grace_period_seconds is None else options.grace_period_seconds
    if causes := grace_faults(grace):
        return faulty("eviction", causes)
    found = await find_pod(call)
    if isinstance(found, Refusal):
        return found
    if refusal := _another_pod(found, options.preconditions):
        return refusal
    actor = call.identity.actor
    notice = Notice(EvictionReason.EVICTED, EvictionRule.DRAIN, actor, f"Evicted by {actor}", grace)
    reply = await ops.evict(
        call.context.runtime, found, notice, Origin(actor, "evict"), dry_run=dry or "All" in options.dry_run
    )
    if isinstance(reply, Refusal):
        # A pod that has ended meanwhile cannot be evicted any more, which is all that the caller wanted.
        return pod_not_found(name) if reply.code is Code.STALE else reply
    success: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
    return Answer(201, encode(success))


def _another_pod(found: Stored, wanted: Preconditions) -> Refusal | None:
    uid = pod_uid(found.uid, status_of(found))
    if wanted.uid not in ("", uid):
        return Refusal(Code.CONFLICT, f"the pod's uid is {uid}, not {wanted.uid}", "Read the pod again.")
    if wanted.resource_version not in ("", str(found.revision)):
        return Refusal(Code.CONFLICT, f"the pod's resourceVersion is {found.revision}", "Read the pod again.")
    return None
