"""Leases and usage over HTTP: what is held, extended and settled, exactly; and every no."""

from __future__ import annotations

import asyncio
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from bursar.api.credit.credit import continue_token
from support.api.credit_site import GPU, H100, bank, code, fields, money
from support.api.site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


def micros(begin: str, end: str) -> int:
    between = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
    return round(between.total_seconds() * 1_000_000)


async def test_the_first_windows_of_four_h100(site: Site) -> None:
    """50 credits, 0.04 a second: fifteen seconds are held, five more, and what was used is what it costs."""
    one = await bank(site, "50")
    opened = await one.lease()
    assert opened.status == 201
    assert opened.body["rate_per_sec"] == "0.04"
    assert opened.body["held"] == "0.6"
    assert (await one.balance())["available"] == "49.4"
    lease = opened.body["lease_id"]
    extended = await one.act(lease, "extend", delta_seconds=5)
    assert micros(opened.body["expires_at"], extended.body["expires_at"]) == 5_000_000
    assert (await one.balance())["available"] == "49.2"
    closed = await one.act(lease, "close")
    assert closed.body["finalized"] is True
    shown = (await site.get(f"leases/{lease}", token=one.user)).body
    ran = micros(shown["opened_at"], closed.body["closed_at"])
    assert Decimal(closed.body["cost"]) == Decimal("0.04") * ran / 1_000_000
    balance = await one.balance()
    assert Decimal(balance["available"]) == 50 - Decimal(closed.body["cost"])
    assert (balance["holds"], balance["posted"]) == ("0", balance["available"])
    assert shown["state"] == "closed"


async def test_other_resources_are_paid_for_as_well(site: Site) -> None:
    one = await bank(site)
    for resource, price in (("cpu", "0.001"), ("memory", "0.0001")):
        assert (await site.post("prices", {"resource": resource, "per_second": price})).status == 201
    opened = await one.lease(gpu_count=0, resources={GPU: "500m", "cpu": 8, "memory": "16Gi"})
    assert opened.body["rate_per_sec"] == "0.0146"
    both = await one.lease(gpu_count=1, resources={GPU: 1})
    assert fields(both) == ["gpu_count"]
    free = await one.lease(gpu_count=0, gpu_type="", resources={"volumes": 3})
    assert (free.status, free.body["rate_per_sec"]) == (201, "0")


async def test_without_a_window_it_is_the_one_of_the_settings(site: Site) -> None:
    one = await bank(site)
    assert (await one.lease(window_seconds=None)).body["held"] == "4.8"


async def test_a_tenants_terms_hold_for_what_it_leases(site: Site) -> None:
    one = await bank(site)
    spec = {"billing": {"mode": "prepaid", "leaseMode": "reserve", "leaseSeconds": 60, "discountPercent": 25}}
    assert (await site.patch(f"tenants/{one.tenant}", {"spec": spec})).status == 200
    opened = await one.lease(window_seconds=None)
    assert (opened.body["rate_per_sec"], opened.body["held"]) == ("0.03", "1.8")
    assert (await site.get(f"leases/{opened.body['lease_id']}")).body["mode"] == "reserve"


