"""Remaining budgets of tenants, as last read from external sources."""

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
    """Claim the periodic reading of a source; return its time, or None if another process has claimed it."""
    at: datetime | None = await db.fetchval(SQL.claim, source, seconds)
    return at


async def save(
    db: Connection, source: str, at: datetime, figures: Mapping[str, Remaining], fresh_seconds: float
) -> None:
    """Save all budgets of a source as of the time of the request; they expire after `fresh_seconds`."""
    said = list(figures.values())
    gpu_hours, node_hours = [one.gpu_hours for one in said], [one.node_hours for one in said]
    await db.execute(SQL.save, source, at, fresh_seconds, list(figures), gpu_hours, node_hours)


async def withdraw(db: Connection, source: str, at: datetime, fault: str) -> None:
    """Invalidate the budgets of a source that did not answer a request at that time."""
    await db.execute(SQL.withdraw, source, at, fault)


async def load_remaining(db: Connection, tenants: Collection[str] | None = None) -> dict[str, Remaining]:
    """Load valid remaining budgets by tenant, of these tenants (None: of all)."""
    rows = await db.fetch(SQL.remaining, None if tenants is None else list(tenants))
    return {row["tenant"]: Remaining(row["gpu_hours"], row["node_hours"], row["source"]) for row in rows}


async def load_sources(db: Connection) -> list[SourceState]:
    return [SourceState(*row) for row in await db.fetch(SQL.sources)]
