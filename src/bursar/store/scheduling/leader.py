"""The leader's row: holder, fencing token and end of its term."""

from __future__ import annotations

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("scheduling/leader")


async def renew(db: Connection, holder: str, seconds: float) -> int | None:
    """Begin the holder's term anew; its fence, or None where the term is another's, or over."""
    fence: int | None = await db.fetchval(SQL.renew, holder, seconds)
    return fence


async def take(db: Connection, holder: str, seconds: float) -> int | None:
    """Begin a term under a new fence, if the last one is over. Waits for binds that are checking the old fence."""
    fence: int | None = await db.fetchval(SQL.take, holder, seconds)
    return fence


async def resign(db: Connection, holder: str) -> bool:
    """End the holder's term; whether it had one."""
    return await db.fetchval(SQL.resign, holder) is not None


async def lock(db: Connection) -> int:
    """Hold off takeovers until the transaction ends, but not renewals; returns the fence that holds meanwhile."""
    return int(await db.fetchval(SQL.lock))


async def lock_with_tree(db: Connection) -> tuple[int, int]:
    """The same, and hold the tree still; the fence, and the tree's version."""
    row = await db.fetchrow(SQL.lock_with_tree)
    return row["fence"], row["version"]
