"""Nodes join and come again: tokens that are used up and given back, and certificates for their keys."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bursar.core.values.certificate import NodeIdentity, identity_in
from bursar.core.values.refusal import Refusal
from bursar.ops.access.token import consume_token, restore_token
from bursar.ops.nodes.node_ca import refused_identities
from bursar.ops.nodes.x509 import fingerprint, read_request
from support.api.site import Reply, Site
from support.nodes.certificates import new_key, read, request_for, uris_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADDRESS = "bursar.example:9090"
LABELS = {"gpu-type": "h100"}
TAINT = {"key": "fresh", "value": "yes", "effect": "NoSchedule"}


@pytest.fixture(autouse=True)
def served_agents(site: Site) -> Iterator[None]:
    site.context.grpc_address = ADDRESS
    yield
    site.context.grpc_address = ADDRESS


def order(key: Any = None, **node: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"certificateRequest": request_for(key or new_key()).decode()}
    return {**body, "node": node} if node else body


def described(cpu: str = "8", labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"labels": LABELS if labels is None else labels},
        "spec": {"capacity": {"cpu": cpu, "nvidia.com/gpu": "8"}, "taints": [TAINT]},
    }


async def ask(site: Site, name: str, token: str | None, body: Any = None) -> Reply:
    return await site.post(f"nodes/{name}/certificates", order(**described()) if body is None else body, token=token)


async def joined(site: Site, name: str) -> NodeIdentity:
    return identity(await ask(site, name, await site.token("node", node=name)))


def identity(reply: Reply) -> NodeIdentity:
    assert reply.status == 201, reply
    found = identity_in(uris_in(read(reply.body["certificate"])))
    assert found is not None
    return found


async def counts(site: Site, one: NodeIdentity) -> bool:
    async with site.context.database.reader() as db:
        return not await refused_identities(db, [one])


async def test_a_node_joins_with_its_token(site: Site) -> None:
    name, key = site.name("gpu"), new_key()
    reply = await ask(site, name, await site.token("node", node=name), order(key, **described()))
    assert reply.status == 201
    assert set(reply.body) == {"certificate", "authority", "address", "expires"}
    certificate, authority = read(reply.body["certificate"]), read(reply.body["authority"])
    certificate.verify_directly_issued_by(authority)
    assert certificate.public_key() == key.public_key()
    assert identity(reply).node == name
    assert reply.body["address"] == ADDRESS
    assert reply.body["expires"] == certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert abs(certificate.not_valid_after_utc - datetime.now(UTC) - timedelta(hours=24)) < timedelta(minutes=1)
    node = (await site.get(f"nodes/{name}")).body
    assert node["metadata"]["labels"].items() >= LABELS.items()
    assert node["spec"]["taints"] == [TAINT]
    assert node["status"]["allocatable"] == {"cpu": "8", "nvidia.com/gpu": "8"}
    assert "capacity" not in node["spec"], "that is for administrators to say"
    assert await counts(site, identity(reply))


async def test_a_node_need_not_describe_itself(site: Site) -> None:
    name = site.name("gpu")
    assert (await ask(site, name, await site.token("node", node=name), order())).status == 201
    assert (await site.get(f"nodes/{name}")).status == 200


async def test_a_token_is_good_for_one_use(site: Site) -> None:
    name = site.name("gpu")
    token = await site.token("node", node=name)
    assert (await ask(site, name, token)).status == 201
    again = await ask(site, name, token)
    assert again.status == 401
    assert "was for a single use, and was used at" in again.message


async def test_who_did_not_get_the_answer_asks_again_with_the_same_key(site: Site) -> None:
    name, key = site.name("gpu"), new_key()
    token = await site.token("node", node=name, ttl="10m")
    first = await ask(site, name, token, order(key, **described()))
    again = await ask(site, name, token, order(key, **described()))
    assert identity(first) == identity(again), "the node is who it was"
    assert await counts(site, identity(first))
    assert read(again.body["certificate"]).public_key() == key.public_key()
    other = await ask(site, name, token)
    assert other.status == 401
    assert "was for a single use, and was used at" in other.message
    assert (await site.post("nodes", {"metadata": {"name": name}}, token=token)).status == 401
    assert (await site.get(f"nodes/{name}", token=token)).status == 403
    async with site.context.database.reader() as db:
        await db.execute("UPDATE token SET expires_at = now() - interval '1 s' WHERE node = $1", name)
    site.context.authenticator.forget(token.split("_")[1])
    assert (await ask(site, name, token, order(key))).status == 401


async def test_also_when_the_server_died_before_the_node_was_registered(site: Site) -> None:
    name, key = site.name("gpu"), new_key()
    token = await site.token("node", node=name)
    public = read_request(request_for(key))
    assert not isinstance(public, Refusal)
    async with site.context.database.reader() as db:
        assert await consume_token(db, token.split("_")[1], datetime.now(UTC), fingerprint(public))
    assert (await ask(site, name, token)).status == 401, "the token is another key's by now"
    assert await counts(site, identity(await ask(site, name, token, order(key))))


async def test_the_same_key_many_times_at_once_is_one_node(site: Site) -> None:
    name, key = site.name("gpu"), new_key()
    token = await site.token("node", node=name)
    replies = await asyncio.gather(*(ask(site, name, token, order(key)) for _ in range(8)))
    (one,) = {identity(reply) for reply in replies}
    assert await counts(site, one)


@pytest.mark.parametrize("how", ["enrolled", "deleted", "revoked"])
async def test_nobody_asks_again_for_what_counts_no_more(site: Site, how: str) -> None:
    name, key = site.name("gpu"), new_key()
    token = await site.token("node", node=name)
    stolen = identity(await ask(site, name, token, order(key)))
    if how == "enrolled":
        now = await joined(site, name)
    elif how == "deleted":
        await site.delete(f"nodes/{name}")
        now = await joined(site, name)
    else:
        await site.delete(f"tokens/{token.split('_')[1]}")
        now = stolen
    assert (await ask(site, name, token, order(key))).status == 401
    assert await counts(site, now)


async def test_a_repeat_that_is_refused_makes_the_token_nobody_elses(site: Site) -> None:
    name, key = site.name("gpu"), new_key()
    token = await site.token("node", node=name)
    identity(await ask(site, name, token, order(key)))
    async with site.context.database.reader() as db:
        await restore_token(db, token.split("_")[1])
    assert (await ask(site, name, token)).status == 401
    identity(await ask(site, name, token, order(key)))


async def test_of_many_with_one_token_one_joins(site: Site) -> None:
    name = site.name("gpu")
    token = await site.token("node", node=name)
    replies = await asyncio.gather(*(ask(site, name, token) for _ in range(8)))
    assert sorted(one.status for one in replies) == [201, *[401] * 7]


async def test_the_same_token_joins_by_either_way_once(site: Site) -> None:
    name = site.name("gpu")
    token = await site.token("node", node=name)
    assert (await site.post("nodes", {"metadata": {"name": name}}, token=token)).status == 201
    assert (await ask(site, name, token)).status == 401


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("bsr_0123456789ab_" + "A" * 43, "the token is unknown"),
        ("nonsense", "neither a Bursar token nor a JWT"),
    ],
)
async def test_wrong_tokens(site: Site, token: str, why: str) -> None:
    reply = await ask(site, site.name("gpu"), token)
    assert reply.status == 401
    assert why in reply.message


async def test_an_expired_or_revoked_token_is_good_for_nothing(site: Site) -> None:
    name = site.name("gpu")
    token = await site.token("node", node=name, ttl="1h")
    async with site.context.database.reader() as db:
        await db.execute("UPDATE token SET expires_at = now() - interval '1 s' WHERE node = $1", name)
    expired = await ask(site, name, token)
    assert expired.status == 401
    assert "the token expired at" in expired.message
    token = await site.token("node", node=name)
    await site.delete(f"tokens/{token.split('_')[1]}")
    revoked = await ask(site, name, token)
    assert revoked.status == 401
    assert "the token was revoked at" in revoked.message
    assert (await site.get(f"nodes/{name}")).status == 404


async def test_a_token_is_for_the_node_it_names_and_is_still_good_for_it(site: Site) -> None:
    mine, other = site.name("gpu"), site.name("gpu")
    token = await site.token("node", node=mine)
    refused = await ask(site, other, token)
    assert refused.status == 403
    assert mine in refused.message
    assert (await site.get(f"nodes/{other}")).status == 404
    assert (await ask(site, mine, token)).status == 201


async def test_whatever_is_refused_gives_the_token_back(site: Site) -> None:
    name = site.name("gpu")
    token = await site.token("node", node=name)
    bodies: list[tuple[Any, str]] = [
        ({}, "certificateRequest"),
        ({"certificateRequest": "hello"}, "PKCS #10"),
        ({"certificateRequest": 7}, "certificateRequest"),
        (order(metadata={"name": "another"}), "the path says"),
        (order(metadata={}, spec={"capacity": {"cpu": "many"}}), "spec.capacity"),
        (order(metadata={"labels": {"": "x"}}), "metadata.labels"),
        (order(metadata={}, surprise=1), "surprise"),
        ({**order(), "node": [1]}, "node"),
    ]
    for body, why in bodies:
        reply = await ask(site, name, token, body)
        assert reply.status == 400, (body, reply)
        assert why in reply.message
    assert (await site.get(f"nodes/{name}")).status == 404
    assert (await ask(site, name, token)).status == 201


async def test_a_name_that_no_node_may_have(site: Site) -> None:
    name = "Upper_Case"
    reply = await ask(site, name, await site.token("node", node=name))
    assert reply.status == 400
    assert "metadata.name" in reply.message


async def test_where_no_agents_are_served_the_token_is_kept(site: Site) -> None:
    name = site.name("gpu")
    token = await site.token("node", node=name)
    site.context.grpc_address = ""
    refused = await ask(site, name, token)
    assert refused.status == 503
    assert "--grpc-advertise" in refused.body["details"]["hint"]
    site.context.grpc_address = ADDRESS
    assert (await ask(site, name, token)).status == 201


async def test_coming_again_replaces_the_key_and_changes_nothing_else(site: Site) -> None:
    name = site.name("gpu")
    first = await joined(site, name)
    before = (await site.get(f"nodes/{name}")).body
    body = order(**described("64", {"gpu-type": "h200", "trusted": "yes"}))
    second = identity(await ask(site, name, await site.token("node", node=name), body))
    assert (await site.get(f"nodes/{name}")).body == before
    assert not await counts(site, first)
    assert await counts(site, second)


async def test_a_node_with_a_token_of_its_own_gets_more(site: Site) -> None:
    name = site.name("gpu")
    made = await site.post("nodes", {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "8"}}})
    token = made.body["status"]["token"]
    first = identity(await ask(site, name, token))
    second = identity(await ask(site, name, token))
    assert first == second
    assert await counts(site, first)
    assert "gpu-type" not in (await site.get(f"nodes/{name}")).body["metadata"]["labels"]
    other = await ask(site, site.name("gpu"), token)
    assert other.status == 403


async def test_an_administrator_enrols_any_node(site: Site) -> None:
    name = site.name("gpu")
    assert await counts(site, identity(await ask(site, name, None)))


async def test_with_the_node_go_its_certificates(site: Site) -> None:
    name = site.name("gpu")
    first = await joined(site, name)
    assert (await site.delete(f"nodes/{name}", dryRun="All")).status == 200
    assert await counts(site, first)
    assert (await site.delete(f"nodes/{name}")).status == 200
    assert not await counts(site, first)
    assert (await site.post("nodes", {"metadata": {"name": name}})).status == 201
    assert not await counts(site, first)
    assert await counts(site, await joined(site, name))


async def test_only_nodes_and_administrators_ask(site: Site) -> None:
    for role in ("user", "viewer", "tenant-admin", "service", "approver", "billing-admin"):
        whose = {"tenant": "default"} if role in ("user", "viewer", "tenant-admin") else {}
        reply = await ask(site, site.name("gpu"), await site.token(role, **whose))
        assert reply.status == 403, role


async def test_no_dry_run(site: Site) -> None:
    name = site.name("gpu")
    reply = await site.post(f"nodes/{name}/certificates", order(), dryRun="All")
    assert reply.status == 400
    assert (await site.get(f"nodes/{name}")).status == 404


async def test_whoever_has_a_token_may_know_the_authority(site: Site) -> None:
    bootstrap = await site.token("node", node=site.name("gpu"))
    viewer = await site.token("viewer", tenant="default")
    answers = [await site.get("authority", token=token) for token in (bootstrap, viewer, None)]
    assert [one.status for one in answers] == [200] * 3
    assert len({one.body["authority"] for one in answers}) == 1
    certificate = read(answers[0].body["authority"])
    assert answers[0].body["expires"] == certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert answers[0].body["address"] == ADDRESS
    assert "PRIVATE" not in str(answers[0].body)
    assert (await site.get("authority", token="nonsense")).status == 401


async def test_no_secret_is_in_the_feed(site: Site) -> None:
    name = site.name("gpu")
    await joined(site, name)
    async with site.context.database.reader() as db:
        rows = await db.fetch("SELECT change::text AS text FROM change")
    told = "".join(row["text"] for row in rows)
    assert name in told
    assert "PRIVATE KEY" not in told
    assert "CERTIFICATE" not in told
