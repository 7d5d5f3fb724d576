"""Drift per account: small adjustments of many jobs add up to one alert, and are forgotten with their period."""

import asyncio
from typing import Any

from structlog.testing import capture_logs

from bursar.commands.credit.credit import PutAccount
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import Lease
from bursar.core.values.money import credits_of, nanocredits
from bursar.loops.reconcile import reconciler
from bursar.ops.credit.credit import load_credit_policy, put_account, top_up
from bursar.ops.credit.reconcile import Reconcile, forget_drift
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.credit import reconcile as store
from bursar.store.credit.reconcile import EndedLease
from support.credit.metering import POOL, done, event, furnish, lapse, lease, pass_time, reconcile, send
from support.runtime.runtime import change, opened

ANN = Owner("default", "ann")


async def limit(runtime: Runtime, account: str = "0.1", hours: int = 24, job: str = "0.1") -> None:
    """How much drift of an account, and of one job, needs an alert."""
    policy = {"reconcileSeconds": 0, "driftCredits": job, "driftAccountCredits": account, "driftAccountHours": hours}
    await change(runtime, "Settings", "", "system", credits=policy)


async def open_account(runtime: Runtime) -> None:
    done(await put_account(runtime, PutAccount(whose=ANN, changes={}, actor="test")))
    done(await top_up(runtime, ANN, nanocredits("50"), actor="test"))


async def lapsed(runtime: Runtime, *jobs: str, seconds: float = 14, owner: Owner = POOL) -> list[Lease]:
    """Jobs that paid for 15 s, 0.04 credits each, and used so many: each second less is 0.04 credits of drift."""
    leases = [await lease(runtime, job, owner=owner) for job in jobs]
    await pass_time(runtime, 60, *leases)
    await lapse(runtime, *leases)
    await send(runtime, *(event(job, 1, seconds) for job in jobs))
    return leases


async def notices(runtime: Runtime) -> list[tuple[str, str, str, str]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT type, subject, data ->> 'amount' AS amount, data ->> 'reason' AS reason FROM notice ORDER BY id"
        )
    return [tuple(row) for row in rows if row["type"].endswith("drift")]


def alert(amount: str, subject: str = "default", above: str = "0.1", hours: int = 24) -> tuple[str, str, str, str]:
    return ("credit.account-drift", subject, amount, f"more than {above} credits in {hours} h")


async def drift_of(runtime: Runtime) -> list[Any]:
    async with runtime.database.reader() as db:
        return list(await db.fetch("SELECT leases, amount, alerted FROM account_drift ORDER BY hour, account"))


async def age(runtime: Runtime, hours: int) -> None:
    """Let so many hours go by for the drift of all accounts."""
    async with runtime.database.reader() as db:
        await db.execute("UPDATE account_drift SET hour = hour - $1", hours)


async def test_small_drifts_of_many_jobs_add_up_to_one_alert(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime)
    for job in ("one", "two"):
        await lapsed(runtime, job)
        await reconcile(runtime)
    assert await notices(runtime) == [], "0.08 credits are within the limit"
    await lapsed(runtime, "three")
    with capture_logs() as logs:
        (result,) = await reconcile(runtime)
    assert credits_of(result.drift) == "0.12"
    assert await notices(runtime) == [alert("0.12")], "no job exceeds the limit of one job"
    (line,) = [one for one in logs if one["log_level"] == "warning"]
    assert (line["account"], line["drift"], line["limit"], line["hours"]) == ("default", "0.12", "0.1", 24)


async def test_an_account_that_stays_above_the_limit_is_not_alerted_again_with_each_pass(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime)
    await lapsed(runtime, "one", "two", "three")
    await reconcile(runtime)
    await reconcile(runtime)
    for job in ("four", "five"):
        await lapsed(runtime, job)
        await reconcile(runtime)
    assert await notices(runtime) == [alert("0.12")]
    assert sum(row["amount"] for row in await drift_of(runtime)) == nanocredits("0.2")


async def test_refunds_and_debits_do_not_cancel_out(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime)
    await lapsed(runtime, "cheaper", seconds=13)
    await lapsed(runtime, "dearer", seconds=17)
    results = await reconcile(runtime)
    assert sorted(credits_of(one.difference) for one in results) == ["-0.08", "0.08"]
    assert await notices(runtime) == [alert("0.16")]


