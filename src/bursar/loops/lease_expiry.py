"""Lease expiry: end leases that are no longer extended, so that no credit is held for work that has stopped.

Any number of processes may run this: an ended lease is not found again. A lease must have been seen overdue for as long
as its work may take to stop, by this process's own clock: if the database's clock jumps, as after a failover, live
nodes extend their leases in the meantime.
"""

from __future__ import annotations

import asyncio

import structlog

from bursar.core.credit.lease_expiry import ExpiryWatch
from bursar.core.values.money import MICROS
from bursar.ops.credit.credit import lapse, load_credit_policy
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
SLICES_MAX = 10  # per review
PASSING: tuple[type[Exception], ...] = (*AWAY, Overloaded)


async def run_leases(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    watch = ExpiryWatch()
    while True:
        try:
            await end_lapsed(runtime, watch, asyncio.get_running_loop().time())
        except PASSING as error:
            log.info("lease_expiry_waits", message="the expiry of leases waits for the database", error=repr(error))
        except Exception:
            log.exception("lease_expiry_failed", message="the expiry of leases failed and is tried again")
        await asyncio.sleep(PAUSE_SECONDS)


async def end_lapsed(runtime: Runtime, watch: ExpiryWatch, at: float) -> list[int]:
    """Review the leases that may have expired, at `at` by this process's clock; return the ended ones."""
    policy, patience = await load_credit_policy(runtime), await load_patience(runtime)
    try:
        await _look(runtime, watch, at, policy.throttle_seconds_max * MICROS)
    except BaseException:
        watch.restart(at)  # The leases taken from the watch were not reviewed.
        raise
    if not (due := watch.due(at, patience.kill_grace_seconds + patience.clock_skew_seconds, LAPSES_MAX)):
        return []
    decided = await lapse(runtime, due)
    watch.settled((lease, due[lease]) for lease in decided)
    ended = [lease for lease, was_ended in decided.items() if was_ended]
    if ended:
        log.warning("leases_expired", message="leases were not extended and have expired", count=len(ended))
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
