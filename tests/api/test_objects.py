"""Objects over HTTP: every verb of Kubernetes, and every request that the API's design shows, body by body."""

import asyncio
from typing import Any

import pytest

from houses import APPLY, JSON_PATCH, STRATEGIC, TABLE, Document, Site, allocation
from offices import assert_counters_equal_charges, bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED_ALLOCATION: Document = {
    "metadata": {
        "name": "ml-training-job-42",
        "namespace": "ml-team",
        "labels": {"app": "model-training", "team": "ml-platform", "cost-center": "CC-1234"},
        "annotations": {"scheduler.example.com/gang-size": "4", "scheduler.example.com/max-wait": "300s"},
    },
    "spec": {
        "resources": {
            "requests": {"cpu": "8000m", "memory": "32Gi", "nvidia.com/gpu": "4"},
            "limits": {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "4"},
        },
        "priority": 100,
        "priorityClass": "high-priority",
        "preemptionPolicy": "PreemptLowerPriority",
        "scheduling": {
            "nodeSelector": {"gpu-type": "nvidia-a100", "zone": "us-east-1a"},
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringScheduling": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "gpu-memory", "operator": "Gte", "values": ["80"]}]}
                        ]
                    },
                    "preferredDuringScheduling": [
                        {
                            "weight": 50,
                            "preference": {
                                "matchExpressions": [{"key": "network", "operator": "In", "values": ["rdma"]}]
                            },
                        }
                    ],
                },
                "podAntiAffinity": {
                    "requiredDuringScheduling": [
                        {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"app": "model-training"}},
                        }
                    ]
                },
            },
            "tolerations": [{"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
        },
        "ttl": "7200s",
        "gangScheduling": {"groupId": "training-gang-001", "minMembers": 4, "timeout": "300s"},
    },
}

SEED_QUOTA: Document = {
    "metadata": {"name": "ml-team-quota", "namespace": "ml-team"},
    "spec": {
        "hard": {
            "cpu": "10000",
            "memory": "40Ti",
            "nvidia.com/gpu": "100",
            "pods": "5000",
            "persistentvolumeclaims": "200",
            "services": "100",
        },
        "soft": {"cpu": "8000", "memory": "32Ti", "nvidia.com/gpu": "80"},
        "scopes": ["NotTerminating"],
        "scopeSelector": {
            "matchExpressions": [
                {"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority", "normal"]}
            ]
        },
    },
}

SEED_NODE: Document = {
    "metadata": {
        "name": "gpu-worker-043",
        "labels": {
            "zone": "us-east-1a",
            "rack": "rack-12",
            "gpu-type": "nvidia-a100",
            "instance-type": "p4d.24xlarge",
        },
    },
    "spec": {
        "capacity": {
            "cpu": "96000m",
            "memory": "1152Gi",
            "nvidia.com/gpu": "8",
            "ephemeral-storage": "3800Gi",
            "pods": "110",
        },
        "allocatable": {
            "cpu": "94000m",
            "memory": "1100Gi",
            "nvidia.com/gpu": "8",
            "ephemeral-storage": "3500Gi",
            "pods": "110",
        },
        "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
    },
}


async def made(site: Site, namespace: str, name: str, **options: Any) -> Document:
    reply = await site.post(f"namespaces/{namespace}/allocations", allocation(name, **options))
    assert reply.status == 201, reply
    body: Document = reply.body
    return body


# The requests of the API's design.


async def test_the_seeds_allocation_is_accepted_as_shown_and_waits(site: Site) -> None:
    await site.namespace(name="ml-team")
    reply = await site.post("namespaces/ml-team/allocations", SEED_ALLOCATION)

    assert reply.status == 201
    metadata = reply.body["metadata"]
    assert metadata["name"] == "ml-training-job-42"
    assert metadata["namespace"] == "ml-team"
    assert metadata["uid"].startswith("alloc-")
    assert metadata["resourceVersion"].isdigit()
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["labels"] == SEED_ALLOCATION["metadata"]["labels"]
    assert metadata["annotations"] == SEED_ALLOCATION["metadata"]["annotations"]
    assert reply.body["spec"] == SEED_ALLOCATION["spec"], "a spec is echoed as it was given"
    assert reply.body["status"]["phase"] == "Pending"
    (condition,) = reply.body["status"]["conditions"]
    assert {name: condition[name] for name in ("type", "status", "reason", "message")} == {
        "type": "Scheduled",
        "status": "False",
        "reason": "Unscheduled",
        "message": "Waiting for scheduler",
    }
    again = await site.get("namespaces/ml-team/allocations/ml-training-job-42")
    assert (again.status, again.body) == (200, reply.body)


