"""Usage of jobs: each event counts once, however often and by whichever sender, and belongs to one lease."""

import asyncio
import random
from itertools import chain, repeat
from typing import Any

import pytest
from msgspec.structs import replace

from bursar.core.credit.account import Owner
from bursar.core.credit.usage_events import UsageEvent
from bursar.core.values.money import MICROS, credits_of, nanocredits
from bursar.ops.credit.credit import top_up
from bursar.ops.credit.usage_events import Measure, Noted, note_usage
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import usage_events as store
from support.credit.metering import (
    assert_books_balance,
    balance,
    close,
    done,
    event,
    furnish,
    lapse,
    lease,
    pass_time,
    reconcile,
    send,
)
from support.runtime.postgres_proxy import Proxy
from support.runtime.runtime import opened, tenant


async def sums(runtime: Runtime) -> list[tuple[Any, ...]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT job, lease, events, seq_min, seq_max, amount::bigint FROM job_usage ORDER BY 1, 2"
        )
    return [tuple(row) for row in rows]


async def count(runtime: Runtime) -> int:
    async with runtime.database.reader() as db:
        number: int = await db.fetchval("SELECT count(*) FROM usage_event")
    return number


async def test_an_event_counts_once_whatever_is_sent_again(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    first, second = event("train", 1, 5), event("train", 2, 5)
    assert await send(runtime, first, first, second) == ["new", "duplicate", "new"]
    assert await send(runtime, second, first) == ["duplicate", "duplicate"]
    assert await sums(runtime) == [("train", one.id, 2, 1, 2, 10 * MICROS * 4000)]


async def test_another_body_under_the_same_number_is_refused_and_leaves_the_first(runtime: Runtime) -> None:
    await furnish(runtime)
    await lease(runtime, "train")
    first = event("train", 1, 5)
    other = event("train", 1, 6)
    assert await send(runtime, first, other) == ["new", "request_id_reused"]
    assert await send(runtime, other, event("train", 1, 5, utilization=0.5)) == ["request_id_reused"] * 2
    assert await send(runtime, first) == ["duplicate"]
    assert (await sums(runtime))[0][2:] == (1, 1, 1, 5 * MICROS * 4000)


async def test_of_two_that_race_with_different_bodies_one_counts(database_url: str) -> None:
    async with opened(database_url) as left, opened(database_url) as right:
        await furnish(left)
        await lease(left, "train")
        for seq in range(20):
            answers = await asyncio.gather(
                send(left, event("train", seq, 5)),
                send(right, event("train", seq, 7)),
                send(left, event("train", seq, 5)),
            )
            words = sorted(word for answer in answers for word in answer)
            assert words in (
                ["duplicate", "new", "request_id_reused"],
                ["new", "request_id_reused", "request_id_reused"],
            )
        assert await count(left) == 20
        async with left.database.reader() as db:
            kept = await db.fetchval("SELECT sum(micros * 4000)::bigint FROM usage_event")
        assert (await sums(left))[0][2:] == (20, 0, 19, kept)


async def test_many_senders_that_repeat_everything_count_everything_once(database_url: str) -> None:
    """Two runtimes, each event several times, in any order and in any batch."""
    chance = random.Random(7)
    async with opened(database_url) as left, opened(database_url) as right:
        await furnish(left, "1000")
        jobs = [f"job-{index}" for index in range(8)]
        leases = {job: await lease(left, job, gpus=1) for job in jobs}
        events = [event(job, seq, chance.randint(1, 9)) for job in jobs for seq in range(40)]
        parcels = []
        for _ in range(4):
            chance.shuffle(events)
            parcels += [(chance.choice((left, right)), events[at : at + 25]) for at in range(0, len(events), 25)]
        chance.shuffle(parcels)
        words = await asyncio.gather(*(send(runtime, *some) for runtime, some in parcels))
        said = [word for some in words for word in some]
        assert said.count("new") == len(events)
        assert said.count("duplicate") == 3 * len(events)
        assert await sums(left) == sorted(
            (job, leases[job].id, 40, 0, 39, 1000 * sum(one.micros for one in events if one.job == job)) for job in jobs
        )


async def test_what_cannot_be_is_refused_and_nothing_is_stored(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    good = event("train", 1, 5)

    def bad(**fields: Any) -> UsageEvent:
        return replace(good, **fields)

    refused = {
        "invalid": [
            bad(micros=-1), bad(end=good.begin - 1), bad(seq=-1), bad(seq=2**60), bad(job=""), bad(job="x" * 300),
            bad(gpus=-1), bad(utilization=1.5), bad(utilization=float("nan")), bad(micros=10**15), bad(begin=-1),
            bad(monotonic=-5),
        ],
        "not_found": [bad(job="other"), bad(lease=one.id + 1), bad(account=99)],
        "unprocessable": [bad(gpus=4001), bad(klass="a100")],
    }  # fmt: skip
    for code, events in refused.items():
        assert await send(runtime, *events) == [code] * len(events), code
    assert await send(runtime, good, tenants=("physics",)) == ["not_found"]
    assert await send(runtime, good, node="n1") == ["not_found"], "a node speaks of its own leases alone"
    assert await count(runtime) == 0
    assert await sums(runtime) == []


async def test_a_refused_one_does_not_keep_its_neighbours_from_counting(runtime: Runtime) -> None:
    await furnish(runtime)
    await lease(runtime, "train")
    words = await send(
        runtime, event("train", 1, 5), event("ghost", 1, 5), event("train", 2, -0.0), event("train", 3, 1)
    )
    assert words == ["new", "not_found", "new", "new"]


async def test_two_accounts_may_each_have_a_job_of_one_name(runtime: Runtime) -> None:
    await furnish(runtime)
    await tenant(runtime, "physics")
    done(await top_up(runtime, Owner("physics"), nanocredits("10"), actor="test"))
    ours, theirs = await lease(runtime, "train"), await lease(runtime, "train", owner=Owner("physics"))
    assert await send(runtime, event("train", 1, 5)) == ["unprocessable"]
    assert await send(runtime, event("train", 1, 5), tenants=("default",)) == ["new"]
    assert await send(runtime, event("train", 1, 7, lease=theirs.id)) == ["new"]
    assert [(row[1], row[5]) for row in await sums(runtime)] == [
        (ours.id, 20_000 * MICROS), (theirs.id, 28_000 * MICROS)
    ]  # fmt: skip


async def test_an_event_belongs_to_the_lease_that_was_there_at_the_time(runtime: Runtime) -> None:
    await furnish(runtime)
    first = await lease(runtime, "train")
    await pass_time(runtime, 1000, first)
    first = await close(runtime, first)
    await pass_time(runtime, 500, first)
    second = await lease(runtime, "train")
    opened_at = second.opened_at
    words = await send(
        runtime,
        event("train", 1, 5, begin=opened_at - 900 * MICROS),
        event("train", 2, 5, begin=opened_at + 2 * MICROS),
        event("train", 3, 5, begin=1),  # a clock that knows nothing: nearest is the older one
        event("train", 4, 5, begin=1, lease=second.id),
    )
    assert words == ["new"] * 4
    assert [(row[1], row[2]) for row in await sums(runtime)] == [(first.id, 2), (second.id, 2)]


async def test_where_not_all_are_taken_the_others_are_written_before_it_is_said(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await furnish(runtime)
    await lease(runtime, "train")
    monkeypatch.setattr(runtime.measuring, "_capacity", 2)
    events = [Measure(event("train", seq, 1)) for seq in range(1, 6)]
    with pytest.raises(Overloaded):
        await note_usage(runtime, events)
    assert await count(runtime) == 2
    monkeypatch.undo()
    assert [one.duplicate for one in await note_usage(runtime, events) if isinstance(one, Noted)] == [
        True, True, False, False, False,
    ]  # fmt: skip


async def test_what_ended_too_long_ago_takes_no_usage_and_its_events_are_dropped(runtime: Runtime) -> None:
    await furnish(runtime)
    one = await lease(runtime, "train")
    await send(runtime, event("train", 1, 5))
    one = await close(runtime, one)
    async with runtime.database.reader() as db:
        assert await store.forget(db) == 0
        await db.execute("UPDATE lease_ended SET reconciled_at = now()")
        await db.execute("UPDATE job_usage SET at = now() - interval '60 days', made_at = now() - interval '60 days'")
        await db.execute("UPDATE usage_event SET at = now() - interval '60 days'")
    await pass_time(runtime, 60 * 86_400, one)
    assert await send(runtime, event("train", 1, 5), event("train", 2, 5)) == ["not_found"] * 2
    async with runtime.database.reader() as db:
        assert [await store.forget(db) for _ in range(3)] == [1, 1, 0]
    assert (await count(runtime), await sums(runtime)) == (0, [])


@pytest.mark.parametrize("deed", ["before", "after", "during"])
async def test_a_commit_whose_connection_is_cut_counts_once_and_is_answered_as_the_first(
    database_url: str, deed: str
) -> None:
    async with Proxy(database_url) as proxy, opened(proxy.url) as runtime:
        await furnish(runtime)
        await lease(runtime, "train")
        proxy.plan = chain([deed], repeat("pass"))
        assert await send(runtime, event("train", 1, 5), event("train", 2, 5)) == ["new", "new"]
        assert proxy.cuts == [deed]
        assert await send(runtime, event("train", 1, 5)) == ["duplicate"]
        assert (await sums(runtime))[0][2:] == (2, 1, 2, 40_000 * MICROS)


@pytest.mark.parametrize("deed", ["before", "after", "during"])
async def test_a_reconciliation_whose_connection_is_cut_posts_once(database_url: str, deed: str) -> None:
    async with Proxy(database_url) as proxy, opened(proxy.url) as runtime:
        await furnish(runtime)
        one = await lease(runtime, "train")
        await send(runtime, event("train", 1, 5))
        await pass_time(runtime, 60, one)
        await lapse(runtime, one)
        proxy.plan = chain([deed], repeat("pass"))
        (result,) = await reconcile(runtime)
        assert proxy.cuts == [deed]
        assert credits_of(result.difference) == "-0.4"
        assert await balance(runtime) == nanocredits("49.8")
        await assert_books_balance(runtime)
