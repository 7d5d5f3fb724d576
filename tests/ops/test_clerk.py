"""A process beside the leader's: what it is told is committed as if the leader had done it, or it is not known."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import pytest

from bursar.core.placing import Target
from bursar.core.refusal import Refusal
from bursar.core.value import replace
from bursar.ops import clerk as clerk_module
from bursar.ops.bind import Bind, Bound, Member, bind
from bursar.ops.clerk import Clerk
from bursar.ops.office import Office
from bursar.store.database import Connection, Unavailable
from evictions import assert_books_balance
from offices import TEST, allocation, code, get, member, node
from schedulers import term


@pytest.fixture
async def clerk(office: Office) -> AsyncIterator[Clerk]:
    one = Clerk(office)
    one.call()
    await at_work(one)
    yield one
    await one.dismiss()


async def at_work(one: Clerk, other_than: int | None = None) -> None:
    async with asyncio.timeout(60):
        while not one.is_at_work or one.pid == other_than:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def unit(office: Office, names: Sequence[str], where: str, fence: int | None = None) -> Bind:
    members = [await member(office, "default", name, where) for name in names]
    assert all(isinstance(one, Member) for one in members)
    return Bind.unit([one for one in members if isinstance(one, Member)], TEST, fence)


async def backlog(office: Office, count: int, where: str = "n1") -> list[Bind]:
    names = [f"job-{number:03}" for number in range(count)]
    await asyncio.gather(*(allocation(office, "default", name, gpu=1) for name in names))
    return [await unit(office, [name], where) for name in names]


async def revision_of(office: Office, name: str) -> int:
    return (await get(office, "Allocation", "default", name)).revision


async def placed(office: Office) -> list[str]:
    async with office.database.reader() as db:
        return [row["name"] for row in await db.fetch("SELECT name FROM placement ORDER BY name")]


async def test_what_the_clerk_is_told_is_placed_and_its_revisions_are_told(office: Office, clerk: Clerk) -> None:
    await node(office, "n1", gpu=100)
    commands = await backlog(office, 80)
    outcome = await clerk.bind(commands)
    assert outcome == [(await revision_of(office, one.key.name),) for one in commands]
    assert await placed(office) == [one.key.name for one in commands]
    await assert_books_balance(office)


async def test_the_clerk_refuses_what_the_leader_would_refuse_in_the_same_words(office: Office, clerk: Clerk) -> None:
    await node(office, "n1", gpu=2)
    commands = await backlog(office, 3)
    gone = Bind.unit([replace(commands[0].members[0], targets=(Target("nowhere"),))], TEST)
    told = await clerk.bind([*commands, gone])
    assert [code(one) for one in told] == ["ok", "ok", "no_capacity", "stale"]
    # The same again, here: what is placed by now waits no more, and the rest has no room.
    again = await bind(office, [commands[2], gone])
    assert told[2] == again[0]
    assert isinstance(again[1], Refusal)


async def test_a_unit_of_several_is_placed_by_the_clerk_as_a_whole_or_not_at_all(office: Office, clerk: Clerk) -> None:
    await node(office, "n1", gpu=3)
    await backlog(office, 4)
    pair, too_many = [await unit(office, names, "n1") for names in (["job-000", "job-001"], ["job-002", "job-003"])]
    told = await clerk.bind([pair, too_many])
    assert told[0] == (await revision_of(office, "job-000"), await revision_of(office, "job-001"))
    assert code(told[1]) == "no_capacity"
    assert await placed(office) == ["job-000", "job-001"]


async def test_the_clerk_of_who_was_deposed_places_nothing(office: Office, rival: Office, clerk: Clerk) -> None:
    await node(office, "n1", gpu=4)
    await backlog(office, 1)
    old = await term(office, "old")
    await term(rival, "new", depose=True)
    (told,) = await clerk.bind([await unit(office, ["job-000"], "n1", old)])
    assert isinstance(told, Refusal)
    assert told.message == "another controller leads now"
    assert await placed(office) == []


async def test_until_the_clerk_is_there_the_leader_does_it(office: Office) -> None:
    await node(office, "n1", gpu=4)
    one = Clerk(office)
    (told,) = await one.bind(await backlog(office, 1))
    assert told == (await revision_of(office, "job-000"),)


async def test_who_follows_the_feed_here_is_told_of_what_the_clerk_commits(office: Office, clerk: Clerk) -> None:
    await node(office, "n1", gpu=4)
    commands = await backlog(office, 1)
    told: list[int] = []
    office.on_commit.append(lambda: told.append(1))
    await clerk.bind(commands)
    assert told


async def held_up(db: Connection, clerk: Clerk, commands: Sequence[Bind]) -> asyncio.Task[list[Bound]]:
    """The clerk waits for a lock in the middle of what it was told."""
    await db.execute("SELECT 1 FROM node WHERE name = 'n1' FOR UPDATE")
    working = asyncio.create_task(clerk.bind(commands))
    async with asyncio.timeout(60):
        while not await db.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return working


async def test_of_a_clerk_that_was_killed_nobody_believes_anything_and_another_comes(
    office: Office, clerk: Clerk, db: Connection
) -> None:
    await node(office, "n1", gpu=100)
    commands = await backlog(office, 70)
    first = clerk.pid
    assert first is not None
    async with db.transaction():
        working = await held_up(db, clerk, commands)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await working
    assert await placed(office) == []
    await at_work(clerk, other_than=first)
    assert [code(one) for one in await clerk.bind(commands)] == ["ok"] * 70
    await assert_books_balance(office)


async def test_a_clerk_that_is_stuck_is_given_up(office: Office, clerk: Clerk, monkeypatch: pytest.MonkeyPatch) -> None:
    await node(office, "n1", gpu=4)
    commands = await backlog(office, 1)
    stuck = clerk.pid
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)
    monkeypatch.setattr(clerk_module, "SILENCE_SECONDS_MAX", 0.2)
    with pytest.raises(Unavailable, match="stuck"):
        await clerk.bind(commands)
    monkeypatch.undo()
    await at_work(clerk, other_than=stuck)
    assert [code(one) for one in await clerk.bind(commands)] == ["ok"]


async def test_a_clerk_that_was_dismissed_is_gone_and_what_it_did_not_commit_is_undone(
    office: Office, clerk: Clerk, db: Connection
) -> None:
    await node(office, "n1", gpu=100)
    commands = await backlog(office, 70)
    pid = clerk.pid
    assert pid is not None
    async with db.transaction():
        working = await held_up(db, clerk, commands)
        await clerk.dismiss()
        with pytest.raises(Unavailable):
            await working
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not clerk.is_at_work
    # Whatever came first, its end or the lock: all of it is placed, or nothing.
    assert len(await placed(office)) in (0, 70)
    await assert_books_balance(office)
