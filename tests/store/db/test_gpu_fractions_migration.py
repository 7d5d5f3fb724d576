"""A node that says that it takes parts of devices still does, once those that say nothing depend on the settings."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bursar.core.nodes.node import NodeGate
from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import migrate, migrations
from bursar.store.nodes import node as store
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database


@pytest.fixture
async def db(embedded_postgres: PostgresServer) -> AsyncIterator[Connection]:
    """As it was before the third state."""
    name = await clone_database(embedded_postgres, "template0")
    connection = await connect(_url(embedded_postgres, name))
    await migrate(connection, [one for one in migrations() if one.version < 18])
    yield connection
    await connection.close()
    await drop_database(embedded_postgres, name)


async def put(db: Connection, name: str, spec: dict[str, Any], gate: str | None) -> None:
    revision = await db.fetchval("UPDATE revision SET value = value + 1 RETURNING value")
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc)"
        " VALUES ('Node', '', $1, $1, '', $2, '{}', '{}', $3)",
        name, revision, json.dumps({"spec": spec}).encode(),
    )  # fmt: skip
    await db.execute(
        "INSERT INTO node (name, uid, generation, schedulable, allocatable, allocated, devices, gate)"
        " VALUES ($1, $1, 1, true, '{}', '{}', '{}', $2)",
        name, gate and gate.encode(),
    )  # fmt: skip


async def test_what_nodes_said_of_parts_is_kept(db: Connection) -> None:
    await put(db, "silent", {}, None)
    await put(db, "gated", {}, '{"tenants": ["acme"]}')
    await put(db, "trusted", {"gpuFractions": "Trusted"}, None)
    await put(db, "enforced", {"gpuFractions": "Enforced"}, '{"tenants": ["acme"], "isolated": true}')
    await put(db, "refused", {"gpuFractions": "Refused"}, '{"whole_only": true}')
    await migrate(db)
    assert {name: one.gate for name, one in (await store.load_all(db)).items()} == {
        "silent": None,
        "gated": NodeGate(tenants=("acme",)),
        "trusted": NodeGate(whole_only=False),
        "enforced": NodeGate(tenants=("acme",), whole_only=False, isolated=True),
        "refused": NodeGate(whole_only=True),
    }
