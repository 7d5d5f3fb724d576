"""Stored jobs, decoded for the rules: their progress, and the allocations that are their members."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from bursar.commands.objects.gate import kept_fields
from bursar.commands.objects.status import set_condition, status_of
from bursar.core.nodes.eviction import EvictionReason as Stopped
from bursar.core.objects.allocation import Phase
from bursar.core.objects.approval import STATE_FIELD, ApprovalState, approval_in
from bursar.core.objects.finalizer import ORPHAN
from bursar.core.objects.job import (
    JOB_ENDED,
    Boost,
    JobAttempt,
    JobMember,
    JobPhase,
    JobProgress,
    format_indexes,
    parse_indexes,
    turn_name,
)
from bursar.core.objects.object import Key, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.job import Job, JobSpec, status_fields
from bursar.wire.shared.document import encode, finalizers_of, is_ending

BLOCKED = "Blocked"

_decode_job = msgspec.json.Decoder(Job).decode


def spec_in(doc: bytes) -> JobSpec:
    return _decode_job(doc).spec


# Progress.


def progress_in(job: Stored) -> JobProgress:
    status = status_of(job)
    boost = status.get("boost")
    failures = {int(index): count for index, count in status.get("failedTries", {}).items()}
    return JobProgress(
        phase=JobPhase(status.get("phase", JobPhase.QUEUED)),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        started=status.get("startedIndexes", 0),
        completed=parse_indexes(status.get("completedIndexes", "")),
        failures=failures,
        spared=sum(failures.values()) - status.get("failed", 0),
        retry_at=_time(status.get("nextRetryTime")),
        active=status.get("active", 0),
        started_at=_time(status.get("startTime")),
        ended_at=_time(status.get("completionTime")),
        boost=Boost(boost["priority"], datetime.fromisoformat(boost["expires"])) if boost else None,
        deleting=is_ending(job.doc),
        held=bool(finalizers_of(job.doc)),
        orphaning=ORPHAN in finalizers_of(job.doc),
        frozen=_is_frozen(job, status),
    )


def _is_frozen(job: Stored, status: dict[str, Any]) -> bool:
    if job.fields.get(STATE_FIELD) != ApprovalState.EXPIRED:
        return False
    approval = approval_in(status)
    return approval is not None and approval.frozen


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def with_progress(job: Stored, progress: JobProgress, at: str, blocked: Refusal | None = None) -> Stored:
    """The job with this progress; `blocked` is why no more allocations could be created."""
    status = status_of(job)
    status |= {
        "phase": str(progress.phase),
        "active": progress.active,
        "succeeded": progress.succeeded,
        "failed": progress.failed,
        "startedIndexes": progress.started,
    }
    goes_on = progress.phase in (JobPhase.QUEUED, JobPhase.RUNNING)
    told: dict[str, Any] = {
        "reason": progress.reason,
        "message": progress.message,
        "completedIndexes": format_indexes(progress.completed),
        "failedTries": {str(index): count for index, count in sorted(progress.failures.items())},
        "nextRetryTime": timestamp(progress.retry_at) if progress.retry_at and goes_on else "",
        "startTime": timestamp(progress.started_at) if progress.started_at else "",
        "completionTime": timestamp(progress.ended_at) if progress.ended_at else "",
        "boost": status.get("boost") if progress.boost is not None else None,
    }
    for name, value in told.items():
        if value:
            status[name] = value
        else:
            status.pop(name, None)
    _set_conditions(status, progress, at)
    _set_blocked(status, blocked, at)
    fields = status_fields(progress.phase, spec_in(job.doc), settled=progress.settled, user=status.get("user", ""))
    approval = kept_fields(job, has_ended=progress.phase in JOB_ENDED)
    return replace(job, status=encode(status), fields={**fields, **approval})


_CONDITIONS = {
    JobPhase.SUCCEEDED: "Complete",
    JobPhase.FAILED: "Failed",
    JobPhase.CANCELLING: "Cancelling",
    JobPhase.CANCELLED: "Cancelled",
}


def _set_conditions(status: dict[str, Any], progress: JobProgress, at: str) -> None:
    if progress.phase is not JobPhase.QUEUED:
        set_condition(status, "Queued", "False", str(progress.phase), "", at)
    if progress.phase in _CONDITIONS:
        status["conditions"] = [one for one in status["conditions"] if one["type"] != _CONDITIONS[JobPhase.CANCELLING]]
        reason = progress.reason or str(progress.phase)
        set_condition(status, _CONDITIONS[progress.phase], "True", reason, progress.message, at)


def _set_blocked(status: dict[str, Any], blocked: Refusal | None, at: str) -> None:
    if blocked is not None:
        reason = "QuotaExceeded" if blocked.code is Code.QUOTA_EXCEEDED else "Refused"
        set_condition(status, BLOCKED, "True", reason, blocked.message, at)
    elif any(one["type"] == BLOCKED for one in status.get("conditions", ())):
        set_condition(status, BLOCKED, "False", "Admitted", "", at)


def is_blocked(status: bytes) -> bool:
    conditions = msgspec.json.decode(status).get("conditions", ())
    return any(one["type"] == BLOCKED and one["status"] == "True" for one in conditions)


# Members.


class _Owner(msgspec.Struct):
    uid: str = ""


class _Metadata(msgspec.Struct, rename="camel"):
    owner_references: list[_Owner] = []


class _Owned(msgspec.Struct):
    metadata: _Metadata


_decode_owned = msgspec.json.Decoder(_Owned).decode


def is_owned(doc: bytes, uid: str) -> bool:
    """Whether an allocation is the job's own. Its name proves nothing, because a user may choose the same name."""
    return any(owner.uid == uid for owner in _decode_owned(doc).metadata.owner_references)


class _Status(msgspec.Struct, rename="camel"):
    start_time: str = ""
    reason: str = ""
    message: str = ""
    exit_code: int | None = None


_decode_status = msgspec.json.Decoder(_Status).decode


def member(name: str, turn: JobAttempt, phase: str, doc: bytes, status: bytes) -> JobMember:
    said = _decode_status(status)
    code = f"exit code {said.exit_code}" if said.exit_code and not said.message else ""
    why = ": ".join(filter(None, (name, said.reason, said.message, code)))
    spared = said.reason == Stopped.MEMBER_FAILED
    return JobMember(turn, Phase(phase), _time(said.start_time), why, spared, is_ending(doc))


def member_key(job: Key, turn: JobAttempt) -> Key:
    return Key(ALLOCATION.name, job.namespace, turn_name(job.name, turn))
