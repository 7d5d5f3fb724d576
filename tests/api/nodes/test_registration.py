"""Nodes join over HTTP: a bootstrap token is good once and never wasted, and a node's secret is its own."""

from typing import Any

import pytest

from bursar.ops.runtime.lane import Overloaded
from bursar.store.db.database import Unavailable
from bursar.store.nodes import node as node_store
from support.api.site import TABLE, Site, node, node_body

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def node_tokens(site: Site, name: str) -> int:
    """Living tokens of a node, bootstrap tokens excepted."""
    async with site.context.database.reader() as db:
        count: int = await db.fetchval("SELECT count(*) FROM token WHERE node = $1 AND NOT single_use", name)
    return count


async def test_a_dry_registration_leaves_the_bootstrap_token_good(site: Site) -> None:
    name = site.name("worker")
    bootstrap = await site.token("node", node=name)
    for value in ("All", "true"):
        reply = await site.post("nodes", node_body(name), token=bootstrap, dryRun=value)
        assert reply.status == 201, reply
        assert "token" not in reply.body["status"]
    assert await node_tokens(site, name) == 0
    reply = await site.post("nodes", node_body(name), token=bootstrap, dryRun="false")
    assert reply.status == 201
    assert reply.body["status"]["token"]


@pytest.mark.parametrize("error", [Overloaded("creating", 1), Unavailable("away"), RuntimeError("bug")], ids=repr)
async def test_whatever_goes_wrong_a_bootstrap_token_can_be_used_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    name = site.name("worker")
    bootstrap = await site.token("node", node=name)

    async def fails(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("bursar.api.nodes.node.create_object", fails)
        assert (await site.post("nodes", node_body(name), token=bootstrap)).status in (500, 503)
    reply = await site.post("nodes", node_body(name), token=bootstrap)
    assert reply.status == 201, reply
    assert (await site.post("nodes", node_body(name), token=bootstrap)).status == 401


async def test_a_registration_is_answered_with_its_token_also_to_who_wants_a_table(site: Site) -> None:
    name = site.name("worker")
    bootstrap = await site.token("node", node=name)
    reply = await site.post("nodes", node_body(name), token=bootstrap, headers={"accept": TABLE})
    assert (reply.status, reply.body["kind"]) == (201, "Node")
    whoami = await site.get("whoami", token=reply.body["status"]["token"])
    assert whoami.body["node"] == name


async def test_a_repeated_registration_makes_no_second_token(site: Site) -> None:
    name, key = site.name("worker"), {"idempotency-key": "register-once"}
    first = await site.post("nodes", node_body(name), headers=key)
    again = await site.post("nodes", node_body(name), headers=key)
    assert (first.status, again.status) == (201, 201)
    assert "token" not in again.body["status"]
    assert first.body["metadata"]["uid"] == again.body["metadata"]["uid"]
    assert await node_tokens(site, name) == 1


async def test_a_nodes_secret_is_never_stored(site: Site) -> None:
    registered = await node(site)
    name, secret = registered["metadata"]["name"], registered["status"]["token"]
    joined = {"allocated": {"cpu": "63"}, "lastHeartbeatTime": "2000-01-01T00:00:00Z"}
    sent = {**registered, "status": {**registered["status"], **joined, "message": "hello"}}
    changed = {"metadata": {"name": name}, "spec": {**sent["spec"], "unschedulable": True}, "status": sent["status"]}
    for reply in (
        await site.put(f"nodes/{name}/status", sent, token=secret),
        await site.patch(f"nodes/{name}/status", {"status": {"token": secret, "reason": "x"}}, token=secret),
        await site.put(f"nodes/{name}", changed),
    ):
        assert reply.status == 200, reply
    assert reply.body["status"]["message"] == "hello"
    async with site.context.database.reader() as db:
        for table in ("object", "change"):
            rows = await db.fetch(f"SELECT doc, status FROM {table} WHERE kind = 'Node' AND name = $1", name)
            assert rows
            stored = b"".join(bytes(row["doc"] or b"") + bytes(row["status"] or b"") for row in rows)
            for word in (secret.encode(), b'"token"', b'"allocated"', b"2000-01-01"):
                assert word not in stored, (table, word)


async def test_only_the_node_itself_gives_signs_of_life(site: Site) -> None:
    registered = await node(site)
    name, secret = registered["metadata"]["name"], registered["status"]["token"]

    async def seen() -> Any:
        async with site.context.database.reader() as db:
            return (await node_store.load_last_seen(db, [name])).get(name)

    before = await seen()
    path = f"nodes/{name}/status"
    assert (await site.patch(path, {"status": {"message": "a"}})).status == 200
    assert (await site.patch(path, {"status": {"message": "b"}}, token=secret, dryRun="All")).status == 200
    assert await seen() == before
    assert (await site.patch(path, {"status": {"message": "c"}}, token=secret)).status == 200
    assert await seen() != before
