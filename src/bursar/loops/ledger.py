"""Keeping the ledger: sealing, rolling up, verifying, making room and dropping what is old.

Any number of controllers may run this: one seals, one verifies and one drops at a time. How often is the settings' to
say, and is read each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from bursar.ops.credit.billing import load_credit_policy
from bursar.ops.credit.ledger_verify import review
from bursar.ops.credit.seal import drop_lines, free_capacity, seal
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY, RACES, TooSlow

log = structlog.get_logger()

ROOM_SECONDS = 5.0
REVIEW_SECONDS = 60.0
DROP_SECONDS = 600.0
AGAIN_SECONDS = 5.0  # after a failure


async def run_ledger(runtime: Runtime) -> None:
    """For ever: each duty at its own pace. A database that is away is waited for."""
    await asyncio.gather(
        _repeat("seal", lambda: seal_once(runtime)),
        _repeat("partitions", lambda: _free_capacity(runtime)),
        _repeat("verify", lambda: _review(runtime)),
        _repeat("drop", lambda: _drop(runtime)),
    )


async def _repeat(duty: str, do: Callable[[], Awaitable[float]]) -> None:
    """Each time `do` says for how many seconds there is nothing to do."""
    while True:
        try:
            seconds = await do()
        except TooSlow as error:
            # Waiting alone does not help: somebody must know what it is.
            log.error("keeping the ledger is too slow", duty=duty, error=str(error))
            seconds = AGAIN_SECONDS
        except (*AWAY, *RACES) as error:
            log.info("the ledger waits for the database", duty=duty, error=repr(error))
            seconds = AGAIN_SECONDS
        except Exception:
            log.exception("keeping the ledger failed", duty=duty)
            seconds = AGAIN_SECONDS
        await asyncio.sleep(seconds)


async def seal_once(runtime: Runtime) -> float:
    policy = await load_credit_policy(runtime)
    await seal(runtime)
    return policy.seal_seconds


async def _free_capacity(runtime: Runtime) -> float:
    await free_capacity(runtime)
    return ROOM_SECONDS


async def _review(runtime: Runtime) -> float:
    await review(runtime, seconds=REVIEW_SECONDS / 2)
    return REVIEW_SECONDS


async def _drop(runtime: Runtime) -> float:
    policy = await load_credit_policy(runtime)
    await drop_lines(runtime, policy.entry_days, seconds=DROP_SECONDS / 2)
    return DROP_SECONDS
