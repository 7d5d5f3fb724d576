"""Logs: the output of an allocation, read from the node that keeps it, by our own API and by that of Kubernetes.

The node is asked before the response begins, so an unreadable log is an ordinary refusal. Bytes are numbered from the
first one on: a response has the offset of its first byte, so a client that counts can resume where one broke off.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from bursar.api.http.route import BrokenOff, Call, Outcome, Param, Stream
from bursar.api.objects.object import find, key_of
from bursar.api.objects.watch import Watch, WatchEvents, WatchOver, check_identity, no_seat
from bursar.api.workloads.pod import find_pod
from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.objects.object import Stored
from bursar.core.values.refusal import Cause, Code, Refusal, invalid
from bursar.ops.workloads.log_source import LogCut, LogReading, LogSource, OutputPiece
from bursar.store.objects import change as change_store
from bursar.store.objects.listing import Query
from bursar.wire.kinds.allocation import ALLOCATION

CONTAINER = "allocation"  # the name of the only container of a pod
TEXT = "text/plain; charset=utf-8"
NUMBER_DIGITS_MAX = 18
# More often than watches, which the change feed recalls when credentials change.
CHECK_SECONDS = 2.0

FOLLOW = Param("follow", "true: stream further output until the allocation ends.", "boolean")
TAIL = Param("tailLines", "Number of lines from the end.", "integer")
PARAMS = (
    FOLLOW,
    TAIL,
    Param("node", "The node; default: the first one of the allocation."),
    Param("epoch", "Placement number; default: the latest.", "integer"),
    Param("offset", "Number of the first byte.", "integer"),
    Param("limitBytes", "Maximum number of bytes.", "integer"),
)
POD_PARAMS = (FOLLOW, TAIL, Param("limitBytes", "Maximum number of bytes.", "integer"))
# Parameters of Kubernetes for which nodes keep no data.
NOT_KEPT = {
    "previous": "only the latest placement's log is found without parameters: name an earlier one with node and epoch",
    "sinceSeconds": "nodes do not keep when a line was written; tailLines and limitBytes bound what is read",
    "sinceTime": "nodes do not keep when a line was written; tailLines and limitBytes bound what is read",
    "timestamps": "nodes do not keep when a line was written",
}


class _Place(msgspec.Struct):
    name: str


class _Status(msgspec.Struct):
    """The part of an allocation's status that locates its log."""

    phase: str = Phase.PENDING
    reason: str = ""
    message: str = ""
    epoch: int = 0
    nodes: list[_Place] = []


class _Spec(msgspec.Struct):
    command: list[str] = []


class _Document(msgspec.Struct):
    spec: _Spec


_decode_status = msgspec.json.Decoder(_Status).decode
_decode_document = msgspec.json.Decoder(_Document).decode


@dataclass(frozen=True, slots=True)
class LogRequest:
    """The parameters of a log request. Readers with an offset count bytes, so gaps must be visible to them."""

    follow: bool = False
    tail_lines: int | None = None
    node: str = ""
    epoch: int = 0
    offset: int | None = None
    limit_bytes: float = math.inf


async def read_log(call: Call) -> Outcome:
    found = await find(call, key_of(call))
    return found if isinstance(found, Refusal) else await _read(call, found)


async def read_pod_log(call: Call) -> Outcome:
    """Read a log for `kubectl logs`. A role that may see pods but not the logs of allocations is refused."""
    if not call.context.policy.allows(call.identity, "get", "allocations", "log"):
        message = f"role {call.identity.role} may not get allocations/log"
        return Refusal(Code.FORBIDDEN, message, "docs/security.md has the table of what each role may do.")
    container = call.query.get("container", "") or CONTAINER
    if container != CONTAINER:
        return invalid(f"container {container} is not valid for pod {call.parameters['name']}",
                       hint=f"There is one, and it is called {CONTAINER}.")  # fmt: skip
    found = await find_pod(call)
    return found if isinstance(found, Refusal) else await _read(call, found)


async def _read(call: Call, found: Stored) -> Outcome:
    asked = _asked(call.query)
    if isinstance(asked, Refusal):
        return asked
    status = _decode_status(found.status)
    place = _place(found, status, asked)
    if isinstance(place, Refusal):
        return place
    node, epoch = place
    if epoch != status.epoch and not await _was_there(call, found, node, epoch):
        return Refusal(
            Code.GONE, f"{found.key.name} was not on node {node[:64]!r} with epoch {epoch}, or that is long ago"
        )
    if refusal := no_seat(call):
        return refusal
    output = await _open(call, node, found, epoch, asked)
    if isinstance(output, Refusal):
        return output
    if output is None:
        return _nothing_kept(found.key.name, node, status, asked)
    watch = Watch(
        call=call,
        kind=ALLOCATION,
        query=Query("Allocation"),
        format="lines",
        bookmarks=False,
        until=math.inf,
        check_seconds=CHECK_SECONDS,
    )
    pieces = _Pieces(watch, output, asked)
    headers = {
        "X-Log-Node": node,
        "X-Log-Epoch": str(epoch),
        "X-Log-Offset": str(output.offset),
        "X-Log-End": "true" if output.over else "false",
    }
    return Stream(WatchEvents(watch, cast("AsyncGenerator[bytes, None]", pieces)), TEXT, headers, breaks=True)


async def _was_there(call: Call, found: Stored, node: str, epoch: int) -> bool:
    """Whether an earlier placement was on this node; a caller must not make the server call an arbitrary node."""
    async with call.context.database.reader() as db:
        return await change_store.was_placed(db, found.key, found.uid, node, epoch)