async def test_the_seeds_quota_comes_back_with_hard_and_used_and_can_be_raised(site: Site) -> None:
    team = await site.namespace()
    body = {**SEED_QUOTA, "metadata": {"name": "ml-team-quota", "namespace": team}}
    reply = await site.post(f"namespaces/{team}/resourcequotas", body)
    assert reply.status == 201
    assert reply.body["status"]["hard"] == SEED_QUOTA["spec"]["hard"]
    assert reply.body["status"]["used"]["nvidia.com/gpu"] == "0"
    assert reply.body["spec"]["scopes"] == ["NotTerminating"]

    # 72 of 100 GPUs and 6500 of 10000 CPUs, as in the seed; work with a ttl or another class is outside the scopes.
    spec = {"priorityClass": "high-priority"}
    await made(site, team, "inside", spec=spec, cpu="6500", memory="26Ti", gpu="72")
    await made(site, team, "ends-by-itself", spec={**spec, "ttl": "60s"}, gpu="8")
    await made(site, team, "another-class", spec={"priorityClass": "low-priority"}, gpu="8")
    status = (await site.get(f"namespaces/{team}/resourcequotas/ml-team-quota/status")).body["status"]
    assert {name: status["used"][name] for name in ("cpu", "memory", "nvidia.com/gpu", "pods")} == {
        "cpu": "6500",
        "memory": "26Ti",
        "nvidia.com/gpu": "72",
        "pods": "1",
    }
    assert {name: status["utilization"][name] for name in ("cpu", "memory", "nvidia.com/gpu")} == {
        "cpu": "65%",
        "memory": "65%",
        "nvidia.com/gpu": "72%",
    }

    refused = await site.post(f"namespaces/{team}/allocations", allocation("too-much", spec=spec, gpu="40"))
    assert refused.status == 403
    assert refused.body["reason"] == "Forbidden"
    assert refused.message == "exceeded quota: nvidia.com/gpu limit 100, requested 40, used 72"
    assert refused.body["details"]["causes"][0]["limit"] == "100"

    patched = await site.patch(
        f"namespaces/{team}/resourcequotas/ml-team-quota", {"spec": {"hard": {"nvidia.com/gpu": "150"}}}
    )
    assert patched.status == 200
    assert patched.body["spec"]["hard"]["nvidia.com/gpu"] == "150"
    assert patched.body["spec"]["hard"]["memory"] == "40Ti", "a merge patch leaves the others alone"
    assert int(patched.version) > int(reply.version)
    await made(site, team, "fits-now", spec=spec, gpu="40")


async def test_a_refusal_in_the_seeds_numbers_reads_as_the_seed_writes_it(site: Site) -> None:
    team = await site.namespace()
    await site.post(
        f"namespaces/{team}/resourcequotas",
        {"metadata": {"name": "gpus"}, "spec": {"hard": {"nvidia.com/gpu": "100"}}},
    )
    await made(site, team, "first", gpu=98)
    reply = await site.post(f"namespaces/{team}/allocations", allocation("second", gpu=4))
    assert reply.body | {"details": None} == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "code": 403,
        "reason": "Forbidden",
        "message": "exceeded quota: nvidia.com/gpu limit 100, requested 4, used 98",
        "details": None,
    }
    assert reply.body["details"]["code"] == "quota_exceeded"


async def test_a_tenants_limit_is_refused_in_its_own_words(site: Site) -> None:
    team = await site.namespace()
    await site.put(f"tenants/{team}", {"max_nodes": 200})
    await made(site, team, "running", spec={"exclusive": True, "nodes": 195})
    body = allocation("ten-more", spec={"exclusive": True, "nodes": 10})
    reply = await site.post(f"namespaces/{team}/allocations", body)
    assert reply.status == 403
    assert reply.message == (
        f'allocation rejected: tenant "{team}" would exceed max_nodes quota (current: 195, requested: 10, limit: 200)'
    )
    await site.put(f"tenants/{team}", {"max_nodes": 150})
    lowered = await site.post(f"namespaces/{team}/allocations", body)
    assert lowered.message.splitlines() == [
        f'allocation rejected: tenant "{team}" exceeds max_nodes quota',
        "  Current usage: 195 nodes",
        "  New limit: 150 nodes",
        "  Hint: Wait for running allocations to complete, or contact your tenant admin.",
    ]


async def test_a_node_joins_with_a_bootstrap_token_once_and_then_speaks_for_itself(site: Site) -> None:
    bootstrap = await site.token("node", node="gpu-worker-043")
    reply = await site.post("nodes", SEED_NODE, token=bootstrap)
    assert reply.status == 201
    assert reply.body["metadata"]["uid"].startswith("node-")
    assert reply.body["spec"] == SEED_NODE["spec"]
    assert reply.body["status"]["phase"] == "Ready"
    assert reply.body["status"]["leaseId"].startswith("lease-")
    assert reply.body["status"]["allocatable"] == SEED_NODE["spec"]["allocatable"]
    own = reply.body["status"]["token"]
    assert "token" not in (await site.get("nodes/gpu-worker-043")).body["status"], "it is shown once"

    again = await site.post("nodes", SEED_NODE, token=bootstrap)
    assert again.status == 401

    report = {
        "status": {
            "capacity": {"nvidia.com/gpu": "6"},
            "allocatable": {"nvidia.com/gpu": "6"},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2024-01-15T10:35:00Z"}],
        }
    }
    patched = await site.patch("nodes/gpu-worker-043/status", report, STRATEGIC, token=own)
    assert patched.status == 200, patched
    status = patched.body["status"]
    assert status["capacity"] == SEED_NODE["spec"]["capacity"] | {"nvidia.com/gpu": "6"}
    assert status["allocatable"] == SEED_NODE["spec"]["allocatable"] | {"nvidia.com/gpu": "6"}
    (condition,) = status["conditions"]
    assert condition["lastHeartbeatTime"] == "2024-01-15T10:35:00Z"
    assert condition["reason"] == "Registered", "a condition is merged by its type"
    assert "lastHeartbeatTime" in (await site.get("nodes/gpu-worker-043")).body["status"]

    cordoned = await site.patch("nodes/gpu-worker-043", {"spec": {"unschedulable": True}})
    assert cordoned.status == 200
    assert cordoned.body["spec"]["unschedulable"] is True
    assert cordoned.body["status"]["capacity"]["nvidia.com/gpu"] == "6", "a change of the spec keeps the status"
    assert (await site.get("nodes", fieldSelector="spec.unschedulable=true")).names == ["gpu-worker-043"]


