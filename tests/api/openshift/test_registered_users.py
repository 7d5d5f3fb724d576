"""Users, identities, mappings and groups, as a portal registers them."""

import pytest

from support.api.portal import GROUPS, IDENTITIES, MAPPINGS, USERS, Portal, portal
from support.api.site import MERGE, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


def identity(user: str) -> dict[str, str]:
    return {"providerName": "campus", "providerUserName": user}


def mapping(user: str, identity_user: str = "") -> dict[str, dict[str, str]]:
    return {"user": {"name": user}, "identity": {"name": f"campus:{identity_user or user}"}}


async def registered(one: Portal, user: str) -> None:
    assert (await one.ask("POST", USERS, {"metadata": {"name": user}, "fullName": user})).status == 201
    assert (await one.ask("POST", IDENTITIES, identity(user))).status == 201
    assert (await one.ask("POST", MAPPINGS, mapping(user))).status == 201


async def test_a_user_is_registered_in_three_steps(site: Site) -> None:
    one, user = await portal(site), f"{site.name('ann')}@example.org"
    made = await one.ask("POST", USERS, {"metadata": {"name": user}, "fullName": user})
    assert (made.status, made.body["apiVersion"], made.body["kind"]) == (201, "user.openshift.io/v1", "User"), made
    assert (await one.ask("GET", f"{USERS}/{user}")).body["identities"] == []
    missing = await one.ask("GET", f"{IDENTITIES}/campus:{user}")
    assert (missing.status, missing.body["reason"]) == (404, "NotFound")
    assert missing.body["details"]["name"] == f"campus:{user}"
    assert (await one.ask("POST", MAPPINGS, mapping(user))).status == 404, "there is no identity yet"
    made = await one.ask("POST", IDENTITIES, identity(user))
    assert (made.status, made.body["metadata"]["name"]) == (201, f"campus:{user}"), made
    mapped = await one.ask("POST", MAPPINGS, mapping(user))
    assert (mapped.status, mapped.body["kind"]) == (201, "UserIdentityMapping"), mapped
    found = (await one.ask("GET", f"{USERS}/{user}")).body
    assert found["identities"] == [f"campus:{user}"]
    assert (await one.ask("GET", f"{IDENTITIES}/campus:{user}")).body["user"] == {
        "name": user, "uid": found["metadata"]["uid"],
    }  # fmt: skip
    for path, body in ((USERS, {"metadata": {"name": user}}), (IDENTITIES, identity(user)), (MAPPINGS, mapping(user))):
        again = await one.ask("POST", path, body)
        assert (again.status, again.body["reason"]) == (409, "AlreadyExists"), again


async def test_a_mapping_is_read_and_removed(site: Site) -> None:
    one, user = await portal(site), site.name("ann")
    await registered(one, user)
    path = f"{MAPPINGS}/campus:{user}"
    assert (await one.ask("GET", path)).body["user"]["name"] == user
    assert (await one.ask("DELETE", path)).status == 200
    assert (await one.ask("GET", path)).status == 404
    assert (await one.ask("GET", f"{USERS}/{user}")).body["identities"] == []
    unknown = await one.ask("POST", MAPPINGS, mapping("nobody", user))
    assert (unknown.status, unknown.body["reason"]) == (404, "NotFound")
    assert (await one.ask("POST", MAPPINGS, mapping(user))).status == 201


async def test_a_later_user_of_the_name_has_no_identities_of_the_earlier(site: Site) -> None:
    one, user = await portal(site), site.name("ann")
    await registered(one, user)
    assert (await one.ask("DELETE", f"{USERS}/{user}")).status == 200
    missing = await one.ask("GET", f"{USERS}/{user}")
    assert (missing.status, missing.body["details"]["name"]) == (404, user)
    assert (await one.ask("POST", USERS, {"metadata": {"name": user}})).status == 201
    assert (await one.ask("GET", f"{USERS}/{user}")).body["identities"] == []
    assert (await one.ask("DELETE", f"{IDENTITIES}/campus:{user}")).status == 200


