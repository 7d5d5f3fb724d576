"""Usage roll-up: add work that began, ended or continues to hourly and daily buckets.

Any number of controllers may run this: one rolls up at a time. Nothing waits for it: reports include usage that is not
rolled up yet.
"""

from __future__ import annotations

import asyncio

import structlog

from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import LEVELS_MAX, roll
from bursar.store.db.database import AWAY, RACES, Database, TooSlow

log = structlog.get_logger()

ROLL_SECONDS = 5.0
# Smaller rests wait for the next run: rolling up each step by itself would cost more than a batch.
FEW = LEVELS_MAX


async def run_usage_rollup(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    while True:
        try:
            await catch_up(runtime.database)
        except TooSlow as error:
            # Retrying alone does not help: an operator must know.
            log.error("rollup_slow", message="the roll-up of usage takes too long", error=str(error))
        except (*AWAY, *RACES) as error:
            log.info("rollup_waits", message="the roll-up of usage waits for the database", error=repr(error))
        except Exception:
            log.exception("rollup_failed", message="the roll-up of usage failed and is tried again")
        await asyncio.sleep(ROLL_SECONDS)


async def catch_up(database: Database) -> int:
    """Roll up until little is left; return the number of batches."""
    turns = 1
    while await roll(database) >= FEW:
        turns += 1
    return turns
