"""A process beside the leader's: what it is told is committed as if the leader had done it, or it is not known."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from bursar.commands.command import DEPOSED
from bursar.commands.scheduling.bind import Bind, BindMember
from bursar.core.nodes.bind_check import Target
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import commit_worker as worker_module
from bursar.ops.scheduling.commit_worker import CommitOutcome, CommitWorker
from bursar.ops.scheduling.placement import Bound, bind
from bursar.store.db.database import Connection, Unavailable
from support.runtime.runtime import TEST, allocation, code, get, member, node, opened
from support.scheduling.evictions import assert_books_balance
from support.scheduling.schedulers import term


@pytest.fixture
async def worker(runtime: Runtime) -> AsyncIterator[CommitWorker]:
    one = CommitWorker(runtime)
    one.call()
    await at_work(one)
    yield one
    await one.dismiss()


async def at_work(one: CommitWorker, other_than: int | None = None) -> None:
    async with asyncio.timeout(60):
        while not one.is_at_work or one.pid == other_than:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def unit(runtime: Runtime, names: Sequence[str], where: str, fence: int | None = None) -> Bind:
    members = [await member(runtime, "default", name, where) for name in names]
    assert all(isinstance(one, BindMember) for one in members)
    return Bind.unit([one for one in members if isinstance(one, BindMember)], TEST, fence)


async def backlog(runtime: Runtime, count: int, where: str = "n1") -> list[Bind]:
    names = [f"job-{number:03}" for number in range(count)]
    await asyncio.gather(*(allocation(runtime, "default", name, gpu=1) for name in names))
    return [await unit(runtime, [name], where) for name in names]


async def revision_of(runtime: Runtime, name: str) -> int:
    return (await get(runtime, "Allocation", "default", name)).revision


async def placed(runtime: Runtime) -> list[str]:
    async with runtime.database.reader() as db:
        return [row["name"] for row in await db.fetch("SELECT name FROM placement ORDER BY name")]


async def test_what_the_commit_worker_is_told_is_placed_and_its_revisions_are_told(
    runtime: Runtime, worker: CommitWorker
) -> None:
    await node(runtime, "n1", gpu=100)
    commands = await backlog(runtime, 80)
    outcome = await worker.bind(commands)
    assert outcome == [(await revision_of(runtime, one.key.name),) for one in commands]
    assert await placed(runtime) == [one.key.name for one in commands]
    await assert_books_balance(runtime)


async def test_the_commit_worker_refuses_what_the_leader_would_refuse_in_the_same_words(
    runtime: Runtime, worker: CommitWorker
) -> None:
    await node(runtime, "n1", gpu=2)
    commands = await backlog(runtime, 3)
    gone = Bind.unit([replace(commands[0].members[0], targets=(Target("nowhere"),))], TEST)
    told = await worker.bind([*commands, gone])
    assert [code(one) for one in told] == ["ok", "ok", "no_capacity", "stale"]
    # The same again, here: what is placed by now waits no more, and the rest finds no capacity.
    again = await bind(runtime, [commands[2], gone])
    assert told[2] == again[0]
    assert isinstance(again[1], Refusal)


async def test_a_unit_of_several_is_placed_by_the_commit_worker_as_a_whole_or_not_at_all(
    runtime: Runtime, worker: CommitWorker
) -> None:
    await node(runtime, "n1", gpu=3)
    await backlog(runtime, 4)
    pair, too_many = [await unit(runtime, names, "n1") for names in (["job-000", "job-001"], ["job-002", "job-003"])]
    told = await worker.bind([pair, too_many])
    assert told[0] == (await revision_of(runtime, "job-000"), await revision_of(runtime, "job-001"))
    assert code(told[1]) == "no_capacity"
    assert await placed(runtime) == ["job-000", "job-001"]


async def test_the_commit_worker_of_a_deposed_leader_places_nothing(
    runtime: Runtime, rival: Runtime, worker: CommitWorker
) -> None:
    await node(runtime, "n1", gpu=4)
    await backlog(runtime, 1)
    old = await term(runtime, "old")
    await term(rival, "new", depose=True)
    (told,) = await worker.bind([await unit(runtime, ["job-000"], "n1", old)])
    assert told == DEPOSED
    assert await placed(runtime) == []


async def test_until_the_commit_worker_is_there_the_leader_does_it(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    one = CommitWorker(runtime)
    (told,) = await one.bind(await backlog(runtime, 1))
    assert told == (await revision_of(runtime, "job-000"),)


async def test_who_follows_the_feed_here_is_told_of_what_the_commit_worker_commits(
    runtime: Runtime, worker: CommitWorker
) -> None:
    await node(runtime, "n1", gpu=4)
    commands = await backlog(runtime, 1)
    told: list[int] = []
    runtime.on_commit.append(lambda: told.append(1))
    await worker.bind(commands)
    assert told


async def held_up(db: Connection, worker: CommitWorker, commands: Sequence[Bind]) -> asyncio.Task[list[Bound]]:
    """The commit worker waits for a lock in the middle of a batch."""
    await db.execute("SELECT 1 FROM node WHERE name = 'n1' FOR UPDATE")
    working = asyncio.create_task(worker.bind(commands))
    async with asyncio.timeout(60):
        while not await db.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return working


async def test_of_a_commit_worker_that_was_killed_nobody_believes_anything_and_another_comes(
    runtime: Runtime, worker: CommitWorker, db: Connection
) -> None:
    await node(runtime, "n1", gpu=100)
    commands = await backlog(runtime, 70)
    first = worker.pid
    assert first is not None
    async with db.transaction():
        working = await held_up(db, worker, commands)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await working
    assert await placed(runtime) == []
    await at_work(worker, other_than=first)
    assert [code(one) for one in await worker.bind(commands)] == ["ok"] * 70
    await assert_books_balance(runtime)


async def test_a_commit_worker_that_answers_others_is_not_stuck(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have much to do before it comes to this."""
    monkeypatch.setattr(worker_module, "SILENCE_SECONDS_MAX", 0.3)
    one, loop = CommitWorker(runtime), asyncio.get_running_loop()
    answer: asyncio.Future[CommitOutcome] = loop.create_future()
    hearing = asyncio.create_task(one._hear_of(answer))
    for _ in range(20):
        await asyncio.sleep(0.05)
        one._heard_at = loop.time()
    answer.set_result(CommitOutcome(1))
    assert await hearing == CommitOutcome(1)
    with pytest.raises(Unavailable, match="stuck"):
        await one._hear_of(loop.create_future())


