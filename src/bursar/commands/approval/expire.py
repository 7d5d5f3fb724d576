"""The times of approvals: undecided requests expire, requesters are notified before an approval ends, and it ends."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.commands.approval.decide import refused
from bursar.commands.command import Command, Result
from bursar.commands.objects.gate import approval_of, decoded, with_approval
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import status_of, unchanged
from bursar.commands.workloads.allocation import GRACE_SECONDS, PLACED, leave_gang, phase_of
from bursar.commands.workloads.stop import with_stop_notice
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import ENDED, GangKey
from bursar.core.objects.approval import Approval, ApprovalReason, OnEnd, expired, next_due
from bursar.core.objects.charge import NOTHING
from bursar.core.objects.object import Stored
from bursar.core.quota.quota import Move
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import is_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalTimer(Command):
    """Do what is due for an approval at the time of the batch."""

    gang: str = ""

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        approval, now = approval_of(before), timestamp(batch.now)
        if approval is None or is_ending(before.doc) or not (due := next_due(approval)) or due > now:
            return unchanged(before)
        request = approval.open
        if request is not None and request.pending_until and request.pending_until <= now:
            return self._undecided(batch, before, approval, request)
        if approval.until <= now:
            return batch.put(self._ended(batch, before, approval), self.origin)
        return batch.put(with_approval(before, replace(approval, notified=approval.notified + 1)), self.origin)

    def _undecided(self, batch: UnitOfWork, before: Stored, approval: Approval, request: Approval) -> Result:
        """Expire a request that nobody decided, or its growth."""
        return batch.put(
            refused(batch, before, approval, expired(request, ApprovalReason.UNDECIDED, batch.now)), self.origin
        )

    def _ended(self, batch: UnitOfWork, before: Stored, approval: Approval) -> Stored:
        """The object after its approval has ended: released, or with what it holds."""
        after = expired(approval, ApprovalReason.ENDED, batch.now)
        if approval.on_end is not OnEnd.RELEASE:
            return with_approval(before, after)
        kind = BY_NAME[before.key.kind]
        if kind.placed and phase_of(before) in ENDED:
            return with_approval(before, after)
        if kind.placed and phase_of(before) in PLACED:
            notice = Notice(
                EvictionReason.APPROVAL_ENDED, EvictionRule.APPROVAL_ENDED, self.origin.actor,
                f"its approval ended at {approval.until}", GRACE_SECONDS,
            )  # fmt: skip
            stopped = with_stop_notice(batch, before, notice, batch.new_uid("evict"), requeue=False)
            return with_approval(stopped, after)
        batch.counters.move([Move(before.key.namespace, before.charge)])
        leave_gang(batch, before)
        status = status_of(before)
        for name in kind.granted({}):
            status.pop(name, None)
        status |= kind.refused("ApprovalEnded", f"its approval ended at {approval.until}", timestamp(batch.now))
        released = replace(before, charge=NOTHING, fields=kind.fields(decoded(kind, before, status)))
        return with_approval(released, after, status)
