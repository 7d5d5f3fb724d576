"""Many simulated agents over gRPC, with a control plane that the test plays: who says what, when, and once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from bursar.agent.machine.types import PlacementState, Run, Stop
from bursar.sim.agents import AgentCrowd, HeartbeatMeter, StreamRefused
from bursar.sim.fake_executor import FakeBehaviour
from bursar.sim.transport import PlainTransport
from bursar.sim.work import SECONDS
from support.nodes.plain_control_plane import Plane, played


@asynccontextmanager
async def acting(
    address: str, names: Iterable[str], *, streams: int = 100, **options: Any
) -> AsyncIterator[AgentCrowd]:
    line = PlainTransport(address, streams)
    crowd = AgentCrowd(list(names), line, **options)
    task = asyncio.create_task(crowd.run())
    try:
        async with asyncio.timeout(30):
            await asyncio.wait({task, asyncio.create_task(crowd.joined.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield crowd
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await line.close()


async def eventually(holds: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def wanted(uid: str, epoch: int = 1, seconds: str = "") -> Run:
    return Run(uid, epoch, "team", uid, annotations={SECONDS: seconds} if seconds else {})


async def test_each_agent_says_who_it_is_and_what_it_has_and_goes_on_with_heartbeats() -> None:
    plane, names = Plane(), [f"sim-{number}" for number in range(25)]
    async with played(plane) as address, acting(address, names, streams=10, capacity={"cpu": "96"}) as crowd:
        assert crowd.connected == 25
        await eventually(lambda: all(len(plane.heartbeats[name]) >= 3 for name in names))
    assert sorted(plane.first) == sorted(names)
    for (first,) in plane.first.values():
        assert (first.inventory, first.protocol_version, dict(first.capacity)) == (True, 1, {"cpu": "96"})
    assert all(heartbeats == list(range(1, len(heartbeats) + 1)) for heartbeats in plane.heartbeats.values())


async def test_what_is_wanted_from_the_beginning_and_what_comes_later_runs_and_ends() -> None:
    plane = Plane()
    plane.wanted = {"a": [wanted("early", seconds="0.05")]}
    async with played(plane) as address, acting(address, "ab", manner=FakeBehaviour(default_seconds=0.0)) as crowd:
        await plane.push("b", wanted("late"), wanted("again", 7))
        await eventually(lambda: crowd.ended == 3)
        await eventually(lambda: set(plane.states.values()) == {PlacementState.SUCCEEDED})
        assert set(plane.states) == {("early", 1), ("late", 1), ("again", 7)}
        assert crowd.running == 0


async def test_what_is_told_to_stop_stops_and_what_was_never_there_is_said_to_have_ended() -> None:
    plane = Plane()
    async with played(plane) as address, acting(address, "a") as crowd:
        await plane.push("a", wanted("victim"))
        await eventually(lambda: plane.states.get(("victim", 1)) is PlacementState.RUNNING)
        await plane.push("a", Stop("victim", 1, 30, "Preempted"), Stop("ghost", 2, 30))
        await eventually(
            lambda: (
                (plane.states[("victim", 1)], plane.states.get(("ghost", 2)))
                == (PlacementState.STOPPED, PlacementState.STOPPED)
            )
        )
        assert crowd.ended == 1


async def test_a_lost_server_is_found_again_and_is_told_everything() -> None:
    """What ended meanwhile is told on the new stream, and what still runs goes on."""
    plane = Plane()
    async with played(plane) as address:
        port = int(address.rpartition(":")[2])
        plane.wanted = {"a": [wanted("long"), wanted("short", seconds="0.3")]}
        background = acting(address, "ab")
        crowd = await background.__aenter__()
        await eventually(lambda: crowd.running == 2)
    try:
        await eventually(lambda: crowd.ended == 1)
        again = Plane()
        again.wanted = {"a": [wanted("long")]}
        async with played(again, port):
            await eventually(lambda: sorted(again.first) == ["a", "b"])
            await eventually(lambda: again.states.get(("long", 1)) is PlacementState.RUNNING)
            assert again.states[("short", 1)] is PlacementState.SUCCEEDED
            assert crowd.running == 1
    finally:
        await background.__aexit__(None, None, None)


async def test_an_agent_that_is_refused_ends_the_simulation_with_the_reason() -> None:
    plane = Plane()
    plane.refusal = (grpc.StatusCode.PERMISSION_DENIED, "there is no node 'a'")
    async with played(plane) as address:
        with pytest.RaisesGroup(pytest.RaisesExc(StreamRefused, match="there is no node 'a'")):
            async with acting(address, "a"):
                pass


async def test_who_is_refused_later_tries_again() -> None:
    plane = Plane()
    async with played(plane) as address, acting(address, "ab", beat_seconds=0.05) as crowd:
        plane.refusal = (grpc.StatusCode.PERMISSION_DENIED, "fenced")
        await eventually(lambda: crowd.connected == 0)
        plane.refusal = None
        await eventually(lambda: crowd.connected == 2)


async def test_heartbeats_are_counted_and_so_are_those_without_an_answer() -> None:
    plane = Plane()
    async with played(plane) as address, acting(address, "abc", beat_seconds=0.05) as crowd:
        meter = crowd.meter = HeartbeatMeter()
        await plane.push("b", wanted("noted"))
        await eventually(lambda: meter.answered >= 30)
        assert len(meter.waits) == meter.answered
        assert [name for name, _ in meter.runs] == ["noted"]
        plane.mute = True
        await eventually(lambda: meter.missed >= 3)


async def test_flat_out_some_send_heartbeats_as_soon_as_they_are_answered() -> None:
    plane = Plane()
    plane.beat_seconds = 600
    async with played(plane) as address, acting(address, "abcdefgh") as crowd:
        meter = crowd.meter = HeartbeatMeter()
        crowd.go_flat_out(4)
        await eventually(lambda: meter.answered >= 400)
        crowd.slow_down()
        assert meter.missed == 0
        assert [name for name, heartbeats in sorted(plane.heartbeats.items()) if len(heartbeats) > 5] == [
            "a",
            "c",
            "e",
            "g",
        ]
