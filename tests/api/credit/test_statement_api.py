"""Statements, balances of the past and proofs over HTTP: everything adds up, to the last digit."""

from __future__ import annotations

import base64
import csv
import io
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from support.api.credit_site import Bank, bank, code, fields
from support.api.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def busy(site: Site) -> Bank:
    """An account with two top-ups, an adjustment, and two leases that have ended."""
    one = await bank(site, "20.5")
    await one.topup("0.000000001", reason="=SUM(A1:A9)")
    body = {"account": one.tenant, "amount": "-0.5", "reason": "a fee", "request_id": one.id()}
    assert (await site.post("adjustments", body)).status == 201
    for job in ("train", "+evil"):
        await one.act(await one.leased(job), "close")
    return one


async def test_a_statement_adds_up(site: Site) -> None:
    one = await busy(site)
    found = (await site.get("statements", token=one.user)).body
    assert found["opening"] == "0"
    assert [item["type"] for item in found["items"]] == ["topup", "topup", "adjustment"]
    assert [line["job_id"] for line in found["leases"]] == ["train", "+evil"]
    listed = [Decimal(item["amount"]) for item in (*found["items"], *found["leases"])]
    assert Decimal(found["opening"]) + sum(listed) == Decimal(found["closing"])
    assert sum(map(Decimal, found["totals"].values())) == Decimal(found["closing"])
    assert found["closing"] == (await one.balance())["posted"]
    assert found["continue"] == ""


async def test_a_statement_comes_in_pages(site: Site) -> None:
    one = await busy(site)
    whole = (await site.get("statements", account=one.tenant)).body
    items: list[Any] = []
    leases: list[Any] = []
    query: dict[str, Any] = {"limit": 1, "account": one.tenant}
    for _ in range(10):
        page = (await site.get("statements", **query)).body
        assert page["totals"] == whole["totals"]
        items, leases = items + page["items"], leases + page["leases"]
        if not page["continue"]:
            break
        query["continue"] = page["continue"]
    assert (items, leases) == (whole["items"], whole["leases"])


async def test_a_page_goes_on_only_with_what_we_gave(site: Site) -> None:
    """A token carries sums: one that others wrote, or that is of another account, is none."""
    one, other = await busy(site), await busy(site)
    given = (await site.get("statements", limit=1, account=one.tenant)).body["continue"]
    raw = base64.urlsafe_b64decode(given)
    forged = [
        raw[:-1] + bytes([raw[-1] ^ 1]),
        bytes([raw[0] ^ 1]) + raw[1:],
        raw[:32] + raw[32:].replace(b'"0"', b'"5000"', 1),
        raw[:32] + msgspec.json.encode([1, [str(2**62)] * 9, {}]),
        raw[:31],
    ]
    for token in (*(base64.urlsafe_b64encode(text).decode() for text in forged), "é", "a", given[:-3]):
        refused = await site.get("statements", limit=1, account=one.tenant, **{"continue": token})
        assert refused.status == 400, token
    assert (await site.get("statements", limit=1, account=one.tenant, **{"continue": given})).status == 200
    assert (await site.get("statements", limit=1, account=other.tenant, **{"continue": given})).status == 400


@pytest.mark.parametrize("how", ["format", "accept"])
async def test_a_statement_as_a_table(site: Site, how: str) -> None:
    one = await busy(site)
    asked: dict[str, Any] = {"format": "csv"} if how == "format" else {"headers": {"accept": "text/csv"}}
    reply = await site.get("statements", token=one.user, **asked)
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    assert f"statement-{one.tenant}.csv" in reply.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(reply.body)))
    assert [row["type"] for row in rows] == [
        "opening", "topup", "topup", "adjustment", "lease", "lease", "closing",
    ]  # fmt: skip
    opening, *moved, closing = [Decimal(row["amount"]) for row in rows]
    assert opening + sum(moved) == closing == Decimal((await one.balance())["posted"])
    # A program that opens it must not take what people wrote for a formula.
    assert rows[2]["reason"] == "'=SUM(A1:A9)"
    assert rows[5]["job_id"] == "'+evil"
    assert rows[3]["amount"] == "-0.5"


