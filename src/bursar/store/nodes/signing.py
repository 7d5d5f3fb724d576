"""The keys that sign leases for nodes, and their validity."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/signing")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The private half is PEM."""

    id: str
    private_key: str = field(repr=False)
    created_at: datetime
    retired_at: datetime | None  # from when on it is not believed
    age_seconds: float


async def load_believed(db: Connection) -> list[KeyRecord]:
    """Oldest first: the last of them signs."""
    return [KeyRecord(**row) for row in await db.fetch(SQL.believed)]


async def lock(db: Connection) -> None:
    """Until the transaction ends, nobody else makes one."""
    await db.execute(SQL.lock_against_writers)


async def save(db: Connection, key_id: str, private_key: str, created_by: str) -> None:
    await db.execute(SQL.insert, key_id, private_key, created_by)


async def retire_others(db: Connection, key_id: str, overlap_seconds: float) -> None:
    """All but this one are believed for so long and no longer."""
    await db.execute(SQL.retire_others, key_id, overlap_seconds)


async def forget_retired(db: Connection) -> int:
    """How many were removed."""
    return affected(await db.execute(SQL.forget_retired))
