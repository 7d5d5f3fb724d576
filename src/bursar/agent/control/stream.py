"""One stream to the control plane, kept: beats out, answers in.

It beats as often as the control plane asks, and at once when there is news; news waits for the answer to the beat
before, so that a busy node says much in few beats. When each beat was sent is remembered until it is answered: what is
granted counts from then. A stream that is lost, or silent for too long, is opened again, to the next of the addresses.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import grpc
import structlog

from bursar.agent.control.certificates import NodeCredentials
from bursar.agent.control.codec import HeartbeatAnswer, OutgoingHeartbeat, heartbeat_message, read_answer
from bursar.agent.control.connect_errors import REFUSED, ConnectErrorLog, ConnectTrouble, join_trouble, stream_trouble
from bursar.agent.control.identity import IdentityError
from bursar.agent.control.prepare import Away
from bursar.agent.machine.types import Run
from bursar.agent.shim.clock import boot_seconds
from bursar.client.errors import BursarError
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentStub

if TYPE_CHECKING:
    from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentAsyncStub

log = structlog.get_logger()

HEARTBEAT_SECONDS = 5.0  # until the control plane says how often
SILENCE_SECONDS_MIN = 10.0
SILENCE_HEARTBEATS = 3
BACKOFF_SECONDS_MIN = 0.1
BACKOFF_SECONDS_MAX = 5.0
REQUEST_SECONDS = 60.0  # the same certificate is asked for again so often
PREPARE_SECONDS = 10.0
LASTING_SECONDS = 5.0  # a stream that lasted so long was a good one

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.HeartbeatRequest, pb.HeartbeatResponse]"


class Speaker(Protocol):
    """Whose words the stream carries."""

    def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
        """What is to be said now; in the first beat of a stream, everything."""

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        """`sent_at` is when the beat that is answered was sent."""


class StreamLost(Exception):
    """The stream is gone, and why."""

    def __init__(self, why: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(why)
        self.code = code


class ControlStream:
    """`run` keeps the stream until it is cancelled; `poke` says that there is news."""

    def __init__(
        self, name: str, credentials: NodeCredentials, speaker: Speaker, *, clock: Callable[[], float] = boot_seconds
    ) -> None:
        self._name = name
        self._credentials = credentials
        self._speaker = speaker
        self._clock = clock
        self._poked = asyncio.Event()
        self._answered = asyncio.Event()  # to the newest beat
        self._sent: dict[int, float] = {}  # beats without an answer, and when they were sent
        self._seq = 0
        self._heard_at = 0.0
        self._requested_at = -math.inf
        self._heartbeat_seconds = HEARTBEAT_SECONDS
        self._telling = ConnectErrorLog(clock)
        self._stub: NodeAgentAsyncStub | None = None  # while there is a stream
        self.connected = asyncio.Event()  # the control plane has answered on this stream

    def poke(self) -> None:
        self._poked.set()

    async def prepare(self, run: Run) -> pb.PrepareResponse:
        """What a command needs, asked beside the stream. What is not placed here any more is said to be stopped by
        the stream."""
        if self._stub is None or not self.connected.is_set():
            raise Away
        request = pb.PrepareRequest(node_id=self._name, allocation_id=run.uid, epoch=run.epoch)
        try:
            return await self._stub.PrepareAllocation(request, timeout=PREPARE_SECONDS)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise Away from error

    async def run(self) -> None:
        turn = random.randrange(1 << 16)  # noqa: S311 - so that nodes do not all begin with the same address
        troubles = 0
        while True:
            began = self._clock()
            answered, trouble = await self._attempt(turn)
            turn += 1
            # Of two agents with one name each ends the other's stream: that must not become a storm.
            troubles = 0 if answered and self._clock() - began > LASTING_SECONDS else troubles + 1
            pause_seconds = backoff_seconds(troubles)
            if trouble is not None:
                self._tell(trouble, pause_seconds)
            await asyncio.sleep(pause_seconds)

    async def _attempt(self, turn: int) -> tuple[bool, ConnectTrouble | None]:
        """One stream from beginning to end: whether anything was heard on it, and what is to be told of its end."""
        address, trouble = "", None
        try:
            await self._credentials.ensure()
            address = self._credentials.addresses[turn % len(self._credentials.addresses)]
            await self._talk(address)
        except IdentityError as error:
            trouble = ConnectTrouble(str(error), error.hint, passing=False)
        except BursarError as error:
            trouble = join_trouble(error)
        except StreamLost as error:
            trouble = self._lost(error, address)
        except Exception:
            log.exception("the stream failed", server=address)
        answered = self.connected.is_set()
        self.connected.clear()
        return answered, trouble

    async def _talk(self, address: str) -> None:
        """Speak and listen until one of the two comes to an end."""
        async with self._credentials.channel(address) as channel:
            self._stub = NodeAgentStub(channel)
            call = self._stub.Heartbeat()
            self._seq, self._heard_at = 0, self._clock()
            self._sent.clear()
            speaking = asyncio.create_task(self._speak(call), name="stream-speak")
            listening = asyncio.create_task(self._listen(call, address), name="stream-listen")
            try:
                await asyncio.wait({speaking, listening}, return_when=asyncio.FIRST_COMPLETED)
                failed = [task for task in (listening, speaking) if task.done()]
                await asyncio.gather(*failed, return_exceptions=True)
                await self._raise_end(call, failed[0])
            finally:
                for task in (speaking, listening):
                    task.cancel()
                self._stub = None
                await asyncio.gather(speaking, listening, return_exceptions=True)
                call.cancel()

    async def _raise_end(self, call: Call, task: asyncio.Task[None]) -> None:
        """What ended it: our own reasons first, then the status of the call."""
        error = task.exception()
        if isinstance(error, StreamLost) or (
            error is not None and not isinstance(error, grpc.RpcError | grpc.aio.BaseError | asyncio.InvalidStateError)
        ):
            raise error
        raise StreamLost(await call.details() or "the server ended the stream", await call.code())

    # Speaking.

    async def _speak(self, call: Call) -> None:
        # A server that cannot answer anybody for a while must not be left and called again by all of them at once.
        patience = random.uniform(1.0, 1.5)  # noqa: S311 - not a secret
        while True:
            silence = max(SILENCE_SECONDS_MIN, SILENCE_HEARTBEATS * self._heartbeat_seconds) * patience
            if self._clock() - self._heard_at > silence:
                raise StreamLost(f"no beat was answered for {silence:.0f} s", grpc.StatusCode.DEADLINE_EXCEEDED)
            try:
                async with asyncio.timeout(silence):
                    await self._heartbeat(call)
            except TimeoutError:
                raise StreamLost("a beat could not be sent", grpc.StatusCode.DEADLINE_EXCEEDED) from None
            await self._pause()

    async def _heartbeat(self, call: Call) -> None:
        self._poked.clear()
        self._answered.clear()
        heartbeat = replace(self._speaker.heartbeat(first=self._seq == 0), certificate_request=self._due_request())
        self._seq += 1
        message = heartbeat_message(heartbeat, node=self._name, seq=self._seq, timestamp_ms=time.time_ns() // 1_000_000)
        # Before it leaves: a lease that is counted from here never lasts longer than the control plane thinks.
        self._sent[self._seq] = self._clock()
        await call.write(message)

    def _due_request(self) -> bytes:
        if self._clock() - self._requested_at < REQUEST_SECONDS or not (request := self._credentials.due_request()):
            return b""
        self._requested_at = self._clock()
        return request

    async def _pause(self) -> None:
        """Until the next beat is due; or until there is news, and somebody who listens."""
        began = asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_seconds) as pause:
                await self._answered.wait()
                pause.reschedule(began + self._heartbeat_seconds)  # The answer may have said how often.
                await self._poked.wait()

    # Listening.

    async def _listen(self, call: Call, address: str) -> None:
        async for message in call:
            answer = read_answer(message)
            self._heard_at = self._clock()
            if not self.connected.is_set():
                log.info("connected to the control plane", server=address, node=self._name)
                self._telling.over()
                self.connected.set()
            if answer.beat_seconds:
                self._heartbeat_seconds = answer.beat_seconds
            self._speaker.hear(answer, self._sent_at(answer.seq))
            if answer.certificate:
                self._credentials.renew(answer.certificate)
                raise StreamLost("the certificate was renewed")

    def _sent_at(self, seq: int) -> float | None:
        """When this beat was sent. Those before it are answered by it too: a later lease is a longer one."""
        sent_at = self._sent.pop(seq, None)
        for older in [one for one in self._sent if one < seq]:
            del self._sent[older]
        if seq == self._seq:
            self._answered.set()
        return sent_at

    # What went wrong, for people.

    def _lost(self, error: StreamLost, address: str) -> ConnectTrouble | None:
        if error.code is None:
            log.info(str(error), server=address)
            return None
        if error.code in REFUSED:
            self._credentials.refused()
        return stream_trouble(error.code, str(error), address, self._name)

    def _tell(self, trouble: ConnectTrouble, pause_seconds: float) -> None:
        if self._telling.is_news(trouble.why):
            say = log.warning if trouble.passing else log.error
            say("no stream to the control plane", why=trouble.why, next=trouble.next(pause_seconds))


def backoff_seconds(troubles: int) -> float:
    """Twice as long each time, never together with the others, and never long."""
    longest = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * (1 << min(troubles, 10)))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
