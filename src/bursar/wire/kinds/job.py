"""Job: creates allocations from a template, up to `parallelism` at a time, until `completions` of them have
succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from bursar.core.objects.allocation import Gang
from bursar.core.objects.charge import Amounts
from bursar.core.objects.finalizer import ORPHAN
from bursar.core.objects.job import BACKOFF_SECONDS_MAX, JobPhase, JobPlan
from bursar.core.quota.permit import Asking
from bursar.core.values.access import AccessGroup, KindAccess
from bursar.core.values.duration import SECONDS_MAX
from bursar.core.values.names import annotations as annotation_faults
from bursar.core.values.names import labels as label_faults
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.allocation import (
    ALLOCATION,
    GANG_SIZE,
    Allocation,
    AllocationSpec,
    asked_in,
    charge_of,
    gang_of,
    gang_spec,
    spec_faults,
)
from bursar.wire.kinds.priorityclass import priority_faults
from bursar.wire.shared.approval import SELECTABLE, ApprovalStatus
from bursar.wire.shared.kind import USER_FIELD, AllocationDemand, Column, Fields, Kind, column, read, user_field
from bursar.wire.shared.meta import Condition, ObjectMeta, Text, Wire, given
from bursar.wire.shared.scheduling import GangScheduling, Scheduling

JOB_LABEL = "bursar.io/job"

NAME_CHARS_MAX = 63  # it is the value of a label
PARALLELISM_MAX = 10_000
COMPLETIONS_MAX = 100_000
BACKOFF_LIMIT_MAX = 10_000
BACKOFF_LIMIT_DEFAULT = 3
BACKOFF_SECONDS_DEFAULT = 10


class TemplateMeta(Wire):
    labels: dict[str, str] | UnsetType = UNSET
    annotations: dict[str, str] | UnsetType = UNSET


class JobTemplate(Wire):
    spec: AllocationSpec
    metadata: TemplateMeta | UnsetType = UNSET


class JobSpec(Wire):
    template: JobTemplate
    parallelism: int | UnsetType = UNSET
    completions: int | UnsetType = UNSET
    backoff_limit: int | UnsetType = UNSET
    backoff_seconds: int | UnsetType = UNSET  # the pause before the first retry; each later one is twice as long
    on_member_failure: Text = UNSET  # in a gang or on several nodes: stop (the default) or wait
    active_deadline_seconds: int | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    priority_class: Text = UNSET
    queue: Text = UNSET


class JobBoost(Wire):
    priority: int
    expires: str
    previous_priority: int | UnsetType = UNSET
    reason: Text = UNSET
    approved_by: Text = UNSET
    by: Text = UNSET


class JobAllocation(Wire):
    name: str
    phase: Text = UNSET
    node: Text = UNSET


class JobStatus(Wire):
    phase: Text = UNSET
    user: Text = UNSET  # the submitter, whose account pays for its allocations
    permitted_by: Text = UNSET  # the administrator whose request exempted it from the tenant's permits
    reason: Text = UNSET
    message: Text = UNSET
    cancellation_reason: Text = UNSET  # the reason given with the cancellation
    active: int | UnsetType = UNSET
    succeeded: int | UnsetType = UNSET
    failed: int | UnsetType = UNSET
    start_time: Text = UNSET
    completion_time: Text = UNSET
    conditions: list[Condition] | UnsetType = UNSET
    # Progress: indexes below `startedIndexes` were started; these fields say which are done, and how often each has
    # failed.
    started_indexes: int | UnsetType = UNSET
    completed_indexes: Text = UNSET
    failed_tries: dict[str, int] | UnsetType = UNSET
    next_retry_time: Text = UNSET  # time of the earliest next retry
    boost: JobBoost | UnsetType = UNSET
    queue_position: int | UnsetType = UNSET
    estimated_start_time: Text = UNSET
    allocations: list[JobAllocation] | UnsetType = UNSET
    approval: ApprovalStatus | UnsetType = UNSET


class Job(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: JobSpec
    status: JobStatus | UnsetType = UNSET


# Values for the rules.


def plan_of(spec: JobSpec) -> JobPlan:
    parallelism = spec.parallelism if isinstance(spec.parallelism, int) else 1
    completions = spec.completions if isinstance(spec.completions, int) else parallelism
    deadline = spec.active_deadline_seconds
    return JobPlan(
        parallelism=parallelism,
        completions=completions,
        backoff_limit=spec.backoff_limit if isinstance(spec.backoff_limit, int) else BACKOFF_LIMIT_DEFAULT,
        deadline_seconds=deadline if isinstance(deadline, int) else 0,
        backoff_seconds=spec.backoff_seconds if isinstance(spec.backoff_seconds, int) else BACKOFF_SECONDS_DEFAULT,
        as_set=completions <= parallelism and _is_set(spec),
    )


def _is_set(spec: JobSpec) -> bool:
    """Whether its allocations form one gang whose members need each other."""
    template = spec.template.spec
    policy = template.on_member_failure if given(template.on_member_failure) else spec.on_member_failure
    is_gang = gang_spec(template) is not None or GANG_SIZE in template_annotations(spec)
    return is_gang and policy != "wait"


_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(AllocationSpec).decode


def allocation_spec(job: str, spec: JobSpec) -> AllocationSpec:
    """The spec of a job's allocations: the template, with defaults from the job."""
    made = _decode_spec(_encode(spec.template.spec))
    for name in ("priority", "priority_class", "queue", "on_member_failure"):
        if not given(getattr(made, name)):
            setattr(made, name, getattr(spec, name))
    if not given(made.ttl) and isinstance(spec.active_deadline_seconds, int):
        # No allocation runs longer than the job, so the deadline bounds their end.
        made.ttl = f"{spec.active_deadline_seconds}s"
    if not (gang := gang_spec(made)) and GANG_SIZE in template_annotations(spec):
        gang = made.gang_scheduling = GangScheduling()
    if gang is not None:
        whole = _whole_gang(job, spec, gang)
        if isinstance(made.scheduling, Scheduling) and given(made.scheduling.gang_scheduling):
            made.scheduling.gang_scheduling = whole
        if given(made.gang_scheduling):
            made.gang_scheduling = whole
    return made


