"""Decide requests at approval gates, one or many in one transaction, and do what is due for approvals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from bursar.commands.approval.decide import Decide, DecideJob, DecideMany
from bursar.commands.approval.expire import ApprovalTimer, job_timer
from bursar.commands.approval.limits import DecideLimits
from bursar.commands.command import Command, Reply
from bursar.commands.objects.gate import approval_of
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import status_of
from bursar.commands.workloads.job_status import spec_in
from bursar.core.objects.approval import Decision, Verdict
from bursar.core.objects.job import JobAttempt
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import TRIES_MAX, change, get
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.metrics import APPROVAL_DECISIONS, APPROVAL_SECONDS
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.job import member_drafts
from bursar.wire.kinds.job import JOB, PARALLELISM_MAX, plan_of
from bursar.wire.kinds.quotarequest import QUOTA_REQUEST
from bursar.wire.shared.document import generation_of

TIMER = Origin("system:approvals", "expire")
ALLOCATIONS_MAX: Final = PARALLELISM_MAX  # of the jobs that are approved in one transaction


@dataclass(frozen=True, slots=True)
class Judgement:
    """A decision on a request as it was read, with the tenants that its approver decides for.

    An administrator of a tenant decides `within` that tenant's own limits.
    """

    before: Stored
    decision: Decision
    origin: Origin
    decides_for: tuple[str, ...] = ()
    within: str = ""
    pinned: bool = False  # whether only this version is decided

    @property
    def changes_tree(self) -> bool:
        """Whether it may change the tenant tree."""
        return self.before.key.kind == QUOTA_REQUEST.name


def decide_command(one: Judgement, idempotency_key: IdempotencyKey | None = None) -> Decide:
    """The command of a decision. The allocations of a job that is approved are made here, before locks are taken."""
    before = one.before
    if before.key.kind == QUOTA_REQUEST.name:
        return DecideLimits(
            key=before.key, origin=one.origin, idempotency_key=idempotency_key, decision=one.decision, uid=before.uid,
            tenant=before.tenant, decides_for=one.decides_for, generation=generation_of(before.doc),
            pinned=before.revision if one.pinned else None, within=one.within,
        )  # fmt: skip
    if before.key.kind != JOB.name:
        return Decide(
            key=before.key, origin=one.origin, idempotency_key=idempotency_key, decision=one.decision, uid=before.uid,
            tenant=before.tenant, decides_for=one.decides_for, gang=before.gang, generation=generation_of(before.doc),
            pinned=before.revision if one.pinned else None,
        )  # fmt: skip
    spec, status = spec_in(before.doc), status_of(before)
    approves = one.decision.verdict is Verdict.APPROVE
    first = [JobAttempt(index) for index in range(plan_of(spec).width if approves else 0)]
    drafts, gang = member_drafts(
        before.key, before.uid, spec, first, joined=None, user=status.get("user", ""),
        permitted=status.get("permittedBy", ""),
    )  # fmt: skip
    return DecideJob(
        key=before.key, origin=one.origin, idempotency_key=idempotency_key, decision=one.decision, uid=before.uid,
        tenant=before.tenant, decides_for=one.decides_for, generation=generation_of(before.doc),
        pinned=before.revision if one.pinned else None, expected=before.revision, drafts=drafts, drafts_gang=gang,
    )  # fmt: skip


async def decide(
    runtime: Runtime, one: Judgement, *, idempotency_key: IdempotencyKey | None = None, dry_run: bool = False
) -> Reply:
    """Decide a request; retry while it changes meanwhile."""
    reply: Reply = not_found(one.before.key)
    for _ in range(TRIES_MAX):
        reply = await _submit(runtime, decide_command(one, idempotency_key), one.before.tenant, dry_run=dry_run)
        if not dry_run:
            _count(one, reply)
        if not (isinstance(reply, Refusal) and reply.code is Code.CONFLICT):
            return reply
        found = await get(runtime, one.before.key)
        if isinstance(found, Refusal) or found.revision == one.before.revision or found.uid != one.before.uid:
            return reply
        if one.pinned or generation_of(found.doc) != generation_of(one.before.doc):
            return reply  # The approver has judged another version.
        one = replace(one, before=found)
    return reply


def allocations_of(one: Judgement) -> int:
    """The number of allocations that an approval creates."""
    is_job = one.before.key.kind == JOB.name and one.decision.verdict is Verdict.APPROVE
    return plan_of(spec_in(one.before.doc)).width if is_job else 0


async def decide_many(runtime: Runtime, items: Sequence[Judgement], *, dry_run: bool = False) -> Sequence[Reply]:
    """Decide several requests in one transaction, each with its own answer. A decision that changes the tenant tree is
    a transaction of its own."""
    commands = [decide_command(one) for one in items]
    replies: dict[int, Reply] = {}
    if together := [at for at, one in enumerate(commands) if not one.changes_tree]:
        first = commands[together[0]]
        command = DecideMany(key=first.key, origin=first.origin, items=tuple(commands[at] for at in together))
        reply = await _submit(runtime, command, items[together[0]].before.tenant, dry_run=dry_run)
        assert isinstance(reply, tuple), "each item has its answer"
        replies |= zip(together, reply, strict=True)
    for at, alone in enumerate(commands):
        if alone.changes_tree:
            replies[at] = await _submit(runtime, alone, items[at].before.tenant, dry_run=dry_run)
    answers = [replies[at] for at in range(len(items))]
    if not dry_run:
        for one, answer in zip(items, answers, strict=True):
            _count(one, answer)
    return answers


_OUTCOMES: Final = {Verdict.APPROVE: "approved", Verdict.DENY: "denied", Verdict.NOTE: "noted"}


def _count(one: Judgement, reply: Reply) -> None:
    """Count a decision that took effect."""
    approval, decision = approval_of(one.before), one.decision
    request = approval.open if approval is not None else None
    if request is None or decision.gate not in request.gates:
        return
    if isinstance(reply, Refusal):
        if reply.code is Code.QUOTA_EXCEEDED:
            APPROVAL_DECISIONS.labels(decision.gate, "no_headroom").inc()
        return
    APPROVAL_DECISIONS.labels(decision.gate, _OUTCOMES[decision.verdict]).inc()
    if decision.verdict is not Verdict.NOTE:
        waited = (now() - datetime.fromisoformat(request.since)).total_seconds()
        APPROVAL_SECONDS.labels(decision.gate).observe(max(0.0, waited))


async def run_timer(runtime: Runtime, key: Key) -> Reply:
    """Do what is due for an object's approval; retry while it changes meanwhile."""
    found = await get(runtime, key)
    if isinstance(found, Refusal):
        return found
    return await change(runtime, key, lambda before, _: timer_command(before), tenant=found.tenant, first=found)


def timer_command(before: Stored) -> ApprovalTimer:
    """The command for a version of an object."""
    if before.key.kind == JOB.name:
        return job_timer(before, TIMER)
    return ApprovalTimer(key=before.key, origin=TIMER, gang=before.gang)


async def _submit(runtime: Runtime, command: Command, tenant: str, *, dry_run: bool = False) -> Reply:
    if isinstance(command, Decide) and command.changes_tree:
        lane = runtime.trying_shape if dry_run else runtime.shaping
    else:
        lane = runtime.trying if dry_run else runtime.bulk if command.many else runtime.changing
    return await lane.submit(command, tenant)
