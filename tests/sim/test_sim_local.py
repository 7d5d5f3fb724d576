"""Simulated nodes on a real store: bound work runs and ends, even if the simulator is killed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bursar.bench.server import register
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import ENDED
from bursar.core.objects.object import Key, Stored
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime import feed as feed_module
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import evict
from bursar.sim.shape import NodeShape
from bursar.sim.work import EXIT, SECONDS
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from support.nodes.local_nodes import LocalNodes
from support.runtime.runtime import TEST, assert_counters_equal_charges, bind, bind_unit, code, counters, create, delete


@asynccontextmanager
async def acting(runtime: Runtime, nodes: list[str] | None = None, **options: Any) -> AsyncIterator[LocalNodes]:
    one = LocalNodes(runtime, nodes, **options)
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


async def submit(runtime: Runtime, name: str, *, spec: dict[str, Any] | None = None, **notes: str) -> None:
    annotations = {{"seconds": SECONDS, "exit": EXIT}[key]: value for key, value in notes.items()}
    body = {"resources": {"requests": {"nvidia.com/gpu": "1"}}, **(spec or {})}
    metadata = {"name": name, "namespace": "default", "annotations": annotations}
    assert code(await create(runtime, "Allocation", {"metadata": metadata, "spec": body})) == "ok"


async def submitted_and_bound(runtime: Runtime, name: str, *nodes: str, **how: Any) -> None:
    await submit(runtime, name, **how)
    assert code(await bind(runtime, "default", name, *nodes)) == "ok"


async def status(runtime: Runtime, name: str) -> dict[str, Any] | None:
    found = await object_ops.get(runtime, Key("Allocation", "default", name))
    return msgspec.json.decode(found.status) if isinstance(found, Stored) else None


async def until(
    runtime: Runtime, name: str, holds: Callable[[dict[str, Any] | None], bool], seconds: float = 30
) -> dict[str, Any]:
    """Ask until it holds: the status then, empty when it is gone."""
    async with asyncio.timeout(seconds):
        while not holds(now := await status(runtime, name)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return now or {}


async def eventually(holds: Callable[[], bool], seconds: float = 30) -> None:
    """What the nodes have heard themselves, a moment after it was committed."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_in(*phases: str) -> Callable[[dict[str, Any] | None], bool]:
    return lambda now: now is not None and now["phase"] in phases


def is_gone(now: dict[str, Any] | None) -> bool:
    return now is None


async def assert_nothing_is_held(runtime: Runtime) -> None:
    await assert_counters_equal_charges(runtime)
    async with runtime.database.reader() as db:
        capacities = await node_store.load_all(db)
    assert not [capacity.name for capacity in capacities.values() if capacity.allocated]


async def history(runtime: Runtime, name: str) -> list[str]:
    """The phases that an allocation went through, as the feed has them."""
    async with runtime.database.reader() as db:
        changes = await change_store.load_since(db, 0, 10_000)
    phases = [msgspec.json.decode(one.status).get("phase") for one in changes if one.key.name == name]
    return [phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase]


async def test_what_is_bound_runs_and_ends_and_gives_everything_back(runtime: Runtime) -> None:
    await register(runtime, NodeShape(2))
    async with acting(runtime) as nodes:
        await submitted_and_bound(runtime, "quick", "sim-0001", seconds="0.05")
        ended = await until(runtime, "quick", is_in("Succeeded"))
        await eventually(lambda: (nodes.running, nodes.ended) == (0, 1))
    assert ended["exitCode"] == 0
    assert await history(runtime, "quick") == ["Pending", "Scheduled", "Running", "Succeeded"]
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].bound == 0
    await assert_nothing_is_held(runtime)


async def test_an_exit_code_other_than_zero_is_a_failure(runtime: Runtime) -> None:
    await register(runtime, NodeShape(1))
    async with acting(runtime, default_seconds=0.0):
        await submitted_and_bound(runtime, "broken", "sim-0001", exit="3")
        ended = await until(runtime, "broken", is_in(*ENDED))
    assert (ended["phase"], ended["exitCode"]) == ("Failed", 3)
    await assert_nothing_is_held(runtime)


