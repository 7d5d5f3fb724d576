"""Deleted objects of every kind stay, marked, until their finalizers are gone."""

from datetime import timedelta
from typing import Any

import pytest

from bursar.core.objects.object import Key
from bursar.loops.housekeeping import finish_namespaces
from bursar.ops.workloads.job_controller import step
from bursar.wire.kinds.registry import KINDS
from support.api.site import APPLY, JSON_PATCH, STRATEGIC, Document, Site, allocation, collection, made
from support.api.site import node as registered
from support.kinds.widget import WIDGET
from support.runtime.runtime import assert_counters_equal_charges, bind

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"
NAME = "example.com/cleanup"
HELD = {"finalizers": [NAME]}
TEMPLATE: Document = {"template": {"spec": {"resources": {"requests": {GPU: "1"}}}}}
SPECS: dict[str, Document] = {
    "Allocation": {"resources": {"requests": {"cpu": "1"}}},
    "Job": TEMPLATE,
    "LimitRange": {"limits": []},
    "Member": {"tenant": "default", "role": "viewer"},
    "Node": {"capacity": {"cpu": "8"}},
    "Queue": {},
    "QuotaRequest": {"limits": {"seats": 5}},
    "ResourceClaim": {"resources": {"clusters": 1}},
    "ResourceQuota": {"hard": {"cpu": "10"}},
    "Tenant": {},
    "Tier": {},
}


async def held(site: Site, path: str, body: Document, **query: Any) -> str:
    """An object with a finalizer; its path."""
    body = {**body, "metadata": {**body["metadata"], **HELD}}
    reply = await site.post(path, body, **query)
    assert (reply.status, reply.body["metadata"]["finalizers"]) == (201, [NAME]), reply
    return f"{path}/{body['metadata']['name']}"


async def deleted(site: Site, path: str) -> Document:
    """The object after its deletion: marked, and still there."""
    reply = await site.delete(path)
    assert reply.status == 200, reply
    there = await site.get(path)
    assert (there.status, there.body["metadata"]["finalizers"]) == (200, [NAME])
    assert there.body["metadata"]["deletionTimestamp"]
    body: Document = there.body
    return body


async def cleared(site: Site, path: str, **options: Any) -> int:
    """Remove a finalizer as its controller does; the status of the response."""
    reply = await site.patch(path, {"metadata": {"finalizers": None}}, **options)
    return reply.status


async def settled(site: Site, where: str) -> None:
    """What the controllers do for jobs and namespaces."""
    for name in (await site.get(f"namespaces/{where}/jobs")).names:
        await step(site.context.runtime, Key("Job", where, name))
    await finish_namespaces(site.context.runtime)


def body_of(kind: str, name: str) -> Document:
    body: Document = {"metadata": {"name": name}}
    if kind in ("Group", "User"):
        return body
    if kind == "Member":  # its tenant and its user name it
        return {"metadata": {"name": f"default.{name}"}, "spec": {**SPECS[kind], "user": name}}
    return {**body, "value": 7} if kind == "PriorityClass" else {**body, "spec": SPECS.get(kind, {})}


# Not those whose spec determines the name.
NAMED = [one for one in KINDS if one.name != "Settings" and one.derived_name is WIDGET.derived_name]


@pytest.mark.parametrize("kind", NAMED, ids=lambda one: one.name)
async def test_an_object_of_any_kind_goes_when_its_last_finalizer_does(site: Site, kind: Any) -> None:
    where = await site.namespace()
    if kind.name == "QuotaRequest":  # it asks for more than a limit
        tenant = (await site.get(f"namespaces/{where}")).body["metadata"]["labels"]["bursar.io/tenant"]
        assert (await site.patch(f"tenants/{tenant}", {"spec": {"limits": {"seats": 1}}})).status == 200
    path = collection(kind, where)
    name = site.name("held")
    at = await held(site, path, body_of(kind.name, name))
    two = {"metadata": {"finalizers": [NAME, "example.com/other"]}}
    assert (await site.patch(at, two)).status == 200, "before it is deleted, anybody may ask to be waited for"
    assert (await site.patch(at, {"metadata": HELD})).status == 200
    first = await deleted(site, at)
    again = await site.delete(at)
    assert (again.status, again.version) == (200, first["metadata"]["resourceVersion"]), "it is deleted once"
    await settled(site, where)
    added = await site.patch(at, two)
    assert (added.status, added.body["details"]["kind"]) == (422, kind.name)
    assert added.body["details"]["causes"][0]["field"] == "metadata.finalizers"
    assert (await site.post(path, body_of(kind.name, name))).status == 409
    labelled = await site.patch(at, {"metadata": {"labels": {"seen": "yes"}}})
    assert labelled.status == 200, "what waits can still be changed"
    assert await cleared(site, at) == 200
    await settled(site, where)
    assert (await site.get(at)).status == 404
    await assert_counters_equal_charges(site.context.runtime)


