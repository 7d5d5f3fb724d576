"""Watches of undecided requests across kinds, and of limits and usage."""

import asyncio
from typing import Any

import pytest

from bursar.ops.runtime import feed
from support.api.site import Site
from support.api.watches import take, watching

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def gated(site: Site, *gates: str, limits: dict[str, Any] | None = None) -> str:
    """A tenant whose requests pass these gates, and a namespace of the same name."""
    name = site.name()
    spec = {"approval": {"gates": list(gates or ("quota",)), "selfApproval": True}, "limits": limits or {}}
    reply = await site.post("tenants", {"metadata": {"name": name}, "spec": spec})
    assert reply.status == 201, reply
    return await site.namespace(tenant=name, name=name)


async def claim(site: Site, tenant: str, name: str, **resources: Any) -> None:
    named = {key.replace("_", "-"): value for key, value in resources.items()}
    document = {"metadata": {"name": name}, "spec": {"resources": named}}
    reply = await site.post(f"namespaces/{tenant}/resourceclaims", document)
    assert reply.status == 201, reply


async def decide(site: Site, tenant: str, *names: str, decision: str = "approve", **fields: Any) -> list[Any]:
    items = [
        {"kind": "ResourceClaim", "namespace": tenant, "name": name, "decision": decision, **fields} for name in names
    ]
    reply = await site.post("approvals/decide", {"items": items})
    assert reply.status == 200, reply
    return list(reply.body["items"])


def told(events: list[Any]) -> list[tuple[str, str, str, str]]:
    return [(one["type"], *(one["object"][name] for name in ("kind", "name", "gate"))) for one in events]


async def test_a_request_is_added_changed_and_gone_at_its_gates(site: Site) -> None:
    tenant = await gated(site, "quota", "manual", limits={"clusters": 1})
    version = (await site.get("approvals")).version
    async with watching(site, "approvals", tenant=tenant, resourceVersion=version) as events:
        await claim(site, tenant, "c", clusters=2)
        await site.post(f"namespaces/{tenant}/allocations", {"metadata": {"name": "a"}, "spec": {}})
        await decide(site, tenant, "c")
        (seen,) = await decide(site, tenant, "c", decision="note", reason="busy", gate="manual")
        assert seen["status"] == 200
        await site.delete(f"namespaces/{tenant}/resourceclaims/c")
        assert told(await take(events, 5)) == [
            ("ADDED", "ResourceClaim", "c", "quota"),
            ("ADDED", "Allocation", "a", "quota"),
            ("MODIFIED", "ResourceClaim", "c", "manual"),
            ("MODIFIED", "ResourceClaim", "c", "manual"),
            ("DELETED", "ResourceClaim", "c", "manual"),
        ]


async def test_an_approver_of_one_gate_sees_requests_come_to_it_and_leave_it(site: Site) -> None:
    tenant, other = await gated(site, "quota", "manual"), await gated(site, "manual")
    token = await site.token("approver", user="ann", tenants=[tenant], gates=["manual"])
    async with watching(site, "approvals", token) as events:
        await claim(site, tenant, "c", clusters=1)
        await claim(site, other, "c", clusters=1)
        await decide(site, tenant, "c")
        await decide(site, tenant, "c", gate="manual")
        await claim(site, tenant, "last", clusters=1)
        await decide(site, tenant, "last")
        found = await take(events, 3)
    assert told(found) == [
        ("ADDED", "ResourceClaim", "c", "manual"),
        ("DELETED", "ResourceClaim", "c", "manual"),
        ("ADDED", "ResourceClaim", "last", "manual"),
    ]
    assert {one["object"]["tenant"] for one in found} == {tenant}
    assert found[1]["object"]["object"]["status"]["approval"]["state"] == "approved"


async def test_a_watch_without_a_revision_begins_with_the_open_requests_and_loses_none(site: Site) -> None:
    tenant = await gated(site)
    for name in ("one", "two"):
        await claim(site, tenant, name, clusters=1)
    async with watching(site, "approvals", tenant=tenant, sendInitialEvents="true") as events:
        first = await take(events, 3)
        assert [one["type"] for one in first] == ["ADDED", "ADDED", "BOOKMARK"]
        await decide(site, tenant, "one")
        (gone,) = await take(events, 1)
    assert told([gone]) == [("DELETED", "ResourceClaim", "one", "quota")]
    # Everything since the first connection comes again from its revision, also what a later state does not show.
    version = first[-1]["object"]["metadata"]["resourceVersion"]
    async with watching(site, "approvals", tenant=tenant, resourceVersion=version) as events:
        assert told(await take(events, 1)) == [("DELETED", "ResourceClaim", "one", "quota")]


