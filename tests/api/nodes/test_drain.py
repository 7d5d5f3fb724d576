"""Draining nodes over the API: the whole way, by an administrator's word and by what Kubernetes clients send."""

from typing import Any

import pytest

from bursar.core.nodes.eviction import DO_NOT_EVICT
from bursar.core.objects.allocation import Phase
from bursar.loops.drain import continue_drains
from support.api.site import MERGE, STRATEGIC, Site, allocation, eventually
from support.runtime.runtime import assert_counters_equal_charges, bind, end, node

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def loaded(site: Site, count: int = 2, *, protected: int = 0) -> tuple[str, str]:
    """A namespace, and a node on which so many of its allocations are placed."""
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=16)
    for index in range(count):
        body = allocation(f"w{index}", gpu=1)
        if index < protected:
            body["metadata"]["annotations"] = {DO_NOT_EVICT: "true"}
        assert (await site.post(f"namespaces/{team}/allocations", body)).status == 201
        await bind(site.context.runtime, team, f"w{index}", where)
    return team, where


async def phase(site: Site, team: str, name: str) -> str:
    return str((await site.get(f"namespaces/{team}/allocations/{name}")).body["status"]["phase"])


async def test_a_drain_is_answered_as_it_stands_and_ends_when_the_node_is_empty(site: Site) -> None:
    team, where = await loaded(site, 3)
    body = {
        "gracePeriodSeconds": 300,
        "deleteEmptyDirData": True,
        "ignoreDaemonSets": True,
        "force": False,
        "reason": "Scheduled maintenance window",
    }
    begun = await site.post(f"nodes/{where}/drain", body)
    assert begun.status == 200, begun
    assert begun.body["status"] == "Draining"
    assert begun.body["allocationsToEvict"] == 3
    assert begun.body["progress"] == {"evicted": 0, "pending": 3, "failed": 0}
    shown = (await site.get(f"nodes/{where}")).body
    assert shown["spec"]["unschedulable"] is True
    assert shown["status"]["drain"]["reason"] == "Scheduled maintenance window"
    told = [(await site.get(f"namespaces/{team}/allocations/w{index}")).body["status"] for index in range(3)]
    last = max(shown["status"]["drain"]["deadline"], *(one["eviction"]["deadline"] for one in told))
    assert begun.body["estimatedCompletionTime"] == last
    assert (await site.get(f"nodes/{where}/drain")).body == begun.body
    assert (await site.post(f"nodes/{where}/drain", body)).body == begun.body, "repeating is harmless"
    for index in range(3):
        assert await phase(site, team, f"w{index}") == "Terminating"
        await end(site.context.runtime, team, f"w{index}", Phase.CANCELLED)
    await continue_drains(site.context.runtime)
    done = (await site.get(f"nodes/{where}/drain")).body
    assert (done["status"], done["progress"]) == ("Drained", {"evicted": 3, "pending": 0, "failed": 0})
    for index in range(3):
        assert await phase(site, team, f"w{index}") == "Pending"
    assert (await site.delete(f"nodes/{where}")).status == 200
    await assert_counters_equal_charges(site.context.runtime)


async def test_protected_work_is_named_and_goes_only_by_force(site: Site) -> None:
    team, where = await loaded(site, 2, protected=1)
    begun = (await site.post(f"nodes/{where}/drain", {})).body
    assert begun["progress"] == {"evicted": 0, "pending": 1, "failed": 1}
    assert begun["blockedBy"] == [f"{team}/w0"]
    forced = (await site.post(f"nodes/{where}/drain", {"force": True})).body
    assert forced["progress"] == {"evicted": 0, "pending": 2, "failed": 0}
    assert "blockedBy" not in forced


async def test_a_drain_without_a_body_and_one_tried_dry(site: Site) -> None:
    team, where = await loaded(site, 2)
    before = await site.state()
    tried = await site.post(f"nodes/{where}/drain", {}, dryRun="All")
    assert (tried.status, tried.body["progress"]) == (200, {"evicted": 0, "pending": 2, "failed": 0})
    assert await site.state() == before
    assert (await site.get(f"nodes/{where}/drain")).status == 404
    assert (await site.ask("POST", f"nodes/{where}/drain")).status == 200
    assert await phase(site, team, "w0") == "Terminating"


@pytest.mark.parametrize("media", [MERGE, STRATEGIC])
async def test_uncordoning_ends_the_drain(site: Site, media: str) -> None:
    _, where = await loaded(site, 1)
    await site.post(f"nodes/{where}/drain", {})
    await site.patch(f"nodes/{where}", {"spec": {"unschedulable": None}}, media)
    ended = (await site.get(f"nodes/{where}/drain")).body
    assert ended["status"] == "Cancelled"
    assert where not in await continue_drains(site.context.runtime)
    assert (await site.post(f"nodes/{where}/drain", {})).body["status"] == "Draining"


async def test_a_node_cannot_talk_itself_out_of_a_drain(site: Site) -> None:
    _, where = await loaded(site, 1)
    await site.post(f"nodes/{where}/drain", {})
    token = await site.token("node", node=where, single_use=False)
    for method in ("patch", "put"):
        body = {"metadata": {"name": where}, "status": {"phase": "Ready", "drain": {"state": "Cancelled"}}}
        reply = await site.ask(
            method.upper(), f"nodes/{where}/status", body, token=token, media=MERGE if method == "patch" else ""
        )
        assert reply.status == 200, reply
        assert (await site.get(f"nodes/{where}/drain")).body["status"] == "Draining"
    emptied = await site.put(f"nodes/{where}/status", {"metadata": {"name": where}, "status": {}}, token=token)
    assert emptied.status == 200, emptied
    assert (await site.get(f"nodes/{where}/drain")).body["status"] == "Draining"
    reply = await site.patch(f"nodes/{where}", {"status": {"drain": None}})
    assert (await site.get(f"nodes/{where}/drain")).body["status"] == "Draining"


