"""Claims are extended by any controller; a claim that is no longer paid for is emptied and released."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from bursar.commands.credit.credit import PutAccount
from bursar.core.credit.lease_expiry import ExpiryWatch
from bursar.core.nodes.node_claim import ClaimState
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Origin
from bursar.core.values.money import nanocredits
from bursar.loops import claims as loop
from bursar.loops.claims import keep_claims, run_claims
from bursar.loops.lease_expiry import end_lapsed
from bursar.ops.credit import agentless_billing, credit
from bursar.ops.nodes.claim import end_wipe
from bursar.ops.nodes.drain import placed_there
from bursar.ops.runtime.runtime import Runtime
from support.credit.ledgers import LAB, funded, receipt
from support.credit.paying import account, ended, ends, leases, submitted_by
from support.nodes.claims import claim, claim_of, release
from support.nodes.paid_claims import ANN, HELD, NODES, RATE, WINDOW, assert_paid_once, claimed, clinic, passed, placed
from support.runtime.runtime import bind, change, code, opened, refusal
from support.scheduling.evictions import status
from support.scheduling.schedulers import is_in, scheduling, until, waits_for


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await clinic(runtime)
    return runtime


@pytest.fixture
async def rival(lab: Runtime, database_url: str) -> AsyncIterator[Runtime]:
    """Another controller on the same database."""
    async with opened(database_url) as other:
        yield other


async def amend(runtime: Runtime, **changes: object) -> None:
    receipt(await credit.put_account(runtime, PutAccount(actor="user:test", whose=LAB, changes=changes)))


async def audit(runtime: Runtime) -> list[tuple[str, str, str]]:
    """What was done to the node since it was claimed: verb, actor and reason."""
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT verb, actor, reason FROM change WHERE kind = 'Node' AND name = 'n1' ORDER BY revision"
        )
    said = [(row["verb"], row["actor"], row["reason"]) for row in rows]
    return said[[verb for verb, _, _ in said].index("claim") + 1 :]


async def notices(runtime: Runtime) -> list[dict[str, Any]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT data FROM notice WHERE type = 'credit.exhausted' ORDER BY id")
    return [msgspec.json.decode(row["data"]) for row in rows]


async def lapsed(runtime: Runtime) -> None:
    """Nobody has extended what is open for as long as its work may take to die."""
    watch = ExpiryWatch()
    for at in (1000.0, 1100.0):
        await end_lapsed(runtime, watch, at)
    assert await leases(runtime) == []


async def test_it_is_paid_further_ahead_when_half_is_used_and_not_before(lab: Runtime) -> None:
    await funded(lab, "100")
    await claimed(lab)
    await passed(lab, WINDOW / 2 - 1)
    assert await keep_claims(lab) == []
    assert (await account(lab))["posted"] == nanocredits("100"), "nothing was due"
    await passed(lab, 1)
    assert await keep_claims(lab) == []
    held = await account(lab)
    assert (held["posted"], held["held"]) == (nanocredits("100") - RATE * WINDOW // 2, HELD)
    await assert_paid_once(lab)


async def test_many_who_look_at_once_pay_once(lab: Runtime, rival: Runtime) -> None:
    await funded(lab, "300")
    for name in ("n1", "n2"):
        await claimed(lab, name)
    for turn in range(1, 4):
        await passed(lab, 300)
        await asyncio.gather(*(keep_claims(runtime) for runtime in (lab, rival, lab, rival)))
        held = await account(lab)
        assert (held["posted"], held["held"]) == (nanocredits("300") - 2 * RATE * 300 * turn, 2 * HELD)
        await assert_paid_once(lab)


async def test_a_loop_that_is_killed_and_begun_again_renews(
    lab: Runtime, rival: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PAUSE_SECONDS", 0.01)
    await funded(lab, "1000")
    await claimed(lab)
    for turn, runtime in enumerate((lab, rival, lab), start=1):
        running = asyncio.create_task(run_claims(runtime))
        try:
            await passed(lab, 400)
            async with asyncio.timeout(20):
                while (await account(lab))["posted"] > nanocredits("1000") - 400 * RATE * turn:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await assert_paid_once(lab)
    await passed(lab, 100)
    assert code(await release(lab, "n1", ANN)) == "ok"
    assert (await account(lab))["posted"] == nanocredits("1000") - 1300 * RATE
    await assert_paid_once(lab)


async def test_what_nobody_renewed_in_time_goes_on_and_is_not_charged_for_the_gap(lab: Runtime) -> None:
    await funded(lab, "200")
    await claimed(lab)
    await passed(lab, WINDOW + 5000)
    assert await keep_claims(lab) == []
    held = await account(lab)
    assert (held["posted"], held["held"]) == (nanocredits("200") - HELD, HELD)
    await assert_paid_once(lab)


async def test_a_lease_that_lapsed_is_followed_by_another(lab: Runtime) -> None:
    await funded(lab, "200")
    await claimed(lab)
    before = await claim_of(lab, "n1")
    await passed(lab, WINDOW + 100)
    await lapsed(lab)
    assert await keep_claims(lab) == []
    after = await claim_of(lab, "n1")
    assert before is not None
    assert after is not None
    assert (after.id, after.unpaid) == (before.id, "")
    assert [one["id"] for one in await leases(lab)] == [after.lease] != [before.lease]
    assert await audit(lab) == [("claim", "system:credit", "it is paid by another lease")]
    await assert_paid_once(lab)
    await placed(lab, "train", "n1")
    await assert_paid_once(lab)
    await ends(lab, "n1", "train")
    assert code(await release(lab, "n1", ANN)) == "ok"
    assert (await account(lab))["held"] == 0


async def test_one_that_lapsed_and_that_nobody_pays_for_is_given_back(lab: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    await passed(lab, WINDOW + 100)
    await lapsed(lab)
    assert await keep_claims(lab) == ["n1"]
    assert [one["reason"] for one in await notices(lab)] == ["insufficient_credit"]
    found = await claim_of(lab, "n1")
    assert found is not None
    assert (found.state, found.lease, found.unpaid) == (ClaimState.WIPING, 0, "")
    assert ((await account(lab))["posted"], await leases(lab)) == (0, [])
    await assert_paid_once(lab)


async def test_one_that_lapsed_when_its_tenant_is_billed_afterwards_is_so_too(lab: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    await change(lab, "Tenant", "", "default", billing={"mode": "none"})
    await passed(lab, WINDOW + 100)
    await lapsed(lab)
    assert await keep_claims(lab) == []
    found = await claim_of(lab, "n1")
    assert found is not None
    assert (found.state, found.lease, found.unpaid) == (ClaimState.HELD, 0, "")
    assert await audit(lab) == [("claim", "system:credit", "it is postpaid")]


async def test_without_credit_it_is_emptied_given_back_and_wiped(lab: Runtime) -> None:
    await funded(lab, "60")
    await claimed(lab)
    await placed(lab, "train", "n1", gpus=2)
    await ends(lab, "n1", "train", Phase.RUNNING)
    await passed(lab, 300)
    assert await keep_claims(lab) == []
    (told,) = await notices(lab)
    assert (told["reason"], told["account"]) == ("insufficient_credit", "default")
    assert (await status(lab, "train"))["phase"] == "Running", "it may use what is paid"
    await passed(lab, 299)
    assert await keep_claims(lab) == []
    assert len(await notices(lab)) == 1
    assert (await status(lab, "train"))["phase"] == "Running"
    await passed(lab, 1)
    assert await keep_claims(lab) == []
    stopped = await status(lab, "train")
    assert (stopped["phase"], stopped["reason"]) == ("Terminating", "CreditExhausted")
    assert stopped["message"] == "the claim of node n1 is no longer paid for: insufficient_credit"
    await assert_paid_once(lab)
    # Nothing else comes there meanwhile, and credit that comes now is too late.
    await funded(lab, "500")
    await submitted_by(lab, ANN, "next", sensitive=True)
    assert code(await bind(lab, "default", "next", "n1")) == "stale"
    assert await keep_claims(lab) == []
    await ends(lab, "n1", "train", Phase.FAILED)
    assert (await status(lab, "train"))["reason"] == "CreditExhausted"
    assert await keep_claims(lab) == ["n1"]
    found = await claim_of(lab, "n1")
    assert found is not None
    assert (found.state, found.lease) == (ClaimState.WIPING, 0)
    assert await audit(lab) == [
        ("release", "system:credit", "CreditExhausted: insufficient_credit"),
        ("release", "system:credit", "CreditExhausted"),
    ]
    held = await account(lab)
    assert (held["posted"], held["held"], held["gpus"]) == (nanocredits("560") - HELD, 0, 0)
    assert await keep_claims(lab) == []
    await assert_paid_once(lab)
    assert code(await end_wipe(lab, "n1", Origin("user:admin", "wiped"))) == "ok"


async def test_credit_that_comes_in_time_keeps_it(lab: Runtime) -> None:
    await funded(lab, "60")
    await claimed(lab)
    await passed(lab, 590)
    await keep_claims(lab)
    assert (await leases(lab))[0]["final"] == "insufficient_credit"
    await funded(lab, "60")
    await passed(lab, 5)
    assert await keep_claims(lab) == []
    (lease,) = await leases(lab)
    assert (lease["final"], (await account(lab))["held"]) == ("", HELD)
    await assert_paid_once(lab)


async def test_its_node_ends_work_there_without_any_controller_when_no_more_is_paid(lab: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    await placed(lab, "train", "n1")
    await ends(lab, "n1", "train", Phase.RUNNING)
    await passed(lab, WINDOW - 1)
    await agentless_billing.pay_on(lab, ["n1"])
    assert (await status(lab, "train"))["phase"] == "Running"
    await passed(lab, 1)
    await agentless_billing.pay_on(lab, ["n1"])
    told = await status(lab, "train")
    assert (told["phase"], told["reason"]) == ("Terminating", "CreditExhausted")
    await assert_paid_once(lab)


async def test_heartbeats_of_what_runs_there_pay_for_it_too(lab: Runtime) -> None:
    await funded(lab, "200")
    await claimed(lab)
    await placed(lab, "train", "n1")
    await ends(lab, "n1", "train", Phase.RUNNING)
    for _ in range(4):
        await passed(lab, 320)
        await agentless_billing.pay_on(lab, ["n1"])
        await keep_claims(lab)
        await assert_paid_once(lab)
    assert (await account(lab))["posted"] == nanocredits("200") - 4 * 320 * RATE
    assert await ended(lab) == []


async def test_who_spends_too_fast_stands_still_for_a_while_before_it_ends(lab: Runtime) -> None:
    await funded(lab, "500")
    await amend(lab, spend_rate_max=nanocredits("0.01"), spend_burst=nanocredits("48"))
    await claimed(lab)
    await passed(lab, WINDOW)
    assert await keep_claims(lab) == []
    (lease,) = await leases(lab)
    assert lease["final"] == "spend_rate_exceeded"
    await passed(lab, 299)
    assert await keep_claims(lab) == [], "it may stand still for throttleSecondsMax"
    await passed(lab, 1)
    assert await keep_claims(lab) == ["n1"]
    await assert_paid_once(lab)


async def test_whoever_gives_it_back_meanwhile_is_not_in_the_way(lab: Runtime, rival: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    await passed(lab, WINDOW)
    await asyncio.gather(keep_claims(lab), release(lab, "n1", ANN), keep_claims(rival))
    found = await claim_of(lab, "n1")
    assert found is not None
    assert (found.state, found.attempt) == (ClaimState.WIPING, 1)
    assert (await account(lab))["posted"] == 0
    await assert_paid_once(lab)


# The scheduler.


async def test_the_scheduler_places_work_there_without_any_more_credit(lab: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    async with scheduling(lab):
        await submitted_by(lab, ANN, "secret", 8, sensitive=True)
        assert (await until(lab, "secret", is_in("Scheduled")))["nodeName"] == "n1"
        await submitted_by(lab, ANN, "more", 8)
        await until(lab, "more", waits_for("insufficient_credit"))
    await assert_paid_once(lab)


async def test_the_scheduler_keeps_off_what_is_not_paid_for_any_more(lab: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    await placed(lab, "train", "n1")
    async with scheduling(lab):
        await passed(lab, WINDOW)
        await keep_claims(lab)
        await submitted_by(lab, ANN, "secret", sensitive=True)
        await until(lab, "secret", waits_for("no_claimed_nodes"))
        assert "no longer paid for" in refusal(await claim(lab, "n1", ANN)).message
        await ends(lab, "n1", "train", Phase.FAILED)
        assert await keep_claims(lab) == ["n1"]
    await assert_paid_once(lab)


# Chance.


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_everything_is_paid_for_once(lab: Runtime, seed: int) -> None:
    """Two users claim, work, release and run out of credit, while time passes and controllers may be late."""
    chance = random.Random(seed)
    await funded(lab, "150")
    people, count = ("default/ann", "default/bob"), 0
    for _ in range(70):
        node, who = chance.choice(NODES), chance.choice(people)
        match chance.choice(("claim", "claim", "work", "work", "release", "end", "time", "late", "funds", "wipe")):
            case "claim":
                await claim(lab, node, who)
            case "work":
                count += 1
                await submitted_by(lab, who, f"w{count}", chance.randrange(1, 5))
                if code(await bind(lab, "default", f"w{count}", node)) == "ok" and chance.random() < 0.8:
                    await ends(lab, node, f"w{count}", Phase.RUNNING)
            case "release":
                await release(lab, node, who)
            case "end":
                for work in (await placed_there(lab, node))[:2]:
                    await ends(lab, node, work.key.name, Phase.FAILED)
            case "time":
                await passed(lab, chance.uniform(0, 14))
            case "late":
                await passed(lab, chance.choice((400, 700)))
            case "funds":
                await funded(lab, "20")
            case "wipe":
                await end_wipe(lab, node, Origin("user:admin", "wiped"))
        await agentless_billing.pay_on(lab, NODES)
        await keep_claims(lab)
        await assert_paid_once(lab)
    assert (await account(lab))["posted"] >= 0
