"""The quota workflow of the fulfilment service: its user stories, its numbered steps and its API, in their words.

A tenant requests clusters and bare metal hosts by ResourceClaims; the quota service is a token of role approver for the
gate `quota` alone.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from support.api.site import Document, Reply, Site, eventually
from support.api.watches import watching

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Provider:
    """A service provider with one tenant, and the tokens of all who take part."""

    site: Site
    tenant: str
    user: str
    quota_service: str
    operator: str

    @property
    def claims(self) -> str:
        return f"namespaces/{self.tenant}/resourceclaims"

    async def request(self, name: str, **resources: Any) -> Reply:
        named = {key.replace("_", "-"): value for key, value in resources.items()}
        body = {"metadata": {"name": name}, "spec": {"type": "cluster", "resources": named}}
        return await self.site.post(self.claims, body, token=self.user)

    async def seen(self, name: str) -> Document:
        """The status of a claim as its tenant sees it."""
        reply = await self.site.get(f"{self.claims}/{name}", token=self.user)
        assert reply.status == 200, reply
        found: Document = reply.body["status"]
        return found

    async def decide(self, name: str, verb: str = "approve", token: str = "", **body: Any) -> Reply:
        return await self.site.post(f"{self.claims}/{name}/{verb}", body, token=token or self.quota_service)


async def provider(site: Site, **limits: int) -> Provider:
    tenant = await site.namespace()
    spec = {"approval": {"gates": ["quota"]}, "limits": {key.replace("_", "-"): one for key, one in limits.items()}}
    assert (await site.patch(f"tenants/{tenant}", {"spec": spec})).status == 200
    return Provider(
        site,
        tenant,
        await site.token("user", tenant=tenant, user="ann"),
        await site.token("approver", user="quota-service", tenants=["*"], gates=["quota"]),
        await site.token("service", user="operator"),
    )


# The workflow.


async def test_the_steps_of_the_workflow(site: Site) -> None:
    one = await provider(site, clusters=1, baremetal_hosts=20)

    # 1. A tenant requests a new cluster using the fulfillment API.
    made = await one.request("prod", clusters=1, baremetal_hosts=18)
    assert made.status == 201, made

    # 2. The request is recorded, but has not yet been approved, so the service takes no further action at this time.
    status = await one.seen("prod")
    assert (status["approval"]["state"], status["reason"]) == ("pending", "awaiting_approval")
    assert "granted" not in status
    approved = {"fieldSelector": "status.approval.state=approved"}
    assert (await site.get(one.claims, token=one.operator, **approved)).names == []

    # 3. The quota service sees the pending request and looks up the tenant's resource quotas on "number of clusters"
    # and "number of bare metal hosts".
    pending = await site.get("approvals", token=one.quota_service, tenant=one.tenant)
    (waiting,) = pending.body["items"]
    assert (waiting["kind"], waiting["name"], waiting["gate"]) == ("ResourceClaim", "prod", "quota")
    quotas = (await site.get(f"tenants/{one.tenant}/quotas", token=one.quota_service)).body["quotas"]
    assert {name: (quotas[name]["limit"], quotas[name]["accepted"]) for name in ("clusters", "baremetal-hosts")} == {
        "clusters": ("1", "0"),
        "baremetal-hosts": ("20", "0"),
    }

    # 4. If the new cluster would not violate these quotas, the request is approved. At this point the service will pass
    # the request on to the operator, and the cluster will be created.
    assert (await one.decide("prod")).status == 200
    (found,) = (await site.get(one.claims, token=one.operator, **approved)).body["items"]
    assert found["status"]["granted"] == {"resources": {"baremetal-hosts": "18", "clusters": "1"}}
    created = {"status": {"state": "Ready", "externalId": "cluster-17"}}
    assert (await site.patch(f"{one.claims}/prod/status", created, token=one.operator)).status == 200
    assert (await one.seen("prod"))["externalId"] == "cluster-17"

    # And if it would violate them, the request is annotated with information about why it was not approved.
    await one.request("more", baremetal_hosts=5)
    refused = await one.decide("more")
    assert (refused.status, refused.body["details"]["code"]) == (409, "quota_exceeded")
    approval = (await one.seen("more"))["approval"]
    assert (approval["state"], approval["reason"]) == (
        "pending",
        "would exceed baremetal-hosts by 3: limit 20, used 18, requested 5",
    )


async def test_the_operator_sees_an_approved_request_in_its_watch(site: Site) -> None:
    one = await provider(site)
    await one.request("prod", clusters=1)
    async with watching(site, one.claims, fieldSelector="status.approval.state=approved") as events:
        await one.decide("prod")
        event = await anext(events)
    assert (event["type"], event["object"]["status"]["granted"]["resources"]) == ("ADDED", {"clusters": "1"})


# User stories.


async def test_as_a_service_provider_i_create_modify_and_delete_quotas_for_tenant_organizations(site: Site) -> None:
    one = await provider(site)
    await one.request("a", clusters=3)
    for limits, status in (({"clusters": 2}, 409), ({"clusters": 3}, 200)):
        assert (await site.patch(f"tenants/{one.tenant}", {"spec": {"limits": limits}})).status == 200
        assert (await one.decide("a")).status == status
    await one.request("b", clusters=50)
    assert (await one.decide("b")).status == 409
    assert (await site.patch(f"tenants/{one.tenant}", {"spec": {"limits": {"clusters": None}}})).status == 200
    assert (await one.decide("b")).status == 200
    for token in (one.user, one.quota_service):
        change = {"spec": {"limits": {"clusters": 99}}}
        assert (await site.patch(f"tenants/{one.tenant}", change, token=token)).status == 403


async def test_as_a_service_provider_i_view_quota_limits_and_usage_for_tenant_organizations(site: Site) -> None:
    one = await provider(site, clusters=4)
    await one.request("a", clusters=3)
    await one.decide("a")
    reply = await site.get(f"tenants/{one.tenant}/quotas")
    assert (reply.body["quotas"]["clusters"]["limit"], reply.body["quotas"]["clusters"]["accepted"]) == ("4", "3")


async def test_as_a_tenant_i_view_the_limits_and_utilization_that_apply_to_my_organization(site: Site) -> None:
    one, other = await provider(site, clusters=4), await provider(site)
    await one.request("a", clusters=1)
    await one.decide("a")
    mine = await site.get(f"tenants/{one.tenant}/quotas", token=one.user)
    assert mine.body["quotas"]["clusters"]["utilization"] == 0.25
    assert (await site.get(f"tenants/{one.tenant}/quotas", token=other.user)).status == 404


async def test_as_a_tenant_i_know_when_an_operation_fails_due_to_quota_enforcement(site: Site) -> None:
    one = await provider(site, clusters=0)
    await one.request("a", clusters=1)
    await one.decide("a")
    numbers = "would exceed max_clusters by 1: limit 0, used 0, requested 1"
    status = await one.seen("a")
    assert status["message"] == f"awaiting approval at gate quota: the quota service decides: {numbers}"
    assert (await site.patch(f"tenants/{one.tenant}", {"spec": {"approval": {"gates": []}}})).status == 200
    refused = await one.request("b", clusters=1)
    assert (refused.status, refused.body["details"]["code"]) == (409, "quota_exceeded")
    assert (refused.body["details"]["limit"], refused.body["details"]["requested_delta"]) == ("0", "1")


# API extensions.


async def test_a_key_that_nobody_has_heard_of_is_limited_without_code(site: Site) -> None:
    one = await provider(site, quantum_annealers=1)
    await one.request("a", quantum_annealers=2)
    refused = await one.decide("a")
    assert refused.body["details"]["dimension"] == "quantum-annealers"


async def test_all_resources_that_can_be_requested_have_an_approval(site: Site) -> None:
    one = await provider(site)
    work = {"resources": {"requests": {"cpu": "1"}}}
    for plural, spec in (
        ("allocations", work),
        ("jobs", {"template": {"spec": work}}),
        ("resourceclaims", {"resources": {"clusters": 1}}),
    ):
        where = f"namespaces/{one.tenant}/{plural}"
        made = await site.post(where, {"metadata": {"name": "x"}, "spec": spec}, token=one.user)
        assert (made.status, made.body["status"]["approval"]["state"]) == (201, "pending"), made
        for selector in ("status.approval.state=pending", "status.approval.gate=quota"):
            assert (await site.get(where, fieldSelector=selector, token=one.user)).names == ["x"]
        assert (await site.get(where, fieldSelector="status.approval.state!=pending", token=one.user)).names == []
        assert (await site.post(f"{where}/x/approve", {}, token=one.quota_service)).status == 200


async def test_changing_the_approval_is_privileged(site: Site) -> None:
    one = await provider(site)
    boss = await site.token("tenant-admin", tenant=one.tenant, user="boss")
    viewer = await site.token("viewer", tenant=one.tenant, user="eve")
    await one.request("a", clusters=1)
    before = await site.state()
    forged = {"status": {"approval": {"state": "approved"}}}
    for token in (one.user, boss, viewer, one.operator):
        for verb in ("approve", "deny"):
            assert (await one.decide("a", verb, token=token)).status == 403
        assert (await site.patch(f"{one.claims}/a/approval", {"state": "approved"}, token=token)).status == 403
        item = {"kind": "ResourceClaim", "namespace": one.tenant, "name": "a", "decision": "approve"}
        many = await site.post("approvals/decide", {"items": [item]}, token=token)
        # Administrators of tenants decide on requests for limits of the tenants below theirs, and on nothing else.
        assert 403 in (many.status, (many.body.get("items") or [{}])[0].get("status")), many
    for token in (one.user, boss, viewer):
        assert (await site.patch(f"{one.claims}/a/status", forged, token=token)).status == 403
        await site.patch(f"{one.claims}/a", forged, token=token)
    assert await site.state() == before
    born = {"metadata": {"name": "b"}, "spec": {"resources": {"clusters": 1}}, **forged}
    assert (await site.post(one.claims, born, token=one.user)).body["status"]["approval"]["state"] == "pending"
    assert (await site.patch(f"{one.claims}/a/status", forged, token=one.operator)).status == 200
    assert (await one.seen("a"))["approval"]["state"] == "pending"


async def test_decisions_are_events_with_their_reason(site: Site) -> None:
    one = await provider(site)
    await one.request("a", clusters=1)
    await one.decide("a", "deny", reason="cluster must be upgraded before adding nodes")

    async def told() -> bool:
        events = (await site.get(f"namespaces/{one.tenant}/events", token=one.user)).body["items"]
        return any("cluster must be upgraded" in event["message"] for event in events)

    await eventually(told)
