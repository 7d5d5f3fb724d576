"""Explain and simulate: the reason why work is pending, and the outcome of a simulated submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from bursar.api.http.body import read_document, read_object
from bursar.api.http.route import JSON, UNREAD, Answer, Call, Outcome
from bursar.api.objects.object import find, is_admin, key_of, kind_of, namespace_tenant, never_runs, origin_of
from bursar.api.workloads.explanation import (
    Cost,
    Explanation,
    ProposedNode,
    SimulatedAllocation,
    Simulation,
    WaitingReason,
    WouldEvict,
    nomination,
    queue_ahead,
    queue_score,
    reservation,
    share_now,
    time_of,
    why,
)
from bursar.commands.objects.gate import approval_of, awaits_approval
from bursar.commands.objects.object import CreateObject, submitter
from bursar.commands.workloads.job import CreateJob
from bursar.commands.workloads.job_status import progress_in
from bursar.core.credit.lease import FROZEN
from bursar.core.objects.approval import AWAITING_APPROVAL, waiting_text
from bursar.core.objects.job import all_turns, turn_name
from bursar.core.objects.object import Key, Stored
from bursar.core.objects.pending_reason import PendingReason
from bursar.core.quota.tenant_tree import lineage
from bursar.core.quota.visibility import Sees, everything
from bursar.core.scheduling.explain import explain_types
from bursar.core.scheduling.explain.reason_text import BEYOND_SHARE
from bursar.core.values.access import reach
from bursar.core.values.money import credits_of
from bursar.core.values.redaction import redacted
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as object_ops
from bursar.ops.scheduling.cost_estimate import Quote, quote, refused_time
from bursar.ops.scheduling.leader_query import Draft, Simulate
from bursar.ops.workloads.dry_run import rehearse
from bursar.ops.workloads.priority import load_classes
from bursar.store.objects import job as job_store
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.job import JOB, JOB_LABEL, plan_of
from bursar.wire.shared.document import encode
from bursar.wire.shared.kind import Kind
from bursar.wire.shared.reading import Body
from bursar.wire.to_scheduler.ask import PriorityClassView

ITEMS_MAX = 64
KIND: Final = "Explanation"


# Explain.


async def explain(call: Call) -> Outcome:
    found = await find(call, key_of(call))
    return found if isinstance(found, Refusal) else await _explained(call, found)


async def explain_job(call: Call) -> Outcome:
    """Explain a job by its first pending allocation."""
    job = await find(call, key_of(call))
    if isinstance(job, Refusal):
        return job
    if awaits_approval(job):
        return Answer(200, encode(_undecided(job, msgspec.json.decode(job.status))))
    names = [turn_name(job.key.name, turn) for turn in all_turns(progress_in(job))]
    async with call.context.database.reader() as db:
        there = await job_store.list_shown(db, job.key.namespace, names, {JOB_LABEL: job.key.name})
    waiting = next((name for name in names if there.get(name, {}).get("status.phase") == "Pending"), None)
    if waiting is not None:
        one = await object_ops.get(call.context.runtime, Key("Allocation", job.key.namespace, waiting))
        if not isinstance(one, Refusal):
            return await _explained(call, one)
    status = msgspec.json.decode(job.status)
    phase = str(status.get("phase", ""))
    said = status.get("message") or _none_waits(len(there))
    if status.get("nextRetryTime"):
        said = f"it tries again at {status['nextRetryTime']}, after {status.get('failed', 0)} failed: {said}"
    return Answer(200, encode(Explanation(job.key.name, job.key.namespace, job.uid, phase, said, KIND)))


def _none_waits(count: int) -> str:
    return "its allocation is not pending" if count == 1 else f"none of its {count} allocations is pending"


async def _explained(call: Call, one: Stored) -> Outcome:
    status: dict[str, Any] = msgspec.json.decode(one.status)
    if awaits_approval(one):
        return Answer(200, encode(_undecided(one, status)))
    if status.get("phase") != "Pending":
        unpaid = await refused_time(call.context.runtime, (each.get("lease", "") for each in status.get("nodes") or []))
        placed = status.get("phase") in ("Scheduled", "Running")
        holding = await call.context.leader_queries.holding(one.uid) if placed else None
        return Answer(200, encode(_settled(one, status, unpaid, holding)))
    found = await call.context.leader_queries.explain(one.uid)
    if isinstance(found, Refusal):
        return found
    return Answer(200, encode(await _waiting(call, one, found) if found is not None else _stored(one, status)))


def _undecided(one: Stored, status: dict[str, Any]) -> Explanation:
    """Explain a request that awaits approval: its gate, since when, and who decides."""
    approval = approval_of(one)
    assert approval is not None, "it awaits approval"
    said = f"{waiting_text(approval.gate)}; pending since {approval.since}"
    if noted := approval.gates[approval.gate].reason:
        said = f"{said}: {noted}"
    expires = f" It expires at {approval.pending_until}." if approval.pending_until else ""
    helps = f"Ask who decides gate {approval.gate}.{expires}"
    reason = WaitingReason(AWAITING_APPROVAL, said, helps)
    phase = str(status.get("phase", ""))
    return Explanation(one.key.name, one.key.namespace, one.uid, phase, said, KIND, reason)


def _settled(one: Stored, status: dict[str, Any], unpaid: str, holding: explain_types.Holding | None) -> Explanation:
    """Explain work that is not pending: its nodes, and the reason of its end."""
    phase, nodes = str(status.get("phase", "")), status.get("nodes") or []
    where = ", ".join(node["name"] for node in nodes)
    since = status.get("endTime") or status.get("startTime") or status.get("scheduledTime") or ""
    message = phase
    if where:
        message += f" on {where}" + (f" since {since}" if since else "")
    # The reason of a failure or a coming one. For frozen work, the node knows more than the lease.
    own = ": ".join(each for each in (status.get("reason"), status.get("message")) if each)
    if said := own if status.get("reason") == FROZEN else unpaid or own:
        message += f" ({said})"
    burst = holding is not None and holding.burst
    return Explanation(
        one.key.name, one.key.namespace, one.uid, phase, message + (BEYOND_SHARE if burst else ""), KIND,
        nodes=[ProposedNode(node["name"], node.get("devices") or {}) for node in nodes],
        scheduled_time=status.get("scheduledTime") or "", share=share_now(holding.share if holding else None),
        burst=burst,
    )  # fmt: skip


def _stored(one: Stored, status: dict[str, Any]) -> Explanation:
    """Explain by the stored reason, if the scheduler does not know the allocation as pending."""
    code, message = status.get("reason") or "not_yet_tried", status.get("message") or ""
    said = message or "the scheduler has not seen it yet, or is placing it now"
    return Explanation(one.key.name, one.key.namespace, one.uid, "Pending", said, KIND, WaitingReason(code, said))


async def _sight(call: Call) -> tuple[Sees, bool]:
    """The scopes whose figures the caller may read, and whether these are all scopes."""
    whose, tree = reach(call.identity), await call.context.tree()

    def sees(scope: str) -> bool:
        kind, _, name = scope.partition(":")
        return whose.everything or kind == "quota" or (kind == "tenant" and whose.sees(lineage(tree, name)))

    return sees, whose.everything


async def _waiting(call: Call, one: Stored, found: explain_types.ExplainAnswer) -> Explanation:
    """Explain pending work. A caller learns its position among other tenants' work, and nothing else about that."""
    sees, all_of_it = await _sight(call)
    reason = why(found.reason, sees)
    return Explanation(
        one.key.name, one.key.namespace, one.uid, "Pending", reason.message, KIND, reason,
        other_reasons=[why(each, sees) for each in found.others],
        queue=found.queue,
        queue_position=found.position,
        overall_position=found.position_overall if all_of_it else None,
        ahead=queue_ahead(found.ahead if all_of_it else found.ahead_own) if found.position is not None else None,
        estimated_start_time=time_of(found.starts_at),
        score=queue_score(found.score),
        share=share_now(found.share),
        reservation=reservation(found.reservation),
        nomination=nomination(found.nomination),
    )  # fmt: skip


