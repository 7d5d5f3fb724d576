"""Readers take turns: nobody is overtaken for ever, and nobody waits for ever. Snapshots outlive a pause."""

import asyncio

import pytest

from bursar.store.db import database as database_store
from bursar.store.db.database import SESSION_SETTINGS, Database, Unavailable, snapshot


async def test_readers_are_served_in_the_order_in_which_they_came(database_url: str) -> None:
    database = await Database.open(database_url, readers=2)
    served: list[int] = []

    async def read(number: int) -> None:
        async with database.reader() as db:
            served.append(number)
            await db.fetchval("SELECT 1")

    async def keep_reading() -> None:
        for _ in range(50):
            await read(-1)

    greedy = [asyncio.create_task(keep_reading()) for _ in range(8)]
    await asyncio.sleep(0)
    await asyncio.gather(*(read(number) for number in range(20)))
    await asyncio.gather(*greedy)
    assert [number for number in served if number >= 0] == list(range(20))
    # Those who came once were done long before those who came again and again.
    assert served.index(19) < 100
    await database.close()


async def test_who_gets_no_turn_is_told(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_store, "TURN_SECONDS_MAX", 0.05)
    database = await Database.open(database_url, readers=1)
    async with database.reader():
        with pytest.raises(Unavailable, match="no connection came free"):
            async with database.reader():
                pass
    async with database.reader() as db:
        assert await db.fetchval("SELECT 1") == 1
    await database.close()


async def test_a_snapshot_outlives_a_pause_between_its_statements(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that gets no CPU for some seconds blocks nobody by reading, and need not begin again."""
    hasty = {**SESSION_SETTINGS, "idle_in_transaction_session_timeout": "50"}
    monkeypatch.setattr(database_store, "SESSION_SETTINGS", hasty)
    database = await Database.open(database_url, readers=1)
    async with snapshot(database) as db:
        await asyncio.sleep(0.3)
        assert await db.fetchval("SELECT 1") == 1
    async with database.reader() as db:
        assert await db.fetchval("SHOW idle_in_transaction_session_timeout") == "50ms", "it was for the snapshot alone"
    await database.close()


async def test_a_reader_that_is_cancelled_at_any_moment_leaves_no_transaction(database_url: str) -> None:
    """The dangerous moment is the one between preparing a statement and executing it."""
    database = await Database.open(database_url, readers=1)

    async def read(number: int) -> None:
        async with database.reader() as db:
            await db.fetch(f"SELECT {number}, count(*) FROM object WHERE name = $1", "x")

    loop = asyncio.get_running_loop()
    for number in range(400):
        reading = asyncio.create_task(read(number))
        until = loop.time() + 0.00001 * (number % 100)
        while loop.time() < until:  # noqa: ASYNC110 - a turn of the loop at a time
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with snapshot(database) as db:
            assert await db.fetchval("SELECT 1") == 1
    await database.close()