async def test_a_refused_registration_leaves_the_bootstrap_token_good(site: Site) -> None:
    name = site.name("node")
    bootstrap = await site.token("node", node=name)
    body: Document = {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "many"}}}
    assert (await site.post("nodes", body, token=bootstrap)).status == 400
    other = {"metadata": {"name": "another"}, "spec": {"capacity": {"cpu": "8"}}}
    assert (await site.post("nodes", other, token=bootstrap)).status == 403
    body["spec"] = {"capacity": {"cpu": "8"}}
    assert (await site.post("nodes", body, token=bootstrap)).status == 201


async def test_what_runs_is_released_gracefully_and_gone_when_its_node_says_so(site: Site) -> None:
    team, worker = await site.namespace(), site.name("worker")
    node = await site.post("nodes", {"metadata": {"name": worker}, "spec": {"capacity": {"cpu": "8"}}})
    await made(site, team, "ml-training-job-42", cpu="8")
    await bind(site.house.office, team, "ml-training-job-42", worker)
    path = f"namespaces/{team}/allocations/ml-training-job-42"
    own = node.body["status"]["token"]

    running = await site.patch(f"{path}/status", {"status": {"phase": "Running"}}, token=own)
    assert running.status == 200, running
    status = running.body["status"]
    assert (status["phase"], status["nodeName"], status["nodeId"]) == ("Running", worker, node.body["metadata"]["uid"])
    assert status["allocatedResources"] == {"cpu": "8"}
    assert status["startTime"].endswith("Z")
    assert {one["type"]: one["status"] for one in status["conditions"]} == {"Scheduled": "True", "Ready": "True"}
    assert all("lastTransitionTime" in one for one in status["conditions"])

    released = await site.delete(path, {"gracePeriodSeconds": 30, "propagationPolicy": "Foreground"})
    assert released.status == 200
    assert released.body["metadata"]["deletionGracePeriodSeconds"] == 30
    assert released.body["metadata"]["deletionTimestamp"].endswith("Z")
    assert released.body["status"]["phase"] == "Terminating"
    terminating = released.body["status"]["conditions"][-1]
    assert {name: terminating[name] for name in ("type", "status", "reason", "message")} == {
        "type": "Terminating",
        "status": "True",
        "reason": "UserRequested",
        "message": "Graceful termination in progress",
    }
    assert (await site.get(path)).status == 200, "it is there until its node says that it is gone"

    ended = await site.patch(f"{path}/status", {"status": {"phase": "Cancelled", "exitCode": 143}}, token=own)
    assert ended.status == 200
    assert (await site.get(path)).status == 404
    assert (await site.get(f"tenants/{team}/quotas")).body["quotas"].get("cpu", {"bound": "0"})["bound"] == "0"
    await assert_counters_equal_charges(site.house.office)


async def test_bulk_release_counts_what_matched_and_what_was_freed(site: Site) -> None:
    team, worker = await site.namespace(), site.name("big")
    capacity = {"cpu": "1000", "memory": "4Ti", "nvidia.com/gpu": "128"}
    await site.post("nodes", {"metadata": {"name": worker}, "spec": {"capacity": capacity}})
    batch = {"batch-id": "job-20240115"}
    for index in range(24):
        await made(site, team, f"member-{index}", labels=batch, cpu="8000m", memory="32Gi", gpu="4")
        if index < 20:
            await bind(site.house.office, team, f"member-{index}", worker)
    await made(site, team, "another", labels={"batch-id": "other"}, cpu="1")
    request = {"labelSelector": "batch-id=job-20240115", "gracePeriodSeconds": 60, "dryRun": False}

    before = await site.state()
    tried = await site.post(f"namespaces/{team}/allocations/bulk-release", {**request, "dryRun": True})
    assert (tried.status, tried.body["released"]) == (200, 24)
    assert await site.state() == before

    reply = await site.post(f"namespaces/{team}/allocations/bulk-release", request)
    assert reply.status == 200
    assert reply.body == {
        "released": 24,
        "failed": 0,
        "totalResourcesFreed": {"cpu": "160", "memory": "640Gi", "nvidia.com/gpu": "80"},
    }
    left = await site.get(f"namespaces/{team}/allocations")
    phases = {one["metadata"]["name"]: one["status"]["phase"] for one in left.body["items"]}
    assert phases.pop("another") == "Pending"
    assert phases == {f"member-{index}": "Terminating" for index in range(20)}, "pending ones are gone at once"

    unsaid = await site.post(f"namespaces/{team}/allocations/bulk-release", {"gracePeriodSeconds": 1})
    assert unsaid.status == 400
    assert "labelSelector" in unsaid.message


async def test_the_filtered_list_of_the_seed(site: Site) -> None:
    team = await site.namespace()
    for index in range(3):
        await made(site, team, f"job-{index}", labels={"app": "model-training"}, cpu=1)
    await made(site, team, "other", labels={"app": "web"}, cpu=1)
    reply = await site.get(
        f"namespaces/{team}/allocations",
        labelSelector="app=model-training",
        fieldSelector="status.phase=Pending",
        limit=100,
    )
    assert reply.body["kind"] == "AllocationList"
    assert reply.body["metadata"]["resourceVersion"].isdigit()
    assert "continue" not in reply.body["metadata"]
    assert reply.names == ["job-0", "job-1", "job-2"]
    running = await site.get(f"namespaces/{team}/allocations", fieldSelector="status.phase=Running")
    assert running.names == []