# Every no.


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpu_count": 0}, "gpu_count"),
        ({"gpu_count": -1}, "gpu_count"),
        ({"gpu_count": "four"}, "gpu_count"),
        ({"gpu_count": 1_000_001}, "gpu_count"),
        ({"gpu_count": True}, "gpu_count"),
        ({"gpu_count": 1e300}, "gpu_count"),
        ({"window_seconds": 0}, "window_seconds"),
        ({"window_seconds": -15}, "window_seconds"),
        ({"window_seconds": 3601}, "window_seconds"),
        ({"window_seconds": 1.5}, "window_seconds"),
        ({"window_seconds": 10**30}, "window_seconds"),
        ({"job_id": ""}, "job_id"),
        ({"job_id": "a\u001fb"}, "job_id"),
        ({"job_id": "x" * 254}, "job_id"),
        ({"gpu_type": "x" * 64}, "gpu_type"),
        ({"resources": {"cpu": "-1"}}, "resources[cpu]"),
        ({"rate_per_sec": "0"}, "rate_per_sec"),
    ],
)
async def test_what_is_wrong_with_a_lease_is_named_and_leaves_nothing(
    site: Site, change: dict[str, Any], field: str
) -> None:
    one = await bank(site)
    before = await money(site)
    reply = await one.lease(**change)
    assert code(reply) == (400, "invalid"), reply
    assert fields(reply) == [field]
    assert await money(site) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpu_count": "0.05"}, "gpu_count"),
        ({"gpu_count": "50m"}, "gpu_count"),
        ({"gpu_count": 0, "resources": {GPU: "99m", "cpu": 1}}, f"resources[{GPU}]"),
    ],
)
async def test_a_part_of_a_gpu_below_the_least_is_refused_as_for_allocations(
    site: Site, change: dict[str, Any], field: str
) -> None:
    one = await bank(site)
    before = await money(site)
    reply = await one.lease(**change)
    assert code(reply) == (400, "invalid"), reply
    assert fields(reply) == [field]
    (cause,) = reply.body["details"]["causes"]
    assert (cause["dimension"], cause["limit"]) == (GPU, "0.1")
    assert reply.body["details"]["hint"] == "Ask for 0.1 or more."
    asked = change["gpu_count"] or change["resources"][GPU]
    allocation = {"metadata": {"name": "part"}, "spec": {"resources": {"requests": {GPU: asked}}}}
    refused = await site.post(f"namespaces/{one.tenant}/allocations", allocation, token=one.user)
    assert (refused.status, refused.message) == (reply.status, reply.message), "one refusal for both"
    assert await money(site) == before


async def test_the_least_part_of_a_gpu_in_a_lease_is_that_of_the_settings(site: Site) -> None:
    one = await bank(site)
    assert (await one.lease(gpu_count="0.1")).status == 201
    assert (await site.patch("settings/system", {"spec": {"scheduling": {"gpuFractionMin": 0.5}}})).status == 200
    try:
        assert code(await one.lease(gpu_count="0.25")) == (400, "invalid")
        assert (await one.lease(gpu_count="0.5")).status == 201
    finally:
        assert (await site.patch("settings/system", {"spec": {"scheduling": {"gpuFractionMin": None}}})).status == 200
    assert (await one.lease(gpu_count="0.25")).status == 201


async def test_a_gpu_type_without_a_price_cannot_be_leased(site: Site) -> None:
    one = await bank(site)
    before = await money(site)
    reply = await one.lease(gpu_type="abacus")
    assert code(reply) == (422, "unpriced")
    assert "abacus" in reply.message
    assert H100 in reply.body["details"]["hint"]
    assert await money(site) == before


async def test_what_cannot_be_paid_is_refused_with_the_numbers(site: Site) -> None:
    one = await bank(site, "0.599999999")
    before = await money(site)
    reply = await one.lease()
    assert code(reply) == (403, "insufficient_credit")
    details = reply.body["details"]
    assert (details["dimension"], details["requested_delta"], details["limit"]) == ("credits", "0.6", "0.599999999")
    assert details["scope"] == f"account:{one.tenant}"
    assert "0.000000001" in details["hint"]
    assert await money(site) == before
    await one.topup("0.000000001")
    assert (await one.lease()).status == 201
    assert (await one.balance())["available"] == "0"


async def test_a_refusal_is_the_answer_ever_after(site: Site) -> None:
    one = await bank(site, "0.1")
    body = {"request_id": "once"}
    assert code(await one.lease(**body)) == (403, "insufficient_credit")
    await one.topup("10")
    assert code(await one.lease(**body)) == (403, "insufficient_credit")
    assert (await one.lease()).status == 201


async def test_limits_refuse_what_goes_beyond_them(site: Site) -> None:
    one = await bank(site)
    await one.limit(concurrency=6)
    await one.leased()
    many = await one.lease()
    assert code(many) == (403, "concurrency_exceeded")
    details = many.body["details"]
    assert [details[name] for name in ("limit", "current_usage", "requested_delta")] == ["6", "4", "4"]
    assert (await one.lease(gpu_count=2)).status == 201
    await one.limit(daily_cap="1")
    assert code(await one.lease()) == (403, "daily_cap_exceeded")
    await one.limit(spend_rate="0.04", spend_burst="0.6")
    assert (await one.lease(request_id="fast")).status == 201
    fast = await one.lease(request_id="faster")
    assert code(fast) == (429, "spend_rate_exceeded")
    assert 1 <= int(fast.headers["retry-after"]) <= 15
    assert fast.body["details"]["retryAfterSeconds"] == int(fast.headers["retry-after"])
    await one.limit()
    # What passes by itself is not remembered.
    assert (await one.lease(request_id="faster")).status == 201


