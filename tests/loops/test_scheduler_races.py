"""Two schedulers on one database: a deposed one commits nothing, and the new one does not repeat what the old one
began."""

import asyncio
import os
import random
import signal
from dataclasses import replace
from typing import cast

import pytest

from bursar.commands.scheduling.bind import Bind
from bursar.core.objects.allocation import Phase
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.values.refusal import Refusal
from bursar.loops.schedule import Scheduler
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import bind
from bursar.ops.scheduling.plan_commands import bind_commands
from bursar.store.db.database import Connection
from support.runtime.runtime import change, end, node
from support.scheduling.evictions import assert_books_balance
from support.scheduling.schedulers import (
    GPU,
    HASTY,
    acting,
    assert_placed_once,
    changes,
    gang,
    is_in,
    loaded,
    scheduling,
    settled,
    status,
    stopped,
    submit,
    term,
    times_bound,
    until,
)

SOAK = bool(os.environ.get("BURSAR_SOAK"))
ROUNDS = 40 if SOAK else 2


async def backlog(runtime: Runtime, count: int, stem: str = "job") -> list[str]:
    names = [f"{stem}-{number}" for number in range(count)]
    await asyncio.gather(*(submit(runtime, name) for name in names))
    return names


# Who was deposed.


async def test_who_was_deposed_binds_nothing_and_ends(runtime: Runtime, rival: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=50)
    first = Scheduler(runtime, await term(runtime, "old"))
    working = asyncio.create_task(first.run())
    await asyncio.wait_for(first.loaded.wait(), 60)
    fence = await term(rival, "new", depose=True)
    names = await backlog(rival, 100)
    await asyncio.wait_for(working, 60)  # it was refused, and ended by itself
    assert await times_bound(runtime) == {}
    async with scheduling(rival, fence=fence) as second:
        await settled(second)
    await assert_placed_once(runtime, *names)


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_leader_is_deposed_in_the_middle_of_a_backlog(runtime: Runtime, rival: Runtime, seed: int) -> None:
    """Both plan for the same capacity at the same time; the change of leaders falls between two of their batches."""
    for name in ("n1", "n2", "n3"):
        await node(runtime, name, gpu=50)
    fates = random.Random(seed)
    first = Scheduler(runtime, await term(runtime, "old"), SchedulingPolicy(placements_max=20))
    working = asyncio.create_task(first.run())
    await asyncio.wait_for(first.loaded.wait(), 60)
    names = [f"job-{number}" for number in range(150)]
    submitting = asyncio.gather(*(submit(rival, name) for name in names))
    wanted = fates.randrange(1, 120)
    async with asyncio.timeout(60):
        while sum((await times_bound(rival)).values()) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    async with scheduling(rival, placements_max=20, fence=await term(rival, "new", depose=True)) as second:
        await submitting
        await settled(second)
        await asyncio.wait_for(stopped(working), 60)
    await assert_placed_once(runtime, *names)


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_commit_worker_that_is_killed_again_and_again_binds_everything_once(
    runtime: Runtime, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had committed by then: the leader looks, and goes on from there."""
    monkeypatch.setattr("bursar.loops.schedule.COMMIT_WORKER_FROM", 1)
    for name in ("n1", "n2", "n3"):
        await node(runtime, name, gpu=100)
    fates = random.Random(seed)
    async with scheduling(runtime, placements_max=20) as scheduler:
        names: list[str] = []
        killed: int | None = None
        for turn in range(3):
            scheduler.worker.call()
            async with asyncio.timeout(60):
                while not scheduler.worker.is_at_work or scheduler.worker.pid == killed:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            submitting = asyncio.create_task(backlog(runtime, 80, f"job-{turn}"))
            await asyncio.sleep(fates.uniform(0.0, 0.1))  # a moment that nobody chose
            killed = scheduler.worker.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            names += await submitting
            await settled(scheduler)
    await assert_placed_once(runtime, *names)


# What is being committed.


async def test_a_gang_is_not_failed_again_while_it_is_being_failed(runtime: Runtime, db: Connection) -> None:
    await node(runtime, "n1", gpu=4)
    async with scheduling(runtime) as scheduler:
        await submit(runtime, "a", spec=gang("g", 2, "1s"))
        async with db.transaction():
            await db.fetch("SELECT FROM gang WHERE name = 'g' FOR UPDATE")
            async with asyncio.timeout(60):
                while not scheduler.informer.committing:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for _ in range(20):
                scheduler.nudge()
                await asyncio.sleep(0.02)
            assert list(scheduler.informer.committing.values()) == [1]
        assert (await until(runtime, "a", is_in("Failed")))["reason"] == "GangTimeout"


# Without fences.


async def plan_of(runtime: Runtime, policy: SchedulingPolicy) -> list[Bind]:
    """What a scheduler would commit now, with nobody to say that it may not."""
    informer = await loaded(runtime)
    plan = decide(informer.cluster, policy, 2e9)
    return [replace(one, fence=None) for one in bind_commands(informer.cluster, plan.bindings, 0)]


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_plans_that_race_without_fences_never_overfill_anything(
    runtime: Runtime, rival: Runtime, seed: int
) -> None:
    fates = random.Random(seed)
    await change(runtime, "Tenant", "", "default", limits={GPU: 30}, enforcement="Queue")
    for number in range(4):
        await node(runtime, f"n{number}", gpu=8, cpu=100)
    sizes = [fates.choice([0.5, 1, 2, 4]) for _ in range(40)]
    await asyncio.gather(*(submit(runtime, f"job-{at}", gpu=size) for at, size in enumerate(sizes)))
    for group in ("g", "h"):
        for part in ("a", "b", "c"):
            await submit(runtime, f"{group}-{part}", spec=gang(group, 3))
    refused = 0
    for _ in range(4):
        plans = await asyncio.gather(plan_of(runtime, SchedulingPolicy()), plan_of(rival, SchedulingPolicy()))
        for one in plans:
            fates.shuffle(one)
        replies = await asyncio.gather(bind(runtime, plans[0]), bind(rival, plans[1]))
        refused += sum(isinstance(reply, Refusal) for some in replies for reply in some)
        await assert_books_balance(runtime)
        for name in list(await times_bound(runtime))[:6]:
            await end(runtime, "default", name)
    assert refused, "they did race"
    for group in ("g", "h"):
        phases = {(await status(runtime, f"{group}-{part}"))["phase"] for part in ("a", "b", "c")}
        assert phases == {"Pending"} or "Pending" not in phases, "all of a gang, or none of it"
    assert max((await times_bound(runtime)).values()) == 1
    await assert_books_balance(runtime)


async def test_schedulers_that_race_without_fences_place_everything_once(runtime: Runtime, rival: Runtime) -> None:
    """Neither of them knows of the other but by the feed, and by what is refused."""
    for number in range(4):
        await node(runtime, f"n{number}", gpu=20)
    policy, nobodys = (
        SchedulingPolicy(placements_max=10),
        cast("int", None),
    )  # commands without a fence are refused to nobody
    schedulers = [Scheduler(one, nobodys, policy) for one in (runtime, rival)]
    working = [asyncio.create_task(one.run()) for one in schedulers]
    names = await backlog(runtime, 80)
    for name in names:
        await until(runtime, name, is_in("Scheduled"))
    for one in schedulers:
        await settled(one)
        assert len(one.cluster.placed) == len(names), "each knows what the other did"
    await asyncio.gather(*(stopped(task) for task in working))
    await assert_placed_once(runtime, *names)


# A leader that ends in the middle.


async def evictions(runtime: Runtime, *names: str) -> dict[str, int]:
    """How often each was told to stop."""
    return {
        name: sum(one.type == "MODIFIED" and b'"Terminating"' in one.status for one in await changes(runtime, name))
        for name in names
    }


@pytest.mark.parametrize("moment", ["before it is committed", "after it was committed"])
async def test_who_leads_next_keeps_promises_and_evicts_nobody_twice(
    runtime: Runtime, rival: Runtime, db: Connection, moment: str
) -> None:
    """The first leader is cancelled while its evictions are being committed, or right after that."""
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=2)
    low = ("low-1", "low-2")
    async with scheduling(runtime) as before:
        for name in low:
            await submit(runtime, name, gpu=2)
        await settled(before)
    policy = replace(HASTY, grace_seconds=600.0)
    first = Scheduler(runtime, await term(runtime), policy)
    working = asyncio.create_task(first.run())
    await asyncio.wait_for(first.loaded.wait(), 60)
    gate = db.transaction()
    await gate.start()
    if moment == "before it is committed":
        await db.execute("SELECT 1 FROM leader FOR UPDATE")  # whatever carries a fence waits here
    await submit(rival, "urgent", gpu=2, spec={"priority": 1000})
    async with asyncio.timeout(60):
        while not first.cluster.nominated:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    if moment == "after it was committed":
        await until(rival, "urgent", lambda now: bool(now.get("nominated")))
    await stopped(working)
    await gate.rollback()
    async with scheduling(rival, policy, fence=await term(rival, "new", depose=True)):
        told = await until(rival, "urgent", lambda now: bool(now.get("nominated")))
        (where,) = [one["node"] for one in told["nominated"]]
        await submit(rival, "later")
        await until(rival, "later", lambda now: now.get("reason", "Unscheduled") != "Unscheduled")
        (victim,) = [name for name in low if (await status(rival, name))["phase"] == "Terminating"]
        assert (await status(rival, victim))["nodeName"] == where
        await end(rival, "default", victim, Phase.CANCELLED)
        await until(rival, "urgent", is_in("Scheduled"))
        assert (await status(rival, "urgent"))["nodeName"] == where
    told_to_stop = await evictions(runtime, *low)
    assert sorted(told_to_stop.values()) == [0, 1]
    assert (await times_bound(runtime))["urgent"] == 1
    await assert_books_balance(runtime)


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_leaders_that_end_at_any_moment_leave_nothing_half_done(
    runtime: Runtime, rival: Runtime, seed: int
) -> None:
    """Evictions and bindings, with a leader that is cancelled again and again; the nodes act all the while."""
    fates = random.Random(seed)
    for name in ("n1", "n2", "n3"):
        await node(runtime, name, gpu=8)
    low, urgent = [f"low-{number}" for number in range(24)], [f"urgent-{number}" for number in range(8)]
    policy = replace(HASTY, placements_max=5, grace_seconds=30.0)
    async with acting(runtime):
        for name in low:
            await submit(runtime, name)
        submitting = asyncio.create_task(_hurry(runtime, urgent, fates))
        for turn in range(6):
            one = (runtime, rival)[turn % 2]
            async with scheduling(one, policy, fence=await term(one, f"leader-{turn}", depose=True)):
                await asyncio.sleep(fates.uniform(0.02, 0.4))  # a moment that nobody chose
        await submitting
        async with scheduling(rival, policy, fence=await term(rival, "last", depose=True)):
            for name in urgent:
                await until(rival, name, is_in("Running"))
            for name in low:
                await until(rival, name, lambda now: now["phase"] in ("Running", "Pending"))
    bound, told = await times_bound(runtime), await evictions(runtime, *low, *urgent)
    assert [told[name] for name in urgent] == [0] * len(urgent)
    for name in low:
        placed = (await status(runtime, name))["phase"] == "Running"
        assert bound.get(name, 0) == told[name] + placed, "it was bound again only after it had been stopped"
    await assert_books_balance(runtime)


async def _hurry(runtime: Runtime, names: list[str], fates: random.Random) -> None:
    for name in names:
        await asyncio.sleep(fates.uniform(0.0, 0.2))
        await submit(runtime, name, gpu=2, spec={"priority": 1000})
