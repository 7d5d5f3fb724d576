"""Approvals: the gates that a request passes before it is acted on, as a state machine.

A request is pending at the first gate that is not decided yet. Gates are decided in order. A denial at any gate is
final; the approval at the last gate approves the request, if its charge has headroom then. Growth of an approved
request is a request of its own: its `change`, with the same gates, while the approved size stays in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct

from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace

QUOTA_GATE: Final = "quota"
MANUAL_GATE: Final = "manual"
EXTERNAL_GATE: Final = "external"  # external:<name>
PENDING_SECONDS: Final = 30 * 86_400
# The time before `until` at which the requester is notified.
NOTICE_SECONDS: Final = (7 * 86_400, 86_400)

PENDING_REQUESTS: Final = "pending_requests"  # the dimension that bounds undecided requests
AWAITING_APPROVAL: Final = "awaiting_approval"

# Selectable fields: the state, and the gate that is to be decided next.
STATE_FIELD: Final = "status.approval.state"
GATE_FIELD: Final = "status.approval.gate"
# Fields for the store, not for clients: since when that gate is open, when a reason was noted there last, and the time
# at which something is due.
SINCE_FIELD: Final = "status.approval.since"
NOTED_FIELD: Final = "status.approval.noted"
DUE_FIELD: Final = "status.approval.due"


class ApprovalState(StrEnum):
    """The state of a request, or of one of its gates."""

    PENDING = "pending"  # not decided yet: the request holds nothing and is not acted on
    APPROVED = "approved"  # admitted, and charged
    DENIED = "denied"  # refused at a gate
    EXPIRED = "expired"  # not decided in time, withdrawn, or approved until a time that has passed


class ApprovalReason(StrEnum):
    """The reason of the state `expired`."""

    UNDECIDED = "Undecided"  # nobody decided within `pendingSeconds`
    WITHDRAWN = "Withdrawn"  # the requester cancelled it
    ENDED = "Ended"  # it was approved until a time that has passed


class Verdict(StrEnum):
    """A decision at a gate."""

    APPROVE = "approve"  # passes the gate
    DENY = "deny"  # denies the request
    NOTE = "note"  # leaves the gate pending, and says why


class OnEnd(StrEnum):
    """The effect of the end of an approval on approved work."""

    RELEASE = "release"  # it is stopped with its grace period, and its charge given back
    FREEZE = "freeze"  # it goes on, and cannot grow: more needs a new approval, and a job makes no new allocations
    KEEP = "keep"  # it goes on as before


class RequestNews(StrEnum):
    """The type of a notification about a request, for the webhooks of its tenant."""

    APPROVED = "request.approved"
    DENIED = "request.denied"
    PENDING = "request.pending"  # it was left pending, and the reason is new
    ENDING = "request.ending"  # its approval ends soon
    EXPIRED = "request.expired"  # nobody decided in time, or its approval has ended


@dataclass(frozen=True, slots=True)
class ApprovalPolicy:
    """The approvals that requests of a tenant need. Without gates they need none; without kinds, all kinds do."""

    gates: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    pending_seconds: int = PENDING_SECONDS
    self_approval: bool = False
    on_end: OnEnd = OnEnd.RELEASE

    def gates_of(self, kind: str) -> tuple[str, ...]:
        """The gates that a new object of a kind must pass."""
        return self.gates if not self.kinds or kind in self.kinds else ()


NO_APPROVAL: Final = ApprovalPolicy()


class GateStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A gate of a request: its state, and the last decision or note."""

    state: ApprovalState
    reason: str = ""
    by: str = ""
    at: str = ""


