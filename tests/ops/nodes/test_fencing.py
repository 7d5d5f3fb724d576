"""An administrator's word that nothing of a node runs any more, and what it ends, on a real database."""

from typing import Any

import pytest

from bursar.commands.nodes.drain import Drain
from bursar.commands.nodes.fence import FenceCommand
from bursar.core.objects.allocation import Phase
from bursar.loops.drain import continue_drains
from bursar.ops.nodes import fence as fence_ops
from bursar.ops.nodes.drain import drain
from bursar.ops.nodes.fence import Fenced, fence, unfence
from bursar.ops.nodes.liveness import settle
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import node_key
from support.nodes.liveness import FAIL, REQUEUE, hear, look, node_status, schedulable, silence
from support.runtime.runtime import TEST, allocation, bind_unit, code, delete, document, node, refusal
from support.scheduling.evictions import assert_books_balance, running, says, status


async def fenced(runtime: Runtime, name: str) -> Fenced:
    done = await fence(runtime, name, TEST, "it is switched off")
    assert isinstance(done, Fenced), done
    return done


async def test_a_fence_ends_everything_at_once(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=8)
    await running(runtime, "keep", "n1")
    await running(runtime, "again", "n1", spec=REQUEUE)
    await running(runtime, "fail", "n1", spec=FAIL)
    await running(runtime, "gone", "n1")
    await delete(runtime, "Allocation", "default", "gone")
    await running(runtime, "wide", "n1", "n2", spec={"nodes": 2, **FAIL})
    await silence(runtime, "n1", seconds=20, granted=-100)
    await look(runtime)
    assert await fenced(runtime, "n1") == Fenced(requeued=2, failed=2, stopping=1)
    shown = await node_status(runtime, "n1")
    assert (shown["phase"], shown["fence"]["by"], shown["fence"]["reason"]) == (
        "Lost",
        TEST.actor,
        "it is switched off",
    )
    assert not await schedulable(runtime, "n1")
    for name, phase in (("keep", "Pending"), ("again", "Pending"), ("fail", "Failed")):
        told = await status(runtime, name)
        assert (told["phase"], told["reason"]) == (phase, "NodeLost")
    assert (await status(runtime, "fail"))["message"] == "Node n1 was fenced"
    await says(runtime, "n2", "wide", Phase.FAILED)
    wide = await status(runtime, "wide")
    assert (wide["phase"], wide["reason"], wide["message"]) == ("Failed", "NodeLost", "Node n1 was fenced")
    await assert_books_balance(runtime)
    assert await fenced(runtime, "n1") == Fenced(), "repeating it is harmless"
    assert code(await delete(runtime, "Node", "", "n1")) == "ok", "nothing is left on it"


async def test_a_gang_of_which_one_failed_with_its_node_fails(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=4)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}, **FAIL}
    for name in ("a", "b"):
        await allocation(runtime, "default", name, spec=gang, gpu=1)
    await bind_unit(runtime, "default", {"a": ("n1",), "b": ("n2",)})
    await fenced(runtime, "n1")
    await says(runtime, "n2", "b", Phase.FAILED, gang="g")
    for name in ("a", "b"):
        told = await status(runtime, name)
        assert (told["phase"], told["reason"]) == ("Failed", "NodeLost")
    await assert_books_balance(runtime)


async def test_a_node_that_is_heard_cannot_be_fenced(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await hear(runtime, "n1")
    refused = refusal(await fence(runtime, "n1", TEST, "a mistake"))
    assert str(refused.code) == "conflict"
    assert "it is alive" in refused.message
    assert "bursar drain n1" in refused.hint
    assert (await status(runtime, "a"))["phase"] == "Running"
    assert str(refusal(await fence(runtime, "nowhere", TEST, "a mistake")).code) == "not_found"


async def test_a_fence_that_is_tried_changes_nothing(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await running(runtime, "b", "n1", spec=FAIL)
    assert await fence(runtime, "n1", TEST, "off", dry_run=True) == Fenced(requeued=1, failed=1)
    assert (await status(runtime, "a"))["phase"] == "Running"
    assert "fence" not in await node_status(runtime, "n1")


async def test_a_fenced_node_that_is_heard_again_is_ready(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await silence(runtime, "n1", seconds=20)
    await fenced(runtime, "n1")
    await look(runtime)
    assert "fence" in await node_status(runtime, "n1")
    await hear(runtime, "n1")
    await look(runtime)
    shown = await node_status(runtime, "n1")
    assert shown["phase"] == "Ready"
    assert "fence" not in shown


async def test_a_fence_can_be_taken_back(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    assert "is not fenced" in refusal(await unfence(runtime, "n1", TEST)).message
    await fenced(runtime, "n1")
    assert document(await unfence(runtime, "n1", TEST))["status"]["phase"] == "Ready"
    assert await schedulable(runtime, "n1")


async def test_what_a_crash_left_on_a_fenced_node_is_ended_by_the_next_look(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    command = FenceCommand(key=node_key("n1"), origin=TEST, reason="off", silent_seconds=15)
    assert code(await runtime.changing.submit(command, "")) == "ok"
    assert (await status(runtime, "a"))["phase"] == "Running"
    await look(runtime)
    assert (await status(runtime, "a"))["phase"] == "Pending"


async def test_the_answer_counts_all_work_also_if_the_controller_ends_it_first(
    runtime: Runtime, rival: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await running(runtime, "b", "n1", spec=FAIL)

    async def settle_second(*args: Any, **options: Any) -> Any:
        await look(rival)
        assert (await status(runtime, "a"))["phase"] == "Pending"
        return await settle(*args, **options)

    monkeypatch.setattr(fence_ops, "settle", settle_second)
    assert await fenced(runtime, "n1") == Fenced(requeued=1, failed=1)


async def test_fencing_ends_a_drain_that_waited_for_the_node(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1")
    await drain(runtime, Drain(key=node_key("n1"), origin=TEST))
    await fenced(runtime, "n1")
    told = await status(runtime, "a")
    assert (told["phase"], told["reason"]) == ("Pending", "Drained"), "it was told before why it had to go"
    await continue_drains(runtime)
    assert (await node_status(runtime, "n1"))["drain"]["state"] == "Drained"
