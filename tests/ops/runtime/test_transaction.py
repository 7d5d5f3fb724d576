"""Transactions on connections that are really lost: one effect, and the right answer, whatever happened."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import chain, count, cycle, repeat
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bursar.commands.command import Written
from bursar.ops.runtime import metrics
from bursar.ops.runtime import transaction as transaction_module
from bursar.ops.runtime.lane import Lane
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.runtime.transaction import Transactor
from bursar.store.db import database as database_module
from bursar.store.db.database import Connection, Database, Unavailable
from bursar.store.db.migrate import migrate
from bursar.store.embedded import start
from support.runtime.postgres import SETTINGS, _directory
from support.runtime.postgres_proxy import Proxy
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    code,
    counters,
    document,
    node,
    opened,
)


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(database_url) as one:
        yield one


@pytest.fixture
async def runtime(proxy: Proxy) -> AsyncIterator[Runtime]:
    async with opened(proxy.url) as one:
        yield one


async def history(runtime: Runtime, kind: str = "Allocation") -> list[tuple[str, str, int]]:
    """(name, type, revision) of every change of a kind."""
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT name, type, revision FROM change WHERE kind = $1 ORDER BY revision", kind)
    return [(row["name"], row["type"], row["revision"]) for row in rows]


def retries(name: str, cause: str) -> float:
    """How often a batch of this lane was tried again, so far in this process."""
    counter = metrics.TRANSACTION_RETRIES.labels(name, cause)
    return sum(sample.value for family in counter.collect() for sample in family.samples if "total" in sample.name)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Lost during COMMIT.


@pytest.mark.parametrize("deed", ["before", "after", "during"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_commit_whose_connection_is_cut_has_one_effect_and_the_right_answer(
    runtime: Runtime, proxy: Proxy, deed: str, times: int
) -> None:
    proxy.plan = chain(repeat(deed, times), repeat("pass"))
    answer = await allocation(runtime, "default", "one", gpu=2)
    proxy.plan = repeat("pass")
    # Only a cut that the server never saw needs another commit; the others are found done.
    assert proxy.cuts == [deed] * (times if deed == "before" else 1)
    assert document(answer)["metadata"]["name"] == "one"
    assert isinstance(answer, Written)
    assert await history(runtime) == [("one", "ADDED", answer.revision)]
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].accepted == 2000
    await assert_counters_equal_charges(runtime)


@pytest.mark.parametrize("deed", ["before", "after"])
async def test_a_refusal_that_was_decided_survives_the_cut(runtime: Runtime, proxy: Proxy, deed: str) -> None:
    await allocation(runtime, "default", "one", gpu=1)
    proxy.plan = chain([deed], repeat("pass"))
    assert code(await allocation(runtime, "default", "one", gpu=1)) == "already_exists"
    assert proxy.cuts == [deed]


async def test_bind_is_not_repeated_when_only_its_answer_was_lost(runtime: Runtime, proxy: Proxy) -> None:
    await node(runtime, "n1", gpu=4)
    await allocation(runtime, "default", "one", gpu=2)
    proxy.plan = chain(["after"], repeat("pass"))
    assert document(await bind(runtime, "default", "one", "n1"))["status"]["phase"] == "Scheduled"
    assert [kind for _, kind, _ in await history(runtime)] == ["ADDED", "MODIFIED"]
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].bound == 2000


async def test_many_commands_under_cuts_of_every_sort_each_happen_once(runtime: Runtime, proxy: Proxy) -> None:
    proxy.plan = cycle(["before", "after", "pass", "during"])
    names = [f"w{worker}-{number}" for worker in range(8) for number in range(12)]

    async def submit(worker: int) -> list[Any]:
        """One after the other, so that there are at least as many batches."""
        mine = [name for name in names if name.startswith(f"w{worker}-")]
        return [await allocation(runtime, "default", name, gpu=1) for name in mine]

    answers = [answer for some in await asyncio.gather(*map(submit, range(8))) for answer in some]
    proxy.plan = repeat("pass")
    assert Counter(proxy.cuts).keys() == {"before", "after", "during"}
    assert [code(answer) for answer in answers] == ["ok"] * len(names)
    happened = await history(runtime)
    assert sorted(name for name, _, _ in happened) == sorted(names)
    revisions = {name: revision for name, _, revision in happened}
    assert [answer.revision for answer in answers] == [revisions[name] for name in names]
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].accepted == 1000 * len(names)
    await assert_counters_equal_charges(runtime)


async def test_a_lock_timeout_while_the_fate_is_unknown_does_not_forget_the_answers(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt is still committing when the second looks for its marker: losing that race says nothing about
    the first."""
    monkeypatch.setitem(database_module.SESSION_SETTINGS, "lock_timeout", "100")
    async with opened(proxy.url) as runtime:
        before = retries("creating", "race")
        proxy.plan = chain(["stall"], repeat("pass"))
        submitted = asyncio.create_task(allocation(runtime, "default", "one", gpu=1))

        async def raced() -> bool:
            return retries("creating", "race") > before

        await until(raced)
        proxy.release.set()
        answer = await submitted
        assert isinstance(answer, Written), answer
        assert await history(runtime) == [("one", "ADDED", answer.revision)]