async def test_racing_leases_never_hold_more_than_there_is(site: Site) -> None:
    one = await bank(site, "6")
    replies = await asyncio.gather(*(one.lease(f"job-{number}") for number in range(30)))
    assert sorted(reply.status for reply in replies) == [201] * 10 + [403] * 20
    assert (await one.balance()) == {
        "account": one.tenant, "available": "0", "holds": "6", "posted": "6", "credit_limit": "0", "status": "active",
    }  # fmt: skip


# Extending and closing.


async def test_an_extension_that_is_repeated_is_paid_once(site: Site) -> None:
    one = await bank(site)
    lease = await one.leased()
    replies = await asyncio.gather(*(one.act(lease, "extend", delta_seconds=5, request_id="e1") for _ in range(10)))
    assert [reply.body for reply in replies] == [replies[0].body] * 10
    assert (await one.balance())["available"] == "49.2"
    assert code(await one.act(lease, "extend", delta_seconds=6, request_id="e1")) == (422, "request_id_reused")
    assert (await one.balance())["available"] == "49.2"
    await one.act(lease, "close")
    assert (await one.act(lease, "extend", delta_seconds=5, request_id="e1")).body == replies[0].body


async def test_nothing_is_paid_further_ahead_than_an_hour(site: Site) -> None:
    one = await bank(site, "5000")
    lease = await one.leased()
    extended = await one.act(lease, "extend", delta_seconds=86_400)
    assert extended.status == 200
    held = (await one.balance())["holds"]
    assert Decimal("143.9") < Decimal(held) <= 144
    again = await one.act(lease, "extend", delta_seconds=86_400)
    assert 0 <= micros(extended.body["expires_at"], again.body["expires_at"]) < 60_000_000


@pytest.mark.parametrize("delta", [0, -5, 1.5, "5", None, 10**12])
async def test_a_delta_is_a_number_of_seconds(site: Site, delta: Any) -> None:
    one = await bank(site)
    lease = await one.leased()
    before = await money(site)
    reply = await one.act(lease, "extend", delta_seconds=delta)
    assert code(reply) == (400, "invalid")
    assert fields(reply) == ["delta_seconds"]
    assert await money(site) == before


async def test_an_extension_without_credit_leaves_what_is_paid(site: Site) -> None:
    one = await bank(site, "0.7")
    opened = await one.lease()
    lease = opened.body["lease_id"]
    refused = await one.act(lease, "extend", delta_seconds=10)
    assert code(refused) == (403, "insufficient_credit")
    shown = (await site.get(f"leases/{lease}")).body
    assert (shown["expires_at"], shown["state"]) == (opened.body["expires_at"], "open")
    assert "final" not in shown  # They asked for too much, and may ask for less.
    await one.topup("1")
    assert (await one.act(lease, "extend", delta_seconds=10)).status == 200
    assert "final" not in (await site.get(f"leases/{lease}")).body


async def test_a_closed_lease_is_fenced_and_stays_as_it_ended(site: Site) -> None:
    one = await bank(site)
    lease = await one.leased()
    closed = await one.act(lease, "close", request_id="c1")
    assert (await one.act(lease, "close", request_id="c1")).body == closed.body
    assert (await one.act(lease, "close")).body == closed.body
    before = await money(site)
    assert code(await one.act(lease, "extend", delta_seconds=5)) == (409, "fenced")
    assert await money(site) == before


@pytest.mark.parametrize("verb", ["extend", "close"])
async def test_another_tenants_lease_does_not_exist(site: Site, verb: str) -> None:
    one, other = await bank(site), await bank(site)
    lease = await other.leased()
    body: dict[str, Any] = {"delta_seconds": 5} if verb == "extend" else {}
    before = await money(site)
    for name in (lease, "lease-99999999", "lease-x", "lease-99999999999999999999"):
        reply = await one.act(name, verb, **body)
        assert code(reply) == (404, "not_found")
        assert reply.message == f'leases "{name}" not found'
    assert (await site.get(f"leases/{lease}", token=one.user)).status == 404
    assert await money(site) == before


