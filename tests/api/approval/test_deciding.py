"""Decisions over HTTP: one or many, who may make them, and the answer to each that comes too late or is not allowed."""

from typing import Any

import pytest

from bursar.loops.housekeeping import finish_namespaces
from support.api.site import Document, Reply, Site, node

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAR = "2099-01-01T00:00:00Z"


async def gated(site: Site, *gates: str, **spec: Any) -> str:
    """A tenant whose requests pass gates, and its namespace of the same name."""
    tenant = await site.namespace()
    policy = {"gates": list(gates or ("manual",)), **spec.pop("approval", {})}
    assert (await site.patch(f"tenants/{tenant}", {"spec": {"approval": policy, **spec}})).status == 200
    return tenant


async def claim(site: Site, tenant: str, name: str = "c", *, token: str = "", **resources: Any) -> str:
    """A claim that awaits approval; its path."""
    token = token or await site.token("user", tenant=tenant, user="requester")
    body = {"metadata": {"name": name}, "spec": {"resources": resources or {"clusters": 1}}}
    where = f"namespaces/{tenant}/resourceclaims"
    made = await site.post(where, body, token=token)
    assert made.status == 201, made
    return f"{where}/{name}"


async def approval(site: Site, path: str) -> Document:
    found: Document = (await site.get(path)).body["status"]["approval"]
    return found


async def ann(site: Site, *tenants: str, gates: tuple[str, ...] = ("manual",)) -> str:
    return await site.token("approver", user="ann", tenants=list(tenants), gates=list(gates))


def item(tenant: str, name: str = "c", decision: str = "approve", **more: Any) -> Document:
    return {"kind": "ResourceClaim", "namespace": tenant, "name": name, "decision": decision, **more}


# Approvers.


async def test_an_approver_sees_and_decides_the_tenants_of_its_token_and_those_below(site: Site) -> None:
    above, other = await gated(site), await gated(site)
    below = site.name()
    made = await site.post(
        "tenants", {"metadata": {"name": below}, "spec": {"parent": above, "approval": {"gates": ["manual"]}}}
    )
    assert made.status == 201, made
    await site.namespace(tenant=below, name=below)
    token = await ann(site, above)
    for tenant in (above, below):
        path = await claim(site, tenant)
        assert (await site.get(path, token=token)).status == 200
        assert (await site.post(f"{path}/approve", {"reason": "fine"}, token=token)).status == 200
    hidden = await claim(site, other)
    absent = f"namespaces/{other}/resourceclaims/none"
    for path in (hidden, absent):
        for reply in (
            await site.get(path, token=token),
            await site.post(f"{path}/approve", {}, token=token),
            await site.post(f"{path}/deny", {}, token=token),
            await site.patch(f"{path}/approval", {"state": "approved"}, token=token),
        ):
            assert (reply.status, "not found" in reply.message) == (404, True), reply
    many = await site.post("approvals/decide", {"items": [item(other), item(other, "none")]}, token=token)
    assert [one["status"] for one in many.body["items"]] == [404, 404]
    assert (await site.get("approvals", token=token, tenant=other)).body["items"] == []
    assert (await approval(site, hidden))["state"] == "pending"


async def test_other_gates_are_forbidden(site: Site) -> None:
    tenant = await gated(site, "quota", "manual")
    path = await claim(site, tenant)
    token = await ann(site, tenant)
    for body in ({}, {"gate": "quota"}):
        refused = await site.post(f"{path}/approve", body, token=token)
        assert (refused.status, "may not decide gate 'quota'" in refused.message) == (403, True), refused
    waits = await site.post(f"{path}/approve", {"gate": "manual"}, token=token)
    assert (waits.status, "is decided after gate quota" in waits.message) == (409, True), waits
    unknown = await site.post(f"{path}/approve", {"gate": "external:unknown"})
    assert (unknown.status, "its gates are quota, manual" in unknown.message) == (422, True), unknown
    assert (await approval(site, path))["state"] == "pending"


async def test_a_token_without_gates_decides_nothing(site: Site) -> None:
    tenant = await gated(site)
    path = await claim(site, tenant)
    reader = await site.token("approver", user="prometheus", tenants=["*"], gates=[])
    assert (await site.get("/metrics", token=reader)).status == 200
    assert (await site.post(f"{path}/approve", {}, token=reader)).status == 403


