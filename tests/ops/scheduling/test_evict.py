"""Evictions on a real database: what is stopped waits again, once its nodes say that it is gone, and not before."""

import asyncio
from datetime import timedelta

import msgspec

from bursar.commands.scheduling.bind import NotePending
from bursar.commands.scheduling.evict import EvictionVictim, Preempt
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Stored
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.ops.scheduling.placement import preempt
from bursar.store.nodes import node as node_store
from support.api.site import eventually
from support.runtime.runtime import (
    TEST,
    allocation,
    bind,
    bind_unit,
    code,
    counters,
    delete,
    document,
    end,
    node,
    opened,
)
from support.scheduling.evictions import GPU, PREEMPTED, assert_books_balance, key, running, says, status, stop, stored

# Being stopped, and waiting again.


async def test_what_is_evicted_is_told_why_by_whom_and_by_when(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await running(runtime, "low", "n1")
    told = document(await stop(runtime, "low"))["status"]
    assert (told["phase"], told["reason"], told["message"]) == ("Terminating", "Preempted", "Preempted by prod/urgent")
    notice = told["eviction"]
    assert (notice["reason"], notice["rule"], notice["by"]) == ("Preempted", "LowerPriority", "prod/urgent")
    assert (notice["gracePeriodSeconds"], notice["requeue"]) == (60, True)
    (condition,) = (one for one in told["conditions"] if one["type"] == "Terminating")
    assert (condition["status"], condition["reason"]) == ("True", "Preempted")
    async with runtime.database.reader() as db:
        (placement,) = await node_store.load_placements_on(db, ["n1"])
    assert not placement.wanted
    assert (await counters(runtime))["tenant:default", GPU].bound == 1000, "nothing comes back before it is gone"
    await assert_books_balance(runtime)


async def test_evicted_work_says_why_it_waits_now_beside_why_it_was_stopped(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await running(runtime, "low", "n1")
    await stop(runtime, "low")
    await says(runtime, "n1", "low", Phase.CANCELLED)
    uid = (await stored(runtime, "low")).uid
    note = NotePending(key=key("low"), origin=TEST, uid=uid, reason="no_capacity", message="no node has 1 GPU free")
    for _ in range(2):
        assert code((await placement_ops.note(runtime, [note]))[0]) == "ok"
    told = await status(runtime, "low")
    assert (told["reason"], told["message"]) == ("Preempted", "Preempted by prod/urgent")
    (condition,) = told["conditions"]
    assert (condition["reason"], condition["message"]) == ("no_capacity", "no node has 1 GPU free")


async def test_a_deletion_with_much_time_is_hastened_by_an_eviction(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await running(runtime, "low", "n1")
    await delete(runtime, "Allocation", "default", "low")
    deletion = msgspec.json.decode((await stored(runtime, "low")).doc)["metadata"]["deletionTimestamp"]
    later = document(await stop(runtime, "low"))["status"]["eviction"]["deadline"]
    assert later == deletion, "the deletion's 30 seconds are less than the notice's 60"
    sooner = document(
        await stop(runtime, "low", Notice(EvictionReason.PREEMPTED, EvictionRule.ADMIN, "user:admin", "now", 1))
    )
    assert sooner["status"]["eviction"]["deadline"] < deletion


async def test_a_gang_is_evicted_as_a_whole(runtime: Runtime) -> None:
    for name in ("a", "b", "c"):
        await node(runtime, name, gpu=2)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}}
    for name in ("one", "two"):
        await allocation(runtime, "default", name, spec=gang, gpu=1)
    assert code(await bind_unit(runtime, "default", {"one": ("a",), "two": ("b",)})) == "ok"
    await running(runtime, "alone", "c")
    await stop(runtime, "one")
    assert {name: (await status(runtime, name))["phase"] for name in ("one", "two", "alone")} == {
        "one": "Terminating",
        "two": "Terminating",
        "alone": "Running",
    }
    for name in ("one", "two"):
        assert document(await end(runtime, "default", name, Phase.CANCELLED))["status"]["phase"] == "Pending"
    await assert_books_balance(runtime)
    assert code(await bind_unit(runtime, "default", {"one": ("a",), "two": ("b",)})) == "ok"


async def gang_of_three(runtime: Runtime) -> None:
    """Two of a gang run, and a third that came later waits."""
    for name in ("a", "b", "c"):
        await node(runtime, name, gpu=2)
    for name in ("one", "two", "three"):
        await allocation(runtime, "default", name, spec={"gangScheduling": {"groupId": "g", "minMembers": 2}}, gpu=1)
    assert code(await bind_unit(runtime, "default", {"one": ("a",), "two": ("b",)})) == "ok"


async def phases(runtime: Runtime) -> set[str]:
    return {(await status(runtime, name))["phase"] for name in ("one", "two", "three")}


async def are_waiting(runtime: Runtime, count: int) -> bool:
    """Whether so many wait for a lock."""
    async with runtime.database.reader() as db:
        waiting = await db.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    return bool(waiting == count)


async def test_a_member_placed_while_its_gang_is_evicted_does_not_stay_alone(
    runtime: Runtime, database_url: str
) -> None:
    await gang_of_three(runtime)
    async with opened(database_url) as other:
        async with runtime.database.reader() as db, db.transaction():
            # The rival that comes now has read without locks, and waits.
            await db.execute("SELECT 1 FROM object WHERE kind = 'Allocation' AND name = 'one' FOR UPDATE")
            binding = asyncio.create_task(bind(other, "default", "three", "c"))
            await eventually(lambda: are_waiting(other, 1))
            evicting = asyncio.create_task(stop(runtime, "one"))
            await eventually(lambda: are_waiting(other, 2))
        assert [code(one) for one in await asyncio.gather(binding, evicting)] == ["ok", "ok"]
    assert await phases(runtime) == {"Terminating"}
    await assert_books_balance(runtime)


# Preemption for other work.


def plan(nominee: Stored, *victims: Stored) -> Preempt:
    return Preempt(
        key=nominee.key,
        uid=nominee.uid,
        origin=TEST,
        nominated=("n1",),
        until=now() + timedelta(seconds=90),
        victims=tuple(EvictionVictim(one.key, one.uid, PREEMPTED, one.gang) for one in victims),
    )


async def test_victims_are_stopped_and_their_capacity_is_held_in_one_step(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    for name in ("a", "b"):
        await running(runtime, name, "n1")
    await allocation(runtime, "default", "urgent", gpu=2)
    victims = [await stored(runtime, name) for name in ("a", "b")]
    (reply,) = await preempt(runtime, [plan(await stored(runtime, "urgent"), *victims)])
    ((nomination),) = document(reply)["status"]["nominated"]
    assert nomination["node"] == "n1"
    assert {(await status(runtime, name))["phase"] for name in ("a", "b")} == {"Terminating"}
    for name in ("a", "b"):
        await end(runtime, "default", name, Phase.CANCELLED)
    assert code(await bind(runtime, "default", "urgent", "n1")) == "ok"
    await assert_books_balance(runtime)


async def test_a_gang_that_is_a_victim_goes_with_members_that_the_plan_did_not_know(runtime: Runtime) -> None:
    await gang_of_three(runtime)
    await allocation(runtime, "default", "urgent", gpu=2)
    victims = [await stored(runtime, name) for name in ("one", "two")]
    assert code(await bind(runtime, "default", "three", "c")) == "ok"
    (reply,) = await preempt(runtime, [plan(await stored(runtime, "urgent"), *victims)])
    assert code(reply) == "ok"
    assert await phases(runtime) == {"Terminating"}
    await assert_books_balance(runtime)


async def test_a_plan_that_went_stale_changes_nothing(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "low", "n1")
    await allocation(runtime, "default", "urgent", gpu=1)
    nominee, victim = await stored(runtime, "urgent"), await stored(runtime, "low")
    another = EvictionVictim(victim.key, "alloc-another", PREEMPTED)
    (reply,) = await preempt(runtime, [plan_with(nominee, another)])
    assert code(reply) == "stale"
    await bind(runtime, "default", "urgent", "n1")
    (reply,) = await preempt(runtime, [plan(nominee, victim)])
    assert code(reply) == "stale"
    await end(runtime, "default", "urgent")
    await delete(runtime, "Allocation", "default", "urgent")
    (reply,) = await preempt(runtime, [plan(nominee, victim)])
    assert code(reply) == "stale"
    assert (await status(runtime, "low"))["phase"] == "Running"


def plan_with(nominee: Stored, *victims: EvictionVictim) -> Preempt:
    return Preempt(
        key=nominee.key, uid=nominee.uid, origin=TEST, nominated=("n1",), until=now(), victims=victims
    )  # fmt: skip


async def test_victims_that_are_gone_or_ending_are_skipped(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    for name in ("gone", "done", "ending", "there"):
        await running(runtime, name, "n1")
    await allocation(runtime, "default", "urgent", gpu=1)
    victims = [await stored(runtime, name) for name in ("gone", "done", "ending", "there")]
    await end(runtime, "default", "gone")
    await delete(runtime, "Allocation", "default", "gone")
    await end(runtime, "default", "done")
    await delete(runtime, "Allocation", "default", "ending")
    (reply,) = await preempt(runtime, [plan(await stored(runtime, "urgent"), *victims)])
    assert code(reply) == "ok"
    assert (await status(runtime, "there"))["phase"] == "Terminating"
    assert (await status(runtime, "done"))["phase"] == "Succeeded"
    assert "eviction" not in await status(runtime, "ending")


async def test_two_plans_for_one_victim_in_one_batch_stop_it_once(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await running(runtime, "low", "n1")
    for name in ("u1", "u2"):
        await allocation(runtime, "default", name, gpu=1)
    victim = await stored(runtime, "low")
    plans = [plan(await stored(runtime, name), victim) for name in ("u1", "u2")]
    assert [code(one) for one in await preempt(runtime, plans)] == ["ok", "ok"]
    assert document(await end(runtime, "default", "low", Phase.FAILED))["status"]["phase"] == "Pending"
    await assert_books_balance(runtime)


# Races.


async def test_evictions_race_with_nodes_reports_and_with_deletions(runtime: Runtime, database_url: str) -> None:
    await node(runtime, "n1", gpu=64)
    names = [f"w{index}" for index in range(24)]
    for name in names:
        await running(runtime, name, "n1")
    async with opened(database_url) as other:
        evicted = await asyncio.gather(
            *(stop(other, name) for name in names),
            *(says(runtime, "n1", name, Phase.SUCCEEDED) for name in names[::2]),
            *(delete(runtime, "Allocation", "default", name) for name in names[1::4]),
        )
        for index, name in enumerate(names):
            won = code(evicted[index])
            found = await object_ops.get(runtime, key(name))
            phase = (msgspec.json.decode(found.status))["phase"] if isinstance(found, Stored) else "gone"
            if index % 2 == 0:
                # Whichever came first, it had succeeded by itself.
                assert (won, phase) in {("ok", "Succeeded"), ("stale", "Succeeded")}, name
            else:
                assert (won, phase) == ("ok", "Terminating"), name
        await assert_books_balance(runtime)
        for name in names[1::2]:
            await says(other, "n1", name, Phase.CANCELLED)
    for index, name in enumerate(names):
        if index % 4 == 1:
            assert code(await object_ops.get(runtime, key(name))) == "not_found"
        elif index % 4 == 3:
            assert (await status(runtime, name))["phase"] == "Pending"
    await assert_books_balance(runtime)
