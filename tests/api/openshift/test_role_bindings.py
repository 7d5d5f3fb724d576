"""Role bindings: the members of a project's tenant, by role."""

import asyncio

import pytest

from support.api.portal import Portal, binding, bindings, portal
from support.api.site import JSON_PATCH, MERGE, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def roles(site: Site, tenant: str) -> dict[str, str]:
    """The members of a tenant, as Bursar's own API lists them."""
    found = (await site.get("members", fieldSelector=f"spec.tenant={tenant}")).body["items"]
    return {one["spec"]["user"]: one["spec"]["role"] for one in found}


async def opened(site: Site) -> tuple[Portal, str]:
    one = await portal(site)
    return one, await one.project()


async def test_every_project_has_three_bindings_without_subjects(site: Site) -> None:
    one, name = await opened(site)
    listed = (await one.ask("GET", bindings(name))).body
    assert listed["kind"] == "RoleBindingList"
    assert [(item["metadata"]["name"], item["subjects"]) for item in listed["items"]] == [
        ("admin", []), ("edit", []), ("view", []),
    ]  # fmt: skip
    found = (await one.ask("GET", f"{bindings(name)}/edit")).body
    assert (found["apiVersion"], found["kind"]) == ("rbac.authorization.k8s.io/v1", "RoleBinding")
    assert found["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
    missing = await one.ask("GET", f"{bindings(name)}/member")
    assert (missing.status, missing.body["details"]["name"]) == (404, "member")
    assert (await one.ask("GET", f"{bindings('absent')}/edit")).status == 404


@pytest.mark.parametrize(("role", "ours"), [("admin", "tenant-admin"), ("edit", "user"), ("view", "viewer")])
async def test_subjects_become_members_and_members_subjects(site: Site, role: str, ours: str) -> None:
    one, name = await opened(site)
    assert (await one.bind(name, role, "ann@example.org", "bob")).status == 200
    assert await roles(site, name) == {"ann@example.org": ours, "bob": ours}
    assert (await one.bind(name, role, "bob")).status == 200
    assert await roles(site, name) == {"bob": ours}
    assert (await site.post("members", {"spec": {"tenant": name, "user": "eve", "role": ours}})).status == 201
    assert await one.subjects(name, role) == ["bob", "eve"]
    assert (await one.bind(name, role)).status == 200
    assert await roles(site, name) == {}
    assert await one.subjects(name, role) == [], "the binding itself stays"


async def test_a_binding_without_subjects_is_filled_by_creating_it(site: Site) -> None:
    one, name = await opened(site)
    made = await one.ask("POST", bindings(name), binding("edit", "ann"))
    assert (made.status, [subject["name"] for subject in made.body["subjects"]]) == (201, ["ann"])
    again = await one.ask("POST", bindings(name), binding("edit", "bob"))
    assert (again.status, again.body["reason"], again.body["details"]["name"]) == (409, "AlreadyExists", "edit")
    assert await one.subjects(name, "edit") == ["ann"]
    emptied = await one.ask("DELETE", f"{bindings(name)}/edit")
    assert (emptied.status, emptied.body["subjects"]) == (200, [])
    assert await roles(site, name) == {}


async def test_a_user_of_two_bindings_is_a_member_with_the_greater_role(site: Site) -> None:
    one, name = await opened(site)
    await one.bind(name, "edit", "ann")
    await one.bind(name, "admin", "ann")
    assert await roles(site, name) == {"ann": "tenant-admin"}
    assert (await one.bind(name, "view", "ann")).status == 200
    assert await roles(site, name) == {"ann": "tenant-admin"}, "a lesser role takes nothing away"
    assert await one.subjects(name, "view") == []
    assert (await one.bind(name, "view")).status == 200
    assert await roles(site, name) == {"ann": "tenant-admin"}


async def test_other_patches_and_a_replacement_change_the_subjects(site: Site) -> None:
    one, name = await opened(site)
    path = f"{bindings(name)}/edit"
    eve = {"kind": "User", "name": "eve"}
    assert (await one.ask("PATCH", path, {"subjects": [eve]}, media=MERGE)).status == 200
    add = [{"op": "add", "path": "/subjects/-", "value": {"kind": "User", "name": "ann"}}]
    assert (await one.ask("PATCH", path, add, media=JSON_PATCH)).status == 200
    assert await one.subjects(name, "edit") == ["ann", "eve"]
    assert (await one.ask("PUT", path, binding("edit", "bob"))).status == 200
    assert await one.subjects(name, "edit") == ["bob"]
    assert (
        await one.ask("PATCH", path, [{"op": "test", "path": "/subjects", "value": []}], media=JSON_PATCH)
    ).status == 422
    assert (await one.ask("PATCH", path, {}, media="application/apply-patch+yaml")).status == 415


async def test_a_change_of_an_old_version_is_a_conflict(site: Site) -> None:
    one, name = await opened(site)
    read = (await one.ask("GET", f"{bindings(name)}/edit")).body
    await one.bind(name, "edit", "ann")
    stale = await one.ask("PUT", f"{bindings(name)}/edit", {**read, "subjects": [{"kind": "User", "name": "bob"}]})
    assert (stale.status, stale.body["reason"]) == (409, "Conflict")
    assert await one.subjects(name, "edit") == ["ann"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"subjects": [{"kind": "Group", "name": "physics"}]}, "subjects[0].kind"),
        ({"subjects": [{"kind": "User", "name": ""}]}, "subjects[0].name"),
        ({"subjects": [{"kind": "User", "name": "a\nb"}]}, "subjects[0].name"),
        ({"roleRef": {"kind": "ClusterRole", "name": "cluster-admin"}}, "roleRef"),
        ({"roleRef": {"kind": "ClusterRole", "name": "admin"}}, "metadata.name"),
        ({"metadata": {"name": "edit", "namespace": "elsewhere"}}, "metadata.namespace"),
        ({"subjects": [{"kind": "User", "name": f"u{number}"} for number in range(1001)]}, "subjects"),
    ],
)
async def test_what_cannot_be_a_member_is_refused_and_nothing_is_stored(site: Site, change: object, field: str) -> None:
    one, name = await opened(site)
    await one.bind(name, "edit", "ann")
    before = await site.state()
    assert isinstance(change, dict)
    for method, path in (("POST", bindings(name)), ("PUT", f"{bindings(name)}/edit")):
        refused = await one.ask(method, path, {**binding("edit", "ann"), **change})
        assert (refused.status, refused.body["details"]["causes"][0]["field"]) == (400, field), refused
    assert await site.state() == before


