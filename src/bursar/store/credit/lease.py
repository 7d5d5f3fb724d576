"""Lists of leases, open and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bursar.core.credit.lease import Lease
from bursar.store.credit.ledger import load_ended, load_leases
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/lease")
NUMBER_MAX = 2**62


@dataclass(frozen=True, slots=True)
class LeaseScope:
    """A filter of leases: by account, by users of tenants (None: all), or by node."""

    account: int | None = None
    tenants: Sequence[str] | None = None
    users: Sequence[str] | None = None
    node: str = ""


async def list_open(db: Connection, scope: LeaseScope, *, job: str, after: int, limit: int) -> list[Lease]:
    """List open leases by number."""
    rows = await db.fetch(SQL.list_open, scope.account, scope.tenants, scope.users, scope.node, job, after, limit)
    ids = [row["id"] for row in rows]
    # A lease that was closed between the two statements is left out.
    found = await load_leases(db, ids)
    return [found[one] for one in ids if one in found]


async def list_ended(
    db: Connection, account: int, *, job: str, before: tuple[int, int] = (NUMBER_MAX, NUMBER_MAX), limit: int
) -> list[Lease]:
    """List ended leases, the latest first. `before` is the position of the previous page's last lease: the time when it
    was closed, and its number."""
    ids = [row["id"] for row in await db.fetch(SQL.list_ended, account, job, *before, limit)]
    found = await load_ended(db, ids)
    return [found[one] for one in ids]