def _whole_gang(job: str, spec: JobSpec, gang: GangScheduling) -> GangScheduling:
    """Complete a gang from the job: it is named after the job, and its members are all allocations that run at once."""
    size = gang.min_members
    if not isinstance(size, int) and GANG_SIZE not in template_annotations(spec):
        size = max(1, plan_of(spec).width)
    return GangScheduling(group_id=gang.group_id or job, min_members=size, timeout=gang.timeout)


def job_gang(job: str, spec: JobSpec) -> Gang | None:
    """The gang that a job's allocations form; None for a single member."""
    metadata = ObjectMeta(annotations=template_annotations(spec))
    gang = gang_of(metadata, allocation_spec(job, spec))
    return gang if gang is not None and gang.min_members > 1 else None


def asking_in(spec: JobSpec) -> Asking:
    """The parts of a job that need a permit: of its own spec, and of its template."""
    inner = asked_in("spec.template.spec", spec.template.spec)
    return Asking(
        (*((("spec.priority", spec.priority),) if isinstance(spec.priority, int) else ()), *inner.priorities),
        (*((("spec.priorityClass", spec.priority_class),) if spec.priority_class else ()), *inner.classes),
        inner.tolerations,
        inner.fractions,
    )


def queue_of(job: Job) -> str:
    """The queue of its allocations."""
    return allocation_spec(job.metadata.name or "", job.spec).queue or "default"


def _demand(job: Job) -> AllocationDemand:
    """As many of its allocations as must run at the same time."""
    name = job.metadata.name or ""
    gang = job_gang(name, job.spec)
    size = gang.min_members if gang is not None else 1
    return AllocationDemand(allocation_spec(name, job.spec), size, "spec.template.spec")


def _requested(job: Job) -> Amounts:
    """The amounts of its first allocations, which its approval creates."""
    each = charge_of(Allocation(metadata=ObjectMeta(), spec=allocation_spec(job.metadata.name or "", job.spec)))
    return {name: value * plan_of(job.spec).width for name, value in each.accepted.items()}


