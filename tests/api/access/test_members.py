"""Members of tenants: they get into their tenants by JWTs that name none, and out of them within five seconds."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from bursar.api.objects import watch as watch_module
from bursar.core.values.access import Role
from bursar.core.values.names import member_name
from bursar.core.values.refusal import Refusal
from bursar.ops.access.token import create_token
from bursar.ops.runtime.clock import now
from support.access.jwts import Issuer
from support.api.site import Reply, Site, eventually, opened_site
from support.api.watches import newest, watching

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS_MAX = 5.0


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("idp"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oidc_site(site: Site, issuer: Issuer) -> AsyncIterator[Site]:
    """A second API process on the same database, which accepts the issuer's JWTs; members are changed in the first."""
    async with opened_site(site.context.database.url, oidc=issuer.settings) as one:
        yield one


@pytest.fixture
def recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches do not authenticate again by themselves for the length of the test, as old ones do."""
    monkeypatch.setattr(watch_module, "FIRST_CHECK_SECONDS", watch_module.KEEPALIVE_SECONDS)


async def add(site: Site, tenant: str, user: str, role: str = "user", token: str | None = None) -> Reply:
    return await site.post("members", {"spec": {"tenant": tenant, "user": user, "role": role}}, token=token)


async def added(site: Site, tenant: str, user: str, role: str = "user") -> None:
    reply = await add(site, tenant, user, role)
    assert reply.status == 201, reply


async def remove(site: Site, tenant: str, user: str, token: str | None = None) -> Reply:
    return await site.delete(f"members/{member_name(tenant, user)}", token=token)


async def _whoami(oidc_site: Site, token: str, tenant: str = "") -> Reply:
    return await oidc_site.get("whoami", token=token, headers={"x-bursar-tenant": tenant} if tenant else {})


async def _is(oidc_site: Site, token: str, status: int, **body: str) -> bool:
    reply = await _whoami(oidc_site, token)
    return reply.status == status and body.items() <= reply.body.items()


# The kind.


async def test_a_user_is_a_member_of_a_tenant_once_however_many_add_them(site: Site) -> None:
    team = await site.namespace()
    replies = await asyncio.gather(*(add(site, team, "ann", role) for role in ("user", "viewer", "user") * 8))
    statuses = sorted(one.status for one in replies)
    assert statuses == [201] + [409] * 23
    assert {one.body["reason"] for one in replies if one.status == 409} == {"AlreadyExists"}
    members = (await site.get("members", fieldSelector=f"spec.tenant={team}")).names
    assert members == [f"{team}.ann"]


async def test_a_name_is_derived_and_no_other_is_accepted(site: Site) -> None:
    team = await site.namespace()
    reply = await site.post(
        "members", {"metadata": {"name": "mine"}, "spec": {"tenant": team, "user": "ann", "role": "user"}}
    )
    assert reply.status == 400
    assert f"metadata.name: must be {team}.ann" in reply.message
    assert (await add(site, team, "ann")).body["metadata"]["name"] == f"{team}.ann"
    for user in ("auth0|5f7", "Ann", "ann@physics.example", "a/b", "日本", "sha256-x", "a.b", "x" * 200):
        made = await add(site, team, user)
        assert made.status == 201, made
        assert made.body["metadata"]["name"].startswith(f"{team}.sha256-")
    moved = await site.patch(f"members/{team}.ann", {"spec": {"user": "bob"}})
    assert moved.status == 400
    assert f"must be {team}.bob" in moved.message


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"tenant": "", "user": "ann", "role": "user"}, "spec.tenant"),
        ({"tenant": "t", "user": "", "role": "user"}, "spec.user"),
        ({"tenant": "t", "user": "a\nb", "role": "user"}, "spec.user"),
        ({"tenant": "t", "user": "a" * 254, "role": "user"}, "spec.user"),
        ({"tenant": "t", "user": "ann", "role": "system-admin"}, "spec.role"),
        ({"tenant": "t", "user": "ann", "role": "approver"}, "spec.role"),
    ],
)
async def test_a_faulty_member_is_refused(site: Site, spec: dict[str, str], field: str) -> None:
    before = await site.state()
    reply = await site.post("members", {"spec": spec})
    assert reply.status == 400
    assert field in {one["field"] for one in reply.body["details"]["causes"]}
    assert await site.state() == before


async def test_a_member_of_no_tenant_is_refused(site: Site) -> None:
    before = await site.state()
    reply = await add(site, "nowhere", "ann")
    assert (reply.status, reply.message) == (400, "Tenant 'nowhere' does not exist")
    assert await site.state() == before


async def test_administrators_manage_the_members_of_their_tenants(site: Site) -> None:
    team, rival = await site.namespace(), await site.namespace()
    child = site.name("child")
    await site.post("tenants", {"metadata": {"name": child}, "spec": {"parent": team}})
    boss = await site.token("tenant-admin", tenant=team, user="boss")
    user = await site.token("user", tenant=team, user="ann")
    other = await site.token("tenant-admin", tenant=rival, user="bea")
    below = await site.token("tenant-admin", tenant=child, user="carl")
    service = await site.token("service", user="portal")
    assert (await add(site, team, "ann", "tenant-admin", boss)).status == 201
    assert (await add(site, child, "jim", token=boss)).status == 201
    assert (await add(site, team, "pia", token=service)).status == 201
    before = await site.state()
    for token in (user, other, below):
        assert (await add(site, team, "eve", token=token)).status == 403
        assert (await remove(site, team, "ann", token)).status == (403 if token == user else 404)
    assert (await site.get("members", token=other)).names == []
    assert (await site.get(f"members/{team}.ann", token=other)).status == 404
    assert (await site.get("members", token=user)).names == [f"{team}.ann", f"{team}.pia"]
    assert set((await site.get("members", token=boss)).names) == {f"{team}.ann", f"{team}.pia", f"{child}.jim"}
    assert await site.state() == before
    assert (await remove(site, child, "jim", boss)).status == 200
    assert (await remove(site, team, "pia", service)).status == 200


async def test_members_end_with_their_tenant_and_mean_nothing_to_the_next(
    site: Site, oidc_site: Site, issuer: Issuer
) -> None:
    team, ann = site.name(), issuer.sign("ghost-ann")
    await site.post("tenants", {"metadata": {"name": team}})
    await added(site, team, "ghost-ann", "tenant-admin")
    await eventually(partial(_is, oidc_site, ann, 200, tenant=team))
    assert (await site.delete(f"tenants/{team}")).status == 200
    assert (await site.get("members", fieldSelector=f"spec.tenant={team}")).names == []
    assert (await site.post("tenants", {"metadata": {"name": team}})).status == 201
    assert (await oidc_site.get(f"tenants/{team}", token=ann)).status in (401, 404)
    await eventually(partial(_is, oidc_site, ann, 401), SECONDS_MAX)


async def test_a_member_that_is_held_by_a_finalizer_keeps_its_tenant(
    site: Site, oidc_site: Site, issuer: Issuer
) -> None:
    team, ann = site.name(), issuer.sign("held-ann")
    await site.post("tenants", {"metadata": {"name": team}})
    spec = {"tenant": team, "user": "held-ann", "role": "user"}
    made = await site.post("members", {"metadata": {"finalizers": ["example.com/hold"]}, "spec": spec})
    assert made.status == 201
    reply = await site.delete(f"tenants/{team}")
    assert (reply.status, f"{team}.held-ann" in reply.message) == (409, True)
    assert (await _whoami(oidc_site, ann)).status == 200
    assert (await remove(site, team, "held-ann")).status == 200
    await eventually(partial(_is, oidc_site, ann, 401), SECONDS_MAX)
    name = f"members/{team}.held-ann"
    assert (await site.patch(name, {"metadata": {"finalizers": None}})).status == 200
    assert (await site.delete(f"tenants/{team}")).status == 200


# Identities.


async def test_a_jwt_without_a_tenant_gets_that_of_its_membership(site: Site, oidc_site: Site, issuer: Issuer) -> None:
    team, other = await site.namespace(), await site.namespace()
    user = f"{team}-ann"
    stranger = await _whoami(oidc_site, issuer.sign(f"{team}-nobody"))
    assert (stranger.status, "is a member of none" in stranger.message) == (401, True)
    assert "bursar member add" in stranger.message
    await added(site, team, user, "user")
    reply = await _whoami(oidc_site, issuer.sign(user))
    assert reply.body == {"user": user, "role": "user", "tenant": team}
    assert (await oidc_site.get("namespaces", token=issuer.sign(user))).names == [team]
    lesser = await _whoami(oidc_site, issuer.sign(user, bursar_role="viewer"))
    assert lesser.body["role"] == "viewer", "the provider's role is the most that a membership gives"
    assert (await _whoami(oidc_site, issuer.sign(user, bursar_role="tenant-admin"))).body["role"] == "user"
    foreign = await _whoami(oidc_site, issuer.sign(user), other)
    assert (foreign.status, other in foreign.message) == (403, True)
    unknown = await _whoami(oidc_site, issuer.sign(user), "nowhere")
    assert unknown.message == foreign.message.replace(other, "nowhere"), "a tenant's existence is not told"


async def test_of_several_memberships_the_request_names_one(site: Site, oidc_site: Site, issuer: Issuer) -> None:
    first, second, third = [await site.namespace() for _ in range(3)]
    user = f"{first}-multi"
    await added(site, first, user, "tenant-admin")
    await added(site, second, user, "viewer")
    await added(site, third, "somebody-else", "viewer")
    token = issuer.sign(user)
    reply = await _whoami(oidc_site, token)
    assert reply.status == 400
    assert f"you are a member of several tenants: {first}, {second}" in reply.message
    assert third not in reply.message
    assert "X-Bursar-Tenant" in json.dumps(reply.body)
    assert (await _whoami(oidc_site, token, first)).body == {"user": user, "role": "tenant-admin", "tenant": first}
    assert (await _whoami(oidc_site, token, second)).body == {"user": user, "role": "viewer", "tenant": second}
    assert (await _whoami(oidc_site, token, third)).status == 403
    twice = [("authorization", f"Bearer {token}"), ("x-bursar-tenant", first), ("x-bursar-tenant", second)]
    assert (await oidc_site.http.get(f"{oidc_site.url}/api/v1/whoami", headers=twice)).status_code == 400


async def test_a_removed_member_is_out_within_five_seconds_and_so_are_tokens_and_watches(
    site: Site, oidc_site: Site, issuer: Issuer, recalled: None
) -> None:
    team = await site.namespace()
    user = f"{team}-leaver"
    await added(site, team, user)
    own = issuer.sign(user)
    made = await site.post("tokens", {"role": "user", "tenant": team, "user": user})
    token, token_id = made.body["status"]["token"], made.body["metadata"]["name"]
    stays = await site.token("user", tenant=team, user="stays")
    path, version = f"namespaces/{team}/allocations", await newest(site)
    async with (
        watching(oidc_site, path, own, resourceVersion=version) as by_jwt,
        watching(oidc_site, path, token, resourceVersion=version) as by_token,
        watching(site, path, token, resourceVersion=version) as elsewhere,
    ):
        assert (await remove(site, team, user)).status == 200
        async with asyncio.timeout(SECONDS_MAX):
            for events in (by_jwt, by_token, elsewhere):
                *_, error = [event async for event in events]
                assert (error["type"], error["object"]["code"]) == ("ERROR", 401)
            for one in (own, token):
                await eventually(partial(_is, oidc_site, one, 401), SECONDS_MAX)
    (shown,) = [one for one in (await site.get("tokens")).body["items"] if one["metadata"]["name"] == token_id]
    assert shown["status"]["state"] == "Revoked"
    assert (await _whoami(oidc_site, stays)).status == 200
    async with site.context.database.reader() as db:
        lines = await db.fetch(
            "SELECT verb, reason FROM change WHERE kind = 'Token' AND name = $1 ORDER BY revision", token_id
        )
    assert tuple(lines[-1]) == ("revoke", "its user left the tenant")
    await added(site, team, user)
    await eventually(partial(_is, oidc_site, own, 200), SECONDS_MAX)
    assert (await _whoami(oidc_site, token)).status == 401, "a new membership does not bring an old token back"


async def test_a_watch_that_began_with_a_remembered_identity_ends_too(
    site: Site, oidc_site: Site, issuer: Issuer
) -> None:
    """The process remembers an identity for two seconds, and hears of changes only while it has watches."""
    team = await site.namespace()
    user = f"{team}-late"
    await added(site, team, user)
    own, path, version = issuer.sign(user), f"namespaces/{team}/allocations", await newest(site)
    assert (await _whoami(oidc_site, own)).status == 200
    assert (await remove(site, team, user)).status == 200
    params = {"watch": "true", "resourceVersion": version}
    async with asyncio.timeout(SECONDS_MAX):
        answer = await oidc_site.http.get(
            f"{oidc_site.url}/api/v1/{path}", params=params, headers={"authorization": f"Bearer {own}"}
        )
    # It was let in, and ended; or not let in at all.
    said = answer.json()
    assert said.get("code") or said["object"]["code"] == 401


async def test_a_role_that_changes_takes_effect_within_five_seconds(
    site: Site, oidc_site: Site, issuer: Issuer, recalled: None
) -> None:
    team = await site.namespace()
    user = f"{team}-fallen"
    await added(site, team, user, "tenant-admin")
    own, token = issuer.sign(user), await site.token("tenant-admin", tenant=team, user=user)
    lesser = await site.token("viewer", tenant=team, user=user)
    path, version = f"namespaces/{team}/allocations", await newest(site)
    assert (await _whoami(oidc_site, token)).body["role"] == "tenant-admin"
    async with (
        watching(oidc_site, path, own, resourceVersion=version) as by_jwt,
        watching(oidc_site, path, token, resourceVersion=version) as by_token,
    ):
        assert (await site.patch(f"members/{member_name(team, user)}", {"spec": {"role": "user"}})).status == 200
        async with asyncio.timeout(SECONDS_MAX):
            for events in (by_jwt, by_token):
                assert [event async for event in events] == []
            for one in (own, token):
                await eventually(partial(_is, oidc_site, one, 200, role="user"), SECONDS_MAX)
    assert (await _whoami(oidc_site, lesser)).body["role"] == "viewer", "a token gives no more than its own role"


async def test_a_token_that_is_made_while_its_user_leaves_does_not_stay(site: Site, oidc_site: Site) -> None:
    """The removal waits for the token, and revokes it."""
    team = await site.namespace()
    await added(site, team, "racer")
    uid = (await site.get(f"tenants/{team}")).body["metadata"]["uid"]

    async def waits_or_has_ended() -> bool:
        async with oidc_site.context.database.reader() as looking:
            blocked = await looking.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        return removing.done() or blocked > 0

    async with site.context.database.reader() as db, db.transaction():
        made = await create_token(
            db, role=Role.USER, tenant=team, tenant_uid=uid, user="racer", created_by="test", now=now()
        )
        assert not isinstance(made, Refusal)
        removing = asyncio.create_task(remove(site, team, "racer"))
        await eventually(waits_or_has_ended)
    assert (await removing).status == 200
    await eventually(partial(_is, oidc_site, made[1], 401), SECONDS_MAX)
