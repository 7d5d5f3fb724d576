"""Counts of pending and of unfinished allocations by queue."""

from __future__ import annotations

from bursar.core.nodes.queue import InQueue
from bursar.core.objects.allocation import ENDED
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("scheduling/queue")


async def count_in(db: Connection, name: str) -> InQueue:
    """Count under an exclusive lock of the tree, which blocks submissions until the commit."""
    row = await db.fetchrow(SQL.count_in, name, sorted(ENDED))
    assert row is not None
    return InQueue(row["waiting"], row["placed"], row["jobs"])


async def count_waiting(db: Connection) -> tuple[dict[str, int], int]:
    """Count the pending allocations of each queue with a scan of all allocations; return also the revision of the
    count."""
    rows = await db.fetch(SQL.count_waiting)
    return {row["queue"]: row["depth"] for row in rows if row["depth"]}, rows[0]["revision"]
