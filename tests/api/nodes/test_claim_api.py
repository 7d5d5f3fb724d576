"""Claiming nodes over the API: who may, who is told what, and what stands in the audit."""

import asyncio
from typing import Any

import pytest

from bursar.loops.housekeeping import finish_namespaces
from support.api.site import TABLE, Site, allocation
from support.runtime.runtime import bind, node

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def people(site: Site) -> tuple[str, dict[str, str]]:
    """A tenant, and the tokens of those in it and beside it."""
    team, other = await site.namespace(), await site.namespace()
    await site.patch("settings/system", {"spec": {"limits": {"sensitive_pool_size": "100"}}})
    return team, {
        "ann": await site.token("user", tenant=team, user="ann"),
        "bob": await site.token("user", tenant=team, user="bob"),
        "boss": await site.token("tenant-admin", tenant=team, user="boss"),
        "viewer": await site.token("viewer", tenant=team, user="viewer"),
        "eve": await site.token("user", tenant=other, user="eve"),
    }


async def new_node(site: Site) -> str:
    name = site.name("n")
    await node(site.context.runtime, name, gpu=4)
    return name


async def test_a_node_is_claimed_released_and_wiped(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    done = await site.post(f"nodes/{name}/claim", {"reason": "study 42"}, token=who["ann"])
    assert (done.status, done.body["status"]["claim"]["state"]) == (200, "Claimed")
    table = (await site.get(f"nodes/{name}", headers={"accept": TABLE})).body
    assert table["rows"][0]["cells"][1] == "Ready,Claimed"
    again = await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
    assert (again.status, again.body["status"]["claim"]) == (200, done.body["status"]["claim"])
    back = await site.post(f"nodes/{name}/release", {"reason": "done"}, token=who["ann"])
    assert (back.status, back.body["status"]["claim"]["state"]) == (200, "Wiping")
    assert (await site.post(f"nodes/{name}/wiped", {"reason": "new disks"}, token=who["ann"])).status == 403
    wiped = await site.post(f"nodes/{name}/wiped", {"reason": "new disks"})
    assert (wiped.status, "claim" in wiped.body["status"]) == (200, False)
    events = (await site.get("events", fieldSelector=f"involvedObject.name={name}")).body["items"]
    assert [one["message"] for one in events][-3:] == [
        f"claim by user:{team}/ann: study 42",
        f"release by user:{team}/ann: done",
        "wiped by user:admin: new disks",
    ]


async def test_only_their_own_tenant_learns_who_holds_a_node(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    await site.post(f"nodes/{name}/claim", {"reason": "study 42"}, token=who["ann"])
    colleague = await site.post(f"nodes/{name}/claim", {}, token=who["bob"])
    assert (colleague.status, f"is claimed by {team}/ann since" in colleague.message) == (409, True)
    stranger = await site.post(f"nodes/{name}/claim", {}, token=who["eve"])
    assert (stranger.status, stranger.message) == (409, f"node {name} is claimed by somebody else")
    for reply in await asyncio.gather(
        site.get(f"nodes/{name}", token=who["eve"]),
        site.get("nodes", token=who["eve"]),
        site.get("claims", token=who["eve"]),
        site.get("events", fieldSelector=f"involvedObject.name={name}", token=who["eve"]),
        site.get("events", token=who["eve"]),
    ):
        assert reply.status == 200
        assert team not in str(reply.body)
        assert "study 42" not in str(reply.body)
    events = (await site.get("events", fieldSelector=f"involvedObject.name={name}", token=who["bob"])).body["items"]
    assert any("claim by" in one["message"] for one in events)


async def test_what_an_administrator_claims_for_somebody_is_not_told_to_a_tenant_of_their_name(site: Site) -> None:
    team, _ = await people(site)
    name = await new_node(site)
    await site.post("tenants", {"metadata": {"name": "admin"}, "spec": {}})
    namesake = await site.token("tenant-admin", tenant="admin", user="mallory")
    await site.post(f"nodes/{name}/claim", {"user": f"{team}/ann"})
    events = (await site.get("events", fieldSelector=f"involvedObject.name={name}", token=namesake)).body["items"]
    assert team not in str(events)


async def test_the_list_shows_whose_claims_one_may_know_and_the_pool(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    await site.post(f"nodes/{name}/claim", {"reason": "study 42"}, token=who["ann"])
    for reader in ("ann", "bob", "boss", "viewer"):
        shown = (await site.get("claims", token=who[reader])).body
        (item,) = shown["items"]
        assert (item["node"], item["user"], item["state"], item["reason"]) == (
            name,
            f"{team}/ann",
            "Claimed",
            "study 42",
        )
    strange = (await site.get("claims", token=who["eve"])).body
    assert strange["items"] == []
    assert strange["pool"]["size"] == 100
    assert strange["pool"]["claimed"] >= 1


async def test_a_claim_beyond_the_pool_is_refused_with_its_numbers(site: Site) -> None:
    _, who = await people(site)
    name = await new_node(site)
    claimed = (await site.get("claims")).body["pool"]["claimed"]
    for size, verb in ((0, "no nodes may be claimed"), (claimed, "would exceed")):
        await site.patch("settings/system", {"spec": {"limits": {"sensitive_pool_size": str(size)}}})
        refused = await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
        assert (refused.status, refused.body["details"]["code"]) == (409, "quota_exceeded")
        assert "sensitive_pool_size" in refused.message
        assert verb in refused.message or claimed == 0
        assert refused.body["details"]["hint"]


async def test_work_there_is_named_to_those_who_may_know_it(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    body = allocation("secret", gpu=1, spec={"sensitive": True})
    assert (await site.post(f"namespaces/{team}/allocations", body, token=who["ann"])).status == 201
    await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
    assert not hasattr(await bind(site.context.runtime, team, "secret", name), "code")
    refused = await site.post(f"nodes/{name}/release", {}, token=who["ann"])
    assert (refused.status, refused.body["details"]["code"]) == (409, "in_use")
    assert f"{team}/secret" in refused.message
    assert (await site.post(f"nodes/{name}/claim", {}, token=who["eve"])).status == 409


async def test_administrators_claim_and_release_for_others_and_users_do_not(site: Site) -> None:
    team, who = await people(site)
    first, second, third = [await new_node(site) for _ in range(3)]
    assert (await site.post(f"nodes/{first}/claim", {"user": "bob"}, token=who["ann"])).status == 403
    assert (await site.post(f"nodes/{first}/claim", {"user": f"{team}/ann"}, token=who["eve"])).status == 403
    assert (await site.post(f"nodes/{first}/claim", {"user": "ann"}, token=who["viewer"])).status == 403
    assert (await site.post(f"nodes/{first}/claim", {})).status == 400, "an administrator works for nobody"
    assert (await site.post(f"nodes/{first}/claim", {"user": "nowhere/ann"})).status in (403, 422)
    assert (await site.post(f"nodes/{first}/claim", {"user": f"{team}/ann", "reason": "ward"})).status == 200
    assert (await site.post(f"nodes/{second}/claim", {"user": "bob"}, token=who["boss"])).status == 200
    items = (await site.get("claims", token=who["boss"])).body["items"]
    assert {one["node"]: (one["user"], one["by"]) for one in items} == {
        first: (f"{team}/ann", "user:admin"),
        second: (f"{team}/bob", f"user:{team}/boss"),
    }
    events = (await site.get("events", fieldSelector=f"involvedObject.name={first}")).body["items"]
    assert events[-1]["message"] == f"claim by user:admin: for {team}/ann: ward"
    for token, status in ((who["eve"], 403), (who["ann"], 403), (who["boss"], 200)):
        assert (await site.post(f"nodes/{second}/release", {}, token=token)).status == status
    assert (await site.post(f"nodes/{first}/release", {})).status == 200
    assert (await site.post(f"nodes/{third}/release", {})).status == 409


@pytest.mark.parametrize(
    "body",
    [{"grace": 3}, {"reason": "x" * 2000}, {"user": 7}, {"user": "x" * 2000}, [], {"user": "/"}],
    ids=["unknown field", "long reason", "number", "long user", "list", "no names"],
)
async def test_what_is_no_claim_is_refused_and_leaves_nothing(site: Site, body: Any) -> None:
    _, who = await people(site)
    name = await new_node(site)
    assert (await site.post(f"nodes/{name}/claim", body, token=who["ann"])).status == 400
    assert "claim" not in (await site.get(f"nodes/{name}")).body["status"]


async def test_a_dry_run_and_a_repeated_request(site: Site) -> None:
    _, who = await people(site)
    name = await new_node(site)
    tried = await site.post(f"nodes/{name}/claim", {}, token=who["ann"], dryRun="All")
    assert (tried.status, tried.body["status"]["claim"]["state"]) == (200, "Claimed")
    assert "claim" not in (await site.get(f"nodes/{name}")).body["status"]
    key = {"idempotency-key": site.name("key")}
    first = await site.post(f"nodes/{name}/claim", {}, token=who["ann"], headers=key)
    again = await site.post(f"nodes/{name}/claim", {}, token=who["ann"], headers=key)
    assert (first.status, again.status) == (200, 200)
    assert first.body["status"]["claim"] == again.body["status"]["claim"]
    assert (await site.post("nodes/nowhere/claim", {}, token=who["ann"])).status == 404


async def test_nodes_and_services_claim_nothing_and_only_administrators_wipe(site: Site) -> None:
    _, who = await people(site)
    name = await new_node(site)
    for role, whose in (("node", {"node": name}), ("service", {"user": "bot"}), ("approver", {"user": "al"})):
        token = await site.token(role, **whose)
        assert (await site.post(f"nodes/{name}/claim", {"user": "a/b"}, token=token)).status == 403, role
    for verb in ("wipe", "wiped"):
        assert (await site.post(f"nodes/{name}/{verb}", {}, token=who["boss"])).status == 403
        assert (await site.post(f"nodes/{name}/{verb}", {})).status == 409


async def test_a_status_from_outside_does_not_touch_the_claim(site: Site) -> None:
    _, who = await people(site)
    name = await new_node(site)
    await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
    for said in ({"claim": None}, {"claim": {"state": "Wiping", "id": "mine"}}):
        reply = await site.patch(f"nodes/{name}/status", {"status": said})
        assert (reply.status, reply.body["status"]["claim"]["state"]) == (200, "Claimed")
    assert (await site.delete(f"nodes/{name}")).status == 409


async def test_the_figures_tell_how_the_pool_stands(site: Site) -> None:
    _, who = await people(site)
    name = await new_node(site)
    await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
    text = (await site.get("/metrics")).body
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("bursar_nodes_claimed"))
    assert float(figures['bursar_nodes_claimed{state="Claimed"}']) >= 1
    assert float(figures['bursar_nodes_claimed{state="WipeFailed"}']) == 0
    assert float(figures["bursar_nodes_claimed_max"]) == 100


async def test_sensitive_work_is_not_preempted_by_an_administrator_either(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
    body = allocation("secret", gpu=1, spec={"sensitive": True})
    await site.post(f"namespaces/{team}/allocations", body, token=who["ann"])
    await bind(site.context.runtime, team, "secret", name)
    refused = await site.post(f"namespaces/{team}/preemptions", {"targetAllocation": "secret"})
    assert (refused.status, refused.message) == (409, "sensitive work is never preempted")
    assert (await site.get(f"namespaces/{team}/allocations/secret")).body["status"]["phase"] == "Scheduled"


async def test_nor_is_work_that_is_sensitive_by_its_queue(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    queue = f"secrets-{team}"
    assert (await site.post("queues", {"metadata": {"name": queue}, "spec": {"profile": "sensitive"}})).status == 201
    await site.post(f"nodes/{name}/claim", {}, token=who["ann"])
    body = allocation("quiet", gpu=1, spec={"queue": queue})
    await site.post(f"namespaces/{team}/allocations", body, token=who["ann"])
    await bind(site.context.runtime, team, "quiet", name)
    refused = await site.post(f"namespaces/{team}/preemptions", {"targetAllocation": "quiet"})
    assert (refused.status, refused.message) == (409, "sensitive work is never preempted")


async def test_the_user_is_not_the_callers_to_say(site: Site) -> None:
    """Whose work it is, is known from the token: nobody comes to another's node by saying so."""
    team, who = await people(site)
    body = allocation("w", gpu=1, spec={"sensitive": True})
    body["status"] = {"user": f"{team}/ann"}
    assert (await site.post(f"namespaces/{team}/allocations", body, token=who["bob"])).status in (201, 400)
    shown = await site.get(f"namespaces/{team}/allocations/w", token=who["bob"])
    if shown.status == 200:
        assert shown.body["status"]["user"] == f"{team}/bob"
    changed = await site.patch(f"namespaces/{team}/allocations/w", {"spec": {"sensitive": False}}, token=who["bob"])
    assert changed.status in (400, 404, 409, 422), changed


async def made_anew(site: Site, team: str) -> None:
    """The tenant goes, and another of its name is made."""
    await site.delete(f"namespaces/{team}")
    await finish_namespaces(site.context.runtime)
    assert (await site.delete(f"tenants/{team}")).status == 200
    await site.namespace(name=team)


async def test_what_a_tenant_left_is_not_told_to_one_that_is_given_its_name(site: Site) -> None:
    """The node is still being wiped when the tenant goes and another of its name is made."""
    team, who = await people(site)
    first, second = await new_node(site), await new_node(site)
    for name in (first, second):
        await site.post(f"nodes/{name}/claim", {"reason": "study 42"}, token=who["ann"])
        assert (await site.post(f"nodes/{name}/release", {"reason": "done"}, token=who["ann"])).status == 200
    seen = await site.get("claims", token=who["boss"])
    assert {one["node"] for one in seen.body["items"]} == {first, second}, "it is their own, and being wiped"
    await made_anew(site, team)
    namesakes = {
        "boss": await site.token("tenant-admin", tenant=team, user="boss"),
        "ann": await site.token("user", tenant=team, user="ann"),
    }
    for token in namesakes.values():
        for reply in await asyncio.gather(
            site.get("claims", token=token),
            site.get("events", fieldSelector=f"involvedObject.name={first}", token=token),
            site.get("events", fieldSelector=f"involvedObject.name={team}", token=token),
            site.get("events", token=token),
            site.post(f"nodes/{first}/claim", {}, token=token),
            site.post(f"nodes/{first}/release", {}, token=token),
        ):
            assert "study 42" not in str(reply.body)
            assert "release by" not in str(reply.body)
            assert f"{team}/ann" not in str(reply.body)
        assert (await site.get("claims", token=token)).body["items"] == []
        refused = await site.post(f"nodes/{first}/release", {}, token=token)
        assert (refused.status, refused.message) == (403, f"node {first} is claimed by somebody else")
    told = (await site.get("claims")).body["items"]
    assert {one["node"] for one in told if one["user"] == f"{team}/ann"} == {first, second}, "administrators see it"


async def test_a_namesake_sees_its_own_claims_and_events(site: Site) -> None:
    team, who = await people(site)
    name = await new_node(site)
    await made_anew(site, team)
    who["ann"] = await site.token("user", tenant=team, user="ann")
    assert (await site.post(f"nodes/{name}/claim", {"reason": "ward"}, token=who["ann"])).status == 200
    for state in ("Claimed", "Wiping"):
        (item,) = (await site.get("claims", token=who["ann"])).body["items"]
        assert (item["node"], item["state"]) == (name, state)
        events = (await site.get("events", fieldSelector=f"involvedObject.name={name}", token=who["ann"])).body
        assert any("claim by" in one["message"] for one in events["items"])
        assert (await site.post(f"nodes/{name}/release", {}, token=who["ann"])).status == 200, "and again"
    own = (await site.get("events", fieldSelector=f"involvedObject.name={team}", token=who["ann"])).body["items"]
    assert {one["reason"] for one in own} == {"Created"}
