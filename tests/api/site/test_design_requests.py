"""Every request that the API's design shows, body by body."""

import pytest

from support.api.site import STRATEGIC, Document, Site, allocation, made
from support.runtime.runtime import assert_counters_equal_charges, bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOWN_ALLOCATION: Document = {
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

SHOWN_QUOTA: Document = {
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

SHOWN_NODE: Document = {
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


# The requests of the API's design.


async def test_the_designs_allocation_is_accepted_as_shown_and_waits(site: Site) -> None:
    await site.namespace(name="ml-team")
    reply = await site.post("namespaces/ml-team/allocations", SHOWN_ALLOCATION)

    assert reply.status == 201
    metadata = reply.body["metadata"]
    assert metadata["name"] == "ml-training-job-42"
    assert metadata["namespace"] == "ml-team"
    assert metadata["uid"].startswith("alloc-")
    assert metadata["resourceVersion"].isdigit()
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["labels"] == SHOWN_ALLOCATION["metadata"]["labels"]
    assert metadata["annotations"] == SHOWN_ALLOCATION["metadata"]["annotations"]
    assert reply.body["spec"] == SHOWN_ALLOCATION["spec"], "a spec is echoed as it was given"
    assert reply.body["status"]["phase"] == "Pending"
    (condition,) = reply.body["status"]["conditions"]
    assert {name: condition[name] for name in ("type", "status", "reason", "message")} == {
        "type": "Scheduled",
        "status": "False",
        "reason": "Unscheduled",
        "message": "Waiting for scheduler",
    }
    assert reply.body["status"].pop("queuePosition") >= 1
    again = await site.get("namespaces/ml-team/allocations/ml-training-job-42")
    assert (again.status, again.body) == (200, reply.body)


async def test_the_designs_quota_comes_back_with_hard_and_used_and_can_be_raised(site: Site) -> None:
    team = await site.namespace()
    body = {**SHOWN_QUOTA, "metadata": {"name": "ml-team-quota", "namespace": team}}
    reply = await site.post(f"namespaces/{team}/resourcequotas", body)
    assert reply.status == 201
    assert reply.body["status"]["hard"] == SHOWN_QUOTA["spec"]["hard"]
    assert reply.body["status"]["used"]["nvidia.com/gpu"] == "0"
    assert reply.body["spec"]["scopes"] == ["NotTerminating"]

    # 72 of 100 GPUs and 6500 of 10000 CPUs, as in the design; work with a ttl or another class is outside the scopes.
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


async def test_a_refusal_in_the_designs_numbers_reads_as_the_design_writes_it(site: Site) -> None:
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
    reply = await site.post("nodes", SHOWN_NODE, token=bootstrap)
    assert reply.status == 201
    assert reply.body["metadata"]["uid"].startswith("node-")
    assert reply.body["spec"] == SHOWN_NODE["spec"]
    assert reply.body["status"]["phase"] == "Ready"
    assert reply.body["status"]["leaseId"].startswith("lease-")
    assert reply.body["status"]["allocatable"] == SHOWN_NODE["spec"]["allocatable"]
    own = reply.body["status"]["token"]
    assert "token" not in (await site.get("nodes/gpu-worker-043")).body["status"], "it is shown once"

    again = await site.post("nodes", SHOWN_NODE, token=bootstrap)
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
    assert status["capacity"] == SHOWN_NODE["spec"]["capacity"] | {"nvidia.com/gpu": "6"}
    assert status["allocatable"] == SHOWN_NODE["spec"]["allocatable"] | {"nvidia.com/gpu": "6"}
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
    await bind(site.context.runtime, team, "ml-training-job-42", worker)
    path = f"namespaces/{team}/allocations/ml-training-job-42"
    own = node.body["status"]["token"]

    running = await site.patch(f"{path}/status", {"status": {"phase": "Running"}}, token=own)
    assert running.status == 200, running
    status = running.body["status"]
    assert (status["phase"], status["nodeName"], status["nodeId"]) == ("Running", worker, node.body["metadata"]["uid"])
    assert status["allocatedResources"] == {"cpu": "8000m"}
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
    await assert_counters_equal_charges(site.context.runtime)


async def test_bulk_release_counts_what_matched_and_what_was_freed(site: Site) -> None:
    team, worker = await site.namespace(), site.name("big")
    capacity = {"cpu": "1000", "memory": "4Ti", "nvidia.com/gpu": "128"}
    await site.post("nodes", {"metadata": {"name": worker}, "spec": {"capacity": capacity}})
    batch = {"batch-id": "job-20240115"}
    for index in range(24):
        await made(site, team, f"member-{index}", labels=batch, cpu="8000m", memory="32Gi", gpu="4")
        if index < 20:
            await bind(site.context.runtime, team, f"member-{index}", worker)
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
        "totalResourcesFreed": {"cpu": "160000m", "memory": "640Gi", "nvidia.com/gpu": "80"},
    }
    left = await site.get(f"namespaces/{team}/allocations")
    phases = {one["metadata"]["name"]: one["status"]["phase"] for one in left.body["items"]}
    assert phases.pop("another") == "Pending"
    assert phases == {f"member-{index}": "Terminating" for index in range(20)}, "pending ones are gone at once"

    unsaid = await site.post(f"namespaces/{team}/allocations/bulk-release", {"gracePeriodSeconds": 1})
    assert unsaid.status == 400
    assert "labelSelector" in unsaid.message


async def test_the_filtered_list_of_the_design(site: Site) -> None:
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

    for nothing in ({}, {"request_id": "again"}):
        empty = await site.put(f"tenants/{name}", nothing)
        assert (empty.status, empty.message) == (400, "nothing to change: name at least one field")
        assert "max_<dimension> sets a limit" in empty.body["details"]["hint"]
        assert "gpu_hours_budget" in empty.body["details"]["hint"]

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