async def test_a_watcher_that_fails_undoes_nothing(runtime: Runtime, worker: CommitWorker) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    await node(runtime, "n1", gpu=4)
    commands = await backlog(runtime, 2)
    runtime.on_commit.append(fail)
    assert [code(one) for one in await worker.bind(commands)] == ["ok", "ok"]


async def test_a_commit_worker_that_is_stuck_is_given_up(
    runtime: Runtime, worker: CommitWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node(runtime, "n1", gpu=4)
    commands = await backlog(runtime, 1)
    stuck = worker.pid
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)
    monkeypatch.setattr(worker_module, "SILENCE_SECONDS_MAX", 0.2)
    with pytest.raises(Unavailable, match="stuck"):
        await worker.bind(commands)
    monkeypatch.undo()
    await at_work(worker, other_than=stuck)
    assert [code(one) for one in await worker.bind(commands)] == ["ok"]


async def test_a_commit_worker_that_was_dismissed_is_gone_and_what_it_did_not_commit_is_undone(
    runtime: Runtime, worker: CommitWorker, db: Connection
) -> None:
    await node(runtime, "n1", gpu=100)
    commands = await backlog(runtime, 70)
    pid = worker.pid
    assert pid is not None
    async with db.transaction():
        working = await held_up(db, worker, commands)
        await worker.dismiss()
        with pytest.raises(Unavailable):
            await working
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not worker.is_at_work
    assert await placed(runtime) == []
    await assert_books_balance(runtime)


