"""Approvers over HTTP: by tokens and by JWTs, within their tenants and gates, and never on their own requests."""

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from bursar.wire.kinds.registry import KINDS
from support.access.jwts import Issuer
from support.api.site import Reply, Site, allocation, opened_site

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODIES: dict[str, dict[str, Any]] = {
    "Allocation": allocation("x", cpu=1),
    "Job": {"spec": {"template": {"spec": {"resources": {"requests": {"cpu": "1"}}}}}},
    "ResourceClaim": {"spec": {"type": "cluster", "resources": {"clusters": 1}}},
}
REQUESTABLE = [kind for kind in KINDS if kind.requestable]


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("idp"), tenants_claim="decides_for", gates_claim="decides_at")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oidc_site(site: Site, issuer: Issuer) -> AsyncIterator[Site]:
    async with opened_site(site.context.database.url, oidc=issuer.settings) as one:
        await one.context.tree(fresh=True)
        yield one


@dataclass(frozen=True, slots=True)
class Family:
    """A tenant with a parent, a child and a sibling, each with a namespace of its name, whose requests are gated."""

    parent: str
    own: str
    child: str
    sibling: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def family(site: Site, oidc_site: Site) -> Family:
    one = Family("parent", "own", "child", "sibling")
    for name, above in (("parent", ""), ("own", "parent"), ("child", "own"), ("sibling", "parent")):
        spec = {"approval": {"gates": ["manual"]}, "limits": {"seats": 1}, **({"parent": above} if above else {})}
        assert (await site.post("tenants", {"metadata": {"name": name}, "spec": spec})).status == 201
        await site.namespace(tenant=name, name=name)
    await oidc_site.context.tree(fresh=True)
    return one


_numbers = itertools.count()


async def requested(site: Site, kind: Any, tenant: str, token: str | None = None) -> str:
    """A request in the namespace of a tenant, pending at the gate; its path."""
    number = next(_numbers)
    name = f"r{number}"
    # Each request for limits asks for more than the one before, which may have been approved.
    body = {**BODIES.get(kind.name, {"spec": {"limits": {"seats": 5 + number}}}), "metadata": {"name": name}}
    reply = await site.post(f"namespaces/{tenant}/{kind.plural}", body, token=token)
    assert reply.status == 201, reply
    assert reply.body["status"]["approval"]["state"] == "pending"
    return f"namespaces/{tenant}/{kind.plural}/{name}"


async def every_decision(site: Site, path: str, token: str) -> list[Reply]:
    """All ways to decide one request."""
    return [
        await site.post(f"{path}/approve", {}, token=token),
        await site.post(f"{path}/deny", {"reason": "no"}, token=token),
        await site.patch(f"{path}/approval", {"state": "approved"}, token=token),
    ]


async def _many(site: Site, path: str, kind: Any, token: str) -> int:
    _, tenant, _, name = path.split("/")
    item = {"kind": kind.name, "namespace": tenant, "name": name, "decision": "approve"}
    reply = await site.post("approvals/decide", {"items": [item]}, token=token)
    assert reply.status == 200, reply
    return int(reply.body["items"][0]["status"])


# Reach.


@pytest.mark.parametrize("kind", REQUESTABLE, ids=lambda one: one.name)
async def test_an_approver_decides_for_its_tenants_and_those_below_and_finds_no_other(
    oidc_site: Site, issuer: Issuer, family: Family, kind: Any
) -> None:
    who = {
        "token": await oidc_site.token("approver", user="ida", tenants=[family.own], gates=["manual"]),
        "jwt": issuer.sign("ida", bursar_role="approver", decides_for=[family.own, "gone"], decides_at=["manual"]),
    }
    for token in who.values():
        for tenant in (family.sibling, family.parent):
            path = await requested(oidc_site, kind, tenant)
            before = await oidc_site.state()
            assert [one.status for one in await every_decision(oidc_site, path, token)] == [404] * 3
            assert await _many(oidc_site, path, kind, token) == 404
            assert (await oidc_site.get(path, token=token)).status == 404
            assert path.rpartition("/")[2] not in (await oidc_site.get(kind.plural, token=token)).names
            listed = (await oidc_site.get("approvals", token=token)).body["items"]
            assert {one["tenant"] for one in listed} <= {family.own, family.child}
            assert await oidc_site.state() == before
        for tenant in (family.own, family.child):
            path = await requested(oidc_site, kind, tenant)
            assert [one.status for one in await every_decision(oidc_site, path, token)] == [200, 409, 409]
            path = await requested(oidc_site, kind, tenant)
            assert await _many(oidc_site, path, kind, token) == 200


@pytest.mark.parametrize("kind", REQUESTABLE, ids=lambda one: one.name)
async def test_a_gate_that_is_not_the_approvers_is_forbidden(
    oidc_site: Site, issuer: Issuer, family: Family, kind: Any
) -> None:
    for token in (
        await oidc_site.token("approver", user="ida", tenants=["*"], gates=["quota"]),
        issuer.sign("ida", bursar_role="approver", decides_for="*", decides_at="quota"),
    ):
        path = await requested(oidc_site, kind, family.own)
        before = await oidc_site.state()
        assert [one.status for one in await every_decision(oidc_site, path, token)] == [403] * 3
        assert await _many(oidc_site, path, kind, token) == 403
        assert await oidc_site.state() == before


