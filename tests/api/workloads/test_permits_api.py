"""Who may ask for what over the API, and that nobody is told of strangers."""

from typing import Any

import pytest
import structlog.testing

from bursar.core.objects.pending_reason import PendingReason, ReasonCode
from bursar.core.scheduling.explain.explain_types import Ahead, ExplainAnswer
from bursar.core.values.redaction import LAST_APPLIED
from support.api.site import APPLY, STRATEGIC, Site, allocation, node_body
from support.api.watches import newest, take, watching

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"


async def user_of(site: Site, role: str = "user") -> tuple[str, str]:
    """A namespace of a tenant of its own, and somebody of that tenant."""
    team = await site.namespace()
    return team, await site.token(role, tenant=team, user="ann")


async def submitted(site: Site, team: str, name: str, token: str, **spec: Any) -> int:
    made = await site.post(f"namespaces/{team}/allocations", allocation(name, spec=spec, gpu=1), token=token)
    return made.status


# Priorities.


@pytest.mark.parametrize("role", ["user", "tenant-admin"])
async def test_how_urgent_people_of_a_tenant_may_be(site: Site, role: str) -> None:
    team, token = await user_of(site, role)
    assert await submitted(site, team, "a", token, priority=200, priorityClass="high-priority") == 201
    assert await submitted(site, team, "b", token, priority=1001) == 403
    assert await submitted(site, team, "c", token, priorityClass="system-critical") == 403
    assert await submitted(site, team, "c", site.admin, priorityClass="system-critical") == 201
    shown = (await site.get(f"namespaces/{team}/allocations/c", token=token)).body
    assert shown["status"]["permittedBy"] == "admin"


async def test_jobs_are_judged_as_their_allocations_are(site: Site) -> None:
    team, token = await user_of(site)
    template = {"spec": {"resources": {"requests": {"cpu": "1"}}}}
    for number, (spec, status) in enumerate([
        ({"priority": 1000, "template": template}, 201),
        ({"priority": 1001, "template": template}, 403),
        ({"template": {"spec": {**template["spec"], "priorityClass": "system-critical"}}}, 403),
    ]):  # fmt: skip
        body = {"kind": "Job", "metadata": {"name": f"job-{number}"}, "spec": spec}
        assert (await site.post(f"namespaces/{team}/jobs", body, token=token)).status == status


async def test_what_may_not_be_submitted_is_not_simulated_either(site: Site) -> None:
    team, token = await user_of(site)
    body = allocation("x", spec={"priority": 5000}, gpu=1)
    assert (await site.post(f"namespaces/{team}/allocations/simulate", body, token=token)).status == 403


# Tolerations.


async def test_reserved_taints_are_tolerated_where_that_was_granted(site: Site) -> None:
    team, token = await user_of(site)
    mine = {"tolerations": [{"key": "tenant", "operator": "Equal", "value": team}]}
    free = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}
    assert await submitted(site, team, "a", token, scheduling=free) == 201
    assert await submitted(site, team, "b", token, scheduling={"tolerations": [{"operator": "Exists"}]}) == 201
    assert await submitted(site, team, "c", token, scheduling=mine) == 403
    granted = await site.patch(f"tenants/{team}", {"spec": {"tolerations": mine["tolerations"]}})
    assert granted.status == 200, granted
    assert await submitted(site, team, "c", token, scheduling=mine) == 201


# Parts of devices.


async def test_too_small_a_part_of_a_device_is_refused_with_the_least(site: Site) -> None:
    team, token = await user_of(site)
    body = allocation("a", spec={"resources": {"requests": {GPU: "0.01"}}})
    refused = await site.post(f"namespaces/{team}/allocations", body, token=token)
    assert refused.status == 400
    assert "0.1" in refused.message


# Changing what is pending.


