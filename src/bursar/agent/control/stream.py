"""The heartbeat stream to the control plane: it sends heartbeats, receives answers and reconnects with backoff.

Heartbeats go out at the interval that the control plane sets, and at once when there is news. News waits for the answer
to the previous heartbeat, so a busy node batches its reports. Leases count from the moment the answered heartbeat was
sent. A stream that breaks or stays silent is reopened at the next address.
"""

from __future__ import annotations

import asyncio
import logging
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

HEARTBEAT_SECONDS = 5.0  # until the control plane sets the interval
SILENCE_SECONDS_MIN = 10.0
SILENCE_HEARTBEATS = 3
BACKOFF_SECONDS_MIN = 0.1
BACKOFF_SECONDS_MAX = 5.0
REQUEST_SECONDS = 60.0  # between two requests for the same certificate
PREPARE_SECONDS = 10.0
LASTING_SECONDS = 5.0  # a stream that lasted longer resets the backoff

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.HeartbeatRequest, pb.HeartbeatResponse]"


class Speaker(Protocol):
    """The node that the stream reports for."""

    def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
        """The next heartbeat; the first of a stream is a full report."""

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        """Process an answer. `sent_at` is when the answered heartbeat was sent."""


class StreamLost(Exception):
    """The stream ended, and why."""

    def __init__(self, why: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(why)
        self.code = code


class ControlStream:
    """`run` keeps a stream open until it is cancelled; `poke` sends a heartbeat early."""

    def __init__(
        self, name: str, credentials: NodeCredentials, speaker: Speaker, *, clock: Callable[[], float] = boot_seconds
    ) -> None:
        self._name = name
        self._credentials = credentials
        self._speaker = speaker
        self._clock = clock
        self._poked = asyncio.Event()
        self._answered = asyncio.Event()  # the newest heartbeat has its answer
        self._sent: dict[int, float] = {}  # send times of unanswered heartbeats, by seq
        self._seq = 0
        self._heard_at = 0.0
        self._requested_at = -math.inf
        self._heartbeat_seconds = HEARTBEAT_SECONDS
        self._error_log = ConnectErrorLog(clock)
        self._stub: NodeAgentAsyncStub | None = None  # while there is a stream
        self.connected = asyncio.Event()  # the control plane has answered on this stream

    def poke(self) -> None:
        self._poked.set()

    async def prepare(self, run: Run) -> pb.PrepareResponse:
        """Call PrepareAllocation on the stream's connection. If the placement is gone, the stream stops it."""
        if self._stub is None or not self.connected.is_set():
            raise Away
        request = pb.PrepareRequest(node_id=self._name, allocation_id=run.uid, epoch=run.epoch)
        try:
            return await self._stub.PrepareAllocation(request, timeout=PREPARE_SECONDS)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise Away from error

    async def run(self) -> None:
        attempt = random.randrange(1 << 16)  # noqa: S311 - so that nodes do not all start with the same address
        troubles = 0
        while True:
            began = self._clock()
            answered, trouble = await self._attempt(attempt)
            attempt += 1
            # Two agents with the same name end each other's streams: the backoff prevents a reconnect storm.
            troubles = 0 if answered and self._clock() - began > LASTING_SECONDS else troubles + 1
            pause_seconds = backoff_seconds(troubles)
            if trouble is not None:
                self._report(trouble, pause_seconds)
            await asyncio.sleep(pause_seconds)

    async def _attempt(self, attempt: int) -> tuple[bool, ConnectTrouble | None]:
        """Run one stream to its end: whether the server answered on it, and the error to log."""
        address, trouble = "", None
        try:
            await self._credentials.ensure()
            address = self._credentials.addresses[attempt % len(self._credentials.addresses)]
            await self._talk(address)
        except IdentityError as error:
            trouble = ConnectTrouble(str(error), error.hint, passing=False)
        except BursarError as error:
            trouble = join_trouble(error)
        except StreamLost as error:
            trouble = self._lost(error, address)
        except Exception:
            log.exception("stream_failed", message="the stream to the control plane failed", server=address)
        answered = self.connected.is_set()
        self.connected.clear()
        return answered, trouble

    async def _talk(self, address: str) -> None:
        """Send and receive until either of the two ends."""
        async with self._credentials.channel(address) as channel:
            self._stub = NodeAgentStub(channel)
            call = self._stub.Heartbeat()
            self._seq, self._heard_at = 0, self._clock()
            self._sent.clear()
            sending = asyncio.create_task(self._send(call), name="stream-send")
            receiving = asyncio.create_task(self._receive(call, address), name="stream-receive")
            try:
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
                failed = [task for task in (receiving, sending) if task.done()]
                await asyncio.gather(*failed, return_exceptions=True)
                await self._raise_end(call, failed[0])
            finally:
                for task in (sending, receiving):
                    task.cancel()
                self._stub = None
                await asyncio.gather(sending, receiving, return_exceptions=True)
                call.cancel()

    async def _raise_end(self, call: Call, task: asyncio.Task[None]) -> None:
        """Raise the cause: the agent's own reason first, else the status of the call."""
        error = task.exception()
        if isinstance(error, StreamLost) or (
            error is not None and not isinstance(error, grpc.RpcError | grpc.aio.BaseError | asyncio.InvalidStateError)
        ):
            raise error
        raise StreamLost(await call.details() or "the server ended the stream", await call.code())

    # Sending.

    async def _send(self, call: Call) -> None:
        # Jitter: when a server stalls, its agents must not all reconnect at the same moment.
        patience = random.uniform(1.0, 1.5)  # noqa: S311 - not a secret
        while True:
            silence = max(SILENCE_SECONDS_MIN, SILENCE_HEARTBEATS * self._heartbeat_seconds) * patience
            if self._clock() - self._heard_at > silence:
                raise StreamLost(f"no heartbeat was answered for {silence:.0f} s", grpc.StatusCode.DEADLINE_EXCEEDED)
            try:
                async with asyncio.timeout(silence):
                    await self._heartbeat(call)
            except TimeoutError:
                raise StreamLost("a heartbeat could not be sent", grpc.StatusCode.DEADLINE_EXCEEDED) from None
            await self._pause()

    async def _heartbeat(self, call: Call) -> None:
        self._poked.clear()
        self._answered.clear()
        heartbeat = replace(self._speaker.heartbeat(first=self._seq == 0), certificate_request=self._due_request())
        self._seq += 1
        message = heartbeat_message(heartbeat, node=self._name, seq=self._seq, timestamp_ms=time.time_ns() // 1_000_000)
        # Before the write: a lease counted from here never outlasts the control plane's view of it.
        self._sent[self._seq] = self._clock()
        await call.write(message)

    def _due_request(self) -> bytes:
        if self._clock() - self._requested_at < REQUEST_SECONDS or not (request := self._credentials.due_request()):
            return b""
        self._requested_at = self._clock()
        return request

    async def _pause(self) -> None:
        """Wait until the next heartbeat is due, or until there is news and the last heartbeat was answered."""
        began = asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_seconds) as pause:
                await self._answered.wait()
                pause.reschedule(began + self._heartbeat_seconds)  # The answer may have changed the interval.
                await self._poked.wait()

    # Receiving.

    async def _receive(self, call: Call, address: str) -> None:
        async for message in call:
            answer = read_answer(message)
            self._heard_at = self._clock()
            if not self.connected.is_set():
                log.info("stream_connected", message="connected to the control plane", server=address, node=self._name)
                self._error_log.over()
                self.connected.set()
            if answer.beat_seconds:
                self._heartbeat_seconds = answer.beat_seconds
            self._speaker.hear(answer, self._sent_at(answer.seq))
            if answer.certificate:
                self._credentials.renew(answer.certificate)
                raise StreamLost("the certificate was renewed")

    def _sent_at(self, seq: int) -> float | None:
        """Return when a heartbeat was sent. Its answer also acknowledges older heartbeats, whose leases are shorter."""
        sent_at = self._sent.pop(seq, None)
        for older in [one for one in self._sent if one < seq]:
            del self._sent[older]
        if seq == self._seq:
            self._answered.set()
        return sent_at

    # Errors.

    def _lost(self, error: StreamLost, address: str) -> ConnectTrouble | None:
        if error.code is None:
            log.info("stream_reopened", message="the stream is opened again", server=address, reason=str(error))
            return None
        if error.code in REFUSED:
            self._credentials.refused()
        return stream_trouble(error.code, str(error), address, self._name)

    def _report(self, trouble: ConnectTrouble, pause_seconds: float) -> None:
        if self._error_log.is_news(trouble.why):
            log.log(
                logging.WARNING if trouble.passing else logging.ERROR, "stream_unavailable",
                message="no stream to the control plane", error=trouble.why, next=trouble.next(pause_seconds),
            )  # fmt: skip


def backoff_seconds(troubles: int) -> float:
    """Exponential backoff with jitter, bounded by BACKOFF_SECONDS_MAX."""
    longest = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * (1 << min(troubles, 10)))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
