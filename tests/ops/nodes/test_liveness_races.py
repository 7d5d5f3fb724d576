"""Nodes that come back, report and are fenced at the very moment at which they are given up; several controllers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bursar.commands.nodes.liveness import EndLost
from bursar.core.nodes.liveness import Liveness, Patience
from bursar.core.objects.allocation import Phase
from bursar.ops.nodes.fence import Fenced, fence
from bursar.ops.nodes.liveness import node_alive, set_readiness
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Connection
from support.api.site import eventually
from support.nodes.liveness import hear, look, node_status, regrant, schedulable, silence
from support.runtime.runtime import TEST, allocation, bind, code, node, opened
from support.scheduling.evictions import assert_books_balance, running, says, status, stored

REQUEUE = {"onNodeLost": "requeue"}


async def ending(runtime: Runtime, name: str, on: str) -> EndLost:
    one = await stored(runtime, name)
    return EndLost(key=one.key, origin=TEST, uid=one.uid, gang=one.gang, node=on, epoch=1, message="lost")


@asynccontextmanager
async def held(runtime: Runtime, statement: str, *values: object) -> AsyncIterator[Connection]:
    """A transaction of another that has done this and is not committed until the end."""
    db = await runtime.database.connect()
    try:
        await db.execute("SET idle_in_transaction_session_timeout = 0")
        async with db.transaction():
            await db.execute(statement, *values)
            yield db
    finally:
        await db.close()


async def waits_for_a_lock(runtime: Runtime, sessions: int = 1) -> bool:
    async with runtime.database.reader() as db:
        waiting = await db.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
    return bool(waiting == sessions)


BEAT = "UPDATE node_seen SET at = now(), granted_until = now() + interval '2 min' WHERE node = $1"


async def test_a_heartbeat_that_is_being_committed_keeps_a_node_from_being_lost(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1")
    async with held(runtime, BEAT, "n1"):
        saying = asyncio.create_task(set_readiness(runtime, [("n1", Liveness.LOST)], Patience()))
        await eventually(lambda: waits_for_a_lock(runtime))
    (reply,) = await saying
    assert code(reply) == "stale"
    assert (await node_status(runtime, "n1"))["phase"] == "Ready"
    assert await schedulable(runtime, "n1")


async def test_a_heartbeat_that_is_being_committed_keeps_work_from_being_given_up(runtime: Runtime) -> None:
    """Once its answer is sent the node may start what is wanted of it: then it must still be the node's."""
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", granted=-100)
    await look(runtime)
    await regrant(runtime, "n1", granted=100)
    async with held(runtime, BEAT, "n1"):
        giving_up = asyncio.create_task(runtime.binding.submit(await ending(runtime, "a", "n1"), ""))
        await eventually(lambda: waits_for_a_lock(runtime))
    assert code(await giving_up) == "stale"
    assert (await status(runtime, "a"))["phase"] == "Running"
    await node_alive(runtime, ["n1"])
    assert "reason" not in await status(runtime, "a")


