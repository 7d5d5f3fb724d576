"""The roll-up of hours: once, by whichever process and wherever it is killed; and the budgets that follow from it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, tzinfo

import asyncpg
import pytest

from bursar.core.usage.usage_levels import DAY, EVERYBODY, HOUR, UsageBegan, UsageEnded
from bursar.loops.housekeeping import Retention, keep_hours
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import BudgetUse, load_budgets, roll
from bursar.store.db.database import Database, Unavailable
from bursar.store.usage import usage_levels as store
from bursar.store.usage import usage_records
from support.runtime.runtime import change, code, delete, node, tenant
from support.scheduling.evictions import running
from support.usage.hourly import assert_hours_agree, backdate, now, window

GPU = "nvidia.com/gpu"
START = datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
STARTED = int(START.timestamp())


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def began(name: str, seconds: int, **amounts: int) -> UsageBegan:
    taken = {key.replace("gpu", GPU): value for key, value in amounts.items()}
    return UsageBegan(name, "n1", 1, "physics", "physics/ada", "ns", name, taken, "", STARTED + seconds)


def ended(name: str, seconds: int) -> UsageEnded:
    return UsageEnded(name, "n1", STARTED + seconds, "Succeeded")


@pytest.fixture
async def many(database_url: str) -> Database:
    """Two hundred runs of ten minutes each, one begun every minute."""
    database = await opened(database_url, readers=8)
    async with database.reader() as db:
        for one in range(200):
            await store.save(db, [began(f"u{one}", 60 * one, gpu=1000, cpu=4000)], [])
            await store.save(db, [], [ended(f"u{one}", 60 * one + 600)])
    return database


async def opened(url: str, readers: int = 4) -> Database:
    """A database in which nothing is entered yet."""
    database = await Database.open(url, readers=readers)
    async with database.reader() as db:
        await db.execute("UPDATE usage_rolled SET at = 'epoch'")
    return database


async def used(database: Database, begin: datetime, end: datetime) -> dict[tuple[str, str], int]:
    async with database.reader() as db:
        found = (await store.load_window(db, ["physics"], begin, end, now=end))["physics"]
        right = await store.recompute(db, "physics", begin, end)
    assert {key: one.total for key, one in found.items() if one.total} == {key: one.total for key, one in right.items()}
    return {key: one.total for key, one in found.items()}


ALL = 200 * 600 * 1000


async def test_of_rollers_that_race_each_step_is_entered_once(many: Database) -> None:
    while sum(await asyncio.gather(*(roll(many, at(DAY), steps_max=37) for _ in range(6)))):
        pass
    assert (await used(many, START, at(DAY)))[GPU, ""] == ALL
    async with many.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM usage_step") == 0
        assert await db.fetchval("SELECT sum(total) FROM usage_hour WHERE resource = $1", GPU) == ALL
        day = "SELECT sum(total) FROM usage_day WHERE resource = $1 AND username = $2"
        assert [await db.fetchval(day, GPU, user) for user in (EVERYBODY, "physics/ada")] == [ALL, ALL]
    await many.close()


async def test_a_window_is_the_same_at_every_moment_of_rolling(many: Database) -> None:
    """Also while it is being asked for."""

    async def enter() -> None:
        while await roll(many, at(DAY), steps_max=5):
            pass

    rolling = asyncio.create_task(enter())
    windows = 0
    while not rolling.done() or not windows:
        for begin in (at(0), at(1234), at(HOUR), at(5 * HOUR + 7)):
            await used(many, begin, at(DAY))
        windows += 1
    await rolling
    await many.close()


async def test_hours_are_forgotten_a_few_at_a_time_and_no_window_misses_them(many: Database) -> None:
    while await roll(many, at(DAY)):
        pass
    before = await used(many, at(1234), at(DAY))
    async with many.reader() as db:
        count = await db.fetchval("SELECT count(*) FROM usage_hour")
        assert await store.forget_hours(db, at(2 * DAY), at_once=3) == count > 3
        assert await db.fetchval("SELECT count(*) FROM usage_hour") == 0
    assert await used(many, at(1234), at(DAY)) == before
    await many.close()


async def test_a_roller_that_is_killed_has_entered_nothing(many: Database) -> None:
    before = await _tables(many)
    for table in ("usage_level", "usage_hour", "usage_day", "usage_rolled"):
        async with many.reader() as db:
            await db.execute(_KILLING.format(table=table))
        with pytest.raises((Unavailable, asyncpg.PostgresError)):
            await roll(many, at(DAY))
        async with many.reader() as db:
            await db.execute(f"DROP TRIGGER kill ON {table}")
        assert await _tables(many) == before
    while await roll(many, at(DAY)):
        pass
    assert (await used(many, START, at(DAY)))[GPU, ""] == ALL
    await many.close()


# The connection is gone in the midst of it, as when its process is killed.
_KILLING = """
CREATE OR REPLACE FUNCTION kill_me() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
CREATE TRIGGER kill AFTER INSERT OR UPDATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION kill_me();
"""


async def _tables(database: Database) -> list[int]:
    async with database.reader() as db:
        return [
            await db.fetchval(f"SELECT count(*) FROM {table}")
            for table in ("usage_step", "usage_level", "usage_hour", "usage_day")
        ]


async def test_what_goes_on_is_entered_at_every_hour(database_url: str) -> None:
    database = await opened(database_url)
    async with database.reader() as db:
        await store.save(db, [began("long", 60, gpu=1000)], [])
    assert await roll(database, at(HOUR - 1)) == 2 * 1
    assert await roll(database, at(3 * HOUR + 5)) == 2
    assert await roll(database, at(3 * HOUR + 10)) == 0
    async with database.reader() as db:
        rows = await db.fetch("SELECT total, peak, last FROM usage_hour ORDER BY at")
        assert [tuple(row) for row in rows] == [
            (1000 * (HOUR - 60), 1000, 1000), (1000 * HOUR, 1000, 1000), (1000 * HOUR, 1000, 1000),
        ]  # fmt: skip
    await database.close()


async def test_after_a_long_time_away_a_day_is_entered_at_a_time(database_url: str) -> None:
    database = await opened(database_url)
    async with database.reader() as db:
        await store.save(db, [began("long", 60, gpu=1000)], [])
        await db.execute("UPDATE usage_rolled SET at = $1", START)
    end, turns = at(5 * DAY + 10), 0
    while await roll(database, end):
        turns += 1
        assert (await used(database, at(30), end))[GPU, ""] == 1000 * (5 * DAY + 10 - 60)
    assert turns == 5
    async with database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM usage_hour") == 5 * 24
        assert await db.fetchval("SELECT at FROM usage_rolled") == at(5 * DAY)
    await database.close()


async def test_steps_of_later_are_left_for_later(database_url: str) -> None:
    database = await opened(database_url)
    async with database.reader() as db:
        await store.save(db, [began("soon", 60, gpu=1000)], [])
    assert await roll(database, at(59)) == 0
    assert await roll(database, at(60)) == 2
    await database.close()


class FastClock(datetime):
    """Of a machine whose clock is days ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> FastClock:
        return cls.fromtimestamp((datetime.now(UTC) + timedelta(days=3)).timestamp(), tz)


