"""An administrator stops an allocation so that it waits again, whatever the scheduler's own rules would say."""

from __future__ import annotations

import msgspec

from bursar.api.body import claim_of, dry_run, read_document
from bursar.api.object import find, origin_of, recall
from bursar.api.route import Answer, Call, Outcome
from bursar.core.eviction import Notice, Reason, Rule, admin_message
from bursar.core.object import Key
from bursar.core.quantity import format_amount
from bursar.core.refusal import Cause, Refusal, field_fault, invalid
from bursar.ops import evict as ops
from bursar.ops.allocation import request_in
from bursar.ops.command import Reply, Written
from bursar.wire.document import encode
from bursar.wire.faults import all_faults

GRACE_SECONDS = 30
GRACE_SECONDS_MAX = 10**7
WORDS_CHARS_MAX = 1024


class NewPreemption(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    target_allocation: str
    reason: str = ""
    grace_period_seconds: int = GRACE_SECONDS
    initiated_by: str = ""  # for whom the caller acts; the caller is recorded in any case


class Preemption(msgspec.Struct, rename="camel"):
    preemption_id: str
    target_allocation: str
    status: str
    grace_period_ends: str
    resources_freed: dict[str, str]


async def create(call: Call) -> Outcome:
    """Preempt an allocation. Minimum runtimes are the scheduler's; an administrator's word stands above them."""
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    request_id = document.pop("request_id", "") if isinstance(document, dict) else ""
    claim, dry = claim_of(call, request_id), dry_run(call)
    if isinstance(claim, Refusal):
        return claim
    if isinstance(dry, Refusal):
        return dry
    try:
        wanted = msgspec.convert(document, NewPreemption)
    except msgspec.ValidationError as error:
        causes = [field_fault(path, message) for path, message in all_faults(NewPreemption, document)]
        return invalid(f"the preemption is invalid: {error}", *causes)
    if causes := _faults(wanted):
        return invalid("; ".join(f"{one.field}: {one.message}" for one in causes), *causes)
    found = await find(call, Key("Allocation", call.parameters["namespace"], wanted.target_allocation))
    if isinstance(found, Refusal):
        # It may be gone since the same request was answered.
        recalled = await recall(call, claim, found)
        return recalled if isinstance(recalled, Refusal) else _answer(recalled)
    by = wanted.initiated_by or call.identity.actor
    message = admin_message(by, wanted.reason)
    notice = Notice(Reason.PREEMPTED, Rule.ADMIN, by, message, wanted.grace_period_seconds)
    reply = await ops.evict(call.house.office, found, notice, origin_of(call, message), claim=claim, dry_run=dry)
    return reply if isinstance(reply, Refusal) else _answer(reply)


def _faults(wanted: NewPreemption) -> list[Cause]:
    causes = []
    if not wanted.target_allocation:
        causes.append(field_fault("targetAllocation", "is required: the name of an allocation"))
    if not 0 <= wanted.grace_period_seconds < GRACE_SECONDS_MAX:
        causes.append(field_fault("gracePeriodSeconds", "must be a number of seconds, not negative"))
    for name, text in (("reason", wanted.reason), ("initiatedBy", wanted.initiated_by)):
        if len(text) > WORDS_CHARS_MAX:
            causes.append(field_fault(name, f"must have at most {WORDS_CHARS_MAX} characters"))
    return causes


def _answer(reply: Reply) -> Answer:
    assert isinstance(reply, Written)
    notice = msgspec.json.decode(reply.status)["eviction"]
    request = request_in(reply.doc)
    freed = {name: format_amount(name, value * request.nodes) for name, value in request.requests.items()}
    made = Preemption(notice["id"], reply.key.name, "Initiated", notice["deadline"], freed)
    return Answer(201, encode(made))
