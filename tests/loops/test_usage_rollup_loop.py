"""Entering hours goes on by itself, whatever happens to the database meanwhile."""

import asyncio

import pytest

from bursar.core.usage.usage_levels import UsageBegan
from bursar.loops import usage_rollup
from bursar.ops.runtime.runtime import Runtime
from bursar.store.usage import usage_levels as store
from support.scheduling.schedulers import stopped
from support.usage.hourly import now


async def begin(runtime: Runtime, uid: str) -> None:
    one = UsageBegan(uid, "a", 1, "default", "-", "ns", "x", {"cpu": 1000}, "", int(now().timestamp()) - 60)
    async with runtime.database.reader() as db, db.transaction():
        await store.save(db, [one], [])


async def entered(runtime: Runtime, level: int) -> None:
    statement = "SELECT sum(amount) FROM usage_level WHERE username = ''"
    async with asyncio.timeout(30):
        while await _value(runtime, statement) != level:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _value(runtime: Runtime, statement: str) -> object:
    async with runtime.database.reader() as db:
        return await db.fetchval(statement)


async def test_steps_are_entered_as_they_come(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_rollup, "ROLL_SECONDS", 0.02)
    rolling = [asyncio.create_task(usage_rollup.run_usage_rollup(runtime)) for _ in range(2)]
    try:
        await begin(runtime, "first")
        await entered(runtime, 1000)
        async with runtime.database.reader() as db:
            await db.execute("ALTER TABLE usage_level RENAME TO elsewhere")
        await begin(runtime, "second")
        async with runtime.database.reader() as db:
            await db.execute("ALTER TABLE elsewhere RENAME TO usage_level")
        await begin(runtime, "third")
        await entered(runtime, 3000)
        assert await _value(runtime, "SELECT count(*) FROM usage_step") == 0
    finally:
        await asyncio.gather(*map(stopped, rolling))


async def test_what_is_left_is_little_and_waits_for_the_next_time(runtime: Runtime) -> None:
    """Otherwise the roll-up would never rest while work comes and goes."""
    for one in range(3):
        await begin(runtime, f"few-{one}")
    assert await usage_rollup.catch_up(runtime.database) == 1
    since = int(now().timestamp()) - 3600
    many = [
        UsageBegan(f"many-{one}", "a", 1, "default", "-", "ns", "x", {"cpu": 1000}, "", since + one)
        for one in range(usage_rollup.FEW)
    ]
    async with runtime.database.reader() as db, db.transaction():
        await store.save(db, many, [])
    assert await usage_rollup.catch_up(runtime.database) == 2
    assert await _value(runtime, "SELECT count(*) FROM usage_step") == 0
