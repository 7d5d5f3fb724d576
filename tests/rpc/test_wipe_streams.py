"""Wiping, as it is told on streams: when it is wanted, until it is done, and whose word counts."""

import asyncio

import pytest

from bursar.ops.nodes import claim as ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.agent_streams import Outage, Served, acknowledged, ended, joined, orders, running, status
from support.nodes.claims import allow, claim, claim_of, origin, release
from support.runtime.runtime import node

WIPE = pb.DIRECTIVE_TYPE_WIPE
ANN = "default/ann"


@pytest.fixture
async def app_with_a_pool(app: Served) -> Served:
    await allow(app.runtime, 10)
    return app


async def released(runtime: Runtime, name: str = "n1") -> str:
    """A node that was claimed and given back; the id of its claim."""
    await claim(runtime, name, ANN)
    await release(runtime, name, ANN)
    found = await claim_of(runtime, name)
    assert found is not None
    return found.id


def failed(uid: str, epoch: int = 1, code: int = 3) -> pb.PodStatus:
    return status(uid, pb.POD_PHASE_FAILED, epoch, exit_code=code)


async def test_who_comes_is_told_that_its_node_is_to_be_wiped(app_with_a_pool: Served) -> None:
    app = app_with_a_pool
    await node(app.runtime, "n1", cpu=4)
    wanted = await released(app.runtime)
    answer = await app.agent("n1").heartbeat(inventory=True)
    assert answer.complete
    assert orders(answer.directives) == [(WIPE, wanted, 1)]


async def test_who_is_there_is_told_at_once_and_nobody_else(app_with_a_pool: Served) -> None:
    app = app_with_a_pool
    agent, other = await joined(app, "n1"), await joined(app, "n2")
    wanted = await released(app.runtime)
    assert orders([await agent.directive()]) == [(WIPE, wanted, 1)]
    await other.heartbeat()
    assert other.pushed == []


async def test_while_it_goes_on_it_is_no_stranger(app_with_a_pool: Served) -> None:
    app = app_with_a_pool
    agent = await joined(app)
    wanted = await released(app.runtime)
    await agent.directive()
    answer = await agent.heartbeat(running(wanted))
    assert (orders(answer.directives), acknowledged(answer)) == ([], [])


async def test_that_it_is_done_counts_once_and_is_always_acknowledged(app_with_a_pool: Served) -> None:
    app = app_with_a_pool
    agent = await joined(app)
    wanted = await released(app.runtime)
    for _ in range(2):
        answer = await agent.heartbeat(ended(wanted))
        assert acknowledged(answer) == [(wanted, 1)]
        assert await claim_of(app.runtime, "n1") is None
    again = await released(app.runtime)
    # The word of an earlier claim is of the past.
    assert acknowledged(await agent.heartbeat(ended(wanted))) == [(wanted, 1)]
    now = await claim_of(app.runtime, "n1")
    assert now is not None
    assert (now.id, now.state) == (again, "Wiping")


async def test_a_failure_is_told_and_the_next_attempt_pushed(app_with_a_pool: Served) -> None:
    app = app_with_a_pool
    agent = await joined(app)
    wanted = await released(app.runtime)
    await agent.directive()
    await agent.heartbeat(failed(wanted))
    found = await claim_of(app.runtime, "n1")
    assert found is not None
    assert (found.state, found.message) == ("WipeFailed", "the wipe hook ended with exit code 3")
    # Nobody is asked to wipe it again before an administrator says so.
    assert orders((await app.agent("n1").heartbeat(inventory=True)).directives) == []
    agent = await joined(app)
    await ops.wipe_node(app.runtime, "n1", origin("admin", "wipe"))
    assert orders([await agent.directive()]) == [(WIPE, wanted, 2)]
    await agent.heartbeat(ended(wanted, 1))
    assert await claim_of(app.runtime, "n1") is not None, "the first attempt is of the past"
    await agent.heartbeat(ended(wanted, 2))
    assert await claim_of(app.runtime, "n1") is None


async def test_a_hook_that_runs_on_when_somebody_said_that_it_is_wiped_is_not_wanted_any_more(
    app_with_a_pool: Served,
) -> None:
    """However it was told of the wipe: others' work may be placed there from now on."""
    app = app_with_a_pool
    agent = await joined(app)
    for comes_later in (False, True):
        wanted = await released(app.runtime)
        if comes_later:
            agent = await joined(app)
        else:
            await agent.directive()
        await ops.end_wipe(app.runtime, "n1", origin("admin", "wiped"))
        answer = await agent.heartbeat(running(wanted))
        async with asyncio.timeout(10):
            while not answer.complete:
                answer = await agent.heartbeat(running(wanted))
        assert orders(answer.directives) == []


async def test_a_node_speaks_for_itself_alone(app_with_a_pool: Served) -> None:
    app = app_with_a_pool
    await node(app.runtime, "n1", cpu=4)
    wanted = await released(app.runtime)
    other = await joined(app, "n2")
    assert acknowledged(await other.heartbeat(ended(wanted))) == [(wanted, 1)]
    assert await claim_of(app.runtime, "n1") is not None


async def test_what_is_said_while_the_database_is_away_is_not_lost(
    app_with_a_pool: Served, database_url: str, postgres_admin: str
) -> None:
    app = app_with_a_pool
    agent = await joined(app)
    wanted = await released(app.runtime)
    await agent.directive()
    async with Outage(postgres_admin, database_url):
        waiting = asyncio.ensure_future(agent.answer(await agent.send(ended(wanted))))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
    # It is acknowledged once it is recorded, or said again.
    answer = await waiting
    while (wanted, 1) not in acknowledged(answer):
        answer = await agent.heartbeat(ended(wanted))
    assert await claim_of(app.runtime, "n1") is None