async def test_the_short_forms_of_the_sdk_are_accepted_and_contradictions_are_not(site: Site) -> None:
    team = await site.namespace()
    spec = {"nodeSelector": {"gpu-type": "nvidia-a100"}}
    assert (await made(site, team, "short", spec=spec, cpu=1))["spec"]["nodeSelector"] == spec["nodeSelector"]
    both = {**spec, "scheduling": {"nodeSelector": {"gpu-type": "nvidia-h100"}}}
    refused = await site.post(f"namespaces/{team}/allocations", allocation("both", spec=both, cpu=1))
    assert refused.status == 400
    assert "spec.nodeSelector: differs from spec.scheduling.nodeSelector" in refused.message


# Tenants.


async def test_the_flat_put_changes_the_named_fields_of_a_tenant_only(site: Site) -> None:
    name = site.name("physics")
    spec = {"limits": {"nodes": "200", "volumes": "7"}, "displayName": "Physics"}
    await site.post("tenants", {"metadata": {"name": name, "labels": {"site": "a"}}, "spec": spec})
    body = {
        "max_nodes": 250,
        "max_concurrent_allocations": 50,
        "gpu_hours_budget": 150000,
        "node_hours_budget": 500000,
    }
    reply = await site.put(f"tenants/{name}", body)
    assert reply.status == 200, reply
    changed = reply.body["spec"]
    assert {dimension: str(value) for dimension, value in changed["limits"].items()} == {
        "nodes": "250",
        "allocations": "50",
        "volumes": "7",
    }
    assert (changed["gpuHoursBudget"], changed["nodeHoursBudget"]) == (150000, 500000)
    assert changed["displayName"] == "Physics"
    assert reply.body["metadata"]["labels"] == {"site": "a"}

    unknown = await site.put(f"tenants/{name}", {"max_nodes": 1, "colour": "red", "shape": "round"})
    assert unknown.status == 400
    assert "colour" in unknown.message
    assert "shape" in unknown.message
    assert "gpu_hours_budget" in unknown.body["details"]["hint"]
    assert (await site.put("tenants/nobody", {"max_nodes": 1})).status == 404

    replaced = await site.put(f"tenants/{name}", {"metadata": {"name": name}, "spec": {"limits": {"nodes": "1"}}})
    assert replaced.body["spec"] == {"limits": {"nodes": "1"}}, "a body with metadata replaces the whole"


async def test_a_tenants_quotas_show_limit_source_and_usage(site: Site) -> None:
    tier, parent, name = site.name("tier"), site.name("parent"), site.name("child")
    await site.post("tiers", {"metadata": {"name": tier}, "spec": {"limits": {"cpu": "100", "nvidia.com/gpu": "8"}}})
    await site.post("tenants", {"metadata": {"name": parent}, "spec": {"limits": {"cpu": "100"}}})
    spec = {"tier": tier, "parent": parent, "limits": {"cpu": "10"}}
    await site.post("tenants", {"metadata": {"name": name}, "spec": spec})
    team = await site.namespace(tenant=name)
    await made(site, team, "one", cpu="5", memory="1Gi")
    reply = await site.get(f"tenants/{name}/quotas")
    assert (reply.body["tenant"], reply.body["ancestors"]) == (name, [parent])
    quotas = reply.body["quotas"]
    assert quotas["cpu"] == {"limit": "10", "source": "override", "accepted": "5", "bound": "0", "utilization": 0.5}
    assert (quotas["nvidia.com/gpu"]["limit"], quotas["nvidia.com/gpu"]["source"]) == ("8", f"tier:{tier}")
    assert (quotas["memory"]["limit"], quotas["memory"]["source"]) == (None, "unlimited")
    above = (await site.get(f"tenants/{parent}/quotas")).body["quotas"]
    assert above["cpu"]["accepted"] == "5", "what a child uses is charged to its ancestors"


# The verbs of Kubernetes.


async def test_generate_name_makes_names_that_differ(site: Site) -> None:
    team = await site.namespace()
    body = {"metadata": {"generateName": "job-"}, "spec": {"resources": {"requests": {"cpu": "1"}}}}
    replies = [await site.post(f"namespaces/{team}/allocations", body) for _ in range(5)]
    names = {one.body["metadata"]["name"] for one in replies}
    assert len(names) == 5
    assert all(name.startswith("job-") and len(name) == 9 for name in names)


