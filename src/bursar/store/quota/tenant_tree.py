"""The tree's lock, and the objects that the tree is built from."""

from __future__ import annotations

from typing import NamedTuple

from bursar.core.objects.object import Key
from bursar.core.quota.tenant_tree import TreeChange
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("quota/tenant_tree")

ERA_VERSIONS = 1_000_000_000


class TreePosition(NamedTuple):
    version: int
    revision: int
    floor: int


async def lock_shared(db: Connection) -> int:
    """Take the tree's shared lock; return its version."""
    return int(await db.fetchval(SQL.lock_shared))


async def lock_exclusive(db: Connection) -> int:
    """Take the tree's exclusive lock, to change it. With row locks, sharers could overtake a waiter for ever; table
    locks queue."""
    await db.execute(SQL.lock_exclusive_table)
    position = await db.fetchrow(SQL.version)
    version: int = position["version"]
    return version


def era_of(version: int) -> int:
    """Return the era of a version of the tree: 0 if the database was never restored."""
    return version // ERA_VERSIONS


async def begin_era(db: Connection) -> None:
    """Begin a new era after a restore, before any other work, so that epochs issued since the backup are not issued
    again."""
    await db.execute(SQL.begin_era)


async def bump(db: Connection) -> None:
    await db.fetchval(SQL.bump)


async def load_position(db: Connection) -> TreePosition:
    row = await db.fetchrow(SQL.version)
    return TreePosition(row["version"], row["revision"], row["floor"])


async def load_all(db: Connection) -> list[TreeChange]:
    rows = await db.fetch(SQL.objects)
    return [TreeChange(Key(row["kind"], row["namespace"], row["name"]), False, row["doc"]) for row in rows]


async def load_since(db: Connection, revision: int) -> list[TreeChange]:
    rows = await db.fetch(SQL.changes_since, revision)
    return [
        TreeChange(
            Key(row["kind"], row["namespace"], row["name"]), row["type"] == "DELETED", row["doc"], row["revision"]
        )
        for row in rows
    ]


async def load_ended(db: Connection) -> list[tuple[str, int]]:
    """List deleted tenants by name with the revision of the deletion, in order. A deletion that the feed no longer
    contains is older than all its changes."""
    return [(row["name"], row["revision"]) for row in await db.fetch(SQL.ended)]
