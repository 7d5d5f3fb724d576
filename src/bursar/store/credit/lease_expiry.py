"""Expiry of leases that no heartbeat extends any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/lease_expiry")


class PaidTime(NamedTuple):
    """The time until which an open lease is paid, and the time when it expires (None: it has not begun)."""

    lease: int
    paid_until: int
    over_at: int | None


async def load_standing(
    db: Connection, freeze_micros: int, leases: Sequence[int], after: int, limit: int
) -> list[PaidTime]:
    """Load the open leases among `leases`, and those of the next `limit` leases by number. `freeze_micros` is how long
    a placement that exceeds its spend rate may stay frozen."""
    return [PaidTime(*row) for row in await db.fetch(SQL.look, freeze_micros, leases, after, limit)]