async def test_a_node_deals_with_its_own_leases_alone(site: Site) -> None:
    one = await bank(site)
    lease = await one.leased()
    node = await site.token("node", node="n-7", single_use=False)
    assert (await site.get(f"leases/{lease}", token=node)).status == 404
    assert (await one.act(lease, "extend", token=node, delta_seconds=5)).status == 404
    async with site.context.database.reader() as db:
        await db.execute("UPDATE lease SET node = 'n-7' WHERE id = $1", int(lease.removeprefix("lease-")))
    assert (await site.get(f"leases/{lease}", token=node)).body["node"] == "n-7"
    assert (await one.act(lease, "extend", token=node, delta_seconds=5)).status == 200


async def test_the_lease_of_an_allocation_is_its_nodes_to_deal_with(site: Site) -> None:
    one = await bank(site)
    lease = await one.leased()
    async with site.context.database.reader() as db:
        await db.execute(
            "UPDATE lease SET uid = 'alloc-1', node = 'n-1' WHERE id = $1", int(lease.removeprefix("lease-"))
        )
    before = await money(site)
    for token in (one.user, site.admin):
        assert code(await one.act(lease, "close", token=token)) == (409, "in_use")
        assert code(await one.act(lease, "extend", token=token, delta_seconds=5)) == (409, "in_use")
    assert await money(site) == before


async def test_a_new_price_holds_for_what_an_extension_adds(site: Site) -> None:
    one = await bank(site)
    kind = one.tenant  # a class of its own
    for per_second in ("0.01", "0.02"):
        assert (await site.post("prices", {"resource": GPU, "class": kind, "per_second": per_second})).status == 201
        if per_second == "0.01":
            lease = await one.leased(gpu_type=kind, gpu_count=1, window_seconds=300)
    assert (await site.get(f"leases/{lease}")).body["rate_per_sec"] == "0.01"
    assert (await one.act(lease, "extend", delta_seconds=5)).body["rate_per_sec"] == "0.02"
    shown = (await site.get(f"leases/{lease}")).body
    # All that was paid before keeps its rate.
    before, added = shown["segments"]
    assert (before["rate_per_sec"], added) == ("0.01", {"rate_per_sec": "0.02", "seconds": 5})
    assert Decimal(shown["held"]) == Decimal("0.01") * Decimal(str(before["seconds"])) + Decimal("0.1")
    closed = await one.act(lease, "close")
    ran = Decimal(micros(shown["opened_at"], closed.body["closed_at"])) / 1_000_000
    assert Decimal(closed.body["cost"]) == Decimal("0.01") * ran
    balance = await one.balance()
    assert Decimal(balance["posted"]) == 50 - Decimal(closed.body["cost"])


async def test_an_extension_that_is_refused_says_how_long_is_left(site: Site) -> None:
    one = await bank(site, "1")
    lease = await one.leased(gpu_count=1, window_seconds=60)
    refused = await one.act(lease, "extend", delta_seconds=300)
    assert (refused.status, refused.body["details"]["code"]) == (403, "insufficient_credit")
    assert refused.body["details"]["final"] is True
    assert 0 <= refused.body["details"]["seconds_left"] <= 60
    await one.act(lease, "close")
    fenced = (await one.act(lease, "extend", delta_seconds=5)).body["details"]
    assert (fenced["code"], fenced["final"], fenced["seconds_left"]) == ("fenced", True, 0)
    unknown = (await one.act("lease-999999999", "extend", delta_seconds=5)).body["details"]
    assert "final" not in unknown


# Looking.


async def test_leases_are_listed_by_account_job_and_state(site: Site) -> None:
    one, other = await bank(site), await bank(site)
    first, second, third = [await one.leased(job) for job in ("a", "b", "b")]
    await other.leased("b")

    async def names(token: str, **query: Any) -> list[str]:
        return [item["lease_id"] for item in (await site.get("leases", token=token, **query)).body["items"]]

    assert await names(one.user) == [first, second, third]
    assert await names(one.user, job_id="b") == [second, third]
    assert await names(site.admin, account=one.tenant) == [first, second, third]
    for lease in (first, third):
        await one.act(lease, "close")
    assert await names(one.user) == [second]
    assert await names(one.user, state="ended") == [third, first]
    assert await names(one.user, state="ended", job_id="a") == [first]
    page = (await site.get("leases", token=one.user, state="ended", limit=1)).body
    assert await names(one.user, state="ended", limit=1, **{"continue": page["continue"]}) == [first]
    assert (await site.get("leases", state="gone")).status == 400
    for forged in ("WzFd", continue_token(-(2**70), 1), continue_token(2**63, 1)):
        answer = await site.get("leases", **{"continue": forged}, state="ended", account=one.tenant)
        assert code(answer) == (400, "invalid")


