"""An administrator stops an allocation so that it is pending again, whatever the rules of the scheduler are."""

from __future__ import annotations

import msgspec

from bursar.api.http.action import faulty, grace_faults, read_action, words_faults
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, origin_of, recall
from bursar.commands.command import Reply, Written
from bursar.commands.workloads.allocation import request_in
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice, admin_message
from bursar.core.nodes.node_claim import SENSITIVE
from bursar.core.objects.object import Key, Stored
from bursar.core.values.quantity import format_granted
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault
from bursar.ops.objects.object import get
from bursar.ops.scheduling import placement as ops
from bursar.wire.shared.document import encode
from bursar.wire.to_scheduler.ask import queue_profile_of

GRACE_SECONDS = 30


_SENSITIVE = Refusal(
    Code.CONFLICT,
    "sensitive work is never preempted",
    "Ask who submitted it to delete it. To empty its node all the same, drain it.",
)


class NewPreemption(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    target_allocation: str
    reason: str = ""
    grace_period_seconds: int = GRACE_SECONDS
    initiated_by: str = ""  # the user on whose behalf the caller acts; the caller is recorded in any case


class Preemption(msgspec.Struct, rename="camel"):
    preemption_id: str
    target_allocation: str
    status: str
    grace_period_ends: str
    resources_freed: dict[str, str]


async def create(call: Call) -> Outcome:
    """Preempt an allocation. Minimum runtimes bind the scheduler, not an administrator."""
    asked = read_action(call, NewPreemption, "preemption")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    if causes := _faults(wanted):
        return faulty("preemption", causes)
    found = await find(call, Key("Allocation", call.parameters["namespace"], wanted.target_allocation))
    if isinstance(found, Refusal):
        # It may be gone since the same request was answered.
        recalled = await recall(call, idempotency_key, found)
        return recalled if isinstance(recalled, Refusal) else _answer(recalled)
    if await _is_sensitive(call, found):
        return _SENSITIVE
    by = wanted.initiated_by or call.identity.actor
    message = admin_message(by, wanted.reason)
    notice = Notice(EvictionReason.PREEMPTED, EvictionRule.ADMIN, by, message, wanted.grace_period_seconds)
    reply = await ops.evict(
        call.context.runtime, found, notice, origin_of(call, message), idempotency_key=idempotency_key, dry_run=dry
    )
    return reply if isinstance(reply, Refusal) else _answer(reply)


async def _is_sensitive(call: Call, one: Stored) -> bool:
    """By itself, or by the queue it is in."""
    if request_in(one.doc).sensitive:
        return True
    queue = await get(call.context.runtime, Key("Queue", "", one.fields.get("spec.queue", "")))
    return not isinstance(queue, Refusal) and queue_profile_of(queue.doc) == SENSITIVE


def _faults(wanted: NewPreemption) -> list[Cause]:
    required = field_fault("targetAllocation", "is required: the name of an allocation")
    return [
        *(() if wanted.target_allocation else (required,)),
        *grace_faults(wanted.grace_period_seconds),
        *words_faults(reason=wanted.reason, initiatedBy=wanted.initiated_by),
    ]


def _answer(reply: Reply) -> Answer:
    assert isinstance(reply, Written)
    notice = msgspec.json.decode(reply.status)["eviction"]
    request = request_in(reply.doc)
    freed = {name: format_granted(name, value * request.nodes) for name, value in request.requests.items()}
    made = Preemption(notice["id"], reply.key.name, "Initiated", notice["deadline"], freed)
    return Answer(201, encode(made))