async def test_backends_ended_under_load_cost_nothing_but_time(runtime: Runtime, database_url: str) -> None:
    killer = await asyncpg.connect(database_url)
    answers: dict[str, Any] = {}
    stop = asyncio.Event()

    async def submit(worker: int) -> None:
        for number in count():
            if stop.is_set():
                return
            answers[f"w{worker}-{number}"] = await allocation(runtime, "default", f"w{worker}-{number}", cpu=1)

    async def kill() -> None:
        for _ in range(10):
            before = len(answers)

            async def moved_on(before: int = before) -> bool:
                return len(answers) > before + 5

            await until(moved_on)
            await killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        stop.set()

    before = retries("creating", "loss")
    await asyncio.gather(kill(), *map(submit, range(5)))
    await killer.close()
    assert retries("creating", "loss") >= before + 5
    assert {code(answer) for answer in answers.values()} == {"ok"}
    assert sorted(name for name, _, _ in await history(runtime)) == sorted(answers)
    await assert_counters_equal_charges(runtime)


async def test_a_database_killed_in_the_middle_keeps_every_acknowledged_write() -> None:
    data_dir = Path(tempfile.mkdtemp(prefix="bursar-killed-", dir=_directory()))
    data_dir.chmod(0o711)
    try:
        async with await start(data_dir, settings=SETTINGS) as embedded:
            db = await asyncpg.connect(embedded.url)
            await migrate(db)
            await db.close()
            async with opened(embedded.url) as runtime:
                await _submit_through_a_kill(runtime, embedded)
    finally:
        shutil.rmtree(data_dir)


async def _submit_through_a_kill(runtime: Runtime, embedded: Any) -> None:
    done: list[Written] = []
    enough = asyncio.Event()

    async def submit(worker: int) -> None:
        for number in range(20):
            answer = await allocation(runtime, "default", f"w{worker}-{number}", gpu=1)
            assert isinstance(answer, Written), answer
            done.append(answer)
            if len(done) > 60:
                enough.set()

    async def kill() -> None:
        await enough.wait()
        pid = embedded.pid
        os.kill(pid, signal.SIGKILL)

    await asyncio.gather(kill(), *(submit(worker) for worker in range(10)))
    assert embedded.restarts == 1
    assert len(done) == 200
    happened = await history(runtime)
    assert sorted((name, revision) for name, _, revision in happened) == sorted(
        (answer.key.name, answer.revision) for answer in done
    )
    await assert_counters_equal_charges(runtime)


# The transactor alone.


class Table:
    """A batch that adds to numbered rows, with a hook of the test on the way."""

    def __init__(self) -> None:
        self.tries = 0
        self.trouble: Callable[[Connection, Sequence[int]], Awaitable[None]] = self._none

    async def _none(self, db: Connection, rows: Sequence[int]) -> None:
        return None

    async def run_batch(self, db: Connection, rows: Sequence[int]) -> Sequence[int]:
        self.tries += 1
        await db.execute("UPDATE tally SET n = n + 1 WHERE id = ANY($1::integer[])", list(rows))
        await self.trouble(db, rows)
        return [row * 10 for row in rows]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened_database = await Database.open(database_url)
    async with opened_database.reader() as db:
        await db.execute("CREATE TABLE tally (id integer PRIMARY KEY, n integer NOT NULL)")
        await db.execute("INSERT INTO tally SELECT id, 0 FROM generate_series(0, 19) AS id")
    yield opened_database
    await opened_database.close()


async def topology_count(database: Database) -> dict[int, int]:
    async with database.reader() as db:
        return {row["id"]: row["n"] for row in await db.fetch("SELECT id, n FROM tally WHERE n > 0")}


@contextlib.asynccontextmanager
async def transactor(database: Database, run_batch: Any, **options: Any) -> AsyncIterator[Transactor[int, int]]:
    one = Transactor[int, int]("test", database, run_batch, **options)
    yield one
    await one.close()