@pytest.mark.parametrize("media", ["merge", "strategic", "apply", "put"])
async def test_every_way_to_change_what_is_pending(site: Site, media: str) -> None:
    team, token = await user_of(site)
    assert await submitted(site, team, "a", token, priority=1) == 201
    path = f"namespaces/{team}/allocations/a"
    before = (await site.get(path, token=token)).body
    wanted = {"spec": {"priority": 7, "ttl": "1h"}}
    match media:
        case "merge":
            reply = await site.patch(path, wanted, token=token)
        case "strategic":
            reply = await site.patch(path, wanted, STRATEGIC, token=token)
        case "apply":
            whole = {"apiVersion": before["apiVersion"], "kind": "Allocation", "metadata": {"name": "a"}, **wanted}
            reply = await site.patch(path, whole, APPLY, token=token, fieldManager="me")
        case _:
            reply = await site.put(path, {**before, "spec": {**before["spec"], **wanted["spec"]}}, token=token)
    assert reply.status == 200, reply
    assert (reply.body["spec"]["priority"], reply.body["spec"]["ttl"]) == (7, "1h")
    assert reply.body["metadata"]["creationTimestamp"] == before["metadata"]["creationTimestamp"]
    assert (await site.patch(path, {"spec": {"priority": 7000}}, token=token)).status == 403
    refused = await site.patch(path, {"spec": {"exclusive": True}}, token=token)
    assert refused.status == 422
    assert "priorityClass" in refused.message


# Whose figures are told.


async def test_a_childs_user_is_not_told_the_parents_figures(site: Site) -> None:
    parent, child = await site.namespace(), site.name("child")
    await site.patch(f"tenants/{parent}", {"spec": {"limits": {"allocations": 6}}})
    made = await site.post("tenants", {"kind": "Tenant", "metadata": {"name": child}, "spec": {"parent": parent}})
    assert made.status == 201, made
    await site.namespace(child, child)
    user = await site.token("user", tenant=child, user="kim")
    above = await site.token("tenant-admin", tenant=parent, user="ann")
    for number in range(6):
        assert await submitted(site, parent, f"a{number}", site.admin) == 201
    path = f"namespaces/{child}/allocations"
    refused = await site.post(path, allocation("b", gpu=1), token=user)
    assert refused.status == 403, refused
    told = str(refused.body)
    assert parent not in told
    assert "currentUsage" not in told
    assert "limit above this tenant" in refused.message
    seen = await site.post(path, allocation("b", gpu=1), token=above)
    assert f'tenant "{parent}"' in seen.message


