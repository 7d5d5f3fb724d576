"""Leases that nobody extends any more: they are ended, so that nothing is held for what has long stopped.

Any number of processes may do this: what is ended once is not found again. A lease must have been seen to be overdue
for as long as its work may take to die, by this process's own clock: should the database's jump, as when another takes
its place, those who are alive beat in the meantime.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from bursar.core.money import MICROS
from bursar.ops.billing import load_credit_policy
from bursar.ops.fence import load_patience
from bursar.ops.lane import Overloaded
from bursar.ops.lapse import lapse
from bursar.ops.office import Office
from bursar.store import lapse as store
from bursar.store.database import AWAY

log = structlog.get_logger()

PAUSE_SECONDS = 5.0
LAPSES_MAX = 1000  # at a time
PASSING: tuple[type[Exception], ...] = (*AWAY, Overloaded)


@dataclass(slots=True)
class Watch:
    """Which leases are overdue, by (number, paid until), and since when by our own clock."""

    since: dict[tuple[int, int], float] = field(default_factory=dict)

    def see(self, overdue: dict[int, int], at: float) -> None:
        self.since = {one: self.since.get(one, at) for one in overdue.items()}

    def due(self, at: float, seconds: float) -> dict[int, int]:
        """Those that were overdue for so long."""
        return dict([one for one, since in self.since.items() if at - since >= seconds][:LAPSES_MAX])


async def run_leases(office: Office) -> None:
    """For ever. A database that is away is waited for."""
    watch = Watch()
    while True:
        try:
            await end_lapsed(office, watch, asyncio.get_running_loop().time())
        except PASSING as error:
            log.info("lapsed leases wait", error=repr(error))
        except Exception:
            log.exception("ending lapsed leases failed")
        await asyncio.sleep(PAUSE_SECONDS)


async def end_lapsed(office: Office, watch: Watch, at: float) -> list[int]:
    """One look at all leases, at this moment of our own clock; those that were ended."""
    policy, patience = await load_credit_policy(office), await load_patience(office)
    async with office.database.reader() as db:
        overdue = await store.load_overdue(db, policy.throttle_seconds_max * MICROS)
    watch.see(overdue, at)
    if not (due := watch.due(at, patience.kill_grace_seconds + patience.clock_skew_seconds)):
        return []
    ended = await lapse(office, due)
    if ended:
        log.warning("leases were not extended, and have ended", count=len(ended))
    return ended