async def test_concurrent_creations_of_a_binding_lose_nobody(site: Site) -> None:
    one, name = await opened(site)
    users = [f"u{number}" for number in range(8)]
    replies = await asyncio.gather(*(one.ask("POST", bindings(name), binding("edit", user)) for user in users))
    assert {reply.status for reply in replies} <= {201, 409}
    made = {user for user, reply in zip(users, replies, strict=True) if reply.status == 201}
    assert made, "one at least was first"
    assert set(await roles(site, name)) == made


async def test_members_of_a_project_may_what_their_role_says(site: Site) -> None:
    one, name = await opened(site)
    other = await site.namespace()
    viewer, user, admin = [
        await site.token(role, tenant=name, user=role) for role in ("viewer", "user", "tenant-admin")
    ]
    stranger = await site.token("tenant-admin", tenant=other, user="stranger")
    for token in (viewer, user):
        assert (await site.get(bindings(name), token=token)).status == 200
        assert (await site.post(bindings(name), binding("edit", "eve"), token=token)).status == 403
    assert (await site.post(bindings(name), binding("edit", "eve"), token=admin)).status == 201
    for method, path in (("GET", ""), ("POST", ""), ("PUT", "/edit"), ("PATCH", "/edit"), ("DELETE", "/edit")):
        body = None if method in ("GET", "DELETE") else binding("edit", "mallory")
        hidden = await site.ask(method, f"{bindings(name)}{path}", body, token=stranger, media=MERGE if body else "")
        absent = await site.ask(
            method, f"{bindings('absent')}{path}", body, token=stranger, media=MERGE if body else ""
        )
        assert (hidden.status, hidden.message) == (404, absent.message.replace("absent", name)), hidden
    assert await one.subjects(name, "edit") == ["eve"]
