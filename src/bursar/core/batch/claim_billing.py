"""How a claimed node is paid for beforehand: one lease of all that it has, whether anything runs there or not.

It is a lease like those of placements, with a longer window, for it is nobody's beat that extends it but the
controller's. What is placed on the node meanwhile is paid by it as well: so it ends as all paid work does when nothing
more is granted, also where nobody can be reached. What cannot be paid any more is emptied and given back.
"""

from __future__ import annotations

from collections.abc import Iterable

from bursar.core.batch.placement_billing import gpus_in, owners_of, payer, priced_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Lease, LeaseState, Mode
from bursar.core.credit.ledger import Ledger
from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace

# How far ahead a claim is paid at least; it is renewed when half of that is used.
WINDOW_SECONDS = 600


def lease_of_claim(batch: UnitOfWork, capacity: NodeCapacity, claim: NodeClaim) -> Lease | Refusal | None:
    """The lease that would pay for a claimed node; None where its tenant does not pay beforehand."""
    terms = batch.tree.prepaid.get(claim.tenant)
    if terms is None:
        return None
    account = payer(batch, owners_of(claim.tenant, claim.holder))
    if isinstance(account, Refusal):
        return account
    amounts = priced_of(capacity.allocatable)
    return Lease(
        0, account, claim.id, window=max(WINDOW_SECONDS * MICROS, batch.tree.credits.window(terms)), amounts=amounts,
        klass=batch.classes.get(capacity.name, ""), gpus=gpus_in(amounts), discount=terms.discount, mode=Mode.RESERVE,
        uid=claim.id, node=capacity.name, work=f"claim of {capacity.name}",
    )  # fmt: skip


def lacking_after(ledger: Ledger, closed: Iterable[int], draft: Lease) -> Refusal | None:
    """Why a lease cannot be opened, though these are closed first. Nothing is changed: all of it is tried on a copy."""
    copy = Ledger(
        ledger.now,
        ledger.prices,
        {number: replace(account) for number, account in ledger.accounts.items()},
        {number: replace(lease) for number, lease in ledger.leases.items()},
    )
    for number in closed:
        close_now(copy, number)
    return copy.lacking([draft])


def close_now(ledger: Ledger, number: int) -> None:
    """Settle a lease that is open by our own clock, to this moment and for ever: nobody measures it once more."""
    lease = ledger.leases.get(number)
    if lease is None or lease.state is not LeaseState.OPEN:
        return
    unposted = max(0, min(ledger.now, lease.paid_until) - lease.posted_until) if lease.started_at else 0
    ledger.close(lease, (lease.posted_micros if lease.started_at else 0) + unposted)


def is_due(lease: Lease, now: int) -> bool:
    """Whether it is time to pay further ahead: half of what was paid is used, or more was refused before."""
    return bool(lease.final) or lease.paid_until - now <= lease.window // 2


def is_over(lease: Lease, now: int, freeze_micros: int) -> bool:
    """Whether what was paid is used up and no more was granted. Who only spends too fast stands still for a while
    first, as all work does."""
    still = freeze_micros if lease.final == Code.SPEND_RATE_EXCEEDED else 0
    return bool(lease.final) and lease.paid_until + still <= now
