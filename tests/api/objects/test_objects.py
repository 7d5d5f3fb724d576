"""Objects over HTTP: every verb of Kubernetes, alone and in races."""

import asyncio
import json
from typing import Any

import pytest

from bursar.commands.lifecycle.edit import SPEC_HINT
from support.api.site import APPLY, JSON_PATCH, STRATEGIC, TABLE, Site, allocation, made, node
from support.runtime.runtime import assert_counters_equal_charges

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


@pytest.mark.parametrize(
    ("media", "patch"),
    [
        ("application/merge-patch+json", {"spec": None}),
        (STRATEGIC, {"spec": None}),
        (STRATEGIC, {"spec": {"$patch": "delete"}}),
        (STRATEGIC, {"$patch": "delete"}),
        (JSON_PATCH, [{"op": "remove", "path": "/spec"}]),
        (JSON_PATCH, [{"op": "replace", "path": "/spec", "value": None}]),
    ],
)
async def test_a_patch_does_not_remove_the_whole_spec_and_its_limits(site: Site, media: str, patch: Any) -> None:
    name = site.name("t")
    await site.post("tenants", {"metadata": {"name": name}, "spec": {"limits": {"nodes": 3}}})
    reply = await site.patch(f"tenants/{name}", patch, media)
    assert (reply.status, "whole spec" in reply.message, reply.body["details"]["hint"]) == (400, True, SPEC_HINT)
    assert (await site.get(f"tenants/{name}")).body["spec"]["limits"] == {"nodes": 3}


@pytest.mark.parametrize("media", ["application/json", "application/yaml"])
async def test_a_replacement_that_says_no_spec_removes_none(site: Site, media: str) -> None:
    path = f"tenants/{(name := site.name('t'))}"
    await site.post("tenants", {"metadata": {"name": name}, "spec": {"limits": {"nodes": 3}}})
    for body in ({"metadata": {"name": name}}, {"metadata": {"name": name}, "spec": None}):
        reply = await site.put(path, json.dumps(body).encode(), media=media)
        assert (reply.status, "whole spec" in reply.message, reply.body["details"]["hint"]) == (400, True, SPEC_HINT)
    assert (await site.get(path)).body["spec"]["limits"] == {"nodes": 3}
    emptied = await site.put(path, json.dumps({"metadata": {"name": name}, "spec": {}}).encode(), media=media)
    assert (emptied.status, (await site.get(path)).body.get("spec") or {}) == (200, {})
    labelled = {"metadata": {"name": name, "labels": {"a": "b"}}}
    reply = await site.put(path, json.dumps(labelled).encode(), media=media)
    assert (reply.status, reply.body["metadata"]["labels"]) == (200, {"a": "b"}), "there is nothing to remove"


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
    await assert_counters_equal_charges(site.context.runtime)


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
    await node(site)  # Nothing is accepted that no node could ever run.
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


async def test_null_is_no_value_of_a_map(site: Site) -> None:
    """Left out, it would let the work run anywhere."""
    team = await site.namespace()
    body = allocation("one", spec={"nodeSelector": {"pool": None}}, cpu=1)
    reply = await site.post(f"namespaces/{team}/allocations", body)
    assert reply.status == 400, reply
    assert "spec.nodeSelector.pool: must be a string, got null" in reply.message


async def test_bodies_may_be_yaml(site: Site) -> None:
    team = await site.namespace()
    await node(site)  # Nothing is accepted that no node could ever run.
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
    await assert_counters_equal_charges(site.context.runtime)


async def test_a_namespace_that_ends_takes_no_new_content(site: Site) -> None:
    team = await site.namespace()
    await made(site, team, "one", cpu=1)
    ending = await site.delete(f"namespaces/{team}")
    assert ending.status == 200
    assert ending.body["status"]["phase"] == "Terminating"
    reply = await site.post(f"namespaces/{team}/allocations", allocation("two", cpu=1))
    assert reply.status == 403
    assert "being terminated" in reply.message