@pytest.mark.parametrize(
    ("media", "patch"),
    [
        (JSON_PATCH, [{"op": "remove", "path": "/metadata/finalizers"}]),
        (JSON_PATCH, [{"op": "replace", "path": "/metadata/finalizers", "value": []}]),
        (STRATEGIC, {"metadata": {"finalizers": None}}),
        (STRATEGIC, {"metadata": {"$deleteFromPrimitiveList/finalizers": [NAME]}}),
        (APPLY, {"metadata": {"name": "held", "finalizers": []}, "spec": {"hard": {"cpu": "10"}}}),
    ],
)
async def test_every_kind_of_patch_takes_it_away(site: Site, media: str, patch: Any) -> None:
    where = await site.namespace()
    at = await held(site, f"namespaces/{where}/resourcequotas", body_of("ResourceQuota", "held"))
    await deleted(site, at)
    query = {"fieldManager": "test", "force": "true"} if media == APPLY else {}
    gone = await site.patch(at, patch, media=media, **query)
    assert gone.status == 200, gone
    assert (await site.get(at)).status == 404


async def test_what_a_deleted_allocation_held_comes_back_at_once(site: Site) -> None:
    where = await site.namespace()
    worker = (await registered(site))["metadata"]["name"]
    path = f"namespaces/{where}/allocations"
    waits = await held(site, path, allocation("waits", cpu=2))
    runs = await held(site, path, allocation("runs", cpu=4, gpu=2))
    await bind(site.context.runtime, where, "runs", worker)
    assert (await deleted(site, waits))["status"]["phase"] == "Cancelled"
    assert (await site.get(f"tenants/{where}/quotas")).body["quotas"]["cpu"]["accepted"] == "4"
    assert (await deleted(site, runs))["status"]["phase"] == "Terminating"
    assert await cleared(site, runs) == 200, "it is still stopping"
    assert (await site.patch(runs, {"metadata": HELD})).status == 422
    assert (await site.patch(f"{runs}/status", {"status": {"phase": "Cancelled"}})).status == 200
    assert (await site.get(runs)).status == 404
    again = await held(site, path, allocation("again", cpu=4, gpu=8))
    await bind(site.context.runtime, where, "again", worker)
    await deleted(site, again)
    assert (await site.patch(f"{again}/status", {"status": {"phase": "Cancelled"}})).status == 200
    assert (await site.get(again)).body["status"]["phase"] == "Cancelled"
    quotas = (await site.get(f"tenants/{where}/quotas")).body["quotas"]
    assert all(one["accepted"] == one["bound"] == "0" for one in quotas.values())
    assert (await site.delete(f"nodes/{worker}")).status == 200, "nothing is placed there any more"
    for one in (waits, again):
        assert await cleared(site, one) == 200
        assert (await site.get(one)).status == 404
    await assert_counters_equal_charges(site.context.runtime)


async def test_deleting_many_marks_those_that_are_waited_for(site: Site) -> None:
    where = await site.namespace()
    path = f"namespaces/{where}/allocations"
    at = await held(site, path, allocation("held", cpu=1))
    await made(site, where, "free", cpu=1)
    assert (await site.delete(path)).status == 200
    assert (await site.get(path)).names == ["held"]
    assert await cleared(site, at) == 200
    assert (await site.get(path)).names == []


# Jobs.


async def test_a_deleted_job_waits_for_its_allocations_and_they_for_their_finalizers(site: Site) -> None:
    where = await site.namespace()
    job, key = f"namespaces/{where}/jobs/train", Key("Job", where, "train")
    body = {"metadata": {"name": "train"}, "spec": {**TEMPLATE, "parallelism": 2}}
    assert (await site.post(f"namespaces/{where}/jobs", body)).status == 201
    member = f"namespaces/{where}/allocations/train-0"
    assert (await site.patch(member, {"metadata": HELD})).status == 200
    assert (await site.delete(job)).status == 200
    await step(site.context.runtime, key)
    assert (await site.get(f"namespaces/{where}/allocations")).names == ["train-0"]
    before = (await site.get(job)).version
    assert await step(site.context.runtime, key) is not None
    assert (await site.get(job)).version == before, "there is nothing to do but to wait"
    assert await cleared(site, member) == 200
    await step(site.context.runtime, key)
    assert (await site.get(job)).status == 404


async def test_a_cancelled_jobs_allocations_are_over_although_they_are_there(site: Site) -> None:
    where = await site.namespace()
    body = {"metadata": {"name": "train"}, "spec": {**TEMPLATE, "parallelism": 2}}
    assert (await site.post(f"namespaces/{where}/jobs", body)).status == 201
    member = f"namespaces/{where}/allocations/train-0"
    assert (await site.patch(member, {"metadata": HELD})).status == 200
    cancelled = await site.post(f"namespaces/{where}/jobs/train/cancel", {})
    assert cancelled.body["status"]["phase"] == "Cancelled"
    assert (await site.get(f"namespaces/{where}/jobs/train")).body["status"]["active"] == 0
    assert await cleared(site, member) == 200
    assert (await site.get(member)).status == 404