def failing(errors: Iterable[Exception]) -> Callable[[Connection, Sequence[int]], Awaitable[None]]:
    left = list(errors)

    async def trouble(db: Connection, rows: Sequence[int]) -> None:
        if left:
            raise left.pop(0)

    return trouble


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.SerializationError("could not serialize access"),
        asyncpg.DeadlockDetectedError("deadlock detected"),
        asyncpg.LockNotAvailableError("canceling statement due to lock timeout"),
        database_module.Stale("a guard did not hold"),
        ConnectionResetError("reset"),
        asyncpg.AdminShutdownError("terminating connection"),
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
    ],
)
async def test_what_may_pass_is_tried_again_and_leaves_one_effect(database: Database, error: Exception) -> None:
    table = Table()
    table.trouble = failing([error, error])
    async with transactor(database, table.run_batch) as one:
        assert await one.run([1, 2]) == [10, 20]
    assert table.tries == 3
    assert await topology_count(database) == {1: 1, 2: 1}


async def test_a_real_deadlock_is_undone_and_tried_again(database: Database) -> None:
    together = asyncio.Barrier(2)
    met: set[int] = set()

    async def run_batch(db: Connection, rows: Sequence[int]) -> Sequence[int]:
        for step, row in enumerate(rows):
            await db.execute("UPDATE tally SET n = n + 1 WHERE id = $1", row)
            if step == 0 and rows[0] not in met:
                met.add(rows[0])
                await together.wait()
        return rows

    before = retries("test", "race")
    async with transactor(database, run_batch) as one, transactor(database, run_batch) as other:
        first, second = await asyncio.gather(one.run([1, 2]), other.run([2, 1]))
    assert (list(first), list(second)) == ([1, 2], [2, 1])
    assert await topology_count(database) == {1: 2, 2: 2}
    assert retries("test", "race") == before + 1


async def test_a_poisoned_command_is_isolated_and_the_others_happen_once(database: Database) -> None:
    table = Table()

    async def trouble(db: Connection, rows: Sequence[int]) -> None:
        if 13 in rows:
            await db.execute("SELECT 1 / 0")

    table.trouble = trouble
    async with transactor(database, table.run_batch) as one:
        lane = Lane[int, int]("test", one.run)
        answers = await asyncio.gather(*map(lane.submit, range(20)), return_exceptions=True)
    assert isinstance(answers[13], asyncpg.DivisionByZeroError)
    assert [answer for row, answer in enumerate(answers) if row != 13] == [row * 10 for row in range(20) if row != 13]
    assert await topology_count(database) == {row: 1 for row in range(20) if row != 13}


async def test_a_dry_run_answers_and_changes_nothing(database: Database) -> None:
    told: list[int] = []
    async with transactor(database, Table().run_batch, dry=True, on_commit=[lambda: told.append(1)]) as one:
        assert await one.run([1]) == [10]
        assert await one.run([1]) == [10]
    assert await topology_count(database) == {}
    assert told == []


async def test_watchers_are_told_after_the_commit_and_once(database: Database) -> None:
    told: list[int] = []
    table = Table()
    table.trouble = failing([asyncpg.SerializationError("again")])
    async with transactor(database, table.run_batch, on_commit=[lambda: told.append(table.tries)]) as one:
        await one.run([1])
    assert told == [2]


async def test_a_watcher_that_fails_does_not_make_the_batch_happen_twice(database: Database) -> None:
    def fail() -> None:
        raise ValueError("not now")

    told: list[int] = []
    async with transactor(database, Table().run_batch, on_commit=[fail, lambda: told.append(1)]) as one:
        assert await Lane[int, int]("test", one.run).submit(1) == 10
    assert await topology_count(database) == {1: 1}
    assert told == [1]


async def test_patience_ends_with_unavailable_and_the_next_batch_is_tried_anew(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_module, "PATIENCE_SECONDS", 0.2)
    table = Table()
    table.trouble = failing([ConnectionResetError("gone")] * 1000)
    async with transactor(database, table.run_batch) as one:
        with pytest.raises(Unavailable, match="the database did not take the change: gone"):
            await one.run([1])
        table.trouble = failing([])
        assert await one.run([2]) == [20]
    assert await topology_count(database) == {2: 1}


async def test_a_caller_that_is_cancelled_does_not_undo_what_is_being_committed(database: Database) -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    table = Table()

    async def trouble(db: Connection, rows: Sequence[int]) -> None:
        begun.set()
        await go.wait()

    table.trouble = trouble
    async with transactor(database, table.run_batch) as one:
        lane = Lane[int, int]("test", one.run)
        caller = asyncio.create_task(lane.submit(5))
        await begun.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        go.set()
        await lane.close()
    assert await topology_count(database) == {5: 1}
