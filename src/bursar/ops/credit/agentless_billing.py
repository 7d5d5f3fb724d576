"""Billing of work on nodes without an agent: their heartbeats extend the leases of the work there.

Such a node knows no leases and cannot freeze work, so the control plane watches the time: when the paid time is over
and no more is granted, it stops the work as an eviction does.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from bursar.commands.credit.shortfall import ACTOR, granted_shortfall, note_of
from bursar.commands.credit.unpaid import CREDIT_EXHAUSTED, GRACE_SECONDS, LEASE_EXPIRED, EndUnpaid, is_over
from bursar.core.credit.lease import Grant
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Origin
from bursar.core.values.refusal import Refusal
from bursar.ops.credit.credit import note_shortfalls
from bursar.ops.credit.ledger import Extend, extend
from bursar.ops.runtime.lane import feed
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import agentless_billing as store
from bursar.store.credit.agentless_billing import PaidPlace

log = structlog.get_logger()


async def pay_on(runtime: Runtime, nodes: Sequence[str]) -> None:
    """Extend the leases of paid work on these nodes, which are alive, and stop work that is no longer paid for."""
    async with runtime.database.reader() as db:
        placed = await store.load_paid(db, nodes)
    if not placed:
        return
    paid = [one for one in placed if one.lease]
    grants = await extend(runtime, [Extend(one.lease, one.seq, one.phase != Phase.SCHEDULED) for one in paid])
    await _note(runtime, paid, grants)
    ends = [_end(one, grant.reason) for one, grant in zip(paid, grants, strict=True) if is_over(grant)]
    ends += [_end(one, "") for one in placed if not one.lease]
    replies = await feed(runtime.binding, ends)
    if ended := sum(not isinstance(one, Refusal) for one in replies):
        log.info("unpaid_work_stopped", message="work that is no longer paid for was asked to stop", count=ended)


async def _note(runtime: Runtime, paid: Sequence[PaidPlace], grants: Sequence[Grant | Refusal]) -> None:
    """Note leases that were refused more time, or are granted it again, if that is a change. A note that is not saved
    is repeated at the next heartbeat."""
    short = [
        (one, granted_shortfall(grant))
        for one, grant in zip(paid, grants, strict=True)
        if isinstance(grant, Grant) and not is_over(grant)
    ]
    news = [note_of(one.key, one.uid, one.node, one.epoch, now) for one, now in short if now != one.short]
    await note_shortfalls(runtime, news)


def _end(one: PaidPlace, reason: str) -> EndUnpaid:
    """Stop unpaid work: with a reason, its lease was refused more time; else it was closed while the node was away."""
    why = f"its paid time is over, and its lease was not extended: {reason}" if reason else "its lease is closed"
    notice = Notice(CREDIT_EXHAUSTED if reason else LEASE_EXPIRED, CREDIT_EXHAUSTED, ACTOR, why, GRACE_SECONDS)
    return EndUnpaid(
        key=one.key, uid=one.uid, gang=one.gang, notice=notice, requeue=not reason,
        origin=Origin(ACTOR, "end", reason or "fenced"),
    )  # fmt: skip
