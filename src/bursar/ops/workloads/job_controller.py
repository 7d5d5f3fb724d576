"""The job controller's step: compute and commit the next changes of a job and its members.

Optimistic concurrency: a step is computed from data read without a lock, and committed only if the job still has that
version. Of two controllers one wins, and the other reads again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from bursar.commands.command import Written
from bursar.commands.objects.gate import awaits_approval
from bursar.commands.objects.status import status_of
from bursar.commands.workloads.job import group_of
from bursar.commands.workloads.job_status import is_blocked, is_owned, member, member_key, progress_in, spec_in
from bursar.commands.workloads.job_step import StepJob
from bursar.core.objects.allocation import GangRow
from bursar.core.objects.event_text import STEP
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
from bursar.ops.objects import object as object_ops
from bursar.ops.objects.object import TRIES_MAX
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.job import member_drafts
from bursar.store.objects import gang as gang_store
from bursar.store.objects import job as job_store
from bursar.wire.kinds.job import PARALLELISM_MAX, plan_of
from bursar.wire.shared.document import is_ending

CONTROLLER = Origin("system:jobs", STEP)
# The pause after a step that lost to concurrent changes too often.
TROUBLE_SECONDS = 2.0
# Ended members of a deleted job are removed in batches of this size; running ones are stopped in addition.
REMOVED_AT_ONCE_MAX = 2000


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a step: the time of the next one, unless a change comes before."""

    tenant: str
    look_at: datetime | None = None
    blocked: bool = False  # allocations could not be created


async def step(runtime: Runtime, key: Key, at: datetime | None = None) -> Stepped | None:
    """Do all that is due for a job now; None if nothing will be due any more."""
    tenant = ""
    for _ in range(TRIES_MAX):
        job = await object_ops.get(runtime, key)
        if isinstance(job, Refusal):
            return None
        tenant = job.tenant
        if awaits_approval(job) and not is_ending(job.doc):
            return Stepped(tenant)  # Its approval creates its allocations.
        plan, progress = plan_of(spec_in(job.doc)), progress_in(job)
        members = await load_members(runtime, job, progress)
        coming = next_step(plan, progress, members, at or now())
        if coming == JobStep(progress):
            return None if progress.settled else Stepped(tenant, next_look(plan, progress))
        joined = await _joined(runtime, job, coming)
        if joined is None and _joins(job, coming):
            continue  # They have ended since they were read.
        reply = await object_ops.submit(runtime, _step_command(job, coming, joined), tenant=tenant)
        if isinstance(reply, Written) and not reply.deleted and coming.create and is_blocked(reply.status):
            return Stepped(tenant, next_look(plan, coming.progress), blocked=True)
    return Stepped(tenant, now() + timedelta(seconds=TROUBLE_SECONDS))


async def load_members(runtime: Runtime, job: Stored, progress: JobProgress) -> list[JobMember]:
    """The job's own allocations: of its open attempts, or of all attempts if it is being deleted."""
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
    """Whether new members join existing members of their gang."""
    return bool(coming.create and coming.progress.active and group_of(job))


async def _joined(runtime: Runtime, job: Stored, coming: JobStep) -> GangRow | None:
    """The gang that new members join: it may be smaller than the job's template says."""
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
