"""Entering hours: what began and ended since the last time is put into buckets, and what goes on at every hour.

Any number of controllers may run this: one enters at a time. Nothing waits for it: whoever asks for hours is told of
what is not entered yet as well.
"""

from __future__ import annotations

import asyncio

import structlog

from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import LEVELS_MAX, roll
from bursar.store.db.database import AWAY, RACES, Database, TooSlow

log = structlog.get_logger()

ROLL_SECONDS = 5.0
# Less than this can wait: more comes all the time, and to enter each step by itself would cost more than all at once.
FEW = LEVELS_MAX


async def run_hours(runtime: Runtime) -> None:
    """For ever. A database that is away is waited for."""
    while True:
        try:
            await catch_up(runtime.database)
        except TooSlow as error:
            # Waiting alone does not help: somebody must know what it is.
            log.error("entering hours is too slow", error=str(error))
        except (*AWAY, *RACES) as error:
            log.info("hours wait for the database", error=repr(error))
        except Exception:
            log.exception("entering hours failed")
        await asyncio.sleep(ROLL_SECONDS)


async def catch_up(database: Database) -> int:
    """Enter until little is left; in how many turns that was."""
    turns = 1
    while await roll(database) >= FEW:
        turns += 1
    return turns
