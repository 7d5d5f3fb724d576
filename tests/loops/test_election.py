"""Leading on a real database: one works at a time, and stops when it may not be leading any more."""

import asyncio
import time
from datetime import timedelta

from bursar.loops.election import LeaderTerms, run_election
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Connection
from support.scheduling.leaders import load_leader

PATIENT = LeaderTerms(term_seconds=60.0, renew_seconds=0.01, ask_seconds=0.01)
HASTY = LeaderTerms(term_seconds=0.3, renew_seconds=0.05, ask_seconds=0.01)


class Controller:
    """A candidate, and what it was seen doing."""

    def __init__(self, runtime: Runtime, name: str, terms: LeaderTerms = PATIENT) -> None:
        self.fences: list[int] = []
        self.working = asyncio.Event()
        self.stopped = asyncio.Event()
        self.fault: Exception | None = None
        self._task = asyncio.create_task(run_election(runtime.database, name, self.work, terms))

    async def work(self, fence: int) -> None:
        self.fences.append(fence)
        self.stopped.clear()
        self.working.set()
        try:
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
            await asyncio.Event().wait()
        finally:
            self.working.clear()
            self.stopped.set()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def within_a_minute(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


async def test_one_of_two_works_and_the_other_takes_over_when_it_ends(runtime: Runtime) -> None:
    first = Controller(runtime, "first")
    await within_a_minute(first.working)
    second = Controller(runtime, "second")
    until = (await load_leader(runtime.database)).until
    async with asyncio.timeout(60):
        while (await load_leader(runtime.database)).until == until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not second.working.is_set()
    await first.end()
    assert first.stopped.is_set()
    await within_a_minute(second.working)  # long before the first one's term would have run out
    assert first.fences[-1] < second.fences[0]
    assert (await load_leader(runtime.database)).holder.startswith("second/")
    await second.end()
    assert not (await load_leader(runtime.database)).leads


async def test_who_was_deposed_stops(runtime: Runtime, db: Connection) -> None:
    one = Controller(runtime, "one")
    await within_a_minute(one.working)
    await db.execute("UPDATE leader SET holder = 'other', fence = fence + 1")
    await within_a_minute(one.stopped)
    assert (await load_leader(runtime.database)).holder == "other"
    await db.execute("UPDATE leader SET until = clock_timestamp()")
    await within_a_minute(one.working)
    assert one.fences == [one.fences[0], one.fences[0] + 2]
    await one.end()


async def test_who_let_its_term_run_out_begins_anew_under_another_fence(runtime: Runtime, db: Connection) -> None:
    one = Controller(runtime, "one")
    await within_a_minute(one.working)
    await db.execute("UPDATE leader SET until = clock_timestamp()")
    await within_a_minute(one.stopped)
    await within_a_minute(one.working)
    assert len(set(one.fences)) == len(one.fences) == 2
    await one.end()


async def test_who_cannot_renew_stops_at_its_own_deadline(runtime: Runtime, db: Connection) -> None:
    one = Controller(runtime, "one", HASTY)
    await within_a_minute(one.working)
    async with db.transaction():
        await db.execute("SELECT 1 FROM leader FOR UPDATE")  # the database answers no renewal
        await within_a_minute(one.stopped)
    await within_a_minute(one.working)
    await one.end()


async def test_a_term_that_is_nearly_over_is_renewed_all_the_same(runtime: Runtime) -> None:
    """A candidate that waited for the leader's row has little left of its term when it gets it."""
    one = Controller(runtime, "one", LeaderTerms(term_seconds=1.0, renew_seconds=60.0, ask_seconds=0.01))
    await within_a_minute(one.working)
    first = (await load_leader(runtime.database)).until
    async with asyncio.timeout(60):
        while (await load_leader(runtime.database)).until - first < timedelta(seconds=2):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(one.fences) == 1
    await one.end()


async def test_work_that_fails_gives_the_lead_up_and_is_begun_again(runtime: Runtime) -> None:
    one = Controller(runtime, "one")
    one.fault = RuntimeError("a bug")
    async with asyncio.timeout(60):
        while len(one.fences) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert one.fences[1] > one.fences[0]
    await one.end()
    assert not (await load_leader(runtime.database)).leads


async def test_who_decides_for_longer_than_a_term_keeps_the_lead(runtime: Runtime) -> None:
    one = Controller(runtime, "one", LeaderTerms(term_seconds=1.0, renew_seconds=0.05, ask_seconds=0.01))
    await within_a_minute(one.working)
    until = (await load_leader(runtime.database)).until
    time.sleep(2.5)  # The event loop stands still: a decision that takes this long.
    leader = await load_leader(runtime.database)
    assert leader.leads
    assert leader.until > until
    await asyncio.sleep(0.1)
    assert one.working.is_set()
    assert len(one.fences) == 1
    await one.end()


async def test_who_is_stuck_is_not_renewed_for_ever(runtime: Runtime) -> None:
    one = Controller(
        runtime, "one", LeaderTerms(term_seconds=0.5, renew_seconds=0.05, ask_seconds=0.01, stuck_seconds=0.5)
    )
    await within_a_minute(one.working)
    time.sleep(2.5)
    await within_a_minute(one.stopped)
    await within_a_minute(one.working)
    assert one.fences[1] > one.fences[0]
    await one.end()
