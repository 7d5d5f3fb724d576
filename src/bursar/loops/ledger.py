"""Ledger duties: seal, roll up, verify, create partitions and drop old entries.

Any number of controllers may run this: one seals, one verifies and one drops at a time. The settings decide the
intervals, and are read each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from bursar.ops.credit.credit import load_credit_policy
from bursar.ops.credit.ledger_verify import review
from bursar.ops.credit.seal import create_partitions, drop_lines, seal
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY, RACES, TooSlow

log = structlog.get_logger()

PARTITION_SECONDS = 5.0
REVIEW_SECONDS = 60.0
DROP_SECONDS = 600.0
AGAIN_SECONDS = 5.0  # after a failure


async def run_ledger(runtime: Runtime) -> None:
    """Run each duty forever at its own interval; wait while the database is away."""
    await asyncio.gather(
        _repeat("seal", lambda: seal_once(runtime)),
        _repeat("partitions", lambda: _ensure_partitions(runtime)),
        _repeat("verify", lambda: _review(runtime)),
        _repeat("drop", lambda: _drop(runtime)),
    )


async def _repeat(duty: str, do: Callable[[], Awaitable[float]]) -> None:
    """Run a duty forever; it returns the seconds until its next run."""
    while True:
        try:
            seconds = await do()
        except TooSlow as error:
            # Retrying alone does not help: an operator must know.
            log.error("ledger_duty_slow", message="a duty on the ledger takes too long", duty=duty, error=str(error))
            seconds = AGAIN_SECONDS
        except (*AWAY, *RACES) as error:
            log.info("ledger_waits", message="duties on the ledger wait for the database", duty=duty, error=repr(error))
            seconds = AGAIN_SECONDS
        except Exception:
            log.exception("ledger_duty_failed", message="a duty on the ledger failed and is tried again", duty=duty)
            seconds = AGAIN_SECONDS
        await asyncio.sleep(seconds)


async def seal_once(runtime: Runtime) -> float:
    policy = await load_credit_policy(runtime)
    await seal(runtime)
    return policy.seal_seconds


async def _ensure_partitions(runtime: Runtime) -> float:
    await create_partitions(runtime)
    return PARTITION_SECONDS


async def _review(runtime: Runtime) -> float:
    await review(runtime, seconds=REVIEW_SECONDS / 2)
    return REVIEW_SECONDS


async def _drop(runtime: Runtime) -> float:
    policy = await load_credit_policy(runtime)
    await drop_lines(runtime, policy.entry_days, seconds=DROP_SECONDS / 2)
    return DROP_SECONDS
