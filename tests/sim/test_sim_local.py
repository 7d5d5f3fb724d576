"""Simulated nodes on a real store: what is bound runs and ends, whatever happens to whoever plays the nodes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import ENDED
from bursar.core.objects.object import Key, Stored
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime import feed as feed_module
from bursar.ops.runtime.runtime import Office
from bursar.ops.scheduling.evict import evict
from bursar.sim.local import LocalNodes, register
from bursar.sim.work import EXIT, SECONDS
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from support.runtime.runtime import TEST, assert_counters_equal_charges, bind, bind_unit, code, counters, create, delete


@asynccontextmanager
async def acting(office: Office, nodes: list[str] | None = None, **options: Any) -> AsyncIterator[LocalNodes]:
    one = LocalNodes(office, nodes, **options)
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


async def submit(office: Office, name: str, *, spec: dict[str, Any] | None = None, **notes: str) -> None:
    annotations = {{"seconds": SECONDS, "exit": EXIT}[key]: value for key, value in notes.items()}
    body = {"resources": {"requests": {"nvidia.com/gpu": "1"}}, **(spec or {})}
    metadata = {"name": name, "namespace": "default", "annotations": annotations}
    assert code(await create(office, "Allocation", {"metadata": metadata, "spec": body})) == "ok"


async def submitted_and_bound(office: Office, name: str, *nodes: str, **how: Any) -> None:
    await submit(office, name, **how)
    assert code(await bind(office, "default", name, *nodes)) == "ok"


async def status(office: Office, name: str) -> dict[str, Any] | None:
    found = await object_ops.get(office, Key("Allocation", "default", name))
    return msgspec.json.decode(found.status) if isinstance(found, Stored) else None


async def until(
    office: Office, name: str, holds: Callable[[dict[str, Any] | None], bool], seconds: float = 30
) -> dict[str, Any]:
    """Ask until it holds: the status then, empty when it is gone."""
    async with asyncio.timeout(seconds):
        while not holds(now := await status(office, name)):  # noqa: ASYNC110
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


async def assert_nothing_is_held(office: Office) -> None:
    await assert_counters_equal_charges(office)
    async with office.database.reader() as db:
        rooms = await node_store.load_all(db)
    assert not [room.name for room in rooms.values() if room.allocated]


async def history(office: Office, name: str) -> list[str]:
    """The phases that an allocation went through, as the feed has them."""
    async with office.database.reader() as db:
        changes = await change_store.load_since(db, 0, 10_000)
    phases = [msgspec.json.decode(one.status).get("phase") for one in changes if one.key.name == name]
    return [phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase]


async def test_what_is_bound_runs_and_ends_and_gives_everything_back(office: Office) -> None:
    await register(office, 2)
    async with acting(office) as nodes:
        await submitted_and_bound(office, "quick", "sim-0001", seconds="0.05")
        ended = await until(office, "quick", is_in("Succeeded"))
        await eventually(lambda: (nodes.running, nodes.ended) == (0, 1))
    assert ended["exitCode"] == 0
    assert await history(office, "quick") == ["Pending", "Scheduled", "Running", "Succeeded"]
    assert (await counters(office))["tenant:default", "nvidia.com/gpu"].bound == 0
    await assert_nothing_is_held(office)


async def test_an_exit_code_other_than_zero_is_a_failure(office: Office) -> None:
    await register(office, 1)
    async with acting(office, default_seconds=0.0):
        await submitted_and_bound(office, "broken", "sim-0001", exit="3")
        ended = await until(office, "broken", is_in(*ENDED))
    assert (ended["phase"], ended["exitCode"]) == ("Failed", 3)
    await assert_nothing_is_held(office)


async def test_what_runs_longer_than_it_may_has_expired(office: Office) -> None:
    await register(office, 1)
    async with acting(office):
        await submitted_and_bound(office, "endless", "sim-0001", spec={"ttl": "1s"})
        ended = await until(office, "endless", is_in(*ENDED))
    assert (ended["phase"], ended["reason"]) == ("Failed", "Expired")


async def test_work_on_several_nodes_ends_when_each_of_them_has_said_so(office: Office) -> None:
    await register(office, 3)
    ours, others = ["sim-0001", "sim-0002"], ["sim-0003"]
    await submitted_and_bound(office, "wide", *ours, *others, spec={"nodes": 3}, seconds="0.02")

    def both_of_ours_left(now: dict[str, Any] | None) -> bool:
        return now is not None and sum("phase" in one for one in now["nodes"]) == 2

    async with acting(office, ours):
        half = await until(office, "wide", both_of_ours_left)
        assert half["phase"] == "Running"
        async with acting(office, others):
            await until(office, "wide", is_in("Succeeded"))
    await assert_nothing_is_held(office)


async def test_what_is_deleted_is_stopped_and_goes(office: Office) -> None:
    await register(office, 2)
    async with acting(office):
        await submitted_and_bound(office, "wide", "sim-0001", "sim-0002", spec={"nodes": 2})
        await until(office, "wide", is_in("Running"))
        await delete(office, "Allocation", "default", "wide")
        await until(office, "wide", is_gone)
    assert (await history(office, "wide"))[-2:] == ["Terminating", "Cancelled"]
    await assert_nothing_is_held(office)


async def test_what_is_evicted_is_stopped_and_waits_again_and_may_run_again(office: Office) -> None:
    await register(office, 2)
    async with acting(office, stop_seconds=0.05) as nodes:
        await submitted_and_bound(office, "victim", "sim-0001")
        await until(office, "victim", is_in("Running"))
        one = await object_ops.get(office, Key("Allocation", "default", "victim"))
        assert isinstance(one, Stored)
        notice = Notice("Preempted", "Admin", "oncall", "Preempted by oncall")
        assert code(await evict(office, one, notice, TEST)) == "ok"
        waiting = await until(office, "victim", is_in("Pending"))
        assert waiting["reason"] == "Preempted"
        await assert_nothing_is_held(office)
        assert code(await bind(office, "default", "victim", "sim-0002")) == "ok"
        again = await until(office, "victim", is_in("Running"))
        assert [one["name"] for one in again["nodes"]] == ["sim-0002"]
        await eventually(lambda: nodes.running == 1)


async def test_members_of_a_gang_are_reported_as_such(office: Office) -> None:
    await register(office, 1)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2, "timeout": "60s"}}
    async with acting(office, default_seconds=0.02):
        for name in ("left", "right"):
            await submit(office, name, spec=gang)
        assert code(await bind_unit(office, "default", {"left": ("sim-0001",), "right": ("sim-0001",)})) == "ok"
        for name in ("left", "right"):
            await until(office, name, is_in("Succeeded"))
    await assert_nothing_is_held(office)


async def test_whoever_is_killed_in_the_middle_is_replaced_and_nothing_is_lost(office: Office) -> None:
    """Each phase has something in it when the first one dies, and more comes while nobody acts."""
    await register(office, 4)
    names = [f"job-{number:02}" for number in range(24)]
    await submit(office, names[0], seconds="3")  # long enough to be seen
    for name in names[1:]:
        await submit(office, name, seconds="0.3")
    async with acting(office):
        for number, name in enumerate(names[:16]):
            await bind(office, "default", name, f"sim-{number % 4 + 1:04}")
        await until(office, names[0], is_in("Running"))
    await delete(office, "Allocation", "default", names[1])
    for number, name in enumerate(names[16:]):
        await bind(office, "default", name, f"sim-{number % 4 + 1:04}")
    async with acting(office):
        await until(office, names[1], is_gone)
        for name in [*names[:1], *names[2:]]:
            await until(office, name, is_in("Succeeded"))
    await assert_nothing_is_held(office)


async def test_a_report_that_is_refused_for_ever_is_given_up(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement that the database does not know: whatever the node says of it is refused."""
    await register(office, 1)
    await submitted_and_bound(office, "ghost", "sim-0001")
    async with office.database.reader() as db:
        await db.execute("DELETE FROM placement")
    said = 0
    say = LocalNodes.say

    async def counted(self: LocalNodes, reports: Any) -> Any:
        nonlocal said
        said += len(reports)
        return await say(self, reports)

    monkeypatch.setattr(LocalNodes, "say", counted)
    async with acting(office):
        await submitted_and_bound(office, "sound", "sim-0001", seconds="0.2")
        await until(office, "sound", is_in("Succeeded"))
    assert await status(office, "ghost") is not None
    assert said <= 2 + 2 * 5


