"""Keeping the ledger without being asked."""

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from bursar.loops import ledger as loop
from bursar.ops.credit.seal import Broken, load_standing
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit.seal import SealProgress, load_head
from support.credit.ledgers import pass_time
from support.credit.sealings import heartbeat, history, partitions, unguarded


async def standing_when(runtime: Runtime, seen: str) -> SealProgress:
    """Once it is so."""
    async with asyncio.timeout(20):
        while True:
            standing = await load_standing(runtime)
            if seen == "sealed" and standing.unsealed == 0 and standing.checked_at is not None:
                return standing
            if seen == "wrong" and standing.findings:
                return standing
            await asyncio.sleep(0.02)


async def test_it_seals_verifies_and_makes_partitions(runtime: Runtime) -> None:
    await history(runtime)
    running = asyncio.ensure_future(loop.run_ledger(runtime))
    try:
        standing = await standing_when(runtime, "sealed")
        assert standing.findings == []
        assert {"entry_000000000", "entry_000000001"} <= set(await partitions(runtime))
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_what_is_wrong_is_told(runtime: Runtime) -> None:
    await history(runtime)
    async with unguarded(runtime) as db:
        await db.execute("UPDATE account SET held = held + 1 WHERE id = 100")
    running = asyncio.ensure_future(loop.run_ledger(runtime))
    try:
        standing = await standing_when(runtime, "wrong")
        assert [(one.check, one.where) for one in standing.findings] == [("held", "account 100")]
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_what_is_too_slow_is_named_and_not_taken_for_a_database_that_is_away(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AGAIN_SECONDS", 0.0)
    begun, again = asyncio.Event(), asyncio.Event()

    async def slow() -> float:
        if begun.is_set():
            again.set()
            return 60.0
        begun.set()
        async with runtime.database.reader() as db, db.transaction():
            await db.execute("SET LOCAL statement_timeout = '50ms'")
            await load_head(db)
        return 0.0

    async with runtime.database.reader() as db, db.transaction():
        await db.execute("LOCK TABLE entry_block")
        with capture_logs() as logs:
            running = asyncio.ensure_future(loop._repeat("verify", slow))
            await again.wait()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    (line,) = logs
    assert (line["log_level"], line["event"], line["duty"]) == ("error", "ledger_duty_slow", "verify")
    assert line["error"].startswith("load_head took too long")


async def test_a_ledger_that_cannot_be_sealed_is_tried_again(runtime: Runtime) -> None:
    await history(runtime)
    async with unguarded(runtime) as db:
        row = await db.fetchrow("DELETE FROM entry WHERE number = 40 RETURNING *")
    with pytest.raises(Broken):
        await loop.seal_once(runtime)
    assert (await load_standing(runtime)).unsealed == 3
    async with runtime.database.reader() as db:
        places = ", ".join(f"${index}" for index in range(1, len(row) + 1))
        await db.execute(f"INSERT INTO entry VALUES ({places})", *row)
    await pass_time(runtime, 1)
    await heartbeat(runtime, 99)
    assert await loop.seal_once(runtime) == 60
    assert (await load_standing(runtime)).unsealed == 0
