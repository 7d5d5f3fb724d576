"""The command that stops work whose lease is over and was not extended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from bursar.commands.command import Result
from bursar.commands.objects.object import conflict, not_found
from bursar.commands.scheduling.evict import Evict, not_placed
from bursar.commands.workloads.allocation import PLACED, phase_of
from bursar.commands.workloads.stop import stop, stop_members
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Grant
from bursar.core.values.refusal import Refusal

CREDIT_EXHAUSTED = "CreditExhausted"
LEASE_EXPIRED = "LeaseExpired"
GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnpaid(Evict):
    """Stop work that is no longer paid for. Without credit it is not requeued."""

    requeue: bool = False

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.uid != self.uid or before.gang != self.gang:
            return conflict(self.key, "it was deleted and created again")
        if phase_of(before) not in PLACED:
            return not_placed(before)
        stop_id = batch.new_uid("preempt")
        written = stop(batch, before, self.notice, stop_id, self.origin, requeue=self.requeue)
        for gang in self.gangs():
            stop_members(batch, gang, self.notice, stop_id, self.origin, requeue=self.requeue)
        return written


def is_over(grant: Grant | Refusal) -> TypeGuard[Grant]:
    return isinstance(grant, Grant) and grant.final and grant.micros <= 0
