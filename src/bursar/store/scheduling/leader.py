"""The leader's row: holder, fencing token, and the end of its term."""

from __future__ import annotations

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("scheduling/leader")


async def renew(db: Connection, holder: str, seconds: float) -> int | None:
    """Renew the holder's term; return its fence, or None if the term belongs to another holder or is over."""
    fence: int | None = await db.fetchval(SQL.renew, holder, seconds)
    return fence


async def take(db: Connection, holder: str, seconds: float) -> int | None:
    """Begin a term with a new fence if the last term is over. Waits for binds that hold the old fence."""
    fence: int | None = await db.fetchval(SQL.take, holder, seconds)
    return fence


async def resign(db: Connection, holder: str) -> bool:
    """End the holder's term; return whether it had one."""
    return await db.fetchval(SQL.resign, holder) is not None


async def lock(db: Connection) -> int:
    """Block takeovers, but not renewals, until the transaction ends; return the current fence."""
    return int(await db.fetchval(SQL.lock))


async def lock_with_tree(db: Connection) -> tuple[int, int]:
    """Block takeovers and take the tree's shared lock; return the fence and the tree's version."""
    row = await db.fetchrow(SQL.lock_with_tree)
    return row["fence"], row["version"]
