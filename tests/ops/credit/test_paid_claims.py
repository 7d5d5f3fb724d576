"""Claimed nodes of who pays beforehand: paid for as a whole from the claim to the release, once, and never unpaid."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from bursar.commands.credit.credit import CloseLeaseCommand, ExtendLeaseCommand, PutAccount
from bursar.core.credit.account import Owner
from bursar.core.credit.statement import Statement
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Origin
from bursar.core.values.money import nanocredits
from bursar.core.values.refusal import Code
from bursar.loops.claims import keep_claims
from bursar.ops.credit import agentless_billing, credit
from bursar.ops.credit.statement import statement
from bursar.ops.nodes.claim import end_wipe
from bursar.ops.runtime.runtime import Runtime
from support.credit.ledgers import LAB, START, funded, priced, receipt
from support.credit.paying import account, ended, ends, leases, machine, prepaid, state, submitted_by
from support.nodes.claims import EVERYTHING, claim, claim_of, holders, release
from support.nodes.paid_claims import (
    ANN,
    BOB,
    HELD,
    NODES,
    RATE,
    WINDOW,
    assert_paid_once,
    claimed,
    clinic,
    passed,
    placed,
)
from support.runtime.runtime import bind, change, code, opened, refusal
from support.scheduling.evictions import status


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await clinic(runtime)
    return runtime


@pytest.fixture
async def rivals(lab: Runtime, database_url: str) -> AsyncIterator[list[Runtime]]:
    """Three processes, as far as the database can tell."""
    async with opened(database_url) as second, opened(database_url) as third:
        yield [lab, second, third]


async def amend(runtime: Runtime, owner: Owner = LAB, **changes: object) -> None:
    receipt(await credit.put_account(runtime, PutAccount(actor="user:test", whose=owner, changes=changes)))


async def spent(runtime: Runtime, began: str, owner: Owner = LAB) -> int:
    return nanocredits(began) - int((await account(runtime, *owner))["posted"])


# Claiming.


async def test_all_of_the_node_is_held_with_the_claim(lab: Runtime) -> None:
    await funded(lab, "50")
    await claimed(lab)
    (lease,) = await leases(lab)
    found = await claim_of(lab, "n1")
    assert found is not None
    assert (lease["id"], lease["uid"], lease["job"], lease["node"]) == (found.lease, found.id, found.id, "n1")
    assert (lease["rate"], lease["gpus"], lease["class"], lease["work"]) == (RATE, 8000, "h100", "claim of n1")
    assert lease["started_at"] == START, "it is paid for from the claim on"
    held = await account(lab)
    assert (held["held"], held["gpus"], held["posted"]) == (HELD, 8000, nanocredits("50"))
    await assert_paid_once(lab)


@pytest.mark.parametrize("seed", range(3))
async def test_a_claim_costs_its_time_to_the_last_nanocredit(lab: Runtime, seed: int) -> None:
    await priced(lab, "0.000000007", "odd")
    await passed(lab, 1)
    await priced(lab, "0.010000007")
    await machine(lab, "n4", klass="odd", gpus=3)
    await funded(lab, "1000")
    chance = random.Random(seed)
    for node, rate in (("n1", 8 * 10_000_007), ("n4", 3 * 7)):
        before = int((await account(lab))["posted"])
        await claimed(lab, node)
        total = 0
        for _ in range(16):
            step = chance.randrange(1, 300_000_000)
            await passed(lab, step / 1e6)
            total += step
            assert await keep_claims(lab) == []
            await assert_paid_once(lab)
        assert code(await release(lab, node, ANN)) == "ok"
        assert before - int((await account(lab))["posted"]) == rate * total // 1_000_000
        await assert_paid_once(lab)
    held = await account(lab)
    assert (held["held"], held["gpus"]) == (0, 0)
    assert all(row["settled"] for row in await ended(lab)), "nobody measures it once more"


async def test_a_new_price_holds_from_when_it_is_paid_further_ahead(lab: Runtime) -> None:
    await funded(lab, "1000")
    await claimed(lab)
    await passed(lab, 100)
    await priced(lab, "0.02")
    assert await keep_claims(lab) == []
    await passed(lab, 200)
    assert await keep_claims(lab) == []
    await passed(lab, 350)
    assert code(await release(lab, "n1", ANN)) == "ok"
    assert await spent(lab, "1000") == 600 * RATE + 50 * 2 * RATE
    await assert_paid_once(lab)


async def test_the_users_own_account_pays_first(lab: Runtime) -> None:
    await funded(lab, "50")
    await amend(lab, Owner("default", "ann"))
    await funded(lab, "60", Owner("default", "ann"))
    await claimed(lab)
    assert ((await account(lab))["held"], (await account(lab, user="ann"))["held"]) == (0, HELD)


async def test_without_credit_nothing_is_claimed_and_nothing_stored(lab: Runtime) -> None:
    before = await state(lab)
    said = refusal(await claim(lab, "n1", ANN))
    assert (said.code, "no account default/ann or default" in said.message) == (Code.INSUFFICIENT_CREDIT, True)
    assert await state(lab) == before
    await funded(lab, "47.999999999")
    before = await state(lab)
    said = refusal(await claim(lab, "n1", ANN))
    assert said.code is Code.INSUFFICIENT_CREDIT
    assert said.message == "account default has 47.999999999 credits available, 48 are needed"
    assert said.hint == "Top up 0.000000001 credits or more."
    assert await state(lab) == before
    await funded(lab, "0.000000001")
    await claimed(lab)
    assert (await account(lab))["held"] == nanocredits("48")
    await assert_paid_once(lab)


async def test_limits_and_prices_are_those_of_all_that_is_leased(lab: Runtime) -> None:
    await machine(lab, "free", klass="unknown")
    await funded(lab, "500")
    assert code(await claim(lab, "free", ANN)) == "unpriced"
    await amend(lab, gpus_max=8000)
    await placed(lab, "train", "n2", gpus=1)
    assert code(await claim(lab, "n1", ANN)) == "concurrency_exceeded"
    await ends(lab, "n2", "train")
    await claimed(lab)
    await submitted_by(lab, ANN, "other")
    assert code(await bind(lab, "default", "other", "n2")) == "concurrency_exceeded"
    assert code(await bind(lab, "default", "other", "n1")) == "ok"
    await assert_paid_once(lab)


async def test_claiming_again_and_trying_it_out_hold_nothing_more(lab: Runtime) -> None:
    await funded(lab, "100")
    assert code(await claim(lab, "n1", ANN, dry_run=True)) == "ok"
    assert (await leases(lab), await holders(lab)) == ([], {})
    await claimed(lab)
    await claimed(lab)
    assert (await account(lab))["held"] == HELD
    assert code(await claim(lab, "n1", BOB)) == "conflict"
    await assert_paid_once(lab)


async def test_a_claim_from_before_stays_billed_afterwards_and_one_that_is_paid_stays_paid(lab: Runtime) -> None:
    await change(lab, "Tenant", "", "default", billing={"mode": "none"})
    await claimed(lab, "n1")
    await prepaid(lab)
    await funded(lab, "50")
    assert await keep_claims(lab) == []
    assert (await leases(lab), (await account(lab))["held"]) == ([], 0)
    await claimed(lab, "n2")
    await change(lab, "Tenant", "", "default", billing={"mode": "none"})
    await passed(lab, 400)
    await keep_claims(lab)
    assert await spent(lab, "50") == 400 * RATE
    for name in ("n1", "n2"):
        assert code(await release(lab, name, ANN)) == "ok"
    assert await spent(lab, "50") == 400 * RATE
    await assert_paid_once(lab)


# Work of who claims.


async def test_own_work_that_runs_there_is_settled_and_goes_on_by_the_claims_lease(lab: Runtime) -> None:
    await funded(lab, "100")
    await amend(lab, gpus_max=8000)
    await placed(lab, "train", "n1", gpus=4)
    await placed(lab, "waits", "n1", gpus=1)
    await ends(lab, "n1", "train", Phase.RUNNING)
    await agentless_billing.pay_on(lab, ["n1"])
    await passed(lab, 7.5)
    await claimed(lab)
    found = await claim_of(lab, "n1")
    assert found is not None
    (lease,) = await leases(lab)
    assert (lease["id"], lease["uid"]) == (found.lease, found.id)
    assert await spent(lab, "100") == round(7.5 * RATE / 2)
    for name in ("train", "waits"):
        assert (await status(lab, name))["nodes"][0]["lease"] == f"lease-{found.lease}"
    await assert_paid_once(lab)
    await passed(lab, 20)
    await agentless_billing.pay_on(lab, ["n1"])
    assert (await status(lab, "train"))["phase"] == "Running"
    await ends(lab, "n1", "train", measured=27_500_000)
    await ends(lab, "n1", "waits")
    assert [one["id"] for one in await leases(lab)] == [found.lease], "its work has ended, and it goes on"
    await assert_paid_once(lab)
    assert code(await release(lab, "n1", ANN)) == "ok"
    assert await spent(lab, "100") == round(7.5 * RATE / 2) + 20 * RATE
    assert all(row["settled"] for row in await ended(lab))
    await assert_paid_once(lab)


async def test_a_claim_that_is_refused_leaves_the_work_there_paid_as_it_was(lab: Runtime) -> None:
    await funded(lab, "47")
    await placed(lab, "train", "n1", gpus=4)
    await ends(lab, "n1", "train", Phase.RUNNING)
    await agentless_billing.pay_on(lab, ["n1"])
    await passed(lab, 5)
    before = await state(lab)
    said = refusal(await claim(lab, "n1", ANN))
    # What is held for the work would be free.
    assert said.message == "account default has 46.8 credits available, 48 are needed"
    assert await state(lab) == before
    await assert_paid_once(lab)


async def test_what_is_placed_on_a_claimed_node_is_not_paid_twice(lab: Runtime) -> None:
    await funded(lab, "48")
    await claimed(lab)
    await placed(lab, "train", "n1", gpus=8)
    assert (await status(lab, "train"))["nodes"][0]["lease"] == (await status_lease(lab))
    await assert_paid_once(lab)
    await ends(lab, "n1", "train", Phase.RUNNING)
    await passed(lab, 30)
    await agentless_billing.pay_on(lab, ["n1"])
    await ends(lab, "n1", "train", measured=30_000_000)
    assert code(await release(lab, "n1", ANN)) == "ok"
    assert await spent(lab, "48") == 30 * RATE
    await assert_paid_once(lab)


async def status_lease(runtime: Runtime) -> str:
    found = await claim_of(runtime, "n1")
    assert found is not None
    return f"lease-{found.lease}"


async def test_of_wide_work_only_what_is_elsewhere_has_a_lease_of_its_own(lab: Runtime) -> None:
    await funded(lab, "50")
    await claimed(lab)
    await submitted_by(lab, ANN, "wide", 2, nodes=2)
    assert code(await bind(lab, "default", "wide", "n1", "n2")) == "ok"
    here, there = (await status(lab, "wide"))["nodes"]
    (own,) = await leases(lab, "wide")
    assert (here["lease"], there["lease"]) == (await status_lease(lab), f"lease-{own['id']}")
    assert (own["node"], own["gpus"]) == ("n2", 2000)
    await assert_paid_once(lab)
    assert code(await release(lab, "n1", ANN)) == "in_use"
    await ends(lab, "n1", "wide")
    await ends(lab, "n2", "wide")
    await assert_paid_once(lab)


# Ends.


async def test_its_lease_is_the_claims_and_nobody_elses(lab: Runtime) -> None:
    await funded(lab, "50")
    await claimed(lab)
    (lease,) = await leases(lab)
    said = refusal(await credit.close_lease(lab, CloseLeaseCommand(number=lease["id"])))
    assert (said.code, said.message) == (Code.IN_USE, f"lease-{lease['id']} pays for the claim of node n1")
    assert "bursar node release n1" in said.hint
    command = ExtendLeaseCommand(number=lease["id"], delta=1, ahead_max=10**9)
    assert refusal(await credit.extend_lease(lab, command)).code is Code.IN_USE
    await assert_paid_once(lab)


async def test_statements_say_which_node_was_paid_for(lab: Runtime) -> None:
    number = await funded(lab, "50")
    await claimed(lab)
    await passed(lab, 10)
    assert code(await release(lab, "n1", "admin", EVERYTHING)) == "ok"
    shown = await statement(lab, number, START, START + 60 * 1_000_000)
    assert isinstance(shown, Statement)
    (line,) = shown.lines
    assert (line.work, line.node, line.debited) == ("claim of n1", "n1", -10 * RATE)


# Races.


async def test_claimers_who_race_on_one_account_never_overdraw_it(rivals: list[Runtime]) -> None:
    await funded(rivals[0], "100")  # for two of three
    for number in range(3):
        replies = await asyncio.gather(
            *(claim(runtime, node, ANN) for runtime, node in zip(rivals, NODES, strict=True)),
        )
        assert sorted(map(code, replies)) == ["insufficient_credit", "ok", "ok"]
        await assert_paid_once(rivals[0])
        for runtime, name in zip(rivals, await holders(rivals[0]), strict=False):
            assert code(await release(runtime, name, ANN)) == "ok"
            await wiped(runtime, name)
        assert await spent(rivals[0], "100") == 0, number


async def wiped(runtime: Runtime, name: str) -> None:
    assert code(await end_wipe(runtime, name, Origin("user:admin", "wiped"))) == "ok"


async def test_of_a_claim_and_own_work_that_is_bound_at_once_nothing_is_paid_twice(rivals: list[Runtime]) -> None:
    first, second, third = rivals
    await funded(first, "1000")
    for turn in range(6):
        node = NODES[turn % 3]
        for name in (f"a{turn}", f"b{turn}"):
            await submitted_by(first, ANN, name)
        await asyncio.gather(
            bind(second, "default", f"a{turn}", node), claim(first, node, ANN), bind(third, "default", f"b{turn}", node)
        )
        await assert_paid_once(first)
        for name in (f"a{turn}", f"b{turn}"):
            if (await status(first, name))["phase"] == "Scheduled":
                await ends(first, node, name)
        await release(first, node, ANN)
        await wiped(first, node)
        await assert_paid_once(first)
    assert (WINDOW, (await account(first))["held"]) == (600, 0)
