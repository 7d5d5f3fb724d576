"""Commands on jobs: create, cancel, boost, delete. A job and its allocations change together, in one transaction.

The list of its allocations comes from a version of the job that was read without a lock, and is valid if the job still
has that version. The controller's command, StepJob, is in job_step.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import msgspec

from bursar.commands.command import Command, Result, weight_of_drafts
from bursar.commands.objects.gate import (
    awaits_approval,
    charged,
    gates_of,
    held_back,
    pending_charge,
    requesting,
    withdrawn,
)
from bursar.commands.objects.object import (
    NO_PRECONDITIONS,
    CreateObject,
    DeletePreconditions,
    ObjectDeletion,
    already_exists,
    conflict,
    gang_differs,
    not_found,
    permitted_by,
    sight_of,
    tenant_of,
)
from bursar.commands.objects.removal import marked, remove
from bursar.commands.objects.status import status_of, unchanged
from bursar.commands.workloads.allocation import GRACE_SECONDS, Release, phase_of
from bursar.commands.workloads.job_status import is_owned, member, member_key, progress_in, spec_in, with_progress
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import ENDED, Gang, GangKey, GangRow
from bursar.core.objects.charge import NOTHING, Charge, deferred, fallen_due
from bursar.core.objects.finalizer import ORPHAN
from bursar.core.objects.job import (
    JOB_ENDED,
    JobAttempt,
    JobPhase,
    JobProgress,
    all_turns,
    observed,
    open_turns,
    times,
    turn_name,
)
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.permit import beyond
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.quota.visibility import Sees
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.job import PARALLELISM_MAX, job_gang, plan_of
from bursar.wire.shared.document import encode, finalizers_of, is_ending

# Commands on more objects than this go through a lane of their own.
MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateJob(CreateObject):
    """Create a job and its first allocations: all of them, or nothing."""

    drafts: tuple[Stored, ...]

    def weight(self) -> int:
        return weight_of_drafts(self.draft, *self.drafts)

    @property
    def many(self) -> bool:
        return len(self.drafts) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *(one.key for one in self.drafts))

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        if self._gates(batch):
            yield self.key.namespace, pending_charge(self.draft.charge)
        yield from charges_of(batch, self.drafts, self.gang)

    def _gates(self, batch: UnitOfWork) -> tuple[str, ...]:
        """The gates of the job. Its allocations inherit its approval, so they and their gang pass none."""
        return gates_of(batch, self.draft, tenant_of(batch, self.key, self.draft.tenant))

    def _request(self, batch: UnitOfWork, draft: Stored) -> Result:
        """Store the job without allocations: its gang begins with them."""
        if exceeded := batch.counters.move([Move(self.key.namespace, after=draft.charge)]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        return batch.put(draft, requesting(self.origin, draft))

    def decide(self, batch: UnitOfWork) -> Result:
        if refusal := self._refusal(batch):
            return refusal
        if taken := next((one.key for one in self.drafts if one.key in batch.objects), None):
            return already_exists(taken)
        tenant = tenant_of(batch, self.key, self.draft.tenant)
        beyond_permit = beyond(batch.tree, tenant, self.asking)
        if beyond_permit is not None and not self.admin:
            return beyond_permit
        exempt = beyond_permit is not None
        if gates := self._gates(batch):
            draft = self._permitted(replace(self.draft, tenant=tenant), exempt)
            return self._request(batch, held_back(unstarted(draft), tenant, batch, gates))
        drafts = admit(batch, self.drafts, self.gang, self.subject, sight_of(batch, self))
        if isinstance(drafts, Refusal):
            return drafts
        write = batch.put(self._permitted(replace(self.draft, tenant=tenant), exempt), self.origin)
        for one in drafts:
            batch.put(self._permitted(replace(one, tenant=tenant), exempt), self.origin)
        return write

    def _permitted(self, one: Stored, exempt: bool) -> Stored:
        return permitted_by(one, self.origin) if exempt else one


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommand(Command):
    """A command on a job, of which version `expected` was read, and on members that it names."""

    expected: int
    members: tuple[Key, ...] = ()
    gang: str = ""

    def next(self, before: Stored, _: dict[str, Any]) -> JobCommand:
        """The same command for another version of the job."""
        return replace(self, expected=before.revision)

    @property
    def many(self) -> bool:
        return len(self.members) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *self.members)

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        # The job itself is charged only as a pending request.
        there = (key for key in (self.key, *self.members) if key in batch.objects)
        return ((key.namespace, batch.objects[key].charge) for key in there)

    def owned(self, batch: UnitOfWork, job: Stored) -> list[Stored]:
        """The members that exist and are the job's own."""
        there = [batch.objects[key] for key in self.members if key in batch.objects]
        return [one for one in there if is_owned(one.doc, job.uid)]

    def release(self, batch: UnitOfWork, members: Sequence[Stored], grace_seconds: int) -> list[Stored]:
        """Release members; return those that remain for now: they still run, or have ended and have finalizers."""
        for one in members:
            Release(key=one.key, origin=self.origin, grace_seconds=grace_seconds, gang=one.gang).decide(batch)
        return [batch.objects[one.key] for one in members if one.key in batch.objects]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJobCommand(JobCommand):
    """Cancel a job: remove its pending members, stop its running ones, and wait for these."""

    tenant: str  # the job's tenant when access was checked
    reason: str = ""
    grace_seconds: int = GRACE_SECONDS
    why: str = "UserRequested"  # the reason in the status
    message: str = ""  # with the reason, instead of the usual sentence

    def next(self, before: Stored, _: dict[str, Any]) -> JobCommand:
        members = tuple(member_key(before.key, turn) for turn in open_turns(progress_in(before)))
        return replace(self, expected=before.revision, members=members, gang=group_of(before))

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.tenant != self.tenant:
            return not_found(self.key)
        if before.revision != self.expected:
            return conflict(self.key)
        progress = progress_in(before)
        if progress.phase is JobPhase.CANCELLED:
            return unchanged(before)
        after = self.cancelled(batch, before)
        return after if isinstance(after, Refusal) else batch.put(after, self.origin)

    def cancelled(self, batch: UnitOfWork, before: Stored) -> Stored | Refusal:
        """Release the members, and return the job after that; the refusal of a job that has ended."""
        progress = progress_in(before)
        # Ended members count, even if the controller has not seen their end yet.
        owned = self.owned(batch, before)
        members = [
            member(one.key.name, turn, phase_of(one), one.doc, one.status) for turn, one in self._turns(before, owned)
        ]
        progress = observed(plan_of(spec_in(before.doc)), progress, members, batch.now)
        if progress.phase in JOB_ENDED and progress.phase is not JobPhase.CANCELLED:
            return _ended(self.key, progress.phase)
        before = withdraw(batch, before)
        there = self.release(batch, [one for one in owned if not has_ended(one)], self.grace_seconds)
        left = sum(not has_ended(one) for one in there)
        if self.reason:
            before = replace(before, status=encode({**status_of(before), "cancellationReason": self.reason}))
        return with_progress(before, self._progress(progress, left, batch.now), timestamp(batch.now))

    def _turns(self, job: Stored, owned: Sequence[Stored]) -> list[tuple[JobAttempt, Stored]]:
        turns = {turn_name(self.key.name, turn): turn for turn in open_turns(progress_in(job))}
        return [(turns[one.key.name], one) for one in owned]

    def _progress(self, progress: JobProgress, left: int, at: datetime) -> JobProgress:
        words = self.message or f"Graceful cancellation initiated, {self.grace_seconds}s grace period"
        progress = replace(progress, active=left, reason=self.why, message=words)
        if left:
            return replace(progress, phase=JobPhase.CANCELLING)
        return replace(progress, phase=JobPhase.CANCELLED, boost=None, ended_at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostJobCommand(JobCommand):
    """Change the priority of a job for a limited time; the previous one is that of a running boost, if there is one."""

    tenant: str
    boost: dict[str, Any]  # in its stored form

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.tenant != self.tenant:
            return not_found(self.key)
        if before.revision != self.expected:
            return conflict(self.key)
        progress, boost = progress_in(before), self.boost
        if progress.phase in JOB_ENDED or progress.phase is JobPhase.CANCELLING:
            return _ended(self.key, progress.phase)
        if progress.boost is not None and progress.boost.expires > batch.now:
            boost = {**boost, "previousPriority": progress.boost.priority}
        return batch.put(replace(before, status=encode({**status_of(before), "boost": boost})), self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob(JobCommand):
    """Delete a job and its allocations; with `orphan`, the job alone.

    While any of them is left it stays, marked, and the controller removes it when the last is gone.
    """

    preconditions: DeletePreconditions = NO_PRECONDITIONS
    grace_seconds: int = GRACE_SECONDS
    orphan: bool = False

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        before = withdraw(batch, before)
        if self.orphan:
            return self._leave(batch, before)
        # It may have more allocations than when it was read.
        known = before.revision == self.expected
        left = self.release(batch, self.owned(batch, before), self.grace_seconds)
        all_named = known and len(self.members) == sum(1 for _ in all_turns(progress_in(before)))
        if all_named and not left and not finalizers_of(before.doc):
            return remove(batch, before, self.origin)
        return unchanged(before) if is_ending(before.doc) else self._mark(batch, before)

    def _leave(self, batch: UnitOfWork, before: Stored) -> Result:
        """Delete the job without its allocations, which stay even while finalizers delay its removal."""
        if not finalizers_of(before.doc):
            return remove(batch, before, self.origin)
        if is_ending(before.doc):
            return unchanged(before)
        return batch.put(marked(before, timestamp(batch.now), ORPHAN), self.origin)

    def _mark(self, batch: UnitOfWork, before: Stored) -> Result:
        document = msgspec.json.decode(before.doc)
        document["metadata"]["deletionTimestamp"] = timestamp(batch.now + timedelta(seconds=self.grace_seconds))
        document["metadata"]["deletionGracePeriodSeconds"] = self.grace_seconds
        before = replace(before, doc=encode(document))
        progress = progress_in(before)
        if progress.phase not in JOB_ENDED:
            progress = replace(progress, phase=JobPhase.CANCELLING, reason="UserRequested", message="Being deleted")
        return batch.put(with_progress(before, progress, timestamp(batch.now)), self.origin)


# Requests.


def unstarted(job: Stored) -> Stored:
    """A new job without its first allocations, which it gets when it is approved."""
    return replace(job, status=encode({**status_of(job), "active": 0, "startedIndexes": 0}))


def withdraw(batch: UnitOfWork, job: Stored) -> Stored:
    """The job that is cancelled or deleted: if it awaited approval it no longer does, nor does it count as pending."""
    if not awaits_approval(job):
        return job
    batch.counters.move([Move(job.key.namespace, job.charge)])
    return replace(withdrawn(job, batch.now), charge=NOTHING)


# Charges and refusals.


def admit(
    batch: UnitOfWork, drafts: Sequence[Stored], gang: Gang | None, subject: str, sees: Sees
) -> Sequence[Stored] | Refusal:  # fmt: skip
    """Charge allocations of one template together, or none of them; return them as they are to be stored."""
    drafts = [charged(batch, one) for one in drafts]
    namespace = drafts[0].key.namespace
    moves = [Move(namespace, after=times(drafts[0].charge, len(drafts)))]
    if gang is None:
        exceeded = batch.counters.move(moves)
        return quota_refusal(subject, exceeded, sees) if exceeded else drafts
    key = (namespace, gang.group_id)
    row = batch.gangs.get(key)
    if row is None or not row.members:
        row = GangRow(gang.min_members)
    if row.min_members != gang.min_members:
        return gang_differs(gang, row)
    row = replace(row, members=row.members + len(drafts))
    members = batch.members(*key)
    # Members that await approval are charged by their approval, and all others that are not charged yet with them.
    if not row.charged and (row.members < row.min_members or any(map(awaits_approval, members))):
        batch.set_gang(key, row)
        return [replace(one, charge=deferred(one.charge)) for one in drafts]
    waiting = [one for one in members if one.charge.due and not awaits_approval(one)]
    if exceeded := batch.counters.move(
        moves + [Move(namespace, one.charge, fallen_due(one.charge)) for one in waiting]
    ):
        return quota_refusal(subject, exceeded, sees)
    for one in waiting:
        batch.recharge(replace(one, charge=fallen_due(one.charge)))
    batch.set_gang(key, replace(row, charged=True))
    return drafts


def charges_of(batch: UnitOfWork, drafts: Sequence[Stored], gang: Gang | None) -> Iterable[tuple[str, Charge]]:
    # All have the same template, and therefore the same charge.
    for one in drafts[:1]:
        yield one.key.namespace, charged(batch, one).charge
        if gang is not None:
            for waiting in batch.members(one.key.namespace, gang.group_id):
                yield one.key.namespace, fallen_due(waiting.charge)


def has_ended(allocation: Stored) -> bool:
    return phase_of(allocation) in ENDED


def _ended(key: Key, phase: JobPhase) -> Refusal:
    return Refusal(
        Code.ENDED, f'jobs "{key.name}" is {phase}', "Create it again, under another name or after deleting it."
    )


def delete_job(deletion: ObjectDeletion) -> DeleteJob:
    before = deletion.before
    turns = () if deletion.orphan else islice(all_turns(progress_in(before)), PARALLELISM_MAX)
    return DeleteJob(
        key=before.key,
        origin=deletion.origin,
        idempotency_key=deletion.idempotency_key,
        expected=before.revision,
        members=tuple(member_key(before.key, turn) for turn in turns),
        gang=group_of(before),
        preconditions=deletion.preconditions,
        grace_seconds=GRACE_SECONDS if deletion.grace_seconds is None else deletion.grace_seconds,
        orphan=deletion.orphan,
    )


def group_of(job: Stored) -> str:
    gang = job_gang(job.key.name, spec_in(job.doc))
    return gang.group_id if gang is not None else ""