async def test_what_runs_longer_than_it_may_has_expired(runtime: Runtime) -> None:
    await register(runtime, NodeShape(1))
    async with acting(runtime):
        await submitted_and_bound(runtime, "endless", "sim-0001", spec={"ttl": "1s"})
        ended = await until(runtime, "endless", is_in(*ENDED))
    assert (ended["phase"], ended["reason"]) == ("Failed", "Expired")


async def test_work_on_several_nodes_ends_when_each_of_them_has_said_so(runtime: Runtime) -> None:
    await register(runtime, NodeShape(3))
    ours, others = ["sim-0001", "sim-0002"], ["sim-0003"]
    await submitted_and_bound(runtime, "wide", *ours, *others, spec={"nodes": 3}, seconds="0.02")

    def both_of_ours_left(now: dict[str, Any] | None) -> bool:
        return now is not None and sum("phase" in one for one in now["nodes"]) == 2

    async with acting(runtime, ours):
        half = await until(runtime, "wide", both_of_ours_left)
        assert half["phase"] == "Running"
        async with acting(runtime, others):
            await until(runtime, "wide", is_in("Succeeded"))
    await assert_nothing_is_held(runtime)


async def test_what_is_deleted_is_stopped_and_goes(runtime: Runtime) -> None:
    await register(runtime, NodeShape(2))
    async with acting(runtime):
        await submitted_and_bound(runtime, "wide", "sim-0001", "sim-0002", spec={"nodes": 2})
        await until(runtime, "wide", is_in("Running"))
        await delete(runtime, "Allocation", "default", "wide")
        await until(runtime, "wide", is_gone)
    assert (await history(runtime, "wide"))[-2:] == ["Terminating", "Cancelled"]
    await assert_nothing_is_held(runtime)


async def test_what_is_evicted_is_stopped_and_waits_again_and_may_run_again(runtime: Runtime) -> None:
    await register(runtime, NodeShape(2))
    async with acting(runtime, stop_seconds=0.05) as nodes:
        await submitted_and_bound(runtime, "victim", "sim-0001")
        await until(runtime, "victim", is_in("Running"))
        one = await object_ops.get(runtime, Key("Allocation", "default", "victim"))
        assert isinstance(one, Stored)
        notice = Notice("Preempted", "Admin", "oncall", "Preempted by oncall")
        assert code(await evict(runtime, one, notice, TEST)) == "ok"
        waiting = await until(runtime, "victim", is_in("Pending"))
        assert waiting["reason"] == "Preempted"
        await assert_nothing_is_held(runtime)
        assert code(await bind(runtime, "default", "victim", "sim-0002")) == "ok"
        again = await until(runtime, "victim", is_in("Running"))
        assert [one["name"] for one in again["nodes"]] == ["sim-0002"]
        await eventually(lambda: nodes.running == 1)


async def test_members_of_a_gang_are_reported_as_such(runtime: Runtime) -> None:
    await register(runtime, NodeShape(1))
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2, "timeout": "60s"}}
    async with acting(runtime, default_seconds=0.02):
        for name in ("left", "right"):
            await submit(runtime, name, spec=gang)
        assert code(await bind_unit(runtime, "default", {"left": ("sim-0001",), "right": ("sim-0001",)})) == "ok"
        for name in ("left", "right"):
            await until(runtime, name, is_in("Succeeded"))
    await assert_nothing_is_held(runtime)