async def test_an_approver_of_some_tenants_reads_nothing_of_the_whole(site: Site) -> None:
    token = await ann(site, await gated(site))
    for path in ("/metrics", "ledger", "ledger/verify", "webhooks"):
        assert (await site.get(path, token=token)).status == 403, path


async def test_a_later_tenant_of_the_name_is_another_tenant(site: Site) -> None:
    name = await gated(site)
    token = await ann(site, name)
    assert (await site.delete(f"namespaces/{name}")).status == 200
    await finish_namespaces(site.context.runtime)
    assert (await site.delete(f"tenants/{name}")).status == 200
    assert (
        await site.post("tenants", {"metadata": {"name": name}, "spec": {"approval": {"gates": ["manual"]}}})
    ).status == 201
    await site.namespace(tenant=name, name=name)
    path = await claim(site, name)
    assert (await site.post(f"{path}/approve", {}, token=token)).status == 404
    assert (await site.get("approvals", token=token)).body["items"] == []


async def test_nobody_approves_their_own_request_unless_the_policy_says_so(site: Site) -> None:
    tenant = await gated(site)
    own = await claim(site, tenant, token=await site.token("user", tenant=tenant, user="ann"))
    token = await ann(site, tenant)
    refused = await site.post(f"{own}/approve", {}, token=token)
    assert (refused.status, "nobody approves their own request" in refused.message) == (403, True)
    free = await gated(site, approval={"selfApproval": True})
    own = await claim(site, free, token=await site.token("user", tenant=free, user="ann"))
    assert (await site.post(f"{own}/approve", {}, token=await ann(site, free))).status == 200


# One decision.


async def test_a_decision_at_each_gate_in_order(site: Site) -> None:
    tenant = await gated(site, "quota", "manual", "external:budget")
    path = await claim(site, tenant)
    for gate in ("quota", "manual"):
        reply = await site.post(f"{path}/approve", {"gate": gate, "reason": f"{gate} is fine"})
        assert (reply.status, reply.body["status"]["approval"]["state"]) == (200, "pending"), reply
    done = await site.post(f"{path}/approve", {"until": FAR})
    found = done.body["status"]["approval"]
    assert (found["state"], found["until"], list(found["gates"])) == (
        "approved",
        FAR,
        ["quota", "manual", "external:budget"],
    )
    manual = found["gates"]["manual"]
    assert (manual["state"], manual["reason"], manual["by"]) == ("approved", "manual is fine", "admin")


async def test_a_patch_of_the_approval_approves_denies_or_notes(site: Site) -> None:
    tenant = await gated(site)
    path = await claim(site, tenant)
    noted = await site.patch(f"{path}/approval", {"reason": "not enough nodes available"})
    assert noted.body["status"]["message"].endswith("an approver decides: not enough nodes available")
    again = await site.patch(f"{path}/approval", {"state": "pending", "reason": "not enough nodes available"})
    assert again.version == noted.version, "the same note is no change"
    denied = await site.patch(f"{path}/approval", {"state": "denied", "reason": "no"})
    assert (denied.body["status"]["approval"]["state"], denied.body["status"]["approval"]["reason"]) == ("denied", "no")
    assert (await site.patch(f"{path}/approval", {"state": "approved"})).status == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"gates": ["manual"]}, "gates"),
        ({"until": "2020-01-01T00:00:00Z"}, "until"),
        ({"until": "tomorrow"}, "until"),
        ({"reason": "x" * 5000}, "reason"),
    ],
)
async def test_a_decision_that_is_wrong_is_refused_with_its_field(site: Site, body: Document, field: str) -> None:
    path = await claim(site, await gated(site))
    reply = await site.post(f"{path}/approve", body)
    assert (reply.status, field in reply.message) == (400, True), reply
    assert (await approval(site, path))["state"] == "pending"


