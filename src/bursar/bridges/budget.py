"""Reads what is left of tenants' budgets from whoever keeps them, and keeps it where the scheduler finds it.

The scheduler never waits for this. It reads what is stored, which counts for a few readings; a source that does not
answer is withdrawn at once, and hours are counted here again. Any number of processes may do it: one reads at a time.
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
    """The source cannot say now; the message says why, without secrets."""


class BudgetSource(Protocol):
    """Whoever keeps budgets."""

    @property
    def name(self) -> str: ...

    async def remaining_budgets(self) -> Mapping[str, Remaining]:
        """What is left, by tenant, of all tenants that it keeps budgets of. Raises SourceAway."""


@dataclass(frozen=True, slots=True)
class ReadPace:
    """How often a source is read, and how long what it said counts when nobody reads it any more."""

    poll_seconds: float = POLL_SECONDS_DEFAULT
    again_seconds: float = 1.0  # before a failed try is repeated
    fresh_polls: float = 3.0

    @property
    def fresh_seconds(self) -> float:
        return self.poll_seconds * self.fresh_polls


async def read_once(database: Database, source: BudgetSource, pace: ReadPace) -> bool:
    """Whether the source was read now, by us, and answered. A reading is over before the next one is due."""
    async with database.reader() as db:
        at = await store.claim(db, source.name, pace.poll_seconds)
    if at is None:
        return False
    try:
        async with asyncio.timeout(pace.poll_seconds):
            figures = await _ask(source, pace)
    except (SourceAway, TimeoutError) as error:
        fault = str(error)[:FAULT_CHARS_MAX] or f"no answer within {pace.poll_seconds:g} s"
        log.warning("budgets are counted here: their source does not answer", source=source.name, fault=fault)
        async with database.reader() as db:
            await store.withdraw(db, source.name, at, fault)
        return False
    async with database.reader() as db:
        await store.save(db, source.name, at, figures, pace.fresh_seconds)
    return True


async def _ask(source: BudgetSource, pace: ReadPace) -> Mapping[str, Remaining]:
    """One lost packet is no reason to count otherwise: a failed try is repeated, once."""
    try:
        return await source.remaining_budgets()
    except SourceAway:
        await asyncio.sleep(pace.again_seconds)
        return await source.remaining_budgets()


async def run_budget_source(database: Database, source: BudgetSource, pace: ReadPace) -> None:
    """For ever. A database that is away is waited for."""
    while True:
        try:
            await read_once(database, source, pace)
        except AWAY as error:
            log.info("budgets wait for the database", source=source.name, error=repr(error))
        except Exception:
            log.exception("reading budgets failed", source=source.name)
        # Somebody else may have the reading that is due: look again before the next one is.
        await asyncio.sleep(pace.poll_seconds / 4)