async def test_a_name_that_is_taken_is_a_conflict(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", cpu=1)
    reply = await site.post(f"namespaces/{team}/allocations", allocation("one", cpu=1))
    assert (reply.status, reply.body["reason"]) == (409, "AlreadyExists")
    assert reply.message == 'allocations "one" already exists'


async def test_what_is_absent_is_not_found_with_details(site: Site) -> None:
    team = await site.namespace()
    reply = await site.get(f"namespaces/{team}/allocations/nothing")
    assert (reply.status, reply.body["reason"]) == (404, "NotFound")
    assert reply.message == 'allocations "nothing" not found'
    assert (reply.body["details"]["name"], reply.body["details"]["kind"]) == ("nothing", "allocations")
    nowhere = await site.post("namespaces/nowhere-at-all/allocations", allocation("one", cpu=1))
    assert nowhere.status == 404
    assert nowhere.message == 'namespaces "nowhere-at-all" not found'


async def test_put_replaces_the_whole_object_and_keeps_its_identity(site: Site) -> None:
    name = site.name("tenant")
    first = await site.post(
        "tenants", {"metadata": {"name": name, "labels": {"a": "1"}}, "spec": {"limits": {"cpu": "5"}, "weight": 2}}
    )
    body = {"metadata": {"name": name, "resourceVersion": first.version}, "spec": {"weight": 3}}
    second = await site.put(f"tenants/{name}", body)
    assert second.status == 200
    assert second.body["spec"] == {"weight": 3}
    assert "labels" not in second.body["metadata"]
    for field in ("uid", "creationTimestamp"):
        assert second.body["metadata"][field] == first.body["metadata"][field]
    assert second.body["metadata"]["generation"] == 2

    stale = await site.put(f"tenants/{name}", body)
    assert (stale.status, stale.body["reason"]) == (409, "Conflict")
    same = await site.put(f"tenants/{name}", {"metadata": {"name": name}, "spec": {"weight": 3}})
    assert same.version == second.version, "what changes nothing takes no revision"


@pytest.mark.parametrize("media", ["application/merge-patch+json", STRATEGIC])
async def test_a_patch_that_names_a_stale_version_is_refused_and_one_that_names_none_is_not(
    site: Site, media: str
) -> None:
    name = site.name("tenant")
    first = await site.post("tenants", {"metadata": {"name": name}, "spec": {}})
    await site.patch(f"tenants/{name}", {"spec": {"weight": 2}}, media)
    stale = {"metadata": {"resourceVersion": first.version}, "spec": {"weight": 3}}
    assert (await site.patch(f"tenants/{name}", stale, media)).status == 409
    assert (await site.patch(f"tenants/{name}", {"spec": {"weight": 4}}, media)).body["spec"]["weight"] == 4


async def test_a_merge_patch_removes_by_null(site: Site) -> None:
    name = site.name("tenant")
    await site.post("tenants", {"metadata": {"name": name, "labels": {"a": "1", "b": "2"}}, "spec": {"weight": 2}})
    body = {"metadata": {"labels": {"a": None}}, "spec": {"weight": None, "limits": {"cpu": "5"}}}
    reply = await site.patch(f"tenants/{name}", body)
    assert reply.body["metadata"]["labels"] == {"b": "2"}
    assert reply.body["spec"] == {"limits": {"cpu": "5"}}


async def test_a_strategic_patch_merges_lists_by_their_key(site: Site) -> None:
    name = site.name("node")
    taints = [{"key": "a", "effect": "NoSchedule"}, {"key": "b", "effect": "NoSchedule"}]
    await site.post("nodes", {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "1"}, "taints": taints}})
    pressure = {"type": "DiskPressure", "status": "False"}
    added = await site.patch(f"nodes/{name}/status", {"status": {"conditions": [pressure]}}, STRATEGIC)
    assert {one["type"] for one in added.body["status"]["conditions"]} == {"Ready", "DiskPressure"}
    change = {"conditions": [{**pressure, "status": "True"}, {"$patch": "delete", "type": "Ready"}]}
    reply = await site.patch(f"nodes/{name}/status", {"status": change}, STRATEGIC)
    assert reply.status == 200, reply
    assert reply.body["status"]["conditions"] == [{**pressure, "status": "True"}]
    replaced = await site.patch(f"nodes/{name}", {"spec": {"taints": taints[1:]}}, STRATEGIC)
    assert replaced.body["spec"]["taints"] == taints[1:], "taints have no key in Kubernetes: the list is replaced whole"


async def test_a_json_patch_is_applied_in_order_and_a_failed_test_changes_nothing(site: Site) -> None:
    name = site.name("tenant")
    first = await site.post("tenants", {"metadata": {"name": name, "labels": {"a": "1"}}, "spec": {"weight": 2}})
    good = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": first.version},
        {"op": "replace", "path": "/spec/weight", "value": 5},
        {"op": "add", "path": "/metadata/labels/team~1x", "value": "y"},
        {"op": "move", "from": "/metadata/labels/a", "path": "/metadata/labels/b"},
    ]
    reply = await site.patch(f"tenants/{name}", good, JSON_PATCH)
    assert reply.status == 200, reply
    assert reply.body["spec"]["weight"] == 5
    assert reply.body["metadata"]["labels"] == {"team/x": "y", "b": "1"}
    late = await site.patch(f"tenants/{name}", good, JSON_PATCH)
    assert late.status == 422, "kopf relies on it"
    assert (await site.get(f"tenants/{name}")).version == reply.version
    nowhere = [{"op": "remove", "path": "/spec/nothing"}]
    assert (await site.patch(f"tenants/{name}", nowhere, JSON_PATCH)).status in (400, 422)


async def test_server_side_apply_creates_and_then_changes(site: Site) -> None:
    name = site.name("tenant")
    text = f"apiVersion: v1\nkind: Tenant\nmetadata:\n  name: {name}\nspec:\n  weight: 2\n".encode()
    created = await site.patch(f"tenants/{name}", text, APPLY, fieldManager="me", force="true")
    assert (created.status, created.body["spec"]["weight"]) == (201, 2)
    changed = await site.patch(f"tenants/{name}", text.replace(b"weight: 2", b"weight: 3"), APPLY, fieldManager="me")
    assert (changed.status, changed.body["spec"]["weight"]) == (200, 3)
    again = {"apiVersion": "v1", "kind": "Tenant", "metadata": {"name": name}, "spec": {"weight": 4}}
    third = await site.patch(f"tenants/{name}", again, APPLY, fieldManager="me")
    assert (third.status, third.body["spec"]["weight"]) == (200, 4)


