"""Thousands of simulated agents in one process over the real gRPC protocol, each with its own stream and machine.

One timer heap serves all agents. Each agent has one task, which reads its stream; heartbeats are sent by the timer, and
early when there is news.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from bursar.agent.control import codec
from bursar.agent.control.codec import OutgoingHeartbeat
from bursar.agent.machine.types import Run
from bursar.client.errors import BursarError
from bursar.sim.fake_executor import FEATURES, FakeBehaviour, FakeExecutor, RunTally
from bursar.sim.transport import RpcCall, Transport
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

HEARTBEAT_SECONDS = 5.0  # until the server sets the interval
TICK_SECONDS = 0.005  # resolution of the timer heap
JOINING_AT_ONCE = 100
JOIN_SECONDS_MAX = 30.0  # until the first stream is accepted
PAUSE_SECONDS_MIN = 0.2
PAUSE_SECONDS_MAX = 10.0

# Status codes that do not resolve by themselves.
REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class StreamRefused(BursarError):
    """The control plane refuses the agents, or does not listen at their address."""

    def __init__(self, name: str, error: grpc.aio.AioRpcError) -> None:
        super().__init__(f"the stream of node {name!r} was refused: {error.details() or error.code().name}")
        self.hint = "check the server's --grpc address, or use --rest"


@dataclass(slots=True)
class HeartbeatMeter:
    """Counters of a measurement."""

    sent: int = 0
    answered: int = 0
    missed: int = 0  # heartbeats without an answer when the next one was due
    waits: array[float] = field(default_factory=lambda: array("d"))  # seconds from each heartbeat to its answer
    runs: list[tuple[str, float]] = field(default_factory=list)  # run directives, with their wall clock time


@dataclass(slots=True, eq=False)
class _Agent:
    """One simulated agent; `call` is its stream while it has one."""

    name: str
    pretender: FakeExecutor
    beat_seconds: float = HEARTBEAT_SECONDS
    flat_out: bool = False
    due_at: float = math.inf  # the valid entry in the heap; others are stale
    call: RpcCall | None = None
    seq: int = 0
    answered: int = 0  # the highest answered heartbeat
    regular: int = 0  # the last heartbeat sent by the timer
    sent: deque[tuple[int, float]] = field(default_factory=deque)
    heartbeat_at: float = math.inf
    writer: asyncio.Task[None] | None = None  # the heartbeat that is being written

    def close(self) -> None:
        self.call = self.writer = None
        self.seq = self.answered = self.regular = 0
        self.sent.clear()
        self.heartbeat_at = math.inf


class AgentCrowd:
    """`run` simulates the named nodes until cancelled. `joined` is set when each of them got its first answer."""

    def __init__(
        self,
        names: Sequence[str],
        line: Transport,
        *,
        manner: FakeBehaviour | None = None,
        capacity: Mapping[str, str] | None = None,
        beat_seconds: float | None = None,
    ) -> None:
        self.tally = RunTally()
        self.joined = asyncio.Event()
        self.meter: HeartbeatMeter | None = None
        self._line = line
        self._capacity = capacity or {}
        self._heartbeat_seconds = beat_seconds  # overrides the server's interval
        self._agents = [_Agent(name, FakeExecutor(manner or FakeBehaviour(), self.tally)) for name in names]
        self._waiting = len(self._agents)  # agents without a first answer
        self._joining = asyncio.Semaphore(JOINING_AT_ONCE)
        self._heap: list[tuple[float, int, _Agent]] = []
        self._numbers = itertools.count()
        self._retime = asyncio.Event()
        self._sleeps_until = math.inf
        self._began = time.monotonic()

    @property
    def running(self) -> int:
        return self.tally.running

    @property
    def ended(self) -> int:
        return self.tally.ended

    @property
    def connected(self) -> int:
        return sum(agent.call is not None for agent in self._agents)

    async def run(self) -> None:
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time())
            for agent in self._agents:
                group.create_task(self._live(agent))

    def go_flat_out(self, most: int) -> None:
        """Let up to `most` agents send the next heartbeat as soon as one is answered, until `slow_down`."""
        now = time.monotonic()
        for agent in self._agents[:: max(1, -(-len(self._agents) // most))]:
            agent.flat_out = True
            self._heartbeat(agent, now)

    def slow_down(self) -> None:
        for agent in self._agents:
            agent.flat_out = False

    # Streams.

    async def _live(self, agent: _Agent) -> None:
        """Keep a stream open, with backoff."""
        failures, is_new = 0, True
        while True:
            heard = 0
            try:
                heard = await self._stream(agent, is_new)
            except grpc.aio.AioRpcError as error:
                heard = agent.answered
                self._check_joining(agent, error, is_new and not heard)
            finally:
                agent.close()
            is_new, failures = is_new and not heard, 0 if heard else failures + 1
            # Jitter: agents that lost their streams together must not reconnect together.
            pause = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN * 2 ** min(failures, 10))
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311

    async def _stream(self, agent: _Agent, is_new: bool) -> int:
        """Run one stream to its end; returns the number of its answered heartbeats."""
        async with self._joining:
            call = await self._line.dial(agent.name)
            try:
                answer = await self._greet(agent, call)
            except BaseException:
                call.cancel()
                raise
        try:
            if is_new and answer is not grpc.aio.EOF:
                self._waiting -= 1
                if not self._waiting:
                    self.joined.set()
            while answer is not grpc.aio.EOF:
                self._hear(agent, answer)
                answer = await call.read()
        finally:
            call.cancel()
        return agent.answered

    async def _greet(self, agent: _Agent, call: RpcCall) -> Any:
        """Send the first heartbeat, a full report, and read its answer."""
        now = time.monotonic()
        heartbeat = OutgoingHeartbeat(
            agent.pretender.inventory(), inventory=True, capacity=self._capacity, features=FEATURES
        )
        await call.write(self._message(agent, heartbeat, now))
        answer = await call.read()
        agent.call = call
        # Jitter: agents that joined together spread over the interval.
        agent.heartbeat_at = now + (self._heartbeat_seconds or agent.beat_seconds) * random.random()  # noqa: S311
        return answer

    def _check_joining(self, agent: _Agent, error: grpc.aio.AioRpcError, is_new: bool) -> None:
        """Raise if an agent is refused at its first stream; a later refusal may pass."""
        if is_new and error.code() in REFUSALS:
            raise StreamRefused(agent.name, error)
        nobody = self._waiting == len(self._agents)
        if nobody and time.monotonic() > self._began + JOIN_SECONDS_MAX:
            raise StreamRefused(agent.name, error)

    # Answers.

    def _hear(self, agent: _Agent, message: pb.HeartbeatResponse) -> None:
        answer, now = codec.read_answer(message), time.monotonic()
        sent_at = self._answered(agent, answer.seq, now)
        if answer.beat_seconds and self._heartbeat_seconds is None:
            agent.beat_seconds = answer.beat_seconds
        pretender = agent.pretender
        if answer.lease_seconds:
            pretender.granted(answer.lease_seconds, sent_at, now, answer.kill_grace_seconds)
        if answer.directives or answer.complete:
            if self.meter is not None:
                self._note(self.meter, answer)
            pretender.tell(answer.directives, now, complete=answer.complete)
        if answer.leases:
            pretender.paid(answer.leases, sent_at, now)
        if answer.acknowledged:
            pretender.acknowledged(answer.acknowledged, now)
        if (pretender.has_news and agent.answered == agent.seq) or (agent.flat_out and answer.seq):
            self._heartbeat(agent, now)
        self._schedule(agent)

    def _answered(self, agent: _Agent, seq: int, now: float) -> float:
        """When the answered heartbeat was sent; the answer covers all earlier ones."""
        sent_at = now
        while agent.sent and agent.sent[0][0] <= seq:
            number, sent_at = agent.sent.popleft()
            if number == seq and self.meter is not None:
                self.meter.answered += 1
                self.meter.waits.append(now - sent_at)
        agent.answered = max(agent.answered, seq)
        return sent_at

    def _note(self, meter: HeartbeatMeter, answer: codec.HeartbeatAnswer) -> None:
        at = time.time()
        meter.runs += [(one.name, at) for one in answer.directives if isinstance(one, Run)]

    # Heartbeats.

    def _heartbeat(self, agent: _Agent, now: float) -> None:
        """Send a heartbeat with the news, unless the previous one is still being written."""
        if agent.call is None or agent.writer is not None:
            return
        message = self._message(agent, OutgoingHeartbeat(agent.pretender.news()), now)
        agent.writer = asyncio.create_task(self._write(agent, agent.call, message))

    def _message(self, agent: _Agent, heartbeat: OutgoingHeartbeat, now: float) -> pb.HeartbeatRequest:
        agent.seq += 1
        agent.sent.append((agent.seq, now))
        if self.meter is not None:
            self.meter.sent += 1
        return codec.heartbeat_message(heartbeat, node=agent.name, seq=agent.seq, timestamp_ms=int(time.time() * 1000))

    async def _write(self, agent: _Agent, call: RpcCall, message: pb.HeartbeatRequest) -> None:
        # The reader sees why a stream broke.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(message)
        if agent.call is call:
            agent.writer = None

    # Time.

    def _schedule(self, agent: _Agent) -> None:
        """Push the agent's next timer; its earlier heap entry becomes stale."""
        at = min(agent.heartbeat_at, agent.pretender.next_at)
        if at == agent.due_at:
            return
        agent.due_at = at
        if at < math.inf:
            heapq.heappush(self._heap, (at, next(self._numbers), agent))
            if at < self._sleeps_until:
                self._retime.set()

    async def _keep_time(self) -> None:
        while True:
            self._do_due(time.monotonic())
            self._retime.clear()
            self._sleeps_until = self._heap[0][0] if self._heap else math.inf
            pause = max(TICK_SECONDS, self._sleeps_until - time.monotonic())
            # Not wait_for: it may swallow a cancellation that coincides with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(None if pause == math.inf else pause):
                    await self._retime.wait()
            self._sleeps_until = -math.inf

    def _do_due(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            at, _, agent = heapq.heappop(self._heap)
            if at != agent.due_at:
                continue
            agent.due_at = math.inf
            if agent.pretender.next_at <= now:
                agent.pretender.due(now)
            if agent.heartbeat_at <= now:
                self._heartbeat_in_time(agent, now)
            elif agent.pretender.has_news and agent.answered == agent.seq:
                self._heartbeat(agent, now)  # news waits for the answer to the previous heartbeat
            self._schedule(agent)

    def _heartbeat_in_time(self, agent: _Agent, now: float) -> None:
        if self.meter is not None and agent.answered < agent.regular:
            self.meter.missed += 1
        self._heartbeat(agent, now)
        agent.regular = agent.seq
        seconds = self._heartbeat_seconds or agent.beat_seconds
        agent.heartbeat_at = max(agent.heartbeat_at + seconds, now + seconds / 2)
