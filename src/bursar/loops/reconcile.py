"""Reconciliation: compare ended leases with their usage events, after late events have arrived. Any number of
controllers may run it: of two at the same lease, the second finds it done."""

from __future__ import annotations

import asyncio

import structlog

from bursar.core.values.money import MICROS
from bursar.ops.credit.credit import load_credit_policy
from bursar.ops.credit.reconcile import GAP_MICROS, Reconcile, Reconciled, forget_drift, reconcile, tell
from bursar.ops.credit.usage_events import forget_events
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.runtime.transaction import Transactor
from bursar.store.credit import reconcile as store
from bursar.store.db.database import AWAY

log = structlog.get_logger()

PAUSE_SECONDS = 2.0
FORGET_SECONDS = 3600.0
BATCH = 128

Reconciler = Transactor[Reconcile, Reconciled | None]


def reconciler(runtime: Runtime) -> Reconciler:
    return Transactor("reconciling", runtime.database, reconcile)


async def run_reconcile(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    runner = reconciler(runtime)
    forgotten_at = -FORGET_SECONDS
    try:
        while True:
            try:
                await reconcile_due(runtime, runner)
                if (now := asyncio.get_running_loop().time()) - forgotten_at > FORGET_SECONDS:
                    forgotten_at = now
                    await forget_events(runtime)
                    await forget_drift(runtime)
            except AWAY as error:
                log.info("reconcile_waits", message="reconciliation waits for the database", error=repr(error))
            except Exception:
                log.exception("reconcile_failed", message="reconciliation failed and is tried again")
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        await runner.close()


async def reconcile_due(runtime: Runtime, runner: Reconciler) -> list[Reconciled]:
    """Reconcile all leases that are due."""
    policy = await load_credit_policy(runtime)
    wait = policy.reconcile_seconds * MICROS
    done: list[Reconciled] = []
    while True:
        async with runtime.database.reader() as db:
            due = await store.load_due(db, wait, wait + GAP_MICROS, BATCH)
        if not due:
            return done
        some = await _isolated(runner, [Reconcile(one, policy) for one in due])
        new = [one for one in some if one is not None]
        tell(new, policy)
        done += new
        if not new:
            return done  # other controllers were faster, or it is impossible


async def _isolated(runner: Reconciler, commands: list[Reconcile]) -> list[Reconciled | None]:
    """Run a batch; if it fails, run its halves, so that one failing lease does not block the others."""
    try:
        return list(await runner.run(commands))
    except AWAY:
        raise
    except Exception:
        if len(commands) == 1:
            log.exception(
                "lease_not_reconciled", message="an ended lease could not be reconciled", lease=commands[0].ended.lease
            )
            return [None]
    middle = len(commands) // 2
    return await _isolated(runner, commands[:middle]) + await _isolated(runner, commands[middle:])
