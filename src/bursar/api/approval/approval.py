"""Handlers of approvals: list undecided requests of all kinds, decide one at a gate, decide many at once.

Only approvers and administrators decide. An approver's token names tenants and gates: requests of other tenants are not
found, and other gates are forbidden.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from bursar.api.approval.open_requests import OpenApproval, filter_of, shown, watch_open
from bursar.api.http.action import faulty, read_action, words_faults
from bursar.api.http.params import DRY_RUN, ROOT, WATCHING, base_path
from bursar.api.http.problem import body_of
from bursar.api.http.route import Answer, Call, Outcome, Param, Route
from bursar.api.objects.object import find, key_of, kind_of, may_see, recall, written_answer
from bursar.api.objects.watch import is_watch
from bursar.commands.command import Reply, Written
from bursar.commands.objects.gate import approval_of
from bursar.commands.objects.object import conflict
from bursar.core.objects.approval import MANUAL_GATE, ApprovalState, Decision, Verdict
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.access import EVERY, Identity, Role
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.ops.approval import decide as ops
from bursar.ops.approval.decide import Judgement
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.store.objects import approval as store
from bursar.store.objects.approval import After, OpenRequest
from bursar.store.objects.change import load_position
from bursar.wire.kinds.registry import BY_NAME, BY_PLURAL, KINDS
from bursar.wire.shared.document import encode
from bursar.wire.shared.instant import instant_faults, micros_of

ITEMS_MAX: Final = 500
LIMIT_DEFAULT: Final = 500
LIMIT_MAX: Final = 500


class DecideBody(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A decision at a gate. Without a gate it is the one that is decided next."""

    gate: str = ""
    reason: str = ""
    until: str = ""
    resource_version: str = ""


