"""Requests under approval gates: an object that its tenant's policy gates is stored and visible, and holds nothing.

Its charge is due, as that of a gang member is until the gang is complete, so that no bind succeeds. It counts as one of
the tenant's `pending_requests`. The decision at the last gate charges it (commands/approval/decide.py).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from bursar.commands.objects.status import status_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.node import WHOLE
from bursar.core.objects.approval import (
    AWAITING_APPROVAL,
    DUE_FIELD,
    PENDING_REQUESTS,
    QUOTA_GATE,
    STATE_FIELD,
    Approval,
    ApprovalReason,
    ApprovalState,
    approval_fields,
    approval_in,
    expired,
    requested,
    stored_form,
    waiting_text,
)
from bursar.core.objects.charge import Amounts, Charge
from bursar.core.objects.event_text import RequestEvent, request_why
from bursar.core.objects.object import Origin, Stored
from bursar.core.quota import units
from bursar.core.quota.tenant_tree import approval_policy
from bursar.core.values.replace import replace
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode
from bursar.wire.shared.kind import Kind, Object

_FIELDS: Final = "status.approval."
ONE_REQUEST: Final = {PENDING_REQUESTS: WHOLE}


def gates_of(batch: UnitOfWork, one: Stored, tenant: str) -> tuple[str, ...]:
    """The gates that a new object of a tenant must pass.

    Requests of a kind with gates of its own charge nothing, so that the quota gate would pass them all.
    """
    kind = BY_NAME[one.key.kind]
    if not kind.requestable:
        return ()
    gates = approval_policy(batch.tree, tenant).gates_of(kind.name)
    return tuple(gate for gate in gates if gate != QUOTA_GATE) or kind.gates if kind.gates else gates


def charged(batch: UnitOfWork, one: Stored) -> Stored:
    """A new object, or one with a new spec, with its charge under the settings of quotas."""
    if not batch.tree.quota_policy.converts:
        return one
    kind = BY_NAME[one.key.kind]
    charge = units.charged(batch.tree.quota_policy, one.charge, placed=kind.placed)
    if charge is one.charge:
        return one
    shown = kind.granted(charge.accepted)
    return replace(one, charge=charge, status=encode(status_of(one) | shown) if shown else one.status)


def requesting(origin: Origin, one: Stored) -> Origin:
    """The origin of a write that makes a request: its event says that the request awaits approval."""
    approval = approval_of(one)
    request = approval.open if approval is not None else None
    if request is None:
        return origin
    return Origin(origin.actor, origin.verb, request_why(RequestEvent.AWAITING, waiting_text(request.gate)))


def awaits_approval(one: Stored) -> bool:
    """Whether an object is a request that is not approved yet."""
    return one.fields.get(STATE_FIELD) == ApprovalState.PENDING


def held_back(one: Stored, tenant: str, batch: UnitOfWork, gates: tuple[str, ...]) -> Stored:
    """A new object as a request: pending at its first gate, with its charge due."""
    approval = requested(approval_policy(batch.tree, tenant), gates, batch.now)
    granted = BY_NAME[one.key.kind].granted({})
    status = {name: value for name, value in status_of(one).items() if name not in granted}
    return with_approval(replace(one, tenant=tenant, charge=pending_charge(one.charge)), approval, status)


def pending_charge(charge: Charge) -> Charge:
    """The charge of a request: its amounts are due, and it counts as a pending request."""
    return replace(charge, accepted=ONE_REQUEST, bound={}, due=charge.due or charge.accepted)


def admitted_charge(kind: Kind, charge: Charge) -> Charge:
    """The charge of an approved request. That of a kind that is not placed counts as bound from then on too."""
    return replace(charge, accepted=charge.due, bound={} if kind.placed else charge.due, due={})


def requested_amounts(kind: Kind, doc: bytes, charge: Charge) -> Amounts:
    """The amounts that approving a request charges, beyond those that are in force already."""
    if kind.requested is not None:
        return kind.requested(msgspec.json.decode(doc, type=kind.type))
    grown = {name: value - charge.accepted.get(name, 0) for name, value in charge.due.items()}
    return {name: value for name, value in grown.items() if value > 0}


def with_approval(one: Stored, approval: Approval, status: dict[str, Any] | None = None) -> Stored:
    """The object with this approval in its status and in its fields. Its reason says that it awaits approval."""
    status = {**(status_of(one) if status is None else status)}
    status["approval"] = stored_form(approval)
    if approval.state is ApprovalState.PENDING:
        said = approval.gates[approval.gate].reason
        status |= {"reason": AWAITING_APPROVAL, "message": _sentence(approval, said)}
    elif status.get("reason") == AWAITING_APPROVAL:
        del status["reason"], status["message"]
    return replace(one, status=encode(status), fields=with_fields(one, approval))


def with_fields(one: Stored, approval: Approval | None) -> dict[str, str]:
    """The object's fields to select by, with those of its approval."""
    others = {name: value for name, value in one.fields.items() if not name.startswith(_FIELDS)}
    return {**others, **approval_fields(approval)}


def kept_fields(one: Stored, *, has_ended: bool = False) -> dict[str, str]:
    """The fields of an object's approval, for code that computes all other fields again. For work that has ended
    nothing is due."""
    dropped = (DUE_FIELD,) if has_ended else ()
    return {name: value for name, value in one.fields.items() if name.startswith(_FIELDS) and name not in dropped}


def approval_of(one: Stored) -> Approval | None:
    return approval_in(status_of(one))


def without_request(amounts: Amounts) -> Amounts:
    """The amounts that are held, without the count of the pending request."""
    return {name: value for name, value in amounts.items() if name != PENDING_REQUESTS}


def decoded(kind: Kind, one: Stored, status: dict[str, Any]) -> Object:
    """The object with a status, as its kind's hooks take it."""
    return msgspec.convert({**msgspec.json.decode(one.doc), "status": status}, kind.type)


def _sentence(approval: Approval, said: str) -> str:
    waiting = waiting_text(approval.gate)
    return f"{waiting}: {said}" if said else waiting


def withdrawn(one: Stored, at: datetime, status: dict[str, Any] | None = None) -> Stored:
    """A request that its requester has cancelled."""
    approval = approval_of(one)
    assert approval is not None, "only requests are withdrawn"
    return with_approval(one, expired(approval, ApprovalReason.WITHDRAWN, at), status)


def growth_withdrawn(one: Stored, at: datetime) -> Stored:
    """An approved object that is deleted: growth that is pending is not requested any more."""
    approval = approval_of(one)
    if approval is None or approval.change is None or approval.change.state is not ApprovalState.PENDING:
        return one
    kept = replace(one.charge, accepted=without_request(one.charge.accepted), due={})
    change = expired(approval.change, ApprovalReason.WITHDRAWN, at)
    return with_approval(replace(one, charge=kept), replace(approval, change=change))
