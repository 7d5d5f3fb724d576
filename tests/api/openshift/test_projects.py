"""Projects: namespaces with a tenant of their own, which demand a quota."""

import json

import pytest

from bursar.api.objects import object as objects
from bursar.loops.housekeeping import finish_namespaces
from support.api.portal import PROJECTS, REQUESTS, bindings, portal
from support.api.site import APPLY, MERGE, STRATEGIC, TABLE, Site, allocation

pytestmark = pytest.mark.asyncio(loop_scope="module")

LABELS = {"example.org/dashboard": "true"}
ANNOTATIONS = {"cf_pi": "ann", "openshift.io/display-name": "Physics of ice"}


async def test_a_project_is_a_namespace_with_a_tenant_of_its_own_below_the_portal_s(site: Site) -> None:
    one = await portal(site)
    name = site.name("project")
    body = {"metadata": {"name": name, "labels": LABELS, "annotations": ANNOTATIONS}}
    made = await one.ask("POST", PROJECTS, body)
    assert made.status == 201, made
    assert (made.body["apiVersion"], made.body["kind"]) == ("project.openshift.io/v1", "Project")
    assert made.body["metadata"]["annotations"] == ANNOTATIONS
    namespace = (await one.ask("GET", f"namespaces/{name}")).body
    assert namespace["kind"] == "Namespace"
    assert namespace["metadata"]["uid"] == made.body["metadata"]["uid"]
    assert namespace["metadata"]["labels"] == {**LABELS, "bursar.io/tenant": name}
    assert namespace["spec"] == {"quotaRequired": True}
    tenant = (await one.ask("GET", f"tenants/{name}")).body
    assert tenant["spec"] == {"parent": one.tenant, "displayName": "Physics of ice"}
    assert tenant["metadata"]["labels"] == {"bursar.io/project": "true"}


async def test_the_namespace_of_a_project_is_patched_with_the_whole_object(site: Site) -> None:
    one = await portal(site)
    name = await one.project(labels=LABELS)
    namespace = (await one.ask("GET", f"namespaces/{name}")).body
    for field in ("resourceVersion", "creationTimestamp", "uid"):
        del namespace["metadata"][field]
    namespace["metadata"]["labels"]["test"] = "test"
    assert (await one.ask("PATCH", f"namespaces/{name}", namespace, media=STRATEGIC)).status == 200
    labels = (await one.ask("GET", f"{PROJECTS}/{name}")).body["metadata"]["labels"]
    assert labels == {**LABELS, "test": "test", "bursar.io/tenant": name}


