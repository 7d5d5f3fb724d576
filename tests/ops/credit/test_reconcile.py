"""Reconciliation: whatever was sent, in whatever order and how late, what was posted ends at what was used."""

import asyncio
import json
import random
from typing import Any

import pytest

from bursar.commands.credit.credit import CloseLeaseCommand, PutPrice
from bursar.core.credit.lease import Lease
from bursar.core.credit.usage_events import UsageEvent
from bursar.core.values.money import MICROS, cost, credits_of, nanocredits
from bursar.loops.reconcile import reconcile_due, reconciler
from bursar.ops.credit.credit import close_lease, put_price
from bursar.ops.credit.ledger import Extend
from bursar.ops.credit.reconcile import settle_late
from bursar.ops.credit.usage_events import Measure, Noted, measure
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import reconcile as store
from bursar.store.credit.reconcile import LastWord
from support.api.site import eventually
from support.credit.metering import (
    assert_books_balance,
    balance,
    close,
    ended,
    event,
    furnish,
    lapse,
    lease,
    moved,
    pass_time,
    reconcile,
    send,
)
from support.runtime.runtime import change, opened


async def notices(runtime: Runtime) -> list[tuple[str, str, str]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT type, data ->> 'amount' AS amount, data ->> 'reason' AS reason FROM notice ORDER BY id"
        )
    return [tuple(row) for row in rows if row["type"] == "credit.drift"]


async def totals(runtime: Runtime) -> dict[str, tuple[int, str]]:
    async with runtime.database.reader() as db:
        found = await store.load_totals(db)
    return {name: (leases, credits_of(amount)) for name, (leases, amount) in found.items()}


