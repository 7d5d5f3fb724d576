"""Decide a request at one of its gates. The approval at the last gate charges it, in the same transaction.

So quota and approval never disagree, however many requests race and however many services decide. If the charge has no
headroom, the last gate stays pending and says why, and the gates that were passed stay passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bursar.commands.approval.news import RequestMessage, decided_news, put_with_news
from bursar.commands.command import Answers, Command, Result, weight_of_drafts
from bursar.commands.objects.gate import (
    admitted_charge,
    approval_of,
    awaits_approval,
    decoded,
    with_approval,
    without_request,
)
from bursar.commands.objects.object import already_exists, conflict, namespace_refusal, not_found, plural_of, sight_of
from bursar.commands.objects.status import status_of, unchanged
from bursar.commands.workloads.allocation import leave_gang
from bursar.commands.workloads.job import MANY, admit, charges_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import Gang, GangKey, GangRow
from bursar.core.objects.approval import (
    Approval,
    ApprovalState,
    Decision,
    Verdict,
    decided,
    grown,
    is_own_request,
    undecidable,
    without_headroom,
)
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.objects.event_text import RequestEvent
from bursar.core.objects.object import UNASSIGNED, Key, Origin, Stored
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import headroom_text, quota_refusal
from bursar.core.quota.visibility import Sees, sight
from bursar.core.values.access import EVERY
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import generation_of, is_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide(Command):
    """A decision on a request: an object, the growth of one, or a gang as a set.

    A refusal for lack of headroom changes one thing: the reason of the gate, which stays pending.
    """

    decision: Decision
    uid: str  # of the request that was read
    tenant: str  # its tenant when access was checked
    decides_for: tuple[str, ...] = ()  # the tenants of the approver
    gang: str = ""
    generation: int | None = None  # of the spec that was read and judged
    pinned: int | None = None  # the newest revision of what the approver has seen, if they name one

    @property
    def changes_tree(self) -> bool:
        """Whether it writes to the tenant tree, under the tree's exclusive lock."""
        return False

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        for one in self.decided_together(batch):
            yield one.key.namespace, one.charge
            yield one.key.namespace, admitted_charge(BY_NAME[one.key.kind], one.charge)

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.tenant != self.tenant:
            return not_found(self.key)
        if before.uid != self.uid or before.gang != self.gang:
            return conflict(self.key, "it was deleted and created again")
        approval = approval_of(before)
        if self._has_changed(batch, before):
            state = f"it is {approval.state}" if approval is not None else "it needs no approval"
            return conflict(self.key, f"it was changed meanwhile; {state}")
        if approval is None:
            return Refusal(Code.DECIDED, f"{name_of(self.key)} needs no approval")
        if refusal := self._refusal(batch, before, approval):
            return refusal
        after = decided(name_of(self.key), request_in(approval), self.decision, batch.now)
        if isinstance(after, Refusal):
            return after
        if after.state is ApprovalState.APPROVED:
            return self._approve(batch, before, approval, after)
        if after.state is ApprovalState.DENIED:
            return self._deny(batch, before, approval, after)
        return self._store(batch, before, approval, after)

    def _refusal(self, batch: UnitOfWork, before: Stored, approval: Approval) -> Refusal | None:
        if is_ending(before.doc):
            return conflict(self.key, "it is being deleted")
        request = request_in(approval)
        if refusal := undecidable(name_of(self.key), request, self.decision.gate):
            return refusal
        own = (
            one for one in self._requesters(batch, before) if is_own_request(one, self.decision.by, self.decides_for)
        )
        if not request.self_approval and (requester := next(own, None)) is not None:
            return Refusal(
                Code.FORBIDDEN,
                f"{name_of(self.key)} was requested by {requester}: nobody approves their own request",
                "Ask another approver, or let the tenant's policy allow it: spec.approval.selfApproval.",
            )
        if self.decision.verdict is not Verdict.APPROVE:
            return None
        closed = namespace_refusal(batch, self.key) if self.key.namespace else None
        return closed or self._incomplete(batch)

    def _has_changed(self, batch: UnitOfWork, before: Stored) -> bool:
        """Whether the spec is another than the one that was judged, or whether the request, or one that is decided with
        it, is newer than the revision that the approver named."""
        if self.generation not in (None, generation_of(before.doc)):
            return True
        if self.pinned is None:
            return False
        each = {one.key: one for one in (before, *self.decided_together(batch))}
        return any(one.revision == UNASSIGNED or one.revision > self.pinned for one in each.values())

    def _requesters(self, batch: UnitOfWork, before: Stored) -> Iterator[str]:
        """The users who asked for what is decided together, and for growth of it."""
        for one in (before, *self.decided_together(batch)):
            yield str(status_of(one).get("user", ""))
            approval = approval_of(one)
            if approval is not None and (request := approval.open) is not None and request.user:
                yield request.user

    def _incomplete(self, batch: UnitOfWork) -> Refusal | None:
        """The refusal of approving a part of a gang."""
        row = self._gang_row(batch)
        if row is None or row.charged or row.members >= row.min_members:
            return None
        return Refusal(
            Code.CONFLICT,
            f"gang {self.gang!r} has {row.members} of {row.min_members} members: it is decided when it is complete",
            "Wait for its other members.",
        )

    def _gang_row(self, batch: UnitOfWork) -> GangRow | None:
        return batch.gangs.get((self.key.namespace, self.gang)) if self.gang else None

    def decided_together(self, batch: UnitOfWork) -> list[Stored]:
        """The request; of a gang all members that await approval, or that were accepted before it was gated."""
        before = batch.objects.get(self.key)
        if before is None:
            return []
        if not self.gang:
            return [before]
        return [one for one in batch.members(self.key.namespace, self.gang) if one.charge.due]

    def _store(self, batch: UnitOfWork, before: Stored, approval: Approval, after: Approval) -> Result:
        """Store a decision after which the request is still pending."""
        same = after.gates[self.decision.gate].reason == request_in(approval).gates[self.decision.gate].reason
        if self.decision.verdict is Verdict.NOTE and same:
            return unchanged(before)
        noted = self.decision.verdict is Verdict.NOTE
        news = self._news(RequestEvent.NOTED if noted else RequestEvent.GATE_APPROVED, approval, after)
        for one in self._others(batch):
            own = replace(approval_in_of(one), gates=after.gates, reason=after.reason, by=after.by, until=after.until)
            put_with_news(batch, with_approval(one, own), news, self.origin)
        return put_with_news(batch, with_approval(before, with_request(approval, after)), news, self.origin)

    def _news(
        self, event: RequestEvent, approval: Approval, after: Approval, reason: str | None = None
    ) -> RequestMessage:
        """The news of this decision on the object's own request, or on its growth."""
        reason = self.decision.reason if reason is None else reason
        growth = request_in(approval) is not approval
        return decided_news(event, self.decision, after, reason=reason, growth=growth)

    def _others(self, batch: UnitOfWork) -> list[Stored]:
        """The other members of the gang that await approval."""
        return [one for one in self.decided_together(batch) if one.key != self.key and awaits_approval(one)]

    # Approving.

    def _approve(self, batch: UnitOfWork, before: Stored, approval: Approval, after: Approval) -> Result:
        together = self.decided_together(batch)
        moves = [
            Move(one.key.namespace, one.charge, admitted_charge(BY_NAME[one.key.kind], one.charge)) for one in together
        ]
        if exceeded := batch.counters.move(moves):
            refusal = quota_refusal(BY_NAME[self.key.kind].singular, exceeded, self.sees(batch))
            return self._leave(batch, before, approval, refusal)
        if (row := self._gang_row(batch)) is not None:
            batch.set_gang((self.key.namespace, self.gang), replace(row, charged=True))
        news = self._news(RequestEvent.APPROVED, approval, after)
        for one in together:
            if one.key == self.key:
                continue
            if awaits_approval(one):
                put_with_news(batch, self._approved(one, after), news, self.origin)
            else:
                batch.recharge(replace(one, charge=admitted_charge(BY_NAME[one.key.kind], one.charge)))
        return put_with_news(batch, self._approved(before, with_request(approval, after)), news, self.origin)

    def _approved(self, one: Stored, approval: Approval) -> Stored:
        """The object with its approval, its charge, and the amounts in force."""
        kind = BY_NAME[one.key.kind]
        charge = admitted_charge(kind, one.charge)
        status = status_of(one) | kind.granted(charge.accepted)
        return with_approval(replace(one, charge=charge), approval, status)

    def _leave(self, batch: UnitOfWork, before: Stored, approval: Approval, refusal: Refusal) -> Refusal:
        """Leave the last gate pending, and store why as its reason: the numbers, or what else is in the way."""
        # The tenant reads the reason, and not only the approver.
        request, reason = request_in(approval), headroom_text(refusal, sight(batch.tree, before.tenant))
        if request.gates[self.decision.gate].reason != reason:
            noted = without_headroom(request, self.decision, reason, batch.now)
            news = self._news(RequestEvent.NOTED, approval, noted, reason)
            for one in self._others(batch):
                own = replace(approval_in_of(one), gates=noted.gates, reason=reason)
                put_with_news(batch, with_approval(one, own), news, self.origin)
            put_with_news(batch, with_approval(before, with_request(approval, noted)), news, self.origin)
        return refusal

    def sees(self, batch: UnitOfWork) -> Sees:
        """The scopes whose figures the approver sees: those of the tenants that they decide for."""
        if not self.decides_for or EVERY in self.decides_for:
            return sight_of(batch, self)
        each = [sight(batch.tree, name) for name in self.decides_for]
        return lambda scope: any(one(scope) for one in each)

    # Denying.

    def _deny(self, batch: UnitOfWork, before: Stored, approval: Approval, after: Approval) -> Result:
        news = self._news(RequestEvent.DENIED, approval, after)
        for one in self._others(batch):
            put_with_news(batch, refused(batch, one, approval_in_of(one), after, news.message), news, self.origin)
        return put_with_news(batch, refused(batch, before, approval, after, news.message), news, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideJob(Decide):
    """A decision on a job. Its approval creates its first allocations: all of them, or the gate stays pending."""

    expected: int  # the revision of the job from which the allocations were made
    drafts: tuple[Stored, ...] = ()
    drafts_gang: Gang | None = None

    def weight(self) -> int:
        return weight_of_drafts(*self.drafts)

    @property
    def many(self) -> bool:
        return len(self.drafts) > MANY

    def objects(self) -> Iterable[Key]:
        return (self.key, *(one.key for one in self.drafts))

    def gangs(self) -> dict[GangKey, int]:
        gang = self.drafts_gang
        return {(self.key.namespace, gang.group_id): gang.min_members} if gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        if before := batch.objects.get(self.key):
            yield self.key.namespace, before.charge
        yield from charges_of(batch, self.drafts, self.drafts_gang)

    def _approve(self, batch: UnitOfWork, before: Stored, approval: Approval, after: Approval) -> Result:
        if before.revision != self.expected:
            return conflict(self.key)
        if taken := next((one.key for one in self.drafts if one.key in batch.objects), None):
            return self._leave(batch, before, approval, already_exists(taken))
        drafts = admit(batch, self.drafts, self.drafts_gang, "job", self.sees(batch))
        if isinstance(drafts, Refusal):
            return self._leave(batch, before, approval, drafts)
        batch.counters.move([Move(self.key.namespace, before.charge)])
        status = status_of(before) | {"active": len(drafts), "startedIndexes": len(drafts)}
        job = with_approval(replace(before, charge=NOTHING), after, status)
        write = put_with_news(batch, job, self._news(RequestEvent.APPROVED, approval, after), self.origin)
        made = Origin(self.origin.actor, "create", f"job/{self.key.name}")
        for one in drafts:
            batch.put(replace(one, tenant=before.tenant), made)
        return write


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideMany(Command):
    """Several decisions in one transaction, each with its own answer."""

    items: tuple[Decide, ...]

    @property
    def many(self) -> bool:
        return True

    def weight(self) -> int:
        return sum(one.weight() for one in self.items)

    def objects(self) -> Iterable[Key]:
        return [key for one in self.items for key in one.objects()]

    def gangs(self) -> dict[GangKey, int]:
        return {key: size for one in self.items for key, size in one.gangs().items()}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return [charge for one in self.items for charge in one.charges(batch)]

    def decide(self, batch: UnitOfWork) -> Result:
        return Answers(tuple(one.decide(batch) for one in self.items))


def request_in(approval: Approval) -> Approval:
    """The request that is to be decided: the growth, if that is pending, else the object's own."""
    return approval.open or approval


def with_request(approval: Approval, request: Approval) -> Approval:
    """The approval with another state of its request. Approved growth becomes a part of the approval."""
    if request_in(approval) is approval:
        return request
    if request.state is ApprovalState.APPROVED:
        return grown(approval, request)
    return replace(approval, change=request)


def refused(batch: UnitOfWork, one: Stored, approval: Approval, after: Approval, message: str) -> Stored:
    """The object after its request was denied or has expired. Refused growth leaves the approved amounts; a refused
    object holds nothing, and work ends as failed with this message."""
    kind = BY_NAME[one.key.kind]
    if approval.state is not ApprovalState.PENDING:
        kept = replace(one.charge, accepted=without_request(one.charge.accepted), due={})
        batch.counters.move([Move(one.key.namespace, one.charge, kept)])
        return with_approval(replace(one, charge=kept), replace(approval, change=after))
    batch.counters.move([Move(one.key.namespace, one.charge)])
    leave_gang(batch, one)
    reason = f"Approval{str(after.state).capitalize()}"
    status = status_of(one) | kind.refused(reason, message, timestamp(batch.now))
    ended = replace(one, charge=NOTHING, fields=kind.fields(decoded(kind, one, status)))
    return with_approval(ended, after, status)


def approval_in_of(one: Stored) -> Approval:
    approval = approval_of(one)
    assert approval is not None, "it awaits approval"
    return approval


def name_of(key: Key) -> str:
    return f'{plural_of(key)} "{key.name}"'
