"""What agents measure to be in use on their nodes is shown with the nodes, and counted in the cluster's figures."""

from typing import Any

from bursar.api.objects.render import documents
from bursar.ops.nodes.cluster import ClusterCache
from bursar.store.objects.listing import ListedObject
from bursar.wire.kinds.node import NODE
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.agent_streams import Served
from support.nodes.liveness import stored_node
from support.runtime.runtime import node

GPU = "nvidia.com/gpu"


def usage(cpu: float, memory: int, *gpus: float) -> pb.ResourceUsage:
    busy = [pb.GpuUsage(index=index, utilization=one) for index, one in enumerate(gpus)]
    return pb.ResourceUsage(cpu_cores=cpu, memory_bytes=memory, gpus=busy)


async def shown(app: Served, name: str) -> dict[str, Any]:
    stored = await stored_node(app.runtime, name)
    item = ListedObject("", name, "", stored.revision, stored.doc, stored.status)
    [document] = await documents(app.runtime.database, NODE, [item])
    status: dict[str, Any] = document["status"]
    return status


async def test_what_an_agent_measures_is_shown_and_counted(app: Served) -> None:
    for name in ("n1", "n2", "n3"):
        await node(app.runtime, name, cpu=10, memory="64Gi", gpu=4)
    await app.agent("n1").heartbeat(inventory=True, current_usage=usage(2.5, 8 << 30, 1.0, 0.25))
    await app.agent("n2").heartbeat(inventory=True, current_usage=usage(0.5, 1 << 30, 0.0))
    await app.agent("n3").heartbeat(inventory=True)
    assert (await shown(app, "n1"))["used"] == {
        "cpu": "2500m", "memory": "8Gi", "ephemeral-storage": "0", GPU: "1250m",
    }  # fmt: skip
    assert "used" not in await shown(app, "n3")
    totals = await ClusterCache(app.runtime.database).totals()
    assert (totals.used["cpu"], totals.used["memory"], totals.used[GPU]) == (3000, 9 << 30, 1250)


async def test_what_cannot_be_measured_is_left_out(app: Served) -> None:
    await node(app.runtime, "n1", cpu=10, memory="64Gi", gpu=4)
    await app.agent("n1").heartbeat(inventory=True, current_usage=usage(float("nan"), -5, float("inf"), 7.0))
    assert (await shown(app, "n1"))["used"] == {"ephemeral-storage": "0", GPU: "2"}


async def test_what_was_measured_long_ago_says_nothing_of_now(app: Served) -> None:
    await node(app.runtime, "n1", cpu=10, memory="64Gi", gpu=4)
    await app.agent("n1").heartbeat(inventory=True, current_usage=usage(2.5, 8 << 30))
    async with app.runtime.database.reader() as db:
        await db.execute("UPDATE node_load SET at = at - interval '1 hour'")
    assert "used" not in await shown(app, "n1")
    assert (await ClusterCache(app.runtime.database).totals()).used == {}
