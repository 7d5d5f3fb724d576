"""How a line of the audit log reads as a Kubernetes event: its reason, whether it is a warning, and its message."""

from __future__ import annotations

from typing import Final, NamedTuple

from bursar.core.objects.allocation import Phase

_REASONS: Final = {"ADDED": "Created", "MODIFIED": "Changed", "DELETED": "Deleted"}

# Reasons of evictions, and of what ended badly: these are warnings.
_STOPPING: Final = {"preempt": "Preempted", "drain": "Drained", "evict": "Evicted"}
_PHASES: Final = {
    Phase.RUNNING: ("Started", "started"),
    Phase.SUCCEEDED: ("Succeeded", "succeeded"),
    Phase.CANCELLED: ("Cancelled", "cancelled"),
    Phase.PENDING: ("Requeued", "pending again"),
    Phase.TERMINATING: ("Stopping", "is being stopped"),
}


class Standing(NamedTuple):
    """How an allocation stood after a change."""

    phase: str
    node: str = ""
    message: str = ""
    exit_code: int | None = None


class Told(NamedTuple):
    reason: str
    warning: bool
    message: str


def tell(type_: str, verb: str, actor: str, why: str, after: Standing | None = None) -> Told:
    """`Scheduled: placed on gpu-7` where an allocation's change has a word in Kubernetes; else who did what and why."""
    plain = Told(_REASONS[type_], False, f"{verb} by {actor}" + (f": {why}" if why else ""))
    if after is None or type_ != "MODIFIED":
        return plain
    if verb == "bind":
        return Told("Scheduled", False, f"placed on {after.node}" if after.node else "placed")
    if verb == "refuse":
        return Told("OutOfCredit", True, after.message or plain.message)
    if verb == "grant":
        return Told("CreditRestored", False, "its time is paid for again")
    if verb == "note":
        return Told("FailedScheduling", True, after.message or "cannot be placed now")
    if verb in _STOPPING and after.phase == Phase.TERMINATING:
        return Told(_STOPPING[verb], True, after.message or plain.message)
    return _reported(after) if verb in ("report", "end", "fail") else plain


def _reported(after: Standing) -> Told:
    if after.phase == Phase.FAILED:
        code = f"exit code {after.exit_code}" if after.exit_code is not None else "failed"
        return Told("Failed", True, after.message or code)
    reason, words = _PHASES.get(Phase(after.phase), ("Changed", after.phase))
    where = f"{words} on {after.node}" if after.node and after.phase in (Phase.RUNNING, Phase.SUCCEEDED) else words
    return Told(reason, False, f"{where}: {after.message}" if after.message else where)