async def test_only_an_approval_has_an_end(site: Site) -> None:
    path = await claim(site, await gated(site))
    assert (await site.post(f"{path}/deny", {"until": FAR})).status == 400
    assert (await site.patch(f"{path}/approval", {"until": FAR})).status == 400
    assert (await site.patch(f"{path}/approval", {"state": "maybe"})).status == 400


async def test_what_is_decided_is_answered_with_its_state(site: Site) -> None:
    tenant = await gated(site)
    path, token = await claim(site, tenant), await ann(site, tenant)
    assert (await site.post(f"{path}/approve", {}, token=token)).status == 200
    for verb in ("approve", "deny"):
        for body in ({}, {"gate": "manual"}):
            late = await site.post(f"{path}/{verb}", body, token=token)
            assert (late.status, late.body["details"]["code"]) == (409, "already_decided"), late
            assert "is approved already by ann" in late.message
    assert (await site.delete(path)).status == 200
    assert (await site.post(f"{path}/approve", {}, token=token)).status == 404
    free = await site.namespace()
    path = await claim(site, free)
    needless = await site.post(f"{path}/approve", {})
    assert (needless.status, "needs no approval" in needless.message) == (409, True)


async def test_a_decision_names_the_version_that_was_judged(site: Site) -> None:
    tenant = await gated(site)
    user = await site.token("user", tenant=tenant, user="bob")
    path = await claim(site, tenant, token=user, clusters=1)
    judged = (await site.get(path)).version
    assert (await site.patch(path, {"spec": {"resources": {"clusters": 100}}}, token=user)).status == 200
    for reply in (
        await site.post(f"{path}/approve", {"resourceVersion": judged}),
        await site.patch(f"{path}/approval", {"state": "approved", "resourceVersion": judged}),
    ):
        assert (reply.status, reply.body["details"]["code"]) == (409, "conflict"), reply
    many = await site.post("approvals/decide", {"items": [item(tenant, resourceVersion=judged)]})
    assert many.body["items"][0]["status"] == 409
    assert (await approval(site, path))["state"] == "pending"
    assert (await site.post(f"{path}/approve", {"resourceVersion": (await site.get(path)).version})).status == 200


async def test_a_dry_run_decides_nothing(site: Site) -> None:
    tenant = await gated(site, limits={"clusters": 1})
    path, wide = await claim(site, tenant), await claim(site, tenant, "wide", clusters=2)
    before = await site.state()
    tried = await site.post(f"{path}/approve", {}, dryRun="All")
    assert (tried.status, tried.body["status"]["approval"]["state"]) == (200, "approved")
    assert (await site.post(f"{wide}/approve", {}, dryRun="All")).status == 409
    many = await site.post("approvals/decide", {"items": [item(tenant), item(tenant, "wide")]}, dryRun="All")
    assert [one["status"] for one in many.body["items"]] == [200, 409]
    assert await site.state() == before


async def test_a_repeated_decision_has_the_first_answer(site: Site) -> None:
    tenant = await gated(site)
    path, token = await claim(site, tenant), await ann(site, tenant)
    headers = {"Idempotency-Key": site.name("decision")}
    first = await site.post(f"{path}/approve", {}, token=token, headers=headers)
    again = await site.post(f"{path}/approve", {}, token=token, headers=headers)
    assert (first.status, again.status, again.version) == (200, 200, first.version)
    assert (await site.post(f"{path}/approve", {}, token=token)).status == 409
    await site.delete(path)
    gone = await site.post(f"{path}/approve", {}, token=token, headers=headers)
    assert (gone.status, gone.version) == (200, first.version)


# Many decisions.


