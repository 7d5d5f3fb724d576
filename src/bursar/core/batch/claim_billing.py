"""Prepaid node claims: one lease pays for the whole node, whether anything runs there or not.

It is a lease like those of placements, with a longer window, because the controller extends it instead of a heartbeat.
It also pays for the work placed on the node, which therefore ends like all prepaid work when no more time is granted,
even on an unreachable node. A node that is no longer paid for is emptied and released.
"""

from __future__ import annotations

from collections.abc import Iterable

from bursar.core.batch.placement_billing import account_of, gpus_in, payer_of, priced_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Lease, LeaseState, Mode
from bursar.core.credit.ledger import Ledger
from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace

# The prepaid time of a claim; it is renewed when half of that is used.
WINDOW_SECONDS = 600


def lease_of_claim(batch: UnitOfWork, capacity: NodeCapacity, claim: NodeClaim) -> Lease | Refusal | None:
    """The lease that would pay for a claimed node; None if its tenant is not prepaid."""
    payer = payer_of(batch, claim.tenant, claim.holder)
    if payer.terms is None:
        return None
    account = account_of(batch, payer.owners)
    if isinstance(account, Refusal):
        return account
    amounts = priced_of(capacity.allocatable)
    window = max(WINDOW_SECONDS * MICROS, batch.tree.credits.window(payer.terms))
    return Lease(
        0, account, claim.id, window=window, amounts=amounts,
        klass=batch.classes.get(capacity.name, ""), gpus=gpus_in(amounts), discount=payer.terms.discount,
        mode=Mode.RESERVE, uid=claim.id, node=capacity.name, work=f"claim of {capacity.name}",
    )  # fmt: skip


def lacking_after(ledger: Ledger, closed: Iterable[int], draft: Lease) -> Refusal | None:
    """The refusal of opening a lease after closing others; None if it can be opened. It is tried on a copy."""
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
    """Settle an open lease by the ledger's clock, up to now and finally: no measurement follows."""
    lease = ledger.leases.get(number)
    if lease is None or lease.state is not LeaseState.OPEN:
        return
    unposted = max(0, min(ledger.now, lease.paid_until) - lease.posted_until) if lease.started_at else 0
    ledger.close(lease, (lease.posted_micros if lease.started_at else 0) + unposted)


def is_due(lease: Lease, now: int) -> bool:
    """Whether a lease must be extended: half of the paid time is used, or more was refused before."""
    return bool(lease.final) or lease.paid_until - now <= lease.window // 2


def is_over(lease: Lease, now: int, freeze_micros: int) -> bool:
    """Whether the paid time is used up and no more was granted. If only the spending rate is too high, it is frozen for
    a while first, like all prepaid work."""
    still = freeze_micros if lease.final == Code.SPEND_RATE_EXCEEDED else 0
    return bool(lease.final) and lease.paid_until + still <= now
