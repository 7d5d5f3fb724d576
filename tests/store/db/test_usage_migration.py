"""What ran before hours were kept counts from the migration on."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import migrate, migrations
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

GPU = "nvidia.com/gpu"


@pytest.fixture
async def db(embedded_postgres: PostgresServer) -> AsyncIterator[Connection]:
    name = await clone_database(embedded_postgres, "template0")
    connection = await connect(_url(embedded_postgres, name))
    yield connection
    await connection.close()
    await drop_database(embedded_postgres, name)


async def put(db: Connection, kind: str, name: str, uid: str, **columns: Any) -> None:
    labels = msgspec.json.encode(columns.get("labels", {}))
    status = msgspec.json.encode(columns.get("status", {}))
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc, status)"
        " VALUES ($1, $2, $3, $4, 'physics', 1, $5, '{}', '{}', $6)",
        kind, "" if kind == "Node" else "lab", name, uid, labels, status,
    )  # fmt: skip


async def place(
    db: Connection, name: str, resources: dict[str, int], status: dict[str, str], *, exclusive: bool = False
) -> None:
    await put(db, "Allocation", name, f"uid-{name}", status=status)
    await db.execute(
        "INSERT INTO placement (node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, revision)"
        " VALUES ('a', $1, 'lab', $2, 'physics', 3, $3, $4, '{}', 1)",
        f"uid-{name}", name, exclusive, msgspec.json.encode(resources),
    )  # fmt: skip


async def test_what_runs_when_hours_come_counts_from_then_on(db: Connection) -> None:
    await migrate(db, [one for one in migrations() if one.version < 6])
    await put(db, "Node", "a", "node-1", labels={"gpu-type": "h100"})
    await db.execute(
        "INSERT INTO node (name, uid, allocatable, allocated, devices) VALUES ('a', 'node-1', $1, '{}', '{}')",
        msgspec.json.encode({GPU: 8000, "cpu": 64000, "pods": 110_000}),
    )
    started = {"startTime": "2026-01-01T00:00:00Z"}
    await place(db, "shared", {GPU: 1000, "cpu": 9000, "pods": 1000}, {"user": "physics/ada", **started})
    await place(db, "whole", {GPU: 8000, "cpu": 64000, "exclusive": 1000}, started, exclusive=True)
    await place(db, "waits", {GPU: 1000, "pods": 1000}, {})
    before = await db.fetchval("SELECT date_trunc('second', now())")
    await migrate(db)
    rows = await db.fetch("SELECT name, username, class, epoch, amounts, started_at FROM usage_open ORDER BY name")
    assert [(row["name"], row["username"], row["class"], row["epoch"]) for row in rows] == [
        ("shared", "physics/ada", "h100", 3), ("whole", "-", "h100", 3),
    ]  # fmt: skip
    assert [msgspec.json.decode(row["amounts"]) for row in rows] == [
        {GPU: 1000, "cpu": 9000, "nodes": 141}, {GPU: 8000, "cpu": 64000, "nodes": 1000},
    ]  # fmt: skip
    assert all(row["started_at"] >= before and not row["started_at"].microsecond for row in rows)
    steps = await db.fetch("SELECT username, resource, class, delta FROM usage_step")
    assert {tuple(row) for row in steps if row["username"] == ""} == {
        ("", GPU, "h100", 9000), ("", "cpu", "", 73000), ("", "nodes", "", 1141),
    }  # fmt: skip
    assert sum(row["delta"] for row in steps if row["username"]) == 9000 + 73000 + 1141