async def test_bad_drains_are_refused_and_change_nothing(site: Site) -> None:
    team, where = await loaded(site, 1)
    before = await site.state()
    faulty: list[Any] = [
        {"gracePeriodSeconds": -1},
        {"gracePeriodSeconds": "5m"},
        {"colour": "red"},
        {"force": "yes"},
        [],
    ]
    for body in faulty:
        assert (await site.post(f"nodes/{where}/drain", body)).status == 400, body
    assert (await site.post("nodes/nowhere/drain", {})).status == 404
    assert (await site.get("nodes/nowhere/drain")).status == 404
    assert await site.state() == before
    for role, whose in (("tenant-admin", {"tenant": team}), ("node", {"node": where, "single_use": False})):
        token = await site.token(role, user="x", **whose)
        assert (await site.post(f"nodes/{where}/drain", {}, token=token)).status == 403
        assert (await site.get(f"nodes/{where}/drain", token=token)).status == 403


async def test_the_loop_finishes_what_an_api_process_began(site: Site) -> None:
    team, where = await loaded(site, 2)
    await site.post(f"nodes/{where}/drain", {})
    for index in range(2):
        await end(site.context.runtime, team, f"w{index}", Phase.FAILED)

    async def drained() -> bool:
        await continue_drains(site.context.runtime)
        return bool((await site.get(f"nodes/{where}/drain")).body["status"] == "Drained")

    await eventually(drained)


# As Kubernetes clients see it.


def eviction(team: str, name: str, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": team},
    }
    return {**body, "deleteOptions": options} if options else body


async def test_a_pod_is_evicted_and_another_stands_in_its_place(site: Site) -> None:
    team, where = await loaded(site, 1)
    path = f"namespaces/{team}/pods/w0"
    first = (await site.get(path)).body
    assert (first["kind"], first["spec"]["nodeName"]) == ("Pod", where)
    (owner,) = first["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["controller"]) == ("Allocation", True)
    made = await site.post(f"{path}/eviction", eviction(team, "w0", gracePeriodSeconds=7))
    assert (made.status, made.body["status"]) == (201, "Success")
    ending = (await site.get(path)).body
    assert ending["metadata"]["uid"] == first["metadata"]["uid"]
    assert ending["metadata"]["deletionGracePeriodSeconds"] == 7
    await end(site.context.runtime, team, "w0", Phase.CANCELLED)
    waiting = (await site.get(path)).body
    assert (waiting["status"]["phase"], "nodeName" in waiting["spec"]) == ("Pending", False)
    await bind(site.context.runtime, team, "w0", where)
    again = (await site.get(path)).body
    assert len({one["metadata"]["uid"] for one in (first, waiting, again)}) == 3


async def test_a_protected_pod_declares_no_controller(site: Site) -> None:
    team, _ = await loaded(site, 1, protected=1)
    assert "ownerReferences" not in (await site.get(f"namespaces/{team}/pods/w0")).body["metadata"]


async def test_evictions_that_cannot_be(site: Site) -> None:
    team, _ = await loaded(site, 2)
    path = f"namespaces/{team}/pods"
    assert (await site.get(f"{path}/nobody")).message == 'pods "nobody" not found'
    assert (await site.post(f"{path}/nobody/eviction", eviction(team, "nobody"))).status == 404
    assert (await site.post(f"{path}/w0/eviction", eviction(team, "w1"))).status == 400
    assert (await site.post(f"{path}/w0/eviction", eviction(team, "w0", gracePeriodSeconds=-1))).status == 400
    assert (await site.post(f"{path}/w0/eviction", eviction(team, "w0", preconditions={"uid": "x"}))).status == 409
    token = await site.token("user", tenant=team, user="u")
    assert (await site.post(f"{path}/w0/eviction", eviction(team, "w0"), token=token)).status == 403
    tried = await site.post(f"{path}/w0/eviction", eviction(team, "w0"), dryRun="All")
    assert tried.status == 201
    assert await phase(site, team, "w0") == "Scheduled"
    await end(site.context.runtime, team, "w0")
    assert (await site.post(f"{path}/w0/eviction", eviction(team, "w0"))).status == 404
    uid = (await site.get(f"{path}/w1")).body["metadata"]["uid"]
    assert (await site.post(f"{path}/w1/eviction", eviction(team, "w1", preconditions={"uid": uid}))).status == 201


async def test_clients_find_what_drain_needs(site: Site) -> None:
    resources = {one["name"]: one for one in (await site.get("/api/v1")).body["resources"]}
    part = resources["pods/eviction"]
    assert (part["kind"], part["group"], part["version"], part["verbs"]) == ("Eviction", "policy", "v1", ["create"])
    assert set(resources["pods"]["verbs"]) == {"list", "get"}
    groups = {one["name"] for one in (await site.get("/apis")).body["groups"]}
    assert "policy" in groups
    assert (await site.get("/apis/policy/v1")).body["resources"]
    assert (await site.get("/apis/policy/v1/poddisruptionbudgets")).body["items"] == []
