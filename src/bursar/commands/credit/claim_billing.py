"""Renewing the lease of a node claim, or marking the claim as unpaid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.command import Result
from bursar.commands.credit.unpaid import CREDIT_EXHAUSTED
from bursar.commands.nodes.claim import OnNode, payments, put_claim
from bursar.commands.objects.status import unchanged
from bursar.core.batch.claim_billing import is_over, lease_of_claim
from bursar.core.batch.placement_billing import PlacementPayer
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Lease, LeaseState
from bursar.core.credit.ledger import LedgerEvent, News
from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import ClaimState, NodeClaim
from bursar.core.objects.object import Stored
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewClaim(OnNode):
    """Recheck a claim whose lease may be over. A closed lease is replaced by a new one; if no account pays for that, or
    no more time was granted, the claim is marked unpaid."""

    claim_id: str
    freeze_micros: int  # how long work may be frozen because its account spends too fast

    def pays(self, batch: UnitOfWork) -> Iterable[PlacementPayer]:
        claim = self.claim_on(batch)
        return payments(batch, claim, self.key.name) if claim is not None else ()

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if capacity.claim is None or capacity.claim.id != self.claim_id:
            return Refusal(Code.STALE, f"node {capacity.name} now has another claim, or none")
        if not is_paid(capacity.claim) or capacity.claim.unpaid:
            return unchanged(before)
        after = self._after(batch, capacity, capacity.claim)
        if after is capacity.claim:
            return unchanged(before)
        # The verb decides who sees the audit line: lines of claims are hidden from other users.
        origin = replace(self.origin, verb="release" if after.unpaid else "claim", reason=_reason(after))
        return put_claim(batch, before, capacity, after, origin)

    def _after(self, batch: UnitOfWork, capacity: NodeCapacity, claim: NodeClaim) -> NodeClaim:
        ledger = batch.ledger
        assert ledger is not None, "a claim's lease is read with it"
        lease = ledger.leases.get(claim.lease)
        if lease is not None and lease.state is LeaseState.OPEN:
            return replace(claim, unpaid=lease.final) if is_over(lease, ledger.now, self.freeze_micros) else claim
        draft = lease_of_claim(batch, capacity, claim)
        if draft is None:
            return replace(claim, lease=0)  # Its tenant is postpaid now.
        refusal = draft if isinstance(draft, Refusal) else ledger.open(draft, started=True)
        if refusal is None and isinstance(draft, Lease):
            return replace(claim, lease=draft.id)
        assert refusal is not None
        if isinstance(draft, Lease):
            ledger.events.append(LedgerEvent(News.EXHAUSTED, draft.account, 0, claim.lease, str(refusal.code)))
        return replace(claim, unpaid=str(refusal.code))


def is_paid(claim: NodeClaim) -> bool:
    return claim.state is ClaimState.HELD and claim.lease > 0


def _reason(claim: NodeClaim) -> str:
    """The reason in the audit line."""
    if claim.unpaid:
        return f"{CREDIT_EXHAUSTED}: {claim.unpaid}"
    return "it is paid by another lease" if claim.lease else "it is postpaid"