def with_min_members(spec: AllocationSpec, gang: Gang, size: int) -> tuple[AllocationSpec, Gang]:
    """The spec for a smaller gang: a retry may have fewer members than the first attempt."""
    smaller = GangScheduling(group_id=gang.group_id, min_members=size)
    if (said := gang_spec(spec)) is not None:
        smaller.timeout = said.timeout
    if isinstance(spec.scheduling, Scheduling) and given(spec.scheduling.gang_scheduling):
        spec.scheduling.gang_scheduling = smaller
    if given(spec.gang_scheduling):
        spec.gang_scheduling = smaller
    return spec, replace(gang, min_members=size)


def template_labels(spec: JobSpec) -> dict[str, str]:
    metadata = spec.template.metadata
    return dict(metadata.labels or {}) if isinstance(metadata, TemplateMeta) else {}


def template_annotations(spec: JobSpec) -> dict[str, str]:
    metadata = spec.template.metadata
    return dict(metadata.annotations or {}) if isinstance(metadata, TemplateMeta) else {}


# Faults.


def _check(job: Job) -> list[Cause]:
    spec = job.spec
    faults = [*_name_faults(job.metadata), *_count_faults(spec)]
    if isinstance(spec.priority, int):
        faults += priority_faults("spec.priority", spec.priority)
    if spec.on_member_failure is not UNSET and spec.on_member_failure not in ("stop", "wait"):
        faults.append(field_fault("spec.onMemberFailure", "must be stop or wait"))
    if spec.template.spec.stdin is True:
        faults.append(
            field_fault("spec.template.spec.stdin", "is for allocations only: a job cannot send standard input")
        )
    template = [*spec_faults("spec.template.spec", spec.template.spec), *_template_meta_faults(spec)]
    # The gang is checked against the job only if both are valid.
    return [*faults, *template] if faults or template else list(_gang_faults(job))


def _name_faults(metadata: ObjectMeta) -> Iterator[Cause]:
    if len(metadata.name or "") > NAME_CHARS_MAX:
        yield field_fault("metadata.name", f"must be no longer than {NAME_CHARS_MAX} characters: it is a label's value")


def _count_faults(spec: JobSpec) -> Iterator[Cause]:
    bounds = (
        ("parallelism", spec.parallelism, 1, PARALLELISM_MAX),
        ("completions", spec.completions, 1, COMPLETIONS_MAX),
        ("backoffLimit", spec.backoff_limit, 0, BACKOFF_LIMIT_MAX),
        ("backoffSeconds", spec.backoff_seconds, 0, BACKOFF_SECONDS_MAX),
        ("activeDeadlineSeconds", spec.active_deadline_seconds, 1, SECONDS_MAX),
    )
    for name, value, least, most in bounds:
        if isinstance(value, int) and not least <= value <= most:
            yield field_fault(f"spec.{name}", f"must be between {least} and {most}, got {value}")


def _template_meta_faults(spec: JobSpec) -> Iterator[Cause]:
    path = "spec.template.metadata"
    yield from (
        field_fault(f"{path}.labels", fault) for fault in label_faults({**template_labels(spec), JOB_LABEL: ""})
    )
    notes = template_annotations(spec)
    yield from (field_fault(f"{path}.annotations", fault) for fault in annotation_faults(notes))
    made = Allocation(metadata=ObjectMeta(annotations=notes), spec=AllocationSpec())
    for cause in ALLOCATION.check(made):
        if cause.field.startswith("metadata."):
            yield replace(cause, field=f"spec.template.{cause.field}")


def _gang_faults(job: Job) -> Iterator[Cause]:
    gang, plan = job_gang(job.metadata.name or "", job.spec), plan_of(job.spec)
    if gang is None or gang.min_members <= plan.width:
        return
    inner = not given(job.spec.template.spec.gang_scheduling) and given(job.spec.template.spec.scheduling)
    path = "spec.template.spec." + ("scheduling." if inner else "") + "gangScheduling.minMembers"
    what = "parallelism" if plan.parallelism <= plan.completions else "completions"
    yield field_fault(path, f"is {gang.min_members}, and {what} is only {plan.width}: the gang would never be complete")


# Display.


def _fields(job: Job) -> Fields:
    status = job.status if isinstance(job.status, JobStatus) else JobStatus()
    settled = _is_settled(job, status)
    return status_fields(status.phase or JobPhase.QUEUED, job.spec, settled=settled, user=status.user or "")


