"""Submissions that could never run are refused with their numbers; those that cannot run today are accepted."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bursar.api.serve import opened_context
from bursar.core.values.refusal import Refusal
from bursar.ops.quota.cluster_ceiling import unsatisfiable
from bursar.wire.kinds.allocation import AllocationSpec, Resources
from support.api.site import APPLY, Document, Reply, Site, allocation, opened_site
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

GPU = "nvidia.com/gpu"
EXPRESSION = {"key": "gpu-memory", "operator": "Gte", "values": ["80"]}
SCHEDULING: Document = {
    "nodeSelector": {"gpu-type": "nvidia-a100", "zone": "us-east-1a"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringScheduling": {"nodeSelectorTerms": [{"matchExpressions": [EXPRESSION]}]},
        }
    },
}
WORKER: Document = {
    "capacity": {"cpu": "96000m", "memory": "1152Gi", GPU: "8", "ephemeral-storage": "3800Gi", "pods": "110"},
    "allocatable": {"cpu": "94000m", "memory": "1100Gi", GPU: "8", "ephemeral-storage": "3500Gi", "pods": "110"},
    "taints": [{"key": GPU, "effect": "NoSchedule"}],
}


@pytest_asyncio.fixture
async def cluster(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Site]:
    """A server of its own: the nodes of other tests would matter here."""
    name = await clone_database(embedded_postgres, database_template)
    async with opened_site(_url(embedded_postgres, name)) as one:
        await one.namespace(name="ml-team")
        yield one
    await drop_database(embedded_postgres, name)


async def register(site: Site, *names: str, **spec: Any) -> None:
    for name in names:
        reply = await site.post("nodes", {"metadata": {"name": name}, "spec": spec or WORKER})
        assert reply.status == 201, reply


async def submit(site: Site, name: str, *, spec: Document | None = None, dry: bool = False, **requests: Any) -> Reply:
    query = {"dryRun": "All"} if dry else {}
    return await site.post("namespaces/ml-team/allocations", allocation(name, spec=spec, **requests), **query)


def assert_never(reply: Reply, message: str) -> None:
    assert (reply.status, reply.body["reason"], reply.body["details"]["code"]) == (422, "Invalid", "unsatisfiable")
    assert reply.message == message
    assert reply.body["details"]["hint"]
    assert reply.body["details"]["causes"]


async def test_without_nodes_everything_is_let_in(cluster: Site) -> None:
    assert (await submit(cluster, "huge", gpu=1000, spec={"nodes": 1000, "exclusive": True})).status == 201


async def test_more_than_the_largest_node_has_is_refused_and_nothing_is_stored(cluster: Site) -> None:
    await register(cluster, "gpu-worker-043")
    before = await cluster.state()
    reply = await submit(cluster, "large", gpu=16)
    assert_never(reply, "nvidia.com/gpu 16 requested, the largest node has 8")
    details = reply.body["details"]
    assert (details["dimension"], details["requested_delta"], details["limit"]) == (GPU, "16", "8")
    assert details["causes"][0]["field"] == "spec.resources.requests[nvidia.com/gpu]"
    assert_never(await submit(cluster, "large", gpu=16, dry=True), reply.message)
    applied = await cluster.patch(
        "namespaces/ml-team/allocations/large", allocation("large", gpu=16), media=APPLY, fieldManager="me"
    )
    assert_never(applied, reply.message)
    assert await cluster.state() == before
    # What it has beyond what it can give is for itself, however empty it is.
    assert_never(await submit(cluster, "large", gpu=8, cpu=95), "cpu 95 requested, the largest node has 94")
    assert (await submit(cluster, "fits", gpu=8, cpu=94)).status == 201
    assert (await submit(cluster, "fits-too", gpu=8, dry=True)).status == 201


async def test_labels_taints_and_affinity_are_never_a_reason(cluster: Site) -> None:
    await register(cluster, "gpu-worker-043", **{**WORKER, "unschedulable": True})
    assert (await submit(cluster, "picky", gpu=4, spec={"scheduling": SCHEDULING})).status == 201


async def test_a_gang_is_let_in_once_the_empty_cluster_could_hold_it(cluster: Site) -> None:
    gang: Document = {"scheduling": SCHEDULING, "gangScheduling": {"groupId": "g", "minMembers": 4}}
    await register(cluster, "gpu-worker-043")
    assert_never(
        await submit(cluster, "member", gpu=4, cpu=8, spec=gang),
        "a gang of 4 requested, each with cpu 8, nvidia.com/gpu 4; the cluster holds 2 when it is empty",
    )
    await register(cluster, "gpu-worker-044")
    assert (await submit(cluster, "member", gpu=4, cpu=8, spec=gang)).status == 201


async def test_the_size_of_a_gang_may_stand_in_its_annotations(cluster: Site) -> None:
    await register(cluster, "gpu-worker-043")
    body = allocation("member", gpu=4, spec={"gangScheduling": {"groupId": "g"}})
    body["metadata"]["annotations"] = {"scheduler.example.com/gang-size": "4"}
    reply = await cluster.post("namespaces/ml-team/allocations", body)
    assert_never(reply, "a gang of 4 requested, each with nvidia.com/gpu 4; the cluster holds 2 when it is empty")


async def test_a_jobs_gang_is_let_in_once_the_empty_cluster_could_hold_it(cluster: Site) -> None:
    template = allocation("", cpu=16, memory="64Gi", gpu=8)["spec"]
    template["scheduling"] = {
        "gangScheduling": {"minMembers": 8, "timeout": "600s"},
        "nodeSelector": {"gpu-type": "nvidia-a100"},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
    }
    job = {
        "metadata": {"name": "distributed-training-v2"},
        "spec": {
            "parallelism": 8,
            "completions": 8,
            "template": {"spec": template},
            "priority": 200,
            "priorityClass": "batch-high",
            "queue": "gpu-training",
        },
    }
    await register(cluster, *(f"gpu-worker-{index}" for index in range(7)))
    reply = await cluster.post("namespaces/ml-team/jobs", job)
    assert_never(
        reply,
        "a gang of 8 requested, each with cpu 16, memory 64Gi, nvidia.com/gpu 8; the cluster holds 7 when it is empty",
    )
    assert (reply.body["details"]["kind"], reply.body["details"]["name"]) == ("Job", "distributed-training-v2")
    (cause,) = reply.body["details"]["causes"]
    assert cause["field"] == "spec.template.spec.gangScheduling.minMembers"
    assert (await cluster.get("namespaces/ml-team/allocations")).names == []
    await register(cluster, "gpu-worker-7")
    assert (await cluster.post("namespaces/ml-team/jobs", job)).status == 201


async def test_more_nodes_than_there_are_that_could_each_hold_one(cluster: Site) -> None:
    await register(cluster, "a", "b")
    await register(cluster, "small", capacity={"cpu": "4"})
    spec = {"nodes": 3, "exclusive": True}
    assert_never(
        await submit(cluster, "wide", gpu=8, spec=spec),
        "3 nodes requested, the cluster has 2 large enough for nvidia.com/gpu 8",
    )
    assert (await submit(cluster, "wide", spec=spec)).status == 201
    assert (await submit(cluster, "wider", gpu="500m", spec={"nodes": 2})).status == 201


async def test_a_node_that_was_registered_elsewhere_a_moment_ago_counts(cluster: Site) -> None:
    await register(cluster, "small", capacity={"cpu": "4"})
    assert (await submit(cluster, "large", cpu=64)).status == 422
    async with opened_site(cluster.context.database.url) as other:
        await register(other, "large", capacity={"cpu": "64"})
    assert (await submit(cluster, "large", cpu=64)).status == 201


async def test_a_node_that_is_gone_or_has_shrunk_counts_no_more(cluster: Site) -> None:
    await register(cluster, "a", "b")
    assert (await submit(cluster, "one", gpu=8, spec={"nodes": 2})).status == 201
    assert (await cluster.delete("nodes/b")).status == 200
    assert (await submit(cluster, "two", gpu=8, spec={"nodes": 2})).status == 422
    lost = {"status": {"capacity": {GPU: "6"}, "allocatable": {GPU: "6"}}}
    assert (await cluster.patch("nodes/a/status", lost)).status == 200
    assert_never(await submit(cluster, "three", gpu=8), "nvidia.com/gpu 8 requested, the largest node has 6")
    assert (await cluster.patch("nodes/a", {"spec": {"cpuOvercommit": 2}})).status == 200
    assert (await submit(cluster, "four", cpu=188)).status == 201
    assert_never(await submit(cluster, "five", cpu=189), "cpu 189 requested, the largest node has 188")


async def test_a_repeated_request_is_answered_as_before_whatever_became_of_the_nodes(cluster: Site) -> None:
    await register(cluster, "a")
    key = {"idempotency-key": "r-1"}
    path, body = "namespaces/ml-team/allocations", allocation("one", gpu=8)
    first = await cluster.post(path, body, headers=key)
    assert (await cluster.delete("nodes/a")).status == 200
    await register(cluster, "small", capacity={"cpu": "4"})
    again = await cluster.post(path, body, headers=key)
    assert (first.status, again.status, again.body) == (201, 201, first.body)


async def test_a_refusal_is_not_remembered_under_its_request_id(cluster: Site) -> None:
    await register(cluster, "small", capacity={"cpu": "4"})
    key = {"idempotency-key": "r-2"}
    path, body = "namespaces/ml-team/allocations", allocation("one", gpu=8)
    assert (await cluster.post(path, body, headers=key)).status == 422
    await register(cluster, "a")
    assert (await cluster.post(path, body, headers=key)).status == 201


async def test_nodes_that_are_dedicated_to_other_tenants_do_not_count(cluster: Site) -> None:
    """Nodes dedicated to the tenant or to an ancestor count; a refusal shows nothing of other nodes."""
    for name, parent in (("acme", {}), ("acme-vision", {"parent": "acme"}), ("rival", {})):
        assert (await cluster.post("tenants", {"metadata": {"name": name}, "spec": parent})).status == 201
        await cluster.namespace(name, f"{name}-lab")

    async def sent(tenant: str, gpu: int, **spec: Any) -> Reply:
        return await cluster.post(
            f"namespaces/{tenant}-lab/allocations", allocation("one", gpu=gpu, spec=spec), dryRun="All"
        )

    await register(cluster, "large", **WORKER, tenants=["acme"])
    assert (await sent("rival", 1000)).status == 201, "no node is open to it: an administrator can change that"
    await register(cluster, "small", capacity={"cpu": "8", GPU: "2"})
    await register(cluster, "smaller", capacity={"cpu": "8", GPU: "1", "tpu": "1"}, tenants=["rival"])
    refused = await sent("rival", 8)
    assert_never(refused, "nvidia.com/gpu 8 requested, the largest node that its tenant may use has 2")
    assert "acme" not in str(refused.body)
    assert (await sent("rival", 1, nodes=2)).status == 201
    message = "3 nodes requested, the cluster has 2 that its tenant may use large enough for nvidia.com/gpu 1"
    assert_never(await sent("rival", 1, nodes=3), message)
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 4}}
    message = (
        "a gang of 4 requested, each with nvidia.com/gpu 1; the nodes that its tenant may use hold 3 when they are"
    )
    assert_never(await sent("rival", 1, **gang), f"{message} empty")
    for tenant in ("acme", "acme-vision"):
        assert (await sent(tenant, 8)).status == 201
        unknown = await cluster.post(f"namespaces/{tenant}-lab/allocations", allocation("one", tpu=1))
        assert_never(unknown, "tpu 1 requested, the largest node that its tenant may use has 0")
    assert (await cluster.patch("nodes/large", {"spec": {"tenants": ["acme", "rival"]}})).status == 200
    assert (await sent("rival", 8)).status == 201


async def test_a_tenant_that_was_moved_elsewhere_a_moment_ago_may_use_what_its_parent_may(cluster: Site) -> None:
    for name in ("acme", "vision"):
        assert (await cluster.post("tenants", {"metadata": {"name": name}})).status == 201
    await cluster.namespace("vision", "lab")
    await register(cluster, "large", **WORKER, tenants=["acme"])
    await register(cluster, "small", capacity={"cpu": "4"})
    body = allocation("one", gpu=8)
    async with opened_site(cluster.context.database.url) as other:
        assert (await cluster.post("namespaces/lab/allocations", body, dryRun="All")).status == 422
        assert (await other.patch("tenants/vision", {"spec": {"parent": "acme"}})).status == 200
        assert (await cluster.post("namespaces/lab/allocations", body, dryRun="All")).status == 201


async def test_the_ceiling_is_that_of_the_database_after_any_history(cluster: Site) -> None:
    """Nodes come, go, change and come again under the same name; another process that starts afresh agrees."""
    spec = AllocationSpec(resources=Resources(requests={"cpu": "8"}))
    async with opened_context(cluster.context.database.url) as watching:
        for step, sizes in enumerate(([4, 8], [8], [4, 4, 4], [], [8, 8, 8], [2, 8])):
            for name in (await cluster.get("nodes")).names:
                assert (await cluster.delete(f"nodes/{name}")).status == 200
            for index, cpus in enumerate(sizes):
                await register(cluster, f"n{index}", capacity={"cpu": str(cpus)})
            expected = bool(sizes) and sizes.count(8) < 2
            refused = await unsatisfiable(watching.runtime, spec, 2, tenant="")
            async with opened_context(cluster.context.database.url) as fresh:
                assert isinstance(await unsatisfiable(fresh.runtime, spec, 2, tenant=""), Refusal) is expected, step
            # What fits may be let in on what was read within the last second; what is refused was read just now.
            assert expected or refused is None, step
            watching.runtime.ceilings.forget()
            assert isinstance(await unsatisfiable(watching.runtime, spec, 2, tenant=""), Refusal) is expected, step


# What contradicts itself is a mistake, with or without nodes.


@pytest.mark.parametrize(
    ("scheduling", "field", "words"),
    [
        (
            {
                "nodeSelector": {"zone": "a"},
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringScheduling": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
                            ]
                        }
                    }
                },
            },
            "spec.scheduling.affinity.nodeAffinity.requiredDuringScheduling",
            "contradicts itself: no label zone can be all of: nodeSelector a, In (b)",
        ),
        (
            {"topologySpreadConstraints": [{"maxSkew": -1, "topologyKey": "zone"}]},
            "spec.scheduling.topologySpreadConstraints[0].maxSkew",
            "must be between 1 and",
        ),
        (
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringScheduling": {
                            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Near"}]}]
                        }
                    }
                }
            },
            "spec.scheduling.affinity.nodeAffinity.requiredDuringScheduling.nodeSelectorTerms[0].matchExpressions[0].operator",
            "must be one of In, NotIn",
        ),
    ],
)
async def test_what_contradicts_itself_or_is_malformed_is_400(
    cluster: Site, scheduling: Document, field: str, words: str
) -> None:
    before = await cluster.state()
    reply = await submit(cluster, "odd", gpu=1, spec={"scheduling": scheduling})
    assert reply.status == 400
    (cause,) = reply.body["details"]["causes"]
    assert cause["field"] == field
    assert words in cause["message"]
    assert await cluster.state() == before
