"""Nodes that fall silent and come back on their streams: leases that ran out, and work that was given up meanwhile."""

import pytest

from bursar.core.nodes.liveness import LEASE_EXPIRED, NODE_RESTARTED, SHIM_LOST
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.api.site import eventually
from support.nodes.agent_streams import (
    RUN,
    STOP,
    Served,
    acknowledged,
    ended,
    joined,
    orders,
    placed,
    running,
    shown,
    status,
    stopped,
)
from support.nodes.liveness import look, node_status, regrant, silence
from support.runtime.runtime import bind, node
from support.scheduling.evictions import assert_books_balance

REQUEUE = {"onNodeLost": "requeue"}


async def test_a_heartbeat_grants_a_lease_that_keeps_work_from_being_given_up(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1", spec=REQUEUE)
    answer = await agent.heartbeat(running(uid))
    assert (answer.lease_duration_seconds, answer.beat_seconds) == (120, 5)
    async with app.runtime.database.reader() as db:
        # As if that heartbeat had come 70 s ago.
        await db.execute(
            "UPDATE node_seen SET at = at - interval '70 s', granted_until = granted_until - interval '70 s'"
        )
    await look(app.runtime)
    told = (await shown(app.runtime, "a"))["status"]
    assert (told["phase"], told["reason"]) == ("Running", "NodeLost")
    await agent.heartbeat(running(uid))

    async def is_clear() -> bool:
        ready = (await node_status(app.runtime, "n1"))["phase"] == "Ready"
        return ready and "reason" not in (await shown(app.runtime, "a"))["status"]

    await eventually(is_clear)


async def test_work_that_stopped_for_want_of_a_lease_waits_again(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1", spec=REQUEUE)
    await agent.heartbeat(running(uid))
    end = stopped(uid, reason=LEASE_EXPIRED, message="no lease was granted in time", exit_code=137)
    assert acknowledged(await agent.heartbeat(end)) == [(uid, 1)]
    told = (await shown(app.runtime, "a"))["status"]
    assert (told["phase"], told["reason"], told["message"]) == ("Pending", "NodeLost", "no lease was granted in time")
    assert acknowledged(await agent.heartbeat(end)) == [(uid, 1)], "said again, it is of the past"
    await assert_books_balance(app.runtime)


@pytest.mark.parametrize("reason", [NODE_RESTARTED, SHIM_LOST])
async def test_work_that_went_with_its_node_waits_again_where_it_asked_to(app: Served, reason: str) -> None:
    agent = await joined(app)
    specs = {"requeue": REQUEUE, "fail": {"onNodeLost": "fail"}, "keep": {}}
    uids = {name: await placed(app.runtime, name, "n1", spec=spec) for name, spec in specs.items()}
    await agent.heartbeat(*map(running, uids.values()))
    # It was away so short a time that nobody missed it.
    again = app.agent("n1")
    ends = [status(uid, pb.POD_PHASE_FAILED, reason=reason, message="it is gone") for uid in uids.values()]
    answer = await again.heartbeat(*ends, inventory=True)
    assert sorted(acknowledged(answer)) == sorted((uid, 1) for uid in uids.values())
    told = {name: (await shown(app.runtime, name))["status"] for name in uids}
    assert {name: (one["phase"], one["reason"], one["message"]) for name, one in told.items()} == {
        "requeue": ("Pending", "NodeLost", "it is gone"),
        "fail": ("Failed", reason, "it is gone"),
        "keep": ("Failed", reason, "it is gone"),
    }
    await bind(app.runtime, "default", "requeue", "n1")
    assert acknowledged(await again.heartbeat(*ends)) == acknowledged(answer), "said again, it is of the past"
    assert (await shown(app.runtime, "requeue"))["status"]["phase"] == "Scheduled"
    await assert_books_balance(app.runtime)


async def test_a_restarted_node_takes_the_parts_on_other_nodes_with_it(app: Served) -> None:
    one, two = await joined(app, "n1"), await joined(app, "n2")
    uid = await placed(app.runtime, "both", "n1", "n2", spec={"nodes": 2, **REQUEUE})
    await one.heartbeat(running(uid))
    await two.heartbeat(running(uid))
    await one.heartbeat(status(uid, pb.POD_PHASE_FAILED, reason=NODE_RESTARTED, message="it is gone"))
    assert (await shown(app.runtime, "both"))["status"]["phase"] == "Terminating"
    assert acknowledged(await two.heartbeat(stopped(uid))) == [(uid, 1)]
    assert (await shown(app.runtime, "both"))["status"]["phase"] == "Pending"
    await assert_books_balance(app.runtime)


async def test_who_comes_back_after_its_work_was_given_up_is_told_to_stop_it(app: Served) -> None:
    agent = await joined(app)
    await node(app.runtime, "n2", cpu=64)
    uid = await placed(app.runtime, "a", "n1", spec=REQUEUE)
    await agent.heartbeat(running(uid))
    await silence(app.runtime, "n1")
    await regrant(app.runtime, "n1", granted=100)
    await look(app.runtime)
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Pending"
    await bind(app.runtime, "default", "a", "n2")
    again = app.agent("n1")
    answer = await again.heartbeat(running(uid), inventory=True)
    assert (STOP, uid, 1) in orders(answer.directives)
    assert RUN not in [order[0] for order in orders(answer.directives)]
    assert acknowledged(await again.heartbeat(ended(uid))) == [(uid, 1)]
    told = (await shown(app.runtime, "a"))["status"]
    assert (told["phase"], told["nodeName"], told["epoch"]) == ("Scheduled", "n2", 2)

    async def is_ready() -> bool:
        return bool((await node_status(app.runtime, "n1"))["phase"] == "Ready")

    await eventually(is_ready)
    await assert_books_balance(app.runtime)