async def test_whoever_is_killed_in_the_middle_is_replaced_and_nothing_is_lost(runtime: Runtime) -> None:
    """Each phase has something in it when the first one dies, and more comes while nobody acts."""
    await register(runtime, NodeShape(4))
    names = [f"job-{number:02}" for number in range(24)]
    await submit(runtime, names[0], seconds="3")  # long enough to be seen
    for name in names[1:]:
        await submit(runtime, name, seconds="0.3")
    async with acting(runtime):
        for number, name in enumerate(names[:16]):
            await bind(runtime, "default", name, f"sim-{number % 4 + 1:04}")
        await until(runtime, names[0], is_in("Running"))
    await delete(runtime, "Allocation", "default", names[1])
    for number, name in enumerate(names[16:]):
        await bind(runtime, "default", name, f"sim-{number % 4 + 1:04}")
    async with acting(runtime):
        await until(runtime, names[1], is_gone)
        for name in [*names[:1], *names[2:]]:
            await until(runtime, name, is_in("Succeeded"))
    await assert_nothing_is_held(runtime)


async def test_a_report_that_is_refused_for_ever_is_given_up(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement that the database does not know: whatever the node says of it is refused."""
    await register(runtime, NodeShape(1))
    await submitted_and_bound(runtime, "ghost", "sim-0001")
    async with runtime.database.reader() as db:
        await db.execute("DELETE FROM placement")
    said = 0
    say = LocalNodes.say

    async def counted(self: LocalNodes, reports: Any) -> Any:
        nonlocal said
        said += len(reports)
        return await say(self, reports)

    monkeypatch.setattr(LocalNodes, "say", counted)
    async with acting(runtime):
        await submitted_and_bound(runtime, "sound", "sim-0001", seconds="0.2")
        await until(runtime, "sound", is_in("Succeeded"))
    assert await status(runtime, "ghost") is not None
    assert said <= 2 + 2 * 5


async def test_a_follower_that_was_let_go_catches_up(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "QUEUE_MAX", 3)
    await register(runtime, NodeShape(4))
    names = [f"job-{number:02}" for number in range(40)]
    for name in names:
        await submit(runtime, name, seconds="0")
    async with acting(runtime):
        await asyncio.gather(
            *(bind(runtime, "default", name, f"sim-{at % 4 + 1:04}") for at, name in enumerate(names[:32]))
        )
        for name in names[:32]:
            await until(runtime, name, is_in("Succeeded"))
    await assert_nothing_is_held(runtime)


async def test_a_history_that_is_gone_is_listed_anew(runtime: Runtime) -> None:
    await register(runtime, NodeShape(1))
    nodes = LocalNodes(runtime, default_seconds=0.0)
    nodes._seen = 0
    await submitted_and_bound(runtime, "early", "sim-0001")
    async with runtime.database.reader() as db:
        await change_store.raise_floor(db, (await change_store.load_position(db)).revision)
    task = asyncio.create_task(nodes.run())
    await until(runtime, "early", is_in("Succeeded"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nodes_are_registered_quickly_and_once_and_send_heartbeats(runtime: Runtime) -> None:
    names = await register(runtime, NodeShape(1500, gpus=4, racks=10, zones=3, labels={"pool": "test"}))
    assert await register(runtime, NodeShape(1500)) == names
    async with runtime.database.reader() as db:
        capacities = await node_store.load_all(db)
    assert sorted(capacities) == names
    assert capacities["sim-1500"].allocatable["nvidia.com/gpu"] == 4000
    with pytest.raises(ValueError, match="memory"):
        await register(runtime, NodeShape(1, memory="plenty"))

    async def have_sent_heartbeats() -> bool:
        async with runtime.database.reader() as db:
            return len(await node_store.load_last_seen(db, names)) == len(names)

    async with acting(runtime), asyncio.timeout(20):
        while not await have_sent_heartbeats():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_hundreds_run_through_at_once(runtime: Runtime) -> None:
    await register(runtime, NodeShape(50))
    names = [f"job-{number:03}" for number in range(400)]
    await asyncio.gather(*(submit(runtime, name) for name in names))
    async with acting(runtime, default_seconds=0.01) as nodes:
        replies = await asyncio.gather(
            *(bind(runtime, "default", name, f"sim-{at % 50 + 1:04}") for at, name in enumerate(names))
        )
        assert {code(one) for one in replies} == {"ok"}
        await eventually(lambda: nodes.ended == len(names))
        for name in names:
            assert is_in("Succeeded")(await status(runtime, name))
    await assert_nothing_is_held(runtime)
