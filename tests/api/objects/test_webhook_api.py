"""Webhooks and payments through the REST API."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.api.site import Reply, Site, opened_site


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with opened_site(database_url) as one:
        yield one


async def payer(site: Site, name: str = "bank", **more: Any) -> str:
    made = await site.post("webhooks", {"name": name, "direction": "in", **more})
    assert made.status == 201, made
    return str(made.body["status"]["secret"])


def signed(secret: str, id_: str, body: bytes, at: float | None = None) -> dict[str, str]:
    stamp = str(int(time.time() if at is None else at))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, f"{id_}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": id_,
        "webhook-timestamp": stamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


async def pay(site: Site, secret: str, id_: str, at: float | None = None, **body: Any) -> Reply:
    raw = json.dumps({"account": "default", "amount": "12.5", **body}).encode()
    return await site.post("payments", raw, token="none", headers=signed(secret, id_, raw, at))


async def balance(site: Site, account: str = "default") -> str:
    answer = await site.get("balance", account=account)
    return str(answer.body["available"]) if answer.status == 200 else str(answer.status)


async def test_webhooks_are_made_listed_and_removed_and_the_secret_is_told_once(site: Site) -> None:
    body = {"name": "ops", "url": "https://hooks.example/x", "types": ["credit.low"], "tenant": "default"}
    made = await site.post("webhooks", body)
    assert made.status == 201
    secret = made.body["status"]["secret"]
    assert secret.startswith("whsec_")
    assert made.body["spec"] == {
        "direction": "out", "url": "https://hooks.example/x", "tenant": "default", "types": ["credit.low"],
        "allowLocal": False, "createdBy": "user:admin",
    }  # fmt: skip
    assert (await site.post("webhooks", body)).status == 409
    listed = await site.get("webhooks")
    assert listed.names == ["ops"]
    assert secret not in json.dumps(listed.body)
    async with site.context.database.reader() as db:
        changes = await db.fetch("SELECT doc FROM change")
    assert not any(secret.encode() in (row["doc"] or b"") for row in changes)
    assert (await site.delete("webhooks/ops")).status == 200
    assert (await site.delete("webhooks/ops")).status == 404
    assert (await site.get("webhooks")).body["items"] == []


async def test_what_is_wrong_with_a_webhook_is_told_and_nothing_is_made(site: Site) -> None:
    for body in (
        {"name": "x"},
        {"name": "X_Y", "url": "https://a.example"},
        {"name": "x", "url": "ftp://a.example"},
        {"name": "x", "url": "https://a.example", "types": ["credit.everything"]},
        {"name": "x", "direction": "sideways", "url": "https://a.example"},
        {"name": "x", "direction": "in", "url": "https://a.example"},
        {"name": "x", "url": "https://a.example", "secret": "short"},
        {"name": "x", "url": "https://a.example", "colour": "red"},
        {"name": 3, "url": "https://a.example"},
    ):
        answer = await site.post("webhooks", body)
        assert answer.status == 400, (body, answer)
    assert (await site.post("webhooks", {"name": "x", "url": "https://a.example", "tenant": "ghost"})).status == 404
    assert (await site.get("webhooks")).body["items"] == []


@pytest.mark.parametrize("role", ["tenant-admin", "user", "viewer", "billing-admin"])
async def test_webhooks_are_the_system_administrators(site: Site, role: str) -> None:
    token = await site.token(role, user="ann", **({} if role == "billing-admin" else {"tenant": "default"}))
    assert (await site.post("webhooks", {"name": "x", "url": "https://a.example"}, token=token)).status == 403
    assert (await site.get("webhooks", token=token)).status == 403


async def test_a_signed_payment_tops_an_account_up_once_for_ever(site: Site) -> None:
    secret = await payer(site)
    first = await pay(site, secret, "evt-1")
    assert first.status == 201, first
    assert first.body == {
        "account": "default", "amount": "12.5", "new_balance": "12.5", "available": "12.5", "at": first.body["at"],
    }  # fmt: skip
    again = await pay(site, secret, "evt-1", at=time.time() + 5)
    assert (again.status, again.body) == (201, first.body)
    assert (await pay(site, secret, "evt-1", amount="13")).status == 422
    assert await balance(site) == "12.5"
    assert (await pay(site, secret, "evt-2")).status == 201
    assert await balance(site) == "25"
    async with site.context.database.reader() as db:
        actors = await db.fetch("SELECT DISTINCT actor, type FROM entry")
        told = await db.fetchval("SELECT count(*) FROM notice WHERE type = 'credit.topped-up'")
    assert [tuple(row) for row in actors] == [("payment:bank", "topup")]
    assert told == 2


async def test_payments_that_race_have_one_effect(site: Site) -> None:
    secret = await payer(site)
    answers = await asyncio.gather(*(pay(site, secret, "evt-1") for _ in range(12)))
    assert {one.status for one in answers} == {201}
    assert await balance(site) == "12.5"


async def test_what_is_not_signed_right_is_not_believed(site: Site) -> None:
    secret = await payer(site)
    other = "whsec_" + base64.b64encode(bytes(32)).decode()
    body = b'{"account": "default", "amount": "12.5"}'
    right = signed(secret, "evt-1", body)
    refused = [
        await site.post("payments", body, token="none"),
        await site.post("payments", body, headers=signed(other, "evt-1", body)),
        await site.post("payments", body, headers=signed(secret, "evt-1", body, time.time() - 3600)),
        await site.post("payments", body.replace(b"12.5", b"99.5"), headers=right),
        await site.post("payments", body, headers=right | {"webhook-id": "evt-2"}),
        await site.post("payments", body, headers=right | {"webhook-signature": "v1,"}),
        await site.post("payments", body),  # an administrator's token alone is no signature
    ]
    assert [one.status for one in refused] == [401] * len(refused)
    assert await balance(site) != "12.5"


async def test_amounts_and_accounts_that_cannot_be_are_refused(site: Site) -> None:
    secret = await payer(site)
    refused: list[tuple[dict[str, Any], int]] = [
        ({"amount": "0"}, 400), ({"amount": "-1"}, 400), ({"amount": "0.0000000001"}, 400),
        ({"amount": "1e3"}, 400), ({"amount": "99999999999"}, 400), ({"amount": True}, 400), ({"account": ""}, 400),
        ({"account": "ghost"}, 404), ({"account": "default/nobody"}, 404), ({"colour": "red"}, 400),
    ]  # fmt: skip
    for number, (change, status) in enumerate(refused):
        answer = await pay(site, secret, f"evt-{number}", **change)
        assert answer.status == status, (change, answer)


async def test_a_payment_for_an_account_that_is_opened_later_is_taken_when_it_comes_again(site: Site) -> None:
    secret = await payer(site)
    assert (await pay(site, secret, "evt-1", account="default/ann")).status == 404
    opened = await site.post("accounts", {"tenant": "default", "user": "ann", "request_id": "open-ann"})
    assert opened.status == 201, opened
    assert (await pay(site, secret, "evt-1", account="default/ann")).status == 201
    assert await balance(site, "default/ann") == "12.5"


async def test_a_payer_of_one_tenant_pays_for_no_other(site: Site) -> None:
    await site.namespace(name="physics")
    secret = await payer(site, tenant="physics")
    assert (await pay(site, secret, "evt-1")).status == 404
    assert (await pay(site, secret, "evt-2", account="physics")).status == 201


async def test_a_webhook_that_notices_are_sent_to_is_no_payer(site: Site) -> None:
    made = await site.post("webhooks", {"name": "out", "url": "https://a.example"})
    assert (await pay(site, made.body["status"]["secret"], "evt-1")).status == 401


async def test_metrics_tell_of_reconciliation_and_of_notices_that_wait(site: Site) -> None:
    await site.post("webhooks", {"name": "out", "url": "https://a.example"})
    text = (await site.get("/metrics")).body
    assert 'bursar_notices_waiting{webhook="out"} 0.0' in text
    assert "bursar_unreconciled_leases 0.0" in text


# Trying one, and what was not taken.


async def test_a_trial_is_for_one_webhook_alone_and_waits_to_be_sent(site: Site) -> None:
    for name in ("ops", "other"):
        assert (await site.post("webhooks", {"name": name, "url": "https://hooks.example/x"})).status == 201
    sent = await site.post("webhooks/ops/test", {})
    assert (sent.status, sent.body["webhook"]) == (202, "ops")
    (item,) = (await site.get("webhooks/ops/deliveries")).body["items"]
    assert item["notice"] == sent.body["notice"]
    assert (item["type"], item["subject"], item["tries"], item["lastSaid"]) == ("io.bursar.webhook.test", "ops", 0, "")
    assert item["nextAt"] is not None
    assert (await site.get("webhooks/other/deliveries")).body["items"] == []
    async with site.context.database.reader() as db:
        await db.execute("UPDATE notice_delivery SET next_at = 'infinity', tries = 9, last_said = 'HTTP 500'")
    (item,) = (await site.get("webhooks/ops/deliveries")).body["items"]
    assert (item["nextAt"], item["tries"], item["lastSaid"]) == (None, 9, "HTTP 500")


async def test_deliveries_come_in_pages(site: Site) -> None:
    assert (await site.post("webhooks", {"name": "ops", "url": "https://hooks.example/x"})).status == 201
    sent = [(await site.post("webhooks/ops/test", {})).body["notice"] for _ in range(5)]
    seen: list[str] = []
    following = ""
    while True:
        page = (
            await site.get("webhooks/ops/deliveries", limit=2, **({"continue": following} if following else {}))
        ).body
        seen += [one["notice"] for one in page["items"]]
        if not (following := page["continue"]):
            break
    assert seen == sent


async def test_only_what_notices_are_sent_to_can_be_tried(site: Site) -> None:
    await payer(site)
    assert (await site.post("webhooks", {"name": "ops", "url": "https://hooks.example/x"})).status == 201
    refused = await site.post("webhooks/bank/test", {})
    assert (refused.status, refused.body["details"]["code"]) == (422, "unprocessable")
    async with site.context.database.reader() as db:
        await db.execute("UPDATE webhook SET stopped = 'the receiver answered 410 Gone' WHERE name = 'ops'")
    stopped = await site.post("webhooks/ops/test", {})
    assert (stopped.status, stopped.body["details"]["hint"]) == (409, "Remove it, and create it again.")
    assert (await site.post("webhooks/ghost/test", {})).status == 404
    assert (await site.get("webhooks/ghost/deliveries")).status == 404
    token = await site.token("tenant-admin", user="ann", tenant="default")
    assert (await site.post("webhooks/ops/test", {}, token=token)).status == 403
    assert (await site.get("webhooks/ops/deliveries", token=token)).status == 403
    async with site.context.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM notice WHERE type = 'webhook.test'") == 0
