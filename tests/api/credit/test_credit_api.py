"""Credit over HTTP: what comes to accounts, what moves once, what limits them, and every no."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.api.credit_site import bank, code, fields, money
from support.api.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


# Amounts.


@pytest.mark.parametrize(
    ("written", "counted"),
    [
        ("1.10", "1.1"),
        ("0.123456789", "0.123456789"),
        ("123456789.123456789", "123456789.123456789"),  # a float has 123456789.12345679
        ("3503599627.370497001", "3503599627.370497001"),
        ("1e2", "100"),
        ("5E-1", "0.5"),
        ("7", "7"),
        ('"0.000000001"', "0.000000001"),
        ('"0012.50"', "12.5"),
    ],
)
async def test_amounts_are_read_digit_by_digit(site: Site, written: str, counted: str) -> None:
    one = await bank(site, "")
    body = f'{{"amount": {written}, "account": "{one.tenant}", "request_id": "{one.id()}"}}'
    reply = await site.post("topups", body.encode())
    assert reply.status == 201, reply
    assert reply.body.pop("at")
    assert reply.body == {"account": one.tenant, "amount": counted, "new_balance": counted, "available": counted}
    assert (await one.balance())["posted"] == counted


@pytest.mark.parametrize(
    "written",
    [
        "0", "-1", "-0.5", '"0"', '"-3"', '"0.0000000001"', "0.0000000001", "1e-30", '"1e3"',
        "4000000001", '"4000000000.000000001"', "99999999999", '"NaN"', '"Infinity"', '""', '" 1"', '"1 "', '"１"',
        '"0x10"', '"1_000"', '"1,5"', "true", "null", "[1]", '{"a": 1}', "1" * 400, '"' + "1" * 400 + '"',
    ],
)  # fmt: skip
async def test_what_is_no_amount_is_refused_and_leaves_nothing(site: Site, written: str) -> None:
    one = await bank(site, "1")
    before = await money(site)
    body = f'{{"amount": {written}, "account": "{one.tenant}", "request_id": "{one.id()}"}}'
    reply = await site.post("topups", body.encode())
    assert code(reply) == (400, "invalid")
    assert fields(reply) == ["amount"]
    assert await money(site) == before


@pytest.mark.parametrize("written", ["1e400", "-1e400", "1e999999999", "Infinity", "NaN", "01", "1.", ".5", "+1"])
async def test_what_is_no_number_in_json_is_refused(site: Site, written: str) -> None:
    one = await bank(site, "1")
    before = await money(site)
    body = f'{{"amount": {written}, "account": "{one.tenant}", "request_id": "{one.id()}"}}'
    assert code(await site.post("topups", body.encode())) == (400, "invalid")
    assert await money(site) == before


async def test_yaml_may_bring_amounts_as_text_but_not_as_a_fraction(site: Site) -> None:
    one = await bank(site, "")
    text = f"account: {one.tenant}\nrequest_id: {one.id()}\namount: "
    assert fields(await site.post("topups", f"{text}0.1".encode(), media="application/yaml")) == ["amount"]
    assert (await site.post("topups", f"{text}'0.1'".encode(), media="application/yaml")).body["amount"] == "0.1"


async def test_no_account_can_hold_more_than_can_be_counted(site: Site) -> None:
    one = await bank(site, "3999999999.999999999")
    reply = await one.topup("0.000000002")
    assert code(reply) == (400, "invalid")
    assert "4000000000" in reply.message
    assert (await one.topup("0.000000001")).body["new_balance"] == "4000000000"


# Once.


async def test_a_repeated_topup_has_one_effect_and_one_answer(site: Site) -> None:
    one = await bank(site, "")
    body = {"amount": "10", "account": one.tenant, "request_id": one.id()}
    replies = await asyncio.gather(*(site.post("topups", body) for _ in range(20)))
    assert {reply.status for reply in replies} == {201}
    await one.topup("5")
    later = await site.post("topups", body)
    assert [reply.body for reply in (*replies, later)] == [replies[0].body] * 21
    replayed = [reply.headers.get("idempotent-replayed", "") for reply in (*replies, later)]
    assert sorted(replayed) == ["", *["true"] * 20]
    assert replayed[-1] == "true"
    assert (await one.balance())["posted"] == "15"


@pytest.mark.parametrize("change", [{"amount": "11"}, {"amount": "10.0"}, {"reason": "again"}])
async def test_the_same_id_with_another_body_is_refused(site: Site, change: dict[str, Any]) -> None:
    one = await bank(site, "")
    body = {"amount": "10", "account": one.tenant, "request_id": one.id()}
    assert (await site.post("topups", body)).status == 201
    before = await money(site)
    assert code(await site.post("topups", {**body, **change})) == (422, "request_id_reused")
    assert await money(site) == before


async def test_how_a_body_is_written_makes_no_other_request_of_it(site: Site) -> None:
    one = await bank(site, "")
    id_ = one.id()
    written = f'{{"amount": "10", "account": "{one.tenant}", "request_id": "{id_}"}}'.encode()
    first = await site.post("topups", written)
    assert first.status == 201
    for other in (
        f'{{\n  "request_id": "{id_}",\n  "account": "{one.tenant}",\n  "amount": "10"\n}}\n'.encode(),
        f'{{"account":"{one.tenant}","amount":"\\u0031\\u0030","request_id":"{id_}","reason":""}}'.encode(),
    ):
        again = await site.post("topups", other)
        assert (again.status, again.body) == (201, first.body)
    headed = f'{{"account": "{one.tenant}", "amount": "10"}}'.encode()
    again = await site.post("topups", headed, headers={"idempotency-key": id_})
    assert (again.status, again.body) == (201, first.body)
    assert (await one.balance())["posted"] == "10"
    id_ = one.id()
    resources = [{"cpu": 1, "example.com/chip": 0}, {"example.com/chip": 0, "cpu": 1}]
    opened = [await one.lease(request_id=id_, resources=each) for each in resources]
    assert opened[0].status == 201
    assert opened[0].body == opened[1].body


async def test_nobody_is_given_the_answer_that_was_anothers(site: Site) -> None:
    one = await bank(site, "")
    body = {"amount": "10", "account": one.tenant, "request_id": one.id()}
    assert (await site.post("topups", body)).status == 201
    other = await site.token("billing-admin", user="bill")
    assert code(await site.post("topups", body, token=other)) == (422, "request_id_reused")


async def test_ids_are_the_tenants_own_and_the_verbs_own(site: Site) -> None:
    one, other = await bank(site, "1"), await bank(site, "1")
    same = "the-same-id"
    assert (await one.topup("1", request_id=same)).status == 201
    assert (await other.topup("1", request_id=same)).status == 201
    assert (await one.lease(request_id=same)).status == 201
    assert (await one.balance())["posted"] == (await other.balance())["posted"] == "2"


@pytest.mark.parametrize("path", ["topups", "refunds", "adjustments", "leases"])
async def test_what_moves_credit_needs_a_request_id(site: Site, path: str) -> None:
    one = await bank(site)
    body: dict[str, Any] = {"account": one.tenant}
    body |= (
        {"job_id": "a", "gpu_type": "h100", "gpu_count": 1} if path == "leases" else {"amount": "1", "reason": "why"}
    )
    before = await money(site)
    reply = await site.post(path, body)
    assert code(reply) == (400, "invalid")
    assert fields(reply) == ["request_id"]
    assert await money(site) == before
    keyed = await site.post(path, body, headers={"idempotency-key": one.id()})
    assert keyed.status == 201
    assert fields(await site.post(path, body, headers={"idempotency-key": "x" * 129})) == ["request_id"]


@pytest.mark.parametrize("request_id", ["x" * 129, "a\nb", "ü", 7, None])
async def test_a_request_id_is_short_and_plain(site: Site, request_id: Any) -> None:
    one = await bank(site, "1")
    assert fields(await one.topup("1", request_id=request_id)) == ["request_id"]


# Accounts.


async def test_a_tenants_account_begins_with_its_first_topup(site: Site) -> None:
    one = await bank(site, "")
    missing = await site.get("balance", account=one.tenant)
    assert code(missing) == (404, "not_found")
    assert "topup" in missing.body["details"]["hint"]
    assert (await one.topup("3")).body["new_balance"] == "3"
    assert code(await one.topup("3", account=f"{one.tenant}/nobody")) == (404, "not_found")
    assert code(await one.topup("3", account="no-such-tenant")) == (404, "not_found")


async def test_a_users_own_account_pays_for_that_user(site: Site) -> None:
    one = await bank(site)
    own = f"{one.tenant}/ada"
    opened = await site.post("accounts", {"tenant": one.tenant, "user": "ada", "low_balance": "0.5"})
    assert opened.status == 201
    assert (opened.body["account"], opened.body["low_balance"]) == (own, "0.5")
    assert code(await site.post("accounts", {"tenant": one.tenant, "user": "ada"})) == (409, "already_exists")
    assert code(await site.post("accounts", {"tenant": "no-such-tenant"})) == (404, "not_found")
    refused = await one.lease()
    assert code(refused) == (403, "insufficient_credit")
    assert own in refused.message
    assert code(await one.lease(account=one.tenant)) == (403, "forbidden")
    await one.topup("1", account=own)
    assert (await one.lease()).body["account"] == own
    assert (await site.get("balance", token=one.user)).body == {
        "account": own, "available": "0.4", "holds": "0.6", "posted": "1", "credit_limit": "0", "status": "active",
    }  # fmt: skip
    assert (await one.balance())["available"] == "50"


async def test_an_account_is_suspended_let_go_on_and_closed(site: Site) -> None:
    one = await bank(site)
    lease = await one.leased()
    assert (await site.ask("PATCH", f"accounts/{one.tenant}", {"status": "suspended"})).body["status"] == "suspended"
    for refused in (await one.lease(), await one.act(lease, "extend", delta_seconds=5)):
        assert code(refused) == (403, "account_inactive")
    assert (await one.topup("1")).status == 201
    in_use = await site.ask("PATCH", f"accounts/{one.tenant}", {"status": "closed"})
    assert code(in_use) == (409, "in_use")
    assert (await one.act(lease, "close")).status == 200
    assert (await site.ask("PATCH", "accounts", {"status": "active"}, account=one.tenant)).body["status"] == "active"
    assert (await one.lease()).status == 201


async def test_a_credit_limit_lets_an_account_owe_so_much_and_no_more(site: Site) -> None:
    one = await bank(site, "0.1")
    changed = await site.ask("PATCH", f"accounts/{one.tenant}", {"credit_limit": 0.55})
    assert (changed.body["credit_limit"], changed.body["available"]) == ("0.55", "0.65")
    await one.leased()
    assert (await one.balance())["available"] == "0.05"
    merged = await site.patch(f"accounts/{one.tenant}", {"credit_limit": 0.65})  # as a merge patch it is no less exact
    assert merged.body["credit_limit"] == "0.65"
    lowered = await site.ask("PATCH", f"accounts/{one.tenant}", {"credit_limit": "0.1"})
    assert code(lowered) == (403, "insufficient_credit")
    assert code(await one.lease()) == (403, "insufficient_credit")
    assert (await one.balance())["available"] == "0.15"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, ""),
        ({"status": "asleep"}, "status"),
        ({"credit_limit": "-1"}, "credit_limit"),
        ({"credit_limit": None}, "credit_limit"),
        ({"low_balance": "x"}, "low_balance"),
        ({"posted": "1000"}, "posted"),
        ({"held": 0, "statuss": "active"}, "held"),
    ],
)
async def test_what_is_wrong_with_a_change_is_named(site: Site, change: dict[str, Any], field: str) -> None:
    one = await bank(site, "1")
    before = await money(site)
    reply = await site.ask("PATCH", f"accounts/{one.tenant}", change)
    assert code(reply) == (400, "invalid")
    assert fields(reply)[0] == field
    assert await money(site) == before


async def test_the_name_of_an_account_may_hold_what_a_path_cannot(site: Site) -> None:
    one = await bank(site, "")
    assert (await site.post("accounts", {"tenant": one.tenant, "user": "https://id.example/7"})).status == 201
    name = f"{one.tenant}/https://id.example/7"
    assert (await one.topup("2", account=name)).status == 201
    assert (await site.put("limits", {"concurrency": 1}, account=name)).body["concurrency"] == "1"
    assert (await one.balance(name))["posted"] == "2"


# Refunds and adjustments.


async def test_refunds_and_adjustments_keep_who_and_why(site: Site) -> None:
    one = await bank(site, "10")
    worker = await site.token("billing-admin", user="bill")
    lease = await one.leased()
    cost = (await one.act(lease, "close")).body["cost"]
    common = {"account": one.tenant, "reason": "the switch was down"}
    back = {**common, "amount": cost, "request_id": one.id(), "lease_id": lease}
    assert (await site.post("refunds", back, token=worker)).body["new_balance"] == "10"
    less = {**common, "amount": "-2.25", "request_id": one.id()}
    lowered = (await site.post("adjustments", less, token=worker)).body
    assert lowered.pop("at")
    assert lowered == {
        "account": one.tenant, "amount": "-2.25", "new_balance": "7.75", "available": "7.75",
    }  # fmt: skip
    statement = (await site.get("statements", account=one.tenant)).body
    item = statement["items"][-1]
    assert (item["type"], item["amount"], item["actor"], item["reason"]) == (
        "adjustment", "-2.25", "user:bill", "the switch was down",
    )  # fmt: skip
    assert [line["refunded"] for line in statement["leases"]] == [cost]


async def test_no_more_is_refunded_of_a_lease_than_it_cost(site: Site) -> None:
    one = await bank(site, "10")
    lease = await one.leased()
    cost = (await one.act(lease, "close")).body["cost"]
    body = {"account": one.tenant, "reason": "the node was slow", "amount": "2", "lease_id": lease}
    before = await money(site)
    refused = await site.post("refunds", {**body, "request_id": one.id()})
    assert code(refused) == (422, "unprocessable")
    details = refused.body["details"]
    assert (details["limit"], details["current_usage"], details["requested_delta"]) == (cost, "0", "2")
    assert details["hint"] == f"Refund {cost} credits or less; for goodwill, leave the lease out."
    assert await money(site) == before
    assert (await site.post("refunds", {**body, "amount": cost, "request_id": one.id()})).status == 201
    again = await site.post("refunds", {**body, "amount": "0.000000001", "request_id": one.id()})
    assert code(again) == (422, "unprocessable")
    assert again.body["details"]["current_usage"] == cost
    assert (await site.get(f"leases/{lease}")).body["refunded"] == cost


async def test_an_adjustment_takes_only_what_is_there(site: Site) -> None:
    one = await bank(site, "1")
    await one.leased()
    before = await money(site)
    body = {"account": one.tenant, "amount": "-0.41", "reason": "too much", "request_id": one.id()}
    reply = await site.post("adjustments", body)
    assert code(reply) == (403, "insufficient_credit")
    assert reply.body["details"]["requested_delta"] == "0.41"
    assert await money(site) == before


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("refunds", {"reason": ""}, "reason"),
        ("refunds", {"reason": "a\nb"}, "reason"),
        ("refunds", {"amount": "-1"}, "amount"),
        ("adjustments", {"amount": 0}, "amount"),
        ("adjustments", {"amount": "0.0000000001"}, "amount"),
        ("adjustments", {"reason": " "}, "reason"),
        ("adjustments", {"reason": "x" * 1025}, "reason"),
        ("adjustments", {"who": "me"}, "who"),
    ],
)
async def test_what_is_wrong_with_a_movement_is_named(
    site: Site, path: str, change: dict[str, Any], field: str
) -> None:
    one = await bank(site, "1")
    before = await money(site)
    body = {"account": one.tenant, "amount": "1", "reason": "why", "request_id": one.id(), **change}
    reply = await site.post(path, body)
    assert code(reply) == (400, "invalid")
    assert fields(reply) == [field]
    assert await money(site) == before


async def test_a_refund_is_for_a_lease_of_the_account(site: Site) -> None:
    one, other = await bank(site), await bank(site)
    lease = await other.leased()
    body = {"account": one.tenant, "amount": "1", "reason": "why", "request_id": one.id()}
    for name in (lease, "lease-999999", "nonsense"):
        assert code(await site.post("refunds", {**body, "lease_id": name})) == (404, "not_found")


async def test_two_names_for_an_account_are_one_too_many(site: Site) -> None:
    one = await bank(site, "1")
    reply = await site.post("topups", {"amount": 1, "account": "a", "request_id": "r"}, account=one.tenant)
    assert code(reply) == (400, "invalid")
    assert (await site.get("balance")).status == 400  # an administrator has no account
    assert (await site.get("balance", account="/x")).status == 400


async def test_nothing_is_tried_that_cannot_be_only_tried(site: Site) -> None:
    one = await bank(site, "1")
    before = await money(site)
    body = {"amount": "1", "account": one.tenant, "request_id": one.id()}
    assert code(await site.post("topups", body, dryRun="All")) == (400, "invalid")
    assert await money(site) == before


# Limits.


async def test_limits_are_replaced_as_a_whole(site: Site) -> None:
    one = await bank(site)
    wanted = {
        "concurrency": "1.5",
        "spend_rate": 0.04,
        "daily_cap": "7",
        "stop_at_cap": True,
        "time_zone": "Asia/Tokyo",
    }
    assert (await site.put(f"limits/{one.tenant}", wanted)).body == {
        "account": one.tenant, "concurrency": "1500m", "spend_rate": "0.04", "spend_burst": "4.8", "daily_cap": "7",
        "stop_at_cap": True, "time_zone": "Asia/Tokyo", "gpus_in_use": "0", "spent_today": "0",
    }  # fmt: skip
    assert (await site.get("limits", token=one.user)).body["time_zone"] == "Asia/Tokyo"
    emptied = (await site.put(f"limits/{one.tenant}", {})).body
    assert [emptied[name] for name in ("concurrency", "spend_rate", "spend_burst", "daily_cap")] == [None] * 4
    assert emptied["time_zone"] == "UTC"


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"concurrency": -1}, "concurrency"),
        ({"concurrency": "many"}, "concurrency"),
        ({"concurrency": 10**10}, "concurrency"),
        ({"spend_rate": "-1"}, "spend_rate"),
        ({"spend_burst": "5"}, "spend_burst"),
        ({"daily_cap": "0.0000000001"}, "daily_cap"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"time_zone": "../etc/passwd"}, "time_zone"),
        ({"time_zone": ""}, "time_zone"),
        ({"weight": 2}, "weight"),
    ],
)
async def test_what_is_wrong_with_limits_is_named(site: Site, limits: dict[str, Any], field: str) -> None:
    one = await bank(site, "1")
    before = await money(site)
    reply = await site.put(f"limits/{one.tenant}", limits)
    assert code(reply) == (400, "invalid")
    assert fields(reply) == [field]
    assert await money(site) == before


async def test_limits_are_of_accounts_that_exist(site: Site) -> None:
    assert code(await site.put("limits/no-such-tenant", {"concurrency": 1})) == (404, "not_found")
    one = await bank(site, "")
    assert code(await site.put(f"limits/{one.tenant}", {"concurrency": 1})) == (404, "not_found")
