"""What belonged to names before belongs to the tenants that bear them; the rest is filed as a deleted tenant's."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import migrate, migrations
from bursar.store.objects.change import ensure_partitions
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

NAME = "tenant_uid"


@pytest.fixture
async def db(embedded_postgres: PostgresServer) -> AsyncIterator[Connection]:
    """As it was before uids: acme lives, and was given its name anew; ghost and older were deleted."""
    name = await clone_database(embedded_postgres, "template0")
    connection = await connect(_url(embedded_postgres, name))
    this = next(one.version for one in migrations() if one.name.endswith(NAME))
    await migrate(connection, [one for one in migrations() if one.version < this])
    await ensure_partitions(connection)
    await connection.execute(
        """
        INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc)
        VALUES ('Tenant', '', 'acme', 'tenant-2', 'acme', 2, '{}', '{}',
                '{"metadata": {"creationTimestamp": "2030-01-01T00:00:00Z"}}');
        INSERT INTO change (revision, kind, namespace, name, uid, tenant, type, labels, fields, doc, actor, verb,
                            reason, at)
        VALUES (1, 'Tenant', '', 'acme', 'tenant-1', 'acme', 'DELETED', '{}', '{}', '{}', '', '', '', now()),
               (2, 'Tenant', '', 'acme', 'tenant-2', 'acme', 'ADDED', '{}', '{}', '{}', '', '', '', now()),
               (3, 'Tenant', '', 'ghost', 'tenant-3', 'ghost', 'DELETED', '{}', '{}', '{}', '', '', '', now());
        INSERT INTO account (tenant, username, posted)
        VALUES ('acme', '', 5), ('acme', 'ann', 0), ('ghost', '', 0), ('older', 'bob', 0);
        INSERT INTO token (id, hash, role, tenant, created_at, created_by, revoked_at)
        VALUES ('now', '', 'user', 'acme', '2030-02-01', 'x', NULL),
               ('revoked', '', 'user', 'acme', '2030-02-01', 'x', '2030-03-01'),
               ('skewed', '', 'user', 'acme', '2029-12-31 23:59:59', 'x', NULL),
               ('before', '', 'user', 'acme', '2029-01-01', 'x', '2029-06-01'),
               ('ghostly', '', 'user', 'ghost', '2029-01-01', 'x', NULL),
               ('admin', '', 'system-admin', '', '2029-01-01', 'x', NULL);
        INSERT INTO webhook (name, tenant, secret, created_by)
        VALUES ('a', 'acme', 's', 'x'), ('g', 'ghost', 's', 'x'), ('all', '', 's', 'x');
        INSERT INTO notice (type, tenant, subject, data, spread_at)
        VALUES ('t', 'acme', '', '{}', NULL), ('t', 'ghost', '', '{}', NULL), ('t', 'ghost', '', '{}', now());
        INSERT INTO request (scope, request_id, fingerprint)
        VALUES ('ledger:acme/create topups', '1', 'f'), ('ledger:ghost/create topups', '1', 'f'),
               ('ledger:/payment bank', '1', 'f'), ('acme/create', '1', 'f'), ('ghost/create', '1', 'f'),
               ('user:acme/create', '1', 'f'), ('batch', 'm', '');
        """
    )
    yield connection
    await connection.close()
    await drop_database(embedded_postgres, name)


async def rows(db: Connection, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await db.fetch(query)]


async def test_accounts(db: Connection) -> None:
    await migrate(db)
    assert await rows(db, "SELECT tenant, username, tenant_uid, posted FROM account WHERE id >= 100 ORDER BY id") == [
        ("acme", "", "tenant-2", 5),
        ("acme", "ann", "tenant-2", 0),
        ("ghost@tenant-3", "", "tenant-3", 0),
        ("older@gone", "bob", "gone", 0),
    ]
    assert await db.fetchval("SELECT count(*) FROM account WHERE id < 100 AND tenant = '' AND tenant_uid = ''") == 4


async def test_tokens(db: Connection) -> None:
    await migrate(db)
    found = await rows(db, "SELECT id, tenant, tenant_uid, (revoked_at IS NULL)::text FROM token ORDER BY id")
    assert found == [
        ("admin", "", "", "true"),
        ("before", "acme@tenant-1", "tenant-1", "false"),
        ("ghostly", "ghost@tenant-3", "tenant-3", "false"),
        ("now", "acme", "tenant-2", "true"),
        ("revoked", "acme", "tenant-2", "false"),
        ("skewed", "acme", "tenant-2", "true"),
    ]


async def test_webhooks_and_notices(db: Connection) -> None:
    await migrate(db)
    assert await rows(db, "SELECT name, tenant FROM webhook ORDER BY name") == [
        ("a", "acme"), ("all", ""), ("g", "ghost@tenant-3")
    ]  # fmt: skip
    assert await rows(db, "SELECT tenant FROM notice ORDER BY id") == [("acme",), ("ghost@tenant-3",), ("ghost",)]


async def test_request_ids(db: Connection) -> None:
    await migrate(db)
    assert {scope for (scope,) in await rows(db, "SELECT scope FROM request")} == {
        "ledger:tenant-2/create topups", "ledger:ghost/create topups", "ledger:/payment bank", "tenant-2/create",
        "ghost/create", "user:acme/create", "batch",
    }  # fmt: skip
