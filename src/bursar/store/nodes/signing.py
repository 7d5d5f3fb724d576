"""The keys that sign lease tokens for nodes, and their validity."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/signing")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A signing key; the private key is PEM."""

    id: str
    private_key: str = field(repr=False)
    created_at: datetime
    retired_at: datetime | None  # no longer valid from then on
    age_seconds: float


async def load_believed(db: Connection) -> list[KeyRecord]:
    """Load the valid keys, oldest first; the last one signs."""
    return [KeyRecord(**row) for row in await db.fetch(SQL.believed)]


async def lock(db: Connection) -> None:
    """Prevent concurrent creation of a key until the transaction ends."""
    await db.execute(SQL.lock_against_writers)


async def save(db: Connection, key_id: str, private_key: str, created_by: str) -> None:
    await db.execute(SQL.insert, key_id, private_key, created_by)


async def retire_others(db: Connection, key_id: str, overlap_seconds: float) -> None:
    """Limit the validity of all other keys to the overlap."""
    await db.execute(SQL.retire_others, key_id, overlap_seconds)


async def forget_retired(db: Connection) -> int:
    """Remove retired keys; return their number."""
    return affected(await db.execute(SQL.forget_retired))
