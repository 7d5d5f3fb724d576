"""Queues in the database: how much of what they hold has not ended."""

from __future__ import annotations

from bursar.core.allocation import ENDED
from bursar.core.queue import InQueue
from bursar.store.database import Connection
from bursar.store.statements import statements

SQL = statements("queue")


async def count_in(db: Connection, name: str) -> InQueue:
    """Whoever holds the tree alone counts what is there until they have committed: nobody submits meanwhile."""
    row = await db.fetchrow(SQL.count_in, name, sorted(ENDED))
    assert row is not None
    return InQueue(row["waiting"], row["placed"], row["jobs"])