async def test_what_waits_is_explained_without_strangers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader tells all it knows; what is answered depends on who asks."""
    team, token = await user_of(site)
    parent = site.name("above")
    assert await submitted(site, team, "a", token) == 201
    uid = (await site.get(f"namespaces/{team}/allocations/a")).body["metadata"]["uid"]
    short = PendingReason(ReasonCode.QUOTA_EXCEEDED, limits=((f"tenant:{parent}", GPU, 6000, 4000, 3000),))
    everybody, own = Ahead(9, {GPU: 72_000}), Ahead(1, {GPU: 1000})
    found = ExplainAnswer(uid, short, (short,), "default", 4, 10, everybody, own)

    async def explained(_: str) -> ExplainAnswer:
        return found

    monkeypatch.setattr(site.context.leader_queries, "explain", explained)
    for asking, sees in ((token, False), (site.admin, True)):
        shown = (await site.get(f"namespaces/{team}/allocations/a/explain", token=asking)).body
        assert shown["queuePosition"] == 4
        assert (parent in str(shown)) is sees
        assert ("overallPosition" in shown) is sees
        assert shown["ahead"]["allocations"] == (9 if sees else 1)
        assert shown["ahead"]["resources"] == {GPU: "72" if sees else "1"}


async def test_who_is_granted_nodes_and_classes_is_told_to_those_who_may_know_of_them(site: Site) -> None:
    """Users of `mine` see their own tenant, and nothing of `theirs`; the node of `theirs` is nobody else's business."""
    mine, user = await user_of(site)
    theirs, stranger = await user_of(site)
    child = site.name("child")
    made = await site.post("tenants", {"kind": "Tenant", "metadata": {"name": child}, "spec": {"parent": mine}})
    assert made.status == 201, made
    below = await site.token("user", tenant=child, user="kim")
    for name, tenants in (
        (only := site.name("only"), [theirs]),
        (both := site.name("both"), [mine, theirs]),
        (free := site.name("free"), []),
    ):
        body = node_body(name)
        body["spec"]["tenants"] = tenants
        body["metadata"]["annotations"] = {LAST_APPLIED: str(tenants)}
        token = (await site.post("nodes", body)).body["status"]["token"]
        assert (await site.patch(f"nodes/{name}/status", {"status": {"used": {"cpu": "3"}}}, token=token)).status == 200
        own = (await site.get(f"nodes/{name}", token=token)).body
        assert own["spec"].get("tenants", []) == tenants, "a node knows whom it is for"
    granted = site.name("class")
    body = {"kind": "PriorityClass", "metadata": {"name": granted}, "value": 9, "allowedTenants": [mine, theirs]}
    assert (await site.post("priorityclasses", body)).status == 201

    async def told(path: str, name: str, token: str) -> list[Any]:
        """The object as every way of reading shows it."""
        listed = (await site.get(path, token=token)).body["items"]
        async with watching(site, path, token) as events:
            while (event := (await take(events, 1))[0])["object"]["metadata"]["name"] != name:
                pass
        async with watching(site, path, token, resourceVersion=await newest(site)) as events:
            marked = {"metadata": {"annotations": {"mark": site.name("mark")}}}
            assert (await site.patch(f"{path}/{name}", marked)).status == 200
            (change,) = await take(events, 1)
        return [
            (await site.get(f"{path}/{name}", token=token)).body,
            next(one for one in listed if one["metadata"]["name"] == name), event["object"], change["object"],
        ]  # fmt: skip

    for token, name, names, figures in (
        (user, only, ["<hidden>"], False), (user, both, [mine, "<hidden>"], True), (user, free, [], True),
        (stranger, only, [theirs], True), (below, both, ["<hidden>"], True), (site.admin, only, [theirs], True),
    ):  # fmt: skip
        for shown in await told("nodes", name, token):
            assert shown["spec"].get("tenants", []) == names
            assert [one in shown["status"] for one in ("allocated", "used")] == [figures] * 2
            assert (LAST_APPLIED in shown["metadata"]["annotations"]) is ("<hidden>" not in names)
    for token, names in ((user, [mine, "<hidden>"]), (below, ["<hidden>"]), (site.admin, [mine, theirs])):
        for shown in await told("priorityclasses", granted, token):
            assert shown["allowedTenants"] == names
    accept = {"accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    table = await site.get(f"nodes/{only}", token=user, headers=accept, includeObject="Object")
    assert "?/8" in str(table.body)
    assert theirs not in str(table.body)


# Nodes.


async def test_a_nodes_own_word_is_capped_by_what_it_was_registered_with(site: Site) -> None:
    name = site.name("worker")
    body = node_body(name)
    body["spec"] = {"capacity": {"cpu": "4", GPU: "2"}}
    token = (await site.post("nodes", body)).body["status"]["token"]
    offers = {"cpu": "100000", GPU: "999", "example.com/fpga": "8"}
    said = {"status": {"capacity": offers, "allocatable": offers}}
    answered = await site.patch(f"nodes/{name}/status", said, token=token)
    assert answered.status == 200, answered
    for part in ("capacity", "allocatable"):
        assert answered.body["status"][part] == {"cpu": "4", GPU: "2"}
    less = await site.patch(f"nodes/{name}/status", {"status": {"allocatable": {GPU: "1"}}}, token=token)
    assert less.body["status"]["allocatable"] == {"cpu": "4", GPU: "1"}
    admin = await site.patch(f"nodes/{name}/status", said)
    assert admin.body["status"]["allocatable"][GPU] == "999"


async def test_a_node_that_offers_more_than_before_is_told_of(site: Site) -> None:
    name = site.name("worker")
    body = node_body(name)
    body["spec"] = {}
    token = (await site.post("nodes", body)).body["status"]["token"]
    path = f"nodes/{name}/status"
    with structlog.testing.capture_logs() as logs:
        await site.patch(path, {"status": {"allocatable": {GPU: "2"}}}, token=token)
        assert not [one for one in logs if one["event"] == "capacity_rose"]
        await site.patch(path, {"status": {"allocatable": {GPU: "999"}}}, token=token)
    (told,) = [one for one in logs if one["event"] == "capacity_rose"]
    assert (told["node"], told["before"], told["now"]) == (name, "2", "999")
