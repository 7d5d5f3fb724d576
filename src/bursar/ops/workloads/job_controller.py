"""The next step of a job: what the controller does for it.

It is worked out from what was read without a lock, and committed only if the job is still the version it was worked out
for: of two controllers one wins, and the other looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import Gang, GangKey, GangRow
from bursar.core.objects.charge import Charge
from bursar.core.objects.event_text import STEP, step_why
from bursar.core.objects.job import (
    JobMember,
    JobProgress,
    JobStep,
    all_turns,
    next_look,
    next_step,
    open_turns,
    turn_name,
)
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects import object as object_ops
from bursar.ops.objects.object import TRIES_MAX, already_exists, conflict, namespace_refusal, not_found, sight_of
from bursar.ops.objects.removal import remove
from bursar.ops.runtime.clock import now, timestamp
from bursar.ops.runtime.command import Result, Written, weight_of_drafts
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import GRACE_SECONDS, status_of, unchanged
from bursar.ops.workloads.job import MANY, JobCommand, admit, charges_of, group_of, has_ended
from bursar.ops.workloads.job_status import (
    is_blocked,
    is_owned,
    member,
    member_drafts,
    member_key,
    progress_in,
    spec_in,
    with_progress,
)
from bursar.store.objects import gang as gang_store
from bursar.store.objects import job as job_store
from bursar.wire.kinds.job import PARALLELISM_MAX, plan_of

CONTROLLER = Origin("system:jobs", STEP)
# How long a job rests that others were always faster to change.
TROUBLE_SECONDS = 2.0
# What a job that is deleted has left behind is removed so many at a time; what runs comes on top.
REMOVED_AT_ONCE_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob(JobCommand):
    """What comes next: release what is not wanted any more, make what is, and write down how far the job is."""

    step: JobStep
    drafts: tuple[Stored, ...] = ()
    drafts_gang: Gang | None = None

    def weight(self) -> int:
        return weight_of_drafts(*self.drafts)

    @property
    def many(self) -> bool:
        return len(self.members) + len(self.drafts) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *self.members, *(one.key for one in self.drafts))

    def gangs(self) -> dict[GangKey, int]:
        gang = self.drafts_gang
        return {(self.key.namespace, gang.group_id): gang.min_members} if gang else JobCommand.gangs(self)

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        yield from charges_of(batch, self.drafts, self.drafts_gang)
        yield from JobCommand.charges(self, batch)

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.revision != self.expected or self._outrun(batch, before):
            return conflict(self.key)
        # What has ended by now is counted next time; only with its job is it removed.
        unwanted = [one for one in self.owned(batch, before) if self.step.progress.deleting or not has_ended(one)]
        left = sum(not has_ended(one) for one in self.release(batch, unwanted, GRACE_SECONDS))
        if self.step.remove:
            return remove(batch, before, self.origin)
        made, refusal = self._make(batch, before)
        progress = self.step.progress
        started = max([progress.started, *(turn.index + 1 for turn in self.step.create[: len(made)])])
        progress = replace(progress, started=started, active=progress.active + left + len(made))
        after = with_progress(before, progress, timestamp(batch.now), refusal)
        changed = (after.status, after.fields) != (before.status, before.fields)
        why = step_why(
            progress_in(before), progress, [one.key.name for one in made], refusal.message if refusal else ""
        )
        result = batch.put(after, Origin(self.origin.actor, self.origin.verb, why)) if changed else unchanged(before)
        for one in made:
            batch.put(replace(one, tenant=before.tenant), Origin(self.origin.actor, "create", f"job/{self.key.name}"))
        return result

    def _outrun(self, batch: UnitOfWork, job: Stored) -> bool:
        """Whether a member that was missing is there after all, or the gang that was to be joined is gone."""
        there = [batch.objects[one.key] for one in self.drafts if one.key in batch.objects]
        if any(is_owned(one.doc, job.uid) for one in there):
            return True
        row = self._gang_row(batch)
        return self.drafts_gang is not None and row is None and len(self.drafts) < self.drafts_gang.min_members

    def _gang_row(self, batch: UnitOfWork) -> GangRow | None:
        if self.drafts_gang is None:
            return None
        row = batch.gangs.get((self.key.namespace, self.drafts_gang.group_id))
        return row if row is not None and row.members else None

    def _make(self, batch: UnitOfWork, job: Stored) -> tuple[Sequence[Stored], Refusal | None]:
        """As many as there is room for, in their order; and why not the next one."""
        if self.drafts and (refusal := namespace_refusal(batch, self.key, job.tenant)):
            return (), refusal
        made: list[Stored] = []
        for some in self._portions(batch):
            if taken := next((one.key for one in some if one.key in batch.objects), None):
                return made, already_exists(taken)
            admitted = admit(batch, some, self.drafts_gang, "allocation", sight_of(batch, self))
            if isinstance(admitted, Refusal):
                return made, admitted
            made += admitted
        return made, None

    def _portions(self, batch: UnitOfWork) -> Iterable[tuple[Stored, ...]]:
        """What is let in together: the members of a gang that is not complete, and everything else one by one."""
        row = self._gang_row(batch)
        if self.drafts_gang is not None and not (row is not None and row.charged):
            return (self.drafts,)
        return ((one,) for one in self.drafts)


@dataclass(frozen=True, slots=True)
class Stepped:
    """Where a job stands after its step: when to look at it again, if nothing happens before."""

    tenant: str
    look_at: datetime | None = None
    blocked: bool = False  # allocations could not be made


async def step(runtime: Runtime, key: Key, at: datetime | None = None) -> Stepped | None:
    """Do all that is to be done for a job now; None when nothing will ever be again."""
    tenant = ""
    for _ in range(TRIES_MAX):
        job = await object_ops.get(runtime, key)
        if isinstance(job, Refusal):
            return None
        tenant = job.tenant
        plan, progress = plan_of(spec_in(job.doc)), progress_in(job)
        members = await load_members(runtime, job, progress)
        coming = next_step(plan, progress, members, at or now())
        if coming == JobStep(progress):
            return None if progress.settled else Stepped(tenant, next_look(plan, progress))
        joined = await _joined(runtime, job, coming)
        if joined is None and _joins(job, coming):
            continue  # They have ended since they were seen.
        reply = await object_ops.submit(runtime, _step_command(job, coming, joined), tenant=tenant)
        if isinstance(reply, Written) and not reply.deleted and coming.create and is_blocked(reply.status):
            return Stepped(tenant, next_look(plan, coming.progress), blocked=True)
    return Stepped(tenant, now() + timedelta(seconds=TROUBLE_SECONDS))


async def load_members(runtime: Runtime, job: Stored, progress: JobProgress) -> list[JobMember]:
    """The job's own allocations: of the turns that are open, or of all of them when it is being deleted."""
    turns = all_turns(progress) if progress.deleting else open_turns(progress)
    names = {turn_name(job.key.name, turn): turn for turn in turns}
    async with runtime.database.reader() as db:
        found = await job_store.load_members(db, job.key.namespace, list(names), PARALLELISM_MAX + REMOVED_AT_ONCE_MAX)
    return [
        member(one.name, names[one.name], one.fields["status.phase"], one.doc, one.status)
        for one in found
        if is_owned(one.doc, job.uid)
    ]


def _joins(job: Stored, coming: JobStep) -> bool:
    """Whether what is made comes to members of its gang that are there."""
    return bool(coming.create and coming.progress.active and group_of(job))


async def _joined(runtime: Runtime, job: Stored, coming: JobStep) -> GangRow | None:
    """The gang that is joined: it may be smaller than the job's template says."""
    if not _joins(job, coming):
        return None
    key = (job.key.namespace, group_of(job))
    async with runtime.database.reader() as db:
        return (await gang_store.load(db, [key])).get(key)


def _step_command(job: Stored, coming: JobStep, joined: GangRow | None) -> StepJob:
    said = status_of(job) if coming.create else {}
    drafts, gang = member_drafts(
        job.key, job.uid, spec_in(job.doc), coming.create,
        joined=joined, user=said.get("user", ""), permitted=said.get("permittedBy", ""),
    )  # fmt: skip
    return StepJob(
        key=job.key,
        origin=CONTROLLER,
        expected=job.revision,
        members=tuple(member_key(job.key, turn) for turn in coming.release),
        gang=group_of(job),
        step=coming,
        drafts=drafts,
        drafts_gang=gang,
    )