async def _open(call: Call, node: str, found: Stored, epoch: int, asked: LogRequest) -> LogSource | Refusal | None:
    if call.context.log_source is None:
        hint = "Start the server with --grpc HOST:PORT."
        return Refusal(Code.UNAVAILABLE, "this server does not read logs from agents", hint)
    reading = LogReading(found.uid, epoch, asked.offset or 0, asked.tail_lines or 0, asked.follow)
    if asked.tail_lines != 0:
        return await call.context.log_source.open(node, reading)
    # tailLines=0: only lines after the present end follow.
    last = await call.context.log_source.open(node, replace(reading, tail_lines=1, follow=False))
    if last is None or isinstance(last, Refusal):
        return last
    return await call.context.log_source.open(node, replace(reading, offset=await _end(last)))


async def _end(output: LogSource) -> int:
    at = output.offset
    try:
        while (piece := await output.next()) is not None:
            at = piece.offset + len(piece.data)
    except LogCut:
        pass  # It is asked again.
    finally:
        await output.close()
    return at


# Requests.


def _asked(query: Mapping[str, str]) -> LogRequest | Refusal:
    for name, why in NOT_KEPT.items():
        if query.get(name, "") not in ("", "false", "0"):
            return invalid(f"{name} is not offered: {why}")
    numbers: dict[str, int] = {}
    for name in ("tailLines", "epoch", "offset", "limitBytes"):
        text = query.get(name, "")
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX):
            return invalid(f"{name} must be a whole number from 0 on, got {text[:32]!r}")
        numbers[name] = int(text)
    return LogRequest(
        follow=query.get("follow", "") in ("true", "1"),
        tail_lines=numbers.get("tailLines"),
        node=query.get("node", ""),
        epoch=numbers.get("epoch", 0),
        offset=numbers.get("offset"),
        limit_bytes=numbers.get("limitBytes", math.inf),
    )


def _place(found: Stored, status: _Status, asked: LogRequest) -> tuple[str, int] | Refusal:
    """The node that keeps the requested log, and the epoch of its placement."""
    name = found.key.name
    if not _decode_document(found.doc).spec.command:
        return Refusal(Code.CONFLICT, f"{name} has no command (it only reserves resources), so it has no log")
    if asked.node and asked.epoch and asked.epoch != status.epoch:
        return asked.node, asked.epoch
    if status.phase == Phase.PENDING:
        return _waits(name, status)
    nodes = [one.name for one in status.nodes]
    if not nodes:
        why = status.message or status.reason or "nothing more is known"
        return Refusal(Code.ENDED, f"{name} is {status.phase} and never ran: {why}")
    if asked.node and asked.node not in nodes:
        return invalid(f"{name} is not on node {asked.node}: it is on {', '.join(nodes[:10])}",
                       hint="For an earlier placement name its epoch as well.")  # fmt: skip
    return asked.node or nodes[0], asked.epoch or status.epoch


def _waits(name: str, status: _Status) -> Refusal:
    why = status.message or "the scheduler has not tried it yet"
    earlier = " For an earlier placement name its node and epoch." if status.epoch else ""
    return Refusal(
        Code.CONFLICT,
        f"{name} waits, and has written nothing yet: {why}",
        f"`bursar explain {name}` has details.{earlier}",
        (Cause(status.reason or "not_yet_tried", why),),
        retry_after_seconds=2,
    )


def _nothing_kept(name: str, node: str, status: _Status, asked: LogRequest) -> Refusal:
    if status.phase == Phase.SCHEDULED and not asked.epoch:
        message = f"{name} is placed on node {node} and has not begun yet"
        return Refusal(Code.CONFLICT, message, "Ask again in a moment.", retry_after_seconds=1)
    if status.phase not in ENDED and not asked.epoch:
        return Refusal(Code.GONE, f"node {node} keeps no log of {name}")
    return Refusal(Code.GONE, f"node {node} keeps no log of {name} any more",
                   "Nodes keep what ended work has written for a while, and the newest of it.")  # fmt: skip


# Responses.


class _Pieces:
    """Streams output as it arrives, and periodically checks that the caller may still read it."""

    def __init__(self, watch: Watch, output: LogSource, asked: LogRequest) -> None:
        self._watch = watch
        self._output = output
        self._counted = asked.offset is not None
        self._left = asked.limit_bytes
        self._at = output.offset
        self._next: asyncio.Task[OutputPiece | None] | None = None

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        try:
            piece = await self._wait()
        except LogCut as cut:
            raise BrokenOff(str(cut)) from cut
        except WatchOver as over:
            raise BrokenOff("the reader may no longer read it") from over
        if piece is None:
            raise StopAsyncIteration
        if self._counted and piece.offset != self._at:
            # The next response has the reason, and the offset at which it continues.
            raise BrokenOff("something in between is no longer kept")
        data = piece.data if len(piece.data) <= self._left else piece.data[: int(self._left)]
        self._left -= len(data)
        self._at = piece.offset + len(data)
        return data

    async def _wait(self) -> OutputPiece | None:
        while True:
            await check_identity(self._watch)
            # It is not cancelled when it takes long: that would end the call.
            self._next = self._next or asyncio.create_task(self._output.next())
            done, _ = await asyncio.wait({self._next}, timeout=CHECK_SECONDS)
            if done:
                taken, self._next = self._next, None
                return taken.result()

    async def aclose(self) -> None:
        try:
            if self._next is not None:
                self._next.cancel()
                await asyncio.gather(self._next, return_exceptions=True)
        finally:
            await self._output.close()
