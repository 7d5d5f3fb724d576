"""News of requests over HTTP: events for the tenant, metrics for operators, and types that webhooks may name."""

from collections.abc import AsyncIterator

import pytest

from support.api.site import Document, Site, allocation, opened_site

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with opened_site(database_url) as one:
        yield one


async def gated(site: Site, name: str) -> str:
    """A tenant whose requests pass two gates, with a namespace; return the token of a user of it."""
    spec = {"approval": {"gates": ["manual", "quota"]}, "limits": {"cpu": 4}}
    assert (await site.post("tenants", {"metadata": {"name": name}, "spec": spec})).status == 201
    labels = {"bursar.io/tenant": name}
    assert (await site.post("namespaces", {"metadata": {"name": name, "labels": labels}})).status == 201
    return await site.token("user", tenant=name, user="ben")


def claim(name: str) -> Document:
    return {"metadata": {"name": name}, "spec": {"type": "cluster", "resources": {"clusters": "1"}}}


async def test_each_step_of_a_request_is_an_event_for_its_tenant_and_for_no_other(site: Site) -> None:
    ben, other = await gated(site, "acme"), await gated(site, "other")
    path = "namespaces/acme/allocations"
    assert (await site.post(path, allocation("b", cpu=3), token=ben)).status == 201
    assert (await site.post(path, allocation("c", cpu=3), token=ben)).status == 201
    for name in ("b", "c"):
        reply = await site.post(f"{path}/{name}/approve", {"gate": "manual", "reason": "fine"})
        assert reply.status == 200, reply
    assert (await site.post(f"{path}/b/approve", {"gate": "quota"})).status == 200
    assert (await site.post(f"{path}/c/approve", {"gate": "quota"})).status == 403
    assert (await site.post(f"{path}/c/deny", {"gate": "quota", "reason": "no room"})).status == 200

    async def events(token: str) -> list[tuple[str, str, str, str]]:
        reply = await site.get("namespaces/acme/events", token=token)
        found = [] if reply.status == 404 else reply.body["items"]
        return [(one["involvedObject"]["name"], one["type"], one["reason"], one["message"]) for one in found]

    waiting = "awaiting approval at gate manual: an approver decides"
    passed = "gate manual approved by admin, next is gate quota: fine"
    full = "left pending at gate quota by admin: would exceed cpu by 2: limit 4, used 3, requested 3"
    assert await events(ben) == [
        ("b", "Normal", "AwaitingApproval", waiting),
        ("c", "Normal", "AwaitingApproval", waiting),
        ("b", "Normal", "GateApproved", passed),
        ("c", "Normal", "GateApproved", passed),
        ("b", "Normal", "Approved", "approved at gate quota by admin"),
        ("c", "Normal", "ApprovalNoted", full),
        ("c", "Warning", "Denied", "denied at gate quota by admin: no room"),
    ]
    assert await events(other) == []


async def test_growth_awaits_approval_too(site: Site) -> None:
    ben = await gated(site, "acme")
    path = "namespaces/acme/resourceclaims"
    assert (await site.post(path, claim("c"), token=ben)).status == 201
    for gate in ("manual", "quota"):
        assert (await site.post(f"{path}/c/approve", {"gate": gate})).status == 200
    reply = await site.patch(f"{path}/c", {"spec": {"resources": {"clusters": "2"}}}, token=ben)
    assert reply.status == 200, reply
    events = (await site.get("namespaces/acme/events", token=ben)).body["items"]
    assert [one["reason"] for one in events] == ["AwaitingApproval", "GateApproved", "Approved", "AwaitingApproval"]


async def test_the_metrics_show_requests_and_decisions(site: Site) -> None:
    ben = await gated(site, "acme")
    path = "namespaces/acme/resourceclaims"
    for name in ("c", "d"):
        await site.post(path, claim(name), token=ben)
    assert (await site.post(f"{path}/c/approve", {"gate": "manual"})).status == 200
    lines = (await site.get("/metrics")).body.splitlines()
    assert 'bursar_approval_requests{gate="manual"} 1.0' in lines
    assert 'bursar_approval_requests{gate="quota"} 1.0' in lines
    named = {line.partition("{")[0] for line in lines if line.startswith("bursar_approval_")}
    assert {
        "bursar_approval_oldest_seconds",
        "bursar_approval_unanswered_seconds",
        "bursar_approval_decisions_total",
        "bursar_approval_decision_seconds_bucket",
    } <= named


async def test_webhooks_may_name_the_types_of_requests(site: Site) -> None:
    types = [f"request.{word}" for word in ("approved", "denied", "expired", "ending", "pending")]
    body = {"name": "requests", "url": "https://hooks.example/x", "types": types}
    assert (await site.post("webhooks", body)).status == 201
    refused = await site.post("webhooks", {**body, "name": "more", "types": ["request.lost"]})
    assert refused.status == 400
    assert "request.pending" in refused.message
