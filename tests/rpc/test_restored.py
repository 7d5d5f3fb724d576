"""A database that was put back to its backup, and agents that remember more: nothing that they ran since then is taken
for what they are told now."""

from collections.abc import AsyncIterator

import pytest

from bursar.store.db.database import connect
from bursar.store.quota.tenant_tree import begin_era, era_of, load_position
from support.nodes.agent_streams import RUN, STOP, evict, opened_app, orders, running, shown, stopped
from support.runtime.postgres import PostgresServer, clone_database, drop_database
from support.runtime.runtime import allocation, bind, document, node, opened, tenant

SPACE, NAME = "default", "train"


@pytest.fixture
async def backup_url(database_url: str, embedded_postgres: PostgresServer) -> AsyncIterator[str]:
    """What the database was before anything was placed; `database_url` goes on."""
    async with opened(database_url) as runtime:
        await node(runtime, "n1", cpu=8)
        await allocation(runtime, SPACE, NAME, cpu=1)
    there = database_url.rpartition("@/")[2].partition("?")[0]
    name = await clone_database(embedded_postgres, there)
    yield database_url.replace(there, name)
    await drop_database(embedded_postgres, name)


async def placed_on(url: str) -> tuple[str, int]:
    """Where the allocation is placed now: its uid and the epoch."""
    async with opened(url) as runtime:
        bound = document(await bind(runtime, SPACE, NAME, "n1"))
    return bound["metadata"]["uid"], bound["status"]["epoch"]


async def restored(url: str) -> None:
    db = await connect(url)
    try:
        await begin_era(db)
    finally:
        await db.close()


async def test_no_epoch_is_given_twice_to_one_allocation(database_url: str, backup_url: str) -> None:
    uid, first = await placed_on(database_url)
    await restored(backup_url)
    uid_again, second = await placed_on(backup_url)
    assert uid_again == uid
    assert first == 1
    assert second > 1_000_000_000


async def test_what_runs_since_the_backup_is_stopped_and_not_taken_for_what_is_wanted(
    database_url: str, backup_url: str
) -> None:
    uid, first = await placed_on(database_url)
    await restored(backup_url)
    async with opened_app(backup_url) as app:
        second = document(await bind(app.runtime, SPACE, NAME, "n1"))["status"]["epoch"]
        agent = app.agent("n1")
        answer = await agent.heartbeat(running(uid, first), inventory=True)
        assert orders(answer.directives) == sorted([(RUN, uid, second), (STOP, uid, first)])
        assert (await shown(app.runtime, NAME))["status"]["phase"] == "Scheduled"
        # Said of the one that is wanted, it is believed.
        await agent.heartbeat(running(uid, second))
        assert (await shown(app.runtime, NAME))["status"]["phase"] == "Running"


async def test_epochs_go_on_in_an_era_whatever_becomes_of_the_tree(backup_url: str) -> None:
    await restored(backup_url)
    async with opened_app(backup_url) as app:
        bound = document(await bind(app.runtime, SPACE, NAME, "n1"))
        uid, first = bound["metadata"]["uid"], bound["status"]["epoch"]
        agent = app.agent("n1")
        await agent.heartbeat(running(uid, first), inventory=True)
        document(await tenant(app.runtime, "physics"))
        await evict(app.runtime, NAME)
        await agent.heartbeat(stopped(uid, first))
        assert document(await bind(app.runtime, SPACE, NAME, "n1"))["status"]["epoch"] == first + 1


async def test_each_restore_of_the_same_backup_is_an_era_of_its_own(backup_url: str) -> None:
    db = await connect(backup_url)
    try:
        before = await load_position(db)
        await begin_era(db)
        first = await load_position(db)
        await db.execute("UPDATE tree SET version = $1", before.version)
        await db.execute("SELECT pg_sleep(1.1)")  # An era is a second.
        await begin_era(db)
        second = await load_position(db)
    finally:
        await db.close()
    assert era_of(before.version) == 0
    assert era_of(second.version) > era_of(first.version) > 0
    # What was seen since the backup is too old to go on from.
    assert first.floor == first.revision > before.revision + 1_000_000