async def test_deleting_answers_with_the_object_and_honours_preconditions(site: Site) -> None:
    team = await site.namespace()
    one = await made(site, team, "one", cpu=1)
    path = f"namespaces/{team}/allocations/one"
    for wrong in ({"uid": "alloc-of-another"}, {"resourceVersion": "1"}):
        refused = await site.delete(path, {"preconditions": wrong})
        assert (refused.status, refused.body["reason"]) == (409, "Conflict")
    right = {"uid": one["metadata"]["uid"], "resourceVersion": one["metadata"]["resourceVersion"]}
    gone = await site.delete(path, {"preconditions": right})
    assert gone.status == 200
    assert gone.body["metadata"]["name"] == "one"
    assert (await site.get(path)).status == 404
    assert (await site.delete(path)).status == 404


async def test_delete_collection_takes_what_the_selectors_match(site: Site) -> None:
    team = await site.namespace()
    for index in range(6):
        await made(site, team, f"job-{index}", labels={"odd": str(index % 2)}, cpu=1)
    tried = await site.delete(f"namespaces/{team}/allocations", labelSelector="odd=1", dryRun="All")
    assert len(tried.body["items"]) == 3
    assert len((await site.get(f"namespaces/{team}/allocations")).names) == 6
    reply = await site.delete(f"namespaces/{team}/allocations", labelSelector="odd=1")
    assert sorted(reply.names) == ["job-1", "job-3", "job-5"]
    assert (await site.get(f"namespaces/{team}/allocations")).names == ["job-0", "job-2", "job-4"]
    await assert_counters_equal_charges(site.house.office)


async def test_a_dry_run_answers_as_if_and_stores_nothing(site: Site) -> None:
    team = await site.namespace()
    await site.put(f"tenants/{team}", {"max_volumes": 1})
    await made(site, team, "one", cpu=1)
    path = f"namespaces/{team}/allocations"
    before = await site.state()
    created = await site.post(path, allocation("two", cpu=1), dryRun="All")
    assert (created.status, created.body["metadata"]["name"]) == (201, "two")
    taken = await site.post(path, allocation("one", cpu=1), dryRun="All")
    assert taken.status == 409
    labelled = await site.patch(f"{path}/one", {"metadata": {"labels": {"a": "b"}}}, dryRun="All")
    assert labelled.body["metadata"]["labels"] == {"a": "b"}
    assert (await site.put(f"tenants/{team}", {"max_nodes": 5}, dryRun="All")).body["spec"]["limits"]["nodes"] == 5
    assert (await site.delete(f"{path}/one", dryRun="All")).status == 200
    assert (await site.delete(f"{path}/one", {"dryRun": ["All"]})).status == 200
    assert (await site.delete(path, dryRun="All")).status == 200
    node = {"metadata": {"name": site.name("dry")}, "spec": {"capacity": {"cpu": "1"}}}
    registered = await site.post("nodes", node, dryRun="All")
    assert registered.status == 201
    assert "token" not in registered.body["status"]
    assert (await site.post(path, allocation("two", cpu=1), dryRun="Some")).status == 400
    assert await site.state() == before


async def test_writes_of_the_status_and_of_the_object_do_not_touch_each_other(site: Site) -> None:
    name = site.name("node")
    await site.post("nodes", {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "4"}}})
    body = {"spec": {"capacity": {"cpu": "400"}}, "status": {"phase": "NotReady"}, "metadata": {"labels": {"x": "y"}}}
    reply = await site.patch(f"nodes/{name}/status", body)
    assert reply.body["status"]["phase"] == "NotReady"
    assert reply.body["spec"]["capacity"] == {"cpu": "4"}
    assert "x" not in reply.body["metadata"]["labels"]
    assert reply.body["metadata"]["generation"] == 1
    other = await site.patch(f"nodes/{name}", {"status": {"phase": "Ready"}, "spec": {"unschedulable": True}})
    assert other.body["status"]["phase"] == "NotReady"
    assert other.body["metadata"]["generation"] == 2
    whole = (await site.get(f"nodes/{name}")).body
    whole["status"]["phase"] = "Ready"
    whole["spec"] = {}
    put = await site.put(f"nodes/{name}/status", whole)
    assert put.status == 200, put
    assert put.body["status"]["phase"] == "Ready"
    assert put.body["spec"]["capacity"] == {"cpu": "4"}


async def test_an_allocations_spec_cannot_be_changed_but_its_labels_can(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", cpu=1)
    path = f"namespaces/{team}/allocations/one"
    refused = await site.patch(path, {"spec": {"resources": {"requests": {"cpu": "2"}}}})
    assert (refused.status, refused.body["reason"]) == (422, "Invalid")
    labelled = await site.patch(path, {"metadata": {"labels": {"a": "b"}, "annotations": {"note": "ü\n"}}})
    assert labelled.body["metadata"]["annotations"] == {"note": "ü\n"}
    assert (await site.get(f"namespaces/{team}/allocations", labelSelector="a=b")).names == ["one"]


async def test_pages_keep_the_first_pages_revision(site: Site) -> None:
    team = await site.namespace()
    for index in range(7):
        await made(site, team, f"job-{index}", cpu=1)
    path = f"namespaces/{team}/allocations"
    first = await site.get(path, limit=3)
    assert first.names == ["job-0", "job-1", "job-2"]
    await made(site, team, "job-1-between", cpu=1)
    await made(site, team, "job-9-behind", cpu=1)
    second = await site.get(path, limit=3, **{"continue": first.body["metadata"]["continue"]})
    assert second.names == ["job-3", "job-4", "job-5"]
    assert second.version == first.version
    third = await site.get(path, limit=3, **{"continue": second.body["metadata"]["continue"]})
    assert third.names == ["job-6", "job-9-behind"]
    assert third.version == first.version
    assert "continue" not in third.body["metadata"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("tier=gold", ["a"]),
        ("tier==gold,zone=x", ["a"]),
        ("tier!=gold", ["b", "c"]),
        ("tier in (gold, silver)", ["a", "b"]),
        ("tier notin (gold)", ["b", "c"]),
        ("tier", ["a", "b"]),
        ("!tier", ["c"]),
        ("tier in (gold,silver),zone notin (x)", ["b"]),
        ("", ["a", "b", "c"]),
    ],
)
async def test_label_selectors_choose(site: Site, selector: str, expected: list[str]) -> None:
    reply = await site.get("namespaces/selectors/allocations", labelSelector=selector)
    if not reply.names:
        await site.namespace(name="selectors")
        await made(site, "selectors", "a", labels={"tier": "gold", "zone": "x"}, cpu=1)
        await made(site, "selectors", "b", labels={"tier": "silver", "zone": "y"}, cpu=1)
        await made(site, "selectors", "c", labels={"zone": "x"}, cpu=1)
        reply = await site.get("namespaces/selectors/allocations", labelSelector=selector)
    assert reply.names == expected


