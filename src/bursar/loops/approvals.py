"""The times of approvals: undecided requests expire, requesters are notified before an approval ends, and it ends.

Any number of processes may run this, and any may be killed meanwhile: what is due is read from the database each time,
by an index, and each object is one transaction that is decided again under its lock.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import structlog

from bursar.core.objects.object import Key
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.approval.decide import run_timer
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY
from bursar.store.objects import approval as store
from bursar.store.objects.approval import Due

log = structlog.get_logger()

# A time that is set meanwhile is found after this at the latest.
PAUSE_SECONDS = 2.0
AT_ONCE = 64
# An object that failed is tried again after this, so that it does not delay the others.
TROUBLE_SECONDS = 30.0
PASSING: tuple[type[Exception], ...] = (*AWAY, Overloaded)

_FIRST = Due("", Key("", "", ""))

Failed = dict[Key, datetime]  # when to try objects again that failed


async def run_approvals(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    failed: Failed = {}
    while True:
        seconds = PAUSE_SECONDS
        try:
            seconds = await keep_times(runtime, failed)
        except PASSING as error:
            log.info("approvals_wait", message="the times of approvals wait for the database", error=repr(error))
        except Exception:
            log.exception("approvals_failed", message="the times of approvals failed and are tried again")
        await asyncio.sleep(seconds)


async def keep_times(runtime: Runtime, failed: Failed) -> float:
    """Do all that is due now; return the seconds until something is due next."""
    at, after = now(), _FIRST
    for key in [key for key, again in failed.items() if again <= at]:
        del failed[key]
    while True:
        async with runtime.database.reader() as db:
            page = await store.list_due(db, timestamp(at), after, AT_ONCE)
        await asyncio.gather(*(_run(runtime, one.key, failed) for one in page if one.key not in failed))
        if len(page) < AT_ONCE:
            break
        after = page[-1]
    async with runtime.database.reader() as db:
        following = await store.find_next_due(db, timestamp(at))
    if not following:
        return PAUSE_SECONDS
    return min(PAUSE_SECONDS, max(0.0, (datetime.fromisoformat(following) - now()).total_seconds()))


async def _run(runtime: Runtime, key: Key, failed: Failed) -> None:
    try:
        reply = await run_timer(runtime, key)
    except PASSING:
        raise
    except Exception:
        log.exception(
            "approval_time_failed",
            message="what is due for an approval could not be done, and is tried again later",
            kind=key.kind, namespace=key.namespace, name=key.name,
        )  # fmt: skip
        failed[key] = now() + timedelta(seconds=TROUBLE_SECONDS)
        return
    if isinstance(reply, Refusal) and reply.code is not Code.NOT_FOUND:
        log.info(
            "approval_time_refused",
            message="what is due for an approval was refused, and is tried again",
            kind=key.kind, namespace=key.namespace, name=key.name, error=reply.message,
        )  # fmt: skip
