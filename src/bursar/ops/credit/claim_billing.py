"""Keeping claimed nodes paid for, and giving back those that are not paid for any more.

A claim's lease is extended well before it runs out, by whichever controller looks first. Where no more is granted and
what was paid is used up, that is written down with the claim: from then on nothing is placed on the node, what is there
is told to end, and once it is empty it is given back. All of it can be begun again at any point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from bursar.core.batch.claim_billing import is_due, is_over, lease_of_claim
from bursar.core.batch.placement_billing import PlacementPayer
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Lease, LeaseState
from bursar.core.credit.ledger import LedgerEvent, News
from bursar.core.nodes.eviction import Notice
from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import ClaimState, NodeClaim
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.access import Reach
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.credit.agentless_billing import CREDIT_EXHAUSTED, GRACE_SECONDS, EndUnpaid
from bursar.ops.credit.ledger import Extend, extend
from bursar.ops.credit.shortfall import ACTOR
from bursar.ops.nodes.claim import OnNode, ReleaseNode, node_key, payments, put_claim, release_node
from bursar.ops.nodes.drain import placed_there
from bursar.ops.runtime.command import Reply, Result
from bursar.ops.runtime.lane_plan import feed
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import unchanged
from bursar.store.credit import ledger as ledger_store
from bursar.store.nodes import node as node_store

EVERYBODYS = Reach(everything=True)


class PaidClaim(Struct, frozen=True):
    """A claimed node that is paid for beforehand, and its lease, where that is open."""

    node: str
    claim: NodeClaim
    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewClaim(OnNode):
    """See to a claim whose lease may be over. One that is gone is followed by another; where nobody pays for that, or
    no more was granted in time, the claim is to end."""

    claim_id: str
    freeze_micros: int  # how long who spends too fast may stand still

    def pays(self, batch: UnitOfWork) -> Iterable[PlacementPayer]:
        claim = self.claim_on(batch)
        return payments(batch, claim, self.key.name) if claim is not None else ()

    def decide_on(self, batch: UnitOfWork, before: Stored, capacity: NodeCapacity) -> Result:
        if capacity.claim is None or capacity.claim.id != self.claim_id:
            return Refusal(Code.STALE, f"node {capacity.name} has another claim by now, or none")
        if not is_paid(capacity.claim) or capacity.claim.unpaid:
            return unchanged(before)
        after = self._after(batch, capacity, capacity.claim)
        if after is capacity.claim:
            return unchanged(before)
        # Who may see it is decided by the verb: that of claiming tells nobody else whose the node is.
        origin = replace(self.origin, verb="release" if after.unpaid else "claim", reason=_told(after))
        return put_claim(batch, before, capacity, after, origin)

    def _after(self, batch: UnitOfWork, capacity: NodeCapacity, claim: NodeClaim) -> NodeClaim:
        ledger = batch.ledger
        assert ledger is not None, "the lease of a claim is read with it"
        lease = ledger.leases.get(claim.lease)
        if lease is not None and lease.state is LeaseState.OPEN:
            return replace(claim, unpaid=lease.final) if is_over(lease, ledger.now, self.freeze_micros) else claim
        draft = lease_of_claim(batch, capacity, claim)
        if draft is None:
            return replace(claim, lease=0)  # Its tenant is billed afterwards by now.
        refusal = draft if isinstance(draft, Refusal) else ledger.open(draft, started=True)
        if refusal is None and isinstance(draft, Lease):
            return replace(claim, lease=draft.id)
        assert refusal is not None
        if isinstance(draft, Lease):
            ledger.events.append(LedgerEvent(News.EXHAUSTED, draft.account, 0, claim.lease, str(refusal.code)))
        return replace(claim, unpaid=str(refusal.code))


def is_paid(claim: NodeClaim) -> bool:
    return claim.state is ClaimState.HELD and claim.lease > 0


def _told(claim: NodeClaim) -> str:
    """What the audit says of a claim that was seen to."""
    if claim.unpaid:
        return f"{CREDIT_EXHAUSTED}: {claim.unpaid}"
    return "it is paid by another lease" if claim.lease else "it is billed afterwards"


# Verbs.


async def load_paid_claims(runtime: Runtime) -> tuple[list[PaidClaim], int]:
    """The claims that are paid for beforehand, by node; and the time by which they are."""
    async with runtime.database.reader() as db:
        capacities = await node_store.load_claimed(db)
        claims = {
            name: capacity.claim
            for name, capacity in capacities.items()
            if capacity.claim is not None and is_paid(capacity.claim)
        }
        leases = await ledger_store.load_leases(db, [claim.lease for claim in claims.values()]) if claims else {}
        now = await ledger_store.load_now(db) if claims else 0
    return [PaidClaim(name, claim, leases.get(claim.lease)) for name, claim in claims.items()], now


async def renew(runtime: Runtime, claims: Sequence[PaidClaim], now: int) -> None:
    """Pay further ahead what is due for it. Each is numbered after the beat before: of two who do this at once, the
    second has the answer of the first."""
    due = [one.lease for one in claims if one.lease is not None and not one.claim.unpaid and is_due(one.lease, now)]
    if due:
        await extend(runtime, [Extend(lease.id, lease.seq + 1) for lease in due])


async def see_to(runtime: Runtime, claims: Sequence[PaidClaim], now: int, freeze_micros: int) -> list[Reply]:
    """Those whose lease is gone, or over without any more being granted."""
    doubtful = [
        RenewClaim(
            key=node_key(one.node), origin=Origin(ACTOR, "claim"), claim_id=one.claim.id, freeze_micros=freeze_micros
        )
        for one in claims
        if not one.claim.unpaid and (one.lease is None or is_over(one.lease, now, freeze_micros))
    ]
    return await feed(runtime.changing, doubtful) if doubtful else []


async def give_back(runtime: Runtime, one: PaidClaim) -> Reply | None:
    """Empty a node that is not paid for any more, and give it back once nothing is placed there."""
    if there := await placed_there(runtime, one.node):
        why = f"the claim of node {one.node} is not paid for any more: {one.claim.unpaid}"
        notice = Notice(CREDIT_EXHAUSTED, CREDIT_EXHAUSTED, ACTOR, why, GRACE_SECONDS)
        origin = Origin(ACTOR, "end", one.claim.unpaid)
        await feed(
            runtime.binding,
            [EndUnpaid(key=work.key, uid=work.uid, gang=work.gang, notice=notice, origin=origin) for work in there],
        )
        return None
    command = ReleaseNode(
        key=node_key(one.node), origin=Origin(ACTOR, "release", CREDIT_EXHAUSTED), user="", over=EVERYBODYS,
        claim_id=one.claim.id,
    )  # fmt: skip
    return await release_node(runtime, command, EVERYBODYS)
