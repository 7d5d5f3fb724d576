"""Who may do what with credit over HTTP, whose accounts they see; and prices."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from bursar.api.credit.credit import continue_token
from support.api.credit_site import GPU, bank, code, fields, money
from support.api.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


# Who may, and who sees.


ROLES = """
billing-admin  POST  topups          201
billing-admin  POST  refunds         201
billing-admin  POST  adjustments     201
billing-admin  POST  prices          201
billing-admin  PUT   limits          200
billing-admin  PATCH accounts        200
billing-admin  GET   ledger          200
billing-admin  GET   ledger/verify   200
billing-admin  POST  leases          403
service        POST  topups          201
service        POST  refunds         403
service        POST  adjustments     403
service        POST  prices          403
service        PUT   limits          200
service        PATCH accounts        403
service        POST  leases          201
tenant-admin   POST  topups          403
tenant-admin   POST  adjustments     403
tenant-admin   PUT   limits          403
tenant-admin   PATCH accounts        403
tenant-admin   POST  leases          201
tenant-admin   POST  usage           403
tenant-admin   GET   ledger          403
user           POST  topups          403
user           POST  refunds         403
user           POST  prices          403
user           PUT   limits          403
user           PATCH accounts        403
user           POST  leases          201
user           POST  usage           403
user           GET   ledger/verify   403
user           GET   prices          200
user           GET   statements      200
viewer         POST  leases          403
viewer         GET   balance         200
node           POST  leases          403
node           GET   balance         403
approver       POST  topups          403
approver       GET   balance         200
"""


@pytest.mark.parametrize("line", [line for line in ROLES.splitlines() if line])
async def test_who_may_do_what(site: Site, line: str) -> None:
    role, method, path, status = line.split()
    one = await bank(site)
    whose = {"tenant": one.tenant} if role in ("tenant-admin", "user", "viewer") else {}
    named = {"node": "n-1", "single_use": False} if role == "node" else {"user": "someone"}
    token = await site.token(role, **whose, **named)
    bodies: dict[str, Any] = {
        "leases": {"job_id": "a", "gpu_type": "h100", "gpu_count": 1, "request_id": one.id()},
        "prices": {"resource": "example.com/thing", "class": one.tenant, "per_second": "1"},
        "limits": {"concurrency": 4},
        "accounts": {"low_balance": "1"},
        "usage": {"job_id": "a", "seq": 1, "start_ts": "2026-01-01", "end_ts": "2026-01-01"},
    }
    body = bodies.get(path, {"amount": "1", "reason": "why", "request_id": one.id()}) if method != "GET" else None
    query: dict[str, Any] = {} if path in ("prices", "usage") or path.startswith("ledger") else {"account": one.tenant}
    before = await money(site)
    reply = await site.ask(method, path, body, token=token, **query)
    assert reply.status == int(status), reply
    assert (reply.status < 400) or await money(site) == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "balance?account={}"), ("GET", "forecast?account={}"), ("GET", "statements?account={}"),
        ("GET", "statements?tenant={}"), ("GET", "limits?account={}"), ("GET", "limits/{}"), ("GET", "accounts/{}"),
        ("GET", "leases?account={}"), ("GET", "leases?state=ended&account={}"), ("POST", "leases?account={}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["user", "tenant-admin", "viewer"])
async def test_another_tenants_account_does_not_exist(site: Site, method: str, path: str, role: str) -> None:
    one, other = await bank(site), await bank(site)
    token = await site.token(role, tenant=one.tenant, user="ada")
    if role == "viewer" and method == "POST":
        return
    body = {"job_id": "a", "gpu_type": "h100", "gpu_count": 1, "request_id": one.id()} if method == "POST" else None
    replies = []
    for name in (other.tenant, "no-such-tenant"):
        where, _, query = path.format(name).partition("?")
        pairs: dict[str, Any] = dict(pair.split("=") for pair in query.split("&")) if query else {}
        replies.append(await site.ask(method, where, body, token=token, **pairs))
    assert [reply.status for reply in replies] == [404, 404]
    assert replies[0].message.replace(other.tenant, "X") == replies[1].message.replace("no-such-tenant", "X")


async def test_users_see_their_own_account_and_the_tenants_and_no_colleagues(site: Site) -> None:
    one = await bank(site)
    for user in ("ada", "bob"):
        await site.post("accounts", {"tenant": one.tenant, "user": user})
    assert (await site.get("balance", token=one.user, account=one.tenant)).status == 200
    assert (await site.get("balance", token=one.user, account=f"{one.tenant}/ada")).status == 200
    assert (await site.get("balance", token=one.user, account=f"{one.tenant}/bob")).status == 404
    listed = (await site.get("accounts", token=one.user)).body["items"]
    assert [item["account"] for item in listed] == [one.tenant, f"{one.tenant}/ada"]
    boss = await site.token("tenant-admin", tenant=one.tenant, user="boss")
    listed = (await site.get("accounts", token=boss)).body["items"]
    assert [item["account"] for item in listed] == [one.tenant, f"{one.tenant}/ada", f"{one.tenant}/bob"]


async def test_a_page_of_accounts_ends_at_one_that_the_caller_sees(site: Site) -> None:
    one = await bank(site)
    for user in ("ada", "a-secret-colleague", "bob"):
        await site.post("accounts", {"tenant": one.tenant, "user": user})
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 1}
    while True:
        page = (await site.get("accounts", token=one.user, **query)).body
        seen += [item["account"] for item in page["items"]]
        if not page["continue"]:
            break
        assert "secret" not in base64.urlsafe_b64decode(page["continue"]).decode()
        query["continue"] = page["continue"]
    assert seen == [one.tenant, f"{one.tenant}/ada"]


async def test_users_extend_and_close_what_is_paid_by_the_account_that_pays_for_them(site: Site) -> None:
    one = await bank(site)
    lease = await one.leased("train")
    bob = await site.token("user", tenant=one.tenant, user="bob")
    boss = await site.token("tenant-admin", tenant=one.tenant, user="boss")
    assert (await one.act(lease, "extend", token=bob, delta_seconds=1)).status == 200, "the tenant's pays for both"
    await site.post("accounts", {"tenant": one.tenant, "user": "bob"})
    before = await money(site)
    for verb, more in (("extend", {"delta_seconds": 1}), ("close", {})):
        reply = await one.act(lease, verb, token=bob, **more)
        assert code(reply) == (403, "forbidden")
        assert reply.message == f"account {one.tenant}/bob pays for you, and not {one.tenant}"
    assert await money(site) == before
    assert (await site.get(f"leases/{lease}", token=bob)).status == 200, "seen it may be"
    await site.post("accounts", {"tenant": one.tenant, "user": "ada"})
    assert (await one.act(lease, "extend", delta_seconds=1)).status == 200, "ada opened it"
    assert (await one.act(lease, "extend", token=boss, delta_seconds=1)).status == 200
    assert (await one.act(lease, "close", token=boss)).status == 200


async def test_an_administrator_of_a_parent_sees_what_is_below(site: Site) -> None:
    one = await bank(site)
    child = site.name("child")
    await site.post("tenants", {"metadata": {"name": child}, "spec": {"parent": one.tenant}})
    assert (await one.topup("2", account=child)).status == 201
    boss = await site.token("tenant-admin", tenant=one.tenant, user="boss")
    assert (await site.get("balance", token=boss, account=child)).body["posted"] == "2"
    assert (await site.get("balance", token=one.user, account=child)).status == 404
    below = await site.token("tenant-admin", tenant=child, user="boss")
    assert (await site.get("balance", token=below, account=one.tenant)).status == 404


async def test_accounts_are_listed_page_by_page(site: Site) -> None:
    one = await bank(site)
    for user in ("a", "b", "c"):
        await site.post("accounts", {"tenant": one.tenant, "user": user})
    boss = await site.token("tenant-admin", tenant=one.tenant, user="boss")
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = (await site.get("accounts", token=boss, **query)).body
        seen += [item["account"] for item in page["items"]]
        if not page["continue"]:
            break
        query["continue"] = page["continue"]
    assert seen == [one.tenant, *(f"{one.tenant}/{user}" for user in "abc")]
    assert (await site.get("accounts", **{"continue": "nonsense"})).status == 400
    assert (await site.get("accounts", **{"continue": continue_token("\0", "a")})).status == 400
    assert (await site.get("accounts", limit="-1")).status == 400


# Prices.


async def test_prices_come_in_versions(site: Site) -> None:
    name = f"example.com/{site.name('chip')}"
    first = await site.post("prices", {"resource": name, "class": "v1", "per_second": "0.000000001"})
    assert first.status == 201
    later = {"resource": name, "class": "v1", "per_second": "2", "effective_from": "2100-01-01T00:00:00Z"}
    assert (await site.post("prices", later)).body == later
    assert (await site.post("prices", later)).status == 201
    changed = await site.post("prices", {**later, "per_second": "3"})
    assert code(changed) == (409, "already_exists")
    past = await site.post("prices", {**later, "effective_from": "2020-01-01"})
    assert code(past) == (422, "unprocessable")
    assert [one["per_second"] for one in (await site.get("prices", resource=name)).body["items"]] == ["0.000000001"]
    ahead = await site.get("prices", resource=name, at="2101-01-01")
    assert [one["per_second"] for one in ahead.body["items"]] == ["2"]
    history = await site.get("prices", resource=name, history="true")
    assert [one["per_second"] for one in history.body["items"]] == ["0.000000001", "2"]
    assert (await site.get("prices", resource=name, at="2000-01-01")).body["items"] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"per_second": "-1"}, "per_second"),
        ({"per_second": "0.0000000001"}, "per_second"),
        ({"per_second": None}, "per_second"),
        ({"resource": "not a name"}, "resource"),
        ({"resource": ""}, "resource"),
        ({"resource": "cpu"}, "class"),
        ({"class": "x" * 64}, "class"),
        ({"class": "a\tb"}, "class"),
        ({"effective_from": "tomorrow"}, "effective_from"),
        ({"effective_from": "2026-02-30"}, "effective_from"),
        ({"effective_from": "2100-01-01T00:00:00"}, "effective_from"),
        ({"from": "2100-01-01"}, "from"),
    ],
)
async def test_what_is_wrong_with_a_price_is_named(site: Site, change: dict[str, Any], field: str) -> None:
    before = await money(site)
    reply = await site.post("prices", {"resource": GPU, "class": "a", "per_second": "1", **change})
    assert code(reply) == (400, "invalid")
    assert fields(reply) == [field]
    assert await money(site) == before