async def test_a_heartbeat_waits_for_work_that_is_being_given_up(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", granted=-100)
    await look(runtime)
    await regrant(runtime, "n1", granted=100)
    # The revision is its last lock: it holds all others by then.
    async with held(runtime, "SELECT 1 FROM revision FOR NO KEY UPDATE"):
        giving_up = asyncio.create_task(runtime.binding.submit(await ending(runtime, "a", "n1"), ""))
        await eventually(lambda: waits_for_a_lock(runtime))
        heartbeating = asyncio.create_task(hear(runtime, "n1"))
        # A node is not heard while its work is being given up.
        await eventually(lambda: waits_for_a_lock(runtime, 2))
    assert code(await giving_up) == "ok"
    await heartbeating
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM placement WHERE node = 'n1'") == 0, "it finds what was decided"
    assert (await status(runtime, "a"))["phase"] == "Pending"
    await assert_books_balance(runtime)


async def test_reports_and_fences_at_once_end_everything_exactly_once(runtime: Runtime, database_url: str) -> None:
    count = 24
    await node(runtime, "n1", gpu=count)
    await node(runtime, "n2", gpu=count)
    for index in range(count):
        await running(runtime, f"w{index}", "n1", spec=REQUEUE if index % 2 else {"onNodeLost": "fail"})
    await silence(runtime, "n1", seconds=20)
    async with opened(database_url) as other:
        outcomes = await asyncio.gather(
            fence(runtime, "n1", TEST, "off"),
            *(says(other, "n1", f"w{index}", Phase.SUCCEEDED, epoch=1) for index in range(count)),
            fence(other, "n1", TEST, "off"),
        )
    done = [one for one in (outcomes[0], outcomes[-1]) if isinstance(one, Fenced)]
    assert len(done) == 2
    left = [await status(runtime, f"w{index}") for index in range(count)]
    reported = sum(code(reply) == "ok" for reply in outcomes[1:-1])
    assert sum(one["phase"] == "Succeeded" for one in left) == reported
    assert sum(one["phase"] in ("Pending", "Failed") for one in left) == count - reported
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM placement") == 0
        ends = await db.fetch(
            """SELECT name FROM change WHERE kind = 'Allocation'
                  AND before_fields ->> 'spec.nodeName' = 'n1' AND fields ->> 'spec.nodeName' = ''"""
        )
    assert sorted(row["name"] for row in ends) == sorted(f"w{index}" for index in range(count))
    await assert_books_balance(runtime)


async def test_who_comes_late_changes_nothing_of_what_runs_elsewhere(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", granted=100)
    await look(runtime)
    assert code(await bind(runtime, "default", "a", "n2")) == "ok"
    await says(runtime, "n2", "a", Phase.RUNNING, epoch=2)
    await hear(runtime, "n1")
    await look(runtime)
    before = (await stored(runtime, "a")).revision
    for phase in (Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED):
        assert code(await says(runtime, "n1", "a", phase, epoch=1)) == "stale"
    assert code(await runtime.binding.submit(await ending(runtime, "a", "n1"), "")) == "stale"
    assert (await stored(runtime, "a")).revision == before


async def test_a_new_placement_on_the_same_node_is_not_ended_by_what_was_decided_of_the_old_one(
    runtime: Runtime,
) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", granted=100)
    late = await ending(runtime, "a", "n1")
    await look(runtime)
    await hear(runtime, "n1")
    await look(runtime)
    assert code(await bind(runtime, "default", "a", "n1")) == "ok"
    await silence(runtime, "n1", granted=100)
    await set_readiness(runtime, [("n1", Liveness.LOST)], Patience())
    assert code(await runtime.binding.submit(late, "")) == "stale"
    assert (await status(runtime, "a"))["phase"] == "Scheduled"


async def test_nodes_that_flap_while_two_controllers_look_end_as_they_are(runtime: Runtime, database_url: str) -> None:
    names = [f"n{index}" for index in range(8)]
    for name in names:
        await node(runtime, name, gpu=2)
        await running(runtime, f"w-{name}", name, spec=REQUEUE)
    others = [f"m{index}" for index in range(40)]
    for name in others:
        await node(runtime, name, gpu=1)
    await hear(runtime, *others)

    async def flap(one: Runtime) -> None:
        for turn in range(6):
            await silence(one, *names[turn % 2 :: 2], seconds=70, granted=-60)
            await look(one)
            await hear(one, *names)
            await node_alive(one, names)

    async with opened(database_url) as other:
        await asyncio.gather(flap(runtime), flap(other), look(runtime, 6), look(other, 6))
    await hear(runtime, *names)
    await look(runtime, 2)
    for name in names:
        shown, work = await node_status(runtime, name), await status(runtime, f"w-{name}")
        assert shown["phase"] == "Ready"
        assert await schedulable(runtime, name)
        assert (work["phase"], work.get("reason")) == ("Running", None), "no lease had run out"
        assert not [one for one in work["conditions"] if one["type"] == "NodeLost"]
    await assert_books_balance(runtime)


async def test_binds_that_race_with_a_node_falling_silent_leave_nothing_new_on_it(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=32)
    for index in range(16):
        await running(runtime, f"old{index}", "n1")
    await silence(runtime, "n1", seconds=20)
    for index in range(16):
        await allocation(runtime, "default", f"new{index}", gpu=1)
    replies = await asyncio.gather(
        *(bind(runtime, "default", f"new{index}", "n1") for index in range(8)),
        look(runtime),
        *(bind(runtime, "default", f"new{index}", "n1") for index in range(8, 16)),
    )
    assert not await schedulable(runtime, "n1")
    assert {code(reply) for reply in replies if reply is not None} <= {"ok", "stale"}
    assert code(await bind(runtime, "default", "new15", "n1")) == "stale"
    await assert_books_balance(runtime)