class Approval(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The approval of a request. Its gates are in the order in which they are decided."""

    state: ApprovalState
    gates: dict[str, GateStatus] = {}
    reason: str = ""
    by: str = ""  # the approver at the last decided gate
    user: str = ""  # the user who asked for growth or asked again, if that is not the request's own
    at: str = ""  # the time of the state
    until: str = ""  # the time at which the approval ends
    pending_until: str = ""  # the time at which an undecided request expires
    self_approval: bool = False
    on_end: OnEnd = OnEnd.RELEASE
    notified: int = 0  # how many of the notices of the coming end are due no more
    change: Approval | None = None  # the growth that is not approved yet, or was denied

    @property
    def gate(self) -> str:
        """The gate that is decided next; empty if none is."""
        if self.state is not ApprovalState.PENDING:
            return ""
        return next((name for name, gate in self.gates.items() if gate.state is ApprovalState.PENDING), "")

    @property
    def passed(self) -> bool:
        """Whether any gate is passed."""
        return any(one.state is ApprovalState.APPROVED for one in self.gates.values())

    @property
    def ended(self) -> bool:
        """Whether it was approved until a time that has passed."""
        return self.state is ApprovalState.EXPIRED and self.reason == ApprovalReason.ENDED

    @property
    def frozen(self) -> bool:
        """Whether it has ended, and what it holds stays but must not grow."""
        return self.ended and self.on_end is OnEnd.FREEZE

    @property
    def open(self) -> Approval | None:
        """The request that is pending: this one, or its growth."""
        if self.state is ApprovalState.PENDING:
            return self
        return self.change.open if self.change is not None else None

    @property
    def since(self) -> str:
        """The time since which it is pending at its present gate."""
        passed = [one.at for one in self.gates.values() if one.state is ApprovalState.APPROVED]
        return max(passed, default=self.at)

    @property
    def noted(self) -> str:
        """The time of the last note at its present gate; empty if nobody has looked at it."""
        gate = self.gates.get(self.gate)
        return gate.at if gate is not None else ""


def requested(policy: ApprovalPolicy, gates: Iterable[str], at: datetime) -> Approval:
    """The approval of a new request."""
    return Approval(
        ApprovalState.PENDING,
        {name: GateStatus(ApprovalState.PENDING) for name in gates},
        at=timestamp(at),
        pending_until=timestamp(at + timedelta(seconds=policy.pending_seconds)) if policy.pending_seconds else "",
        self_approval=policy.self_approval,
        on_end=policy.on_end,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision at a gate, with the approver and, if it approves for a limited time, the end."""

    gate: str
    verdict: Verdict
    by: str
    reason: str = ""
    until: str = ""


def decided(name: str, approval: Approval, decision: Decision, at: datetime) -> Approval | Refusal:
    """The approval after a decision. Whether the charge of an approved request has headroom is decided elsewhere."""
    if refusal := undecidable(name, approval, decision.gate):
        return refusal
    now = timestamp(at)
    state = _GATE_STATES[decision.verdict]
    gates = {**approval.gates, decision.gate: GateStatus(state, decision.reason, decision.by, now)}
    if decision.verdict is Verdict.NOTE:
        return replace(approval, gates=gates, reason=decision.reason)
    until = min(filter(None, (approval.until, decision.until)), default="")
    after = replace(approval, gates=gates, reason=decision.reason, by=decision.by, until=until)
    if decision.verdict is Verdict.DENY:
        return replace(after, state=ApprovalState.DENIED, at=now, pending_until="")
    if all(one.state is ApprovalState.APPROVED for one in gates.values()):
        # The approval itself says when it ends, so notices whose time has passed already are left out.
        return replace(
            after, state=ApprovalState.APPROVED, at=now, pending_until="", notified=notices_before(until, now)
        )
    return after


_GATE_STATES: Final = {
    Verdict.APPROVE: ApprovalState.APPROVED,
    Verdict.DENY: ApprovalState.DENIED,
    Verdict.NOTE: ApprovalState.PENDING,
}


def undecidable(name: str, approval: Approval, gate: str) -> Refusal | None:
    """The refusal of a decision at a gate; None if the gate is decided next."""
    if approval.state is not ApprovalState.PENDING:
        by = f" by {approval.by}" if approval.by else ""
        return Refusal(
            Code.DECIDED,
            f"{name} is {approval.state} already{by}, since {approval.at}",
            "Read the object again: its status.approval shows the decision.",
        )
    if gate not in approval.gates:
        return Refusal(
            Code.UNPROCESSABLE,
            f"{name} has no gate {gate[:63]!r}: its gates are {', '.join(approval.gates)}",
            "Name one of these gates.",
        )
    if gate != approval.gate:
        now = approval.gates[gate].state
        if now is not ApprovalState.PENDING:
            return Refusal(
                Code.DECIDED,
                f"gate {gate} of {name} is {now} already by {approval.gates[gate].by}; next is gate {approval.gate}",
                f"Decide gate {approval.gate}.",
            )
        return Refusal(
            Code.CONFLICT,
            f"gate {gate} of {name} is decided after gate {approval.gate}, which is pending",
            f"Wait until gate {approval.gate} is decided.",
        )
    return None


def without_headroom(approval: Approval, decision: Decision, reason: str, at: datetime) -> Approval:
    """The approval after its last gate was approved but its charge has no headroom: that gate stays pending."""
    note = GateStatus(ApprovalState.PENDING, reason, decision.by, timestamp(at))
    return replace(approval, gates={**approval.gates, decision.gate: note}, reason=reason)


def expired(approval: Approval, reason: ApprovalReason, at: datetime) -> Approval:
    """The approval after its time has passed."""
    return replace(
        approval, state=ApprovalState.EXPIRED, reason=str(reason), at=timestamp(at), pending_until="", change=None
    )


def ended(approval: Approval, at: datetime) -> Approval:
    """The approval after its end. Pending growth is a request of its own, which stays unless everything is released."""
    change = approval.change if approval.on_end is not OnEnd.RELEASE else None
    return replace(expired(approval, ApprovalReason.ENDED, at), change=change)


def grown(approval: Approval, growth: Approval) -> Approval:
    """The approval after its growth was approved. Approved growth is an approval of the whole, also of one that has
    ended: it has the end of the growth or, if that has none, still its own."""
    if growth.until:
        until, notified, on_end = growth.until, growth.notified, growth.on_end
    else:
        until, notified, on_end = "" if approval.ended else approval.until, approval.notified, approval.on_end
    return replace(
        approval, state=ApprovalState.APPROVED, gates=growth.gates, reason=growth.reason, by=growth.by, at=growth.at,
        until=until, notified=notified, on_end=on_end, change=None,
    )  # fmt: skip


# Stored form: a part of the status, and the fields to select by.

_convert = msgspec.convert


def approval_in(status: Mapping[str, Any]) -> Approval | None:
    """The approval in a decoded status; None for objects that need none."""
    said = status.get("approval")
    return _convert(said, Approval) if said is not None else None


def stored_form(approval: Approval) -> dict[str, Any]:
    """The approval as it is stored in the status."""
    return msgspec.to_builtins(approval)  # type: ignore[no-any-return]


def approval_fields(approval: Approval | None) -> dict[str, str]:
    """The fields to select by; none for objects that need no approval."""
    if approval is None:
        return {}
    fields = {STATE_FIELD: str(approval.state)}
    if (request := approval.open) is not None:
        fields |= {GATE_FIELD: request.gate, SINCE_FIELD: request.since}
        if request.noted:
            fields[NOTED_FIELD] = request.noted
    if due := next_due(approval):
        fields[DUE_FIELD] = due
    return fields


def next_due(approval: Approval) -> str:
    """The time at which an approval expires or its requester is notified; empty if nothing is due."""
    times = [approval.pending_until, approval.change.pending_until if approval.change is not None else ""]
    if approval.state is ApprovalState.APPROVED and approval.until:
        times.append(_next_notice(approval))
    return min(filter(None, times), default="")


def _next_notice(approval: Approval) -> str:
    """The time of the next notice before the end, or of the end itself."""
    if approval.notified >= len(NOTICE_SECONDS):
        return approval.until
    return _notice_at(approval.until, NOTICE_SECONDS[approval.notified])


def _notice_at(until: str, seconds: int) -> str:
    return timestamp(datetime.fromisoformat(until) - timedelta(seconds=seconds))


def notices_before(until: str, at: str) -> int:
    """How many of the notices before an end have their time at or before `at`; none without an end."""
    return sum(_notice_at(until, seconds) <= at for seconds in NOTICE_SECONDS) if until else 0


def is_own_request(requester: str, by: str, tenants: Iterable[str]) -> bool:
    """Whether an approver decides on a request of their own.

    A requester is `tenant/user`, or `user` for users of no tenant. The same person may be an approver, whose identity
    names no tenant but those that it decides for: the same user name counts as the same person. In which tenant does
    not matter, because approvers decide for subtrees, and a parent's administrator may request in a child.
    """
    if requester == by:
        return True
    _, slash, user = requester.partition("/")
    return bool(slash) and user == by and any(tenants)


def waiting_text(gate: str) -> str:
    """Why a request is pending, as a sentence."""
    who = {QUOTA_GATE: "the quota service", MANUAL_GATE: "an approver"}.get(gate, f"the service of gate {gate}")
    return f"awaiting approval at gate {gate}: {who} decides"
