"""Changes of requests whose spec may change: asking for less takes effect at once, asking for more is a new request.

While growth is pending, the amounts that are both held and still wanted stay in force, and the wanted ones are due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.command import Result
from bursar.commands.objects.gate import (
    ONE_REQUEST,
    approval_of,
    charged,
    gates_of,
    held_back,
    pending_charge,
    requesting,
    with_approval,
    without_request,
)
from bursar.commands.objects.object import (
    ChangeObject,
    ObjectChange,
    change_object,
    conflict,
    sight_of,
    submitter,
)
from bursar.commands.objects.status import status_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.approval import Approval, ApprovalState, requested
from bursar.core.objects.charge import Amounts, Charge
from bursar.core.objects.object import Stored
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.quota.tenant_tree import approval_policy
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode, is_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviseRequest(ChangeObject):
    """Replace a request by a draft with other amounts."""

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        draft = charged(batch, self.draft)
        if before := batch.objects.get(self.key):
            yield self.key.namespace, before.charge
        yield self.key.namespace, draft.charge
        yield self.key.namespace, pending_charge(draft.charge)

    def _save_changed(self, batch: UnitOfWork, before: Stored) -> Result:
        draft = charged(batch, self.draft)
        if is_ending(before.doc) and grows(without_request(before.charge.accepted), draft.charge.accepted):
            return conflict(self.key, "it is being deleted")
        after = _asked_by(submitter(self.origin), _revised(batch, before, draft))
        if exceeded := batch.counters.move([Move(self.key.namespace, before.charge, after.charge)]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        asks = after.charge.due and after.charge.due != before.charge.due
        return batch.put(after, requesting(self.origin, after) if asks else self.origin)


def _revised(batch: UnitOfWork, before: Stored, draft: Stored) -> Stored:
    """The draft with its approval and the charge that follows from it."""
    approval, wanted = approval_of(before), draft.charge.accepted
    gates = gates_of(batch, draft, before.tenant)
    held = without_request(before.charge.accepted)
    if approval is not None and approval.state is not ApprovalState.APPROVED and not held:
        return _asked_again(batch, before, draft, approval, gates)
    if approval is not None and approval.frozen:
        gates = gates or tuple(approval.gates)  # A frozen request grows only by a new approval.
    if grows(held, wanted) and gates:
        return _growing(batch, before, draft, approval, held, gates)
    granted = replace(draft, status=encode(status_of(draft) | BY_NAME[draft.key.kind].granted(wanted)))
    return granted if approval is None else with_approval(granted, replace(approval, change=None))


def _asked_by(user: str, one: Stored) -> Stored:
    """The object whose new request names the user who asked for it."""
    approval = approval_of(one)
    request = approval.open if approval is not None else None
    if approval is None or request is None or request.user or status_of(one).get("user") == user:
        return one
    asked = replace(request, user=user)
    return with_approval(one, asked if request is approval else replace(approval, change=asked))


def _asked_again(
    batch: UnitOfWork, before: Stored, draft: Stored, approval: Approval, gates: tuple[str, ...]
) -> Stored:
    """A request that holds nothing. Its gates stay passed if it asks for less; else they judged another request."""
    if approval.state is ApprovalState.PENDING and not grows(before.charge.due, draft.charge.accepted):
        return with_approval(replace(draft, charge=pending_charge(draft.charge)), approval)
    return held_back(draft, before.tenant, batch, gates or tuple(approval.gates))


def _growing(
    batch: UnitOfWork, before: Stored, draft: Stored, approval: Approval | None, held: Amounts, gates: tuple[str, ...]
) -> Stored:
    """An approved request that asks for more. Growth that is pending already keeps its gates if it shrinks."""
    wanted = draft.charge.accepted
    kept = {name: min(value, wanted[name]) for name, value in held.items() if name in wanted}
    policy = approval_policy(batch.tree, before.tenant)
    approval = approval or Approval(ApprovalState.APPROVED, at=requested(policy, (), batch.now).at)
    open_now = approval.change is not None and approval.change.state is ApprovalState.PENDING
    if not open_now or grows(before.charge.due, wanted):
        approval = replace(approval, change=requested(policy, gates, batch.now))
    charge = replace(draft.charge, accepted={**kept, **ONE_REQUEST}, bound=kept, due=wanted)
    status = status_of(draft) | BY_NAME[draft.key.kind].granted(kept)
    return with_approval(replace(draft, charge=charge), approval, status)


def grows(held: Amounts, wanted: Amounts) -> bool:
    """Whether any amount is larger than the held one."""
    return any(value > held.get(name, 0) for name, value in wanted.items())


def revise_request(change: ObjectChange) -> ChangeObject | Refusal:
    """The command that changes a request: its amounts are judged only if the spec changes."""
    command = change_object(change)
    if isinstance(command, Refusal) or change.status or not change.spec_changed:
        return command if isinstance(command, Refusal) else replace(command, keep_charge=True)
    return ReviseRequest(
        key=command.key, origin=command.origin, idempotency_key=command.idempotency_key, draft=command.draft,
        expected=command.expected, subject=command.subject,
    )  # fmt: skip
