"""The keys that sign what is granted to nodes, over the API: everybody reads them, administrators change them."""

import httpx2
import pytest
from joserfc import jwt
from joserfc.jwk import KeySet

from bursar.ops.nodes.signing import Granted
from support.api.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")

JWKS = "/.well-known/jwks.json"


async def test_everybody_may_verify_what_was_signed(site: Site) -> None:
    async with httpx2.AsyncClient() as stranger:
        answer = await stranger.get(site.url + JWKS)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert "max-age" in answer.headers["cache-control"]
    assert "d" not in answer.json()["keys"][0]
    token = (await site.context.runtime.signing.ring()).sign("n1", "word", 1, [Granted("lease-1", "a", 1, 120)])
    claims = jwt.decode(token, KeySet.import_key_set(answer.json()), algorithms=["Ed25519"]).claims
    granted = {"id": "lease-1", "uid": "a", "epoch": 1, "seconds": 120, "rate": "0", "expires_at": 0, "final": False}
    assert claims["leases"] == [granted]


async def test_a_rotation_shows_at_once_and_keeps_the_old_key_for_a_while(site: Site) -> None:
    before = [one["kid"] for one in (await site.get(JWKS)).body["keys"]]
    reply = await site.post("ledger/keys", {"reason": "a quarter has passed"})
    assert reply.status == 201, reply
    after = [one["kid"] for one in (await site.get(JWKS)).body["keys"]]
    assert after == [*before, reply.body["key"]] == reply.body["believed"]
    stolen = await site.post("ledger/keys", {"overlapSeconds": 0, "reason": "a backup was stolen"})
    assert [one["kid"] for one in (await site.get(JWKS)).body["keys"]] == [stolen.body["key"]]


async def test_a_repeated_rotation_has_one_effect(site: Site) -> None:
    body = {"request_id": "once", "reason": "planned"}
    first, again = await site.post("ledger/keys", body), await site.post("ledger/keys", body)
    assert (first.status, first.body) == (again.status, again.body)
    other = await site.post("ledger/keys", {**body, "overlapSeconds": 0})
    assert other.status == 422
    assert len((await site.get(JWKS)).body["keys"]) == len(first.body["believed"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"overlapSeconds": -1}, "overlapSeconds"),
        ({"overlapSeconds": 10**9}, "overlapSeconds"),
        ({"overlapSeconds": 1.5}, "overlapSeconds"),
        ({"overlap": 1}, "overlap"),
        ({"reason": "x" * 2000}, "reason"),
    ],
)
async def test_what_cannot_be_meant_changes_nothing(site: Site, body: dict[str, object], field: str) -> None:
    before = (await site.get(JWKS)).body
    reply = await site.post("ledger/keys", body)
    assert reply.status == 400
    assert field in reply.message
    assert (await site.get(JWKS)).body == before


@pytest.mark.parametrize("role", ["billing-admin", "service", "approver"])
async def test_only_administrators_of_the_system_change_them(site: Site, role: str) -> None:
    token = await site.token(role, user="x")
    assert (await site.post("ledger/keys", {}, token=token)).status == 403