async def test_a_table_has_all_lines_however_many_pages_they_are(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from bursar.api.credit import statement

    one = await busy(site)
    whole = (await site.get("statements", token=one.user, to="2100-01-01", format="csv")).body
    monkeypatch.setattr(statement, "LINES_MAX", 1)
    assert (await site.get("statements", token=one.user, to="2100-01-01", format="csv")).body == whole


async def test_a_period_is_from_its_beginning_up_to_its_end(site: Site) -> None:
    one = await busy(site)
    second = (await site.get("statements", account=one.tenant)).body["items"][1]["at"]
    before = (await site.get("statements", account=one.tenant, to=second)).body
    after = (await site.get("statements", account=one.tenant, **{"from": second})).body
    assert (before["closing"], after["opening"]) == ("20.5", "20.5")
    assert len(before["items"]) == 1
    assert after["items"][0]["at"] == second
    empty = (await site.get("statements", account=one.tenant, **{"from": "2020-01-01", "to": "2020-02-01"})).body
    assert (empty["opening"], empty["closing"], empty["items"], empty["leases"]) == ("0", "0", [], [])
    # What was there before that moment; in another zone's words it is the same time.
    assert (await site.get("balance", account=one.tenant, at=second)).body["posted"] == "20.5"
    assert (await site.get("balance", account=one.tenant, at="1999-12-31T23:00:00-05:00")).body["posted"] == "0"


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("statements", {"from": "soon"}),
        ("statements", {"to": "2026-13-01"}),
        ("statements", {"from": "2026-11-16T07:00:00"}),
        ("statements", {"from": "2026-11-16", "to": "2026-11-15"}),
        ("statements", {"format": "pdf"}),
        ("statements", {"limit": "many"}),
        ("statements", {"continue": "bm9uc2Vuc2U="}),
        ("balance", {"at": "1969-12-31"}),
        ("balance", {"at": "99999-01-01"}),
    ],
)
async def test_what_is_no_period_is_refused(site: Site, path: str, query: dict[str, str]) -> None:
    one = await bank(site)
    assert code(await site.get(path, token=one.user, **query)) == (400, "invalid")


async def test_the_sums_of_a_tenant(site: Site) -> None:
    one = await busy(site)
    await site.post("accounts", {"tenant": one.tenant, "user": "bob"})
    await one.topup("4", account=f"{one.tenant}/bob")
    boss = await site.token("tenant-admin", tenant=one.tenant, user="boss")
    found = (await site.get("statements", token=boss, tenant=one.tenant)).body
    assert [item["account"] for item in found["accounts"]] == [one.tenant, f"{one.tenant}/bob"]
    assert sum(Decimal(item["closing"]) for item in found["accounts"]) == Decimal(found["closing"])
    assert (await site.get("statements", token=one.user, tenant=one.tenant)).status == 404
    both = await site.get("statements", token=boss, tenant=one.tenant, account=one.tenant)
    assert code(both) == (400, "invalid")
    assert code(await site.get("statements", token=boss, tenant=one.tenant, format="csv")) == (406, "not_acceptable")


async def test_the_ledger_is_whole_and_its_head_can_be_written_down(site: Site) -> None:
    from bursar.ops.credit.seal import seal

    await busy(site)
    await seal(site.context.runtime)
    verdict = (await site.get("ledger/verify")).body
    assert (verdict["sound"], verdict["findings"], verdict["more"]) == (True, [], False)
    head = verdict["head"]
    assert (await site.get("ledger/verify", anchor=head)).body["sound"] is True
    block, _, digest = head.partition(":")
    forged = f"{block}:{digest[::-1]}"
    found = (await site.get("ledger/verify", anchor=forged)).body
    assert found["sound"] is False
    assert found["findings"][0]["where"] == f"block {block}"
    assert fields(await site.get("ledger/verify", anchor="7:nonsense")) == ["anchor"]
    assert fields(await site.get("ledger/verify", after="-1")) == ["after"]
    standing = (await site.get("ledger")).body
    assert standing["head"] == head
    assert standing["sealed_entry"] == standing["last_entry"]
    async with site.context.database.reader() as db:
        people = await db.fetchval("SELECT sum(posted) FROM account WHERE id >= 100")
    system = sum(Decimal(amount) for amount in standing["accounts"].values())
    assert system * 10**9 + people == 0
