"""`bursar bench agents`: heartbeats per second, and the time until agents get directives.

A real server, and simulated agents in their own process over real gRPC: first without TLS, at a
steady pace while allocations are bound and then flat out; then fewer with certificates, to show what these cost.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import psutil

from bursar.bench.crowd import CrowdOrder, CrowdTaken, Joined, Ready, percentile_ms
from bursar.bench.server import BENCH, BenchServer, create, register, running_runtime, running_server
from bursar.commands.scheduling.bind import Bind, BindMember
from bursar.commands.workloads.allocation import request_in
from bursar.core.nodes.bind_check import Target
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Refusal
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.sim.shape import NodeShape

JOIN_SECONDS_MAX = 300.0
ANSWER_SECONDS_MAX = 60.0
WARMING = 10
# No node has it, so the scheduler leaves these allocations to the benchmark.
NOWHERE = {"bench": "bound-by-hand"}

Log = Callable[[str], None]
Bound = dict[str, tuple[float, float]]  # by allocation: when its bind began, and was committed
T = TypeVar("T")


async def run(*, agents: int, heartbeat: float, seconds: float, secure: int, binds: int, log: Log) -> dict[str, Any]:
    figures: dict[str, Any] = {"bench": "agents", "agents": agents, "beat_seconds": heartbeat}
    async with running_runtime() as (runtime, url):
        names = await register(runtime, NodeShape(max(agents, secure)))
        members = [await _submit(runtime, f"bind-{index:05}") for index in range(binds)]
        async with _server(url, "--grpc-insecure") as (server, address):
            binding = _bind_all(runtime, members, names[:agents], seconds)
            figures |= await _measure(server, CrowdOrder(agents, address, heartbeat), seconds, binding)
            alone = await _measure_alone(CrowdOrder(secure, address, heartbeat, alone=True), seconds) if secure else 0
        log(
            f"agents   {figures['heartbeats_per_s']:9.0f}/s  {agents} agents every {heartbeat:g} s, "
            f"p99 {figures['beat_p99_ms']:.1f} ms, {figures['missed_beats']} missed"
        )
        log(f"memory   {figures['kb_per_agent']:9.1f} KiB per agent in the server")
        log(f"directed {figures['directive_p99_ms']:9.1f} ms p99 from the bind's call to its agent")
        log(f"flat out {figures['max_heartbeats_per_s']:9.0f}/s")
        if secure:
            async with _server(url) as (server, address):
                order = CrowdOrder(secure, address, heartbeat, server.url, server.token)
                figures |= await _measure_secure(server, order, seconds, alone)
            log(
                f"mTLS     {figures['mtls_max_heartbeats_per_s']:9.0f}/s  flat out, {secure} agents, "
                f"{figures['mtls_kb_per_agent']:.1f} KiB each; {figures['mtls_vs_plain']:.2f} of the same in the clear"
            )
    return figures


async def _measure(
    server: BenchServer, order: CrowdOrder, seconds: float, binding: Coroutine[Any, Any, Bound] | None = None
) -> dict[str, Any]:
    """Heartbeats at a steady pace, beside binding if there is any, and then flat out."""
    await _warm(order)
    async with _crowd(order) as crowd:
        before = _memory_bytes(server)
        joined = await crowd.join()
        steady, bound = await asyncio.gather(crowd.ask("steady", seconds), binding or asyncio.sleep(0, {}))
        after = _memory_bytes(server)
        flat = await crowd.ask("flat", seconds)
    return {
        "join_s": joined.seconds,
        "heartbeats_per_s": round(steady.answered / steady.seconds, 1),
        "beat_p50_ms": steady.p50_ms,
        "beat_p99_ms": steady.p99_ms,
        "missed_beats": steady.missed,
        "kb_per_agent": round((after - before) / 1024 / order.agents, 1),
        **(_told(bound, steady) if binding else {}),
        "max_heartbeats_per_s": round(flat.answered / flat.seconds),
        "max_beat_p99_ms": flat.p99_ms,
        "load_cpu": {"steady": steady.cpu, "flat_out": flat.cpu},
    }


async def _measure_alone(order: CrowdOrder, seconds: float) -> float:
    """The baseline for certificates: as many agents with their own connections, without TLS."""
    async with _crowd(order) as crowd:
        await crowd.join()
        flat = await crowd.ask("flat", seconds)
    return flat.answered / flat.seconds


async def _measure_secure(server: BenchServer, order: CrowdOrder, seconds: float, alone: float) -> dict[str, Any]:
    figures = {"agents": order.agents, **await _measure(server, order, seconds)}
    figures["vs_plain"] = round(figures["max_heartbeats_per_s"] / alone, 2)
    return {f"mtls_{name}": figure for name, figure in figures.items()}


async def _warm(order: CrowdOrder) -> None:
    """The cost per agent, without the fixed cost of the server."""
    async with _crowd(msgspec.structs.replace(order, agents=min(order.agents, WARMING))) as crowd:
        await crowd.join()


# Directives.


async def _bind_all(runtime: Runtime, members: list[BindMember], names: list[str], seconds: float) -> Bound:
    """Bind allocations to random agents, evenly over the time; return when each began and was committed."""
    chance, bound = random.Random(1), {}  # noqa: S311
    for member in members:
        await asyncio.sleep(0.9 * seconds / len(members))
        placed = msgspec.structs.replace(member, targets=(Target(chance.choice(names)),))
        began = time.time()
        (reply,) = await placement_ops.bind(runtime, [Bind.unit([placed], BENCH)])
        if isinstance(reply, Refusal):
            raise RuntimeError(f"cannot bind {member.key.name}: {reply.message}")
        bound[member.key.name] = (began, time.time())
    return bound


def _told(bound: Bound, taken: CrowdTaken) -> dict[str, Any]:
    """From the call of each bind to its directive's arrival at the agent, which includes the commit."""
    heard: dict[str, float] = {}
    for name, at in taken.runs:
        heard.setdefault(name, at)
    waits = sorted(heard[name] - began for name, (began, _) in bound.items() if name in heard)
    commits = sorted(committed - began for began, committed in bound.values())
    return {
        "directives": len(waits),
        "directives_missing": len(bound) - len(waits),
        "directive_p50_ms": percentile_ms(waits, 0.5),
        "directive_p99_ms": percentile_ms(waits, 0.99),
        "bind_p50_ms": percentile_ms(commits, 0.5),
    }


