"""Draining nodes on a real database: by several at once, across crashes, and against those who place and uncordon."""

import asyncio
from typing import Any

from bursar.core.nodes.eviction import DO_NOT_EVICT
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.loops.drain import continue_drains
from bursar.ops.nodes.drain import Drain, Standing, drain, standing
from bursar.ops.runtime.runtime import Office
from support.runtime.runtime import TEST, allocation, bind, change, code, create, document, node, opened
from support.scheduling.evictions import GPU, assert_books_balance, running, says, status, stored


def draining(name: str, **options: Any) -> Drain:
    return Drain(key=Key("Node", "", name), origin=TEST, **options)


async def stands(office: Office, name: str) -> Standing:
    found = await standing(office, name)
    assert isinstance(found, Standing), found
    return found


async def test_a_drain_cordons_evicts_and_ends_when_the_node_is_empty(office: Office) -> None:
    for name in ("n1", "n2"):
        await node(office, name, gpu=4)
    for name in ("a", "b"):
        await running(office, name, "n1")
    await running(office, "elsewhere", "n2")
    reply = document(await drain(office, draining("n1", grace_seconds=120, reason="new disks")))
    assert reply["spec"]["unschedulable"] is True
    now_ = await stands(office, "n1")
    assert (now_.state, now_.total, now_.pending, now_.evicted, now_.failed) == ("Draining", 2, 2, 0, 0)
    told = await status(office, "a")
    assert (told["phase"], told["reason"], told["eviction"]["gracePeriodSeconds"]) == ("Terminating", "Drained", 120)
    assert "new disks" in told["message"]
    assert (await status(office, "elsewhere"))["phase"] == "Running"
    await says(office, "n1", "a", Phase.CANCELLED)
    half = await stands(office, "n1")
    assert (half.pending, half.evicted) == (1, 1)
    assert code(await bind(office, "default", "a", "n1")) == "stale"
    assert code(await bind(office, "default", "a", "n2")) == "ok"
    await says(office, "n1", "b", Phase.SUCCEEDED)
    assert await continue_drains(office) == ["n1"]
    done = await stands(office, "n1")
    assert (done.state, done.pending, done.evicted) == ("Drained", 0, 2)
    assert await continue_drains(office) == []
    await assert_books_balance(office)


async def test_a_drain_goes_on_after_a_crash_between_cordoning_and_evicting(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    # What the command alone leaves behind, had its process died right after.
    assert code(await office.changing.submit(draining("n1"), "")) == "ok"
    assert (await status(office, "a"))["phase"] == "Running"
    await continue_drains(office)
    assert (await status(office, "a"))["reason"] == "Drained"


async def test_protected_work_is_left_unless_forced(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "plain", "n1")
    kept = {"metadata": {"name": "kept", "namespace": "default", "annotations": {DO_NOT_EVICT: "true"}}}
    await create(office, "Allocation", {**kept, "spec": {"resources": {"requests": {GPU: "1"}}}})
    await bind(office, "default", "kept", "n1")
    await drain(office, draining("n1"))
    await continue_drains(office)
    first = await stands(office, "n1")
    assert (first.pending, first.failed, [one.name for one in first.left]) == (1, 1, ["kept"])
    assert (await status(office, "kept"))["phase"] == "Scheduled"
    await drain(office, draining("n1", force=True))
    forced = await stands(office, "n1")
    assert (forced.total, forced.pending, forced.failed) == (2, 2, 0)
    assert (await status(office, "kept"))["phase"] == "Terminating"


async def test_repeating_a_drain_may_hasten_it_and_never_delays_it(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await drain(office, draining("n1", grace_seconds=100))
    before, revision = await status(office, "a"), (await stored(office, "a")).revision
    await drain(office, draining("n1", grace_seconds=1000))
    assert (await stored(office, "a")).revision == revision
    await drain(office, draining("n1", grace_seconds=5))
    after = await status(office, "a")
    assert after["eviction"]["deadline"] < before["eviction"]["deadline"]
    assert (await stands(office, "n1")).estimated_end == after["eviction"]["deadline"]


async def test_uncordoning_ends_a_drain(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await office.changing.submit(draining("n1"), "")
    shown = document(await change(office, "Node", "", "n1", unschedulable=False))
    assert shown["status"]["drain"]["state"] == "Cancelled"
    ended = await stands(office, "n1")
    assert (ended.state, ended.total, ended.pending, ended.evicted) == ("Cancelled", 1, 1, 0)
    assert await continue_drains(office) == []
    assert (await status(office, "a"))["phase"] == "Running"
    assert code(await allocation(office, "default", "b", gpu=1)) == "ok"
    assert code(await bind(office, "default", "b", "n1")) == "ok"


async def test_other_changes_of_a_node_leave_its_drain_alone(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await drain(office, draining("n1"))
    shown = document(await change(office, "Node", "", "n1", taints=[{"key": "old", "effect": "NoSchedule"}]))
    assert shown["status"]["drain"]["state"] == "Draining"


async def test_a_drained_node_that_takes_work_again_forgets_its_drain(office: Office) -> None:
    await node(office, "n1", gpu=4)
    assert document(await drain(office, draining("n1")))["status"]["drain"]["state"] == "Drained"
    assert "drain" not in document(await change(office, "Node", "", "n1", unschedulable=False))["status"]
    assert await standing(office, "n1") is None


async def test_what_is_bound_while_a_drain_begins_is_evicted_too(office: Office, database_url: str) -> None:
    await node(office, "n1", gpu=64)
    names = [f"w{index}" for index in range(24)]
    for name in names:
        await allocation(office, "default", name, gpu=1)
    async with opened(database_url) as other:
        replies = await asyncio.gather(
            *(bind(other, "default", name, "n1") for name in names[:12]),
            drain(office, draining("n1")),
            *(bind(other, "default", name, "n1") for name in names[12:]),
        )
        assert code(replies[12]) == "ok"
        await asyncio.gather(continue_drains(office), continue_drains(other))
    bound = [name for name, reply in zip(names, replies[:12] + replies[13:], strict=True) if code(reply) == "ok"]
    assert {code(reply) for reply in replies} <= {"ok", "stale"}
    assert (await stands(office, "n1")).total == len(bound)
    for name in names:
        assert (await status(office, name))["phase"] == ("Terminating" if name in bound else "Pending")
    await assert_books_balance(office)


async def test_two_loops_drain_together(office: Office, database_url: str) -> None:
    for name in ("n1", "n2"):
        await node(office, name, gpu=8)
        for index in range(6):
            await running(office, f"{name}-{index}", name)
        await office.changing.submit(draining(name), "")
    async with opened(database_url) as other:
        await asyncio.gather(*(continue_drains(one) for one in (office, other, office, other)))
        for name in ("n1", "n2"):
            assert (await stands(office, name)).pending == 6
            await asyncio.gather(
                *(says(one, name, f"{name}-{index}", Phase.CANCELLED) for index, one in enumerate([office, other] * 3))
            )
        await asyncio.gather(*(continue_drains(one) for one in (office, other)))
    for name in ("n1", "n2"):
        done = await stands(office, name)
        assert (done.state, done.evicted, done.failed) == ("Drained", 6, 0)
    await assert_books_balance(office)
