"""What commands read from their standard input, in the database: until they have ended, and nowhere else."""

from __future__ import annotations

from bursar.core.objects.object import Key
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/stdin")


async def save(db: Connection, key: Key, uid: str, data: bytes) -> bool:
    """Whether it is the first that was sent, to an allocation that is there."""
    return await db.fetchval(SQL.save, uid, data, key.namespace, key.name) is not None


async def is_there(db: Connection, uid: str) -> bool:
    return bool(await db.fetchval(SQL.is_there, uid))


async def forget(db: Connection) -> int:
    """Drop what nobody reads any more; how many were dropped."""
    return int((await db.execute(SQL.forget)).rpartition(" ")[2])
