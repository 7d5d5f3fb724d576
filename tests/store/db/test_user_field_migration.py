"""What was submitted before `status.user` could be selected by is found by it, and watched from then on."""

import json
from collections.abc import AsyncIterator

import pytest

from bursar.core.nodes.queue import InQueue
from bursar.core.values.selector import parse_fields
from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import migrate, migrations
from bursar.store.objects.change import load_position
from bursar.store.objects.listing import Query, load_page
from bursar.store.scheduling.queue import count_in
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

ANN = parse_fields("status.user=physics/ann", ("status.user",))
NOBODY = parse_fields("status.user=", ("status.user",))


@pytest.fixture
async def db(embedded_postgres: PostgresServer) -> AsyncIterator[Connection]:
    """As it was before the field."""
    name = await clone_database(embedded_postgres, "template0")
    connection = await connect(_url(embedded_postgres, name))
    await migrate(connection, [one for one in migrations() if one.version < 9])
    yield connection
    await connection.close()
    await drop_database(embedded_postgres, name)


async def put(db: Connection, kind: str, name: str, status: str | None) -> None:
    revision = await db.fetchval("UPDATE revision SET value = value + 1 RETURNING value")
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc, status)"
        """ VALUES ($1, 'lab', $2, $2, 'physics', $3, '{}', '{"status.phase": "Running"}', '{}', $4)""",
        kind, name, revision, status and status.encode(),
    )  # fmt: skip


async def names(db: Connection, query: Query) -> list[str]:
    return [one.name for one in (await load_page(db, query)).items]


async def test_what_is_there_is_found_by_who_submitted_it(db: Connection) -> None:
    for kind in ("Allocation", "Job"):
        await put(db, kind, f"{kind}-ann", json.dumps({"phase": "Running", "user": "physics/ann"}))
        await put(db, kind, f"{kind}-bob", json.dumps({"user": "physics/bob"}))
        await put(db, kind, f"{kind}-empty", json.dumps({"user": ""}))
        await put(db, kind, f"{kind}-old", json.dumps({"phase": "Running"}))
        await put(db, kind, f"{kind}-bare", None)
    await put(db, "Tenant", "tenant", json.dumps({"user": "physics/ann"}))
    before = await db.fetch("SELECT name, revision, status::text FROM object ORDER BY name")
    assert await names(db, Query("Allocation", fields=ANN)) == []
    applied = await migrate(db)
    assert "0009_user_field" in applied
    for kind in ("Allocation", "Job"):
        assert await names(db, Query(kind, fields=ANN)) == [f"{kind}-ann"]
        assert await names(db, Query(kind, fields=NOBODY)) == [f"{kind}-bare", f"{kind}-empty", f"{kind}-old"]
    assert await names(db, Query("Tenant", fields=ANN)) == []
    # What they show is as it was, and so is their version.
    assert await db.fetch("SELECT name, revision, status::text FROM object ORDER BY name") == before
    fields = await db.fetchval("SELECT fields::text FROM object WHERE name = 'Job-ann'")
    assert json.loads(fields) == {"status.phase": "Running", "status.user": "physics/ann"}


async def test_jobs_are_counted_where_their_template_sends_them(db: Connection) -> None:
    for name, spec in (("says", {"queue": "secrets"}), ("silent", {})):
        await put(db, "Job", name, json.dumps({"phase": "Running"}))
        doc = json.dumps({"spec": {"template": {"spec": spec}}}).encode()
        await db.execute(
            "UPDATE object SET doc = $2, fields = fields || $3 WHERE name = $1", name, doc, b'{"spec.queue": "default"}'
        )
    await migrate(db)
    assert (await count_in(db, "secrets"), await count_in(db, "default")) == (InQueue(jobs=1), InQueue(jobs=1))


async def test_who_watched_from_before_lists_again(db: Connection) -> None:
    """Older lines of the feed say nothing of users: a selector would pass over them in silence."""
    await put(db, "Allocation", "a", json.dumps({"user": "physics/ann"}))
    assert (await load_position(db)).floor == 0
    await migrate(db)
    position = await load_position(db)
    assert position.floor == position.revision == 1


async def test_however_many_there_are_all_of_them_are_found(db: Connection) -> None:
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc, status)"
        " SELECT 'Allocation', 'lab', 'a-' || number, 'uid-' || number, 'physics', number, '{}', '{}', '{}',"
        " json_build_object('user', 'physics/user-' || number % 100) FROM generate_series(1, 20000) AS number"
    )
    await migrate(db)
    one = parse_fields("status.user=physics/user-7", ("status.user",))
    assert len(await names(db, Query("Allocation", fields=one))) == 200
    assert await db.fetchval("SELECT count(*) FROM object WHERE fields ? 'status.user'") == 20000
