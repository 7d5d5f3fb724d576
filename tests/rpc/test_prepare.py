"""What agents are told before they start a command: who runs with it, and nobody else."""

import grpc
import pytest

from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects import stdin as stdin_store
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1 import node_agent_pb2_grpc as pb_grpc
from support.nodes.agent_streams import Served
from support.runtime.runtime import allocation, bind, bind_unit, code, get, node

GANG = {"gangScheduling": {"groupId": "ring", "minMembers": 2}, "command": ["true"]}


async def ask(app: Served, at: str, uid: str, epoch: int = 1) -> pb.PrepareResponse:
    stub: pb_grpc.NodeAgentAsyncStub = app.agent(at).stub
    return await stub.PrepareAllocation(pb.PrepareRequest(node_id=at, allocation_id=uid, epoch=epoch))


async def uid_of(runtime: Runtime, name: str) -> str:
    return (await get(runtime, "Allocation", "default", name)).uid


async def test_members_of_a_gang_are_told_of_each_other(app: Served) -> None:
    for name, address in (("n1", "10.0.0.1:50051"), ("n2", "10.0.0.2:50051")):
        await node(app.runtime, name, cpu=8)
        await app.agent(name).heartbeat(inventory=True, address=address)
    for name in ("w2", "w10"):
        await allocation(app.runtime, "default", name, spec=GANG, cpu=1)
    await allocation(app.runtime, "default", "other", spec={"command": ["true"]}, cpu=1)
    assert code(await bind_unit(app.runtime, "default", {"w10": ("n2",), "w2": ("n1",)})) == "ok"
    await bind(app.runtime, "default", "other", "n1")
    first = await ask(app, "n1", await uid_of(app.runtime, "w2"))
    second = await ask(app, "n2", await uid_of(app.runtime, "w10"))
    assert [(one.allocation, one.node, one.address) for one in first.peers] == [
        ("w2", "n1", "10.0.0.1"),
        ("w10", "n2", "10.0.0.2"),
    ]
    assert list(first.peers) == list(second.peers)
    assert (first.rank, second.rank) == (0, 1)
    assert first.port == second.port
    assert not (await ask(app, "n1", await uid_of(app.runtime, "other"))).peers


async def test_the_nodes_of_one_allocation_are_told_of_each_other(app: Served) -> None:
    for name in ("n1", "n2"):
        await node(app.runtime, name, cpu=8)
    await allocation(app.runtime, "default", "wide", spec={"nodes": 2, "command": ["true"]}, cpu=1)
    await bind(app.runtime, "default", "wide", "n2", "n1")
    answer = await ask(app, "n1", await uid_of(app.runtime, "wide"))
    assert [one.address for one in answer.peers] == ["n2", "n1"], "whose address nobody knows is called by its name"
    assert answer.rank == 1


async def test_a_node_is_told_nothing_of_what_is_not_placed_there(app: Served) -> None:
    for name in ("n1", "n2"):
        await node(app.runtime, name, cpu=8)
    await allocation(app.runtime, "default", "one", spec={"command": ["true"]}, cpu=1)
    await bind(app.runtime, "default", "one", "n1")
    uid = await uid_of(app.runtime, "one")
    for at, epoch in (("n2", 1), ("n1", 2)):
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(app, at, uid, epoch)


async def test_directives_say_whose_work_it_is_and_whether_more_is_to_be_asked(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True)
    await allocation(app.runtime, "default", "one", spec={"command": ["true"]}, cpu=1)
    await bind(app.runtime, "default", "one", "n1")
    told = await agent.directive()
    assert (told.job, told.HasField("job_index"), told.prepare) == ("", False, False)
    for name in ("a", "b"):
        await allocation(app.runtime, "default", name, spec=GANG, cpu=1)
    await bind_unit(app.runtime, "default", dict.fromkeys(("a", "b"), ("n1",)))
    assert [(await agent.directive()).prepare for _ in range(2)] == [True, True]


async def test_work_that_reads_is_placed_where_agents_can_and_waits_for_its_input(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True, capacity={"cpu": "8"}, features=["stdin"])
    assert (await get(app.runtime, "Node", "", "n1")).labels["bursar.io/stdin"] == "true"
    await allocation(app.runtime, "default", "one", spec={"command": ["cat"], "stdin": True}, cpu=1)
    await bind(app.runtime, "default", "one", "n1")
    assert (await agent.directive()).prepare
    one = await get(app.runtime, "Allocation", "default", "one")
    assert (await ask(app, "n1", one.uid)).wait
    async with app.runtime.database.reader() as db:
        assert await stdin_store.save(db, one.key, one.uid, b"hello")
    answer = await ask(app, "n1", one.uid)
    assert (answer.wait, answer.stdin) == (False, b"hello")
    await app.agent("n1").heartbeat(inventory=True, capacity={"cpu": "8"})
    assert "bursar.io/stdin" not in (await get(app.runtime, "Node", "", "n1")).labels, "an older agent came"
