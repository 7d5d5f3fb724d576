"""What is said of nodes that fall silent, and what becomes of their work, on a real database."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.nodes.liveness import EndLost
from bursar.core.nodes.liveness import Liveness, Patience, Sighting
from bursar.core.objects.allocation import Phase
from bursar.loops.node_liveness import LivenessWatch, look_after
from bursar.ops.nodes.liveness import node_alive, set_readiness, settle
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import NODE, Node, NodeStatus, node_key
from support.nodes.liveness import (
    FAIL,
    REQUEUE,
    condition,
    hear,
    look,
    node_status,
    patience,
    regrant,
    schedulable,
    silence,
    stored_node,
    watch,
)
from support.runtime.runtime import (
    TEST,
    allocation,
    bind,
    bind_unit,
    change,
    code,
    delete,
    document,
    node,
    opened,
    refusal,
)
from support.scheduling.evictions import assert_books_balance, running, says, status, stop, stored

LOST = Liveness.LOST


# Nodes.


async def test_a_node_that_was_never_heard_is_left_alone(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    before = (await stored_node(runtime, "n1")).revision
    await look(runtime, 3)
    assert (await stored_node(runtime, "n1")).revision == before


async def test_a_silent_node_is_not_ready_then_lost_and_ready_when_it_is_heard(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1", seconds=20)
    await look(runtime)
    shown = await node_status(runtime, "n1")
    assert shown["phase"] == "NotReady"
    ready = condition(shown, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NodeSilent")
    assert ready["message"].startswith("No heartbeat since ")
    assert not await schedulable(runtime, "n1")
    await allocation(runtime, "default", "a", gpu=1)
    assert code(await bind(runtime, "default", "a", "n1")) == "stale"
    await silence(runtime, "n1", seconds=70)
    await look(runtime)
    shown = await node_status(runtime, "n1")
    assert (shown["phase"], condition(shown, "Ready")["status"]) == ("Lost", "Unknown")
    await hear(runtime, "n1")
    assert await node_alive(runtime, ["n1", "n1", "no-such-node"]) == ["n1"]
    shown = await node_status(runtime, "n1")
    assert (shown["phase"], condition(shown, "Ready")["status"]) == ("Ready", "True")
    assert not {"silentSince", "fence"} & shown.keys()
    assert code(await bind(runtime, "default", "a", "n1")) == "ok"


async def test_who_is_heard_again_is_welcomed_by_the_next_look(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1")
    await look(runtime)
    assert (await node_status(runtime, "n1"))["phase"] == "Lost"
    await hear(runtime, "n1")
    await look(runtime)
    assert (await node_status(runtime, "n1"))["phase"] == "Ready"
    assert await schedulable(runtime, "n1")
    before = (await stored_node(runtime, "n1")).revision
    assert await node_alive(runtime, ["n1"]) == []
    await look(runtime, 2)
    assert (await stored_node(runtime, "n1")).revision == before, "what is known is not said again"


async def test_a_cordoned_node_stays_without_work_when_it_comes_back(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await change(runtime, "Node", "", "n1", unschedulable=True)
    await silence(runtime, "n1")
    await look(runtime)
    await hear(runtime, "n1")
    await look(runtime)
    assert (await node_status(runtime, "n1"))["phase"] == "Ready"
    assert not await schedulable(runtime, "n1")


async def test_nobody_elses_change_ends_a_silence(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1")
    await look(runtime)
    said = await node_status(runtime, "n1")
    shown = document(await change(runtime, "Node", "", "n1", taints=[{"key": "old", "effect": "NoSchedule"}]))
    assert (shown["status"]["phase"], shown["status"]["silentSince"]) == ("Lost", said["silentSince"])
    assert not await schedulable(runtime, "n1")
    await change(runtime, "Node", "", "n1", unschedulable=True)
    await change(runtime, "Node", "", "n1", unschedulable=False)
    assert not await schedulable(runtime, "n1"), "uncordoned, and still silent"
    await hear(runtime, "n1")
    await look(runtime)
    assert await schedulable(runtime, "n1")


async def test_what_a_node_says_of_itself_stays_when_it_is_heard_again(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1")
    await look(runtime)

    def full(before: Any, shown: dict[str, Any]) -> Any:
        shown["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "DiskPressure"}]
        shown["status"]["phase"] = "Ready"
        shown["status"].pop("silentSince")
        one = msgspec.convert(shown, Node)
        assert isinstance(one.status, NodeStatus)
        return change_command(NODE, before, one, TEST, spec_changed=False, status=True)

    await object_ops.change(runtime, node_key("n1"), full, tenant="")
    assert (await node_status(runtime, "n1"))["phase"] == "Lost", "a silence is not talked away"
    await hear(runtime, "n1")
    await look(runtime)
    shown = await node_status(runtime, "n1")
    assert (shown["phase"], condition(shown, "Ready")["reason"]) == ("Ready", "DiskPressure")


async def test_a_node_that_is_heard_while_it_is_declared_lost_is_not(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1")
    await hear(runtime, "n1")
    (reply,) = await set_readiness(runtime, [("n1", LOST)], Patience())
    assert "has sent a heartbeat" in refusal(reply).message
    assert (await node_status(runtime, "n1"))["phase"] == "Ready"


async def test_a_node_that_was_deleted_and_made_anew_has_not_been_heard(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1")
    assert code(await delete(runtime, "Node", "", "n1")) == "ok"
    await node(runtime, "n1", gpu=4)
    await look(runtime)
    assert (await node_status(runtime, "n1"))["phase"] == "Ready"


# Work.


async def test_leased_work_waits_again_when_its_lease_and_the_grace_are_over(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    submitted = (await stored(runtime, "a")).doc
    await silence(runtime, "n1", granted=-50)
    await look(runtime)
    marked = await status(runtime, "a")
    assert (marked["phase"], marked["reason"]) == ("Running", "NodeLost")
    assert "pending again after" in condition(marked, "NodeLost")["message"]
    await regrant(runtime, "n1", granted=0)
    await look(runtime)
    assert (await status(runtime, "a"))["phase"] == "Running", "its clock may be slower than ours"
    await regrant(runtime, "n1", granted=6)
    await look(runtime)
    waiting = await status(runtime, "a")
    assert (waiting["phase"], waiting["reason"], waiting["epoch"]) == ("Pending", "NodeLost", 1)
    assert not condition(waiting, "NodeLost")
    assert {"nodeName", "nodes", "startTime", "eviction"}.isdisjoint(waiting)
    assert (await stored(runtime, "a")).doc == submitted, "it keeps its place in line"
    await assert_books_balance(runtime)
    await node(runtime, "n2", gpu=4)
    assert code(await bind(runtime, "default", "a", "n2")) == "ok"
    placed = await status(runtime, "a")
    assert placed["epoch"] == 2
    assert "reason" not in placed
    late = await says(runtime, "n1", "a", Phase.SUCCEEDED, epoch=1)
    assert code(late) == "stale", "who comes late is of the past"
    assert (await status(runtime, "a"))["phase"] == "Scheduled"


@pytest.mark.parametrize("spec", [FAIL, {}], ids=["fail", "keep"])
async def test_work_without_a_lease_stays_bound_until_its_node_is_heard_or_fenced(
    runtime: Runtime, spec: dict[str, Any]
) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=spec)
    await silence(runtime, "n1", seconds=10_000, granted=9_000)
    await look(runtime, 2)
    marked = await status(runtime, "a")
    assert (marked["phase"], marked["reason"]) == ("Running", "NodeLost")
    assert "bursar node fence n1" in marked["message"]
    await hear(runtime, "n1")
    await look(runtime)
    clear = await status(runtime, "a")
    assert clear["phase"] == "Running"
    assert "reason" not in clear
    assert not condition(clear, "NodeLost")


async def test_a_node_that_grants_no_leases_keeps_its_work(runtime: Runtime) -> None:
    """One that speaks by its status alone enforces no deadline: what it runs may run for ever."""
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", seconds=10_000, granted=None)
    await look(runtime, 2)
    assert (await status(runtime, "a"))["phase"] == "Running"


async def test_marks_leave_what_was_said_before_alone(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await stop(runtime, "a")
    await silence(runtime, "n1")
    await look(runtime)
    told = await status(runtime, "a")
    assert (told["phase"], told["reason"]) == ("Terminating", "Preempted")
    assert condition(told, "NodeLost")["status"] == "True"
    await hear(runtime, "n1")
    await look(runtime)
    told = await status(runtime, "a")
    assert (told["reason"], condition(told, "NodeLost")) == ("Preempted", {})


async def test_an_end_that_is_reported_late_is_told_as_it_was(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await silence(runtime, "n1")
    await look(runtime)
    assert (await status(runtime, "a"))["reason"] == "NodeLost"
    await says(runtime, "n1", "a", Phase.SUCCEEDED, epoch=1)
    ended = await status(runtime, "a")
    assert ended["phase"] == "Succeeded"
    assert "reason" not in ended
    assert not condition(ended, "NodeLost")


async def test_work_on_several_nodes_stops_everywhere_and_waits_again_as_a_whole(runtime: Runtime) -> None:
    for name in ("n1", "n2", "n3"):
        await node(runtime, name, gpu=4)
    await running(runtime, "wide", "n1", "n2", "n3", spec={"nodes": 3, **REQUEUE})
    await silence(runtime, "n1", granted=100)
    await look(runtime)
    half = await status(runtime, "wide")
    assert (half["phase"], half["reason"], half["eviction"]["rule"]) == ("Terminating", "NodeLost", "NodeLost")
    assert half["eviction"]["by"] == "node/n1"
    assert [one.get("phase") for one in half["nodes"]] == ["Failed", None, None]
    await says(runtime, "n2", "wide", Phase.CANCELLED)
    assert (await status(runtime, "wide"))["phase"] == "Terminating"
    await says(runtime, "n3", "wide", Phase.SUCCEEDED)
    assert (await status(runtime, "wide"))["phase"] == "Pending"
    assert (await status(runtime, "wide"))["reason"] == "NodeLost"
    await assert_books_balance(runtime)


async def test_two_lost_nodes_of_one_allocation_are_its_end(runtime: Runtime) -> None:
    for index in range(9):
        await node(runtime, f"n{index}", gpu=4)
        await hear(runtime, f"n{index}")
    await running(runtime, "wide", "n1", "n2", spec={"nodes": 2, **REQUEUE})
    await silence(runtime, "n1", "n2", granted=100)
    await look(runtime)
    assert (await status(runtime, "wide"))["phase"] == "Pending"
    await assert_books_balance(runtime)


async def test_a_gang_that_loses_one_stops_and_waits_again(runtime: Runtime) -> None:
    for name in ("n1", "n2", "n3"):
        await node(runtime, name, gpu=4)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}, **REQUEUE}
    for name in ("a", "b", "c"):
        assert code(await allocation(runtime, "default", name, spec=gang, gpu=1)) == "ok"
    await bind_unit(runtime, "default", {"a": ("n1",), "b": ("n2",), "c": ("n3",)})
    await silence(runtime, "n1", granted=100)
    await look(runtime)
    assert (await status(runtime, "a"))["phase"] == "Pending"
    for name in ("b", "c"):
        told = await status(runtime, name)
        assert (told["phase"], told["reason"]) == ("Terminating", "NodeLost")
    for on, name in (("n2", "b"), ("n3", "c")):
        await says(runtime, on, name, Phase.FAILED, gang="g")
        assert (await status(runtime, name))["phase"] == "Pending"
    await assert_books_balance(runtime)


async def test_the_word_of_the_node_that_a_lease_ran_out_is_believed_at_once(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await hear(runtime, "n1")
    await running(runtime, "a", "n1", spec=REQUEUE)
    one = await stored(runtime, "a")
    told: dict[str, Any] = {
        "key": one.key,
        "origin": TEST,
        "uid": one.uid,
        "node": "n1",
        "message": "no lease was granted in time",
    }
    assert code(await runtime.binding.submit(EndLost(**told, epoch=1), "")) == "stale", "the node is not lost"
    assert code(await runtime.binding.submit(EndLost(**told, epoch=2, confirmed=True), "")) == "stale"
    assert code(await runtime.binding.submit(EndLost(**told, epoch=1, confirmed=True), "")) == "ok"
    assert (await status(runtime, "a"))["phase"] == "Pending"
    assert (await status(runtime, "a"))["reason"] == "NodeLost"
    await assert_books_balance(runtime)


# The rule of many, and of our own absence.


async def test_when_many_fall_silent_at_once_nothing_is_given_up(runtime: Runtime) -> None:
    names = [f"n{index}" for index in range(10)]
    for name in names:
        await node(runtime, name, gpu=4)
    await running(runtime, "a", "n0", spec=REQUEUE)
    await hear(runtime, *names)
    await silence(runtime, *names[:4], seconds=500, granted=400)
    mine = watch()
    verdict = await look_after(runtime, mine)
    assert (verdict.alarm, verdict.silent, verdict.heartbeating) == (True, 4, 10)
    await look_after(runtime, mine)
    shown = await node_status(runtime, "n0")
    assert shown["phase"] == "NotReady"
    assert "4 of 10 nodes lost contact at once: their work is kept" in condition(shown, "Ready")["message"]
    assert (await status(runtime, "a"))["phase"] == "Running"
    # One is heard again: no alarm any more, but the rest is given the time to come back as well.
    await hear(runtime, "n3")
    assert not (await look_after(runtime, mine)).alarm
    assert (await node_status(runtime, "n0"))["phase"] == "NotReady"
    mine.calm_since = watch().calm_since
    await look_after(runtime, mine)
    assert (await node_status(runtime, "n0"))["phase"] == "Lost"
    assert (await status(runtime, "a"))["phase"] == "Pending"


async def test_a_controller_that_has_just_come_gives_nothing_up(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", seconds=5000, granted=4000)
    fresh = LivenessWatch()
    await look_after(runtime, fresh)
    assert (await node_status(runtime, "n1"))["phase"] == "Ready"
    await look(runtime)
    assert (await status(runtime, "a"))["phase"] == "Pending", "one that was there did"


async def test_work_of_a_node_lost_before_waits_until_a_new_controller_has_listened(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", granted=-100)
    await look(runtime)
    assert (await node_status(runtime, "n1"))["phase"] == "Lost"
    await regrant(runtime, "n1", granted=3600)
    await look_after(runtime, LivenessWatch())
    assert (await status(runtime, "a"))["phase"] == "Running"
    await look(runtime)
    assert (await status(runtime, "a"))["phase"] == "Pending"


async def test_settings_say_how_long_is_waited(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await patience(
        runtime, heartbeatSeconds=1, notReadySeconds=2, lostSeconds=3, killGraceSeconds=0, clockSkewSeconds=0
    )
    await silence(runtime, "n1", seconds=4, granted=1)
    await look(runtime)
    assert (await node_status(runtime, "n1"))["phase"] == "Lost"
    assert (await status(runtime, "a"))["phase"] == "Pending"


async def test_an_outage_of_many_nodes_is_settled_set_by_set(runtime: Runtime, database_url: str) -> None:
    """Also by two controllers at once: every node is said to be lost once, and each of its allocations ends once."""
    count = 60
    names = [f"n{index:03}" for index in range(count)]
    for name in names:
        await node(runtime, name, gpu=1)
        await running(runtime, f"w-{name}", name, spec=REQUEUE)
    others = [f"m{index:03}" for index in range(3 * count)]
    for name in others:
        await node(runtime, name, gpu=1)
    await hear(runtime, *others)
    await silence(runtime, *names, granted=100)
    async with opened(database_url) as second:
        await asyncio.gather(look(runtime), look(second), look(runtime), look(second))
    for name in names:
        assert (await node_status(runtime, name))["phase"] == "Lost"
        assert (await status(runtime, f"w-{name}"))["phase"] == "Pending"
    async with runtime.database.reader() as db:
        lost = await db.fetchval("SELECT count(*) FROM change WHERE kind = 'Node' AND verb = 'mark'")
        ended = await db.fetchval("SELECT count(*) FROM change WHERE kind = 'Allocation' AND verb = 'end'")
    assert (lost, ended) == (count, count)
    await assert_books_balance(runtime)


async def test_what_was_settled_is_not_read_again_before_its_time(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec=REQUEUE)
    await silence(runtime, "n1", granted=-100)
    mine = watch()
    await look_after(runtime, mine)
    assert mine.last is not None
    ((where, at),) = mine.due.items()
    assert where == ("n1", LOST)
    assert 25 < at - mine.last <= 30
    lost = Sighting("n1", LOST, None, None)
    assert (await settle(runtime, [lost], Patience())).next_at == {"n1": None}