async def test_changes_of_other_objects_neither_reach_nor_delay_the_watch(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "QUEUE_MAX", 3)
    tenant, other, free = await gated(site), await gated(site), await site.namespace()
    async with watching(site, "approvals", tenant=tenant, sendInitialEvents="true") as events:
        await take(events, 1)
        made = (
            site.post(f"namespaces/{free}/allocations", {"metadata": {"name": f"a{n}"}, "spec": {}}) for n in range(9)
        )
        await asyncio.gather(*made)
        await claim(site, other, "of-another", clusters=1)
        await claim(site, tenant, "c", clusters=1)
        assert told(await take(events, 1)) == [("ADDED", "ResourceClaim", "c", "quota")]


async def test_an_item_says_what_approving_it_would_charge(site: Site) -> None:
    tenant = await gated(site)
    await claim(site, tenant, "c", clusters=2, baremetal_hosts=3)
    spec: dict[str, Any] = {"template": {"spec": {"resources": {"requests": {"cpu": "500m"}}}}, "parallelism": 4}
    await site.post(f"namespaces/{tenant}/jobs", {"metadata": {"name": "j"}, "spec": {**spec, "completions": 3}})
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}, "resources": {"requests": {"memory": "1Gi"}}}
    await site.post(f"namespaces/{tenant}/allocations", {"metadata": {"name": "m"}, "spec": gang})
    items = {one["name"]: one for one in (await site.get("approvals", tenant=tenant)).body["items"]}
    assert items["c"]["requested"] == {"clusters": "2", "baremetal-hosts": "3"}
    assert items["j"]["requested"] == {"allocations": "3", "cpu": "1500m", "pods": "3"}
    assert items["m"]["requested"] == {"allocations": "1", "memory": "1Gi", "pods": "1"}
    assert (items["m"]["gang"], "gang" in items["c"]) == ("g", False)
    await decide(site, tenant, "c")
    grown = {"spec": {"resources": {"clusters": 5, "baremetal-hosts": 3}}}
    await site.patch(f"namespaces/{tenant}/resourceclaims/c", grown)
    async with watching(site, "approvals", tenant=tenant) as events:
        found = {one["object"]["name"]: one["object"]["requested"] for one in await take(events, 3)}
        assert found["c"] == {"clusters": "3"}


async def test_requests_at_other_gates_and_of_other_tenants_are_not_shown(site: Site) -> None:
    tenant = await gated(site)
    await claim(site, tenant, "c", clusters=1)
    token = await site.token("approver", user="bob", tenants=[tenant], gates=["manual"])
    assert (await site.get("approvals", token=token)).body["items"] == []
    stranger = await site.namespace()
    user = await site.token("tenant-admin", user="eve", tenant=stranger)
    assert (await site.get("approvals", token=user)).body["items"] == []
    async with watching(site, "approvals", user, sendInitialEvents="true") as events:
        (first,) = await take(events, 1)
        assert first["type"] == "BOOKMARK"


async def test_an_unknown_revision_is_gone_and_server_sent_events_have_ids(site: Site) -> None:
    tenant = await gated(site)
    assert (await site.get("approvals", watch="true", resourceVersion="999999999")).status == 410
    assert (await site.get("approvals", watch="true", resourceVersion="x")).status == 400
    version = (await site.get("approvals")).version
    asked = {"accept": "text/event-stream", "last-event-id": version}
    async with watching(site, "approvals", headers=asked, tenant=tenant) as events:
        await claim(site, tenant, "c", clusters=1)
        (event,) = await take(events, 1)
    assert event["id"] == event["object"]["object"]["metadata"]["resourceVersion"]


async def test_a_watch_that_is_broken_off_again_and_again_loses_no_change(site: Site) -> None:
    tenant = await gated(site, limits={"clusters": 12})
    version = (await site.get("approvals")).version

    async def worker(number: int) -> None:
        for turn in range(8):
            name = f"c{number}-{turn}"
            await claim(site, tenant, name, clusters=1)
            await decide(site, tenant, name, decision=("approve", "note", "deny")[turn % 3], reason="so")

    working = asyncio.gather(*(worker(number) for number in range(4)))
    known: dict[str, str] = {}
    while True:
        at_end = working.done()
        async with watching(site, "approvals", tenant=tenant, resourceVersion=version, timeoutSeconds="1") as events:
            async for event in events:
                shown = event["object"]
                version = shown["object"]["metadata"]["resourceVersion"]
                known[shown["name"]] = event["type"]
                if len(known) % 3 == 0 and not at_end:
                    break
        if at_end:
            break
    await working
    left = {name for name, type_ in known.items() if type_ != "DELETED"}
    listed = {one["name"] for one in (await site.get("approvals", tenant=tenant)).body["items"]}
    assert (len(known), left) == (32, listed)


