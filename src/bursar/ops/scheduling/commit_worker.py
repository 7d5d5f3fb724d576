"""The commit worker: a second process of the leader that commits its plans.

Planning and committing cost about the same CPU time, and one process does one of them at a time. With a large backlog
the leader plans while the worker commits; small plans the leader commits itself.

The worker has no authority of its own: its commands carry the leader's fence, and are decided under locks like all
others. If it dies, it is unknown how much of its order is committed, and the leader reloads the cluster state.
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

from bursar.commands.scheduling.bind import Bind, BindMember
from bursar.core.objects.object import Origin
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.runtime.transaction import notify_watchers
from bursar.ops.scheduling.placement import Bound, bind
from bursar.store.db.database import Unavailable

log = structlog.get_logger()

MODULE: Final = "bursar.commit_worker"
START_SECONDS_MAX = 60.0  # until a new worker reports that it is ready
SILENCE_SECONDS_MAX = 30.0  # of a worker with an order: then it is stuck, and is replaced
PAUSES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before another is started
_LENGTH = 4  # bytes before each frame, with its length


class CommitOrder(Struct, frozen=True, array_like=True):
    """An order to the worker: units to bind, and the leader's fence."""

    number: int
    origin: Origin
    fence: int | None
    units: list[tuple[BindMember, ...]]


class CommitOutcome(Struct, frozen=True, array_like=True):
    """The outcome of an order. The first one, of order 0, reports that the worker is ready."""

    number: int
    units: list[Bound] = []
    away: str = ""  # why the outcome is unknown


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(CommitOrder).decode
_decode_outcome = msgspec.msgpack.Decoder(CommitOutcome).decode


class CommitWorker:
    """The leader's side. `call` starts a process, and starts it again if it dies; `dismiss` ends it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._keeping: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None  # while the worker is ready
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
        """Start the worker, without waiting: until it is ready, the leader commits by itself."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="commit-worker")

    async def arrived(self) -> None:
        """Wait until the worker is ready."""
        await self._arrived.wait()

    async def dismiss(self) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def bind(self, commands: Sequence[Bind]) -> list[Bound]:
        """Run the verb `bind`, in the worker if it is ready. All commands must be of the same leader."""
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
        notify_watchers(self._runtime.on_commit)
        return outcome.units

    async def _hear_of(self, answer: asyncio.Future[CommitOutcome]) -> CommitOutcome:
        """Wait for an outcome. A worker that sends nothing for long is stuck; one that answers other orders is busy."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while not answer.done():
            patience = max(asked_at, self._heard_at) + SILENCE_SECONDS_MAX - loop.time()
            if patience <= 0:
                self._kill()
                raise Unavailable("the commit worker is stuck")
            await asyncio.wait({answer}, timeout=patience)
        return answer.result()

    # Supervision.

    async def _keep(self) -> None:
        """Start one worker after another. The pauses grow while workers die without an answer; during a pause the
        leader commits by itself, so that an order that kills the worker is not given to workers for ever."""
        failures = 0
        while True:
            answered, error = False, None
            try:
                answered = await self._attend()
            except Exception as failed:
                # The process did not start, or was not ready in time: the next one may be.
                error = repr(failed)
            failures = 0 if answered else failures + 1
            pause = PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)]
            log.warning(
                "commit_worker_gone",
                message="the commit worker ended; another one is started",
                pause_seconds=pause,
                error=error,
            )
            await asyncio.sleep(pause)

    async def _attend(self) -> bool:
        """Start a process, and read its outcomes until it ends; whether it ever answered."""
        ours, its = socket.socketpair()
        with ours:
            with its:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", MODULE, str(its.fileno()),  # -P: no modules of the working directory
                    env=os.environ | {"BURSAR_DATABASE_URL": self._runtime.database.url},
                    pass_fds=(its.fileno(),), stdin=DEVNULL, stdout=DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to the leader, which ends the worker
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
                    answer.set_exception(Unavailable("the commit worker died"))
            writer.transport.abort()  # unsent frames have no reader

    def _kill(self) -> None:
        """Kill the worker. The database rolls its open transactions back when its connections end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()


# The worker's side.


async def serve(runtime: Runtime, its: socket.socket) -> None:
    """Carry out orders until the leader closes the socket. Orders in progress are then rolled back with the process."""
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
            log.exception("commit_order_failed", message="the commit worker could not carry out an order")
        outcome = CommitOutcome(order.number, away=f"the commit worker could not commit it: {error!r}")
    _put(writer, _encode(outcome))


def _put(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Send a frame, unless the other side is gone: the reader notices that, and fails the pending answers."""
    if not writer.is_closing():
        writer.write(len(frame).to_bytes(_LENGTH, "big") + frame)


async def _next(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None if the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        return None
