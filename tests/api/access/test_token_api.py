"""Tokens over HTTP: nobody gives or takes back more than they have, and no secret is told twice."""

import json

import pytest

from support.api.site import Site, allocation, eventually
from support.api.two_tenants import TwoTenants

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_token_lives_from_its_creation_to_its_revocation(site: Site, cast: TwoTenants) -> None:
    made = await site.post(
        "tokens", {"role": "user", "tenant": "physics", "user": "temp", "ttl": "1h"}, token=cast.boss
    )
    assert made.status == 201
    secret, name = made.body["status"]["token"], made.body["metadata"]["name"]
    assert made.body["spec"]["createdBy"].endswith("boss")
    assert (await site.get("whoami", token=secret)).body == {"user": "temp", "role": "user", "tenant": "physics"}

    listed = await site.get("tokens", token=cast.boss)
    assert name in listed.names
    assert secret not in json.dumps(listed.body), "the secret is shown once"
    assert {one["spec"].get("tenant") for one in listed.body["items"]} <= {"physics", "optics"}

    assert (await site.delete(f"tokens/{name}", token=cast.rival_boss)).status == 404
    assert (await site.get("whoami", token=secret)).status == 200
    revoked = await site.delete(f"tokens/{name}", token=cast.boss)
    assert (revoked.status, revoked.body["status"]["state"]) == (200, "Revoked")
    after = await site.get("whoami", token=secret)
    assert after.status == 401
    assert "revoked" in after.message
    state = {one["metadata"]["name"]: one["status"]["state"] for one in (await site.get("tokens")).body["items"]}
    assert state[name] == "Revoked"


async def test_nobody_gives_more_than_they_have(site: Site, cast: TwoTenants) -> None:
    before = await site.state()
    for body in (
        {"role": "system-admin"},
        {"role": "service"},
        {"role": "node", "node": "worker-1"},
        {"role": "billing-admin"},
        {"role": "approver", "tenants": ["*"], "gates": ["*"]},
    ):
        assert (await site.post("tokens", body, token=cast.boss)).status == 403, body
    foreign = {"role": "user", "tenant": "biology"}
    assert (await site.post("tokens", foreign, token=cast.boss)).status == 404
    for token in (cast.user, cast.viewer, cast.node):
        assert (await site.post("tokens", {"role": "viewer", "tenant": "physics"}, token=token)).status == 403
    assert await site.state() == before
    below = await site.post("tokens", {"role": "tenant-admin", "tenant": "optics"}, token=cast.boss)
    assert below.status == 201
    name = (await site.get("tokens")).body["items"][0]["metadata"]["name"]
    assert name


async def test_an_expired_token_is_refused(site: Site, cast: TwoTenants) -> None:
    token = await site.token("viewer", tenant="physics", ttl="1s")
    assert (await site.get("whoami", token=token)).status == 200

    async def refused() -> bool:
        return (await site.get("whoami", token=token)).status != 200

    await eventually(refused)
    reply = await site.get("whoami", token=token)
    assert reply.status == 401
    assert "expired" in reply.message


async def test_no_secret_is_in_the_feed_or_in_the_metrics(site: Site, cast: TwoTenants) -> None:
    secret = cast.node.split("_", 2)[2]  # the secret itself may contain an underscore
    async with site.context.database.reader() as db:
        rows = await db.fetch("SELECT doc, status FROM change")
        tokens = await db.fetch("SELECT to_jsonb(token) AS whole FROM token")
    assert all(secret.encode() not in bytes(row["doc"]) + bytes(row["status"] or b"") for row in rows)
    assert all(secret.encode() not in bytes(row["whole"]) for row in tokens)
    assert secret not in (await site.get("/metrics")).body


async def test_self_reviews_answer_as_authentication_does(site: Site, cast: TwoTenants) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    for token, verb, resource, expected in (
        (cast.viewer, "get", "allocations", True),
        (cast.viewer, "create", "allocations", False),
        (cast.user, "create", "allocations", True),
        (cast.user, "create", "resourcequotas", False),
        (cast.boss, "create", "resourcequotas", True),
        (site.admin, "*", "*", True),
    ):
        body = {"spec": {"resourceAttributes": {"verb": verb, "resource": resource}}}
        reply = await site.post(path, body, token=token)
        assert (reply.status, reply.body["status"]["allowed"]) == (201, expected), (verb, resource)


async def test_a_tenant_admin_revokes_only_what_they_could_give(site: Site) -> None:
    team = await site.namespace()
    boss = await site.token("tenant-admin", tenant=team, user="boss")
    above = await site.post(
        "tokens", {"role": "approver", "tenant": team, "user": "app", "tenants": [team], "gates": ["manual"]}
    )
    assert above.status == 201
    below = await site.post("tokens", {"role": "user", "tenant": team, "user": "ann"}, token=boss)
    assert (await site.delete(f"tokens/{above.body['metadata']['name']}", token=boss)).status == 403
    assert (await site.get("whoami", token=above.body["status"]["token"])).status == 200
    assert (await site.delete(f"tokens/{below.body['metadata']['name']}", token=boss)).status == 200
    assert (await site.delete(f"tokens/{above.body['metadata']['name']}")).status == 200


async def test_the_audit_tells_the_anns_of_two_tenants_apart(site: Site) -> None:
    actors = []
    for _ in range(2):
        team = await site.namespace()
        ann = await site.token("user", tenant=team, user="ann")
        await site.post(f"namespaces/{team}/allocations", allocation("job", cpu=1), token=ann)
        (event,) = (await site.get(f"namespaces/{team}/events")).body["items"]
        assert event["source"]["component"] == f"user:{team}/ann"
        actors.append(event["source"]["component"])
    assert len(set(actors)) == 2
