"""Fences on a real database: who was deposed commits nothing, however the two race."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bursar.commands.command import Reply
from bursar.commands.scheduling.bind import Bind, BindMember, NotePending
from bursar.core.nodes.node import WHOLE
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Origin
from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader import resign, stand
from bursar.ops.scheduling.placement import bind, note
from bursar.store.db.database import RACES, Connection, connect
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.scheduling import leader as leader_store
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    code,
    end,
    member,
    node,
    refusal,
)
from support.runtime.runtime import bind as bind_one
from support.scheduling.leaders import load_leader

LONG = 3600.0
GPU = "nvidia.com/gpu"


async def lead(runtime: Runtime, holder: str) -> int:
    fence = await stand(runtime.database, holder, LONG)
    assert fence is not None
    return fence.number


async def run_out(runtime: Runtime) -> None:
    """The term ends, as if it had not been renewed in time."""
    async with runtime.database.reader() as db:
        await db.execute("UPDATE leader SET until = clock_timestamp()")


async def revision(runtime: Runtime) -> int:
    async with runtime.database.reader() as db:
        return (await change_store.load_position(db)).revision


async def until_waiting(runtime: Runtime, count: int = 1) -> None:
    """Until so many wait for locks; asked outside of any transaction, which would keep its first answer."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with runtime.database.reader() as db, asyncio.timeout(30):
        while await db.fetchval(waiting) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def unit(runtime: Runtime, name: str, where: str, origin: Origin = TEST, fence: int | None = None) -> Bind:
    one = await member(runtime, "default", name, where)
    assert isinstance(one, BindMember)
    return Bind.unit([one], origin, fence)


async def test_standing_takes_over_once_and_then_renews(runtime: Runtime, rival: Runtime) -> None:
    taken = await stand(runtime.database, "a", LONG)
    assert taken is not None
    assert not taken.renewed
    again = await stand(runtime.database, "a", LONG)
    assert again is not None
    assert (again.number, again.renewed) == (taken.number, True)
    assert await stand(rival.database, "b", LONG) is None
    assert (await load_leader(rival.database)).holder == "a"
    assert await resign(runtime.database, "a")
    after = await stand(rival.database, "b", LONG)
    assert after is not None
    assert (after.number > taken.number, after.renewed) == (True, False)


