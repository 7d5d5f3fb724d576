"""Readers take turns: nobody is overtaken for ever, and nobody waits for ever."""

import asyncio

import pytest

from bursar.store.db import database as database_store
from bursar.store.db.database import Database, Unavailable


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
