"""How a claimed node is paid for beforehand: one lease of all that it has, whether anything runs there or not.

It is a lease like those of placements, with a longer window, for it is nobody's beat that extends it but the
controller's. What is placed on the node meanwhile is paid by it as well: so it ends as all paid work does when nothing
more is granted, also where nobody can be reached. What cannot be paid any more is emptied and given back.
"""

from __future__ import annotations

from collections.abc import Iterable

from bursar.core.batch.placement_billing import gpus_in, owners_of, payer, priced_of
from bursar.core.batch.unit_of_work import Sheet
from bursar.core.credit.lease import Lease, LeaseState, Mode
from bursar.core.credit.ledger import Book
from bursar.core.nodes.node import NodeRoom
from bursar.core.nodes.node_claim import Claim
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace

# How far ahead a claim is paid at least; it is renewed when half of that is used.
WINDOW_SECONDS = 600


def lease_of_claim(sheet: Sheet, room: NodeRoom, claim: Claim) -> Lease | Refusal | None:
    """The lease that would pay for a claimed node; None where its tenant does not pay beforehand."""
    terms = sheet.tree.prepaid.get(claim.tenant)
    if terms is None:
        return None
    account = payer(sheet, owners_of(claim.tenant, claim.holder))
    if isinstance(account, Refusal):
        return account
    amounts = priced_of(room.allocatable)
    return Lease(
        0, account, claim.id, window=max(WINDOW_SECONDS * MICROS, sheet.tree.credits.window(terms)), amounts=amounts,
        klass=sheet.classes.get(room.name, ""), gpus=gpus_in(amounts), discount=terms.discount, mode=Mode.RESERVE,
        uid=claim.id, node=room.name, work=f"claim of {room.name}",
    )  # fmt: skip


def lacking_after(book: Book, closed: Iterable[int], draft: Lease) -> Refusal | None:
    """Why a lease cannot be opened, though these are closed first. Nothing is changed: all of it is tried on a copy."""
    copy = Book(
        book.now,
        book.prices,
        {number: replace(account) for number, account in book.accounts.items()},
        {number: replace(lease) for number, lease in book.leases.items()},
    )
    for number in closed:
        close_now(copy, number)
    return copy.lacking([draft])


def close_now(book: Book, number: int) -> None:
    """Settle a lease that is open by our own clock, to this moment and for ever: nobody measures it once more."""
    lease = book.leases.get(number)
    if lease is None or lease.state is not LeaseState.OPEN:
        return
    unposted = max(0, min(book.now, lease.paid_until) - lease.posted_until) if lease.started_at else 0
    book.close(lease, (lease.posted_micros if lease.started_at else 0) + unposted)


def is_due(lease: Lease, now: int) -> bool:
    """Whether it is time to pay further ahead: half of what was paid is used, or more was refused before."""
    return bool(lease.final) or lease.paid_until - now <= lease.window // 2


def is_over(lease: Lease, now: int, freeze_micros: int) -> bool:
    """Whether what was paid is used up and no more was granted. Who only spends too fast stands still for a while
    first, as all work does."""
    still = freeze_micros if lease.final == Code.SPEND_RATE_EXCEEDED else 0
    return bool(lease.final) and lease.paid_until + still <= now
