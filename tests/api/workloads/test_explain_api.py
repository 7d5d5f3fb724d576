"""Explain, simulate and figures through the API, with a leader that answers from a given cluster state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from bursar.api.nodes.cluster import rate
from bursar.api.workloads.explain import _none_waits
from bursar.core.objects.object import Key
from bursar.core.quota.quota import Counter
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import ClusterState, Nomination
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.placed_columns import Spot
from bursar.core.values.refusal import Refusal
from bursar.loops.leader_query import run_answers
from bursar.ops.objects import object as object_ops
from bursar.ops.scheduling.leader import resign, stand
from bursar.wire.to_scheduler.ask import ask_of
from support.api.site import Site, allocation
from support.runtime.runtime import bind, node

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"
NOW = datetime(2030, 1, 1, tzinfo=UTC).timestamp()


def cluster_of(gpus: int = 8, name: str = "n0") -> ClusterState:
    cluster = ClusterState()
    cluster.put_node(name, {"cpu": 64_000, "memory": 1 << 38, GPU: gpus * 1000, "pods": 110_000}, labels={"zone": "a"})
    return cluster


async def enter(
    site: Site, cluster: ClusterState, namespace: str, name: str, nomination: Nomination | None = None
) -> Any:
    """An allocation as the leader would see it."""
    one = await object_ops.get(site.context.runtime, Key("Allocation", namespace, name))
    assert not isinstance(one, Refusal)
    ask = ask_of(one.doc, uid=one.uid, tenant=one.tenant, labels=one.labels, priorities={})
    cluster.wait(ask, nomination)
    return ask


@asynccontextmanager
async def leading(site: Site, cluster: ClusterState, waits: WaitStats | None = None) -> AsyncIterator[None]:
    database = site.context.database
    assert await stand(database, "test", 60.0) is not None
    site.context.leader_queries._silent_until = float("-inf")
    task = asyncio.create_task(run_answers(site.context.runtime, lambda: cluster, SchedulingPolicy, lambda: NOW, waits))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await resign(database, "test")


async def estimated(site: Site, path: str) -> Any:
    """What is read, with its place in line: a leader that is slow to answer is not waited for, so it is asked again."""
    async with asyncio.timeout(60):
        while True:
            site.context.leader_queries._silent_until = float("-inf")
            shown = await site.get(path)
            if "queuePosition" in shown.body["status"]:
                return shown


async def pending(site: Site, namespace: str, name: str, **requests: Any) -> None:
    made = await site.post(f"namespaces/{namespace}/allocations", allocation(name, **(requests or {"gpu": 4})))
    assert made.status == 201, made


# Explain.


async def test_why_it_waits_is_told_in_words_and_numbers(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(2)
    await pending(site, team, "a", gpu=4, cpu=2)
    await enter(site, cluster, team, "a")
    async with leading(site, cluster):
        found = await site.get(f"namespaces/{team}/allocations/a/explain")
    assert found.status == 200, found
    body = found.body
    assert (body["kind"], body["name"], body["namespace"], body["phase"]) == ("Explanation", "a", team, "Pending")
    assert body["message"] == "needs 4 nvidia.com/gpu on one node; the most free is 2, on 1 of 1 matching node"
    assert body["reason"]["code"] == f"no_capacity_{GPU}"
    assert body["reason"]["short"] == [{"resource": GPU, "needs": "4", "has": "2", "shortBy": "2", "nodes": 1}]
    assert "2 more nvidia.com/gpu" in body["reason"]["help"]
    assert (body["queue"], body["queuePosition"], body["overallPosition"]) == ("default", 1, 1)
    assert body["ahead"] == {"allocations": 0, "resources": {}}
    assert len(body["score"]["terms"]) == 9
    assert (body["share"]["tenant"], body["share"]["target"]) == (team, 1.0)
    assert "estimatedStartTime" not in body


async def test_quota_and_capacity_are_told_apart(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(2)
    await site.post(
        f"namespaces/{team}/resourcequotas",
        {"metadata": {"name": "q"}, "spec": {"hard": {GPU: "6"}, "enforcement": "Queue"}},
    )
    await pending(site, team, "a", gpu=8)
    await enter(site, cluster, team, "a")
    tree = await site.context.tree(fresh=True)
    cluster.limits.load(tree, {(f"quota:{team}/q", GPU): Counter(hard=6000, bound=2000)})
    async with leading(site, cluster):
        body = (await site.get(f"namespaces/{team}/allocations/a/explain")).body
    assert body["reason"]["code"] == "quota_exceeded"
    assert body["reason"]["quotas"] == [
        {"scope": f"quota:{team}/q", "dimension": GPU, "limit": "6", "bound": "2", "requested": "8", "shortBy": "4"}
    ]
    assert [one["code"] for one in body["otherReasons"]] == [f"no_capacity_{GPU}"]


async def test_what_does_not_wait_says_where_it_is(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await pending(site, team, "a")
    await bind(site.context.runtime, team, "a", where)
    # Nobody needs to lead for that.
    body = (await site.get(f"namespaces/{team}/allocations/a/explain")).body
    assert (body["phase"], body["nodes"][0]["name"]) == ("Scheduled", where)
    assert body["message"].startswith(f"Scheduled on {where} since ")
    for status in ({"phase": "Running"}, {"phase": "Failed", "reason": "Broken", "message": "its disk is full"}):
        told = await site.patch(f"namespaces/{team}/allocations/a/status", {"status": {"epoch": 1, **status}})
        assert told.status == 200, told
    ended = (await site.get(f"namespaces/{team}/allocations/a")).body["status"]["endTime"]
    body = (await site.get(f"namespaces/{team}/allocations/a/explain")).body
    assert body["message"] == f"Failed on {where} since {ended} (Broken: its disk is full)"


async def test_what_the_scheduler_does_not_know_yet_is_told_as_it_was_stored(site: Site) -> None:
    team = await site.namespace()
    await pending(site, team, "a")
    async with leading(site, cluster_of()):
        body = (await site.get(f"namespaces/{team}/allocations/a/explain")).body
    assert (body["phase"], body["reason"]["code"]) == ("Pending", "not_yet_tried")


async def test_without_a_leader_it_is_503_with_a_hint(site: Site) -> None:
    team = await site.namespace()
    await pending(site, team, "a")
    refused = await site.get(f"namespaces/{team}/allocations/a/explain")
    assert (refused.status, refused.body["reason"]) == (503, "ServiceUnavailable")
    assert "bursar controller" in refused.body["details"]["hint"]
    assert refused.headers["retry-after"] == "2"


async def test_another_tenants_allocation_does_not_exist(site: Site) -> None:
    team, other = await site.namespace(), await site.namespace()
    await pending(site, team, "a")
    token = await site.token("user", tenant=other, user="eve")
    assert (await site.get(f"namespaces/{team}/allocations/a/explain", token=token)).status == 404
    assert (await site.get(f"namespaces/{team}/allocations/nobody/explain")).status == 404
    refused = await site.post(f"namespaces/{team}/allocations/simulate", allocation("x", gpu=1), token=token)
    assert refused.status == 404


async def test_who_may_only_look_may_ask_why_but_not_what_if(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(2)
    await pending(site, team, "a")
    await enter(site, cluster, team, "a")
    viewer = await site.token("viewer", tenant=team, user="vic")
    async with leading(site, cluster):
        assert (await site.get(f"namespaces/{team}/allocations/a/explain", token=viewer)).status == 200
        refused = await site.post(f"namespaces/{team}/allocations/simulate", allocation("x", gpu=1), token=viewer)
    assert refused.status == 403


async def test_a_job_is_explained_by_the_first_of_its_allocations_that_waits(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(2)
    job = {
        "metadata": {"name": "train"},
        "spec": {"parallelism": 2, "completions": 2, "template": {"spec": allocation("x", gpu=4)["spec"]}},
    }
    made = await site.post(f"namespaces/{team}/jobs", job)
    assert made.status == 201, made
    names = (await site.get(f"namespaces/{team}/allocations")).names
    for name in names:
        await enter(site, cluster, team, name)
    async with leading(site, cluster):
        body = (await site.get(f"namespaces/{team}/jobs/train/explain")).body
        assert (body["name"], body["reason"]["code"]) == (min(names), f"no_capacity_{GPU}")
        status = (await estimated(site, f"namespaces/{team}/jobs/train/status")).body["status"]
        assert status["queuePosition"] == 1
        boost = {"newPriority": 500, "reason": "incident", "duration": "60s", "approvedBy": "me"}
        boosted = await site.post(f"namespaces/{team}/jobs/train/boost", boost)
        assert (boosted.status, boosted.body["newQueuePosition"]) == (200, 1), boosted


# What is shown while it waits.


async def test_a_pending_allocation_is_shown_with_its_place_in_line(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(4)
    await pending(site, team, "runs")
    await pending(site, team, "a")
    runs = await enter(site, cluster, team, "runs")
    cluster.place(runs, [Spot(0, ((0, (0, 1, 2, 3)),))], since=NOW - 60, ends_at=NOW + 600)
    await enter(site, cluster, team, "a")
    path = f"namespaces/{team}/allocations/a"
    async with leading(site, cluster):
        shown = await estimated(site, path)
        assert shown.body["status"]["queuePosition"] == 1
        assert shown.body["status"]["estimatedStartTime"] == "2030-01-01T00:10:00Z"
        # What was read can be written back.
        assert (await site.put(path, shown.body)).status == 200
        listed = (await site.get(f"namespaces/{team}/allocations")).body["items"]
        assert all("queuePosition" not in one["status"] for one in listed)
    alone = await site.get(path)
    assert (alone.status, alone.body["status"].get("queuePosition")) == (200, None)


# What if.


async def test_what_would_run_is_told_with_its_place_and_nothing_is_stored(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, cpu=64, memory="256Gi", gpu=8)
    before = await site.state()
    async with leading(site, cluster_of(8, where)):
        found = await site.post(f"namespaces/{team}/allocations/simulate", allocation("x", gpu=2))
    assert found.status == 200, found
    assert found.body["wouldRun"] is True
    (one,) = found.body["allocations"]
    assert (one["name"], one["wouldRun"], one["message"]) == ("x", True, f"it would run now, on {where}")
    assert one["nodes"] == [{"name": where, "devices": {GPU: [0, 1]}}]
    assert one["estimatedStartTime"] == "2030-01-01T00:00:00Z"
    assert await site.state() == before


async def test_several_are_simulated_together_and_the_faults_of_each_are_named(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, cpu=64, memory="256Gi", gpu=8)
    path = f"namespaces/{team}/allocations/simulate"
    async with leading(site, cluster_of(8, where)):
        found = await site.post(path, {"items": [allocation("x", gpu=8), allocation("y", gpu=8)]})
        assert [one["wouldRun"] for one in found.body["allocations"]] == [True, False]
        assert found.body["wouldRun"] is False
        assert found.body["allocations"][1]["reason"]["code"] == f"no_capacity_{GPU}"
    faulty = await site.post(path, {"items": [allocation("x", gpu=1), allocation("y", gpu="many")]})
    assert faulty.status == 400
    assert faulty.body["details"]["causes"][0]["field"].startswith("items[1].spec.resources")
    assert (await site.post(path, {"items": []})).status == 400


def job(width: int, **spec: Any) -> dict[str, Any]:
    template = {"spec": {**allocation("x", gpu=4)["spec"], **spec}}
    return {"kind": "Job", "metadata": {"name": "train"}, "spec": {"parallelism": width, "template": template}}


async def test_of_a_job_the_allocations_are_simulated_that_it_would_begin_with(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, cpu=64, memory="256Gi", gpu=8)
    path, before = f"namespaces/{team}/allocations/simulate", await site.state()
    async with leading(site, cluster_of(8, where)):
        found = await site.post(path, job(3))
        assert [(one["name"], one["wouldRun"]) for one in found.body["allocations"]] == [
            ("train-0", True), ("train-1", True), ("train-2", False),
        ]  # fmt: skip
        both = await site.post(path, {"items": [job(1), allocation("y", gpu=8)]})
        assert [one["name"] for one in both.body["allocations"]] == ["train-0", "y"]
        gang = await site.post(path, job(2, gangScheduling={"timeout": "60s"}))
        assert gang.body["wouldRun"] is True, gang
    assert await site.state() == before
    many = await site.post(path, job(65))
    assert (many.status, many.body["message"]) == (
        400, "at most 64 allocations can be simulated together, got 65",
    )  # fmt: skip
    faulty = await site.post(path, {"items": [job(0)]})
    assert faulty.body["details"]["causes"][0]["field"] == "items[0].spec.parallelism"
    assert (await site.post(path, job(1, nodes=5000))).status == 422


async def test_of_a_gang_is_told_how_many_would_fit_together(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(8)
    await node(site.context.runtime, site.name("n"), cpu=64, memory="256Gi", gpu=32)
    for name in "abc":
        spec = {"gangScheduling": {"groupId": "ring", "minMembers": 3}}
        made = await site.post(f"namespaces/{team}/allocations", allocation(name, spec=spec, gpu=4))
        assert made.status == 201, made
        await enter(site, cluster, team, name)
    async with leading(site, cluster):
        reason = (await site.get(f"namespaces/{team}/allocations/a/explain")).body["reason"]
    assert reason["code"] == f"no_capacity_{GPU}"
    assert reason["short"] == [{"resource": "members", "needs": "3", "has": "2", "shortBy": "1", "nodes": 0}]
    assert reason["message"] == "not enough capacity for all 3 members at once: 2 would fit now, on 1 node of 1"


async def test_what_would_be_refused_is_refused(site: Site) -> None:
    team = await site.namespace()
    await site.post(f"namespaces/{team}/resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {GPU: "6"}}})
    path = f"namespaces/{team}/allocations/simulate"
    refused = await site.post(path, {"items": [allocation("x", gpu=4), allocation("y", gpu=4)]})
    assert (refused.status, refused.body["message"]) == (403, f"exceeded quota: {GPU} limit 6, requested 8, used 0")
    never = await site.post(path, allocation("x", gpu=5000))
    assert never.status == 422
    unknown = await site.post(path, allocation("x", spec={"queue": "no-such-queue"}, gpu=1))
    assert unknown.status == 400
    assert (await site.post(path, allocation("x", gpu=1))).status == 503, "it would be let in, but nobody leads"


async def test_names_of_those_who_would_be_evicted_are_told_to_their_own_tenant_only(site: Site) -> None:
    team, other, where = await site.namespace(), await site.namespace(), site.name("n")
    await node(site.context.runtime, where, cpu=64, memory="256Gi", gpu=4)
    cluster = cluster_of(4, where)
    cluster.tenants = {team: ShareOf(team, target=1.0), other: ShareOf(other, target=0.0)}
    for index, namespace in enumerate((team, other)):
        await pending(site, namespace, "low", gpu=2)
        ask = await enter(site, cluster, namespace, "low")
        cluster.place(ask, [Spot(0, ((0, (2 * index, 2 * index + 1)),))], since=NOW - 9000)
    user = await site.token("user", tenant=team, user="ann")
    urgent = site.name("urgent")
    shown = {"kind": "PriorityClass", "metadata": {"name": urgent}, "value": 1000, "crossTenant": True}
    assert (await site.post("priorityclasses", shown)).status == 201
    asked = allocation("x", spec={"priorityClass": urgent}, gpu=4)
    async with leading(site, cluster):
        for token, named in ((user, [team]), (site.admin, sorted([team, other]))):
            found = await site.post(f"namespaces/{team}/allocations/simulate", asked, token=token)
            (one,) = found.body["allocations"]
            assert sorted(each["namespace"] for each in one["evictions"]) == named
            assert len(named) + one.get("evictionsOfOtherTenants", 0) == 2
            assert {each["rule"] for each in one["evictions"]} == {"LowerPriority"}
            assert one["message"] == f"it would run on {where} after evicting 2 allocations"


# Figures.


@pytest.mark.parametrize(
    ("per_second", "told"),
    [(0.0, "0/sec"), (1 / 60, "0.017/sec"), (2.53, "2.5/sec"), (9.96, "10/sec"), (1234.4, "1234/sec")],
)
async def test_a_trickle_of_placements_is_not_told_as_none(per_second: float, told: str) -> None:
    assert rate(per_second) == told


async def test_queues_tell_their_depth_and_their_waits(site: Site) -> None:
    team, cluster, waits = await site.namespace(), cluster_of(2), WaitStats()
    cluster.profiles = {"default": "default", "gpu-training": "ml"}
    await pending(site, team, "a")
    ask = await enter(site, cluster, team, "a")
    waits.bound("default", NOW - 40, NOW - 28)
    viewer = await site.token("viewer", tenant=team, user="vic")
    async with leading(site, cluster, waits):
        found = await site.get("metrics/queues", token=viewer)
        scraped = (await site.get("/metrics")).body
    default, training = found.body["queues"]
    submitted = datetime.fromtimestamp(ask.submitted_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert default == {
        "name": "default", "depth": 1, "oldestItem": submitted, "avgWaitTime": "12s", "p50WaitTime": "12s",
        "p99WaitTime": "12s", "scheduledLast1h": 1,
    }  # fmt: skip
    assert (training["name"], training["depth"], "oldestItem" in training) == ("gpu-training", 0, False)
    assert 'bursar_waiting_allocations{reason="not_yet_tried"} 1.0' in scraped
    assert 'bursar_queue_depth{queue="default"} 1.0' in scraped
    assert 'bursar_time_to_schedule_seconds{quantile="0.99",queue="default"} 12.0' in scraped
    assert (await site.get("metrics/queues")).status == 503


async def test_the_cluster_is_told_in_numbers_with_and_without_a_leader(site: Site) -> None:
    team = await site.namespace()
    before = (await site.get("metrics/cluster/utilization")).body
    assert "scheduling" not in before
    for resource in ("cpu", "memory", "gpu"):
        assert (before["cluster"][resource]["used"], before["cluster"][resource]["utilization"]) == (None, None)
    names = [site.name("n") for _ in range(3)]
    for name in names:
        await node(site.context.runtime, name, cpu=10, memory="64Gi", gpu=4)
    await pending(site, team, "a", gpu=2, cpu=3)
    await bind(site.context.runtime, team, "a", names[0])
    await site.patch(f"nodes/{names[1]}", {"spec": {"unschedulable": True}})
    used = {"status": {"used": {"cpu": "2500m", "memory": "8Gi", GPU: "1"}}}
    assert (await site.patch(f"nodes/{names[0]}/status", used)).status == 200
    down = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    assert (await site.patch(f"nodes/{names[2]}/status", down)).status == 200
    # A node that is not ready and cordoned counts once, as not ready.
    assert (await site.patch(f"nodes/{names[2]}", {"spec": {"unschedulable": True}})).status == 200
    waits = WaitStats()
    for _ in range(600):
        waits.bound("default", NOW - 1.5, NOW - 1)
    waits.preempted(NOW - 5)
    site.context.cluster._read_at = float("-inf")
    async with leading(site, cluster_of(), waits):
        body = (await site.get("metrics/cluster/utilization")).body
    cluster, was = body["cluster"], before["cluster"]
    grown = {state: cluster["nodes"][state] - was["nodes"][state] for state in cluster["nodes"]}
    assert grown == {"total": 3, "ready": 1, "notReady": 1, "cordoned": 1}
    nodes = cluster["nodes"]
    assert nodes["total"] == nodes["ready"] + nodes["notReady"] + nodes["cordoned"]
    assert cluster["gpu"]["capacity"] - was["gpu"]["capacity"] == 12
    assert cluster["gpu"]["requested"] - was["gpu"]["requested"] == 2
    assert (cluster["gpu"]["used"], cluster["cpu"]["used"], cluster["memory"]["used"]) == (1, "2500m", "8Gi")
    assert cluster["gpu"]["utilization"] == round(1 / cluster["gpu"]["allocatable"], 4)
    assert int(cluster["cpu"]["allocatable"][:-1]) - int(was["cpu"]["allocatable"][:-1]) == 30_000
    assert body["scheduling"] == {
        "pendingAllocations": 0, "schedulingRate": "10/sec", "avgSchedulingLatencyMs": 500,
        "p99SchedulingLatencyMs": 500, "preemptionsLast1h": 1,
    }  # fmt: skip


async def test_a_reservation_is_told_with_its_nodes(site: Site) -> None:
    team, cluster = await site.namespace(), cluster_of(4)
    await pending(site, team, "runs", gpu=2)
    await pending(site, team, "large")
    runs = await enter(site, cluster, team, "runs")
    cluster.place(runs, [Spot(0, ((0, (0, 1)),))], since=NOW - 60, ends_at=NOW + 600)
    await enter(site, cluster, team, "large")
    decide(cluster, SchedulingPolicy(preemption=False), NOW)
    async with leading(site, cluster):
        body = (await site.get(f"namespaces/{team}/allocations/large/explain")).body
    assert body["reservation"] == {"nodes": ["n0"], "fromTime": "2030-01-01T00:10:00Z"}
    assert body["estimatedStartTime"] == "2030-01-01T00:10:00Z"


async def test_a_job_without_pending_work_counts_its_allocations() -> None:
    assert _none_waits(1) == "its allocation is not pending"
    assert _none_waits(2) == "none of its 2 allocations is pending"
