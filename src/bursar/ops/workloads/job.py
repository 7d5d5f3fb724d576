"""Verbs on jobs: create, cancel, boost, delete. A job and its allocations change together, in one transaction.

Which allocations that are is worked out from a version of the job that was read without a lock, and holds if that is
still the version. Stepping, which is the controller's verb, is in jobstep.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import msgspec

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import ENDED, Gang, GangKey, GangRow
from bursar.core.objects.charge import Charge, deferred, fallen_due
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
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.permit import beyond
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.quota.visibility import Sees
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects import object as object_ops
from bursar.ops.objects.object import (
    NO_PRECONDITIONS,
    CreateObject,
    DeletePreconditions,
    already_exists,
    conflict,
    gang_differs,
    new_draft,
    not_found,
    permitted_by,
    sight_of,
    submitter,
    tenant_of,
)
from bursar.ops.objects.removal import marked, remove
from bursar.ops.runtime.clock import now, timestamp
from bursar.ops.runtime.command import Command, Reply, Result, weight_of_drafts
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import GRACE_SECONDS, Release, phase_of, status_of, unchanged
from bursar.ops.workloads.job_status import (
    is_owned,
    member,
    member_drafts,
    member_key,
    progress_in,
    spec_in,
    with_progress,
)
from bursar.store.db.idempotency import IdempotencyKey
from bursar.wire.kinds.job import JOB, PARALLELISM_MAX, Job, JobSpec, asking_in, job_gang, plan_of
from bursar.wire.kinds.priorityclass import PriorityClass
from bursar.wire.shared.document import encode, finalizers_of, is_ending
from bursar.wire.shared.meta import given

# Commands on more objects than this go through a lane of their own.
MANY = 16

_decode_class = msgspec.json.Decoder(PriorityClass).decode


# Commands.


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateJob(CreateObject):
    """A job and the allocations it begins with: all of them, or nothing."""

    drafts: tuple[Stored, ...]

    def weight(self) -> int:
        return weight_of_drafts(self.draft, *self.drafts)

    @property
    def many(self) -> bool:
        return len(self.drafts) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *(one.key for one in self.drafts))

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return charges_of(batch, self.drafts, self.gang)

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
    """Something done to a job, of which version `expected` was read, and to members that it named."""

    expected: int
    members: tuple[Key, ...] = ()
    gang: str = ""

    @property
    def many(self) -> bool:
        return len(self.members) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *self.members)

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ((key.namespace, batch.objects[key].charge) for key in self.members if key in batch.objects)

    def owned(self, batch: UnitOfWork, job: Stored) -> list[Stored]:
        """The members that are there and are the job's own."""
        there = [batch.objects[key] for key in self.members if key in batch.objects]
        return [one for one in there if is_owned(one.doc, job.uid)]

    def release(self, batch: UnitOfWork, members: Sequence[Stored], grace_seconds: int) -> list[Stored]:
        """Release members; those of them that are there for now: they go on, or have ended and have finalizers."""
        for one in members:
            Release(key=one.key, origin=self.origin, grace_seconds=grace_seconds, gang=one.gang).decide(batch)
        return [batch.objects[one.key] for one in members if one.key in batch.objects]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJobCommand(JobCommand):
    """Stop a job: what waits is removed, what runs is told to stop and waited for."""

    tenant: str  # whose it was when the caller was let in
    reason: str = ""
    grace_seconds: int = GRACE_SECONDS

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.tenant != self.tenant:
            return not_found(self.key)
        if before.revision != self.expected:
            return conflict(self.key)
        progress = progress_in(before)
        if progress.phase is JobPhase.CANCELLED:
            return unchanged(before)
        # What has ended counts, also if the controller has not seen it yet.
        owned = self.owned(batch, before)
        members = [
            member(one.key.name, turn, phase_of(one), one.doc, one.status) for turn, one in self._turns(before, owned)
        ]
        progress = observed(plan_of(spec_in(before.doc)), progress, members, batch.now)
        if progress.phase in JOB_ENDED and progress.phase is not JobPhase.CANCELLED:
            return _ended(self.key, progress.phase)
        there = self.release(batch, [one for one in owned if not has_ended(one)], self.grace_seconds)
        left = sum(not has_ended(one) for one in there)
        if self.reason:
            before = replace(before, status=encode({**status_of(before), "cancellationReason": self.reason}))
        after = with_progress(before, self._progress(progress, left, batch.now), timestamp(batch.now))
        return batch.put(after, self.origin)

    def _turns(self, job: Stored, owned: Sequence[Stored]) -> list[tuple[JobAttempt, Stored]]:
        turns = {turn_name(self.key.name, turn): turn for turn in open_turns(progress_in(job))}
        return [(turns[one.key.name], one) for one in owned]

    def _progress(self, progress: JobProgress, left: int, at: datetime) -> JobProgress:
        words = f"Graceful cancellation initiated, {self.grace_seconds}s grace period"
        progress = replace(progress, active=left, reason="UserRequested", message=words)
        if left:
            return replace(progress, phase=JobPhase.CANCELLING)
        return replace(progress, phase=JobPhase.CANCELLED, boost=None, ended_at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostJobCommand(JobCommand):
    """Give a job another priority for a while."""

    tenant: str
    boost: dict[str, Any]  # as it is stored

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.tenant != self.tenant:
            return not_found(self.key)
        if before.revision != self.expected:
            return conflict(self.key)
        phase = progress_in(before).phase
        if phase in JOB_ENDED or phase is JobPhase.CANCELLING:
            return _ended(self.key, phase)
        return batch.put(replace(before, status=encode({**status_of(before), "boost": self.boost})), self.origin)


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
        if self.orphan:
            return self._leave(batch, before)
        # It may have made more allocations since it was read.
        known = before.revision == self.expected
        left = self.release(batch, self.owned(batch, before), self.grace_seconds)
        all_named = known and len(self.members) == sum(1 for _ in all_turns(progress_in(before)))
        if all_named and not left and not finalizers_of(before.doc):
            return remove(batch, before, self.origin)
        return unchanged(before) if is_ending(before.doc) else self._mark(batch, before)

    def _leave(self, batch: UnitOfWork, before: Stored) -> Result:
        """What it made stays, also while somebody has to clean up before the job itself may go."""
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


# Helpers of the commands.


def admit(
    batch: UnitOfWork, drafts: Sequence[Stored], gang: Gang | None, subject: str, sees: Sees
) -> Sequence[Stored] | Refusal:  # fmt: skip
    """Charge allocations of one template together, or none of them; as they are to be stored."""
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
    if not row.charged and row.members < row.min_members:
        batch.set_gang(key, row)
        return [replace(one, charge=deferred(one.charge)) for one in drafts]
    waiting = [one for one in batch.members(*key) if one.charge.due]
    if exceeded := batch.counters.move(
        moves + [Move(namespace, one.charge, fallen_due(one.charge)) for one in waiting]
    ):
        return quota_refusal(subject, exceeded, sees)
    for one in waiting:
        batch.recharge(replace(one, charge=fallen_due(one.charge)))
    batch.set_gang(key, replace(row, charged=True))
    return drafts


def charges_of(batch: UnitOfWork, drafts: Sequence[Stored], gang: Gang | None) -> Iterable[tuple[str, Charge]]:
    # All are made from one template: what one is charged for, the others are too.
    for one in drafts[:1]:
        yield one.key.namespace, one.charge
        if gang is not None:
            for waiting in batch.members(one.key.namespace, gang.group_id):
                yield one.key.namespace, fallen_due(waiting.charge)


def has_ended(allocation: Stored) -> bool:
    return phase_of(allocation) in ENDED


def _ended(key: Key, phase: JobPhase) -> Refusal:
    return Refusal(
        Code.ENDED, f'jobs "{key.name}" is {phase}', "Create it anew, under another name or after deleting it."
    )


# Making commands. Everything is encoded before locks are taken.


def create_job(
    job: Job, origin: Origin, claim: IdempotencyKey | None, seen_tenant: str | None, *, admin: bool = False
) -> CreateJob:  # fmt: skip
    user = submitter(origin)
    draft = new_draft(JOB, job, tenant=seen_tenant or "", user=user)
    first = list(islice(open_turns(progress_in(draft)), plan_of(job.spec).width))
    drafts, gang = member_drafts(draft.key, draft.uid, job.spec, first, joined=None, user=user)
    return CreateJob(
        key=draft.key,
        origin=origin,
        claim=claim,
        draft=draft,
        drafts=drafts,
        gang=gang,
        wants=tuple(_wants(job.spec)),
        subject="job",
        seen_tenant=seen_tenant,
        asking=asking_in(job.spec),
        admin=admin,
    )


def _wants(spec: JobSpec) -> Iterable[tuple[str, Key]]:
    for path, said in (("spec", spec), ("spec.template.spec", spec.template.spec)):
        if said.queue:
            yield f"{path}.queue", Key("Queue", "", said.queue)


def delete_job(
    before: Stored,
    origin: Origin,
    claim: IdempotencyKey | None,
    preconditions: DeletePreconditions,
    grace: int,
    *,
    orphan: bool,
) -> DeleteJob:
    turns = () if orphan else islice(all_turns(progress_in(before)), PARALLELISM_MAX)
    return DeleteJob(
        key=before.key,
        origin=origin,
        claim=claim,
        expected=before.revision,
        members=tuple(member_key(before.key, turn) for turn in turns),
        gang=group_of(before),
        preconditions=preconditions,
        grace_seconds=grace,
        orphan=orphan,
    )


def group_of(job: Stored) -> str:
    gang = job_gang(job.key.name, spec_in(job.doc))
    return gang.group_id if gang is not None else ""


# Verbs.


async def cancel(
    runtime: Runtime,
    job: Stored,
    origin: Origin,
    *,
    claim: IdempotencyKey | None = None,
    grace_seconds: int = GRACE_SECONDS,
    dry_run: bool = False,
) -> Reply:
    def edit(before: Stored, _: dict[str, Any]) -> Command:
        members = tuple(member_key(before.key, turn) for turn in open_turns(progress_in(before)))
        return CancelJobCommand(
            key=before.key,
            origin=origin,
            claim=claim,
            expected=before.revision,
            members=members,
            gang=group_of(before),
            tenant=job.tenant,
            reason=origin.reason,
            grace_seconds=grace_seconds,
        )

    return await object_ops.change(runtime, job.key, edit, tenant=job.tenant, dry_run=dry_run, first=job)


async def boost(
    runtime: Runtime,
    job: Stored,
    origin: Origin,
    *,
    priority: int,
    seconds: int,
    reason: str,
    approved_by: str,
    claim: IdempotencyKey | None = None,
    dry_run: bool = False,
    at: datetime | None = None,
) -> Reply:
    own, began = await priority_of(runtime, spec_in(job.doc)), at or now()

    def edit(before: Stored, _: dict[str, Any]) -> Command:
        running = progress_in(before).boost
        stored = {
            "priority": priority,
            "previousPriority": running.priority if running is not None and running.expires > began else own,
            "reason": reason,
            "approvedBy": approved_by,
            "by": origin.actor,
            "expires": timestamp(began + timedelta(seconds=seconds)),
        }
        return BoostJobCommand(
            key=before.key, origin=origin, claim=claim, expected=before.revision, tenant=job.tenant, boost=stored
        )

    return await object_ops.change(runtime, job.key, edit, tenant=job.tenant, dry_run=dry_run, first=job)


async def priority_of(runtime: Runtime, spec: JobSpec) -> int:
    """The priority of a job's allocations: the explicit one, else that of their class."""
    for said in (spec.template.spec.priority, spec.priority):
        if isinstance(said, int):
            return said
    name = spec.template.spec.priority_class or spec.priority_class
    found = await object_ops.get(runtime, Key("PriorityClass", "", name)) if given(name) and name else None
    return _decode_class(found.doc).value if isinstance(found, Stored) else 0
