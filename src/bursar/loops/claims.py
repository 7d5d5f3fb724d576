"""Leases of claimed nodes: extend prepaid leases, and release nodes that are no longer paid for.

Any number of processes may run this, and any may be killed meanwhile: the work is read from the database each time, and
is idempotent.
"""

from __future__ import annotations

import asyncio

import structlog

from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit.claim_billing import give_back, load_paid_claims, renew, see_to
from bursar.ops.credit.credit import load_credit_policy
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY

log = structlog.get_logger()

PAUSE_SECONDS = 5.0
PASSING: tuple[type[Exception], ...] = (*AWAY, Overloaded)


async def run_claims(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    while True:
        try:
            await keep_claims(runtime)
        except PASSING as error:
            log.info("claims_wait", message="the leases of claimed nodes wait for the database", error=repr(error))
        except Exception:
            log.exception("claims_failed", message="extending the leases of claimed nodes failed and is tried again")
        await asyncio.sleep(PAUSE_SECONDS)


async def keep_claims(runtime: Runtime) -> list[str]:
    """Review all prepaid claims once; return the released nodes."""
    claims, now = await load_paid_claims(runtime)
    if not claims:
        return []
    await renew(runtime, claims, now)
    policy = await load_credit_policy(runtime)
    # Read again what was just paid or refused: another process may have done it.
    claims, now = await load_paid_claims(runtime)
    await see_to(runtime, claims, now, policy.throttle_seconds_max * MICROS)
    return await _end_unpaid(runtime)


async def _end_unpaid(runtime: Runtime) -> list[str]:
    claims, _ = await load_paid_claims(runtime)
    given_back = []
    for one in claims:
        if not one.claim.unpaid:
            continue
        reply = await give_back(runtime, one)
        if isinstance(reply, Refusal) and reply.code not in (Code.IN_USE, Code.STALE, Code.CONFLICT):
            log.warning(
                "claim_not_released",
                message="a claimed node that is no longer paid for could not be released",
                node=one.node,
                error=reply.message,
            )
        elif reply is not None and not isinstance(reply, Refusal):
            given_back.append(one.node)
            log.info("claim_released", message="a claimed node is no longer paid for and was released", node=one.node)
    return given_back
