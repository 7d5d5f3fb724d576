"""Paying for what runs on nodes without an agent: their heartbeats extend its leases.

Such a node cannot be told how long its work is paid for, nor freeze it. So we keep the time ourselves: when paid time
is over and no more is granted, the work is told to end, as whoever is evicted is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import structlog

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Grant
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Origin
from bursar.core.values.refusal import Refusal
from bursar.ops.credit.ledger import Extend, extend
from bursar.ops.credit.shortfall import ACTOR, granted_shortfall, note_of, note_shortfalls
from bursar.ops.objects.object import conflict, not_found
from bursar.ops.runtime.command import Result
from bursar.ops.runtime.lane_plan import feed
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.evict import Evict, not_placed
from bursar.ops.workloads.allocation import PLACED, phase_of
from bursar.ops.workloads.stop import stop, stop_members
from bursar.store.credit import agentless_billing as store
from bursar.store.credit.agentless_billing import PaidPlace

log = structlog.get_logger()

CREDIT_EXHAUSTED = "CreditExhausted"
LEASE_EXPIRED = "LeaseExpired"
GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnpaid(Evict):
    """Tell what is not paid for any more to end. Who has no credit left does not wait again."""

    requeue: bool = False

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.uid != self.uid or before.gang != self.gang:
            return conflict(self.key, "it was deleted and created anew")
        if phase_of(before) not in PLACED:
            return not_placed(before)
        written = stop(batch, before, self.notice, self.id, self.origin, requeue=self.requeue)
        for gang in self.gangs():
            stop_members(batch, gang, self.notice, self.id, self.origin, requeue=self.requeue)
        return written


async def pay_on(runtime: Runtime, nodes: Sequence[str]) -> None:
    """These nodes are alive: extend what is paid for there, and end what is not any more."""
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
        log.info("work is not paid for any more, and was told to end", count=ended)


async def _note(runtime: Runtime, paid: Sequence[PaidPlace], grants: Sequence[Grant | Refusal]) -> None:
    """Note what is paid no further, and what is again, where that is news. A note that is not taken comes with the next
    beat."""
    short = [
        (one, granted_shortfall(grant))
        for one, grant in zip(paid, grants, strict=True)
        if isinstance(grant, Grant) and not is_over(grant)
    ]
    news = [note_of(one.key, one.uid, one.node, one.epoch, now) for one, now in short if now != one.short]
    await note_shortfalls(runtime, news)


def is_over(grant: Grant | Refusal) -> TypeGuard[Grant]:
    return isinstance(grant, Grant) and grant.final and grant.micros <= 0


def _end(one: PaidPlace, reason: str) -> EndUnpaid:
    """With a reason it was refused more time; else its lease was closed while its node was away."""
    why = f"its paid time is over, and no more was granted: {reason}" if reason else "its lease is closed"
    notice = Notice(CREDIT_EXHAUSTED if reason else LEASE_EXPIRED, CREDIT_EXHAUSTED, ACTOR, why, GRACE_SECONDS)
    return EndUnpaid(
        key=one.key, uid=one.uid, gang=one.gang, notice=notice, requeue=not reason,
        origin=Origin(ACTOR, "end", reason or "fenced"),
    )  # fmt: skip
