"""Streams without the gRPC library, against a server that is the library's: what one says the other understands."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from bursar.agent.machine.types import PlacementState, Run
from bursar.bench.h2 import RawLine
from bursar.sim.agents import AgentCrowd
from bursar.sim.work import SECONDS
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.plain_control_plane import Plane, played


@asynccontextmanager
async def acting(address: str, names: list[str], streams: int) -> AsyncIterator[AgentCrowd]:
    line = RawLine(address, streams)
    crowd = AgentCrowd(names, line, beat_seconds=0.1)
    task = asyncio.create_task(crowd.run())
    try:
        async with asyncio.timeout(30):
            await crowd.joined.wait()
        yield crowd
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await line.close()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_many_streams_share_a_connection_and_each_is_its_own() -> None:
    plane, names = Plane(), [f"sim-{number}" for number in range(25)]
    async with played(plane) as address, acting(address, names, streams=10) as crowd:
        for number in range(300):  # more than fits into one frame
            plane.wanted.setdefault("sim-3", []).append(Run(f"alloc-{number}", 1, "team", "x" * 90))
        await plane.push("sim-7", Run("alloc-a", 1, "team", "a", annotations={SECONDS: "0"}))
        await plane.push("sim-3", *plane.wanted["sim-3"])
        await eventually(lambda: crowd.running == 300)
        await eventually(lambda: plane.states.get(("alloc-a", 1)) is PlacementState.SUCCEEDED)
        await eventually(lambda: all(len(plane.heartbeats[name]) >= 5 for name in names))
    assert all(heartbeats == list(range(1, len(heartbeats) + 1)) for heartbeats in plane.heartbeats.values())


async def test_whoever_is_sent_away_comes_back() -> None:
    plane = Plane()
    async with played(plane) as address, acting(address, ["a", "b"], streams=10) as crowd:
        plane.refusal = (grpc.StatusCode.UNAVAILABLE, "stopping")
        await eventually(lambda: crowd.connected == 0)
        plane.refusal = None
        await eventually(lambda: crowd.connected == 2)


async def test_nobody_there_is_an_error_of_the_library() -> None:
    async with played(Plane()) as address:
        pass
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await RawLine(address).dial("a")


async def test_a_server_that_goes_ends_the_streams() -> None:
    async with played(Plane()) as address:
        line = RawLine(address)
        call = await line.dial("a")
        await call.write(pb.HeartbeatRequest(node_id="a", seq=1, protocol_version=1, inventory=True))
        assert (await call.read()).complete
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await line.close()
