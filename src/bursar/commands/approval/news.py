"""News of requests: an event for each decision and each time that has passed, and notifications for webhooks.

Both are committed with the change. This is the only place that writes them: commands call `put_with_news`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bursar.commands.objects.gate import approval_of
from bursar.commands.objects.status import status_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.approval import Approval, ApprovalReason, Decision, OnEnd, RequestNews
from bursar.core.objects.event_text import RequestEvent, request_why
from bursar.core.objects.notification import Notification
from bursar.core.objects.object import Key, Origin, Stored, Write
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode

# Passing a gate that others follow is an event, and no notification.
_TYPES: Final = {
    RequestEvent.APPROVED: RequestNews.APPROVED,
    RequestEvent.DENIED: RequestNews.DENIED,
    RequestEvent.NOTED: RequestNews.PENDING,
    RequestEvent.EXPIRED: RequestNews.EXPIRED,
    RequestEvent.ENDING: RequestNews.ENDING,
    RequestEvent.ENDED: RequestNews.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """The news of a request: the event, its sentence, and the gate, approver and reason that it names."""

    event: RequestEvent
    message: str
    gate: str = ""
    by: str = ""
    reason: str = ""
    growth: bool = False  # whether it is about the growth of an approved request


def put_with_news(batch: UnitOfWork, after: Stored, news: RequestMessage, origin: Origin) -> Write:
    """Store the object with the event, and notify its tenant's webhooks."""
    if (type_ := _TYPES.get(news.event)) is not None:
        batch.notifications.append(Notification(type_, after.tenant, subject_of(after.key), encode(_data(after, news))))
    return put_quietly(batch, after, news, origin)


def put_quietly(batch: UnitOfWork, after: Stored, news: RequestMessage, origin: Origin) -> Write:
    """Store the object with the event, without a notification."""
    return batch.put(after, Origin(origin.actor, origin.verb, request_why(news.event, news.message)))


def subject_of(key: Key) -> str:
    """The subject of a notification: `resourceclaims/ml-team/training-cluster`."""
    return "/".join(filter(None, (BY_NAME[key.kind].plural, key.namespace, key.name)))


def _data(after: Stored, news: RequestMessage) -> Mapping[str, Any]:
    approval = approval_of(after)
    assert approval is not None, "news are about requests"
    said = {
        "kind": after.key.kind,
        "namespace": after.key.namespace,
        "name": after.key.name,
        "uid": after.uid,
        "tenant": after.tenant,
        "user": status_of(after).get("user", ""),
        "state": str(approval.state),
        "gate": news.gate,
        "reason": news.reason,
        "by": news.by,
        "until": approval.until,
        "onEnd": str(approval.on_end) if approval.until else "",
        "message": news.message,
    }
    return {**{name: value for name, value in said.items() if value}, "growth": news.growth}


# The sentences.


def decided_news(
    event: RequestEvent, decision: Decision, request: Approval, *, reason: str, growth: bool
) -> RequestMessage:
    """The news of a decision at a gate; `request` is the request after it."""
    gate, by = decision.gate, decision.by
    match event:
        case RequestEvent.APPROVED:
            words = f"approved at gate {gate} by {by}" + (f", until {request.until}" if request.until else "")
        case RequestEvent.GATE_APPROVED:
            words = f"gate {gate} approved by {by}, next is gate {request.gate}"
        case RequestEvent.NOTED:
            words = f"left pending at gate {gate} by {by}"
        case _:
            words = f"denied at gate {gate} by {by}"
    return RequestMessage(event, _sentence(words, reason, growth=growth), gate, by, reason, growth)


def undecided_news(request: Approval, *, growth: bool) -> RequestMessage:
    """The news that nobody decided in time; `request` is the request before that."""
    words = f"nobody decided at gate {request.gate} until {request.pending_until}"
    noted = request.gates[request.gate].reason
    message, why = _sentence(words, noted, growth=growth), str(ApprovalReason.UNDECIDED)
    return RequestMessage(RequestEvent.EXPIRED, message, request.gate, reason=why, growth=growth)


def ending_news(approval: Approval) -> RequestMessage:
    return RequestMessage(RequestEvent.ENDING, f"the approval ends at {approval.until}: {_ON_END[approval.on_end]}")


def ended_news(approval: Approval) -> RequestMessage:
    words = f"{ended_text(approval)}: {_ON_END[approval.on_end]}"
    return RequestMessage(RequestEvent.ENDED, words, reason=approval.reason)


def ended_text(approval: Approval) -> str:
    return f"its approval ended at {approval.until}"


_ON_END: Final = {
    OnEnd.RELEASE: "work is stopped with its grace period, and its charge given back",
    OnEnd.FREEZE: "what it holds stays, and it cannot grow",
    OnEnd.KEEP: "it goes on as before",
}


def _sentence(words: str, reason: str, *, growth: bool) -> str:
    subject = "growth " if growth else ""
    return f"{subject}{words}: {reason}" if reason else f"{subject}{words}"
