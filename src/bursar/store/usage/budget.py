"""Remaining budgets of tenants, as last read from their external sources."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import NamedTuple

from bursar.core.usage.external_budget import Remaining
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("usage/budget")


class SourceState(NamedTuple):
    name: str
    answers: bool
    fault: str


async def claim(db: Connection, source: str, seconds: float) -> datetime | None:
    """Take the reading that is due, of which there is one in so many seconds: from when it is; None: another has it."""
    at: datetime | None = await db.fetchval(SQL.claim, source, seconds)
    return at


async def save(
    db: Connection, source: str, at: datetime, figures: Mapping[str, Remaining], fresh_seconds: float
) -> None:
    """All that a source says, as it was asked at that time; it counts for so long from then."""
    said = list(figures.values())
    gpu_hours, node_hours = [one.gpu_hours for one in said], [one.node_hours for one in said]
    await db.execute(SQL.save, source, at, fresh_seconds, list(figures), gpu_hours, node_hours)


async def withdraw(db: Connection, source: str, at: datetime, fault: str) -> None:
    """It was asked at that time and did not answer: what it said before does not count any more."""
    await db.execute(SQL.withdraw, source, at, fault)


async def load_remaining(db: Connection, tenants: Collection[str] | None = None) -> dict[str, Remaining]:
    """The valid remaining budgets, by tenant: of these, or of all."""
    rows = await db.fetch(SQL.remaining, None if tenants is None else list(tenants))
    return {row["tenant"]: Remaining(row["gpu_hours"], row["node_hours"], row["source"]) for row in rows}


async def load_sources(db: Connection) -> list[SourceState]:
    return [SourceState(*row) for row in await db.fetch(SQL.sources)]
