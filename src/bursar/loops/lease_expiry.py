"""Leases that nobody extends any more: they are ended, so that nothing is held for what has long stopped.

Any number of processes may do this: what is ended once is not found again. A lease must have been seen to be overdue
for as long as its work may take to die, by this process's own clock: should the database's jump, as when another takes
its place, those who are alive beat in the meantime.
"""

from __future__ import annotations

import asyncio

import structlog

from bursar.core.credit.lease_expiry import ExpiryWatch
from bursar.core.values.money import MICROS
from bursar.ops.credit.billing import load_credit_policy
from bursar.ops.credit.lease_expiry import lapse
from bursar.ops.nodes.fence import load_patience
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import lease_expiry as store
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import AWAY

log = structlog.get_logger()

PAUSE_SECONDS = 5.0
LAPSES_MAX = 1000  # at a time
YOUNG_MAX = 10_000  # new leases read at once
SLICES_MAX = 10  # in one look
PASSING: tuple[type[Exception], ...] = (*AWAY, Overloaded)


async def run_leases(runtime: Runtime) -> None:
    """For ever. A database that is away is waited for."""
    watch = ExpiryWatch()
    while True:
        try:
            await end_lapsed(runtime, watch, asyncio.get_running_loop().time())
        except PASSING as error:
            log.info("lapsed leases wait", error=repr(error))
        except Exception:
            log.exception("ending lapsed leases failed")
        await asyncio.sleep(PAUSE_SECONDS)


async def end_lapsed(runtime: Runtime, watch: ExpiryWatch, at: float) -> list[int]:
    """One look at the leases that may be over, at this moment of our own clock; those that were ended."""
    policy, patience = await load_credit_policy(runtime), await load_patience(runtime)
    try:
        await _look(runtime, watch, at, policy.throttle_seconds_max * MICROS)
    except BaseException:
        watch.restart(at)  # What was taken was not seen.
        raise
    if not (due := watch.due(at, patience.kill_grace_seconds + patience.clock_skew_seconds, LAPSES_MAX)):
        return []
    decided = await lapse(runtime, due)
    watch.settled((lease, due[lease]) for lease in decided)
    ended = [lease for lease, was_ended in decided.items() if was_ended]
    if ended:
        log.warning("leases were not extended, and have ended", count=len(ended))
    return ended


async def _look(runtime: Runtime, watch: ExpiryWatch, at: float, freeze_micros: int) -> None:
    async with runtime.database.reader() as db:
        now = await ledger_store.load_now(db)
        watch.heed(at, now)
        asked = watch.take(at, now)
        for _ in range(SLICES_MAX):
            before = watch.newest
            found = await store.load_standing(db, freeze_micros, asked, before, YOUNG_MAX)
            watch.see(asked, found, at, now)
            if sum(one.lease > before for one in found) < YOUNG_MAX:
                return
            asked = []
