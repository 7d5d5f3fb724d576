"""Heartbeats of claimed, prepaid nodes: work there is granted the time of the claim's lease."""

from __future__ import annotations

import pytest

from bursar.core.values.money import nanocredits
from bursar.loops.claims import keep_claims
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.credit.ledgers import funded
from support.credit.paying import account, submitted_by
from support.credit.paying import ended as ended_leases
from support.nodes.agent_streams import Agent, Served, acknowledged, ended, joined, running
from support.nodes.claims import claim_of, release
from support.nodes.paid_claims import ANN, RATE, WINDOW, assert_paid_once, claimed, clinic, passed
from support.runtime.runtime import bind, code, document


@pytest.fixture
async def lab(app: Served) -> Served:
    await clinic(app.runtime)
    return app


def grants(answer: pb.HeartbeatResponse) -> list[tuple[str, int, bool, str]]:
    return [(one.allocation_id, one.seconds, one.final, one.reason) for one in answer.leases]


async def begun(lab: Served, agent: Agent, name: str = "train") -> str:
    """One GPU of somebody that runs; its uid."""
    await submitted_by(lab.runtime, ANN, name)
    uid = str(document(await bind(lab.runtime, "default", name, "n1"))["metadata"]["uid"])
    assert (await agent.directive()).paid
    await agent.heartbeat(running(uid))
    return uid


async def test_what_runs_when_its_node_is_claimed_goes_on_and_is_granted_the_claims_time(lab: Served) -> None:
    await funded(lab.runtime, "100")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    await claimed(lab.runtime)
    assert grants(await agent.heartbeat()) == [], "nothing is told of the lease that is closed"
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "")]
    await passed(lab.runtime, 20)
    assert grants(await agent.heartbeat()) == [(uid, WINDOW - 20, False, "")]
    answer = await agent.heartbeat(ended(uid, usage=pb.AllocationUsage(seconds=25.0)))
    assert acknowledged(answer) == [(uid, 1)]
    await assert_paid_once(lab.runtime)
    assert code(await release(lab.runtime, "n1", ANN)) == "ok"
    assert (await account(lab.runtime))["posted"] == nanocredits("100") - 5 * RATE // 8 - 20 * RATE
    assert all(row["settled"] for row in await ended_leases(lab.runtime))
    await assert_paid_once(lab.runtime)


async def test_heartbeats_and_the_controller_pay_the_same_lease_for_a_long_time(lab: Served) -> None:
    await funded(lab.runtime, "1000")
    await claimed(lab.runtime)
    agent = await joined(lab)
    uid = await begun(lab, agent)
    for turn in range(1, 41):
        await passed(lab.runtime, 100)
        if turn % 3:
            assert await keep_claims(lab.runtime) == []
        (told,) = grants(await agent.heartbeat())
        assert told[0] == uid
        assert told[1] >= WINDOW // 2 - 100
        assert told[2:] == (False, "")
    await assert_paid_once(lab.runtime)
    assert [row["uid"] for row in await ended_leases(lab.runtime)] == []


async def test_the_last_time_of_a_claim_is_the_last_of_what_runs_there(lab: Served) -> None:
    await funded(lab.runtime, "48")
    await claimed(lab.runtime)
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 400)
    assert grants(await agent.heartbeat()) == [(uid, 200, True, "insufficient_credit")]
    await passed(lab.runtime, 200)
    assert grants(await agent.heartbeat()) == [(uid, 0, True, "insufficient_credit")]
    assert await keep_claims(lab.runtime) == []
    assert (await agent.directive()).type == pb.DIRECTIVE_TYPE_STOP
    usage = pb.AllocationUsage(seconds=600.0)
    await agent.heartbeat(ended(uid, usage=usage))
    assert await keep_claims(lab.runtime) == ["n1"]
    found = await claim_of(lab.runtime, "n1")
    assert found is not None
    assert (found.state, (await account(lab.runtime))["posted"]) == ("Wiping", 0)
    directive = await agent.directive()
    if directive.type == pb.DIRECTIVE_TYPE_STOP:
        # The stream looked between its end and the release, when it was bound no more.
        assert (directive.allocation_id, directive.reason) == (uid, "Released")
        directive = await agent.directive()
    assert directive.type == pb.DIRECTIVE_TYPE_WIPE
    await assert_paid_once(lab.runtime)
