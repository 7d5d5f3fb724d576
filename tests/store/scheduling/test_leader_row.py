"""The leader's row: one term at a time, rising fences, and which statements wait for which."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bursar.store.db.database import Connection, connect
from bursar.store.scheduling import leader
from support.scheduling.leaders import read_leader

LONG = 3600.0

Connect = Callable[[], Awaitable[Connection]]


@pytest.fixture
async def another(database_url: str) -> AsyncIterator[Connect]:
    opened: list[Connection] = []

    async def one() -> Connection:
        db = await connect(database_url)
        await db.execute("SET idle_in_transaction_session_timeout = 0")
        opened.append(db)
        return db

    yield one
    for db in opened:
        await db.close()


async def run_out(db: Connection) -> None:
    """The term ends, as if it had not been renewed in time."""
    await db.execute("UPDATE leader SET until = clock_timestamp()")


async def until_somebody_waits(db: Connection) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(30):
        while not await db.fetchval(waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_term_is_taken_renewed_and_taken_again_under_a_higher_fence(another: Connect) -> None:
    db = await another()
    first = await leader.take(db, "a", LONG)
    assert first is not None
    assert await leader.renew(db, "a", LONG) == first
    assert await leader.take(db, "b", LONG) is None
    assert await leader.renew(db, "b", LONG) is None
    await run_out(db)
    second = await leader.take(db, "b", LONG)
    assert second == first + 1
    told = await read_leader(db)
    assert (told.holder, told.fence, told.leads) == ("b", second, True)


async def test_a_term_that_is_over_is_not_renewed(another: Connect) -> None:
    db = await another()
    fence = await leader.take(db, "a", LONG)
    await run_out(db)
    assert await leader.renew(db, "a", LONG) is None
    assert not (await read_leader(db)).leads
    assert await leader.take(db, "a", LONG) == fence + 1  # type: ignore[operator]


async def test_who_resigns_ends_no_term_but_its_own(another: Connect) -> None:
    db = await another()
    await leader.take(db, "a", LONG)
    assert not await leader.resign(db, "b")
    assert await leader.take(db, "b", LONG) is None
    assert await leader.resign(db, "a")
    assert await leader.take(db, "b", LONG) is not None
    assert not await leader.resign(db, "a")
    assert await leader.renew(db, "b", LONG) is not None


async def test_of_many_who_take_over_at_once_one_leads(another: Connect) -> None:
    several = [await another() for _ in range(6)]
    for _ in range(5):
        await run_out(several[0])
        answers = await asyncio.gather(*(leader.take(db, f"c{n}", LONG) for n, db in enumerate(several)))
        taken = [fence for fence in answers if fence is not None]
        assert taken == [(await read_leader(several[0])).fence]


async def test_a_renewal_does_not_wait_for_those_who_check_the_fence(another: Connect) -> None:
    binder, holder = await another(), await another()
    fence = await leader.take(holder, "a", LONG)
    async with binder.transaction():
        assert await leader.lock(binder) == fence
        await holder.execute("SET lock_timeout = '1ms'")  # a transaction that has to wait fails at once
        assert await leader.renew(holder, "a", LONG) == fence
        assert await leader.lock(binder) == fence


async def test_a_takeover_waits_for_those_who_check_the_fence(another: Connect) -> None:
    binder, candidate, looker = await another(), await another(), await another()
    fence = await leader.take(candidate, "a", LONG)
    async with binder.transaction():
        assert await leader.lock(binder) == fence
        await run_out(looker)
        taking = asyncio.create_task(leader.take(candidate, "b", LONG))
        await until_somebody_waits(looker)
        assert not taking.done()
        assert (await read_leader(looker)).fence == fence
    assert await taking == fence + 1


async def test_whoever_waited_for_a_takeover_sees_the_new_fence(another: Connect) -> None:
    binder, candidate, looker = await another(), await another(), await another()
    async with candidate.transaction():
        fence = await leader.take(candidate, "a", LONG)
        checking = asyncio.create_task(leader.lock(binder))
        await until_somebody_waits(looker)
        assert not checking.done()
    assert await checking == fence


async def test_a_leader_who_renewed_while_a_rival_waited_stays(another: Connect) -> None:
    """A term that was nearly over: the rival found it over, the leader did not."""
    binder, holder, candidate, looker = [await another() for _ in range(4)]
    fence = await leader.take(holder, "a", LONG)
    async with binder.transaction():
        await leader.lock(binder)
        await run_out(looker)
        taking = asyncio.create_task(leader.take(candidate, "b", LONG))
        await until_somebody_waits(looker)
        await looker.execute("UPDATE leader SET until = clock_timestamp() + interval '1 hour'")
    assert await taking is None
    assert await leader.renew(holder, "a", LONG) == fence