async def test_what_was_closed_by_our_clock_is_put_right_by_what_was_measured(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train", window=60)
    await pass_time(runtime, 30, one)
    one = await close(runtime, one)
    await send(runtime, event("train", 1, 5), event("train", 2, 5.5))
    (result,) = await reconcile(runtime)
    assert result.measured == 10_500_000
    assert result.difference == nanocredits("0.42") - one.posted
    (row,) = await ended(runtime, one)
    assert (row["posted"], row["measured"]) == (nanocredits("0.42"), 10_500_000)
    assert await balance(runtime) == nanocredits("49.58")
    assert await reconcile(runtime) == [], "once is enough"
    assert (await totals(runtime))["refunded"][0] == 1
    await assert_books_balance(runtime)


async def test_a_lapsed_lease_gets_back_what_was_not_used(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    await send(runtime, event("train", 1, 5))
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    assert await balance(runtime) == nanocredits("49.4")
    await reconcile(runtime)
    assert await balance(runtime) == nanocredits("49.8")
    assert await notices(runtime) == [("credit.drift", "-0.4", "")]


async def test_what_nobody_measured_stays_as_it_was_posted_until_somebody_does(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    (result,) = await reconcile(runtime)
    assert (result.measured, result.difference) == (None, 0)
    assert await balance(runtime) == nanocredits("49.4")
    assert (await totals(runtime))["unmeasured"] == (1, "0")
    assert await send(runtime, event("train", 1, 5), event("train", 2, 5)) == ["late", "late"]
    assert await send(runtime, event("train", 1, 5)) == ["duplicate"]
    await reconcile(runtime)
    assert await balance(runtime) == nanocredits("49.6")


async def test_events_that_come_late_are_posted_on_top(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    await send(runtime, event("train", 2, 5))
    await reconcile(runtime)
    assert await balance(runtime) == nanocredits("49.8")
    assert await send(runtime, event("train", 1, 7)) == ["late"]
    (result,) = await reconcile(runtime)
    assert credits_of(result.difference) == "0.28"
    assert await balance(runtime) == nanocredits("49.52")
    await assert_books_balance(runtime)


async def test_what_cannot_be_paid_is_written_off_and_told_and_no_balance_falls_below_zero(runtime: Runtime) -> None:
    await furnish(runtime, "0.6")
    one = await lease(runtime, "train")
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    assert await balance(runtime) == 0
    await send(runtime, event("train", 1, 20))
    (result,) = await reconcile(runtime)
    assert (credits_of(result.difference), credits_of(result.written_off)) == ("0.2", "0.2")
    assert await balance(runtime) == 0
    (row,) = await ended(runtime, one)
    assert row["posted"] == nanocredits("0.8")
    assert await notices(runtime) == [("credit.drift", "0.2", "written off"), ("credit.drift", "0.2", "")]
    assert (await totals(runtime)) == {"debited": (1, "0.2"), "written off": (1, "0.2")}
    await assert_books_balance(runtime)


async def test_part_of_it_is_taken_and_the_rest_written_off(runtime: Runtime) -> None:
    await furnish(runtime, "0.65")
    one = await lease(runtime, "train")
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    await send(runtime, event("train", 1, 20))
    (result,) = await reconcile(runtime)
    assert credits_of(result.written_off) == "0.15"
    assert await balance(runtime) == 0
    await assert_books_balance(runtime)


async def test_nobody_is_charged_for_longer_than_the_lease_was_there(runtime: Runtime) -> None:
    """An agent whose clock jumped by a day."""
    await furnish(runtime)
    one = await lease(runtime, "train")
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    await send(runtime, event("train", 1, 86_400))
    (result,) = await reconcile(runtime)
    (row,) = await ended(runtime, one)
    assert result.measured == row["closed_at"] - row["opened_at"]
    assert row["posted"] == cost(nanocredits("0.04"), row["measured"])


async def test_gpus_that_were_in_use_weigh_the_time(runtime: Runtime) -> None:
    """Two nodes of one lease, each with half of its GPUs, and for a while only one of them."""
    await furnish(runtime)
    one = await lease(runtime, "train", gpus=8)
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    await send(
        runtime, event("train", 1, 10, gpus=4000), event("train", 2, 10, gpus=4000), event("train", 3, 3, gpus=4000)
    )
    (result,) = await reconcile(runtime)
    assert result.measured == 11_500_000


async def test_one_that_cannot_be_reconciled_does_not_hold_up_the_others(runtime: Runtime) -> None:
    await furnish(runtime)
    stuck, good = await lease(runtime, "stuck"), await lease(runtime, "good")
    for one in (stuck, good):
        await pass_time(runtime, 10, one)
        await close(runtime, one)
    async with runtime.database.reader() as db:
        # More than any account can hold would have to come back.
        await db.execute("UPDATE lease_ended SET posted = 9000000000000000000 WHERE id = $1", stuck.id)
        await db.execute("UPDATE account SET posted = 4000000000000000000 WHERE id = $1", stuck.account)
    await send(runtime, event("stuck", 1, 0), event("good", 1, 5))
    assert [one.lease for one in await reconcile(runtime)] == [good.id]
    assert await reconcile(runtime) == []


async def test_who_still_sends_and_whose_numbers_have_gaps_is_waited_for(runtime: Runtime) -> None:
    await furnish(runtime, wait_seconds=60)
    talking, gaps, silent = [await lease(runtime, job) for job in ("talking", "gaps", "silent")]
    await send(runtime, event("talking", 1, 5), event("gaps", 1, 5), event("gaps", 3, 5))
    for one in (talking, gaps, silent):
        await close(runtime, one)
    assert await reconcile(runtime) == []
    await pass_time(runtime, 61, talking, gaps, silent)
    assert [one.lease for one in await reconcile(runtime)] == [silent.id]
    async with runtime.database.reader() as db:
        await db.execute("UPDATE job_usage SET at = now() - interval '61 seconds'")
    assert [one.lease for one in await reconcile(runtime)] == [talking.id]
    await pass_time(runtime, 3600, gaps)
    assert [one.lease for one in await reconcile(runtime)] == [gaps.id]
    assert (await totals(runtime))["missing events"][0] == 1


async def test_a_placements_lease_is_put_right_by_its_nodes_word_once_it_is_gone(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "alloc-1")
    async with runtime.database.reader() as db:
        await db.execute("UPDATE lease SET uid = 'alloc-1', epoch = 2, node = 'n1' WHERE id = $1", one.id)
        await db.execute(
            "INSERT INTO placement (node, uid, namespace, name, tenant, epoch, resources, devices, revision)"
            " VALUES ('n1', 'alloc-1', 'default', 'a', 'default', 2, '{}', '{}', 1)"
        )
    await pass_time(runtime, 60, one)
    await lapse(runtime, one)
    assert await reconcile(runtime) == [], "its node may yet say how long it ran"
    async with runtime.database.reader() as db:
        for epoch, seconds in ((1, 3.0), (2, 7.25)):
            await db.execute(
                "INSERT INTO allocation_usage VALUES ('alloc-1', $1, 'n1', $2, 0, 0, 0, 0, now() - interval '1 s')",
                epoch, seconds,
            )  # fmt: skip
        await db.execute("DELETE FROM placement")
    (result,) = await reconcile(runtime)
    assert result.measured == 7_250_000
    assert await balance(runtime) == nanocredits("49.71")


async def test_a_node_that_comes_back_when_all_was_reconciled_without_it_has_the_last_word(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "job")
    async with runtime.database.reader() as db:
        await db.execute("UPDATE lease SET uid = 'job', epoch = 2, node = 'n1'")
    await pass_time(runtime, 15, one)
    await lapse(runtime, one)
    await reconcile(runtime)
    assert await balance(runtime) == nanocredits("50") - cost(one.rate, 15 * MICROS)
    strangers = [LastWord("job", 1, "n1", 1), LastWord("job", 2, "n2", 2), LastWord("other", 2, "n1", 3)]
    await settle_late(runtime, strangers)
    assert await reconcile(runtime) == []
    # Said twice, as by a node that did not hear that it was heard; and another time, which changes nothing.
    for micros in (7_654_321, 7_654_321, 9_000_000):
        await settle_late(runtime, [LastWord("job", 2, "n1", micros)])
        await reconcile(runtime)
        assert await balance(runtime) == nanocredits("50") - cost(one.rate, 7_654_321)
    (row,) = await ended(runtime, one)
    assert (row["measured"], row["settled"], row["posted"]) == (7_654_321, True, cost(one.rate, 7_654_321))
    await assert_books_balance(runtime)


async def test_what_was_settled_by_the_last_word_of_its_node_is_not_looked_at_again(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    await close_lease(runtime, CloseLeaseCommand(number=one.id, measured=0, actor="test"))
    assert await send(runtime, event("train", 1, 5)) == ["new"]
    assert await reconcile(runtime) == []
    assert await balance(runtime) == nanocredits("50")


async def test_two_that_reconcile_at_once_do_it_once(database_url: str) -> None:
    async with opened(database_url) as left, opened(database_url) as right:
        await furnish(left, "1000")
        leases = [await lease(left, f"job-{index}") for index in range(30)]
        await pass_time(left, 60, *leases)
        await lapse(left, *leases)
        await send(left, *(event(f"job-{index}", 1, 5) for index in range(30)))
        runners = [reconciler(left), reconciler(right), reconciler(right)]
        done = await asyncio.gather(
            *(reconcile_due(runtime, one) for runtime, one in zip((left, right, right), runners, strict=True))
        )
        assert sorted(one.lease for some in done for one in some) == [one.id for one in leases]
        assert await balance(left) == nanocredits("1000") - 30 * nanocredits("0.2")
        assert (await totals(left))["refunded"] == (30, "12")
        await assert_books_balance(left)
        for one in runners:
            await one.close()


async def test_events_that_race_with_reconciliation_are_never_forgotten(database_url: str) -> None:
    """Whichever commits first, after one more look what was posted is what was sent."""
    async with opened(database_url) as left, opened(database_url) as right:
        await furnish(left, "1000")
        leases = [await lease(left, f"job-{index}", gpus=1) for index in range(10)]
        await pass_time(left, 600, *leases)
        await lapse(left, *leases)
        runner = reconciler(right)

        async def look() -> None:
            for _ in range(12):
                await reconcile_due(right, runner)

        async def talk(job: str) -> None:
            for seq in range(12):
                assert (await send(left, event(job, seq, 2)))[0] in ("new", "late")

        await asyncio.gather(look(), *(talk(f"job-{index}") for index in range(10)))
        await reconcile_due(right, runner)
        await runner.close()
        rows = await ended(left, *leases)
        assert [row["posted"] for row in rows] == [nanocredits("0.24")] * 10
        await assert_books_balance(left)


async def test_an_event_that_is_still_being_written_is_waited_for(runtime: Runtime) -> None:
    """It was sent while the lease was open; the lease is closed and reconciled before it is committed."""
    await furnish(runtime)
    one = await lease(runtime, "train")
    await pass_time(runtime, 10, one)
    async with runtime.database.reader() as db:
        async with db.transaction():
            (noted,) = await measure(db, [Measure(event("train", 1, 5))])
            assert isinstance(noted, Noted)
            await close(runtime, one)
            looking = asyncio.create_task(reconcile(runtime))
            await eventually(lambda: waits_for_a_lock(runtime))
        (result,) = await looking
    assert result.measured == 5_000_000


async def waits_for_a_lock(runtime: Runtime) -> bool:
    async with runtime.database.reader() as db:
        found: bool = await db.fetchval(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock')"
        )
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_random_histories_end_at_the_true_cost(runtime: Runtime, seed: int) -> None:
    """Leases that get heartbeats, lapse and close in between price changes; events that are lost, repeated, late and
    shuffled; reconciliation at any time. In the end every lease has cost its measured usage, and the part that its
    owner could not pay is written off."""
    chance = random.Random(seed)
    await furnish(runtime, credits_of(nanocredits(chance.choice(("2", "6", "1000")))))
    leases: list[Lease] = []
    unsent: list[UsageEvent] = []
    sent: dict[int, int] = {}
    for index in range(12):
        try:
            one = await lease(runtime, f"job-{index}", gpus=chance.choice((1, 3, 4)), window=chance.randint(5, 40))
        except AssertionError:
            continue  # no credit left
        leases.append(one)
        ran = 0.0
        for heartbeat in range(chance.randint(0, 4)):
            step = chance.uniform(0.5, 30)
            ran += step
            await pass_time(runtime, step, one)
            await runtime.extending.submit(Extend(one.id, heartbeat + 1))
        if chance.random() < 0.3:
            await price(runtime, chance)
        at = 0
        while chance.random() < 0.8 and at < 8:
            unsent.append(event(f"job-{index}", at, chance.uniform(0, 1 + ran / 4)))
            at += 1
        await pass_time(runtime, chance.uniform(41, 100), one)
        await (lapse(runtime, one) if chance.random() < 0.6 else close(runtime, one))
        if chance.random() < 0.5:
            await reconcile(runtime)
    chance.shuffle(unsent)
    known = {one.job: one.id for one in leases}
    while unsent:
        some = [unsent.pop() for _ in range(min(len(unsent), chance.randint(1, 6)))]
        again = chance.sample(some, chance.randint(0, len(some)))
        assert set(await send(runtime, *some, *again)) <= {"new", "late", "duplicate"}
        for said in some:
            sent[known[said.job]] = sent.get(known[said.job], 0) + said.micros
        if chance.random() < 0.5:
            await reconcile(runtime)
    await pass_time(runtime, 4000, *leases)  # gaps are not waited for any longer
    await reconcile(runtime)
    rows = await ended(runtime, *leases)
    for row in rows:
        assert row["reconciled_at"] is not None
        if row["id"] in sent:
            used = min(sent[row["id"]], row["closed_at"] - row["opened_at"])
            assert row["posted"] == at_rates(row, used)
    await assert_books_balance(runtime)
    async with runtime.database.reader() as db:
        entries = await db.fetch("SELECT * FROM entry WHERE lease > 0")
    assert moved(entries, 2) == sum(row["posted"] for row in rows), "what was earned is what it cost"
    assert await balance(runtime) >= 0


async def price(runtime: Runtime, chance: random.Random) -> None:
    new = chance.randint(1_000_000, 20_000_000)
    await put_price(runtime, PutPrice(resource="nvidia.com/gpu", klass="h100", per_second=new, actor="test"))


def at_rates(row: Any, micros: int) -> int:
    total = 0
    for rate, length in json.loads(row["past"]):
        total += cost(rate, min(micros, length))
        micros -= min(micros, length)
    return total + cost(row["rate"], micros)


async def test_the_wait_is_what_the_settings_say(runtime: Runtime) -> None:
    await furnish(runtime, wait_seconds=60)
    one = await lease(runtime, "train")
    await close(runtime, one)
    assert await reconcile(runtime) == []
    await change(runtime, "Settings", "", "system", credits={"reconcileSeconds": 0})
    assert len(await reconcile(runtime)) == 1
