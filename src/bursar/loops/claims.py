"""Claimed nodes that are paid for beforehand: their leases are extended, and those that nobody pays for are given back.

Any number of processes may do this, and any of them may be killed meanwhile: whatever is to be done is found in the
database each time, and doing it twice is harmless.
"""

from __future__ import annotations

import asyncio

import structlog

from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit.billing import load_credit_policy
from bursar.ops.credit.claim_billing import give_back, load_paid_claims, renew, see_to
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY

log = structlog.get_logger()

PAUSE_SECONDS = 5.0
PASSING: tuple[type[Exception], ...] = (*AWAY, Overloaded)


async def run_claims(runtime: Runtime) -> None:
    """For ever. A database that is away is waited for."""
    while True:
        try:
            await keep_claims(runtime)
        except PASSING as error:
            log.info("the leases of claimed nodes wait", error=repr(error))
        except Exception:
            log.exception("keeping claimed nodes paid for failed")
        await asyncio.sleep(PAUSE_SECONDS)


async def keep_claims(runtime: Runtime) -> list[str]:
    """One look at all that are paid for; the nodes that were given back."""
    claims, now = await load_paid_claims(runtime)
    if not claims:
        return []
    await renew(runtime, claims, now)
    policy = await load_credit_policy(runtime)
    # What was just paid, or refused, is read again: others may have done it.
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
            log.warning("a node that is not paid for could not be given back", node=one.node, why=reply.message)
        elif reply is not None and not isinstance(reply, Refusal):
            given_back.append(one.node)
            log.info("a claimed node is not paid for any more, and was given back", node=one.node)
    return given_back
