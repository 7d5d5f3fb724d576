"""Verbs on jobs: create, cancel, boost. A job and its allocations change together, in one transaction.

The list of its allocations comes from a version of the job that was read without a lock, and is valid if the job still
has that version. The controller's verb is in job_controller.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import islice

import msgspec

from bursar.commands.command import Reply
from bursar.commands.objects.object import submitter
from bursar.commands.workloads.allocation import GRACE_SECONDS
from bursar.commands.workloads.job import BoostJobCommand, CancelJobCommand, CreateJob
from bursar.commands.workloads.job_status import member_key, progress_in, spec_in
from bursar.core.objects.allocation import Gang, GangRow
from bursar.core.objects.job import JobAttempt, open_turns, turn_name
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.ops.objects import object as object_ops
from bursar.ops.objects.object import ObjectCreation, new_draft
from bursar.ops.runtime.clock import new_uid, now
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.allocation import ALLOCATION, JOB_INDEX, Allocation
from bursar.wire.kinds.job import (
    JOB,
    JOB_LABEL,
    Job,
    JobSpec,
    allocation_spec,
    asking_in,
    job_gang,
    plan_of,
    template_annotations,
    template_labels,
    with_min_members,
)
from bursar.wire.kinds.priorityclass import PRIORITY_CLASS, PriorityClass
from bursar.wire.kinds.queue import QUEUE
from bursar.wire.shared.document import encode
from bursar.wire.shared.meta import API_VERSION, ObjectMeta, OwnerReference, given

_decode_class = msgspec.json.Decoder(PriorityClass).decode


# Commands. Everything is encoded before locks are taken.


def create_job(creation: ObjectCreation) -> CreateJob:
    job: Job = creation.one
    user = submitter(creation.origin)
    draft = new_draft(JOB, job, tenant=creation.seen_tenant or "", user=user)
    first = list(islice(open_turns(progress_in(draft)), plan_of(job.spec).width))
    drafts, gang = member_drafts(draft.key, draft.uid, job.spec, first, joined=None, user=user)
    return CreateJob(
        key=draft.key,
        origin=creation.origin,
        idempotency_key=creation.idempotency_key,
        draft=draft,
        drafts=drafts,
        gang=gang,
        wants=tuple(_wants(job.spec)),
        subject="job",
        seen_tenant=creation.seen_tenant,
        asking=asking_in(job.spec),
        admin=creation.admin,
    )


def _wants(spec: JobSpec) -> Iterable[tuple[str, Key]]:
    for path, said in (("spec", spec), ("spec.template.spec", spec.template.spec)):
        if said.queue:
            yield f"{path}.queue", Key(QUEUE.name, "", said.queue)


# Verbs.


async def cancel(
    runtime: Runtime,
    job: Stored,
    origin: Origin,
    *,
    idempotency_key: IdempotencyKey | None = None,
    grace_seconds: int = GRACE_SECONDS,
    dry_run: bool = False,
) -> Reply:
    command = CancelJobCommand(
        key=job.key, origin=origin, idempotency_key=idempotency_key, expected=job.revision, tenant=job.tenant,
        reason=origin.reason, grace_seconds=grace_seconds,
    )  # fmt: skip
    return await object_ops.change(runtime, job.key, command.next, tenant=job.tenant, dry_run=dry_run, first=job)


async def boost(
    runtime: Runtime,
    job: Stored,
    origin: Origin,
    *,
    priority: int,
    seconds: int,
    reason: str,
    approved_by: str,
    idempotency_key: IdempotencyKey | None = None,
    dry_run: bool = False,
) -> Reply:
    stored = {
        "priority": priority,
        "previousPriority": await priority_of(runtime, spec_in(job.doc)),
        "reason": reason,
        "approvedBy": approved_by,
        "by": origin.actor,
        "expires": timestamp(now() + timedelta(seconds=seconds)),
    }
    command = BoostJobCommand(
        key=job.key, origin=origin, idempotency_key=idempotency_key, expected=job.revision, tenant=job.tenant,
        boost=stored,
    )  # fmt: skip
    return await object_ops.change(runtime, job.key, command.next, tenant=job.tenant, dry_run=dry_run, first=job)


async def priority_of(runtime: Runtime, spec: JobSpec) -> int:
    """The priority of a job's allocations: the explicit one, else that of their class."""
    for said in (spec.template.spec.priority, spec.priority):
        if isinstance(said, int):
            return said
    name = spec.template.spec.priority_class or spec.priority_class
    found = await object_ops.get(runtime, Key(PRIORITY_CLASS.name, "", name)) if given(name) and name else None
    return _decode_class(found.doc).value if isinstance(found, Stored) else 0


def member_drafts(
    job: Key,
    uid: str,
    spec: JobSpec,
    turns: Sequence[JobAttempt],
    *,
    joined: GangRow | None,
    user: str = "",
    permitted: str = "",
) -> tuple[tuple[Stored, ...], Gang | None]:
    """New allocations, all from one template, and the gang they form.

    Members that join existing ones use the gang size of those. Otherwise the gang is as large as the number of new
    members, because it could never be complete if it were larger.
    """
    if not turns:
        return (), None
    made, gang = allocation_spec(job.name, spec), job_gang(job.name, spec)
    if gang is not None:
        size = joined.min_members if joined is not None else min(gang.min_members, len(turns))
        if size != gang.min_members:
            made, gang = with_min_members(made, gang, size)
        gang = gang if gang.min_members > 1 else None
    metadata = ObjectMeta(
        name=turn_name(job.name, turns[0]),
        namespace=job.namespace,
        labels={**template_labels(spec), JOB_LABEL: job.name},
        owner_references=[OwnerReference("Job", job.name, uid, API_VERSION, controller=True)],
    )
    notes = template_annotations(spec)
    metadata.annotations = {**notes, JOB_INDEX: str(turns[0].index)}
    first = new_draft(ALLOCATION, Allocation(metadata=metadata, spec=made), user=user, permitted=permitted)
    first = replace(first, gang=gang.group_id if gang is not None else "")
    return (first, *_copies(first, metadata, job, turns[1:], notes)), gang


def _copies(
    first: Stored, metadata: ObjectMeta, job: Key, turns: Sequence[JobAttempt], notes: Mapping[str, str]
) -> list[Stored]:
    """Copies under other names: there may be thousands, and only the metadata differs."""
    head, tail = first.doc.split(encode(metadata), 1)
    copies = []
    for turn in turns:
        metadata.name, metadata.uid = turn_name(job.name, turn), new_uid(ALLOCATION.uid_prefix)
        metadata.annotations = {**notes, JOB_INDEX: str(turn.index)}
        doc = b"".join((head, encode(metadata), tail))
        copies.append(replace(first, key=member_key(job, turn), uid=metadata.uid, doc=doc))
    return copies
