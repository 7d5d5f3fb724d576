"""Requests for higher limits over the API: who makes them, who decides on them, and what everybody else is told."""

from typing import Any

import pytest

from support.api.site import Reply, Site, nothing_stored

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def team_of(site: Site, parent: str = "", **limits: Any) -> str:
    """A tenant with limits and a namespace of its name."""
    team = site.name()
    spec = {"limits": limits or {"clusters": 1}, **({"parent": parent} if parent else {})}
    assert (await site.post("tenants", {"metadata": {"name": team}, "spec": spec})).status == 201
    return await site.namespace(team, team)


async def admin_of(site: Site, tenant: str, user: str = "boss") -> str:
    return await site.token("tenant-admin", tenant=tenant, user=user)


async def asked(site: Site, team: str, name: str, token: str, **limits: Any) -> Reply:
    body = {"metadata": {"name": name}, "spec": {"limits": limits or {"clusters": 3}, "reason": "June"}}
    return await site.post(f"namespaces/{team}/quotarequests", body, token=token)


async def decided(site: Site, team: str, name: str, token: str, verb: str = "approve", **body: Any) -> Reply:
    return await site.post(f"namespaces/{team}/quotarequests/{name}/{verb}", body, token=token)


async def test_an_administrator_of_the_tenant_asks_and_an_approver_decides(site: Site) -> None:
    team = await team_of(site)
    boss = await admin_of(site, team)
    made = await asked(site, team, "more", boss)
    assert made.status == 201, made
    assert made.body["status"]["user"] == f"{team}/boss"
    assert made.body["status"]["reason"] == "awaiting_approval"
    approver = await site.token("approver", user="ann", tenants=[team], gates=["manual"])
    inbox = (await site.get("approvals", token=approver)).body["items"]
    assert [(one["kind"], one["name"], one["gate"]) for one in inbox] == [("QuotaRequest", "more", "manual")]
    done = await decided(site, team, "more", approver, reason="fine")
    assert (done.status, done.body["status"]["approval"]["state"]) == (200, "approved")
    limit = (await site.get(f"tenants/{team}/limits/clusters", token=boss)).body
    assert (limit["limit"], limit["source"]) == ("3", "override")
    again = await decided(site, team, "more", approver, "deny")
    assert (again.status, again.body["details"]["code"]) == (409, "already_decided")


async def test_users_and_viewers_do_not_ask(site: Site) -> None:
    team = await team_of(site)
    for role in ("user", "viewer"):
        assert (await asked(site, team, "x", await site.token(role, tenant=team, user=role))).status == 403
    other = await admin_of(site, await team_of(site))
    assert (await asked(site, team, "x", other)).status == 404, "nobody asks for another tenant"


async def test_nobody_decides_for_their_own_tenant(site: Site) -> None:
    team = await team_of(site)
    boss, second = await admin_of(site, team), await admin_of(site, team, "second")
    await asked(site, team, "more", boss)
    for token in (boss, second):
        for verb in ("approve", "deny"):
            assert (await decided(site, team, "more", token, verb)).status == 403
    user = await site.token("user", tenant=team, user="u")
    assert (await decided(site, team, "more", user)).status == 403
    assert (await site.get(f"tenants/{team}/limits/clusters")).body["limit"] == "1"
    own = await site.token("approver", user="boss", tenants=[team], gates=["*"])
    assert (await decided(site, team, "more", own)).status == 403, "the same person with another token"


