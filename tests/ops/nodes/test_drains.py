"""Draining nodes on a real database: by several at once, across crashes, and against those who place and uncordon."""

import asyncio
from typing import Any

from bursar.commands.nodes.drain import Drain
from bursar.core.nodes.eviction import DO_NOT_EVICT
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.loops.drain import continue_drains
from bursar.ops.nodes.drain import DrainProgress, drain, standing
from bursar.ops.runtime.runtime import Runtime
from support.runtime.runtime import TEST, allocation, bind, change, code, create, document, node, opened
from support.scheduling.evictions import GPU, assert_books_balance, running, says, status, stored


def draining(name: str, **options: Any) -> Drain:
    return Drain(key=Key("Node", "", name), origin=TEST, **options)


async def stands(runtime: Runtime, name: str) -> DrainProgress:
    found = await standing(runtime, name)
    assert isinstance(found, DrainProgress), found
    return found


async def test_a_drain_cordons_evicts_and_ends_when_the_node_is_empty(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=4)
    for name in ("a", "b"):
        await running(runtime, name, "n1")
    await running(runtime, "elsewhere", "n2")
    reply = document(await drain(runtime, draining("n1", grace_seconds=120, reason="new disks")))
    assert reply["spec"]["unschedulable"] is True
    now_ = await stands(runtime, "n1")
    assert (now_.state, now_.total, now_.pending, now_.evicted, now_.failed) == ("Draining", 2, 2, 0, 0)
    told = await status(runtime, "a")
    assert (told["phase"], told["reason"], told["eviction"]["gracePeriodSeconds"]) == ("Terminating", "Drained", 120)
    assert "new disks" in told["message"]
    assert (await status(runtime, "elsewhere"))["phase"] == "Running"
    await says(runtime, "n1", "a", Phase.CANCELLED)
    half = await stands(runtime, "n1")
    assert (half.pending, half.evicted) == (1, 1)
    assert code(await bind(runtime, "default", "a", "n1")) == "stale"
    assert code(await bind(runtime, "default", "a", "n2")) == "ok"
    await says(runtime, "n1", "b", Phase.SUCCEEDED)
    assert await continue_drains(runtime) == ["n1"]
    done = await stands(runtime, "n1")
    assert (done.state, done.pending, done.evicted) == ("Drained", 0, 2)
    assert await continue_drains(runtime) == []
    await assert_books_balance(runtime)


async def test_a_drain_goes_on_after_a_crash_between_cordoning_and_evicting(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    # What the command alone leaves behind, had its process died right after.
    assert code(await runtime.changing.submit(draining("n1"), "")) == "ok"
    assert (await status(runtime, "a"))["phase"] == "Running"
    await continue_drains(runtime)
    assert (await status(runtime, "a"))["reason"] == "Drained"


async def test_protected_work_is_left_unless_forced(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "plain", "n1")
    kept = {"metadata": {"name": "kept", "namespace": "default", "annotations": {DO_NOT_EVICT: "true"}}}
    await create(runtime, "Allocation", {**kept, "spec": {"resources": {"requests": {GPU: "1"}}}})
    await bind(runtime, "default", "kept", "n1")
    await drain(runtime, draining("n1"))
    await continue_drains(runtime)
    first = await stands(runtime, "n1")
    assert (first.pending, first.failed, [one.name for one in first.left]) == (1, 1, ["kept"])
    assert (await status(runtime, "kept"))["phase"] == "Scheduled"
    await drain(runtime, draining("n1", force=True))
    forced = await stands(runtime, "n1")
    assert (forced.total, forced.pending, forced.failed) == (2, 2, 0)
    assert (await status(runtime, "kept"))["phase"] == "Terminating"


async def test_repeating_a_drain_may_hasten_it_and_never_delays_it(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await drain(runtime, draining("n1", grace_seconds=100))
    before, revision = await status(runtime, "a"), (await stored(runtime, "a")).revision
    await drain(runtime, draining("n1", grace_seconds=1000))
    assert (await stored(runtime, "a")).revision == revision
    await drain(runtime, draining("n1", grace_seconds=5))
    after = await status(runtime, "a")
    assert after["eviction"]["deadline"] < before["eviction"]["deadline"]
    assert (await stands(runtime, "n1")).estimated_end == after["eviction"]["deadline"]


async def test_uncordoning_ends_a_drain(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await runtime.changing.submit(draining("n1"), "")
    shown = document(await change(runtime, "Node", "", "n1", unschedulable=False))
    assert shown["status"]["drain"]["state"] == "Cancelled"
    ended = await stands(runtime, "n1")
    assert (ended.state, ended.total, ended.pending, ended.evicted) == ("Cancelled", 1, 1, 0)
    assert await continue_drains(runtime) == []
    assert (await status(runtime, "a"))["phase"] == "Running"
    assert code(await allocation(runtime, "default", "b", gpu=1)) == "ok"
    assert code(await bind(runtime, "default", "b", "n1")) == "ok"


async def test_other_changes_of_a_node_leave_its_drain_alone(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await drain(runtime, draining("n1"))
    shown = document(await change(runtime, "Node", "", "n1", taints=[{"key": "old", "effect": "NoSchedule"}]))
    assert shown["status"]["drain"]["state"] == "Draining"


async def test_a_drained_node_that_takes_work_again_forgets_its_drain(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    assert document(await drain(runtime, draining("n1")))["status"]["drain"]["state"] == "Drained"
    assert "drain" not in document(await change(runtime, "Node", "", "n1", unschedulable=False))["status"]
    assert await standing(runtime, "n1") is None


async def test_what_is_bound_while_a_drain_begins_is_evicted_too(runtime: Runtime, database_url: str) -> None:
    await node(runtime, "n1", gpu=64)
    names = [f"w{index}" for index in range(24)]
    for name in names:
        await allocation(runtime, "default", name, gpu=1)
    async with opened(database_url) as other:
        replies = await asyncio.gather(
            *(bind(other, "default", name, "n1") for name in names[:12]),
            drain(runtime, draining("n1")),
            *(bind(other, "default", name, "n1") for name in names[12:]),
        )
        assert code(replies[12]) == "ok"
        await asyncio.gather(continue_drains(runtime), continue_drains(other))
    bound = [name for name, reply in zip(names, replies[:12] + replies[13:], strict=True) if code(reply) == "ok"]
    assert {code(reply) for reply in replies} <= {"ok", "stale"}
    assert (await stands(runtime, "n1")).total == len(bound)
    for name in names:
        assert (await status(runtime, name))["phase"] == ("Terminating" if name in bound else "Pending")
    await assert_books_balance(runtime)


async def test_two_loops_drain_together(runtime: Runtime, database_url: str) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=8)
        for index in range(6):
            await running(runtime, f"{name}-{index}", name)
        await runtime.changing.submit(draining(name), "")
    async with opened(database_url) as other:
        await asyncio.gather(*(continue_drains(one) for one in (runtime, other, runtime, other)))
        for name in ("n1", "n2"):
            assert (await stands(runtime, name)).pending == 6
            await asyncio.gather(
                *(says(one, name, f"{name}-{index}", Phase.CANCELLED) for index, one in enumerate([runtime, other] * 3))
            )
        await asyncio.gather(*(continue_drains(one) for one in (runtime, other)))
    for name in ("n1", "n2"):
        done = await stands(runtime, name)
        assert (done.state, done.evicted, done.failed) == ("Drained", 6, 0)
    await assert_books_balance(runtime)