def _is_settled(job: Job, status: JobStatus) -> bool:
    ended = status.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)
    return ended and not status.active and status.boost is UNSET and job.metadata.deletion_timestamp is UNSET


def status_fields(phase: str, spec: JobSpec, *, settled: bool, user: str) -> Fields:
    return {
        "status.phase": phase,
        "spec.queue": spec.queue or "default",
        "spec.priorityClass": spec.priority_class or "",
        # Whether the controller has finished with it.
        "status.settled": "true" if settled else "false",
        **user_field(user),
        # The queue of its template, if that is not the job's.
        **({"spec.template.spec.queue": str(spec.template.spec.queue)} if spec.template.spec.queue else {}),
    }


def _first_status(job: Job, now: str) -> dict[str, Any]:
    width = plan_of(job.spec).width
    return {
        "phase": str(JobPhase.QUEUED),
        "active": width,
        "succeeded": 0,
        "failed": 0,
        "startedIndexes": width,
        "conditions": [
            {"type": "Queued", "status": "True", "reason": "WaitingForResources", "lastTransitionTime": now}
        ],
    }


def _completions(document: dict[str, Any]) -> str:
    wanted = read(document, "spec.completions", None) or read(document, "spec.parallelism", 1)
    return f"{read(document, 'status.succeeded', 0)}/{wanted}"


JOB = Kind(
    name="Job",
    plural="jobs",
    type=Job,
    namespaced=True,
    description="A batch of allocations, created from a template until enough of them have succeeded.",
    uid_prefix="job",
    access=KindAccess(AccessGroup.WORK),
    check=_check,
    selectable=("status.phase", USER_FIELD, "spec.queue", "spec.priorityClass", *SELECTABLE),
    fields=_fields,
    first_status=_first_status,
    columns=(
        column("Status", "status.phase", default="Queued"),
        Column("Completions", _completions),
        column("Active", "status.active", type="integer", default="0"),
        column("Failed", "status.failed", type="integer", default="0"),
        column("Queue", "spec.queue", default="default"),
        Column("Reason", lambda document: str(read(document, "status.reason")), wide=True),
        Column("Priority-Class", lambda document: str(read(document, "spec.priorityClass", "<none>")), wide=True),
    ),
    merge_keys={
        "spec.template.spec.scheduling.tolerations": "key",
        "spec.template.spec.scheduling.topologySpreadConstraints": "topologyKey",
        "spec.template.spec.env": "name",
        "status.conditions": "type",
    },
    mutable_spec=False,
    requestable=True,
    requested=_requested,
    refused=lambda reason, message, at: {
        "phase": str(JobPhase.FAILED),
        "reason": reason,
        "message": message,
        "completionTime": at,
    },
    in_all=True,
    forbidden_by_quota=True,
    # Without the orphan finalizer its allocations are deleted first, and the controller removes the job.
    may_go=lambda _, finalizers: ORPHAN in finalizers,
    queue=queue_of,
    demand=_demand,
    words={
        "JobSpec.parallelism": "Number of allocations that run at once.",
        "JobSpec.completions": "Number that must succeed; default: parallelism.",
        "JobSpec.backoffLimit": "Number of failures before the job fails.",
        "JobSpec.backoffSeconds": "The pause before the first retry; each later one is twice as long, up to 6 minutes.",
        "JobSpec.onMemberFailure": "The same field of its allocations.",
        "JobSpec.activeDeadlineSeconds": "Maximum run time of the job in seconds.",
    },
    example={
        "metadata": {"name": "distributed-training-v2", "namespace": "ml-team"},
        "spec": {
            "parallelism": 8,
            "completions": 8,
            "backoffLimit": 3,
            "activeDeadlineSeconds": 86400,
            "template": {
                "spec": {
                    "resources": {"requests": {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "8"}},
                    "scheduling": {
                        "gangScheduling": {"minMembers": 8, "timeout": "600s"},
                        "nodeSelector": {"gpu-type": "nvidia-a100"},
                    },
                }
            },
            "priority": 200,
            "priorityClass": "batch-high",
            "queue": "gpu-training",
        },
    },
)
