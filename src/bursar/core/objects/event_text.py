"""Kubernetes events from entries of the audit log: the reason, the type (normal or warning) and the message."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from bursar.core.objects.allocation import Phase
from bursar.core.objects.job import JOB_ENDED, JobPhase, JobProgress
from bursar.core.values.wording import listed

_REASONS: Final = {"ADDED": "Created", "MODIFIED": "Changed", "DELETED": "Deleted"}

# Verbs of evictions: their events are warnings.
_STOPPING: Final = {"preempt": "Preempted", "drain": "Drained", "evict": "Evicted"}
_PHASES: Final = {
    Phase.RUNNING: ("Started", "started"),
    Phase.SUCCEEDED: ("Succeeded", "succeeded"),
    Phase.CANCELLED: ("Cancelled", "cancelled"),
    Phase.PENDING: ("Requeued", "pending again"),
    Phase.TERMINATING: ("Stopping", "is being stopped"),
}


# The verb of the job controller. The audit entry's reason is the effect of the step:
# `SuccessfulCreate: created allocation train-0`.
STEP: Final = "step"


class StepReason(StrEnum):
    """The reason of an event of a job, as Kubernetes names it if it has a name."""

    COMPLETED = "Completed"  # the job has succeeded
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"  # more allocations failed than `backoffLimit`
    DEADLINE_EXCEEDED = "DeadlineExceeded"  # the job ran longer than `activeDeadlineSeconds`
    CANCELLED = "Cancelled"  # the job was cancelled
    FAILED_CREATE = "FailedCreate"  # the controller could not create an allocation
    SUCCESSFUL_CREATE = "SuccessfulCreate"  # the controller created allocations
    ALLOCATION_FAILED = "AllocationFailed"  # an allocation of the job failed
    PROGRESSED = "Progressed"  # an allocation of the job succeeded
    STARTED = "Started"  # the first allocation of the job runs


class RequestEvent(StrEnum):
    """The reason of an event of a request that passes approval gates."""

    AWAITING = "AwaitingApproval"  # it was requested
    GATE_APPROVED = "GateApproved"  # it passed a gate, and another one follows
    APPROVED = "Approved"  # it passed the last gate
    DENIED = "Denied"
    NOTED = "ApprovalNoted"  # it was left pending, with a new reason
    EXPIRED = "ApprovalExpired"  # nobody decided in time
    ENDING = "ApprovalEnding"  # its approval ends soon
    ENDED = "ApprovalEnded"  # its approval has ended


# The verbs of requests, of decisions and of what is due for approvals. The audit entry's reason is the event:
# `Denied: denied at gate manual by ann: too much`.
_REQUEST_VERBS: Final = frozenset({"create", "update", "patch", "approve", "deny", "note", "expire"})
_REQUEST_EVENTS: Final = {reason.value: reason for reason in RequestEvent}
_REQUEST_WARNINGS: Final = frozenset({RequestEvent.DENIED, RequestEvent.EXPIRED, RequestEvent.ENDED})

_STEPS: Final = {reason.value: reason for reason in StepReason}
_STEP_WARNINGS: Final = frozenset(
    {
        StepReason.BACKOFF_LIMIT_EXCEEDED,
        StepReason.DEADLINE_EXCEEDED,
        StepReason.FAILED_CREATE,
        StepReason.ALLOCATION_FAILED,
    }
)


class ObjectState(NamedTuple):
    """The state of an allocation after a change, as far as events show it."""

    phase: str
    nodes: tuple[str, ...] = ()
    message: str = ""
    exit_code: int | None = None
    waits_for: str = ""  # its pending reason, from its condition `Scheduled`

    @property
    def where(self) -> str:
        """The nodes as a phrase: ` on gpu-7`, ` on 2 nodes: gpu-7, gpu-8`; empty without nodes."""
        return f" on {listed(self.nodes, 'node')}" if self.nodes else ""


class EventText(NamedTuple):
    """The reason, type and message of a Kubernetes event."""

    reason: str
    warning: bool
    message: str


def tell(type_: str, verb: str, actor: str, why: str, after: ObjectState | None = None) -> EventText:
    """The event of a change: `Scheduled: placed on gpu-7` if Kubernetes has a reason for it, else actor and verb."""
    plain = EventText(_REASONS[type_], False, f"{verb} by {actor}" + (f": {why}" if why else ""))
    if verb in _REQUEST_VERBS and (request := _request_event(why)) is not None:
        return request
    if type_ == "MODIFIED" and verb == STEP and (step := _step_event(why)) is not None:
        return step
    if after is None or type_ != "MODIFIED":
        return plain
    if verb == "bind":
        return EventText("Scheduled", False, f"placed{after.where}")
    if verb == "refuse":
        return EventText("OutOfCredit", True, after.message or plain.message)
    if verb == "grant":
        return EventText("CreditRestored", False, "its lease is extended again")
    if verb == "note":
        # The message of evicted work still says why it was stopped; the condition has the current reason.
        return EventText("FailedScheduling", True, after.waits_for or after.message or "cannot be placed now")
    if verb == STEP and after.phase == Phase.TERMINATING:
        return EventText("Stopping", False, "is being stopped by its job")
    if verb in _STOPPING and after.phase == Phase.TERMINATING:
        return EventText(_STOPPING[verb], True, after.message or plain.message)
    return _reported(after) if verb in ("report", "end", "fail") else plain


def request_why(event: RequestEvent, message: str) -> str:
    """The event of a request with its message, as one line."""
    return f"{event}: {' '.join(message.split())}"


def _request_event(why: str) -> EventText | None:
    """The event of a request, from the line that `request_why` wrote."""
    word, _, message = why.partition(": ")
    reason = _REQUEST_EVENTS.get(word)
    return EventText(reason, reason in _REQUEST_WARNINGS, message) if reason is not None and message else None


def _reported(after: ObjectState) -> EventText:
    if after.phase == Phase.FAILED:
        code = f"exit code {after.exit_code}" if after.exit_code is not None else "failed"
        return EventText("Failed", True, after.message or code)
    reason, words = _PHASES.get(Phase(after.phase), ("Changed", after.phase))
    where = f"{words}{after.where}" if after.phase in (Phase.RUNNING, Phase.SUCCEEDED) else words
    return EventText(reason, False, f"{where}: {after.message}" if after.message else where)


# Jobs.


def step_why(before: JobProgress, after: JobProgress, made: Sequence[str], blocked: str = "") -> str:
    """The most important effect of a step as one line; empty without effect."""
    if after.phase in JOB_ENDED and before.phase not in JOB_ENDED:
        return _end_why(after)
    if blocked:
        return f"{StepReason.FAILED_CREATE}: {' '.join(blocked.split())}"
    if made:
        what = f"allocation {made[0]}" if len(made) == 1 else listed(made, "allocation")
        return f"{StepReason.SUCCESSFUL_CREATE}: created {what}"
    if after.failed > before.failed:
        return f"{StepReason.ALLOCATION_FAILED}: {after.message or 'an allocation failed'}"
    if after.succeeded > before.succeeded:
        return f"{StepReason.PROGRESSED}: {after.succeeded} succeeded, {after.active} active"
    if after.phase is JobPhase.RUNNING and before.phase is JobPhase.QUEUED:
        return f"{StepReason.STARTED}: the first allocation runs"
    return ""


def _end_why(after: JobProgress) -> str:
    if after.phase is JobPhase.SUCCEEDED:
        return f"{StepReason.COMPLETED}: job completed"
    if after.phase is JobPhase.FAILED:
        return f"{after.reason}: {after.message}"
    return f"{StepReason.CANCELLED}: job cancelled"


def _step_event(why: str) -> EventText | None:
    """The event of a step, from the line that `step_why` wrote."""
    word, _, message = why.partition(": ")
    reason = _STEPS.get(word)
    return EventText(reason, reason in _STEP_WARNINGS, message) if reason is not None and message else None
