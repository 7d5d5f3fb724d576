"""What is said of nodes that fall silent, and what becomes of their work, on a real database."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.core.nodes.liveness import Patience, Sighting, Standing
from bursar.core.objects.allocation import Phase
from bursar.loops.node_liveness import Watch, look_after
from bursar.ops.lifecycle.dispatch import change_command
from bursar.ops.nodes.liveness import EndLost, node_alive, node_key, set_readiness, settle
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Office
from bursar.wire.kinds.node import NODE, Node, NodeStatus
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

LOST = Standing.LOST


# Nodes.


async def test_a_node_that_was_never_heard_is_left_alone(office: Office) -> None:
    await node(office, "n1", gpu=4)
    before = (await stored_node(office, "n1")).revision
    await look(office, 3)
    assert (await stored_node(office, "n1")).revision == before


async def test_a_silent_node_is_not_ready_then_lost_and_ready_when_it_is_heard(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1", seconds=20)
    await look(office)
    shown = await node_status(office, "n1")
    assert shown["phase"] == "NotReady"
    ready = condition(shown, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NodeSilent")
    assert ready["message"].startswith("No heartbeat since ")
    assert not await schedulable(office, "n1")
    await allocation(office, "default", "a", gpu=1)
    assert code(await bind(office, "default", "a", "n1")) == "stale"
    await silence(office, "n1", seconds=70)
    await look(office)
    shown = await node_status(office, "n1")
    assert (shown["phase"], condition(shown, "Ready")["status"]) == ("Lost", "Unknown")
    await hear(office, "n1")
    assert await node_alive(office, ["n1", "n1", "no-such-node"]) == ["n1"]
    shown = await node_status(office, "n1")
    assert (shown["phase"], condition(shown, "Ready")["status"]) == ("Ready", "True")
    assert not {"silentSince", "fence"} & shown.keys()
    assert code(await bind(office, "default", "a", "n1")) == "ok"


async def test_who_is_heard_again_is_welcomed_by_the_next_look(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1")
    await look(office)
    assert (await node_status(office, "n1"))["phase"] == "Lost"
    await hear(office, "n1")
    await look(office)
    assert (await node_status(office, "n1"))["phase"] == "Ready"
    assert await schedulable(office, "n1")
    before = (await stored_node(office, "n1")).revision
    assert await node_alive(office, ["n1"]) == []
    await look(office, 2)
    assert (await stored_node(office, "n1")).revision == before, "what is known is not said again"


async def test_a_cordoned_node_stays_without_work_when_it_comes_back(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await change(office, "Node", "", "n1", unschedulable=True)
    await silence(office, "n1")
    await look(office)
    await hear(office, "n1")
    await look(office)
    assert (await node_status(office, "n1"))["phase"] == "Ready"
    assert not await schedulable(office, "n1")


async def test_nobody_elses_change_ends_a_silence(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1")
    await look(office)
    said = await node_status(office, "n1")
    shown = document(await change(office, "Node", "", "n1", taints=[{"key": "old", "effect": "NoSchedule"}]))
    assert (shown["status"]["phase"], shown["status"]["silentSince"]) == ("Lost", said["silentSince"])
    assert not await schedulable(office, "n1")
    await change(office, "Node", "", "n1", unschedulable=True)
    await change(office, "Node", "", "n1", unschedulable=False)
    assert not await schedulable(office, "n1"), "uncordoned, and still silent"
    await hear(office, "n1")
    await look(office)
    assert await schedulable(office, "n1")


async def test_what_a_node_says_of_itself_stays_when_it_is_heard_again(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1")
    await look(office)

    def full(before: Any, shown: dict[str, Any]) -> Any:
        shown["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "DiskPressure"}]
        shown["status"]["phase"] = "Ready"
        shown["status"].pop("silentSince")
        one = msgspec.convert(shown, Node)
        assert isinstance(one.status, NodeStatus)
        return change_command(NODE, before, one, TEST, spec_changed=False, status=True)

    await object_ops.change(office, node_key("n1"), full, tenant="")
    assert (await node_status(office, "n1"))["phase"] == "Lost", "a silence is not talked away"
    await hear(office, "n1")
    await look(office)
    shown = await node_status(office, "n1")
    assert (shown["phase"], condition(shown, "Ready")["reason"]) == ("Ready", "DiskPressure")


async def test_a_node_that_is_heard_while_it_is_declared_lost_is_not(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1")
    await hear(office, "n1")
    (reply,) = await set_readiness(office, [("n1", LOST)], Patience())
    assert "was heard" in refusal(reply).message
    assert (await node_status(office, "n1"))["phase"] == "Ready"


async def test_a_node_that_was_deleted_and_made_anew_has_not_been_heard(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1")
    assert code(await delete(office, "Node", "", "n1")) == "ok"
    await node(office, "n1", gpu=4)
    await look(office)
    assert (await node_status(office, "n1"))["phase"] == "Ready"


# Work.


async def test_leased_work_waits_again_when_its_lease_and_the_grace_are_over(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=REQUEUE)
    submitted = (await stored(office, "a")).doc
    await silence(office, "n1", granted=-50)
    await look(office)
    marked = await status(office, "a")
    assert (marked["phase"], marked["reason"]) == ("Running", "NodeLost")
    assert "waits again after" in condition(marked, "NodeLost")["message"]
    await regrant(office, "n1", granted=0)
    await look(office)
    assert (await status(office, "a"))["phase"] == "Running", "its clock may be slower than ours"
    await regrant(office, "n1", granted=6)
    await look(office)
    waiting = await status(office, "a")
    assert (waiting["phase"], waiting["reason"], waiting["epoch"]) == ("Pending", "NodeLost", 1)
    assert not condition(waiting, "NodeLost")
    assert {"nodeName", "nodes", "startTime", "eviction"}.isdisjoint(waiting)
    assert (await stored(office, "a")).doc == submitted, "it keeps its place in line"
    await assert_books_balance(office)
    await node(office, "n2", gpu=4)
    assert code(await bind(office, "default", "a", "n2")) == "ok"
    placed = await status(office, "a")
    assert placed["epoch"] == 2
    assert "reason" not in placed
    late = await says(office, "n1", "a", Phase.SUCCEEDED, epoch=1)
    assert code(late) == "stale", "who comes late is of the past"
    assert (await status(office, "a"))["phase"] == "Scheduled"


@pytest.mark.parametrize("spec", [FAIL, {}], ids=["fail", "keep"])
async def test_work_without_a_lease_stays_bound_until_its_node_is_heard_or_fenced(
    office: Office, spec: dict[str, Any]
) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=spec)
    await silence(office, "n1", seconds=10_000, granted=9_000)
    await look(office, 2)
    marked = await status(office, "a")
    assert (marked["phase"], marked["reason"]) == ("Running", "NodeLost")
    assert "bursar node fence n1" in marked["message"]
    await hear(office, "n1")
    await look(office)
    clear = await status(office, "a")
    assert clear["phase"] == "Running"
    assert "reason" not in clear
    assert not condition(clear, "NodeLost")


async def test_a_node_that_grants_no_leases_keeps_its_work(office: Office) -> None:
    """One that speaks by its status alone enforces no deadline: what it runs may run for ever."""
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=REQUEUE)
    await silence(office, "n1", seconds=10_000, granted=None)
    await look(office, 2)
    assert (await status(office, "a"))["phase"] == "Running"


async def test_marks_leave_what_was_said_before_alone(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await stop(office, "a")
    await silence(office, "n1")
    await look(office)
    told = await status(office, "a")
    assert (told["phase"], told["reason"]) == ("Terminating", "Preempted")
    assert condition(told, "NodeLost")["status"] == "True"
    await hear(office, "n1")
    await look(office)
    told = await status(office, "a")
    assert (told["reason"], condition(told, "NodeLost")) == ("Preempted", {})


async def test_an_end_that_is_reported_late_is_told_as_it_was(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await silence(office, "n1")
    await look(office)
    assert (await status(office, "a"))["reason"] == "NodeLost"
    await says(office, "n1", "a", Phase.SUCCEEDED, epoch=1)
    ended = await status(office, "a")
    assert ended["phase"] == "Succeeded"
    assert "reason" not in ended
    assert not condition(ended, "NodeLost")


async def test_work_on_several_nodes_stops_everywhere_and_waits_again_as_a_whole(office: Office) -> None:
    for name in ("n1", "n2", "n3"):
        await node(office, name, gpu=4)
    await running(office, "wide", "n1", "n2", "n3", spec={"nodes": 3, **REQUEUE})
    await silence(office, "n1", granted=100)
    await look(office)
    half = await status(office, "wide")
    assert (half["phase"], half["reason"], half["eviction"]["rule"]) == ("Terminating", "NodeLost", "NodeLost")
    assert half["eviction"]["by"] == "node/n1"
    assert [one.get("phase") for one in half["nodes"]] == ["Failed", None, None]
    await says(office, "n2", "wide", Phase.CANCELLED)
    assert (await status(office, "wide"))["phase"] == "Terminating"
    await says(office, "n3", "wide", Phase.SUCCEEDED)
    assert (await status(office, "wide"))["phase"] == "Pending"
    assert (await status(office, "wide"))["reason"] == "NodeLost"
    await assert_books_balance(office)


async def test_two_lost_nodes_of_one_allocation_are_its_end(office: Office) -> None:
    for index in range(9):
        await node(office, f"n{index}", gpu=4)
        await hear(office, f"n{index}")
    await running(office, "wide", "n1", "n2", spec={"nodes": 2, **REQUEUE})
    await silence(office, "n1", "n2", granted=100)
    await look(office)
    assert (await status(office, "wide"))["phase"] == "Pending"
    await assert_books_balance(office)


async def test_a_gang_that_loses_one_stops_and_waits_again(office: Office) -> None:
    for name in ("n1", "n2", "n3"):
        await node(office, name, gpu=4)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}, **REQUEUE}
    for name in ("a", "b", "c"):
        assert code(await allocation(office, "default", name, spec=gang, gpu=1)) == "ok"
    await bind_unit(office, "default", {"a": ("n1",), "b": ("n2",), "c": ("n3",)})
    await silence(office, "n1", granted=100)
    await look(office)
    assert (await status(office, "a"))["phase"] == "Pending"
    for name in ("b", "c"):
        told = await status(office, name)
        assert (told["phase"], told["reason"]) == ("Terminating", "NodeLost")
    for on, name in (("n2", "b"), ("n3", "c")):
        await says(office, on, name, Phase.FAILED, gang="g")
        assert (await status(office, name))["phase"] == "Pending"
    await assert_books_balance(office)


async def test_the_word_of_the_node_that_a_lease_ran_out_is_believed_at_once(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await hear(office, "n1")
    await running(office, "a", "n1", spec=REQUEUE)
    one = await stored(office, "a")
    told: dict[str, Any] = {
        "key": one.key,
        "origin": TEST,
        "uid": one.uid,
        "node": "n1",
        "message": "no lease was granted in time",
    }
    assert code(await office.binding.submit(EndLost(**told, epoch=1), "")) == "stale", "the node is not lost"
    assert code(await office.binding.submit(EndLost(**told, epoch=2, confirmed=True), "")) == "stale"
    assert code(await office.binding.submit(EndLost(**told, epoch=1, confirmed=True), "")) == "ok"
    assert (await status(office, "a"))["phase"] == "Pending"
    assert (await status(office, "a"))["reason"] == "NodeLost"
    await assert_books_balance(office)


# The rule of many, and of our own absence.


async def test_when_many_fall_silent_at_once_nothing_is_given_up(office: Office) -> None:
    names = [f"n{index}" for index in range(10)]
    for name in names:
        await node(office, name, gpu=4)
    await running(office, "a", "n0", spec=REQUEUE)
    await hear(office, *names)
    await silence(office, *names[:4], seconds=500, granted=400)
    mine = watch()
    verdict = await look_after(office, mine)
    assert (verdict.alarm, verdict.silent, verdict.beating) == (True, 4, 10)
    await look_after(office, mine)
    shown = await node_status(office, "n0")
    assert shown["phase"] == "NotReady"
    assert "4 of 10 nodes fell silent at once" in condition(shown, "Ready")["message"]
    assert (await status(office, "a"))["phase"] == "Running"
    # One is heard again: no alarm any more, but the rest is given the time to come back as well.
    await hear(office, "n3")
    assert not (await look_after(office, mine)).alarm
    assert (await node_status(office, "n0"))["phase"] == "NotReady"
    mine.calm_since = watch().calm_since
    await look_after(office, mine)
    assert (await node_status(office, "n0"))["phase"] == "Lost"
    assert (await status(office, "a"))["phase"] == "Pending"


async def test_a_controller_that_has_just_come_gives_nothing_up(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=REQUEUE)
    await silence(office, "n1", seconds=5000, granted=4000)
    fresh = Watch()
    await look_after(office, fresh)
    assert (await node_status(office, "n1"))["phase"] == "Ready"
    await look(office)
    assert (await status(office, "a"))["phase"] == "Pending", "one that was there did"


async def test_work_of_a_node_lost_before_waits_until_a_new_controller_has_listened(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=REQUEUE)
    await silence(office, "n1", granted=-100)
    await look(office)
    assert (await node_status(office, "n1"))["phase"] == "Lost"
    await regrant(office, "n1", granted=3600)
    await look_after(office, Watch())
    assert (await status(office, "a"))["phase"] == "Running"
    await look(office)
    assert (await status(office, "a"))["phase"] == "Pending"


async def test_settings_say_how_long_is_waited(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=REQUEUE)
    await patience(office, heartbeatSeconds=1, notReadySeconds=2, lostSeconds=3, killGraceSeconds=0, clockSkewSeconds=0)
    await silence(office, "n1", seconds=4, granted=1)
    await look(office)
    assert (await node_status(office, "n1"))["phase"] == "Lost"
    assert (await status(office, "a"))["phase"] == "Pending"


async def test_an_outage_of_many_nodes_is_settled_set_by_set(office: Office, database_url: str) -> None:
    """Also by two controllers at once: every node is said to be lost once, and each of its allocations ends once."""
    count = 60
    names = [f"n{index:03}" for index in range(count)]
    for name in names:
        await node(office, name, gpu=1)
        await running(office, f"w-{name}", name, spec=REQUEUE)
    others = [f"m{index:03}" for index in range(3 * count)]
    for name in others:
        await node(office, name, gpu=1)
    await hear(office, *others)
    await silence(office, *names, granted=100)
    async with opened(database_url) as second:
        await asyncio.gather(look(office), look(second), look(office), look(second))
    for name in names:
        assert (await node_status(office, name))["phase"] == "Lost"
        assert (await status(office, f"w-{name}"))["phase"] == "Pending"
    async with office.database.reader() as db:
        lost = await db.fetchval("SELECT count(*) FROM change WHERE kind = 'Node' AND verb = 'mark'")
        ended = await db.fetchval("SELECT count(*) FROM change WHERE kind = 'Allocation' AND verb = 'end'")
    assert (lost, ended) == (count, count)
    await assert_books_balance(office)


async def test_what_was_settled_is_not_read_again_before_its_time(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1", spec=REQUEUE)
    await silence(office, "n1", granted=-100)
    mine = watch()
    await look_after(office, mine)
    assert mine.last is not None
    ((where, at),) = mine.due.items()
    assert where == ("n1", LOST)
    assert 25 < at - mine.last <= 30
    lost = Sighting("n1", LOST, None, None)
    assert (await settle(office, [lost], Patience())).next_at == {"n1": None}