async def test_a_project_is_replaced_and_patched_by_its_own_kind(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    project = (await one.ask("GET", f"{PROJECTS}/{name}")).body
    project["metadata"]["labels"]["colour"] = "red"
    replaced = await one.ask("PUT", f"{PROJECTS}/{name}", project)
    assert (replaced.status, replaced.body["kind"]) == (200, "Project"), replaced
    assert (await one.ask("PUT", f"{PROJECTS}/{name}", project)).status == 409, "the version is an old one"
    patch = {"kind": "Project", "metadata": {"labels": {"colour": "blue"}}}
    patched = await one.ask("PATCH", f"{PROJECTS}/{name}", patch, media=MERGE)
    assert patched.body["metadata"]["labels"]["colour"] == "blue"
    wrong = await one.ask("PATCH", f"{PROJECTS}/{name}", {"kind": "Namespace"}, media=MERGE)
    assert (wrong.status, wrong.body["details"]["code"]) == (400, "invalid")
    assert (await one.ask("PATCH", f"{PROJECTS}/{name}", {}, media=APPLY)).status == 415


async def test_a_missing_project_is_not_found_by_its_name(site: Site) -> None:
    one = await portal(site)
    missing = await one.ask("GET", f"{PROJECTS}/absent")
    assert (missing.status, missing.body["reason"]) == (404, "NotFound")
    assert missing.body["details"]["name"] == "absent"
    assert missing.body["details"]["kind"] == "projects"
    assert missing.message == 'projects "absent" not found'
    assert (await one.ask("DELETE", f"{PROJECTS}/absent")).status == 404


async def test_deleting_a_project_ends_its_namespace_and_its_members(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    await one.bind(name, "edit", "ann")
    deleted = await one.ask("DELETE", f"{PROJECTS}/{name}")
    assert (deleted.status, deleted.body["status"]["phase"]) == (200, "Terminating")
    again = await one.ask("POST", PROJECTS, {"metadata": {"name": name}})
    assert (again.status, again.body["reason"]) == (409, "AlreadyExists")
    assert "being deleted" in again.message
    late = await one.ask(
        "PATCH", f"{bindings(name)}/edit", {"subjects": [{"kind": "User", "name": "bob"}]}, media=MERGE
    )
    assert (late.status, late.body["details"]["code"]) == (403, "terminating")
    await finish_namespaces(site.context.runtime)
    site.context.forget_tree()
    assert (await one.ask("GET", f"{PROJECTS}/{name}")).status == 404
    assert (await one.ask("GET", f"tenants/{name}")).status == 200, "its usage and ledger stay"
    assert name not in [member["spec"]["tenant"] for member in (await site.get("members")).body["items"]]


async def test_a_later_project_of_the_name_has_the_tenant_but_not_the_members(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    await one.ask("DELETE", f"{PROJECTS}/{name}")
    await finish_namespaces(site.context.runtime)
    # As after a fault between the deletion of the namespace and that of its members.
    left = {"spec": {"tenant": name, "user": "ann", "role": "user"}}
    assert (await site.post("members", left)).status == 201
    await one.project(name)
    assert await one.subjects(name, "edit") == []


async def test_a_dry_run_deletes_neither_the_namespace_nor_the_members(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    await one.bind(name, "edit", "ann")
    assert (await one.ask("DELETE", f"{PROJECTS}/{name}", {"dryRun": ["All"]})).status == 200
    assert (await one.ask("GET", f"{PROJECTS}/{name}")).body["status"]["phase"] == "Active"
    assert await one.subjects(name, "edit") == ["ann"]


async def test_names_that_are_taken_are_refused_and_nothing_is_stored(site: Site) -> None:
    one, team = await portal(site), await site.namespace()
    spare = site.name("tenant")
    assert (await site.post("tenants", {"metadata": {"name": spare}, "spec": {}})).status == 201
    before = await site.state()
    for name in (team, spare, one.tenant):
        taken = await one.ask("POST", PROJECTS, {"metadata": {"name": name}})
        assert (taken.status, taken.body["details"]["name"]) == (409, name), taken
    wrong: tuple[object, ...] = ({"metadata": {"name": "Not_a_label"}}, {"metadata": {}}, {"kind": "Namespace"}, [])
    for body in wrong:
        refused = await one.ask("POST", PROJECTS, body)
        assert refused.status == 400, refused
    assert await site.state() == before


async def test_a_repeated_request_gets_the_first_answer(site: Site) -> None:
    one, body = await portal(site), {"metadata": {"name": site.name("project")}}
    first = await one.ask("POST", PROJECTS, body, headers={"idempotency-key": "p-1"})
    again = await one.ask("POST", PROJECTS, body, headers={"idempotency-key": "p-1"})
    assert (first.status, again.status) == (201, 201)
    assert again.body["metadata"]["uid"] == first.body["metadata"]["uid"]


async def test_a_project_request_makes_a_project_with_its_texts(site: Site) -> None:
    one = await portal(site)
    assert (await one.ask("GET", REQUESTS)).body["status"] == "Success"
    name = site.name("project")
    body = {"kind": "ProjectRequest", "metadata": {"name": name}, "displayName": "Ice", "description": "Of ice."}
    made = await one.ask("POST", REQUESTS, body)
    assert (made.status, made.body["kind"]) == (201, "Project"), made
    annotations = {"openshift.io/display-name": "Ice", "openshift.io/description": "Of ice."}
    assert made.body["metadata"]["annotations"] == annotations
    assert (await one.ask("GET", f"tenants/{name}")).body["spec"]["displayName"] == "Ice"
    assert (await one.ask("POST", REQUESTS, {**body, "kind": "Project"})).status == 400


async def test_an_administrator_s_project_has_a_tenant_at_the_root(site: Site) -> None:
    for token in (None, await site.token("service", user="portal-of-all")):
        name = site.name("project")
        assert (await site.ask("POST", PROJECTS, {"metadata": {"name": name}}, token=token)).status == 201
        assert (await site.get(f"tenants/{name}")).body["spec"] == {}
        assert (await site.ask("DELETE", f"{PROJECTS}/{name}", token=token)).status == 200


async def test_a_service_deletes_no_namespace_that_was_not_created_as_a_project(site: Site) -> None:
    team = await site.namespace()
    refused = await site.delete(f"{PROJECTS}/{team}", token=await site.token("service", user="portal-of-all"))
    assert (refused.status, refused.body["details"]["code"]) == (403, "forbidden")
    assert (await site.get(f"namespaces/{team}")).body["status"]["phase"] == "Active"
    assert (await site.delete(f"{PROJECTS}/{team}")).status == 200, "an administrator may"


async def test_a_project_with_a_tenant_label_joins_that_tenant(site: Site) -> None:
    one = await portal(site)
    first = await one.project()
    second = await one.project(labels={"bursar.io/tenant": first})
    assert (await one.ask("GET", f"tenants/{second}")).status == 404
    strange = await site.namespace()
    body = {"metadata": {"name": site.name("project"), "labels": {"bursar.io/tenant": strange}}}
    assert (await one.ask("POST", PROJECTS, body)).status == 403


async def test_portals_and_tenants_see_their_own_projects_alone(site: Site) -> None:
    one, other = await portal(site), await portal(site)
    ours, theirs = await one.project(), await other.project()
    user, viewer = [await site.token(role, tenant=ours, user=role) for role in ("user", "viewer")]
    stranger = await site.token("user", tenant=theirs, user="stranger")
    assert (await site.get(PROJECTS, token=one.token)).names == [ours]
    assert (await site.get(PROJECTS, token=user)).names == [ours]
    for token in (user, viewer):
        assert (await site.get(f"{PROJECTS}/{ours}", token=token)).status == 200
        assert (await site.post(PROJECTS, {"metadata": {"name": "own"}}, token=token)).status == 403
        assert (await site.post(REQUESTS, {"metadata": {"name": "own"}}, token=token)).status == 403
        assert (await site.delete(f"{PROJECTS}/{ours}", token=token)).status == 403
    for token in (other.token, stranger):
        absent = await site.get(f"{PROJECTS}/{ours}x", token=token)
        hidden = await site.get(f"{PROJECTS}/{ours}", token=token)
        assert (hidden.status, hidden.message) == (404, absent.message.replace(f"{ours}x", ours))
        assert (await site.get(bindings(ours), token=token)).status == 404
    assert (await site.delete(f"{PROJECTS}/{ours}", token=other.token)).status == 404
    patch = {"metadata": {"labels": {"theirs": "yes"}}}
    assert (await site.patch(f"{PROJECTS}/{ours}", patch, token=other.token)).status == 404


async def test_a_long_list_is_renamed_across_the_pieces_of_its_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await portal(site)
    names = [await one.project(annotations={"text": "x" * 700}) for _ in range(12)]
    whole = await one.ask("GET", PROJECTS)
    monkeypatch.setattr(objects, "WHOLE_BYTES_MAX", 64)
    streamed = await one.ask("GET", PROJECTS)
    assert "content-length" not in streamed.headers
    assert streamed.body == whole.body
    assert streamed.names == sorted(names)
    assert streamed.body["kind"] == "ProjectList"
    assert {(item["apiVersion"], item["kind"]) for item in streamed.body["items"]} == {
        ("project.openshift.io/v1", "Project")
    }


async def test_texts_that_look_like_a_namespace_are_left_as_they_are(site: Site) -> None:
    one = await portal(site)
    text = json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {}}, separators=(",", ":"))
    name = await one.project(annotations={"note": text})
    assert (await one.ask("GET", f"{PROJECTS}/{name}")).body["metadata"]["annotations"] == {"note": text}


async def test_kubectl_gets_a_table_of_projects(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    table = (await one.ask("GET", PROJECTS, headers={"accept": TABLE})).body
    assert (table["kind"], [row["object"]["metadata"]["name"] for row in table["rows"]]) == ("Table", [name])


async def test_a_quota_is_echoed_in_the_portal_s_names(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    path = f"namespaces/{name}/resourcequotas"
    storage = "ocs-external-storagecluster-ceph-rbd.storageclass.storage.k8s.io/requests.storage"
    hard = {"limits.cpu": "2", "limits.memory": "8192Mi", "limits.ephemeral-storage": "10Gi", storage: "40Gi",
            "requests.nvidia.com/gpu": "0", "persistentvolumeclaims": "4"}  # fmt: skip
    quota = {"metadata": {"name": f"{name}-project"}, "spec": {"hard": hard}}
    assert (await one.ask("POST", path, quota)).status == 201
    (found,) = (await one.ask("GET", path)).body["items"]
    assert found["spec"]["hard"] == {**hard, "limits.memory": "8Gi"}
    assert set(found["status"]["used"]) == set(hard)
    user = await site.token("user", tenant=name, user="ann")
    work = allocation("a", gpu=1)
    refused = await site.post(f"namespaces/{name}/allocations", work, token=user)
    assert (refused.status, refused.body["details"]["dimension"]) == (403, "nvidia.com/gpu"), refused
    assert (await one.ask("DELETE", f"{path}/{name}-project")).status == 200
    raised = {"metadata": {"name": f"{name}-project"}, "spec": {"hard": {**hard, "requests.nvidia.com/gpu": "1"}}}
    assert (await one.ask("POST", path, raised)).status == 201


async def test_limit_ranges_are_stored_and_echoed(site: Site) -> None:
    one = await portal(site)
    name = await one.project()
    path = f"namespaces/{name}/limitranges"
    limits = [{"type": "Container", "default": {"cpu": "1", "memory": "4096Mi", "nvidia.com/gpu": "0"},
               "defaultRequest": {"cpu": "500m"}, "min": {"cpu": "1m", "memory": "1Ki"}}]  # fmt: skip
    made = await one.ask("POST", path, {"metadata": {"name": f"{name}-limits"}, "spec": {"limits": limits}})
    assert made.status == 201, made
    listed = (await one.ask("GET", path)).body
    assert (listed["kind"], [item["spec"]["limits"] for item in listed["items"]]) == ("LimitRangeList", [limits])
    assert (await one.ask("DELETE", f"{path}/{name}-limits")).status == 200
    assert (await one.ask("GET", path)).body["items"] == []
    for wrong in ({"limits": [{"type": ""}]}, {"limits": [{"type": "Pod", "max": {"cpu": "-1"}}]}, {}):
        assert (await one.ask("POST", path, {"metadata": {"name": "x"}, "spec": wrong})).status == 400
    user = await site.token("user", tenant=name, user="ann")
    assert (await site.get(path, token=user)).status == 200
    body = {"metadata": {"name": "x"}, "spec": {"limits": []}}
    assert (await site.post(path, body, token=user)).status == 403