# Simulate.


async def simulate(call: Call) -> Outcome:
    """Simulate a submission: admission checks apply as usual, and the leader answers for admitted allocations. A job
    is simulated as its first allocations."""
    bodies = await _bodies(call)
    if isinstance(bodies, Refusal):
        return bodies
    tenant = await namespace_tenant(call, kind_of(call))
    if isinstance(tenant, Refusal):
        return tenant
    for kind, body in bodies:
        if never := await never_runs(call, kind, body.object, tenant):
            return never
    origin = origin_of(call)
    creations = [
        one
        for kind, body in bodies
        for one in _allocations(create_command(kind, body.object, origin, seen_tenant=tenant, admin=is_admin(call)))
    ]
    if refused := await rehearse(call.context.runtime, creations, tenant or call.identity.tenant):
        return refused
    question = Simulate([_draft(*one, tenant or "") for one in enumerate(creations)], await _priorities(call))
    found = await call.context.leader_queries.simulate(question)
    if isinstance(found, Refusal):
        return found
    places = [[place.node for place in one.places] for one in found]
    quotes = await quote(call.context.runtime, [(one.draft, on) for one, on in zip(creations, places, strict=True)])
    shown = [_costed(await _simulated(call, one), own) for one, own in zip(found, quotes, strict=True)]
    return Answer(200, encode(Simulation(would_run=all(one.would_run for one in shown), allocations=shown)))


def _allocations(creation: CreateObject) -> list[CreateObject]:
    """An allocation, or the first allocations of a job, each as a submission of its own."""
    if not isinstance(creation, CreateJob):
        return [creation]
    return [
        CreateObject(
            key=draft.key, origin=creation.origin, draft=draft, wants=creation.wants, subject=creation.subject,
            seen_tenant=creation.seen_tenant, asking=creation.asking, admin=creation.admin,
        )
        for draft in creation.drafts
    ]  # fmt: skip


