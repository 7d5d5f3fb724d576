"""Streams of nodes: one counts per node, refusals have a reason, and an outage is waited out."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog.testing

from bursar.api.serve import opened_context
from bursar.commands.nodes.liveness import SetReadiness
from bursar.core.nodes.liveness import Liveness
from bursar.core.objects.object import Key, Origin
from bursar.core.values.certificate import NodeIdentity
from bursar.core.values.refusal import Refusal
from bursar.ops.lifecycle.bootstrap import bootstrap
from bursar.ops.nodes.node_ca import enrol, ensure_authority
from bursar.ops.nodes.x509 import Issued
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.log_source import LogReading
from bursar.rpc import agent as agent_module
from bursar.rpc.agent_client import Agents
from bursar.rpc.serve import opened_grpc
from bursar.store.nodes import node_ca as authority_store
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1 import node_agent_pb2_grpc as pb_grpc
from support.api.site import eventually
from support.nodes.agent_streams import (
    RUN,
    Agent,
    Outage,
    Served,
    acknowledged,
    ended,
    joined,
    node_shown,
    opened_app,
    orders,
    placed,
    running,
    shown,
)  # fmt: skip
from support.nodes.certificates import new_key, pem_of, request_for
from support.runtime.runtime import allocation, bind, change, delete, document, node

CODE = grpc.StatusCode


# Which stream counts.


async def test_a_younger_stream_ends_the_older_one(app: Served) -> None:
    older = await joined(app)
    younger = await joined(app)
    code, why = await older.refused()
    assert code is CODE.ABORTED
    assert "newer stream" in why
    uid = await placed(app.runtime, "a", "n1")
    assert orders([await younger.directive()]) == [(RUN, uid, 1)]
    assert not (await younger.heartbeat()).complete


async def test_also_when_another_process_has_it(app: Served, database_url: str) -> None:
    older = await joined(app)
    async with opened_app(database_url) as other:
        younger = other.agent("n1")
        await younger.heartbeat(inventory=True)
        granted = await _granted(app.runtime)
        code, why = await older.refusal_of()
        assert code is CODE.ABORTED
        assert "newer stream" in why
        assert await _granted(app.runtime) == granted, "nothing was granted to the older one"
        await younger.heartbeat()


async def _granted(runtime: Runtime) -> Any:
    async with runtime.database.reader() as db:
        return await db.fetchval("SELECT granted_until FROM node_seen")


async def test_of_many_streams_that_come_at_once_one_stays(app: Served, database_url: str) -> None:
    await node(app.runtime, "n1", cpu=8)
    async with opened_app(database_url) as other:
        agents = [each.agent("n1") for each in (app, other) for _ in range(8)]
        await asyncio.gather(*(one.send(inventory=True) for one in agents))
        alive = []
        for one in agents:
            try:
                await one.answer(1)
                await one.heartbeat()
                alive.append(one)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AssertionError):
                assert (await one.refused())[0] is CODE.ABORTED
        # One per process may have been answered before the other process's took over; the last word is one's.
        assert len(alive) in (1, 2)
        uid = await placed(app.runtime, "a", "n1")
        left = []
        for one in alive:
            try:
                left.append((one, await one.heartbeat()))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AssertionError):
                assert (await one.refused())[0] is CODE.ABORTED
        ((last, answer),) = left
        # The directive is pushed by itself, unless an answer goes out first and takes it along.
        told = [*last.pushed, *answer.directives] or [await last.directive()]
        assert orders(told) == [(RUN, uid, 1)]


# Who may not speak, and what may not be said.


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ({"protocol_version": 0}, CODE.FAILED_PRECONDITION, "Update the agent"),
        ({"protocol_version": 9}, CODE.FAILED_PRECONDITION, "Update the server"),
        ({"node_id": "ghost"}, CODE.PERMISSION_DENIED, "node 'ghost' does not exist"),
        ({"node_id": ""}, CODE.INVALID_ARGUMENT, "node_id"),
        ({"node_id": "UPPER CASE"}, CODE.INVALID_ARGUMENT, "node_id"),
        ({"node_id": "x" * 10_000}, CODE.INVALID_ARGUMENT, "node_id"),
        ({"seq": 0}, CODE.INVALID_ARGUMENT, "seq must be at least 1"),
        ({"seq": -4}, CODE.INVALID_ARGUMENT, "seq must be at least 1"),
        ({"address": "nowhere"}, CODE.INVALID_ARGUMENT, "HOST:PORT"),
        ({"address": "unix:123"}, CODE.INVALID_ARGUMENT, "HOST:PORT"),
        ({"address": "h\0st:1"}, CODE.INVALID_ARGUMENT, "HOST:PORT"),
        ({"capacity": {"cpu": "many"}}, CODE.INVALID_ARGUMENT, "capacity[cpu]"),
        ({"capacity": {f"r{index}": "1" for index in range(1000)}}, CODE.INVALID_ARGUMENT, "at most"),
        ({"certificate_request": b"x" * 100_000}, CODE.INVALID_ARGUMENT, "certificate request"),
        ({"pod_statuses": [pb.PodStatus()] * 10_001}, CODE.INVALID_ARGUMENT, "at most 10000"),
        ({"pod_statuses": [pb.PodStatus(allocation_id="a", phase=99)]}, CODE.INVALID_ARGUMENT, "phase"),  # type: ignore[arg-type]
        ({"pod_statuses": [pb.PodStatus(allocation_id="a")]}, CODE.INVALID_ARGUMENT, "phase"),
        ({"pod_statuses": [pb.PodStatus(allocation_id="a\0b", phase=2)]}, CODE.INVALID_ARGUMENT, "uid"),  # type: ignore[arg-type]
        ({"pod_statuses": [pb.PodStatus(phase=2)]}, CODE.INVALID_ARGUMENT, "uid"),  # type: ignore[arg-type]
        ({"pod_statuses": [pb.PodStatus(allocation_id="a", epoch=-1, phase=2)]}, CODE.INVALID_ARGUMENT, "epoch"),  # type: ignore[arg-type]
        ({"agent_version": "x" * (5 << 20)}, CODE.RESOURCE_EXHAUSTED, ""),
    ],
)
async def test_a_heartbeat_that_makes_no_sense_is_refused_in_a_sentence(
    app: Served, said: dict[str, Any], code: grpc.StatusCode, why: str
) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    statuses = said.pop("pod_statuses", ())
    agent.seq = 0
    try:
        await agent.send(*statuses, **said)
        await agent.call.read()
    except grpc.aio.AioRpcError:
        pass
    refused = await agent.refused()
    assert refused[0] is code, refused
    assert why in refused[1]
    assert len(refused[1]) < 1000
    async with app.runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM node_seen") == 0


async def test_epochs_and_exit_codes_of_any_size_are_taken_for_what_they_are(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    answer = await agent.heartbeat(running(uid, epoch=2**63 - 1), ended(uid, exit_code=-(2**31)))
    assert acknowledged(answer) == [(uid, 1)]
    assert (await shown(app.runtime, "a"))["status"]["exitCode"] == -(2**31)


async def test_a_stream_speaks_for_one_node_in_rising_numbers(app: Served) -> None:
    agent = await joined(app)
    code, why = await agent.refusal_of(node_id="n2")
    assert code is CODE.PERMISSION_DENIED
    assert "'n2'" in why
    agent = await joined(app)
    assert (await agent.refusal_of(seq=1))[0] is CODE.INVALID_ARGUMENT


async def test_a_stream_without_a_heartbeat_is_ended(app: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "FIRST_SECONDS_MAX", 0.05)
    agent = app.agent("n1")
    await agent.call.wait_for_connection()
    assert (await agent.refused())[0] is CODE.DEADLINE_EXCEEDED


async def test_a_deleted_node_is_shown_out(app: Served) -> None:
    agent = await joined(app)
    await delete(app.runtime, "Node", "", "n1")
    code, why = await agent.refused()
    assert code is CODE.PERMISSION_DENIED
    assert "node 'n1' does not exist" in why
    code, _ = await app.agent("n1").refusal_of()
    assert code is CODE.PERMISSION_DENIED


async def test_the_calls_that_agents_serve_are_not_served_here(app: Served) -> None:
    stub = app.agent("n1").stub
    calls = (
        stub.BindAllocation(pb.BindRequest()),
        stub.EvictAllocation(pb.EvictRequest()),
        stub.GetResourceSnapshot(pb.SnapshotRequest()),
        stub.ReadLog(pb.ReadLogRequest()),
    )
    for call in calls:
        assert await call.code() is CODE.UNIMPLEMENTED
        assert "the agent on the node serves this call" in await call.details()


# What comes and goes.


async def test_an_outage_of_the_database_is_waited_out(app: Served, database_url: str, postgres_admin: str) -> None:
    agent = await joined(app)
    idle = await joined(app, "n2")
    uid = await placed(app.runtime, "a", "n1")
    await agent.directive()
    await agent.heartbeat(running(uid))
    async with Outage(postgres_admin, database_url):
        said = await agent.send(ended(uid))
        waiting = asyncio.ensure_future(agent.answer(said))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done, "nothing is granted meanwhile"
    answer = await waiting
    while (uid, 1) not in acknowledged(answer):
        answer = await agent.heartbeat(ended(uid))
    assert (await shown(app.runtime, "a"))["status"]["phase"] == "Succeeded"
    assert answer.lease_duration_seconds == 120
    assert (await idle.heartbeat()).seq == 2
    other = await placed(app.runtime, "b", "n2")
    told = [*idle.pushed] or [await idle.directive()]
    assert orders(told) == [(RUN, other, 1)]


async def test_who_comes_during_an_outage_is_answered_after_it(
    app: Served, database_url: str, postgres_admin: str
) -> None:
    await node(app.runtime, "n1", cpu=8)
    uid = await placed(app.runtime, "a", "n1")
    agent = app.agent("n1")
    async with Outage(postgres_admin, database_url):
        said = await agent.send(inventory=True)
        waiting = asyncio.ensure_future(agent.answer(said))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
    answer = await waiting
    assert orders(answer.directives) == [(RUN, uid, 1)]


async def test_a_server_that_stops_sends_its_nodes_elsewhere(database_url: str) -> None:
    async with opened_app(database_url) as app:
        agent = await joined(app)
        channels, app.channels = app.channels, []
    assert (await agent.refused())[0] is CODE.UNAVAILABLE
    for channel in channels:
        await channel.close()


async def test_a_node_that_was_given_up_is_ready_at_once_and_told_everything(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "a", "n1")
    await agent.directive()
    await _lose(app.runtime, "n1")
    answer = await agent.heartbeat()
    assert answer.complete
    assert orders(answer.directives) == [(RUN, uid, 1)]

    async def is_ready() -> bool:
        return bool((await node_shown(app.runtime))["status"]["phase"] == "Ready")

    await eventually(is_ready)


async def _lose(runtime: Runtime, name: str) -> None:
    async with runtime.database.reader() as db:
        await db.execute("UPDATE node_seen SET at = now() - interval '1 hour' WHERE node = $1", name)
    silent = SetReadiness(
        key=Key("Node", "", name), origin=Origin("test", "test"), standing=Liveness.LOST, after_seconds=60
    )
    document(await runtime.changing.submit(silent))
    assert (await node_shown(runtime, name))["status"]["phase"] == "Lost"


async def test_what_changes_while_everything_is_told_comes_with_it_and_not_before(database_url: str) -> None:
    """Told before, it would be stopped again: an answer that names everything would not name it."""
    async with opened_app(database_url, insecure=False) as app:
        agents = []
        for name in ("n1", "n2"):
            await node(app.runtime, name, cpu=8)
            agents.append(app.agent(name, (await credentials(app.runtime, name))[0]))
            await agents[-1].heartbeat(inventory=True)
        agent, other = agents
        await _lose(app.runtime, "n1")
        async with app.runtime.database.reader() as db, db.transaction():
            # Holds the answer up between what is wanted being read and its being told.
            await db.execute("LOCK TABLE authority IN ACCESS EXCLUSIVE MODE")
            said = await agent.send(certificate_request=request_for(new_key()))

            async def is_held_up() -> bool:
                return bool(await db.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))

            async def is_ready() -> bool:
                return bool((await node_shown(app.runtime))["status"]["phase"] == "Ready")

            await eventually(is_held_up)
            await eventually(is_ready)
            uid = await placed(app.runtime, "a", "n1")
            # Once the next one has come out, this one was looked at.
            await placed(app.runtime, "b", "n2")
            await other.directive()
        answer = await agent.answer(said)
        assert answer.complete
        assert orders(answer.directives) == [(RUN, uid, 1)]
        assert not agent.pushed


# What a node has.


async def test_what_a_node_has_is_what_schedules(app: Served) -> None:
    await node(app.runtime, "n1", cpu=16, gpu=8, memory="64Gi")
    agent = app.agent("n1")
    await agent.heartbeat(capacity={"cpu": "12", "nvidia.com/gpu": "7"})
    told = (await node_shown(app.runtime))["status"]
    assert told["capacity"] == {"cpu": "12", "nvidia.com/gpu": "7", "memory": "64Gi"}
    assert told["allocatable"] == told["capacity"]
    revision = (await node_shown(app.runtime))["metadata"]["resourceVersion"]
    await agent.heartbeat(capacity={"cpu": "12000m", "nvidia.com/gpu": "7"})
    assert (await node_shown(app.runtime))["metadata"]["resourceVersion"] == revision, "said in other words"
    await allocation(app.runtime, "default", "big", gpu=8)
    reply = await bind(app.runtime, "default", "big", "n1")
    assert isinstance(reply, Refusal)
    assert "7 nvidia.com/gpu" in reply.message


async def test_a_node_does_not_raise_what_an_administrator_allows(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    await change(app.runtime, "Node", "", "n1", allocatable={"cpu": "6"})
    agent = app.agent("n1")
    with structlog.testing.capture_logs() as logs:
        await agent.heartbeat(capacity={"cpu": "32", "nvidia.com/gpu": "999"})
    told = (await node_shown(app.runtime))["status"]
    assert (told["capacity"], told["allocatable"]) == ({"cpu": "8"}, {"cpu": "6"}), "nor adds what it does not name"
    warned = [one["resources"] for one in logs if one["event"] == "capacity_exceeds_spec"]
    assert warned == [["cpu", "nvidia.com/gpu"]]
    await agent.heartbeat(capacity={"cpu": "4"})
    assert (await node_shown(app.runtime))["status"]["allocatable"]["cpu"] == "4"
    spec = (await node_shown(app.runtime))["spec"]
    assert spec == {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "6"}}


async def test_where_nobody_says_otherwise_the_nodes_word_counts_and_a_rise_is_told_of(app: Served) -> None:
    await node(app.runtime, "n1")
    agent = app.agent("n1")
    with structlog.testing.capture_logs() as logs:
        await agent.heartbeat(capacity={"nvidia.com/gpu": "2"})
        assert not [one for one in logs if one["event"] == "capacity_rose"], "it is its first word"
        await agent.heartbeat(capacity={"nvidia.com/gpu": "4"})
    assert (await node_shown(app.runtime))["status"]["allocatable"] == {"nvidia.com/gpu": "4"}
    warned = [one for one in logs if one["event"] == "capacity_rose"]
    assert [(one["before"], one["now"]) for one in warned] == [("2", "4")]
    await change(app.runtime, "Node", "", "n1", capacity={"nvidia.com/gpu": "3"})
    assert (await node_shown(app.runtime))["status"]["allocatable"] == {"nvidia.com/gpu": "3"}


# Where it is called.


async def test_who_speaks_from_another_machine_does_not_have_the_server_call_itself(
    database_url: str, tmp_path: Path
) -> None:
    """A socket of this machine stands for another one: what comes over it does not come over loopback."""
    socket = f"unix:{tmp_path}/grpc"
    async with opened_context(database_url) as context:
        await bootstrap(context.runtime)
        await node(context.runtime, "n1", cpu=8)
        calls = Agents(context.database, insecure=True)
        for listen, taken in (("127.0.0.1:0", True), (socket, False)):
            async with opened_grpc(context.runtime, context.feed, listen, insecure=True) as port:
                target = socket if listen == socket else f"127.0.0.1:{port}"
                async with grpc.aio.insecure_channel(target) as channel:
                    agent = Agent(pb_grpc.NodeAgentStub(channel), "n1")
                    await agent.heartbeat(address="127.0.0.1:9", inventory=True)
                    answer = await calls.open("n1", LogReading("alloc-1", 1, 0, 0, False))
                    agent.call.cancel()
            assert isinstance(answer, Refusal)
            assert ("does not answer" in answer.message) is taken, "nobody listens there, and it was tried"
            assert ("runs no agent" in answer.message) is not taken
        await calls.close()


# Certificates.


async def credentials(runtime: Runtime, name: str) -> tuple[grpc.ChannelCredentials, NodeIdentity]:
    key = new_key()
    issued = await enrol(runtime.database, name, request_for(key))
    assert isinstance(issued, Issued)
    authority = await ensure_authority(runtime.database)
    made = grpc.ssl_channel_credentials(authority.pem, pem_of(key), issued.certificate)
    return made, issued.identity


async def test_a_certificate_says_who_speaks(database_url: str) -> None:
    async with opened_app(database_url, insecure=False) as app:
        for name in ("n1", "n2"):
            await node(app.runtime, name, cpu=8)
        shown_by_it, identity = await credentials(app.runtime, "n1")
        agent = app.agent("n1", shown_by_it)
        await agent.heartbeat(inventory=True)
        uid = await placed(app.runtime, "a", "n1")
        assert orders([await agent.directive()]) == [(RUN, uid, 1)]
        answer = await agent.heartbeat(certificate_request=request_for(new_key()))
        assert answer.certificate.startswith(b"-----BEGIN CERTIFICATE")
        assert not (await agent.heartbeat(certificate_request=b"nonsense")).certificate
        code, why = await app.agent("n2", shown_by_it).refusal_of()
        assert code is CODE.PERMISSION_DENIED
        assert "'n2'" in why
        async with app.runtime.database.reader() as db:
            await authority_store.end_generations(db, [identity.node])
        granted = await _granted(app.runtime)
        code, why = await agent.refusal_of()
        assert code is CODE.UNAUTHENTICATED
        assert "revoked" in why
        assert (await app.agent("n1", shown_by_it).refusal_of())[0] is CODE.UNAUTHENTICATED
        assert await _granted(app.runtime) == granted
        nobody = app.agent("n1")
        assert (await nobody.refusal_of())[0] is CODE.UNAVAILABLE


async def test_a_revoked_certificate_ends_nobodys_stream(database_url: str) -> None:
    """As that of the machine which had the name before, and still runs an agent."""
    async with opened_app(database_url, insecure=False) as app:
        await node(app.runtime, "n1", cpu=8)
        old, _ = await credentials(app.runtime, "n1")
        new, _ = await credentials(app.runtime, "n1")
        agent = app.agent("n1", new)
        await agent.heartbeat(inventory=True)
        assert (await app.agent("n1", old).refusal_of(inventory=True))[0] is CODE.UNAUTHENTICATED
        uid = await placed(app.runtime, "a", "n1")
        assert orders([await agent.directive()]) == [(RUN, uid, 1)]
        assert (await agent.heartbeat()).seq == 2