async def test_a_follower_that_was_let_go_catches_up(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "QUEUE_MAX", 3)
    await register(office, 4)
    names = [f"job-{number:02}" for number in range(40)]
    for name in names:
        await submit(office, name, seconds="0")
    async with acting(office):
        await asyncio.gather(
            *(bind(office, "default", name, f"sim-{at % 4 + 1:04}") for at, name in enumerate(names[:32]))
        )
        for name in names[:32]:
            await until(office, name, is_in("Succeeded"))
    await assert_nothing_is_held(office)


async def test_a_history_that_is_gone_is_listed_anew(office: Office) -> None:
    await register(office, 1)
    nodes = LocalNodes(office, default_seconds=0.0)
    nodes._seen = 0
    await submitted_and_bound(office, "early", "sim-0001")
    async with office.database.reader() as db:
        await change_store.raise_floor(db, (await change_store.load_position(db)).revision)
    task = asyncio.create_task(nodes.run())
    await until(office, "early", is_in("Succeeded"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nodes_are_registered_quickly_and_once_and_beat(office: Office) -> None:
    names = await register(office, 1500, gpus=4, racks=10, zones=3, labels={"pool": "test"})
    assert await register(office, 1500) == names
    async with office.database.reader() as db:
        rooms = await node_store.load_all(db)
    assert sorted(rooms) == names
    assert rooms["sim-1500"].allocatable["nvidia.com/gpu"] == 4000
    with pytest.raises(ValueError, match="memory"):
        await register(office, 1, memory="plenty")

    async def have_beaten() -> bool:
        async with office.database.reader() as db:
            return len(await node_store.load_last_seen(db, names)) == len(names)

    async with acting(office), asyncio.timeout(20):
        while not await have_beaten():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_hundreds_run_through_at_once(office: Office) -> None:
    await register(office, 50)
    names = [f"job-{number:03}" for number in range(400)]
    await asyncio.gather(*(submit(office, name) for name in names))
    async with acting(office, default_seconds=0.01) as nodes:
        replies = await asyncio.gather(
            *(bind(office, "default", name, f"sim-{at % 50 + 1:04}") for at, name in enumerate(names))
        )
        assert {code(one) for one in replies} == {"ok"}
        await eventually(lambda: nodes.ended == len(names))
        for name in names:
            assert is_in("Succeeded")(await status(office, name))
    await assert_nothing_is_held(office)
