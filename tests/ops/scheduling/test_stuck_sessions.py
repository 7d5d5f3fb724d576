"""A process that is paused reads nothing; a process whose lock wait times out terminates its session."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from bursar.loops.election import LeaderTerms, run_election
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db import database as database_module
from bursar.store.db import stuck_sessions as session_module
from bursar.store.db.database import KEPT_SETTINGS, SESSION_SETTINGS, Connection, connect
from support.runtime.runtime import allocation, bind, code, node
from support.scheduling.leaders import load_leader

WAITS_FOR = "SELECT wait_event FROM pg_stat_activity WHERE pid = $1"
LARGE = "repeat('x', 50000000)"  # more than fits between server and client


@dataclass(frozen=True)
class Stuck:
    pid: int
    transport: asyncio.ReadTransport

    def read_on(self) -> None:
        self.transport.resume_reading()


@asynccontextmanager
async def stuck(url: str, locking: str, settings: Mapping[str, str] = KEPT_SETTINGS) -> AsyncIterator[Stuck]:
    """A session in a transaction, whose client does not read the answer to this statement."""
    db = await connect(url, settings)
    looking = await connect(url)
    pid = await db.fetchval("SELECT pg_backend_pid()")
    await db.execute("BEGIN")
    statement = await db.prepare(locking)
    db._transport.pause_reading()
    asking = asyncio.create_task(statement.fetch())
    try:
        async with asyncio.timeout(60):
            while await looking.fetchval(WAITS_FOR, pid) != "ClientWrite":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield Stuck(pid, db._transport)
    finally:
        db._transport.resume_reading()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        db.terminate()
        await looking.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(session_module, "LOOK_AGAIN_SECONDS", 0.1)
    monkeypatch.setitem(database_module.KEPT_SETTINGS, "lock_timeout", "200")


async def test_a_candidate_takes_over_from_who_was_paused_with_the_leaders_row_in_its_hands(
    runtime: Runtime, database_url: str
) -> None:
    async with stuck(database_url, f"SELECT fence, {LARGE} FROM leader FOR KEY SHARE"):
        leading = asyncio.Event()

        async def work(_: int) -> None:
            leading.set()
            await asyncio.Event().wait()

        candidate = asyncio.create_task(run_election(runtime.database, "second", work, LeaderTerms(term_seconds=0.5)))
        try:
            async with asyncio.timeout(60):
                await leading.wait()
            assert (await load_leader(runtime.database)).holder.startswith("second/")
        finally:
            candidate.cancel()
            await asyncio.gather(candidate, return_exceptions=True)


async def test_whoever_needs_what_a_paused_process_has_locked_gets_it(runtime: Runtime, database_url: str) -> None:
    await node(runtime, "n1", gpu=1)
    await allocation(runtime, "default", "a", gpu=1)
    async with stuck(database_url, f"SELECT name, {LARGE} FROM node FOR UPDATE"):
        async with asyncio.timeout(60):
            assert code(await bind(runtime, "default", "a", "n1")) == "ok"


async def test_who_locks_nothing_is_left_alone_however_slowly_it_reads(
    runtime: Runtime, database_url: str, db: Connection
) -> None:
    locks = f"SELECT {LARGE} FROM leader FOR UPDATE"
    async with (
        stuck(database_url, f"SELECT {LARGE}", SESSION_SETTINGS) as reader,
        stuck(database_url, f"SELECT {LARGE}") as follower,
    ):
        async with stuck(database_url, locks) as writer:
            async with asyncio.timeout(60):
                while await db.fetchval(WAITS_FOR, writer.pid) is not None:
                    await session_module.end_stuck(runtime.database)
        for one in (reader, follower):
            assert await db.fetchval(WAITS_FOR, one.pid) == "ClientWrite"


async def test_who_reads_on_between_two_looks_is_left_alone(
    runtime: Runtime, database_url: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "STUCK_SECONDS", 0.0)
    monkeypatch.setattr(session_module, "LOOK_AGAIN_SECONDS", 2.0)
    async with stuck(database_url, f"SELECT {LARGE} FROM leader FOR UPDATE") as slow:
        looking = asyncio.create_task(session_module.end_stuck(runtime.database))
        await asyncio.sleep(0.2)  # it has looked once
        slow.read_on()
        await looking
        state = "SELECT state FROM pg_stat_activity WHERE pid = $1"
        assert await db.fetchval(state, slow.pid) == "idle in transaction"
