"""Tokens and webhooks that are made, changed or removed leave a line in the audit, without their secrets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bursar.ops.objects.webhook import stop_webhook
from support.api.site import Site, node, node_body

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def lines(site: Site, name: str, *, token: str = "") -> list[tuple[str, str, str]]:
    """The events of an object: its kind, the change, and the actor."""
    query = {"fieldSelector": f"involvedObject.name={name}"}
    events = (await site.get("events", token=token or site.admin, **query)).body["items"]
    return [(one["involvedObject"]["kind"], one["reason"], one["message"]) for one in events]


async def in_the_feed(site: Site, text: str) -> bool:
    async with site.context.database.reader() as db:
        found: bool = await db.fetchval("SELECT EXISTS (SELECT FROM change WHERE strpos(change::text, $1) > 0)", text)
    return found


async def test_a_token_is_told_of_when_it_is_made_and_when_it_is_revoked(site: Site) -> None:
    tenant = await site.namespace()
    made = await site.post("tokens", {"role": "user", "tenant": tenant, "user": "ann"})
    name, secret = made.body["metadata"]["name"], made.body["status"]["token"].split("_", 2)[2]
    assert await lines(site, name) == [("Token", "Created", "create by user:admin")]
    replies = await asyncio.gather(*(site.delete(f"tokens/{name}") for _ in range(8)))
    assert [one.status for one in replies] == [200] * 8
    assert len({one.body["spec"]["revokedAt"] for one in replies}) == 1
    assert await lines(site, name) == [
        ("Token", "Created", "create by user:admin"),
        ("Token", "Deleted", "revoke by user:admin"),
    ]
    assert await in_the_feed(site, name)
    assert not await in_the_feed(site, secret)


async def test_who_may_list_tokens_reads_what_became_of_them_and_nobody_else_does(site: Site) -> None:
    tenant, other = await site.namespace(), await site.namespace()
    name = (await site.post("tokens", {"role": "user", "tenant": tenant, "user": "ann"})).body["metadata"]["name"]
    boss, user = [await site.token(role, tenant=tenant, user=role) for role in ("tenant-admin", "user")]
    stranger = await site.token("tenant-admin", tenant=other, user="eve")
    assert len(await lines(site, name, token=boss)) == 1
    assert await lines(site, name, token=user) == []
    assert await lines(site, name, token=stranger) == []


async def test_tokens_that_are_revoked_with_their_tenant_or_node_are_told_of_as_well(site: Site) -> None:
    tenant = site.name("short")
    assert (await site.post("tenants", {"metadata": {"name": tenant}, "spec": {}})).status == 201
    living = (await site.post("tokens", {"role": "user", "tenant": tenant})).body["metadata"]["name"]
    dead = (await site.post("tokens", {"role": "user", "tenant": tenant})).body["metadata"]["name"]
    assert (await site.delete(f"tokens/{dead}")).status == 200
    assert (await site.delete(f"tenants/{tenant}")).status == 200
    assert (await lines(site, living))[1:] == [("Token", "Deleted", "revoke by system: its tenant was deleted")]
    assert (await lines(site, dead))[1:] == [("Token", "Deleted", "revoke by user:admin")]
    worker = (await node(site))["metadata"]["name"]
    own = (await site.post("tokens", {"role": "node", "node": worker, "single_use": False})).body["metadata"]["name"]
    assert (await site.delete(f"nodes/{worker}")).status == 200
    assert (await lines(site, own))[1:] == [("Token", "Deleted", "revoke by system: its node was deleted")]


@pytest.mark.parametrize(
    "more", [{"url": "https://user:pass-secret@receiver.example/path-secret?key=query-secret"}, {"direction": "in"}]
)
async def test_a_webhook_is_told_of_without_its_secrets(site: Site, more: dict[str, Any]) -> None:
    name = site.name("hook")
    made = await site.post("webhooks", {"name": name, **more})
    if made.status == 400:  # an address with a password in it is refused to begin with
        more = {"url": "https://receiver.example/path-secret?key=query-secret"}
        made = await site.post("webhooks", {"name": name, **more})
    assert made.status == 201, made
    replies = await asyncio.gather(*(site.delete(f"webhooks/{name}") for _ in range(4)))
    assert sorted(one.status for one in replies) == [200, 404, 404, 404]
    assert await lines(site, name) == [
        ("Webhook", "Created", "create by user:admin"),
        ("Webhook", "Deleted", "delete by user:admin"),
    ]
    for secret in (made.body["status"]["secret"], "pass-secret", "path-secret", "query-secret"):
        assert not await in_the_feed(site, secret)


async def test_a_webhook_that_stops_is_told_of_once(site: Site) -> None:
    name = site.name("hook")
    assert (await site.post("webhooks", {"name": name, "url": "https://receiver.example/"})).status == 201
    await asyncio.gather(*(stop_webhook(site.context.runtime, name, "410 Gone") for _ in range(4)))
    assert (await lines(site, name))[1:] == [("Webhook", "Changed", "stop by system:webhooks: 410 Gone")]


async def test_tenants_are_told_nothing_of_webhooks(site: Site) -> None:
    tenant, name = await site.namespace(), site.name("hook")
    hook = {"name": name, "url": "https://receiver.example/", "tenant": tenant}
    assert (await site.post("webhooks", hook)).status == 201
    assert await lines(site, name, token=await site.token("tenant-admin", tenant=tenant)) == []


async def test_a_refused_token_leaves_no_line(site: Site) -> None:
    before = await site.state()
    for body in (
        {"role": "user", "tenant": "nowhere"},
        {"role": "user", "tenant": "default", "user": "rival/ann"},
        {"role": "system-admin", "user": "rival/ann"},
    ):
        assert (await site.post("tokens", body)).status in (400, 404)
    assert await site.state() == before


async def test_a_node_that_joins_is_told_of_with_its_token(site: Site) -> None:
    name = site.name("worker")
    joined = await site.post("nodes", node_body(name), token=await site.token("node", node=name))
    assert joined.status == 201
    assert ("Node", "Created") in [one[:2] for one in await lines(site, name)]
