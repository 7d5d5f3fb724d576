"""`spec.approval` of tenants and tiers: the gates that their requests pass, and `status.approval` of requests."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from msgspec import UNSET, UnsetType

from bursar.core.objects.approval import (
    EXTERNAL_GATE,
    GATE_FIELD,
    MANUAL_GATE,
    PENDING_SECONDS,
    QUOTA_GATE,
    STATE_FIELD,
    ApprovalPolicy,
    OnEnd,
)
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.meta import Text, Wire

GATES_MAX: Final = 8
PENDING_SECONDS_MAX: Final = 366 * 86_400
SELECTABLE: Final = (STATE_FIELD, GATE_FIELD)

# The old word for one gate.
APPROVAL_POLICIES: Final = {
    "none": (),
    "quota": (QUOTA_GATE,),
    "manual": (MANUAL_GATE,),
    "external": ("external:main",),
}

_EXTERNAL = re.compile(rf"{EXTERNAL_GATE}:[a-z0-9]([a-z0-9-]{{0,61}}[a-z0-9])?")


class ApprovalSpec(Wire):
    """The gates that requests of a tenant pass; a field that is left out has its default."""

    gates: list[str] | UnsetType = UNSET
    kinds: list[str] | UnsetType = UNSET
    pending_seconds: int | UnsetType = UNSET
    self_approval: bool | UnsetType = UNSET
    on_end: Text = UNSET


class GateState(Wire):
    state: str
    reason: Text = UNSET
    by: Text = UNSET
    at: Text = UNSET


class ApprovalChange(Wire):
    """The growth of an approved request that is not approved yet, or was denied."""

    state: str
    gates: dict[str, GateState] | UnsetType = UNSET
    reason: Text = UNSET
    by: Text = UNSET
    user: Text = UNSET
    at: Text = UNSET
    until: Text = UNSET
    pending_until: Text = UNSET
    self_approval: bool | UnsetType = UNSET
    on_end: Text = UNSET


class ApprovalStatus(Wire):
    """The approval of a request."""

    state: str
    gates: dict[str, GateState] | UnsetType = UNSET
    reason: Text = UNSET
    by: Text = UNSET
    user: Text = UNSET
    at: Text = UNSET
    until: Text = UNSET
    pending_until: Text = UNSET
    self_approval: bool | UnsetType = UNSET
    on_end: Text = UNSET
    notified: int | UnsetType = UNSET
    change: ApprovalChange | UnsetType = UNSET


def policy_in(spec: ApprovalSpec | UnsetType, old_word: Text = UNSET) -> ApprovalPolicy | None:
    """The policy of a spec, or of the old word for one gate; None if neither is given."""
    if isinstance(spec, ApprovalSpec):
        seconds = spec.pending_seconds
        return ApprovalPolicy(
            tuple(spec.gates or ()),
            frozenset(spec.kinds or ()),
            seconds if isinstance(seconds, int) else PENDING_SECONDS,
            spec.self_approval is True,
            OnEnd(spec.on_end) if isinstance(spec.on_end, str) else OnEnd.RELEASE,
        )
    return ApprovalPolicy(APPROVAL_POLICIES[old_word]) if isinstance(old_word, str) else None


def approval_faults(path: str, spec: ApprovalSpec | UnsetType, requestable: Collection[str]) -> Iterator[Cause]:
    """Faults of a policy; `requestable` are the kinds that can be requested."""
    if isinstance(spec, UnsetType):
        return
    yield from gate_faults(f"{path}.gates", spec.gates or ())
    for index, kind in enumerate(spec.kinds or ()):
        if kind not in requestable:
            known = ", ".join(sorted(requestable))
            yield field_fault(f"{path}.kinds[{index}]", f"is no kind that can be requested: {known}")
    seconds = spec.pending_seconds
    if isinstance(seconds, int) and not 0 <= seconds <= PENDING_SECONDS_MAX:
        yield field_fault(f"{path}.pendingSeconds", f"must be between 0 (no limit) and {PENDING_SECONDS_MAX}")
    if spec.on_end is not UNSET and spec.on_end not in tuple(OnEnd):
        yield field_fault(f"{path}.onEnd", f"must be one of {', '.join(OnEnd)}")


def gate_faults(path: str, gates: Sequence[str], *others: str) -> Iterator[Cause]:
    """Faults of a list of gates, which may also have some other words."""
    if len(gates) > GATES_MAX:
        yield field_fault(path, f"has more than {GATES_MAX} gates")
        return
    for index, gate in enumerate(gates):
        if gate not in (QUOTA_GATE, MANUAL_GATE, *others) and not _EXTERNAL.fullmatch(gate):
            words = ", ".join((QUOTA_GATE, MANUAL_GATE, f"{EXTERNAL_GATE}:NAME", *others))
            yield field_fault(f"{path}[{index}]", f"must be one of {words}")
        elif gate in gates[:index]:
            yield field_fault(f"{path}[{index}]", f"{gate} is named twice")
