"""Queues: numbers of pending and of unfinished allocations."""

from __future__ import annotations

from bursar.core.nodes.queue import InQueue
from bursar.core.objects.allocation import ENDED
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("scheduling/queue")


async def count_in(db: Connection, name: str) -> InQueue:
    """Count under an exclusive lock of the tree, so that nothing is submitted until the commit."""
    row = await db.fetchrow(SQL.count_in, name, sorted(ENDED))
    assert row is not None
    return InQueue(row["waiting"], row["placed"], row["jobs"])


async def count_waiting(db: Connection) -> tuple[dict[str, int], int]:
    """How many wait in each queue, and the revision up to which they are counted. All allocations are looked at."""
    rows = await db.fetch(SQL.count_waiting)
    return {row["queue"]: row["depth"] for row in rows if row["depth"]}, rows[0]["revision"]