async def test_what_an_orphaning_job_made_stays_while_the_job_waits(site: Site) -> None:
    where = await site.namespace()
    job = await held(site, f"namespaces/{where}/jobs", {"metadata": {"name": "train"}, "spec": TEMPLATE})
    assert (await site.delete(job, {"propagationPolicy": "Orphan"})).status == 200
    await step(site.context.runtime, Key("Job", where, "train"))
    there = (await site.get(job)).body["metadata"]
    assert there["deletionTimestamp"]
    assert there["finalizers"] == [NAME, "bursar.io/orphan"]
    assert await cleared(site, job) == 200
    assert (await site.get(job)).status == 404
    assert (await site.get(f"namespaces/{where}/allocations")).names == ["train-0"]


# Namespaces.


async def test_a_namespace_waits_for_what_is_in_it_and_says_so_after_a_while(site: Site) -> None:
    where = await site.namespace()
    at = await held(site, f"namespaces/{where}/allocations", allocation("held", cpu=1))
    assert (await site.delete(f"namespaces/{where}")).status == 200
    await finish_namespaces(site.context.runtime)
    waiting = (await site.get(f"namespaces/{where}")).body
    assert waiting["status"] == {"phase": "Terminating"}
    await finish_namespaces(site.context.runtime, patience=timedelta(seconds=-1))
    (told,) = (await site.get(f"namespaces/{where}")).body["status"]["conditions"]
    assert (told["type"], told["status"]) == ("NamespaceContentRemaining", "True")
    assert told["message"] == f"waits for finalizers of allocation held: {NAME}"
    version = (await site.get(f"namespaces/{where}")).version
    await finish_namespaces(site.context.runtime, patience=timedelta(seconds=-1))
    assert (await site.get(f"namespaces/{where}")).version == version, "it is said once"
    assert await cleared(site, at) == 200
    await finish_namespaces(site.context.runtime)
    assert (await site.get(f"namespaces/{where}")).status == 404


# Who may.


async def test_the_finalizers_of_what_is_everybodys_are_for_system_wide_roles(site: Site) -> None:
    where = await site.namespace()
    lead = await site.token("tenant-admin", tenant=where, user="lead")
    body = {"metadata": {"name": site.name("mine"), **HELD, "labels": {"bursar.io/tenant": where}}}
    assert (await site.post("namespaces", body, token=lead)).status == 403
    assert (await site.post("namespaces", body)).status == 201
    at = f"namespaces/{body['metadata']['name']}"
    assert await cleared(site, at, token=lead) == 403
    kept = {"metadata": {"labels": {"team": "a"}}}
    assert (await site.patch(at, kept, token=lead)).status == 200, "what does not touch them is theirs to change"
    own = await held(site, f"namespaces/{where}/allocations", allocation("held", cpu=1), token=lead)
    await deleted(site, own)
    assert await cleared(site, own, token=lead) == 200
    assert (await site.get(own)).status == 404
    assert await cleared(site, at) == 200


@pytest.mark.parametrize("names", [["no spaces"], ["a/b/c"], [""], [f"example.com/{n}" for n in range(33)]])
async def test_names_that_are_none(site: Site, names: list[str]) -> None:
    where = await site.namespace()
    body = allocation("held", cpu=1)
    body["metadata"]["finalizers"] = names
    reply = await site.post(f"namespaces/{where}/allocations", body)
    assert (reply.status, reply.body["details"]["causes"][0]["field"]) == (400, "metadata.finalizers")


async def test_our_own_names_are_not_for_users(site: Site) -> None:
    where = await site.namespace()
    body = allocation("held", cpu=1)
    body["metadata"]["finalizers"] = ["bursar.io/orphan"]
    assert (await site.post(f"namespaces/{where}/allocations", body)).status == 422


# What cannot go is not marked.


async def test_what_is_in_use_is_refused_with_finalizers_as_without(site: Site) -> None:
    where = await site.namespace()
    assert (await site.patch(f"tenants/{where}", {"metadata": HELD})).status == 200
    refused = await site.delete(f"tenants/{where}")
    assert (refused.status, refused.body["details"]["code"]) == (409, "in_use")
    assert "deletionTimestamp" not in (await site.get(f"tenants/{where}")).body["metadata"]
    worker = site.name("worker")
    at = await held(site, "nodes", body_of("Node", worker))
    await made(site, where, "work", cpu=1)
    await bind(site.context.runtime, where, "work", worker)
    assert (await site.delete(at)).status == 409
    assert await cleared(site, at) == 200
    assert (await site.get(at)).status == 200


async def test_a_node_that_waits_takes_nothing_new(site: Site) -> None:
    where = await site.namespace()
    worker = site.name("worker")
    at = await held(site, "nodes", body_of("Node", worker))
    await made(site, where, "work", cpu=1)
    await deleted(site, at)
    assert (await site.patch(at, {"spec": {"unschedulable": None}})).status == 200
    assert (await site.patch(f"{at}/status", {"status": {"phase": "Ready"}})).status == 200
    await bind(site.context.runtime, where, "work", worker)
    assert (await site.get(f"namespaces/{where}/allocations/work")).body["status"]["phase"] == "Pending"
    assert await cleared(site, at) == 200
    assert (await site.get(at)).status == 404
