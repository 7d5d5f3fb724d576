"""Billing of claimed nodes: extend the leases of claims, and release nodes that are no longer paid for.

A claim's lease is extended well before it expires, by any controller. When no more time is granted and the paid time is
used up, the claim is marked unpaid: nothing more is placed on the node, the work there is stopped, and once the node is
empty it is released. Every step is idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bursar.commands.command import Reply
from bursar.commands.credit.claim_billing import RenewClaim, is_paid
from bursar.commands.credit.shortfall import ACTOR
from bursar.commands.credit.unpaid import CREDIT_EXHAUSTED, GRACE_SECONDS, EndUnpaid
from bursar.commands.nodes.claim import ReleaseNode
from bursar.core.batch.claim_billing import is_due, is_over
from bursar.core.credit.lease import Lease
from bursar.core.nodes.eviction import Notice
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.objects.object import Origin
from bursar.core.values.access import Reach
from bursar.ops.credit.ledger import Extend, extend
from bursar.ops.nodes.claim import release_node
from bursar.ops.nodes.drain import placed_there
from bursar.ops.runtime.lane import feed
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.nodes import node as node_store
from bursar.wire.kinds.node import node_key

EVERYBODYS = Reach(everything=True)


class PaidClaim(Struct, frozen=True):
    """A claimed node of a prepaid tenant, and its lease if that is open."""

    node: str
    claim: NodeClaim
    lease: Lease | None


# Verbs.


async def load_paid_claims(runtime: Runtime) -> tuple[list[PaidClaim], int]:
    """The prepaid claims, and the ledger's time now."""
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
    """Extend the leases that are due. Each extension has the next sequence number, so of two concurrent controllers the
    second gets the first one's answer."""
    due = [one.lease for one in claims if one.lease is not None and not one.claim.unpaid and is_due(one.lease, now)]
    if due:
        await extend(runtime, [Extend(lease.id, lease.seq + 1) for lease in due])


async def see_to(runtime: Runtime, claims: Sequence[PaidClaim], now: int, freeze_micros: int) -> list[Reply]:
    """Recheck, under locks, the claims whose lease is closed, or over with no more time granted."""
    doubtful = [
        RenewClaim(
            key=node_key(one.node), origin=Origin(ACTOR, "claim"), claim_id=one.claim.id, freeze_micros=freeze_micros
        )
        for one in claims
        if not one.claim.unpaid and (one.lease is None or is_over(one.lease, now, freeze_micros))
    ]
    return await feed(runtime.changing, doubtful) if doubtful else []


async def give_back(runtime: Runtime, one: PaidClaim) -> Reply | None:
    """Stop the work on a node that is no longer paid for, and release the node once it is empty."""
    if there := await placed_there(runtime, one.node):
        why = f"the claim of node {one.node} is no longer paid for: {one.claim.unpaid}"
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
