"""Reads the remaining budgets of tenants from an external source, and stores them for the scheduler.

The scheduler never waits for the source: it reads the stored figures, which are valid for a few polls. If the source
does not answer, its figures are withdrawn at once and Bursar counts the hours itself. Any number of processes may run
this; one reads at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from bursar.core.usage.external_budget import Remaining
from bursar.store.db.database import AWAY, Database
from bursar.store.usage import budget as store

log = structlog.get_logger()

POLL_SECONDS_DEFAULT = 20.0
FAULT_CHARS_MAX = 300


class SourceAway(Exception):
    """The source is unavailable; the message has the reason, without secrets."""


class BudgetSource(Protocol):
    """An external system that keeps budgets."""

    @property
    def name(self) -> str: ...

    async def remaining_budgets(self) -> Mapping[str, Remaining]:
        """The remaining budgets by tenant, for all tenants that it knows. Raises SourceAway."""


@dataclass(frozen=True, slots=True)
class ReadPace:
    """The poll interval of a source, and how long its figures stay valid without a new reading."""

    poll_seconds: float = POLL_SECONDS_DEFAULT
    again_seconds: float = 1.0  # before the retry of a failed reading
    fresh_polls: float = 3.0

    @property
    def fresh_seconds(self) -> float:
        return self.poll_seconds * self.fresh_polls


async def read_once(database: Database, source: BudgetSource, pace: ReadPace) -> bool:
    """Read the source if a reading is due and no other process does it. Returns whether it answered."""
    async with database.reader() as db:
        at = await store.claim(db, source.name, pace.poll_seconds)
    if at is None:
        return False
    try:
        async with asyncio.timeout(pace.poll_seconds):
            figures = await _ask(source, pace)
    except (SourceAway, TimeoutError) as error:
        fault = str(error)[:FAULT_CHARS_MAX] or f"no answer within {pace.poll_seconds:g} s"
        log.warning("budget_source_away", message="the source does not answer", source=source.name, fault=fault)
        async with database.reader() as db:
            await store.withdraw(db, source.name, at, fault)
        return False
    async with database.reader() as db:
        await store.save(db, source.name, at, figures, pace.fresh_seconds)
    return True


async def _ask(source: BudgetSource, pace: ReadPace) -> Mapping[str, Remaining]:
    """Ask the source, with one retry, so that a lost packet does not change who counts the hours."""
    try:
        return await source.remaining_budgets()
    except SourceAway:
        await asyncio.sleep(pace.again_seconds)
        return await source.remaining_budgets()


async def run_budget_source(database: Database, source: BudgetSource, pace: ReadPace) -> None:
    """Read the source for ever; wait while the database is away."""
    while True:
        try:
            await read_once(database, source, pace)
        except AWAY as error:
            log.info("budget_source_waits", message="no database", source=source.name, error=repr(error))
        except Exception:
            log.exception("budget_source_failed", message="reading budgets failed", source=source.name)
        # Another process may hold the due reading, so look more often than readings are due.
        await asyncio.sleep(pace.poll_seconds / 4)
