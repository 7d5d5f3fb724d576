"""An administrator's word that nothing of a node runs any more, and what it ends, on a real database."""

from bursar.core.objects.allocation import Phase
from bursar.loops.drain import continue_drains
from bursar.ops.nodes.drain import Drain, drain
from bursar.ops.nodes.fence import Fence, Fenced, fence, unfence
from bursar.ops.nodes.liveness import node_key
from bursar.ops.runtime.runtime import Office
from support.nodes.liveness import FAIL, REQUEUE, hear, look, node_status, schedulable, silence
from support.runtime.runtime import TEST, allocation, bind_unit, code, delete, document, node, refusal
from support.scheduling.evictions import assert_books_balance, running, says, status


async def fenced(office: Office, name: str) -> Fenced:
    done = await fence(office, name, TEST, "it is switched off")
    assert isinstance(done, Fenced), done
    return done


async def test_a_fence_ends_everything_at_once(office: Office) -> None:
    for name in ("n1", "n2"):
        await node(office, name, gpu=8)
    await running(office, "keep", "n1")
    await running(office, "again", "n1", spec=REQUEUE)
    await running(office, "fail", "n1", spec=FAIL)
    await running(office, "gone", "n1")
    await delete(office, "Allocation", "default", "gone")
    await running(office, "wide", "n1", "n2", spec={"nodes": 2, **FAIL})
    await silence(office, "n1", seconds=20, granted=-100)
    await look(office)
    assert await fenced(office, "n1") == Fenced(requeued=2, failed=2, stopping=1)
    shown = await node_status(office, "n1")
    assert (shown["phase"], shown["fence"]["by"], shown["fence"]["reason"]) == (
        "Lost",
        TEST.actor,
        "it is switched off",
    )
    assert not await schedulable(office, "n1")
    for name, phase in (("keep", "Pending"), ("again", "Pending"), ("fail", "Failed")):
        told = await status(office, name)
        assert (told["phase"], told["reason"]) == (phase, "NodeLost")
    assert (await status(office, "fail"))["message"] == "Node n1 was fenced"
    await says(office, "n2", "wide", Phase.FAILED)
    wide = await status(office, "wide")
    assert (wide["phase"], wide["reason"], wide["message"]) == ("Failed", "NodeLost", "Node n1 was fenced")
    await assert_books_balance(office)
    assert await fenced(office, "n1") == Fenced(), "repeating it is harmless"
    assert code(await delete(office, "Node", "", "n1")) == "ok", "nothing is left on it"


async def test_a_gang_of_which_one_failed_with_its_node_fails(office: Office) -> None:
    for name in ("n1", "n2"):
        await node(office, name, gpu=4)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}, **FAIL}
    for name in ("a", "b"):
        await allocation(office, "default", name, spec=gang, gpu=1)
    await bind_unit(office, "default", {"a": ("n1",), "b": ("n2",)})
    await fenced(office, "n1")
    await says(office, "n2", "b", Phase.FAILED, gang="g")
    for name in ("a", "b"):
        told = await status(office, name)
        assert (told["phase"], told["reason"]) == ("Failed", "NodeLost")
    await assert_books_balance(office)


async def test_a_node_that_is_heard_cannot_be_fenced(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await hear(office, "n1")
    refused = refusal(await fence(office, "n1", TEST, "a mistake"))
    assert str(refused.code) == "conflict"
    assert "it is alive" in refused.message
    assert "bursar drain n1" in refused.hint
    assert (await status(office, "a"))["phase"] == "Running"
    assert str(refusal(await fence(office, "nowhere", TEST, "a mistake")).code) == "not_found"


async def test_a_fence_that_is_tried_changes_nothing(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await running(office, "b", "n1", spec=FAIL)
    assert await fence(office, "n1", TEST, "off", dry_run=True) == Fenced(requeued=1, failed=1)
    assert (await status(office, "a"))["phase"] == "Running"
    assert "fence" not in await node_status(office, "n1")


async def test_a_fenced_node_that_is_heard_again_is_ready(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await silence(office, "n1", seconds=20)
    await fenced(office, "n1")
    await look(office)
    assert "fence" in await node_status(office, "n1")
    await hear(office, "n1")
    await look(office)
    shown = await node_status(office, "n1")
    assert shown["phase"] == "Ready"
    assert "fence" not in shown


async def test_a_fence_can_be_taken_back(office: Office) -> None:
    await node(office, "n1", gpu=4)
    assert "is not fenced" in refusal(await unfence(office, "n1", TEST)).message
    await fenced(office, "n1")
    assert document(await unfence(office, "n1", TEST))["status"]["phase"] == "Ready"
    assert await schedulable(office, "n1")


async def test_what_a_crash_left_on_a_fenced_node_is_ended_by_the_next_look(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    command = Fence(key=node_key("n1"), origin=TEST, reason="off", silent_seconds=15)
    assert code(await office.changing.submit(command, "")) == "ok"
    assert (await status(office, "a"))["phase"] == "Running"
    await look(office)
    assert (await status(office, "a"))["phase"] == "Pending"


async def test_fencing_ends_a_drain_that_waited_for_the_node(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await running(office, "a", "n1")
    await drain(office, Drain(key=node_key("n1"), origin=TEST))
    await fenced(office, "n1")
    told = await status(office, "a")
    assert (told["phase"], told["reason"]) == ("Pending", "Drained"), "it was told before why it had to go"
    await continue_drains(office)
    assert (await node_status(office, "n1"))["drain"]["state"] == "Drained"
