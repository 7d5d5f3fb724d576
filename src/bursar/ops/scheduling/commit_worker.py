"""The clerk: a process beside the leader's that commits what the leader decided.

Deciding and committing cost about as much, and one process does one of them at a time. With a large backlog the leader
decides while its clerk commits; the little that there is to place otherwise it commits itself, without the detour.

The clerk is no authority: its commands carry the leader's fence, and are decided under locks as anybody's are. Should
it die, nobody knows how much of what it was told is committed, and the leader loads its world anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from bursar.core.objects.object import Origin
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.runtime.transaction import tell_of_commit
from bursar.ops.scheduling.bind import Bind, BindMember, Bound, bind
from bursar.store.db.database import Unavailable

log = structlog.get_logger()

MODULE: Final = "bursar.commit_worker"
START_SECONDS_MAX = 60.0  # until a clerk says that it is there
SILENCE_SECONDS_MAX = 30.0  # of a clerk that was told something: then it is stuck, and another is called
PAUSES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before another is called
_LENGTH = 4  # bytes before each frame, which say how long it is


class CommitOrder(Struct, frozen=True, array_like=True):
    """What the clerk is told: units to place, under which fence."""

    number: int
    origin: Origin
    fence: int | None
    units: list[tuple[BindMember, ...]]


class CommitOutcome(Struct, frozen=True, array_like=True):
    """What became of an order's units. The first one, of no order, says that the clerk is there."""

    number: int
    units: list[Bound] = []
    away: str = ""  # why nobody knows


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(CommitOrder).decode
_decode_outcome = msgspec.msgpack.Decoder(CommitOutcome).decode


class CommitWorker:
    """The leader's end. `call` has a process started, and started again should it die; `dismiss` ends it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._keeping: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None  # while it is at work
        self._arrived = asyncio.Event()
        self._heard_at = float("-inf")
        self._orders = 0
        self._waiting: dict[int, asyncio.Future[CommitOutcome]] = {}

    @property
    def is_at_work(self) -> bool:
        return self._writer is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def call(self) -> None:
        """Nobody waits for it: until it is there, the leader commits all by itself."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="clerk")

    async def arrived(self) -> None:
        """Wait until one that was called is at work."""
        await self._arrived.wait()

    async def dismiss(self) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def bind(self, commands: Sequence[Bind]) -> list[Bound]:
        """As the verb of that name does it, in the clerk's process if it is at work. All commands are one leader's."""
        if self._writer is None:
            return await bind(self._runtime, commands)
        self._orders += 1
        number, first = self._orders, commands[0]
        answer: asyncio.Future[CommitOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        order = CommitOrder(number, first.origin, first.fence, [command.members for command in commands])
        try:
            _put(self._writer, _encode(order))
            outcome = await self._hear_of(answer)
        finally:
            self._waiting.pop(number, None)
        if outcome.away:
            raise Unavailable(outcome.away)
        tell_of_commit(self._runtime.on_commit)
        return outcome.units

    async def _hear_of(self, answer: asyncio.Future[CommitOutcome]) -> CommitOutcome:
        """A clerk that says nothing at all for so long is stuck; one that answers others has much to do."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while not answer.done():
            patience = max(asked_at, self._heard_at) + SILENCE_SECONDS_MAX - loop.time()
            if patience <= 0:
                self._kill()
                raise Unavailable("the clerk is stuck")
            await asyncio.wait({answer}, timeout=patience)
        return answer.result()

    # Its life.

    async def _keep(self) -> None:
        """One clerk after another. After those who never answered the pauses grow, and in them the leader commits by
        itself: else an order that every clerk dies of would be given to clerks for ever."""
        failures = 0
        while True:
            answered, error = False, None
            try:
                answered = await self._attend()
            except Exception as failed:
                # No process could be started, or it was not ready in time: another time it may be.
                error = repr(failed)
            failures = 0 if answered else failures + 1
            pause = PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)]
            log.warning("the clerk is gone; another is called", pause_seconds=pause, error=error)
            await asyncio.sleep(pause)

    async def _attend(self) -> bool:
        """Have a process started, and hear it until it ends; whether it ever answered."""
        ours, its = socket.socketpair()
        with ours:
            with its:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", MODULE, str(its.fileno()),  # -P: no modules of where we were started
                    env=os.environ | {"BURSAR_DATABASE_URL": self._runtime.database.url},
                    pass_fds=(its.fileno(),), stdin=DEVNULL, stdout=DEVNULL,
                    start_new_session=True,  # a Ctrl-C in the terminal is for the leader, whose end is the clerk's too
                )  # fmt: skip
            try:
                return await self._hear(*await asyncio.open_connection(sock=ours))
            finally:
                self._kill()
                await self._process.wait()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        answered = False
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                if await _next(reader) is None:
                    return False
            self._writer = writer
            self._arrived.set()
            while (frame := await _next(reader)) is not None:
                outcome = _decode_outcome(frame)
                answered, self._heard_at = True, asyncio.get_running_loop().time()
                if (answer := self._waiting.get(outcome.number)) is not None and not answer.done():
                    answer.set_result(outcome)
            return answered
        finally:
            self._writer = None
            self._arrived.clear()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Unavailable("the clerk died"))
            writer.transport.abort()  # nobody reads what is not sent yet

    def _kill(self) -> None:
        """What it has not committed is undone by the database when its connections end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()


# The clerk's own end.


async def serve(runtime: Runtime, its: socket.socket) -> None:
    """Do as told until whoever tells is gone. What is under way then is left: it is undone when the process ends."""
    reader, writer = await asyncio.open_connection(sock=its)
    under_way: set[asyncio.Task[None]] = set()
    _put(writer, _encode(CommitOutcome(0)))
    while (frame := await _next(reader)) is not None:
        task = asyncio.create_task(_carry_out(runtime, _decode_order(frame), writer))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


async def _carry_out(runtime: Runtime, order: CommitOrder, writer: asyncio.StreamWriter) -> None:
    try:
        commands = [Bind.unit(members, order.origin, order.fence) for members in order.units]
        outcome = CommitOutcome(order.number, await bind(runtime, commands))
    except Exception as error:
        if not isinstance(error, Unavailable):
            log.exception("an order failed")
        outcome = CommitOutcome(order.number, away=f"the clerk could not commit it: {error!r}")
    _put(writer, _encode(outcome))


def _put(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Whoever is gone is told nothing: the one who reads finds out, and fails what waits for an answer."""
    if not writer.is_closing():
        writer.write(len(frame).to_bytes(_LENGTH, "big") + frame)


async def _next(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None where the other end is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        return None
