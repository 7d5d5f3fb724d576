"""A statement that locks rows reads them as the rival that it waited for left them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

import asyncpg
import pytest

from bursar.core.objects.object import Key, Stored
from bursar.store.db.database import KEPT_SETTINGS, Connection, connect
from bursar.store.nodes import node as nodes
from bursar.store.objects import batch
from bursar.store.objects import object as objects
from bursar.store.quota import quota as counts
from bursar.store.quota import tenant_tree
from bursar.store.scheduling import leader

A, B, C = (Key("Allocation", "default", name) for name in ("a", "b", "c"))

Connect = Callable[[], Awaitable[Connection]]
Found = dict[Key, Stored]
Lock = Callable[[Connection, Iterable[Key]], Coroutine[Any, Any, Found]]


async def alone(db: Connection, keys: Iterable[Key]) -> Found:
    return await objects.lock(db, keys)


async def under_tree(db: Connection, keys: Iterable[Key]) -> Found:
    found = (await objects.lock_under_tree(db, keys)).objects
    assert found is not None
    return found


async def under_leader(db: Connection, keys: Iterable[Key]) -> Found:
    found = (await objects.lock_under_leader(db, keys))[1].objects
    assert found is not None
    return found


LOCKS = pytest.mark.parametrize("lock", [alone, under_tree, under_leader])


@pytest.fixture
async def another(database_url: str) -> AsyncIterator[Connect]:
    """Connections as lanes have them."""
    opened: list[Connection] = []

    async def one() -> Connection:
        db = await connect(database_url, {**KEPT_SETTINGS, "idle_in_transaction_session_timeout": "0"})
        opened.append(db)
        return db

    yield one
    for db in opened:
        await db.close()


@pytest.fixture
async def rival(another: Connect) -> Connection:
    db = await another()
    for key in (A, B):
        await put(db, key)
    return db


async def put(db: Connection, key: Key, uid: str = "first") -> None:
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc)"
        " VALUES ($1, $2, $3, $4, 'default', 1, '{}', '{}', '{}')",
        *key, uid,
    )  # fmt: skip


async def change(db: Connection, key: Key) -> None:
    await db.execute(
        """UPDATE object
              SET revision = 2, tenant = 'moved', labels = '{"a": "b"}', fields = '{"c": "d"}', doc = '{"e": "f"}',
                  status = '{"g": "h"}', charge = '{"accepted": {"cpu": 1}}'
            WHERE (kind, namespace, name) = ($1, $2, $3)""",
        *key,
    )  # fmt: skip


async def remove(db: Connection, key: Key) -> None:
    await db.execute("DELETE FROM object WHERE (kind, namespace, name) = ($1, $2, $3)", *key)


async def until_somebody_waits(db: Connection) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(30):
        while not await db.fetchval(waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def can_lock(db: Connection, key: Key) -> bool:
    """Whether nobody holds it."""
    sql = "SELECT 1 FROM object WHERE (kind, namespace, name) = ($1, $2, $3) FOR NO KEY UPDATE NOWAIT"
    try:
        await db.fetchval(sql, *key)
    except asyncpg.LockNotAvailableError:
        return False
    return True


# Objects.


@LOCKS
async def test_what_exists_is_locked_and_read_and_what_does_not_is_not_there(lock: Lock, another: Connect) -> None:
    db, looker = await another(), await another()
    async with db.transaction():
        assert await lock(db, {A, B}) == {}
    await put(db, A)
    async with db.transaction():
        found = await lock(db, {A, B, C})
        assert {key: one.uid for key, one in found.items()} == {A: "first"}
        assert not await can_lock(looker, A)


@LOCKS
async def test_what_was_waited_for_is_read_as_its_rival_left_it(
    lock: Lock, rival: Connection, another: Connect
) -> None:
    db, looker = await another(), await another()
    async with rival.transaction():
        await change(rival, A)
        locking = asyncio.create_task(lock(db, {A, B}))
        await until_somebody_waits(looker)
    found = await locking
    assert found == await objects.load(looker, {A, B})
    one = found[A]
    assert (one.revision, one.tenant, one.labels, one.fields) == (2, "moved", {"a": "b"}, {"c": "d"})
    assert (one.doc, one.status, one.charge.accepted) == (b'{"e": "f"}', b'{"g": "h"}', {"cpu": 1})


@LOCKS
async def test_what_changed_while_another_was_waited_for_is_read_as_it_is(
    lock: Lock, rival: Connection, another: Connect
) -> None:
    """It was seen as it had been, and had to be locked after the one that was waited for."""
    db, looker = await another(), await another()
    async with rival.transaction():
        await change(rival, A)
        locking = asyncio.create_task(lock(db, {A, B}))
        await until_somebody_waits(looker)
        await change(looker, B)
    assert {key: one.revision for key, one in (await locking).items()} == {A: 2, B: 2}


@LOCKS
async def test_what_a_rival_undid_is_read_as_it_was(lock: Lock, rival: Connection, another: Connect) -> None:
    db, looker = await another(), await another()
    undone = rival.transaction()
    await undone.start()
    await change(rival, A)
    locking = asyncio.create_task(lock(db, {A}))
    await until_somebody_waits(looker)
    await undone.rollback()
    assert (await locking)[A].revision == 1


@LOCKS
async def test_what_was_deleted_and_created_anew_meanwhile_is_not_there(
    lock: Lock, rival: Connection, another: Connect
) -> None:
    """Neither the one that is gone nor, unlocked, its successor."""
    db, looker = await another(), await another()
    async with rival.transaction():
        await remove(rival, A)
        await put(rival, A, "second")
        async with db.transaction():
            locking = asyncio.create_task(lock(db, {A, B}))
            await until_somebody_waits(looker)
            await remove(looker, B)
            await put(looker, B, "second")
            await rival.execute("COMMIT; BEGIN")
            assert await locking == {}
            # A later statement finds the present rows.
            assert {one.uid for one in (await lock(db, {A, B})).values()} == {"second"}


@LOCKS
async def test_objects_are_locked_in_the_order_of_their_keys(lock: Lock, rival: Connection, another: Connect) -> None:
    db, looker = await another(), await another()
    for held, other, free in ((A, B, True), (B, A, False)):
        async with rival.transaction():
            await change(rival, held)
            async with db.transaction():
                locking = asyncio.create_task(lock(db, [B, A]))
                await until_somebody_waits(looker)
                assert await can_lock(looker, other) is free
                await rival.execute("COMMIT; BEGIN")
                assert len(await locking) == 2


# What is held before them.


@pytest.mark.parametrize("warm", [False, True], ids=["for the first time", "again"])
@pytest.mark.parametrize("lock", [under_tree, under_leader])
async def test_whoever_waited_for_the_tree_sees_all_that_was_changed_with_it(
    lock: Lock, rival: Connection, another: Connect, warm: bool
) -> None:
    """Also what was put beside it; and until then nothing is locked."""
    db, looker = await another(), await another()
    if warm:
        async with db.transaction():
            await lock(db, {A})
    async with rival.transaction():
        await tenant_tree.lock_exclusive(rival)
        locking = asyncio.create_task(lock(db, {A, C}))
        await until_somebody_waits(looker)
        assert await can_lock(looker, A)
        await change(rival, A)
        await put(rival, C)
        await tenant_tree.bump(rival)
    assert {key: one.revision for key, one in (await locking).items()} == {A: 2, C: 1}


async def version_under_tree(db: Connection) -> Any:
    return (await objects.lock_under_tree(db, {A})).version


async def version_under_leader(db: Connection) -> Any:
    return (await objects.lock_under_leader(db, {A}))[1].version


async def version_with_leader(db: Connection) -> Any:
    return (await leader.lock_with_tree(db))[1]


async def fence_under_leader(db: Connection) -> Any:
    return (await objects.lock_under_leader(db, {A}))[0]


async def fence_with_tree(db: Connection) -> Any:
    return (await leader.lock_with_tree(db))[0]


Look = Callable[[Connection], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize("look", [version_under_tree, version_under_leader, version_with_leader])
async def test_whoever_waited_for_the_tree_sees_its_new_version(look: Look, another: Connect) -> None:
    db, changer, looker = await another(), await another(), await another()
    async with db.transaction():
        before = await look(db)
    async with changer.transaction():
        await tenant_tree.lock_exclusive(changer)
        await tenant_tree.bump(changer)
        looking = asyncio.create_task(look(db))
        await until_somebody_waits(looker)
    assert await looking == before + 1


@pytest.mark.parametrize("look", [version_under_tree, version_under_leader, version_with_leader])
async def test_the_tree_stays_as_it_is_until_whoever_holds_it_has_committed(look: Look, another: Connect) -> None:
    db, changer, looker = await another(), await another(), await another()
    async with db.transaction():
        before = await look(db)
        async with changer.transaction():
            holding = asyncio.create_task(tenant_tree.lock_exclusive(changer))
            await until_somebody_waits(looker)
            assert not holding.done()
            await db.execute("COMMIT; BEGIN")
            assert await holding == before


@pytest.mark.parametrize("look", [fence_under_leader, fence_with_tree])
async def test_whoever_waited_for_a_takeover_sees_the_new_fence_there_too(look: Look, another: Connect) -> None:
    db, candidate, looker = await another(), await another(), await another()
    async with candidate.transaction():
        fence = await leader.take(candidate, "a", 3600.0)
        looking = asyncio.create_task(look(db))
        await until_somebody_waits(looker)
    assert await looking == fence


@pytest.mark.parametrize("look", [fence_under_leader, fence_with_tree])
async def test_a_takeover_waits_for_whoever_holds_the_leader_with_the_tree(look: Look, another: Connect) -> None:
    db, candidate, looker = await another(), await another(), await another()
    async with db.transaction():
        fence = await look(db)
        taking = asyncio.create_task(leader.take(candidate, "a", 3600.0))
        await until_somebody_waits(looker)
        assert not taking.done()
        assert await look(db) == fence
    assert await taking == fence + 1


@pytest.mark.parametrize("look", [fence_under_leader, fence_with_tree])
async def test_a_takeover_does_not_wait_for_those_who_wait_for_the_tree(look: Look, another: Connect) -> None:
    db, changer, candidate = await another(), await another(), await another()
    async with changer.transaction():
        await tenant_tree.lock_exclusive(changer)
        looking = asyncio.create_task(look(db))
        await until_somebody_waits(candidate)
        fence = await leader.take(candidate, "a", 3600.0)
    assert await looking == fence


# Counters, and nodes after them.

CPU, GPU = ("tenant:default", "cpu"), ("tenant:default", "gpu")
HELD_BY_NOBODY = {
    "quota": "SELECT 1 FROM quota FOR NO KEY UPDATE NOWAIT",
    "node": "SELECT 1 FROM node FOR NO KEY UPDATE NOWAIT",
}


@pytest.fixture
async def charged(another: Connect) -> Connection:
    """Two counters and two nodes."""
    db = await another()
    await db.execute(
        """INSERT INTO quota (scope, dimension, hard) VALUES ('tenant:default', 'cpu', 9), ('tenant:default', 'gpu', 9);
           INSERT INTO node (name, uid, allocatable, allocated, devices)
           VALUES ('n1', '', '{"cpu": 9}', '{}', '{}'), ('n2', '', '{"cpu": 9}', '{}', '{}')"""
    )
    return db


async def is_free(db: Connection, table: str) -> bool:
    try:
        await db.execute(HELD_BY_NOBODY[table])
    except asyncpg.LockNotAvailableError:
        return False
    return True


async def test_counters_and_nodes_that_exist_are_locked_and_read(charged: Connection, another: Connect) -> None:
    looker = await another()
    async with charged.transaction():
        counters, capacities = await nodes.lock_after_counters(
            charged, [GPU, CPU, ("tenant:x", "cpu")], ["n2", "n1", "n3"]
        )
        assert {row: one.hard for row, one in counters.items()} == {CPU: 9, GPU: 9}
        assert {name: one.allocatable for name, one in capacities.items()} == {"n1": {"cpu": 9}, "n2": {"cpu": 9}}
        assert not await is_free(looker, "quota")
        assert not await is_free(looker, "node")
        assert await nodes.lock(charged, ["n1", "n2"]) == capacities
        assert await counts.lock(charged, [CPU, GPU]) == counters
    assert await nodes.lock_after_counters(charged, [("tenant:x", "cpu")], ["n3"]) == ({}, {})


async def test_counters_and_nodes_that_were_waited_for_are_read_as_their_rivals_left_them(
    charged: Connection, another: Connect
) -> None:
    """What changed after the statement began, with a lock that it had to wait for and without."""
    first, second, db = await another(), await another(), await another()
    async with first.transaction(), second.transaction():
        await first.execute("UPDATE quota SET bound = 5 WHERE dimension = 'gpu'")
        await second.execute("""UPDATE node SET allocated = '{"cpu": 7}' WHERE name = 'n1'""")
        locking = asyncio.create_task(nodes.lock_after_counters(db, [CPU, GPU], ["n1", "n2"]))
        await until_somebody_waits(charged)
        await charged.execute("""UPDATE node SET allocated = '{"cpu": 3}' WHERE name = 'n2'""")
        await first.execute("COMMIT; BEGIN")
        await second.execute("COMMIT; BEGIN")
        counters, capacities = await locking
    assert {row: one.bound for row, one in counters.items()} == {CPU: 0, GPU: 5}
    assert {name: one.allocated for name, one in capacities.items()} == {"n1": {"cpu": 7}, "n2": {"cpu": 3}}


async def test_no_node_is_locked_while_a_counter_is_waited_for(charged: Connection, another: Connect) -> None:
    rival, db = await another(), await another()
    async with rival.transaction(), db.transaction():
        await rival.execute("UPDATE quota SET bound = 5 WHERE dimension = 'gpu'")
        locking = asyncio.create_task(nodes.lock_after_counters(db, [CPU, GPU], ["n1", "n2"]))
        await until_somebody_waits(charged)
        assert await is_free(charged, "node")
        await rival.execute("COMMIT; BEGIN")
        await locking
        assert not await is_free(charged, "node")


# Their plans.


async def scans_of(db: Connection, sql: str, types: int) -> list[str]:
    """How the plan that is kept for a statement finds its rows."""
    await db.execute(f"PREPARE locking ({', '.join(['text'] * types)}) AS {sql.rstrip(';')}")
    arguments = ", ".join(["''"] * types)
    lines = [row[0] for row in await db.fetch(f"EXPLAIN (COSTS OFF) EXECUTE locking ({arguments})")]
    return [line.strip(" ->") for line in lines if "Scan" in line and "CTE" not in line]


@pytest.mark.parametrize("name", ["lock", "lock_under_tree", "lock_under_leader"])
async def test_objects_are_looked_up_by_key_however_many_there_are(name: str, another: Connect) -> None:
    """Also by a plan that was made while there were none."""
    scans = await scans_of(await another(), getattr(objects.SQL, name), 3)
    assert "Index Scan using object_key on object" in scans
    assert not any(scan.startswith("Seq Scan") for scan in scans)


async def test_counters_and_nodes_are_looked_up_by_key_however_many_there_are(another: Connect) -> None:
    scans = await scans_of(await another(), nodes.SQL.lock_after_counters, 3)
    assert "Index Scan using quota_key on quota" in scans
    assert {"Index Scan using node_key on node", "Bitmap Index Scan on node_key"} & set(scans)
    assert not any(scan.startswith("Seq Scan") for scan in scans)


async def test_what_is_placed_is_saved_by_key_however_much_there_is(another: Connect) -> None:
    types = ["text"] * 20 + ["text[]", "text[]", "bigint[]", "bigint[]", "boolean[]"] + ["text"] * 16
    db = await another()
    await db.execute(f"PREPARE saving ({', '.join(types)}) AS {batch.SAVE_PLACED.rstrip(';')}")
    lines = await db.fetch(f"EXPLAIN (COSTS OFF) EXECUTE saving ({', '.join(['NULL'] * len(types))})")
    assert not any("Seq Scan" in row[0] for row in lines)
    assert any("Index Scan using node_key on node" in row[0] for row in lines)