async def test_what_was_measured_exactly_is_no_drift(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime, account="0")
    await lapsed(runtime, "exact", seconds=15)
    assert len(await reconcile(runtime)) == 1
    assert await drift_of(runtime) == []
    assert await notices(runtime) == []


async def test_a_rolling_period_forgets_old_drift(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime, hours=2)
    await lapsed(runtime, "old", "older")
    await reconcile(runtime)
    await age(runtime, 4)
    await lapsed(runtime, "one", "two")
    await reconcile(runtime)
    assert await notices(runtime) == [], "0.08 credits in the period, 0.16 in all"
    await age(runtime, 1)
    await lapsed(runtime, "three")
    await reconcile(runtime)
    assert await notices(runtime) == [alert("0.12", hours=2)], "an hour ago is within the period"


async def test_each_time_the_sum_rises_above_the_limit_is_one_alert(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime, hours=2)
    await lapsed(runtime, "one", "two", "three")
    await reconcile(runtime)
    await age(runtime, 4)
    await lapsed(runtime, "four")
    await reconcile(runtime)
    assert await notices(runtime) == [alert("0.12", hours=2)]
    await lapsed(runtime, "five", "six")
    await reconcile(runtime)
    assert await notices(runtime) == [alert("0.12", hours=2)] * 2


async def test_one_large_drift_is_an_alert_of_its_job_and_of_its_account(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime)
    await lapsed(runtime, "train", seconds=5)
    await reconcile(runtime)
    assert await notices(runtime) == [("credit.drift", "default", "-0.4", ""), alert("0.4")]


async def test_accounts_are_counted_apart(runtime: Runtime) -> None:
    await furnish(runtime)
    await open_account(runtime)
    await limit(runtime)
    await lapsed(runtime, "one", "two")
    await lapsed(runtime, "three", "four", owner=ANN)
    await reconcile(runtime)
    assert await notices(runtime) == [], "0.08 credits each"
    await lapsed(runtime, "five", owner=ANN)
    await reconcile(runtime)
    assert await notices(runtime) == [alert("0.12", subject="default/ann")]


async def test_reconcilers_that_race_alert_once(database_url: str) -> None:
    """Each lease is a transaction of its own, in three reconcilers at once; each adds 0.04 credits."""
    async with opened(database_url) as left, opened(database_url) as right:
        await furnish(left, "1000")
        await limit(left, account="0.2")
        leases = await lapsed(left, *(f"job-{index}" for index in range(24)))
        policy = await load_credit_policy(left)
        runners = [reconciler(left), reconciler(right), reconciler(right)]

        async def work(index: int) -> None:
            for one in leases[index::2]:  # each lease is tried by more than one
                await runners[index].run([Reconcile(EndedLease(one.id, one.account), policy)])

        await asyncio.gather(work(0), work(1), work(2))
        for one in runners:
            await one.close()
        assert await notices(left) == [alert("0.24", above="0.2")]
        rows = await drift_of(left)
        assert sum(row["leases"] for row in rows) == 24
        assert sum(row["amount"] for row in rows) == 24 * nanocredits("0.04")


async def test_drift_of_hours_that_no_longer_count_is_dropped(runtime: Runtime) -> None:
    await furnish(runtime)
    await limit(runtime, hours=2)
    await lapsed(runtime, "old")
    await reconcile(runtime)
    await age(runtime, 1)
    await forget_drift(runtime)
    assert len(await drift_of(runtime)) == 1, "it still counts"
    await age(runtime, 3)
    await lapsed(runtime, "new")
    await reconcile(runtime)
    assert len(await drift_of(runtime)) == 2
    await forget_drift(runtime)
    assert [row["leases"] for row in await drift_of(runtime)] == [1]


async def test_accounts_above_the_limit_are_counted_for_the_period(runtime: Runtime) -> None:
    await furnish(runtime)
    await open_account(runtime)
    await limit(runtime)
    await lapsed(runtime, "one", "two", "three")
    await lapsed(runtime, "four", owner=ANN)
    await reconcile(runtime)
    async with runtime.database.reader() as db:
        hour = await ledger_store.load_now(db) // 3_600_000_000
        assert await store.count_drifting(db, hour - 24, nanocredits("0.1")) == 1
        assert await store.count_drifting(db, hour - 24, nanocredits("0.01")) == 2
        assert await store.count_drifting(db, hour + 1, 0) == 0
