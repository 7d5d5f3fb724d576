"""Who pays for what is placed: whose account, one lease for each placement, and settling it when that is gone.

Where work is paid beforehand, the hold is taken in the transaction that gives the room: nothing is placed that is not
paid for, and nothing is held for what was not placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.account import Owner, account_name
from bursar.core.credit.cost import is_gpu
from bursar.core.credit.lease import Lease, LeaseState
from bursar.core.credit.ledger import Ledger
from bursar.core.nodes.node import EXCLUSIVE, Placement
from bursar.core.objects.object import Stored
from bursar.core.values.refusal import Code, Refusal

# What a node counts and nobody pays for.
UNPRICED = frozenset({"pods", EXCLUSIVE})


class PlacementPayer(Struct, frozen=True):
    """What must be read before something can be paid: who may pay for it, and the nodes whose devices it uses."""

    owners: tuple[Owner, ...]
    nodes: tuple[str, ...]


def owners_of(tenant: str, submitter: str) -> tuple[Owner, ...]:
    """Whose account pays, the first that there is: that of who submitted it, if they are of this tenant; the pool."""
    whose, _, user = submitter.partition("/")
    pool = Owner(tenant)
    return (Owner(tenant, user), pool) if user and whose == tenant else (pool,)


def payer(batch: UnitOfWork, owners: Sequence[Owner]) -> int | Refusal:
    """The account that pays."""
    for owner in owners:
        if owner in batch.payers:
            return batch.payers[owner]
    return nobody_pays(owners)


def nobody_pays(owners: Sequence[Owner]) -> Refusal:
    tenant, _ = owners[-1]
    names = " or ".join(account_name(*owner) for owner in owners)
    return Refusal(
        Code.INSUFFICIENT_CREDIT,
        f"tenant {tenant} pays beforehand, and there is no account {names}",
        f"A billing admin tops one up: bursar credit topup <credits> --account {account_name(*owners[-1])}",
    )


class _Status(Struct):
    user: str = ""
    epoch: int = 0


_decode = msgspec.json.Decoder(_Status).decode


def payment_of(batch: UnitOfWork, one: Stored, nodes: Sequence[str]) -> PlacementPayer | None:
    """What must be read before an allocation can be placed on these nodes; None where it is not paid for beforehand, or
    all of it by the claims of its nodes."""
    tenant = batch.tenant_of(one)
    if tenant not in batch.tree.prepaid:
        return None
    unpaid = tuple(node for node in nodes if not claim_lease_on(batch, node))
    return PlacementPayer(owners_of(tenant, _decode(one.status).user), unpaid) if unpaid else None


def leases_of(batch: UnitOfWork, one: Stored, taken: Sequence[tuple[str, Mapping[str, int]]]) -> list[Lease] | Refusal:
    """The leases that would pay for an allocation, one for what it takes of each node; none where nobody pays, or where
    the node's claim does."""
    tenant = batch.tenant_of(one)
    terms = batch.tree.prepaid.get(tenant)
    taken = [(node, resources) for node, resources in taken if not claim_lease_on(batch, node)]
    if terms is None or not taken:
        return []
    status = _decode(one.status)
    account = payer(batch, owners_of(tenant, status.user))
    if isinstance(account, Refusal):
        return account
    window = batch.tree.credits.window(terms)
    drafts = []
    for node, resources in taken:
        amounts = priced_of(resources)
        drafts.append(
            Lease(
                0, account, one.uid, window=window, amounts=amounts, klass=batch.classes.get(node, ""),
                gpus=gpus_in(amounts), discount=terms.discount, mode=terms.mode, uid=one.uid,
                epoch=status.epoch + 1, node=node, work=f"{one.key.namespace}/{one.key.name}",
            )
        )  # fmt: skip
    return drafts


def paid_by(batch: UnitOfWork, nodes: Iterable[str], leases: Iterable[Lease]) -> dict[str, int]:
    """Which lease pays for what is placed on each of these nodes, where one does: that of the node's claim, or its
    own."""
    found = {lease.node: lease.id for lease in leases}
    found.update({node: number for node in nodes if (number := claim_lease_on(batch, node))})
    return found


def claim_lease_on(batch: UnitOfWork, node: str) -> int:
    """The lease of the claim of a node, which pays for all that is placed there; 0 where there is none."""
    capacity = batch.nodes.get(node)
    return capacity.claim.lease if capacity is not None and capacity.claim is not None else 0


def priced_of(resources: Mapping[str, int]) -> dict[str, int]:
    """What of it has a price."""
    return {name: amount for name, amount in resources.items() if name not in UNPRICED and amount}


def gpus_in(amounts: Mapping[str, int]) -> int:
    """How many of these are GPUs, in thousandths, whoever made them."""
    return sum(amount for name, amount in amounts.items() if is_gpu(name))


def settle(ledger: Ledger | None, gone: Sequence[Placement], measured: int | None) -> None:
    """Close the leases of placements that are confirmed gone: by what their node measured, else by our own clock."""
    for one in gone:
        if not one.lease:
            continue
        assert ledger is not None, "the leases of what ends are read with it"
        lease = ledger.leases.get(one.lease)
        if lease is None or lease.state is not LeaseState.OPEN:
            continue  # It was closed before: its time ran out, or somebody ended it.
        if lease.uid != one.uid:
            continue  # It pays for the claim of the whole node, and goes on.
        if measured is None:
            ledger.close(lease)
            continue
        # Nothing ran for longer than its lease has been there, whatever the node's clock says.
        micros = max(0, min(measured, lease.longest(ledger.now)))
        if micros:
            ledger.start(lease)  # It ended before its first beat, and ran all the same.
        ledger.close(lease, micros)
