"""The load of `bursar bench agents`: simulated agents in their own process, controlled over its standard input.

Each line in is a command, each line out its answer, as JSON; the first one out says that it is ready. `join` opens the
streams. `steady SECONDS` sends heartbeats at the set pace, `flat SECONDS` as fast as they are answered. It ends when
its input does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import psutil
import uvloop

from bursar.bench.h2 import RawLine
from bursar.client import AsyncClient
from bursar.rlimit import allow_open_files
from bursar.sim.agents import AgentCrowd, HeartbeatMeter
from bursar.sim.shape import NodeShape, documents
from bursar.sim.stream import Enroller
from bursar.sim.transport import PlainTransport, SecureTransport, Transport

SETTLE_SECONDS = 1.0  # for the last answers
FLAT_OUT_MAX = 500  # concurrent heartbeats: more of them only wait longer


class CrowdOrder(msgspec.Struct):
    """The agents to simulate, and the server's address. With `url` and `token` the agents are enrolled and certified;
    without, their names are trusted. With `alone` each has a connection of the gRPC library for itself, as those with
    certificates have."""

    agents: int
    address: str
    beat_seconds: float
    url: str = ""
    token: str = ""
    alone: bool = False


class CrowdTaken(msgspec.Struct):
    """The results. `runs` has the time of each directive to run an allocation."""

    agents: int
    seconds: float
    sent: int
    answered: int
    missed: int
    p50_ms: float
    p99_ms: float
    cpu: float  # of this process, of one core
    runs: list[tuple[str, float]]


class Ready(msgspec.Struct):
    """All agents are enrolled, and none has joined."""


class Joined(msgspec.Struct):
    agents: int
    seconds: float


async def play(order: CrowdOrder) -> None:
    allow_open_files()
    shape = NodeShape(order.agents)
    async with AsyncExitStack() as opened:
        line: Transport = PlainTransport(order.address, 1) if order.alone else RawLine(order.address)
        if order.url:
            client = await opened.enter_async_context(AsyncClient(order.url, order.token))
            enroller = Enroller(client, {one["metadata"]["name"]: one for one in documents(shape)})
            await enroller.enrol_all()
            line = SecureTransport(order.address, enroller.credentials)
        opened.push_async_callback(line.close)
        crowd = AgentCrowd(shape.names, line, beat_seconds=order.beat_seconds)
        lines = asyncio.StreamReader()
        reader = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: reader, sys.stdin)
        _say(Ready())
        if await lines.readline():
            await _act(crowd, lines)


async def _act(crowd: AgentCrowd, lines: asyncio.StreamReader) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(crowd.run())
        began = time.perf_counter()
        await crowd.joined.wait()
        _say(Joined(crowd.connected, round(time.perf_counter() - began, 2)))
        async for line in lines:
            word, _, seconds = line.decode().partition(" ")
            _say(await _measure(crowd, float(seconds), flat=word == "flat"))
        running.cancel()


async def _measure(crowd: AgentCrowd, seconds: float, *, flat: bool) -> CrowdTaken:
    process = psutil.Process()
    process.cpu_percent()
    meter = crowd.meter = HeartbeatMeter()
    began = time.perf_counter()
    if flat:
        crowd.go_flat_out(FLAT_OUT_MAX)
    await asyncio.sleep(seconds)
    crowd.slow_down()
    lasted, answered, cpu = time.perf_counter() - began, meter.answered, process.cpu_percent()
    await asyncio.sleep(SETTLE_SECONDS)
    crowd.meter = None
    waits = sorted(meter.waits)
    return CrowdTaken(
        agents=crowd.connected,
        seconds=lasted,
        sent=meter.sent,
        answered=answered,
        missed=meter.missed,
        p50_ms=percentile_ms(waits, 0.5),
        p99_ms=percentile_ms(waits, 0.99),
        cpu=round(cpu / 100, 2),
        runs=meter.runs,
    )


def percentile_ms(ordered: list[float], fraction: float) -> float:
    """Percentiles of sorted waits in seconds."""
    return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * fraction))], 2) if ordered else 0.0


def _say(answer: Any) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play(msgspec.json.decode(sys.argv[1], type=CrowdOrder)))