class ApprovalPatch(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A decision as a change of `status.approval`: the state `approved` or `denied`, or a reason alone."""

    state: str = ""
    gate: str = ""
    reason: str = ""
    until: str = ""
    resource_version: str = ""


class DecideItem(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    kind: str
    name: str
    decision: str
    namespace: str = ""
    uid: str = ""
    gate: str = ""
    reason: str = ""
    until: str = ""
    resource_version: str = ""


class DecideItems(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    items: list[DecideItem]


class DecidedItem(msgspec.Struct, rename="camel", omit_defaults=True):
    kind: str
    namespace: str
    name: str
    status: int
    state: str = ""
    refusal: dict[str, Any] | UnsetType = UNSET


class DecidedItems(msgspec.Struct, rename="camel"):
    items: list[DecidedItem]


class OpenApprovals(msgspec.Struct, rename="camel"):
    kind: str
    api_version: str
    metadata: dict[str, str]
    items: list[OpenApproval]


def approval_routes() -> Iterator[Route]:
    for kind in KINDS:
        if not kind.requestable:
            continue
        item = f"{base_path(kind)}/{{name}}"
        for verb, handler, words in (("approve", approve, "Approve"), ("deny", deny, "Deny")):
            yield Route(
                "POST", f"{item}/{verb}", handler, f"{words} a {kind.singular} at a gate.", "approve", kind.plural,
                kind=kind, params=(DRY_RUN,), body=DecideBody, answer=kind.type, refusals=(409,),
            )  # fmt: skip
        yield Route(
            "PATCH", f"{item}/approval", patch_approval, f"Decide a {kind.singular} at a gate, or note a reason there.",
            "patch", kind.plural, "approval", kind=kind, params=(DRY_RUN,), body=ApprovalPatch, answer=kind.type,
            refusals=(409,),
        )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/approvals", list_or_watch_open, "List or watch undecided requests of all kinds, oldest first.",
        "list", "approvals", answer=OpenApprovals,
        params=(
            Param("gate", "Only requests at this gate."), Param("tenant", "Only requests of this tenant."),
            Param("limit", "Maximum number of items; fetch the rest with continue.", "integer"),
            Param("continue", "The continue token from the metadata of the previous page."), *WATCHING,
        ),
    )  # fmt: skip
    yield Route(
        "POST", f"{ROOT}/approvals/decide", decide_many,
        f"Decide up to {ITEMS_MAX} requests in one transaction, each with its own answer.", "approve", "approvals",
        params=(DRY_RUN,), body=DecideItems, answer=DecidedItems,
    )  # fmt: skip


# One request.


async def approve(call: Call) -> Outcome:
    return await _decide(call, DecideBody, Verdict.APPROVE)


async def deny(call: Call) -> Outcome:
    return await _decide(call, DecideBody, Verdict.DENY)


_PATCHES: Final = {
    str(ApprovalState.APPROVED): Verdict.APPROVE,
    str(ApprovalState.DENIED): Verdict.DENY,
    str(ApprovalState.PENDING): Verdict.NOTE,
    "": Verdict.NOTE,
}


async def patch_approval(call: Call) -> Outcome:
    return await _decide(call, ApprovalPatch, None)


async def _decide(call: Call, body: type[DecideBody | ApprovalPatch], verdict: Verdict | None) -> Outcome:
    asked = read_action(call, body, "decision")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    if isinstance(wanted, ApprovalPatch):
        if wanted.state not in _PATCHES:
            return faulty("decision", [field_fault("state", "must be approved, denied or pending")])
        verdict = _PATCHES[wanted.state]
    assert verdict is not None, "the route or the body names it"
    if causes := [*words_faults(reason=wanted.reason), *_until_faults("until", wanted.until, verdict)]:
        return faulty("decision", causes)
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return await written_answer(call, kind_of(call), await recall(call, idempotency_key, found))
    one = _judgement(call, found, verdict, wanted)
    reply: Reply = one
    if isinstance(one, Judgement):
        reply = await ops.decide(call.context.runtime, one, idempotency_key=idempotency_key, dry_run=dry)
        _forget_tree(call, [one])
    return await written_answer(call, kind_of(call), reply)


def _judgement(
    call: Call, found: Stored, verdict: Verdict, wanted: DecideBody | ApprovalPatch | DecideItem
) -> Judgement | Refusal:
    """The decision on a request, at the named gate or at the one that is decided next."""
    gate, reason, until = wanted.gate, wanted.reason, wanted.until
    if wanted.resource_version not in ("", str(found.revision)):
        return conflict(found.key, f"its resourceVersion is {found.revision}, not {wanted.resource_version[:63]}")
    approval = approval_of(found)
    request = approval.open if approval is not None else None
    gate = gate or (request.gate if request is not None else "")
    if refusal := _barred(call, found):
        return refusal
    # Without a gate to decide, the answer is the state of the request.
    if gate and not decides(call.identity, gate):
        own = ", ".join(_gates(call.identity)) or "none"
        return Refusal(
            Code.FORBIDDEN,
            f"{call.identity.user} may not decide gate {gate[:63]!r}; its gates are {own}",
            "Use a token that names this gate.",
        )
    verb = {Verdict.APPROVE: "approve", Verdict.DENY: "deny", Verdict.NOTE: "note"}[verdict]
    origin = Origin(call.identity.actor, verb, f"{gate}: {reason}" if reason else gate)
    decision = Decision(gate, verdict, origin.actor.partition(":")[2], reason, _second(until) if until else "")
    tenants = tuple(name for name, _ in call.identity.tenants)
    within = call.identity.tenant if call.identity.role is Role.TENANT_ADMIN else ""
    return Judgement(found, decision, origin, tenants, within, pinned=bool(wanted.resource_version))


def _barred(call: Call, found: Stored) -> Refusal | None:
    """Refuse a caller whose role decides no requests of this kind. One call may decide on several kinds."""
    plural = BY_NAME[found.key.kind].plural
    if call.context.policy.allows(call.identity, "approve", plural):
        return None
    return Refusal(Code.FORBIDDEN, f"role {call.identity.role} may not approve {plural}")


def _forget_tree(call: Call, decided: Sequence[Judgement]) -> None:
    """Read the tenant tree again if a decision may have changed it."""
    if any(one.changes_tree for one in decided):
        call.context.forget_tree()


def decides(identity: Identity, gate: str) -> bool:
    """Whether the identity decides a gate."""
    gates = _gates(identity)
    return EVERY in gates or gate in gates


def _gates(identity: Identity) -> tuple[str, ...]:
    if identity.role is Role.SYSTEM_ADMIN:
        return (EVERY,)
    return (MANUAL_GATE,) if identity.role is Role.TENANT_ADMIN else identity.gates


def _until_faults(field: str, until: str, verdict: str) -> list[Cause]:
    if not until:
        return []
    if verdict != Verdict.APPROVE:
        return [field_fault(field, "is the end of an approval: only approve takes it")]
    if faults := instant_faults(field, until):
        return faults
    return [] if _second(until) > timestamp(now()) else [field_fault(field, "must be in the future")]


def _second(until: str) -> str:
    """A time as the status has it: UTC, to the second."""
    return timestamp(datetime.fromtimestamp(micros_of(until) // 1_000_000, UTC))


# Several.


async def decide_many(call: Call) -> Outcome:
    asked = read_action(call, DecideItems, "decision")
    if isinstance(asked, Refusal):
        return asked
    # Idempotency keys are not needed: a repeated decision is answered with the state that it has led to.
    wanted, _, dry = asked
    if not 0 < len(wanted.items) <= ITEMS_MAX:
        return faulty("decision", [field_fault("items", f"must have between 1 and {ITEMS_MAX} entries")])
    if causes := [fault for index, item in enumerate(wanted.items) for fault in _item_faults(index, item)]:
        return faulty("decision", causes[:50])
    judged = _bounded(await asyncio.gather(*(_item_judgement(call, item) for item in wanted.items)))
    ready = [one for one in judged if isinstance(one, Judgement)]
    replies = iter(await ops.decide_many(call.context.runtime, ready, dry_run=dry) if ready else ())
    _forget_tree(call, ready)
    answers = [next(replies) if isinstance(one, Judgement) else one for one in judged]
    shown = [_shown(call, item, reply) for item, reply in zip(wanted.items, answers, strict=True)]
    return Answer(200, encode(DecidedItems(shown)))


def _bounded(judged: list[Judgement | Refusal]) -> list[Judgement | Refusal]:
    """The decisions, and a refusal of each that would create too many allocations together with those before it."""
    bounded: list[Judgement | Refusal] = []
    created = 0
    for one in judged:
        more = ops.allocations_of(one) if isinstance(one, Judgement) else 0
        if created and created + more > ops.ALLOCATIONS_MAX:
            bounded.append(
                Refusal(
                    Code.UNPROCESSABLE,
                    f"its {more} allocations and those of the items before it are more than {ops.ALLOCATIONS_MAX}",
                    "Decide it in another request.",
                )
            )
            continue
        created += more
        bounded.append(one)
    return bounded


def _item_faults(index: int, item: DecideItem) -> Iterator[Cause]:
    path = f"items[{index}]"
    kind = BY_NAME.get(item.kind) or BY_PLURAL.get(item.kind)
    if kind is None or not kind.requestable:
        yield field_fault(f"{path}.kind", "is no kind that can be requested")
    if item.decision not in tuple(Verdict):
        yield field_fault(f"{path}.decision", f"must be one of {', '.join(Verdict)}")
    yield from words_faults(**{f"{path}.reason": item.reason})
    yield from _until_faults(f"{path}.until", item.until, item.decision)


async def _item_judgement(call: Call, item: DecideItem) -> Judgement | Refusal:
    kind = BY_NAME.get(item.kind) or BY_PLURAL[item.kind]
    key = Key(kind.name, item.namespace, item.name)
    found = await object_ops.get(call.context.runtime, key)
    if isinstance(found, Refusal):
        return found
    if not await may_see(call, found) or item.uid not in ("", found.uid):
        return Refusal(Code.NOT_FOUND, f'{kind.plural} "{item.name[:253]}" not found')
    return _judgement(call, found, Verdict(item.decision), item)


def _shown(call: Call, item: DecideItem, reply: Reply) -> DecidedItem:
    kind = BY_NAME.get(item.kind) or BY_PLURAL[item.kind]
    if isinstance(reply, Refusal):
        body = body_of(reply, call.request_id, resource=kind.plural, kind=kind.name, name=item.name)
        return DecidedItem(kind.name, item.namespace, item.name, body["code"], refusal=body)
    assert isinstance(reply, Written)
    approval = msgspec.json.decode(reply.status).get("approval") or {}
    return DecidedItem(kind.name, item.namespace, item.name, 200, str(approval.get("state", "")))


# Listing.


async def list_or_watch_open(call: Call) -> Outcome:
    return await watch_open(call) if is_watch(call) else await list_open(call)


async def list_open(call: Call) -> Outcome:
    limit = call.query.get("limit", "") or str(LIMIT_DEFAULT)
    if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= LIMIT_MAX):
        return invalid(f"limit must be a number from 1 to {LIMIT_MAX}")
    after = _after(call.query.get("continue", ""))
    if after is None:
        return invalid("the continue token is invalid", hint="Start the list again without it.")
    wanted = await filter_of(call)
    async with call.context.database.reader() as db:
        # Read first: a watch from this revision misses nothing that the list does not show.
        revision = (await load_position(db)).revision
        found = await store.list_open(db, wanted.tenants, wanted.gates, after, int(limit))
    token = _token(found[-1]) if len(found) == int(limit) else ""
    metadata = {"resourceVersion": str(revision), **({"continue": token} if token else {})}
    return Answer(200, encode(OpenApprovals("ApprovalList", "v1", metadata, [shown(one) for one in found])))


def _token(last: OpenRequest) -> str:
    return base64.urlsafe_b64encode(encode([last.since, *last.key])).decode()


def _after(token: str) -> After | None:
    if not token:
        return After()
    try:
        place = msgspec.json.decode(base64.urlsafe_b64decode(token.encode()), type=tuple[str, str, str, str])
    except (ValueError, msgspec.MsgspecError):
        return None
    return After(*place) if not any("\0" in one for one in place) else None
