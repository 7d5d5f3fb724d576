"""Migrations: applied once each, in order, by the first process that starts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from runpy import run_path

import pytest

from bursar.store.db import database as database_module
from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import Migration, MigrationError, migrate, migrations
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

ROOT = Path(__file__).resolve().parents[3]

FIRST = Migration(1, "0001_first", "CREATE TABLE first (id integer)")
SECOND = Migration(2, "0002_second", "CREATE TABLE second (id integer); INSERT INTO second VALUES (1)")
BROKEN = Migration(3, "0003_broken", "CREATE TABLE third (id integer); SELECT 1 / 0")


@pytest.fixture
async def empty_url(embedded_postgres: PostgresServer) -> AsyncIterator[str]:
    name = await clone_database(embedded_postgres, "template0")
    yield _url(embedded_postgres, name)
    await drop_database(embedded_postgres, name)


@pytest.fixture
async def db(empty_url: str) -> AsyncIterator[Connection]:
    connection = await connect(empty_url)
    yield connection
    await connection.close()


async def tables(db: Connection) -> set[str]:
    rows = await db.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return {row["tablename"] for row in rows}


async def test_a_fresh_database_gets_everything(db: Connection) -> None:
    assert await migrate(db) == [one.name for one in migrations()]
    assert {"object", "change", "quota", "node", "request", "revision", "tree", "migration"} <= await tables(db)
    rows = await db.fetch("SELECT version, name, checksum FROM migration ORDER BY version")
    assert [tuple(row) for row in rows] == [(one.version, one.name, one.checksum) for one in migrations()]


async def test_the_schema_for_readers_is_what_the_migrations_make(db: Connection) -> None:
    """`make schema` writes it anew."""
    await migrate(db)
    script = run_path(str(ROOT / "scripts" / "schema.py"))
    assert await script["render"](db) == script["PAGE"].read_text(encoding="utf-8")


async def test_the_files_are_numbered_without_a_gap() -> None:
    assert [one.version for one in migrations()] == list(range(1, len(migrations()) + 1))


async def test_repeating_does_nothing(db: Connection) -> None:
    await migrate(db)
    await db.execute("INSERT INTO quota (scope, dimension) VALUES ('tenant:a', 'cpu')")
    assert await migrate(db) == []
    assert await db.fetchval("SELECT count(*) FROM quota") == 1


async def test_only_what_is_missing_is_applied(db: Connection) -> None:
    assert await migrate(db, [FIRST]) == ["0001_first"]
    assert await migrate(db, [FIRST, SECOND]) == ["0002_second"]
    assert await tables(db) == {"first", "second", "migration"}


async def test_two_at_once_apply_each_file_once(empty_url: str) -> None:
    several = [await connect(empty_url) for _ in range(4)]
    try:
        applied = await asyncio.gather(*(migrate(one, [FIRST, SECOND]) for one in several))
        assert sorted(applied) == [[], [], [], ["0001_first", "0002_second"]]
        assert await several[0].fetchval("SELECT count(*) FROM second") == 1
    finally:
        for one in several:
            await one.close()


async def test_a_file_edited_after_it_was_applied_is_refused(db: Connection) -> None:
    await migrate(db, [FIRST])
    edited = Migration(1, "0001_first", FIRST.sql + "; CREATE TABLE extra (id integer)")
    with pytest.raises(MigrationError, match="0001_first was edited after it was applied"):
        await migrate(db, [edited, SECOND])
    assert await tables(db) == {"first", "migration"}


async def test_a_database_of_a_newer_bursar_is_refused(db: Connection) -> None:
    await migrate(db, [FIRST, SECOND])
    with pytest.raises(MigrationError, match=r"migrated by a newer Bursar \(0002_second\); upgrade this one"):
        await migrate(db, [FIRST])


async def test_a_file_that_fails_leaves_the_database_as_it_was(db: Connection) -> None:
    await migrate(db, [FIRST])
    with pytest.raises(Exception, match="division by zero"):
        await migrate(db, [FIRST, SECOND, BROKEN])
    assert await tables(db) == {"first", "migration"}
    assert await migrate(db, [FIRST, SECOND]) == ["0002_second"]


async def test_a_migration_may_take_longer_than_other_commands(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the client's timeout nor the server's ends a long migration, or the wait for another process's."""
    monkeypatch.setattr(database_module, "COMMAND_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setitem(database_module.SESSION_SETTINGS, "statement_timeout", "500")
    slow = Migration(1, "0001_slow", "CREATE TABLE slow (id integer); SELECT pg_sleep(1.2)")
    several = [await connect(empty_url) for _ in range(2)]
    try:
        applied = await asyncio.gather(*(migrate(one, [slow]) for one in several))
        assert sorted(applied) == [[], ["0001_slow"]]
    finally:
        for one in several:
            await one.close()