async def test_many_decisions_have_an_answer_each(site: Site) -> None:
    tenant = await gated(site, limits={"clusters": 2})
    for name in ("a", "b", "wide", "bad"):
        await claim(site, tenant, name, clusters=2 if name == "wide" else 1)
    reply = await site.post(
        "approvals/decide",
        {
            "items": [
                item(tenant, "a"),
                item(tenant, "wide"),
                item(tenant, "bad", "deny", reason="no"),
                item(tenant, "b", kind="resourceclaims"),
                item(tenant, "a"),
                item(tenant, "none"),
                item(tenant, "b", uid="claim-other"),
                item(tenant, "wide", "note", reason="later"),
            ]
        },
    )
    found = reply.body["items"]
    assert [one["status"] for one in found] == [200, 409, 200, 200, 409, 404, 404, 200]
    assert [one.get("state") for one in found[:4]] == ["approved", None, "denied", "approved"]
    assert (found[1]["refusal"]["details"]["code"], found[1]["name"]) == ("quota_exceeded", "wide")
    assert found[4]["refusal"]["details"]["code"] == "already_decided"
    assert (await approval(site, f"namespaces/{tenant}/resourceclaims/wide"))["reason"] == "later"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "between 1 and 500"),
        ([{"kind": "ResourceClaim", "name": "x", "decision": "approve"}] * 501, "between 1 and 500"),
        ([{"kind": "Tenant", "name": "x", "decision": "approve"}], "items[0].kind"),
        ([{"kind": "Job", "name": "x", "decision": "maybe"}], "items[0].decision"),
        ([{"kind": "Job", "name": "x", "decision": "approve", "because": "x"}], "because"),
        ([{"kind": "Job", "name": "x", "decision": "deny", "until": FAR}], "items[0].until"),
    ],
)
async def test_many_decisions_that_are_wrong_are_refused_as_a_whole(
    site: Site, items: list[Document], message: str
) -> None:
    reply = await site.post("approvals/decide", {"items": items})
    assert (reply.status, message in reply.message) == (400, True), reply


async def test_jobs_that_would_create_too_many_allocations_at_once_are_left_for_another_request(site: Site) -> None:
    tenant = await gated(site)
    work, user = {"resources": {"requests": {"cpu": "1"}}}, await site.token("user", tenant=tenant, user="requester")
    for name, width in (("a", 6000), ("b", 6000), ("c", 1)):
        spec = {"parallelism": width, "completions": width, "template": {"spec": work}}
        made = await site.post(f"namespaces/{tenant}/jobs", {"metadata": {"name": name}, "spec": spec}, token=user)
        assert made.status == 201, made
    items = [item(tenant, name, kind="Job") for name in ("a", "b", "c")]
    reply = await site.post("approvals/decide", {"items": items}, dryRun="All")
    assert [one["status"] for one in reply.body["items"]] == [200, 422, 200]


# Lists.


async def test_the_list_pages_through_all_kinds_oldest_first(site: Site) -> None:
    tenant, other = await gated(site, "quota", "manual"), await gated(site)
    for name in ("a", "b", "c"):
        await claim(site, tenant, name)
    work = {"metadata": {"name": "w"}, "spec": {"resources": {"requests": {"cpu": "1"}}}}
    await site.post(f"namespaces/{tenant}/allocations", work)
    await claim(site, other)
    assert (await site.post(f"namespaces/{tenant}/resourceclaims/b/approve", {"gate": "quota"})).status == 200

    async def listed(**query: str) -> list[str]:
        names: list[str] = []
        token = ""
        while True:
            reply = await site.get("approvals", limit="2", **query, **({"continue": token} if token else {}))
            assert reply.status == 200, reply
            names += [f"{one['kind']}/{one['name']}" for one in reply.body["items"]]
            token = reply.body["metadata"].get("continue", "")
            if not token:
                return names

    assert sorted(await listed(tenant=tenant)) == [
        "Allocation/w",
        "ResourceClaim/a",
        "ResourceClaim/b",
        "ResourceClaim/c",
    ]
    assert await listed(tenant=tenant, gate="manual") == ["ResourceClaim/b"]
    assert await listed(tenant=other) == ["ResourceClaim/c"]
    for query in ({"limit": "0"}, {"limit": "x"}, {"continue": "x"}, {"limit": "501"}):
        assert (await site.get("approvals", **query)).status == 400, query


async def test_tenants_list_their_own_requests_alone(site: Site) -> None:
    tenant, other = await gated(site), await gated(site)
    await claim(site, tenant)
    await claim(site, other)
    user = await site.token("user", tenant=tenant, user="ann")
    listed = (await site.get("approvals", token=user)).body["items"]
    assert {one["tenant"] for one in listed} == {tenant}
    assert (await site.get("approvals", token=user, tenant=other)).body["items"] == []
    assert listed[0]["object"]["status"]["approval"]["state"] == "pending"