async def test_commands_without_a_fence_are_nobody_s_business(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    for name in ("a", "b"):
        await allocation(runtime, "default", name, gpu=1)
    assert code(await bind_one(runtime, "default", "a", "n1")) == "ok"  # nobody leads
    await lead(runtime, "somebody")
    assert code(await bind_one(runtime, "default", "b", "n1")) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_of_one_batch_only_what_carries_an_old_fence_is_refused(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    for name in ("old", "new", "free", "never"):
        await allocation(runtime, "default", name, gpu=1)
    fence = await lead(runtime, "a")
    commands = [
        await unit(runtime, "old", "n1", fence=fence - 1),
        await unit(runtime, "new", "n1", fence=fence),
        await unit(runtime, "free", "n1"),
        await unit(runtime, "never", "n1", fence=fence + 1),
    ]
    replies = await bind(runtime, commands)
    assert [code(one) for one in replies] == ["stale", "ok", "ok", "stale"]
    assert refusal(replies[0]).message == "another controller leads now"
    async with runtime.database.reader() as db:
        placed = await node_store.load_placements_on(db, ["n1"])
    assert {one.name for one in placed} == {"new", "free"}
    await assert_counters_equal_charges(runtime)


async def test_who_was_deposed_leaves_no_trace(runtime: Runtime, rival: Runtime, db: Connection) -> None:
    await node(runtime, "n1", gpu=4)
    await allocation(runtime, "default", "a", gpu=1)
    old = await lead(runtime, "a")
    await run_out(runtime)
    await lead(rival, "b")
    before = await revision(runtime)
    command = await unit(runtime, "a", "n1", fence=old)
    claimed = IdempotencyKey(RequestKey("test", "bind-a"), "")
    replies: list[Reply] = [*await bind(runtime, [command, replace(command, idempotency_key=claimed)])]
    why = NotePending(key=command.key, origin=TEST, uid=command.members[0].uid, reason="Waiting", message="", fence=old)
    replies += await note(runtime, [why])
    assert [code(one) for one in replies] == ["stale"] * 3
    assert await revision(runtime) == before
    assert await db.fetchval("SELECT count(*) FROM request WHERE request_id = 'bind-a'") == 0
    await assert_counters_equal_charges(runtime)


async def test_a_renewal_does_not_wait_for_a_bind_under_way(
    runtime: Runtime, db: Connection, database_url: str
) -> None:
    await node(runtime, "n1", gpu=4)
    await allocation(runtime, "default", "a", gpu=1)
    fence = await lead(runtime, "a")
    impatient = await connect(database_url)
    await impatient.execute("SET lock_timeout = '1ms'")  # a transaction that has to wait fails at once
    async with db.transaction():
        await db.execute("SELECT 1 FROM node WHERE name = 'n1' FOR UPDATE")
        binding = asyncio.create_task(bind(runtime, [await unit(runtime, "a", "n1", fence=fence)]))
        await until_waiting(runtime)
        assert await leader_store.renew(impatient, "a", LONG) == fence
        await run_out(runtime)
        with pytest.raises(RACES):
            await leader_store.take(impatient, "b", LONG)
    assert [code(one) for one in await binding] == ["ok"]
    await impatient.close()


async def test_a_leader_paused_in_the_middle_ends_its_batch_before_the_next_one_leads(
    runtime: Runtime, rival: Runtime, db: Connection
) -> None:
    """The old leader holds its locks while its term runs out; the new one waits for that batch, and for no other."""
    await node(runtime, "n1", gpu=1)
    for name in ("a", "b"):
        await allocation(runtime, "default", name, gpu=1)
    old = await lead(runtime, "a")
    async with db.transaction():
        await db.execute("SELECT 1 FROM node WHERE name = 'n1' FOR UPDATE")
        paused = asyncio.create_task(bind(runtime, [await unit(runtime, "a", "n1", fence=old)]))
        await until_waiting(runtime)
        await run_out(runtime)
        taking = asyncio.create_task(lead(rival, "b"))
        later = asyncio.create_task(bind(runtime, [await unit(runtime, "b", "n1", fence=old)]))
        await until_waiting(runtime, 2)
        assert not taking.done()
    new = await taking
    assert new == old + 1
    # Its batch was committed, or rolled back and then refused; everything after the takeover is refused, or finds no
    # capacity.
    first, second = [code(one) for one in (*await paused, *await later)]
    assert first in ("ok", "stale")
    assert second in ("no_capacity", "stale")
    assert code((await bind(runtime, [await unit(runtime, "b", "n1", fence=old)]))[0]) == "stale"
    both = [await unit(rival, name, "n1", fence=new) for name in ("a", "b")]
    answers = [code(one) for one in await bind(rival, both)]
    assert [first, *answers].count("ok") == 1
    async with runtime.database.reader() as reader:
        capacity = (await node_store.load(reader, ["n1"]))["n1"]
    assert capacity.devices == {GPU: (WHOLE,)}
    await assert_counters_equal_charges(runtime)


async def reign(runtime: Runtime, members: Sequence[BindMember], origin: Origin, fence: int) -> None:
    """Bind everything to the same few nodes, over and over, until told that another leads."""
    deposed = False
    while not deposed:
        for start in range(0, len(members), 8):
            commands = [Bind.unit([one], origin, fence) for one in members[start : start + 8]]
            replies = await bind(runtime, commands)
            deposed = deposed or any(isinstance(one, Refusal) and "leads now" in one.message for one in replies)


async def binds_of(db: Connection, origin: Origin, after: int = 0) -> int:
    count: int = await db.fetchval(
        "SELECT count(*) FROM change WHERE actor = $1 AND revision > $2", origin.actor, after
    )
    return count


async def test_leaders_racing_for_the_same_nodes_never_overfill_them_nor_write_after_they_were_deposed(
    runtime: Runtime, rival: Runtime, db: Connection
) -> None:
    nodes = [f"n{number}" for number in range(4)]
    for name in nodes:
        await node(runtime, name, gpu=4)
    members: list[BindMember] = []
    for number in range(40):
        await allocation(runtime, "default", f"job-{number}", gpu=1)
        one = await member(runtime, "default", f"job-{number}", nodes[number % 4])
        assert isinstance(one, BindMember)
        members.append(one)
    deposed: asyncio.Task[None] | None = None
    for turn in range(6):
        before, origin = Origin(f"leader:{turn - 1}", "bind"), Origin(f"leader:{turn}", "bind")
        own = (runtime, rival)[turn % 2]
        await run_out(runtime)
        fence = await lead(own, f"leader-{turn}")  # in the middle of what the one before is doing
        taken_at = await revision(own)
        order = members if turn % 2 else members[::-1]
        reigning = asyncio.create_task(reign(own, order, origin, fence))
        async with asyncio.timeout(60):
            if deposed is not None:
                await deposed
            assert await binds_of(db, before, taken_at) == 0
            for placed in await db.fetch("SELECT name FROM placement"):
                await end(runtime, "default", placed["name"], Phase.PENDING)
            while not await binds_of(db, origin):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        deposed = reigning
    await run_out(runtime)
    await lead(runtime, "last")
    assert deposed is not None
    await deposed
    async with runtime.database.reader() as reader:
        capacities = await node_store.load_all(reader)
        placements = await node_store.load_placements_on(reader, nodes)
    assert max(Counter(one.uid for one in placements).values()) == 1
    for name, capacity in capacities.items():
        there = [one for one in placements if one.node == name]
        assert capacity.allocated.get(GPU, 0) == WHOLE * len(there) <= 4 * WHOLE
        assert max(Counter(index for one in there for index in one.devices[GPU]).values()) == 1
    await assert_counters_equal_charges(runtime)