async def test_field_selectors_choose_by_name_and_by_the_fields_of_the_kind(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", spec={"queue": "hpc"}, cpu=1)
    await made(site, team, "two", spec={"priorityClass": "normal"}, cpu=1)
    path = f"namespaces/{team}/allocations"
    for selector, expected in (
        ("metadata.name=one", ["one"]),
        ("metadata.name!=one", ["two"]),
        ("spec.queue=hpc", ["one"]),
        ("spec.priorityClass=normal,status.phase=Pending", ["two"]),
        ("status.phase!=Pending", []),
        ("status.nodeName=", ["one", "two"]),
    ):
        assert (await site.get(path, fieldSelector=selector)).names == expected, selector


async def test_a_list_across_namespaces_is_ordered_and_complete(site: Site) -> None:
    first, second = await site.namespace(), await site.namespace()
    await made(site, second, "b", labels={"wide": "yes"}, cpu=1)
    await made(site, first, "c", labels={"wide": "yes"}, cpu=1)
    await made(site, first, "a", labels={"wide": "yes"}, cpu=1)
    reply = await site.get("allocations", labelSelector="wide=yes")
    found = [(one["metadata"]["namespace"], one["metadata"]["name"]) for one in reply.body["items"]]
    assert found == sorted([(first, "a"), (first, "c"), (second, "b")])


async def test_a_table_has_one_row_for_each_object_with_cells_as_text(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", gpu=2, cpu="500m")
    reply = await site.get(f"namespaces/{team}/allocations", headers={"accept": TABLE})
    assert (reply.body["kind"], reply.body["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    columns = [one["name"] for one in reply.body["columnDefinitions"]]
    cells = dict(zip(columns, reply.body["rows"][0]["cells"], strict=True))
    assert (cells["Name"], cells["Status"], cells["GPU"], cells["CPU"]) == ("one", "Pending", "2", "500m")
    assert cells["Age"].endswith("s")
    assert reply.body["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    single = await site.get(f"namespaces/{team}/allocations/one", headers={"accept": TABLE})
    assert single.body["rows"][0]["cells"][0] == "one"
    whole = await site.get(f"namespaces/{team}/allocations", headers={"accept": TABLE}, includeObject="Object")
    assert whole.body["rows"][0]["object"]["kind"] == "Allocation"


@pytest.mark.parametrize("strictness", ["Strict", "Warn", "Ignore", ""])
async def test_unknown_fields_are_refused_told_or_ignored(site: Site, strictness: str) -> None:
    team = await site.namespace()
    body = allocation("one", spec={"colour": "red", "scheduling": {"mood": "good"}}, cpu=1)
    query = {"fieldValidation": strictness} if strictness else {}
    reply = await site.post(f"namespaces/{team}/allocations", body, **query)
    if strictness in ("Strict", ""):
        assert reply.status == 400
        assert "spec.colour" in reply.message
        assert "spec.scheduling.mood" in reply.message
        return
    assert reply.status == 201
    assert "colour" not in reply.body["spec"]
    if strictness == "Ignore":
        assert "warning" not in reply.headers
        return
    assert reply.headers["warning"] == (
        r'299 - "unknown field \"spec.colour\"", 299 - "unknown field \"spec.scheduling.mood\""'
    )


async def test_a_warning_cannot_smuggle_a_header(site: Site) -> None:
    team = await site.namespace()
    body = allocation("one", spec={'x"\r\nX-Evil: 1\r\n\r\n': 1, "ü" * 5000: 2}, cpu=1)
    reply = await site.post(f"namespaces/{team}/allocations", body, fieldValidation="Warn")
    assert reply.status == 201
    assert "x-evil" not in reply.headers
    assert reply.headers["warning"].isascii()
    assert len(reply.headers["warning"]) < 4000


async def test_nulls_mean_not_given(site: Site) -> None:
    team = await site.namespace()
    body = allocation("one", spec={"queue": None, "ttl": None, "scheduling": {"tolerations": None}}, cpu=1)
    body["metadata"] |= {"labels": None, "creationTimestamp": None}
    body["status"] = None
    reply = await site.post(f"namespaces/{team}/allocations", body)
    assert reply.status == 201, reply
    assert set(reply.body["spec"]) <= {"resources", "scheduling"}
    assert "labels" not in reply.body["metadata"]


async def test_bodies_may_be_yaml(site: Site) -> None:
    team = await site.namespace()
    text = b"metadata:\n  name: one\nspec:\n  resources:\n    requests: {cpu: 2, memory: 1Gi}\n  ttl: 2h\n"
    reply = await site.post(f"namespaces/{team}/allocations", text, media="application/yaml")
    assert (reply.status, reply.body["spec"]["ttl"]) == (201, "2h")
    bomb = b"a: &a [x, x]\nb: &b [*a, *a]\nmetadata: {name: two}\n"
    assert (await site.post(f"namespaces/{team}/allocations", bomb, media="application/yaml")).status == 400


async def test_head_answers_without_a_body_and_an_unoffered_method_says_what_is(site: Site) -> None:
    head = await site.ask("HEAD", "nodes")
    assert (head.status, head.body) == (200, "")
    assert int(head.headers["content-length"]) > 0
    put = await site.put("nodes", {})
    assert put.status == 405
    assert "GET" in put.body["details"]["hint"]


# Repeating a request.


@pytest.mark.parametrize("where", ["header", "body"])
async def test_a_repeated_request_has_one_effect_and_one_answer(site: Site, where: str) -> None:
    team = await site.namespace()
    key = f"{team}-{where}"
    body = {"metadata": {"generateName": "job-"}, "spec": {"resources": {"requests": {"cpu": "1"}}}}
    headers = {"idempotency-key": key} if where == "header" else {}
    sent = body if where == "header" else {**body, "request_id": key}
    path = f"namespaces/{team}/allocations"
    replies = await asyncio.gather(*(site.post(path, sent, headers=headers) for _ in range(8)))
    assert {one.status for one in replies} == {201}
    assert len({one.body["metadata"]["uid"] for one in replies}) == 1
    assert len((await site.get(path)).names) == 1

    other = {**sent, "metadata": {"generateName": "other-"}}
    reused = await site.post(path, other, headers=headers)
    assert (reused.status, reused.body["details"]["code"]) == (422, "request_id_reused")
    assert len((await site.get(path)).names) == 1


async def test_a_refusal_is_remembered_too_and_a_mistake_is_not(site: Site) -> None:
    team = await site.namespace()
    await site.put(f"tenants/{team}", {"max_concurrent_allocations": 0})
    path, headers = f"namespaces/{team}/allocations", {"idempotency-key": f"{team}-refused"}
    first = await site.post(path, allocation("one", cpu=1), headers=headers)
    assert first.status == 403
    await site.put(f"tenants/{team}", {"max_concurrent_allocations": 5})
    assert (await site.post(path, allocation("one", cpu=1), headers=headers)).message == first.message
    mistaken = {"idempotency-key": f"{team}-mistaken"}
    assert (await site.post(path, allocation("UPPER", cpu=1), headers=mistaken)).status == 400
    assert (await site.post(path, allocation("lower", cpu=1), headers=mistaken)).status == 201


async def test_a_repeated_patch_and_a_repeated_delete_answer_as_the_first_time(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", cpu=1)
    path, headers = f"namespaces/{team}/allocations/one", {"idempotency-key": f"{team}-patch"}
    first = await site.patch(path, {"metadata": {"labels": {"a": "1"}}}, headers=headers)
    await site.patch(path, {"metadata": {"labels": {"a": "2"}}})
    again = await site.patch(path, {"metadata": {"labels": {"a": "1"}}}, headers=headers)
    assert (again.status, again.body) == (first.status, first.body)
    assert (await site.get(path)).body["metadata"]["labels"] == {"a": "2"}
    gone = {"idempotency-key": f"{team}-delete"}
    assert (await site.delete(path, headers=gone)).status == 200
    assert (await site.delete(path, headers=gone)).status == 200, "a repeated delete is answered like the first"


async def test_a_caller_finds_its_own_request_id_in_the_answer_and_in_errors(site: Site) -> None:
    reply = await site.get("nodes/none", headers={"x-request-id": "my-own-id"})
    assert reply.headers["x-request-id"] == "my-own-id"
    assert reply.body["details"]["requestId"] == "my-own-id"


# Races.


async def test_concurrent_patches_without_a_version_all_take_effect(site: Site) -> None:
    name = site.name("tenant")
    await site.post("tenants", {"metadata": {"name": name}, "spec": {}})
    labels = {f"label-{index}": "x" for index in range(12)}
    replies = await asyncio.gather(
        *(site.patch(f"tenants/{name}", {"metadata": {"labels": {one: "x"}}}) for one in labels)
    )
    assert {one.status for one in replies} == {200}
    assert (await site.get(f"tenants/{name}")).body["metadata"]["labels"] == labels


async def test_racing_creations_never_pass_the_limit(site: Site) -> None:
    team = await site.namespace()
    await site.put(f"tenants/{team}", {"max_concurrent_allocations": 10})
    bodies = [allocation(f"job-{index}", cpu=1) for index in range(40)]
    replies = await asyncio.gather(*(site.post(f"namespaces/{team}/allocations", body) for body in bodies))
    assert sorted(one.status for one in replies) == [201] * 10 + [403] * 30
    assert len((await site.get(f"namespaces/{team}/allocations")).names) == 10
    await assert_counters_equal_charges(site.house.office)


async def test_a_namespace_that_ends_takes_no_new_content(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", cpu=1)
    ending = await site.delete(f"namespaces/{team}")
    assert ending.status == 200
    assert ending.body["status"]["phase"] == "Terminating"
    reply = await site.post(f"namespaces/{team}/allocations", allocation("two", cpu=1))
    assert reply.status == 403
    assert "being terminated" in reply.message