# Commit workers that do not start, or do not stay.


async def started(one: CommitWorker) -> int:
    """The pid of a commit worker that is starting, and has not connected yet."""
    async with asyncio.timeout(60):
        while one.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return one.pid


def children() -> set[str]:
    found = Path("/proc/self/task").glob("*/children")
    return {pid for one in found for pid in one.read_text().split()}


async def test_a_commit_worker_that_never_gets_ready_is_replaced(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = CommitWorker(runtime)
    monkeypatch.setattr(worker_module, "START_SECONDS_MAX", 0.1)
    one.call()
    stuck = await started(one)
    os.kill(stuck, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while one.pid == stuck:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    monkeypatch.undo()
    await at_work(one)
    await one.dismiss()


async def test_a_fault_that_keeps_a_commit_worker_from_starting_keeps_no_later_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = CommitWorker(runtime)
    with capture_logs() as logs:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
        one.call()
        async with asyncio.timeout(60):
            while not logs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    monkeypatch.undo()
    assert "FileNotFoundError" in logs[0]["error"]
    await at_work(one)
    await one.dismiss()


async def test_a_commit_worker_imports_nothing_from_where_the_leader_was_started(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "structlog.py").write_text("raise SystemExit('somebody else wrote this')")
    monkeypatch.chdir(tmp_path)
    one = CommitWorker(runtime)
    with capture_logs() as logs:
        one.call()
        await at_work(one)
    assert not logs
    await one.dismiss()


async def test_those_who_die_without_an_answer_are_called_less_and_less_often(
    runtime: Runtime, worker: CommitWorker
) -> None:
    """Else one that dies of each order would be told all orders for ever, and none would be carried out."""
    await node(runtime, "n1", gpu=4)
    with capture_logs() as logs:
        for answers in (False, False, True):
            if answers:
                await worker.bind(await backlog(runtime, 1))
            died = worker.pid
            assert died is not None
            os.kill(died, signal.SIGKILL)
            await at_work(worker, other_than=died)
    assert [one["pause_seconds"] for one in logs if one["log_level"] == "warning"] == [0.2, 0.5, 0.1]


async def test_a_commit_worker_dismissed_while_it_is_being_started_leaves_nothing_behind(runtime: Runtime) -> None:
    ours, open_files = children(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for turns in range(8):
        one = CommitWorker(runtime)
        one.call()
        for _ in range(turns):
            await asyncio.sleep(0)
        await one.dismiss()
    async with asyncio.timeout(60):
        while children() != ours or len(os.listdir("/proc/self/fd")) > open_files:  # noqa: ASYNC110, PTH208
            await asyncio.sleep(0.01)


def test_whatever_is_told_to_a_commit_worker_that_has_just_died_is_not_known(database_url: str) -> None:
    """On the loop that controllers run on, which will not have anything written to who is gone."""

    async def tell() -> list[list[Bound] | BaseException]:
        async with opened(database_url) as runtime:
            await node(runtime, "n1", gpu=4)
            commands = await backlog(runtime, 1)
            worker = CommitWorker(runtime)
            worker.call()
            await at_work(worker)
            told: list[asyncio.Task[list[Bound]]] = []

            def tell_it() -> None:
                told.append(asyncio.create_task(worker.bind(commands)))

            async def kill() -> None:
                assert worker.pid is not None
                _kill_and_watch(worker.pid)
                # One more, begun between the end of the connection and the moment when its reader notices that.
                asyncio.get_running_loop().call_soon(tell_it)

            killing = asyncio.create_task(kill())
            tell_it()
            await killing
            while len(told) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            answers = await asyncio.gather(*told, return_exceptions=True)
            await worker.dismiss()
            return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(tell())
    assert [type(one) for one in answers] == [Unavailable, Unavailable]


def _kill_and_watch(pid: int) -> None:
    """Without a turn of the loop, which would hear of it."""
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
