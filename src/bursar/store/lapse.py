"""Leases that nobody extends any more, in the database."""

from __future__ import annotations

from bursar.store.database import Connection
from bursar.store.statements import statements

SQL = statements("lapse")


async def load_overdue(db: Connection, freeze_micros: int) -> dict[int, int]:
    """Open leases whose time is over, each with until when it is paid. What spends too fast may be frozen so long."""
    return {row["id"]: row["paid_until"] for row in await db.fetch(SQL.overdue, freeze_micros)}
