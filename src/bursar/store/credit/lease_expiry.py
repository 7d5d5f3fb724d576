"""Expiry of leases that are no longer extended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/lease_expiry")


class PaidTime(NamedTuple):
    """Until when an open lease is paid, and when it is over; None for one that is still to begin."""

    lease: int
    paid_until: int
    over_at: int | None


async def load_standing(
    db: Connection, freeze_micros: int, leases: Sequence[int], after: int, limit: int
) -> list[PaidTime]:
    """Of these leases and of at most `limit` after a number, those that are open. What spends too fast may be frozen
    so long."""
    return [PaidTime(*row) for row in await db.fetch(SQL.look, freeze_micros, leases, after, limit)]