async def _bodies(call: Call) -> list[tuple[Kind, Body]] | Refusal:
    """Decode one allocation or job, or several as `items`, up to the maximum of a simulation."""
    bodies = await _read_bodies(call)
    if isinstance(bodies, Refusal):
        return bodies
    count = sum(plan_of(body.object.spec).width if kind is JOB else 1 for kind, body in bodies)
    if count > ITEMS_MAX:
        return invalid(
            f"at most {ITEMS_MAX} allocations can be simulated together, got {count}",
            hint="Simulate a job with a lower parallelism, or fewer objects at a time.",
        )
    return bodies


async def _read_bodies(call: Call) -> list[tuple[Kind, Body]] | Refusal:
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    if not isinstance(document, dict) or "items" not in document:
        kind = _kind_of(document)
        body = await read_object(call, kind)
        return body if isinstance(body, Refusal) else [(kind, body)]
    items = document["items"]
    if not isinstance(items, list) or not 1 <= len(items) <= ITEMS_MAX:
        return invalid(f"items must be a list of 1 to {ITEMS_MAX} allocations or jobs")
    bodies: list[tuple[Kind, Body]] = []
    for index, item in enumerate(items):
        kind = _kind_of(item)
        part = replace(call, body=encode(item), headers={**call.headers, "content-type": JSON}, document=UNREAD)
        body = await read_object(part, kind)
        if isinstance(body, Refusal):
            causes = tuple(replace(one, field=f"items[{index}].{one.field}") for one in body.causes)
            return replace(body, message=f"items[{index}]: {body.message}", causes=causes)
        bodies.append((kind, body))
    return bodies


def _kind_of(document: Any) -> Kind:
    """The kind of a document: Job if it says so, else Allocation."""
    return JOB if isinstance(document, dict) and document.get("kind") == JOB.name else ALLOCATION


def _draft(number: int, creation: CreateObject, tenant: str) -> Draft:
    """A draft for the simulation. Among equal drafts the first gets the smaller uid and goes first. Values of variables
    are removed, because placing does not need them."""
    draft = creation.draft
    doc = encode(redacted(msgspec.json.decode(draft.doc)))
    return Draft(f"{number:03}-{draft.uid}", tenant, dict(draft.labels), msgspec.Raw(doc), submitter(creation.origin))


async def _priorities(call: Call) -> dict[str, PriorityClassView]:
    async with call.context.database.reader() as db:
        return await load_classes(db)


async def _simulated(call: Call, found: explain_types.SimulatedOutcome) -> SimulatedAllocation:
    """The outcome with only the number of other tenants' victims, not their names."""
    named, others = await _victims(call, found.victims)
    shown = SimulatedAllocation(
        found.name, found.runs_now, "",
        nodes=[ProposedNode(one.node, {name: [*which] for name, which in one.devices.items()}) for one in found.places],
        estimated_start_time=time_of(found.starts_at),
        evictions=named,
        evictions_of_other_tenants=others,
    )  # fmt: skip
    if found.waits is not None:
        sees, all_of_it = await _sight(call)
        ahead = found.waits.ahead if all_of_it else found.waits.ahead_own
        shown.reason = why(found.waits.reason, sees)
        shown.other_reasons = [why(one, sees) for one in found.waits.others]
        shown.queue_position = found.waits.position
        shown.ahead = queue_ahead(ahead) if found.waits.position is not None else None
    shown.message = _said(shown)
    return shown


def _costed(shown: SimulatedAllocation, quote: Quote | None) -> SimulatedAllocation:
    """Add the cost to the outcome. Work that cannot be paid for would stay pending whatever capacity is free."""
    if quote is None:
        return shown
    # Work without a price is not free of charge.
    if quote.account and (quote.lacking is None or quote.lacking.code is not Code.UNPRICED):
        shown.cost = Cost(
            quote.account, credits_of(quote.rate), credits_of(3600 * quote.rate), credits_of(quote.first),
            quote.window_seconds, credits_of(quote.available),
        )  # fmt: skip
    unpaid = PendingReason.unpaid(quote.lacking) if quote.lacking is not None else None
    if unpaid is None:
        return shown
    if shown.reason is not None:
        shown.other_reasons = [shown.reason, *shown.other_reasons]
    shown.reason, shown.would_run, shown.estimated_start_time = why(unpaid, everything), False, ""
    shown.nodes, shown.evictions, shown.evictions_of_other_tenants = [], [], 0
    shown.message = _said(shown)
    return shown


async def _victims(call: Call, victims: Sequence[explain_types.Evicted]) -> tuple[list[WouldEvict], int]:
    named = [
        WouldEvict(one.namespace, one.name, one.rule)
        for one in victims
        if await call.context.sees(call.identity, one.tenant)
    ]
    return named, len(victims) - len(named)


def _said(shown: SimulatedAllocation) -> str:
    where = ", ".join(one.name for one in shown.nodes)
    victims = len(shown.evictions) + shown.evictions_of_other_tenants
    if shown.would_run:
        return f"it would run now, on {where}"
    if victims:
        return f"it would run on {where} after evicting {victims} allocation{'s' if victims > 1 else ''}"
    return f"it would wait: {shown.reason.message}" if shown.reason is not None else "it would fail: its gang timed out"