# The view of a requester, and finalizers.


async def test_work_that_awaits_approval_says_so_everywhere(site: Site) -> None:
    await node(site)
    tenant = await gated(site)
    user = await site.token("user", tenant=tenant, user="ann")
    body = {"metadata": {"name": "w"}, "spec": {"resources": {"requests": {"cpu": "1"}}}}
    made = await site.post(f"namespaces/{tenant}/allocations", body, token=user)
    status = made.body["status"]
    assert (status["phase"], status["reason"], "queuePosition" in status) == ("Pending", "awaiting_approval", False)
    job = {"metadata": {"name": "j"}, "spec": {"template": {"spec": body["spec"]}}}
    assert (await site.post(f"namespaces/{tenant}/jobs", job, token=user)).status == 201
    for path in ("allocations/w", "jobs/j"):
        told = await site.get(f"namespaces/{tenant}/{path}/explain", token=user)
        assert (told.status, told.body["reason"]["code"]) == (200, "awaiting_approval"), told
        assert "awaiting approval at gate manual: an approver decides; pending since" in told.body["reason"]["message"]
    assert (await site.get(f"namespaces/{tenant}/allocations", token=user)).names == ["w"]


async def test_only_operators_and_administrators_change_what_holds_a_claim(site: Site) -> None:
    tenant = await gated(site)
    user = await site.token("user", tenant=tenant, user="ann")
    boss = await site.token("tenant-admin", tenant=tenant, user="boss")
    operator = await site.token("service", user="operator")
    path = await claim(site, tenant, token=user)
    await site.post(f"{path}/approve", {})
    hold, free = {"metadata": {"finalizers": ["example.com/op"]}}, {"metadata": {"finalizers": None}}
    for token in (user, boss):
        assert (await site.patch(path, hold, token=token)).status == 403
    born = {"metadata": {"name": "born", **hold["metadata"]}, "spec": {"resources": {"clusters": 1}}}
    assert (await site.post(f"namespaces/{tenant}/resourceclaims", born, token=user)).status == 403
    assert (await site.patch(path, hold, token=operator)).status == 200
    assert (await site.patch(path, {"metadata": {"labels": {"seen": "yes"}}}, token=user)).status == 200

    async def usage() -> str:
        return str((await site.get(f"tenants/{tenant}/quotas")).body["quotas"]["clusters"]["accepted"])

    assert (await site.delete(path, token=user)).status == 200
    for token in (user, boss):
        refused = await site.patch(path, free, token=token)
        assert (refused.status, "for the operators" in refused.message) == (403, True), refused
    assert await usage() == "1"
    assert (await site.patch(path, free, token=operator)).status == 200
    assert (await usage(), (await site.get(path)).status) == ("0", 404)


async def test_a_policy_that_is_wrong_is_refused(site: Site) -> None:
    for policy in (
        {"gates": ["later"]},
        {"gates": ["manual", "manual"]},
        {"gates": ["external:"]},
        {"gates": ["manual"], "kinds": ["Node"]},
        {"gates": ["manual"], "pendingSeconds": -1},
        {"gates": ["manual"], "onEnd": "stop"},
    ):
        body = {"metadata": {"name": site.name()}, "spec": {"approval": policy}}
        assert (await site.post("tenants", body)).status == 400, policy
    both = {"metadata": {"name": site.name()}, "spec": {"approval": {"gates": []}, "approvalPolicy": "manual"}}
    assert (await site.post("tenants", both)).status == 400
    tier = site.name("tier")
    assert (
        await site.post("tiers", {"metadata": {"name": tier}, "spec": {"approval": {"gates": ["manual"]}}})
    ).status == 201
    tenant = await site.namespace()
    assert (await site.patch(f"tenants/{tenant}", {"spec": {"tier": tier}})).status == 200
    reply: Reply = await site.get(await claim(site, tenant))
    assert reply.body["status"]["approval"]["state"] == "pending"
    assert (await site.patch(f"tenants/{tenant}", {"spec": {"approvalPolicy": "none"}})).status == 200
    assert "approval" not in (await site.get(await claim(site, tenant, "free"))).body["status"]
