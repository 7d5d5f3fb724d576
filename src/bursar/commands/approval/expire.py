"""The times of approvals: undecided requests expire, requesters are notified before an approval ends, and it ends.

Each is one transaction, decided under the object's lock from its stored approval. So a time that has passed takes
effect once, however many controllers see it and whenever one is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.approval.decide import approval_in_of, refused
from bursar.commands.approval.news import (
    ended_news,
    ended_text,
    ending_news,
    put_quietly,
    put_with_news,
    undecided_news,
)
from bursar.commands.command import Command, Result
from bursar.commands.objects.gate import approval_of, awaits_approval, decoded, with_approval
from bursar.commands.objects.object import conflict, not_found
from bursar.commands.objects.status import status_of, unchanged
from bursar.commands.workloads.allocation import GRACE_SECONDS, leave_gang, with_status
from bursar.commands.workloads.job import MANY, CancelJobCommand, group_of
from bursar.commands.workloads.job_status import member_key, progress_in
from bursar.commands.workloads.stop import with_stop_notice
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.approval import (
    DUE_FIELD,
    Approval,
    ApprovalReason,
    ApprovalState,
    OnEnd,
    ended,
    expired,
    notices_before,
)
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.objects.event_text import RequestEvent, request_why
from bursar.core.objects.job import JOB_ENDED, JobPhase, open_turns
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.quota import Move
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import is_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalTimer(Command):
    """Do what is due for an approval at the time of the batch."""

    gang: str = ""

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return [(key.namespace, batch.objects[key].charge) for key in self.objects() if key in batch.objects] + [
            (one.key.namespace, one.charge) for gang in self.gangs() for one in batch.members(*gang)
        ]

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.gang != self.gang:
            return conflict(self.key, "it was deleted and created again")
        approval, now = approval_of(before), timestamp(batch.now)
        if approval is None or not (due := before.fields.get(DUE_FIELD, "")) or due > now:
            return unchanged(before)
        request = approval.open
        if request is not None and request.pending_until and request.pending_until <= now:
            return self._undecided(batch, before, approval, request)
        if approval.state is not ApprovalState.APPROVED or not approval.until:
            return unchanged(before)
        if approval.until > now:
            return self._notify(batch, before, approval)
        return self._end(batch, before, approval)

    def _undecided(self, batch: UnitOfWork, before: Stored, approval: Approval, request: Approval) -> Result:
        """Expire a request that nobody decided: an object, its growth, or a gang as a set."""
        after = expired(request, ApprovalReason.UNDECIDED, batch.now)
        news = undecided_news(request, growth=request is not approval)
        for one in self._others(batch) if request is approval else ():
            own = expired(approval_in_of(one), ApprovalReason.UNDECIDED, batch.now)
            put_with_news(batch, refused(batch, one, approval_in_of(one), own, news.message), news, self.origin)
        return put_with_news(batch, refused(batch, before, approval, after, news.message), news, self.origin)

    def _others(self, batch: UnitOfWork) -> list[Stored]:
        """The other members of the gang that await approval: without this one it would never be complete."""
        members = (one for gang in self.gangs() for one in batch.members(*gang))
        return [one for one in members if one.key != self.key and awaits_approval(one)]

    def _notify(self, batch: UnitOfWork, before: Stored, approval: Approval) -> Result:
        """Notify the requester that the approval ends soon: once, however many notices are due by now."""
        passed = notices_before(approval.until, timestamp(batch.now))
        after = replace(approval, notified=max(passed, approval.notified + 1))
        put = put_quietly if is_ending(before.doc) else put_with_news
        return put(batch, with_approval(before, after), ending_news(after), self.origin)

    def _end(self, batch: UnitOfWork, before: Stored, approval: Approval) -> Result:
        """End the approval. An object that is being deleted keeps its charge until it is gone."""
        after = ended(approval, batch.now)
        if is_ending(before.doc):
            return put_quietly(batch, with_approval(before, after), ended_news(after), self.origin)
        if approval.on_end is not OnEnd.RELEASE:
            return put_with_news(batch, with_approval(before, after), ended_news(after), self.origin)
        released = self._released(batch, before, after)
        if isinstance(released, Refusal):
            return released
        return put_with_news(batch, released, ended_news(after), self.origin)

    def _released(self, batch: UnitOfWork, before: Stored, after: Approval) -> Stored | Refusal:
        """The object after it was released: placed work is being stopped, everything else holds nothing any more."""
        kind = BY_NAME[before.key.kind]
        if kind.placed and batch.placements.get(before.uid):
            return with_approval(_stopped(batch, before, after, self.origin), after)
        batch.counters.move([Move(before.key.namespace, before.charge)])
        leave_gang(batch, before)
        status = status_of(before)
        for name in kind.granted({}):
            status.pop(name, None)
        status |= kind.refused(EvictionReason.APPROVAL_ENDED, ended_text(after), timestamp(batch.now))
        released = replace(before, charge=NOTHING, fields=kind.fields(decoded(kind, before, status)))
        return with_approval(released, after, status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimer(ApprovalTimer):
    """Do what is due for the approval of a job, of which version `expected` was read. At its end the job is cancelled
    with its grace period, in the same transaction."""

    expected: int
    members: tuple[Key, ...] = ()
    members_gang: str = ""

    @property
    def many(self) -> bool:
        return len(self.members) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *self.members)

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.members_gang): 0} if self.members_gang else {}

    def _others(self, _: UnitOfWork) -> list[Stored]:
        return []  # A job is decided alone, before its allocations exist.

    def _released(self, batch: UnitOfWork, before: Stored, after: Approval) -> Stored | Refusal:
        phase = progress_in(before).phase
        if phase is JobPhase.CANCELLING or phase in JOB_ENDED:
            return with_approval(before, after)  # It is being stopped already.
        if before.revision != self.expected:
            return conflict(self.key)
        words = ended_text(after)
        cancel = CancelJobCommand(
            key=self.key, origin=Origin(self.origin.actor, self.origin.verb, request_why(RequestEvent.ENDED, words)),
            expected=self.expected, members=self.members, gang=self.members_gang, tenant=before.tenant, reason=words,
            why=EvictionReason.APPROVAL_ENDED, message=words,
        )  # fmt: skip
        cancelled = cancel.cancelled(batch, before)
        # If it is refused, all have ended, and the controller has not counted that yet.
        return with_approval(before if isinstance(cancelled, Refusal) else cancelled, after)


def job_timer(job: Stored, origin: Origin) -> JobTimer:
    """The command for a version of a job."""
    members = tuple(member_key(job.key, turn) for turn in open_turns(progress_in(job)))
    return JobTimer(key=job.key, origin=origin, expected=job.revision, members=members, members_gang=group_of(job))


def _stopped(batch: UnitOfWork, before: Stored, approval: Approval, origin: Origin) -> Stored:
    """Placed work with a stop notice. Work that is being evicted already is not requeued any more."""
    words = ended_text(approval)
    reason, rule = EvictionReason.APPROVAL_ENDED, EvictionRule.APPROVAL_ENDED
    notice = Notice(reason, rule, origin.actor, words, GRACE_SECONDS)
    after = with_stop_notice(batch, before, notice, batch.new_uid("evict"), requeue=False)
    status = status_of(after)
    if not status["eviction"]["requeue"]:
        return after
    status["eviction"] |= {"reason": reason, "rule": rule, "by": origin.actor, "message": words, "requeue": False}
    return with_status(after, status | {"reason": reason, "message": words})