async def test_a_user_gets_no_rights_by_being_registered(site: Site) -> None:
    one, user = await portal(site), site.name("ann")
    name = await one.project()
    await registered(one, user)
    assert (await one.ask("POST", GROUPS, {"metadata": {"name": site.name("group")}, "users": [user]})).status == 201
    members = (await site.get("members", fieldSelector=f"spec.tenant={name}")).body["items"]
    assert members == []


async def test_groups_are_stored_and_changed(site: Site) -> None:
    one, name = await portal(site), site.name("group")
    assert (await one.ask("POST", GROUPS, {"metadata": {"name": name}, "users": ["ann"]})).status == 201
    patched = await one.ask("PATCH", f"{GROUPS}/{name}", {"users": ["ann", "bob"]}, media=MERGE)
    assert patched.body["users"] == ["ann", "bob"], patched
    assert (await one.ask("POST", GROUPS, {"metadata": {"name": "x"}, "users": [""]})).status == 400
    assert (await one.ask("DELETE", f"{GROUPS}/{name}")).status == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (USERS, {"metadata": {"name": "a:b"}}, "metadata.name"),
        (USERS, {"metadata": {"name": "a/b"}}, "metadata.name"),
        (USERS, {"metadata": {"name": ".."}}, "metadata.name"),
        (USERS, {"metadata": {}}, "metadata.name"),
        (IDENTITIES, {"providerName": "a:b", "providerUserName": "c"}, "providerName"),
        (IDENTITIES, {**identity("ann"), "metadata": {"name": "campus:bob"}}, "metadata.name"),
    ],
)
async def test_names_that_address_something_else_are_refused(site: Site, path: str, body: object, field: str) -> None:
    one = await portal(site)
    before = await site.state()
    refused = await one.ask("POST", path, body)
    assert (refused.status, refused.body["details"]["causes"][0]["field"]) == (400, field), refused
    assert await site.state() == before


async def test_a_portal_does_not_see_the_users_of_another(site: Site) -> None:
    one, other, user = await portal(site), await portal(site), site.name("ann")
    await registered(one, user)
    group = site.name("group")
    assert (await one.ask("POST", GROUPS, {"metadata": {"name": group}})).status == 201
    for path in (f"{USERS}/{user}", f"{IDENTITIES}/campus:{user}", f"{MAPPINGS}/campus:{user}", f"{GROUPS}/{group}"):
        assert (await other.ask("GET", path)).status == 404
        assert (await other.ask("DELETE", path)).status == 404
        assert (await one.ask("GET", path)).status == 200
    assert user not in (await other.ask("GET", USERS)).names
    assert user in (await one.ask("GET", USERS)).names
    # The name is taken, which the other portal's plugin takes for its own earlier registration.
    for path, body in ((USERS, {"metadata": {"name": user}}), (IDENTITIES, identity(user)), (MAPPINGS, mapping(user))):
        taken = await other.ask("POST", path, body)
        assert (taken.status, taken.body["reason"]) == (409, "AlreadyExists"), taken


async def test_only_portals_and_administrators_use_the_register(site: Site) -> None:
    one, user = await portal(site), site.name("ann")
    name = await one.project()
    await registered(one, user)
    for role in ("tenant-admin", "user", "viewer"):
        token = await site.token(role, tenant=name, user=role)
        for path in (USERS, IDENTITIES, GROUPS, f"{USERS}/{user}", f"{MAPPINGS}/campus:{user}"):
            assert (await site.get(path, token=token)).status == 403
        assert (await site.post(USERS, {"metadata": {"name": "x"}}, token=token)).status == 403
    service = await site.token("service", user="portal-of-all")
    for token in (site.admin, service):
        assert (await site.get(f"{USERS}/{user}", token=token)).status == 200
    assert (await site.post(USERS, {"metadata": {"name": site.name("bob")}}, token=service)).status == 201


async def test_users_end_with_the_tenant_of_their_portal(site: Site) -> None:
    one, user = await portal(site), site.name("ann")
    await registered(one, user)
    assert (await site.delete(f"tenants/{one.tenant}")).status == 200
    assert (await site.get(f"{USERS}/{user}")).status == 404
    assert (await site.get(f"{IDENTITIES}/campus:{user}")).status == 404