async def test_nothing_is_entered_ahead_of_the_databases_clock(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is entered stays: everybody would have used days that nobody has seen yet."""
    database = await Database.open(database_url)
    at_present = int(datetime.now(UTC).timestamp())
    async with database.reader() as db:
        await db.execute("UPDATE usage_rolled SET at = date_trunc('hour', now() - interval '5 hours', 'UTC')")
        one = UsageBegan("u", "n1", 1, "physics", "-", "ns", "x", {GPU: 1000}, "", at_present - 4 * HOUR)
        await store.save(db, [one], [])
    monkeypatch.setattr("bursar.ops.usage.usage_rollup.datetime", FastClock)
    while await roll(database):
        pass
    async with database.reader() as db:
        assert await db.fetchval("SELECT bool_and(at <= now()) FROM usage_rolled")
        entered = "SELECT sum(total) FROM usage_day WHERE username = '' AND resource = $1"
        assert await db.fetchval(entered, GPU) <= 1000 * (4 * HOUR + 600)
    await database.close()


# Tenants, and their budgets.


async def test_a_successor_of_the_same_name_starts_at_nothing(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await tenant(runtime, "physics")
    async with runtime.database.reader() as db:
        old = int((now() - timedelta(hours=30)).timestamp())
        one = UsageBegan("old", "a", 1, "physics", "-", "lab", "old", {GPU: 8000, "nodes": 1000}, "", old)
        await store.save(db, [one], [])
        await store.save(db, [], [UsageEnded("old", "a", int(now().timestamp()) - 2, "Succeeded")])
    while await roll(runtime.database):
        pass
    await backdate(runtime, 0)
    assert (await window(runtime, "physics", now() - timedelta(days=90)))["nodes", ""].total > 0
    assert code(await delete(runtime, "Tenant", "", "physics")) == "ok"
    assert code(await tenant(runtime, "physics")) == "ok"
    assert await window(runtime, "physics", now() - timedelta(days=90)) == {}


async def test_a_budget_counts_the_tenant_and_all_below_it(runtime: Runtime) -> None:
    await tenant(runtime, "science", gpuHoursBudget=100)
    await tenant(runtime, "physics", parent="science", nodeHoursBudget=50)
    await tenant(runtime, "other")
    await backdate(runtime, 0)
    async with runtime.database.reader() as db:
        for number, name in enumerate(("science", "physics", "other")):
            begin = int(now().timestamp()) - 10 * HOUR
            one = UsageBegan(
                f"u{number}", "a", 1, name, "-", "ns", "x", {GPU: 4000, "amd.com/gpu": 1000, "nodes": 500}, "", begin
            )
            await store.save(db, [one], [])
            await store.save(db, [], [UsageEnded(one.uid, "a", begin + 2 * HOUR, "Succeeded")])
        budgets = await load_budgets(db, await runtime.trees.refresh(db))
    assert budgets == {"science": BudgetUse(20.0, 2.0), "physics": BudgetUse(10.0, 1.0)}


async def test_a_budget_is_for_the_period_that_the_settings_say(runtime: Runtime) -> None:
    await tenant(runtime, "physics", gpuHoursBudget=100)
    await backdate(runtime, 0)
    async with runtime.database.reader() as db:
        begin = int(now().timestamp()) - 20 * DAY
        one = UsageBegan("u", "a", 1, "physics", "-", "ns", "x", {GPU: 1000}, "", begin)
        await store.save(db, [one], [])
        await store.save(db, [], [UsageEnded("u", "a", begin + HOUR, "Succeeded")])
        assert (await load_budgets(db, await runtime.trees.refresh(db)))["physics"].gpu_hours == 1.0
    assert code(await change(runtime, "Settings", "", "system", scheduling={"budgetPeriodDays": 7})) == "ok"
    async with runtime.database.reader() as db:
        assert (await load_budgets(db, await runtime.trees.refresh(db)))["physics"].gpu_hours == 0.0


async def test_what_runs_counts_up_to_now(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await running(runtime, "one", "a", gpu=4)
    await backdate(runtime, 7200)
    for entered in (False, True):
        while entered and await roll(runtime.database):
            pass
        found = (await window(runtime, "default", now() - timedelta(days=90)))[GPU, ""]
        assert 4 * 7200 * 1000 <= found.total <= 4 * 7300 * 1000
        assert (found.current, found.peak) == (4000, 4000)
    await assert_hours_agree(runtime)


# Upkeep.


async def test_months_are_made_ahead_and_strays_are_brought_home(runtime: Runtime) -> None:
    later = now() + timedelta(days=400)
    async with runtime.database.reader() as db:
        one = UsageBegan("u", "a", 1, "default", "-", "ns", "x", {GPU: 1000}, "", int(later.timestamp()))
        await store.save(db, [one], [])
        await store.save(db, [], [UsageEnded("u", "a", int(later.timestamp()) + 5, "Succeeded")])
        assert await db.fetchval("SELECT count(*) FROM usage_record_other") == 1
        await asyncio.gather(*(_ensure(runtime, later) for _ in range(3)))
        assert await db.fetchval("SELECT count(*) FROM usage_record_other") == 0
        assert await db.fetchval(f"SELECT count(*) FROM usage_record_{later:%Y_%m}") == 1


async def _ensure(runtime: Runtime, when: datetime) -> None:
    async with runtime.database.reader() as db:
        await usage_records.ensure_partitions(db, when)


async def test_records_are_kept_for_as_long_as_the_settings_say(runtime: Runtime) -> None:
    long_ago = now() - timedelta(days=300)
    async with runtime.database.reader() as db:
        await usage_records.ensure_partitions(db, long_ago)
    assert await keep_hours(runtime, Retention()) == []
    assert code(await change(runtime, "Settings", "", "system", usage={"recordDays": 200})) == "ok"
    assert f"usage_record_{long_ago:%Y_%m}" in await keep_hours(runtime, Retention())


async def test_how_far_entering_is_behind_is_told(runtime: Runtime) -> None:
    await backdate(runtime, 0)
    while await roll(runtime.database):
        pass
    async with runtime.database.reader() as db:
        assert await store.load_lag(db) < 60
        at = int(now().timestamp()) - 900
        await store.save(db, [UsageBegan("u", "a", 1, "default", "-", "ns", "x", {GPU: 1000}, "", at)], [])
        assert await store.load_lag(db) >= 900
    while await roll(runtime.database):
        pass
    async with runtime.database.reader() as db:
        assert await store.load_lag(db) < 60
        await db.execute("UPDATE usage_rolled SET at = at - interval '3 hours'")
        assert await store.load_lag(db) >= 2 * HOUR


async def test_what_is_old_is_dropped_and_windows_stay_right_by_the_day(runtime: Runtime) -> None:
    await backdate(runtime, 0)
    old = int((now() - timedelta(days=70)).timestamp()) // DAY * DAY - 40 * DAY + 5 * HOUR
    async with runtime.database.reader() as db:
        await usage_records.ensure_partitions(db, datetime.fromtimestamp(old, UTC))
        one = UsageBegan("u", "a", 1, "default", "-", "ns", "x", {GPU: 1000}, "", old)
        await store.save(db, [one], [])
        await store.save(db, [], [UsageEnded("u", "a", old + 2 * HOUR, "Succeeded")])
    while await roll(runtime.database):
        pass
    begin = datetime.fromtimestamp(old + HOUR, UTC)
    assert (await window(runtime, "default", begin))[GPU, ""].total == HOUR * 1000
    kept = Retention(hours=timedelta(days=1), records=timedelta(days=900))
    assert await keep_hours(runtime, kept) == []
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM usage_hour") == 0
    assert (await window(runtime, "default", begin))[GPU, ""].total == HOUR * 1000  # from the day, and its records
    month = datetime.fromtimestamp(old, UTC)
    assert f"usage_record_{month:%Y_%m}" in await keep_hours(runtime, Retention(records=timedelta(days=10)))
    # Without records it cannot be told when in its day it ran: the window begins with the day.
    assert (await window(runtime, "default", begin))[GPU, ""].total == 2 * HOUR * 1000
