"""Partitions of usage records: one per month, created in advance and dropped after their retention."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise

import asyncpg

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("usage/usage_records")

MONTHS_AHEAD = 2
_MONTH = re.compile(r"usage_record_(\d{4})_(\d{2})")


async def ensure_partitions(db: Connection, now: datetime) -> None:
    """Create the partitions of this month and the next ones in advance."""
    there = {row["name"] for row in await db.fetch(SQL.partitions)}
    for begin, end in _months(now, MONTHS_AHEAD):
        name = f"usage_record_{begin:%Y_%m}"
        if name not in there:
            try:
                await _add_partition(db, name, begin, end)
            except (asyncpg.DuplicateTableError, asyncpg.UniqueViolationError):
                continue  # another process created it first


async def _add_partition(db: Connection, name: str, begin: datetime, end: datetime) -> None:
    """Create a partition; records of its month that arrived before it existed are moved into it."""
    bounds = f"FROM ('{begin.isoformat()}') TO ('{end.isoformat()}')"
    if not await db.fetchval(SQL.has_strays, begin, end):
        await db.execute(f"CREATE TABLE {name} PARTITION OF usage_record FOR VALUES {bounds}")
        return
    async with db.transaction():
        await db.execute(SQL.lock_all)
        await db.execute(SQL.add_stray)
        await db.execute(SQL.take_strays, begin, end)
        await db.execute(f"CREATE TABLE {name} PARTITION OF usage_record FOR VALUES {bounds}")
        await db.execute(SQL.put_strays)


def _months(now: datetime, ahead: int) -> list[tuple[datetime, datetime]]:
    begins = [
        datetime(now.year + (now.month - 1 + one) // 12, (now.month - 1 + one) % 12 + 1, 1, tzinfo=UTC)
        for one in range(ahead + 2)
    ]
    return list(pairwise(begins))


async def drop_records(db: Connection, before: datetime) -> list[str]:
    """Drop the months wholly before a time. The beginning of the remaining records is saved first."""
    dropped: list[str] = []
    for row in await db.fetch(SQL.partitions):
        found = _MONTH.fullmatch(row["name"])
        if found is None:
            continue
        ((_, end),) = _months(datetime(int(found[1]), int(found[2]), 1, tzinfo=UTC), 0)
        if end <= before:
            await db.execute(SQL.raise_records_from, end)
            await db.execute(f"DROP TABLE IF EXISTS {row['name']}")
            dropped.append(row["name"])
    return dropped