async def test_a_forecast_says_how_long_it_lasts(site: Site) -> None:
    one = await bank(site, "460.8")
    idle = (await site.get("forecast", token=one.user)).body
    assert (idle["runs_out_in_seconds"], idle["message"]) == (None, "nothing is being spent")
    await one.leased()
    busy = (await site.get("forecast", token=one.user)).body
    assert busy["rate_per_sec"] == "0.04"
    assert 11_500 < busy["runs_out_in_seconds"] <= 11_520
    assert busy["message"].startswith("runs out in 3 h 1")


# Usage.


def event(job: str, seq: int, **more: Any) -> dict[str, Any]:
    times = {"start_ts": "2026-11-16T07:00:00Z", "end_ts": "2026-11-16T07:00:05.5Z"}
    return {"job_id": job, "seq": seq, "gpu_type": H100, "gpu_count": 4, **times, **more}


async def test_usage_is_taken_down_once(site: Site) -> None:
    one = await bank(site)
    job = one.tenant
    await one.leased(job)
    first = event(job, 1, seconds="5.25", measured_utilization=0.93)
    assert (await site.post("usage", first)).status == 202
    again = await site.post("usage", first)
    assert again.body == {"accepted": 0, "duplicates": 1, "late": 0, "refused": []}
    assert code(await site.post("usage", {**first, "seconds": "5.26"})) == (422, "request_id_reused")
    epoch = {"start_ts": 1_794_812_400, "end_ts": 1_794_812_405.5}
    second = event(job, 2, **epoch)
    many = await site.post("usage", {"events": [first, second, event("no-such-job", 1), event(job, 2)]})
    assert many.status == 202
    assert (many.body["accepted"], many.body["duplicates"]) == (1, 2)
    assert [(item["index"], item["job_id"], item["code"]) for item in many.body["refused"]] == [
        (2, "no-such-job", "not_found")
    ]
    async with site.context.database.reader() as db:
        rows = await db.fetch("SELECT seq, micros FROM usage_event WHERE job = $1 ORDER BY seq", job)
    assert [tuple(row) for row in rows] == [(1, 5_250_000), (2, 5_500_000)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seq": -1}, "seq"),
        ({"seq": 1.5}, "seq"),
        ({"seq": 2**70}, "seq"),
        ({"start_ts": "yesterday"}, "start_ts"),
        ({"start_ts": -1}, "start_ts"),
        ({"start_ts": 1e30}, "start_ts"),
        ({"end_ts": "2026-11-16T06:00:00Z"}, "end_ts"),
        ({"seconds": "-1"}, "seconds"),
        ({"seconds": "long"}, "seconds"),
        ({"gpu_count": "-4"}, "gpu_count"),
        ({"measured_utilization": 1.5}, "measured_utilization"),
        ({"job_id": ""}, "job_id"),
        ({"cost": 1}, "cost"),
    ],
)
async def test_what_is_wrong_with_usage_is_named(site: Site, change: dict[str, Any], field: str) -> None:
    one = await bank(site)
    await one.leased(one.tenant)
    before = await money(site)
    reply = await site.post("usage", {**event(one.tenant, 1), **change})
    assert code(reply) == (400, "invalid")
    assert field in fields(reply)
    assert await money(site) == before


async def test_usage_is_of_a_lease_that_the_sender_may_speak_of(site: Site) -> None:
    one = await bank(site)
    await one.leased(one.tenant)
    node = await site.token("node", node="n-8", single_use=False)
    assert code(await site.post("usage", event(one.tenant, 1), token=node)) == (404, "not_found")
    assert code(await site.post("usage", event(one.tenant, 1, account="nobody"))) == (404, "not_found")
    assert code(await site.post("usage", event(one.tenant, 1, lease_id="lease-x"))) == (404, "not_found")
    assert code(await site.post("usage", event(one.tenant, 1, gpu_type="abacus"))) == (422, "unprocessable")
    assert code(await site.post("usage", event(one.tenant, 1, gpu_count=5))) == (422, "unprocessable")
    assert code(await site.post("usage", {"events": []})) == (400, "invalid")
    assert (await site.post("usage", event(one.tenant, 1, account=one.tenant))).status == 202
