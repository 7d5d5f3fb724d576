"""Handlers of jobs beside the common ones: status with allocations, cancellation, and a priority boost."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from bursar.api.http.action import faulty, grace_faults, read_action, words_faults
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, key_of, origin_of, recall
from bursar.api.objects.queue_position import with_estimate
from bursar.commands.command import Reply, Written
from bursar.commands.workloads.allocation import GRACE_SECONDS
from bursar.commands.workloads.job_status import progress_in
from bursar.core.objects.job import all_turns, turn_name
from bursar.core.objects.object import Stored
from bursar.core.values.duration import parse_seconds
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Cause, Refusal, field_fault
from bursar.ops.workloads import job as ops
from bursar.store.objects import job as job_store
from bursar.wire.kinds.job import JOB_LABEL
from bursar.wire.kinds.priorityclass import priority_faults
from bursar.wire.shared.document import decode, encode
from bursar.wire.shared.scheduling import duration_faults


class CancelJob(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    reason: str = ""
    grace_period_seconds: int = GRACE_SECONDS


class CancelledStatus(msgspec.Struct, rename="camel"):
    phase: str
    message: str
    cancellation_reason: str | UnsetType = UNSET


class Cancelled(msgspec.Struct, rename="camel"):
    status: CancelledStatus


class BoostJob(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    new_priority: int
    reason: str
    duration: str | int
    approved_by: str


class Boosted(msgspec.Struct, rename="camel"):
    previous_priority: int
    new_priority: int
    boost_expires: str
    new_queue_position: int | UnsetType = UNSET


async def get_status(call: Call) -> Outcome:
    """The job with its present allocations."""
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    found = await with_estimate(call, found)
    document = decode(found.doc, found.status, found.revision)
    names = [turn_name(found.key.name, turn) for turn in all_turns(progress_in(found))]
    async with call.context.database.reader() as db:
        there = await job_store.list_shown(db, found.key.namespace, names, {JOB_LABEL: found.key.name})
    document["status"]["allocations"] = [
        {"name": name, "node": there[name].get("status.nodeName", ""), "phase": there[name].get("status.phase", "")}
        for name in names
        if name in there
    ]
    return Answer(200, encode(document))


async def cancel(call: Call) -> Outcome:
    asked = read_action(call, CancelJob, "cancellation")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    if causes := [*words_faults(reason=wanted.reason), *grace_faults(wanted.grace_period_seconds)]:
        return faulty("cancellation", causes)
    found = await find(call, key_of(call))
    reply: Reply
    if isinstance(found, Refusal):
        reply = await recall(call, idempotency_key, found)
    else:
        reply = await ops.cancel(
            call.context.runtime,
            found,
            origin_of(call, wanted.reason),
            idempotency_key=idempotency_key,
            grace_seconds=wanted.grace_period_seconds,
            dry_run=dry,
        )
    return reply if isinstance(reply, Refusal) else _cancelled(reply)


def _cancelled(reply: Reply) -> Answer:
    assert isinstance(reply, Written)
    status = msgspec.json.decode(reply.status)
    shown = CancelledStatus(status["phase"], status.get("message", ""), status.get("cancellationReason", UNSET))
    return Answer(200, encode(Cancelled(shown)))


async def boost(call: Call) -> Outcome:
    asked = read_action(call, BoostJob, "boost")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    if causes := _boost_faults(wanted):
        return faulty("boost", causes)
    found = await find(call, key_of(call))
    reply = await (
        recall(call, idempotency_key, found)
        if isinstance(found, Refusal)
        else _boost(call, found, wanted, idempotency_key, dry)
    )
    return reply if isinstance(reply, Refusal) else await _boosted(call, reply)


async def _boost(call: Call, job: Stored, wanted: BoostJob, idempotency_key: IdempotencyKey | None, dry: bool) -> Reply:
    words = f"{wanted.reason} (approved by {wanted.approved_by})"
    return await ops.boost(
        call.context.runtime,
        job,
        origin_of(call, words),
        priority=wanted.new_priority,
        seconds=parse_seconds(wanted.duration),
        reason=wanted.reason,
        approved_by=wanted.approved_by,
        idempotency_key=idempotency_key,
        dry_run=dry,
    )


async def _boosted(call: Call, reply: Reply) -> Answer:
    """Add the scheduler's forecast of the position; it is omitted without a leader."""
    assert isinstance(reply, Written)
    stored = msgspec.json.decode(reply.status)["boost"]
    position = await call.context.leader_queries.boosted(reply.key.namespace, reply.key.name, stored["priority"])
    return Answer(
        200,
        encode(
            Boosted(
                stored["previousPriority"],
                stored["priority"],
                stored["expires"],
                UNSET if position is None else position,
            )
        ),
    )


def _boost_faults(wanted: BoostJob) -> list[Cause]:
    required = {"reason": wanted.reason, "approvedBy": wanted.approved_by}
    return [
        *priority_faults("newPriority", wanted.new_priority),
        *duration_faults("duration", wanted.duration),
        *(field_fault(name, "is required") for name, text in required.items() if not text.strip()),
        *words_faults(**required),
    ]
