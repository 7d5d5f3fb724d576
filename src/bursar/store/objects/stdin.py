"""Standard input of commands, stored until the commands have ended."""

from __future__ import annotations

from bursar.core.objects.object import Key
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("objects/stdin")


async def save(db: Connection, key: Key, uid: str, data: bytes) -> bool:
    """Save the input of an existing allocation; return False if one was saved before, or the allocation is gone."""
    return await db.fetchval(SQL.save, uid, data, key.namespace, key.name) is not None


async def is_there(db: Connection, uid: str) -> bool:
    return bool(await db.fetchval(SQL.is_there, uid))


async def forget(db: Connection) -> int:
    """Drop input of ended or deleted allocations; return the number."""
    return affected(await db.execute(SQL.forget))
