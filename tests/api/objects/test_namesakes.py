"""A tenant that is given the name of a deleted one sees nothing of it and inherits nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio

from bursar.core.usage.external_budget import Remaining
from bursar.loops import housekeeping
from bursar.store.usage import budget as budget_store
from support.api.credit_site import Bank, bank, code
from support.api.site import Reply, Site, allocation, eventually, node_body
from support.api.watches import newest, take, told, watching

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "hunter2"


@dataclass(frozen=True, slots=True)
class Lives:
    """Two tenants of one name, one after the other: what the first left behind, and who speaks for the second."""

    name: str
    uid: str  # of the first
    since: str  # a revision from before the first
    lease: str
    old: str  # a token of the first's administrator
    old_id: str
    admin: str  # of the second
    accountant: str

    @property
    def filed(self) -> str:
        return f"{self.name}@{self.uid}"


async def delete_namespace(site: Site, name: str) -> None:
    """It ends once it is empty."""
    assert (await site.delete(f"namespaces/{name}")).status in (200, 202)

    async def is_gone() -> bool:
        await housekeeping.finish_namespaces(site.context.runtime)
        return (await site.get(f"namespaces/{name}")).status == 404

    await eventually(is_gone)


async def delete_tenant(site: Site, name: str) -> None:
    await delete_namespace(site, name)
    reply = await site.delete(f"tenants/{name}")
    assert reply.status == 200, reply


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lives(site: Site) -> Lives:
    since = await newest(site)
    one = await bank(site, "10")
    name = one.tenant
    assert (await site.patch(f"tenants/{name}", {"spec": {"displayName": f"{SECRET} Ltd"}})).status == 200
    first = (await site.get(f"tenants/{name}")).body["metadata"]["uid"]
    assert (await site.patch(f"accounts/{name}", {"credit_limit": "100"})).status == 200
    hook = {"name": f"{name}-hook", "url": "https://receiver.example/path-secret", "tenant": name}
    assert (await site.post("webhooks", hook)).status == 201
    old = await site.token("tenant-admin", tenant=name, user="old-boss")
    body = allocation("work", spec={"env": {"PASSWORD": SECRET}}, cpu=1)
    assert (await site.post(f"namespaces/{name}/allocations", body, token=old)).status == 201
    assert (await site.delete(f"namespaces/{name}/allocations/work", token=old)).status == 200
    lease = await one.leased("secret-project")
    assert (await one.act(lease, "close")).status == 200
    left = (await one.balance())["posted"]
    out = {"account": name, "amount": f"-{left}", "reason": "paid out", "request_id": one.id()}
    assert (await site.post("adjustments", out)).status == 201
    await delete_tenant(site, name)
    await site.namespace(name=name)
    return Lives(
        name, first, since, lease, old, old.split("_")[1], await site.token("tenant-admin", tenant=name, user="boss"),
        await site.token("billing-admin", user="carl"),
    )  # fmt: skip


def told_nothing(reply: Reply, *words: str) -> None:
    text = json.dumps(reply.body)
    assert not [word for word in (SECRET, "secret-project", "old-boss", *words) if word in text], text


# What happened before.


@pytest.mark.parametrize("path", ["allocations", "tenants", "namespaces", "namespaces/NAME/allocations"])
async def test_a_watch_from_before_tells_nothing_of_the_predecessor(site: Site, lives: Lives, path: str) -> None:
    where = path.replace("NAME", lives.name)
    async with watching(site, where, lives.admin, resourceVersion=lives.since) as events:
        # The last thing that it is told is what happens now; whatever was before it has come by then.
        mark = site.name("mark")
        body = allocation(mark, cpu=1)
        if "allocations" in path:
            assert (await site.post(f"namespaces/{lives.name}/allocations", body)).status == 201
        elif path == "tenants":
            assert (await site.patch(f"tenants/{lives.name}", {"spec": {"displayName": mark}})).status == 200
        else:
            assert (await site.namespace(tenant=lives.name, name=mark)) == mark
        seen: list[dict[str, Any]] = []
        while not seen or mark not in json.dumps(seen[-1]):
            seen += await take(events, 1)
    assert SECRET not in json.dumps(seen)
    assert lives.uid not in json.dumps(seen)
    assert ("ADDED", "work") not in told(seen)


async def test_the_administrator_is_still_told_all_of_it(site: Site, lives: Lives) -> None:
    async with watching(site, f"namespaces/{lives.name}/allocations", resourceVersion=lives.since) as events:
        assert SECRET in json.dumps(await take(events, 1))


async def test_a_revision_that_cannot_be_watched_from_is_answered_without_others(site: Site, lives: Lives) -> None:
    reply = await site.get("allocations", token=lives.admin, watch="true", resourceVersion="999999999")
    assert code(reply) == (410, "gone")
    assert reply.message == "too old or unknown resource version: 999999999"


async def test_who_watched_for_the_predecessor_is_told_nothing_of_the_successor(site: Site) -> None:
    """However long the server remembers the token for: whose it was is remembered with it."""
    name = await site.namespace()
    old = await site.token("tenant-admin", tenant=name)
    async with watching(site, "allocations", old, resourceVersion=await newest(site)) as events:
        await delete_tenant(site, name)
        await site.namespace(name=name)
        assert (await site.post(f"namespaces/{name}/allocations", allocation("next", cpu=1))).status == 201
        # The watch ends by itself, by what it would have been told or by what has become of its token.
        assert "next" not in json.dumps([one async for one in events])


# What it owns.


async def test_the_successor_begins_without_an_account(site: Site, lives: Lives) -> None:
    for path in ("balance", "statements", "forecast"):
        assert (await site.get(path, token=lives.admin)).status == 404
    asked = {"job_id": "a", "gpu_type": "h100", "gpu_count": 1, "request_id": "first-lease"}
    assert (await site.post("leases", asked, token=lives.admin)).status == 404, "no credit limit is inherited"
    for reply in (
        await site.get("accounts", token=lives.admin),
        await site.get("leases", token=lives.admin),
        await site.get("tokens", token=lives.admin),
        await site.get("events", token=lives.admin),
        await site.get("statements", token=lives.admin, tenant=lives.name),
    ):
        told_nothing(reply, lives.uid, lives.old_id)


async def test_names_of_what_was_do_not_reach_it_either(site: Site, lives: Lives) -> None:
    for query in ({"account": lives.filed}, {"tenant": lives.filed}):
        reply = await site.get("statements", token=lives.admin, **query)
        assert code(reply) == (404, "not_found")
    assert code(await site.get(f"leases/{lives.lease}", token=lives.admin)) == (404, "not_found")
    reply = await site.get("leases", token=lives.admin, state="ended", account=lives.filed)
    assert code(reply) == (404, "not_found")
    assert (await site.delete(f"tokens/{lives.old_id}", token=lives.admin)).status == 404


async def test_request_ids_are_its_own(site: Site) -> None:
    name, paid = site.name("twice"), []
    for _ in range(2):
        await site.namespace(name=name)
        token = await site.token("tenant-admin", tenant=name, user="boss")
        top_up = {"account": name, "amount": "7", "request_id": "invoice-1"}
        replies = [await site.post("topups", top_up) for _ in range(2)]
        assert [(one.status, one.body["new_balance"]) for one in replies] == [(201, "7"), (201, "7")]
        paid.append((await site.get("balance", token=token)).body["posted"])
        work = allocation("one", cpu=1) | {"request_id": "submit-1"}
        made = [await site.post(f"namespaces/{name}/allocations", work, token=token) for _ in range(2)]
        assert [one.status for one in made] == [201, 201]
        assert len({one.body["metadata"]["uid"] for one in made}) == 1
        paid.append(made[0].body["metadata"]["uid"])
        assert (await site.delete(f"namespaces/{name}/allocations/one")).status == 200
        out = {"account": name, "amount": "-7", "reason": "paid out", "request_id": "out-1"}
        assert (await site.post("adjustments", out)).status == 201
        await delete_tenant(site, name)
    assert paid[0] == paid[2] == "7"
    assert paid[1] != paid[3]


async def test_an_old_token_is_good_for_nothing_of_the_successor(site: Site, lives: Lives) -> None:
    """Nor is one that came into the database too late to be revoked with the others."""
    async with site.context.database.reader() as db:
        await db.execute(
            "UPDATE token SET revoked_at = NULL, tenant = $2 WHERE id = $1", lives.old_id, lives.name
        )  # fmt: skip
        try:
            site.context.authenticator.forget(lives.old_id)
            reply = await site.get("whoami", token=lives.old)
            assert code(reply) == (401, "unauthenticated")
            assert "its tenant was deleted" in reply.message or "tenant was deleted" in reply.message
        finally:
            await db.execute(
                "UPDATE token SET revoked_at = now(), tenant = $2 WHERE id = $1", lives.old_id, lives.filed
            )


async def test_a_token_that_is_remembered_is_good_for_nothing_of_the_successor(site: Site) -> None:
    """For as long as the server remembers it, which is seconds, nobody is let in for the namesake."""
    name = await site.namespace()
    old = await site.token("tenant-admin", tenant=name)
    for _ in range(2):
        assert (await site.get("whoami", token=old)).status == 200
    await delete_tenant(site, name)
    await site.namespace(name=name)
    assert (await site.post(f"namespaces/{name}/allocations", allocation("next", cpu=1))).status == 201
    # Whether it is remembered depends on how busy the machine is. In neither case is anything told, or done.
    assert (await site.get("allocations", token=old)).body.get("items", []) == []
    assert (await site.get(f"namespaces/{name}/allocations/next", token=old)).status in (401, 404)
    reply = await site.post(f"namespaces/{name}/allocations", allocation("foreign", cpu=1), token=old)
    assert reply.status in (401, 404)
    reply = await site.post("tokens", {"role": "tenant-admin", "tenant": name}, token=old)
    assert reply.status in (401, 404)


async def test_it_inherits_no_nodes_no_priority_classes_and_no_budget(site: Site) -> None:
    name, granted = site.name("granted"), site.name("class")
    await site.namespace(name=name)
    machine = node_body(site.name("worker"))
    machine["spec"]["tenants"] = [name]
    where = f"nodes/{machine['metadata']['name']}"
    assert (await site.post("nodes", machine)).status == 201
    body = {"kind": "PriorityClass", "metadata": {"name": granted}, "value": 9000, "allowedTenants": [name]}
    assert (await site.post("priorityclasses", body)).status == 201
    async with site.context.database.reader() as db:
        await budget_store.save(db, "test", datetime.now(UTC), {name: Remaining(gpu_hours=7.0)}, 3600)
        assert name in await budget_store.load_remaining(db, [name])
    await delete_namespace(site, name)
    for path, freed in (
        (where, {"spec": {"tenants": ["default"]}}),
        (f"priorityclasses/{granted}", {"allowedTenants": ["default"]}),
    ):
        refused = await site.delete(f"tenants/{name}")
        assert code(refused) == (409, "in_use")
        assert "is named by" in refused.message
        assert (await site.patch(path, freed)).status == 200
    assert (await site.delete(f"tenants/{name}")).status == 200
    assert code(await site.patch(where, {"spec": {"tenants": [name]}})) == (400, "invalid")
    assert (await site.namespace(name=name)) == name
    assert (await site.get(where)).body["spec"]["tenants"] == ["default"]
    async with site.context.database.reader() as db:
        assert name not in await budget_store.load_remaining(db, [name])


# The books of the first.


async def test_administrators_and_accountants_read_what_a_deleted_tenant_left(site: Site, lives: Lives) -> None:
    for token in (site.admin, lives.accountant):
        listed = (await site.get("accounts", token=token)).body["items"]
        assert lives.filed in [one["account"] for one in listed]
        account = await site.get(f"accounts/{lives.filed}", token=token)
        assert (account.status, account.body["account"]) == (200, lives.filed)
        statement = await site.get("statements", token=token, account=lives.filed)
        assert "secret-project" in json.dumps(statement.body)
        whole = await site.get("statements", token=token, tenant=lives.filed)
        assert (whole.status, len(whole.body["accounts"])) == (200, 1)
        ended = await site.get("leases", token=token, state="ended", account=lives.filed)
        assert [one["lease_id"] for one in ended.body["items"]] == [lives.lease]
    tokens = {one["metadata"]["name"]: one for one in (await site.get("tokens")).body["items"]}
    assert tokens[lives.old_id]["spec"]["tenant"] == lives.filed
    assert tokens[lives.old_id]["status"]["state"] == "Revoked"


async def test_nobody_changes_them(site: Site, lives: Lives) -> None:
    before = (await site.get(f"accounts/{lives.filed}")).body
    requests = [
        ("POST", "topups", {"account": lives.filed, "amount": "1", "request_id": "late-1"}),
        ("POST", "refunds", {"account": lives.filed, "amount": "1", "reason": "why", "request_id": "late-2"}),
        ("POST", "adjustments", {"account": lives.filed, "amount": "1", "reason": "why", "request_id": "late-3"}),
        ("POST", "accounts", {"tenant": lives.filed}),
        ("PATCH", f"accounts/{lives.filed}", {"credit_limit": "5"}),
        ("PUT", f"limits/{lives.filed}", {"concurrency": 1}),
    ]
    for method, path, body in requests:
        reply = await site.ask(method, path, body)
        assert code(reply) == (422, "immutable"), (path, reply)
        assert "was deleted" in reply.message
    assert (await site.get(f"accounts/{lives.filed}")).body == before


async def test_its_webhooks_are_not_the_successors(site: Site, lives: Lives) -> None:
    hooks = {one["metadata"]["name"]: one for one in (await site.get("webhooks")).body["items"]}
    assert hooks[f"{lives.name}-hook"]["spec"]["tenant"] == lives.filed


async def test_a_payer_of_the_first_pays_nobody_in_the_second(site: Site) -> None:
    one: Bank = await bank(site, "")
    assert (await site.post("webhooks", {"name": one.tenant, "direction": "in", "tenant": one.tenant})).status == 201
    await delete_tenant(site, one.tenant)
    await site.namespace(name=one.tenant)
    async with site.context.database.reader() as db:
        whose = await db.fetchval("SELECT tenant FROM webhook WHERE name = $1", one.tenant)
    assert whose.startswith(f"{one.tenant}@")