@pytest.mark.parametrize("kind", REQUESTABLE, ids=lambda one: one.name)
async def test_nobody_else_decides(oidc_site: Site, family: Family, kind: Any) -> None:
    tokens = {
        role: await oidc_site.token(
            role, **({"tenant": family.own} if role in ("tenant-admin", "user", "viewer") else {})
        )
        for role in ("tenant-admin", "user", "viewer", "service", "billing-admin")
    }
    path = await requested(oidc_site, kind, family.own)
    before = await oidc_site.state()
    for role, token in tokens.items():
        assert {one.status for one in await every_decision(oidc_site, path, token)} == {403}, role
        # Administrators of tenants decide requests for limits of the tenants below theirs, and nothing else.
        if role == "tenant-admin":
            assert await _many(oidc_site, path, kind, token) == 403
        else:
            assert (await oidc_site.post("approvals/decide", {"items": []}, token=token)).status == 403, role
    assert await oidc_site.state() == before


# Nobody decides their own.


@pytest.mark.parametrize("tenants", [["*"], ["parent"], ["own"], ["child"]], ids=str)
async def test_a_person_does_not_decide_their_own_request_whichever_identity_they_use(
    oidc_site: Site, issuer: Issuer, family: Family, tenants: list[str]
) -> None:
    """Ann is a member of the tenant, and an approver of its parent, of itself, or of the child that she requests in."""
    kind, user = REQUESTABLE[-1], f"ann-{tenants[0].replace('*', 'all')}"
    spec = {"tenant": family.own, "user": user, "role": "tenant-admin"}
    assert (await oidc_site.post("members", {"spec": spec})).status == 201
    where = family.child if tenants == ["child"] else family.own
    member = issuer.sign(user)
    token = await oidc_site.token("approver", user=user, tenants=tenants, gates=["*"])
    own = issuer.sign(user, bursar_role="approver", decides_for=tenants, decides_at=["*"])
    path = await requested(oidc_site, kind, where, token=member)
    before = await oidc_site.state()
    for decider in (token, own):
        replies = await every_decision(oidc_site, path, decider)
        assert [one.status for one in replies] == [403] * 3
        assert "nobody approves their own request" in replies[0].message
        assert await _many(oidc_site, path, kind, decider) == 403
    assert await oidc_site.state() == before
    other = issuer.sign("bob", bursar_role="approver", decides_for=tenants, decides_at=["*"])
    assert (await oidc_site.post(f"{path}/approve", {}, token=other)).status == 200


async def test_where_the_policy_allows_it_a_person_decides_their_own(oidc_site: Site, issuer: Issuer) -> None:
    approval = {"gates": ["manual"], "selfApproval": True}
    await oidc_site.post("tenants", {"metadata": {"name": "trusting"}, "spec": {"approval": approval}})
    await oidc_site.namespace(tenant="trusting", name="trusting")
    await oidc_site.post("members", {"spec": {"tenant": "trusting", "user": "ann", "role": "user"}})
    path = await requested(oidc_site, REQUESTABLE[-1], "trusting", token=issuer.sign("ann"))
    own = issuer.sign("ann", bursar_role="approver", decides_for=["trusting"], decides_at=["manual"])
    assert (await oidc_site.post(f"{path}/approve", {}, token=own)).status == 200


# Claims.


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"decides_for": None}, "its claim decides_for is missing"),
        ({"decides_for": []}, "its claim decides_for is missing, empty"),
        ({"decides_for": [7]}, "its claim decides_for"),
        ({"decides_for": {"own": True}}, "its claim decides_for"),
        ({"decides_at": None}, "its claim decides_at is missing"),
        ({"decides_at": ["door"]}, "decides_at[0] must be one of"),
        ({"decides_for": ["nowhere"]}, "none of the JWT's tenants exists"),
        ({"iat": 1_000_000_000}, "created after it was issued"),
        ({"iat": None}, "the claim iat is missing"),
    ],
)
async def test_an_approvers_jwt_that_lacks_something_is_refused(
    oidc_site: Site, issuer: Issuer, family: Family, claims: dict[str, Any], said: str
) -> None:
    whole = {"bursar_role": "approver", "decides_for": [family.own], "decides_at": ["manual"]}
    assert (await oidc_site.get("whoami", token=issuer.sign("ida", **whole))).status == 200
    reply = await oidc_site.get("whoami", token=issuer.sign("ida", **{**whole, **claims}))
    assert (reply.status, said in reply.message) == (401, True), reply.message


async def test_an_approver_by_jwt_does_not_decide_for_a_later_tenant_of_the_name(
    oidc_site: Site, issuer: Issuer
) -> None:
    spec = {"approval": {"gates": ["manual"]}}
    for name in ("before", "stays"):
        await oidc_site.post("tenants", {"metadata": {"name": name}, "spec": spec})
    token = issuer.sign("ida", bursar_role="approver", decides_for=["before", "stays"], decides_at=["*"])
    assert set((await oidc_site.get("tenants", token=token)).names) == {"before", "stays"}
    await oidc_site.delete("tenants/before")
    await oidc_site.post("tenants", {"metadata": {"name": "before"}, "spec": spec})
    await oidc_site.namespace(tenant="before", name="before")
    path = await requested(oidc_site, REQUESTABLE[-1], "before")
    await oidc_site.context.tree(fresh=True)
    assert (await oidc_site.get("tenants", token=token)).names == ["stays"]
    assert [one.status for one in await every_decision(oidc_site, path, token)] == [404] * 3