async def test_the_administrator_of_the_parent_decides_within_its_headroom(site: Site) -> None:
    top = await team_of(site, clusters=100)
    parent = await team_of(site, top, clusters=4)
    team, sister = await team_of(site, parent), await team_of(site, parent, clusters=2)
    boss, above, highest = await admin_of(site, team), await admin_of(site, parent), await admin_of(site, top)
    await asked(site, team, "more", boss)
    assert (await decided(site, team, "more", highest)).status == 403
    assert (await decided(site, team, "more", await admin_of(site, sister))).status == 404
    lacking = await decided(site, team, "more", above)
    assert (lacking.status, lacking.body["details"]["code"]) == (409, "quota_exceeded")
    details = lacking.body["details"]
    assert (details["limit"], details["current_usage"], details["requested_delta"]) == ("4", "2", "3")
    await site.put(f"tenants/{parent}/limits/clusters", {"limit": 5})
    inbox = (await site.get("approvals", token=above)).body["items"]
    assert [one["name"] for one in inbox] == ["more"]
    item = {"kind": "QuotaRequest", "namespace": team, "name": "more", "decision": "approve"}
    tried = await site.post("approvals/decide", {"items": [item]}, token=above, dryRun="All")
    assert tried.body["items"][0]["state"] == "approved"
    assert (await site.get(f"tenants/{team}/limits/clusters")).body["limit"] == "1", "a dry run changes nothing"
    both = (await site.post("approvals/decide", {"items": [item, item]}, token=above)).body["items"]
    assert [one["status"] for one in both] == [200, 409]
    assert (await site.get(f"tenants/{team}/limits/clusters")).body["limit"] == "3"


async def test_administrators_of_tenants_decide_nothing_else(site: Site) -> None:
    parent = await team_of(site)
    team = await team_of(site, parent)
    await site.patch(f"tenants/{team}", {"spec": {"approval": {"gates": ["manual"]}}})
    claim = {"metadata": {"name": "c"}, "spec": {"resources": {"clusters": 1}}}
    assert (await site.post(f"namespaces/{team}/resourceclaims", claim)).status == 201
    above = await admin_of(site, parent)
    assert (await site.post(f"namespaces/{team}/resourceclaims/c/approve", {}, token=above)).status == 403
    item = {"kind": "ResourceClaim", "namespace": team, "name": "c", "decision": "approve"}
    reply = await site.post("approvals/decide", {"items": [item]}, token=above)
    assert reply.body["items"][0]["status"] == 403
    path = f"namespaces/{team}/resourceclaims/c/approval"
    assert (await site.patch(path, {"state": "approved"}, token=above)).status == 403


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({"limits": {}}, 400),
        ({"limits": {"clusters": -1}}, 400),
        ({"limits": {"clusters": "many"}}, 400),
        ({"limits": {"clusters": 5}, "reason": "x" * 1025}, 400),
        ({"limits": {"clusters": 5}, "tenant": "other"}, 400),
        ({}, 400),
        ({"limits": {"clusters": 1}}, 422),
        ({"limits": {"clusters": 0}}, 422),
        ({"limits": {"clusters": 5, "nothing-limits-this": 5}}, 422),
    ],
)
async def test_bad_requests_store_nothing(site: Site, spec: object, status: int) -> None:
    async with nothing_stored(site) as team:
        pass
    if (await site.get(f"tenants/{team}/limits/clusters")).body["limit"] is None:
        await site.put(f"tenants/{team}/limits", {"limits": {"clusters": 1, "pending_requests": 9}})
    async with nothing_stored(site):
        reply = await site.post(f"namespaces/{team}/quotarequests", {"metadata": {"name": "r"}, "spec": spec})
        assert reply.status == status, reply
        assert reply.body["details"]["causes"]


async def test_the_spec_of_a_request_cannot_be_changed_after_somebody_read_it(site: Site) -> None:
    team = await team_of(site)
    boss = await admin_of(site, team)
    await asked(site, team, "more", boss)
    more = {"spec": {"limits": {"clusters": 99}}}
    changed = await site.patch(f"namespaces/{team}/quotarequests/more", more, token=boss)
    assert (changed.status, changed.body["details"]["code"]) == (422, "immutable")
    assert (await site.delete(f"namespaces/{team}/quotarequests/more", token=boss)).status == 200
    assert (await decided(site, team, "more", site.admin)).status == 404
