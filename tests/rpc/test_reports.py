"""What a node says of its work: recorded before it is acknowledged, and never when it is of the past."""

import asyncio
from typing import Any

import pytest

from bursar.ops.runtime.runtime import Runtime
from bursar.rpc import agent as agent_module
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.agent_streams import (
    RUN,
    STOP,
    Served,
    acknowledged,
    ended,
    evict,
    joined,
    orders,
    placed,
    running,
    shown,
    status,
    stopped,
)  # fmt: skip
from support.runtime.runtime import allocation, assert_counters_equal_charges, bind, delete, document, namespace, tenant


async def usage_of(runtime: Runtime) -> list[tuple[Any, ...]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT uid, epoch, node, seconds, cpu_seconds, memory_bytes_max FROM allocation_usage")
    return [tuple(row) for row in rows]


async def test_the_life_of_an_allocation_as_its_node_tells_it(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.directive()
    answer = await agent.heartbeat(status(uid, pb.POD_PHASE_STARTING))
    assert not answer.directives
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Scheduled"
    answer = await agent.heartbeat(running(uid))
    assert not answer.acknowledgements, "only ends are acknowledged"
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Running"
    answer = await agent.heartbeat(status(uid, pb.POD_PHASE_FAILED, exit_code=3, reason="Error", message="no\nluck"))
    assert acknowledged(answer) == [(uid, 1)]
    told = (await shown(app.runtime, "a"))["status"]
    assert (told["phase"], told["exitCode"], told["reason"], told["message"]) == ("Failed", 3, "Error", "no luck")
    await assert_counters_equal_charges(app.runtime)


async def test_a_heartbeat_carries_hundreds_of_reports(app: Served) -> None:
    agent = await joined(app)
    uids = [await placed(app.runtime, f"a{index}", "n1", cpu="100m") for index in range(60)]
    await agent.heartbeat(*map(running, uids))
    answer = await agent.heartbeat(*map(ended, uids))
    assert sorted(acknowledged(answer)) == sorted((uid, 1) for uid in uids)
    await assert_counters_equal_charges(app.runtime)


async def test_what_was_deleted_and_stopped_is_gone(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.heartbeat(running(uid))
    await delete(app.runtime, "Allocation", "default", "a")
    answer = await agent.heartbeat(stopped(uid))
    assert acknowledged(answer) == [(uid, 1)]
    assert await shown(app.runtime, "a") is None
    async with app.runtime.database.reader() as db:
        last = await db.fetchval("SELECT status ->> 'phase' FROM change WHERE type = 'DELETED'")
    assert last == "Cancelled"


async def test_what_was_evicted_and_stopped_waits_again_and_then_has_a_higher_epoch(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.heartbeat(running(uid))
    await evict(app.runtime, "a")
    answer = await agent.heartbeat(stopped(uid, reason="Preempted"))
    assert acknowledged(answer) == [(uid, 1)]
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Pending"
    await bind(app.runtime, "default", "a", "n1")
    while orders([await agent.directive()]) != [(RUN, uid, 2)]:
        pass
    # What the first run still says is of the past, and so is what is said of a run that was never ordered.
    answer = await agent.heartbeat(ended(uid, epoch=7), running(uid, epoch=1), running(uid, epoch=2))
    assert acknowledged(answer) == [(uid, 7)]
    assert orders(answer.directives) == [(STOP, uid, 1)]
    told = (await shown(app.runtime, "a"))["status"]
    assert (told["phase"], told["epoch"]) == ("Running", 2)


async def test_an_end_of_an_older_epoch_is_acknowledged_and_changes_nothing(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await evict(app.runtime, "a")
    await agent.heartbeat(stopped(uid))
    await bind(app.runtime, "default", "a", "n1")
    before = await shown(app.runtime, "a")
    answer = await agent.heartbeat(ended(uid, epoch=1))
    assert acknowledged(answer) == [(uid, 1)]
    assert await shown(app.runtime, "a") == before


async def test_what_runs_though_it_is_not_placed_here_is_stopped_at_once(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.heartbeat(running(uid))
    answer = await agent.heartbeat(running("alloc-nobody"), running(uid, epoch=9))
    assert orders(answer.directives) == sorted([(STOP, "alloc-nobody", 1), (STOP, uid, 9)])
    assert {one.grace_seconds for one in answer.directives} == {0}
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Running"


async def test_a_node_learns_and_changes_nothing_of_what_is_others(app: Served) -> None:
    await tenant(app.runtime, "physics")
    await namespace(app.runtime, "secret", "physics")
    mine, theirs = await joined(app, "n1"), await joined(app, "n2")
    await allocation(app.runtime, "secret", "plan", cpu=1)
    uid = document(await bind(app.runtime, "secret", "plan", "n2"))["metadata"]["uid"]
    await theirs.heartbeat(running(uid))
    before = await shown(app.runtime, "plan", "secret")
    usage = pb.AllocationUsage(seconds=5, cpu_seconds=2, memory_bytes=7, memory_bytes_max=9)
    answer = await mine.heartbeat(ended(uid, usage=usage))
    assert acknowledged(answer) == [(uid, 1)]
    answer = await mine.heartbeat(running(uid, usage=usage))
    (directive,) = answer.directives
    assert orders([directive]) == [(STOP, uid, 1)]
    assert (directive.namespace, directive.name, directive.tenant) == ("", "", "")
    assert "plan" not in str(answer)
    assert "secret" not in str(answer)
    assert await shown(app.runtime, "plan", "secret") == before
    assert await usage_of(app.runtime) == []


async def test_what_a_new_stream_says_has_ended_is_not_started_again_in_the_same_breath(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    other = await placed(app.runtime, "b", "n1")
    await agent.heartbeat(running(uid), running(other))
    again = app.agent("n1")
    answer = await again.heartbeat(ended(uid), running(other), running("alloc-stranger"), inventory=True)
    assert answer.complete
    assert acknowledged(answer) == [(uid, 1)]
    assert orders(answer.directives) == sorted([(RUN, other, 1), (STOP, "alloc-stranger", 1)])
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Succeeded"


async def test_use_is_saved_at_the_end_and_now_and_then(app: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.heartbeat(running(uid))

    def usage(seconds: float) -> pb.AllocationUsage:
        return pb.AllocationUsage(seconds=seconds, cpu_seconds=seconds / 2, memory_bytes=1, memory_bytes_max=3)

    await agent.heartbeat(running(uid, usage=usage(1)))
    await agent.heartbeat(running(uid, usage=usage(2)))
    assert await usage_of(app.runtime) == [(uid, 1, "n1", 1.0, 0.5, 3)], "within a minute once"
    monkeypatch.setattr(agent_module, "USAGE_SECONDS", 0.0)
    await agent.heartbeat(running(uid, usage=usage(3)))
    assert await usage_of(app.runtime) == [(uid, 1, "n1", 3.0, 1.5, 3)]
    monkeypatch.undo()
    await agent.heartbeat(ended(uid, usage=usage(4)))
    assert await usage_of(app.runtime) == [(uid, 1, "n1", 4.0, 2.0, 3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_measure_that_cannot_be_is_passed_over(app: Served, bad: float) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.heartbeat(ended(uid, usage=pb.AllocationUsage(seconds=bad, memory_bytes=1)))
    assert await usage_of(app.runtime) == []
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Succeeded"


async def test_deleting_while_a_heartbeat_is_in_flight_ends_in_one_way(app: Served) -> None:
    agent = await joined(app)
    for index in range(12):
        name = f"a{index}"
        uid = await placed(app.runtime, name, "n1")
        while orders([await agent.directive()]) != [(RUN, uid, 1)]:
            pass
        say = running(uid) if index % 2 else ended(uid)
        answer, _ = await asyncio.gather(agent.heartbeat(say), delete(app.runtime, "Allocation", "default", name))
        if not acknowledged(answer):
            directives = [*answer.directives, *agent.pushed]
            agent.pushed.clear()
            while (STOP, uid, 1) not in orders(directives):
                directives.append(await agent.directive())
            assert acknowledged(await agent.heartbeat(stopped(uid))) == [(uid, 1)]
        assert await shown(app.runtime, name) is None or acknowledged(answer)
    await assert_counters_equal_charges(app.runtime)


async def test_the_last_of_several_nodes_ends_the_whole(app: Served) -> None:
    one, two = await joined(app, "n1"), await joined(app, "n2")
    uid = await placed(app.runtime, "both", "n1", "n2", spec={"nodes": 2})
    await asyncio.gather(one.heartbeat(running(uid)), two.heartbeat(running(uid)))
    assert acknowledged(await one.heartbeat(ended(uid))) == [(uid, 1)]
    assert (await shown(app.runtime, "both"))["status"]["phase"] == "Running"
    # Said again, because the acknowledgement was lost: it is acknowledged again, and counts once.
    assert acknowledged(await one.heartbeat(ended(uid))) == [(uid, 1)]
    assert acknowledged(await two.heartbeat(ended(uid))) == [(uid, 1)]
    assert (await shown(app.runtime, "both"))["status"]["phase"] == "Succeeded"
    await assert_counters_equal_charges(app.runtime)