# Limits and usage.


async def figures(events: Any, scope: str, dimension: str, **wanted: str) -> None:
    """Until the watch has told these figures of a scope."""
    async with asyncio.timeout(20):
        async for event in events:
            shown = event["object"]
            if scope in (shown.get("scope"), shown.get("tenant")) and event["type"] != "DELETED":
                found = shown["quotas"].get(dimension, {})
                if {name: found.get(name) for name in wanted} == wanted:
                    return


async def test_the_quotas_of_a_tenant_are_told_whenever_they_change(site: Site) -> None:
    tenant = await gated(site, limits={"clusters": 3})
    async with watching(site, f"tenants/{tenant}/quotas") as events:
        await figures(events, tenant, "clusters", limit="3", accepted="0")
        await claim(site, tenant, "c", clusters=2)
        await decide(site, tenant, "c")
        await figures(events, tenant, "clusters", limit="3", accepted="2")
        await site.patch(f"tenants/{tenant}", {"spec": {"limits": {"clusters": 9}}})
        await figures(events, tenant, "clusters", limit="9", accepted="2")
        await site.delete(f"namespaces/{tenant}/resourceclaims/c")
        await figures(events, tenant, "clusters", limit="9", accepted="0")
    assert (await site.get(f"tenants/{site.name('none')}/quotas", watch="true")).status == 404


async def test_one_watch_tells_the_figures_of_all_scopes(site: Site) -> None:
    parent, other = await gated(site), await gated(site)
    child = site.name()
    spec = {"parent": parent, "approval": {"gates": ["quota"], "selfApproval": True}}
    assert (await site.post("tenants", {"metadata": {"name": child}, "spec": spec})).status == 201
    await site.namespace(tenant=child, name=child)
    await site.patch(f"tenants/{parent}", {"spec": {"limits": {"clusters": 5}}})
    hard = {"metadata": {"name": "rq"}, "spec": {"hard": {"clusters": "4"}}}
    assert (await site.post(f"namespaces/{child}/resourcequotas", hard)).status == 201
    token = await site.token("approver", user="ann", tenants=[parent], gates=["quota"])
    async with watching(site, "quotas", token, sendInitialEvents="true") as events:
        first = await take(events, 4)
        scopes = {one["object"]["scope"] for one in first[:3]}
        assert scopes == {f"quota:{child}/rq", f"tenant:{parent}", f"tenant:{child}"}
        assert first[3]["type"] == "BOOKMARK"
        await claim(site, other, "c", clusters=1)
        await decide(site, other, "c")
        await claim(site, child, "c", clusters=2)
        await decide(site, child, "c")
        told_of: set[str] = set()
        while told_of != scopes:
            (event,) = await take(events, 1)
            shown = event["object"]
            assert shown["scope"] in scopes
            if shown["quotas"].get("clusters", {}).get("accepted") == "2":
                told_of.add(shown["scope"])
        await site.delete(f"namespaces/{child}/resourcequotas/rq")
        while event["type"] != "DELETED":
            (event,) = await take(events, 1)
        assert event["object"]["scope"] == f"quota:{child}/rq"


async def test_quotas_are_listed_in_pages_and_by_tenant(site: Site) -> None:
    tenant = await gated(site, limits={"clusters": 3})
    await claim(site, tenant, "c", clusters=2)
    (one,) = (await site.get("quotas", tenant=tenant)).body["items"]
    assert (one["scope"], one["tenant"], one["enforcement"]) == (f"tenant:{tenant}", tenant, "Reject")
    assert one["quotas"]["clusters"]["limit"] == "3"
    assert one["quotas"]["pending_requests"]["accepted"] == "1"
    everything = [one["scope"] for one in (await site.get("quotas", limit=5000)).body["items"]]
    paged, after = [], ""
    while True:
        page = (await site.get("quotas", limit=2, **({"continue": after} if after else {}))).body
        paged += [one["scope"] for one in page["items"]]
        if not (after := page["metadata"].get("continue", "")):
            break
    assert paged == everything
    admin = await site.token("tenant-admin", user="eve", tenant=tenant)
    assert [one["scope"] for one in (await site.get("quotas", token=admin)).body["items"]] == [f"tenant:{tenant}"]
    assert (await site.get("quotas", limit=0)).status == 400