async def _submit(runtime: Runtime, name: str) -> BindMember:
    spec = {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}, "scheduling": {"nodeSelector": NOWHERE}}
    document = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
    await create(runtime, "Allocation", document)
    key = Key("Allocation", "default", name)
    stored = await object_ops.get(runtime, key)
    if isinstance(stored, Refusal):
        raise RuntimeError(f"cannot submit {name}: {stored.message}")
    return BindMember(key, (), request_in(stored.doc), stored.gang, stored.uid)


# Processes.


@asynccontextmanager
async def _server(database_url: str, *arguments: str) -> AsyncIterator[tuple[BenchServer, str]]:
    """The server, and where it serves agents."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {"BURSAR_DATABASE_URL": database_url}
    async with running_server("--grpc", address, *arguments, environment=environment) as server:
        yield server, address


def _memory_bytes(server: BenchServer) -> int:
    """The resident memory of the process that serves agents."""
    for one in psutil.Process(server.pid).children(recursive=True):
        if "api" in one.cmdline():
            return int(one.memory_info().rss)
    raise RuntimeError("the server has no API process")


class _Crowd:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def join(self) -> Joined:
        await self._say("join")
        return await self.hear(Joined, JOIN_SECONDS_MAX)

    async def ask(self, command: str, seconds: float) -> CrowdTaken:
        await self._say(f"{command} {seconds}")
        return await self.hear(CrowdTaken, seconds + ANSWER_SECONDS_MAX)

    async def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()

    async def hear(self, answer: type[T], seconds_max: float) -> T:
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds_max):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the agents' process ended; what it said is above")
        return msgspec.json.decode(line, type=answer)


@asynccontextmanager
async def _crowd(order: CrowdOrder) -> AsyncIterator[_Crowd]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bursar.bench.crowd", msgspec.json.encode(order).decode(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
    )  # fmt: skip
    try:
        crowd = _Crowd(process)
        await crowd.hear(Ready, JOIN_SECONDS_MAX)
        yield crowd
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
