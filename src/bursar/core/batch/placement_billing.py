"""Billing of placements: the account that pays, one lease for each placement, and its settlement at the end.

For prepaid work, the hold is taken in the transaction that binds it: nothing is placed without a hold, and nothing is
held for work that is not placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.account import Owner, account_name
from bursar.core.credit.billing_terms import BillingTerms
from bursar.core.credit.cost import is_gpu
from bursar.core.credit.lease import Lease, LeaseState
from bursar.core.credit.ledger import Ledger
from bursar.core.nodes.node import EXCLUSIVE, Placement
from bursar.core.objects.object import Stored
from bursar.core.values.refusal import Code, Refusal

# Resources that a node counts and that have no price.
UNPRICED = frozenset({"pods", EXCLUSIVE})


class Payer(Struct, frozen=True):
    """The payer of work on a node: the lease of the node's claim, an account, or nobody."""

    claim_lease: int = 0
    owners: tuple[Owner, ...] = ()  # the first of these accounts that exists pays
    terms: BillingTerms | None = None  # of that account's leases


NOBODY = Payer()


def payer_of(batch: UnitOfWork, tenant: str, user: str, node: str = "") -> Payer:
    """The payer of a user's work on a node or, without a node, of the claim of a whole one. A claim that is paid for
    pays for all that is placed on its node."""
    capacity = batch.nodes.get(node)
    if capacity is not None and capacity.claim is not None and capacity.claim.lease:
        return Payer(capacity.claim.lease)
    terms = batch.tree.prepaid.get(tenant)
    return NOBODY if terms is None else Payer(0, owners_of(tenant, user), terms)


def owners_of(tenant: str, submitter: str) -> tuple[Owner, ...]:
    """The owners of the accounts that may pay: the submitter, if of this tenant, then the tenant's pool."""
    whose, _, user = submitter.partition("/")
    pool = Owner(tenant)
    return (Owner(tenant, user), pool) if user and whose == tenant else (pool,)


class PlacementPayer(Struct, frozen=True):
    """The rows that a payment needs: the accounts that may pay, and the nodes whose devices are used."""

    owners: tuple[Owner, ...]
    nodes: tuple[str, ...]


def account_of(batch: UnitOfWork, owners: Sequence[Owner]) -> int | Refusal:
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
        f"tenant {tenant} is prepaid, and there is no account {names}",
        f"A billing admin tops one up: bursar credit topup <credits> --account {account_name(*owners[-1])}",
    )


class _Status(Struct):
    user: str = ""
    epoch: int = 0


_decode = msgspec.json.Decoder(_Status).decode


def payment_of(batch: UnitOfWork, one: Stored, nodes: Sequence[str]) -> PlacementPayer | None:
    """The rows that paying for an allocation on these nodes needs; None if no account pays for any of it."""
    tenant, user = batch.tenant_of(one), _decode(one.status).user
    found = {node: payer.owners for node in nodes if (payer := payer_of(batch, tenant, user, node)).terms is not None}
    return PlacementPayer(next(iter(found.values())), tuple(found)) if found else None


def leases_of(batch: UnitOfWork, one: Stored, taken: Sequence[tuple[str, Mapping[str, int]]]) -> list[Lease] | Refusal:
    """The leases that would pay for an allocation, one for each node that an account pays for."""
    tenant, status = batch.tenant_of(one), _decode(one.status)
    drafts = []
    for node, resources in taken:
        payer = payer_of(batch, tenant, status.user, node)
        if payer.terms is None:
            continue
        account = account_of(batch, payer.owners)
        if isinstance(account, Refusal):
            return account
        amounts = priced_of(resources)
        drafts.append(
            Lease(
                0, account, one.uid, window=batch.tree.credits.window(payer.terms), amounts=amounts,
                klass=batch.classes.get(node, ""), gpus=gpus_in(amounts), discount=payer.terms.discount,
                mode=payer.terms.mode, uid=one.uid, epoch=status.epoch + 1, node=node,
                work=f"{one.key.namespace}/{one.key.name}",
            )
        )  # fmt: skip
    return drafts


def paid_by(batch: UnitOfWork, one: Stored, nodes: Iterable[str], leases: Iterable[Lease]) -> dict[str, int]:
    """The lease that pays for an allocation on each of these nodes, if any: that of the node's claim, or its own."""
    tenant, user = batch.tenant_of(one), _decode(one.status).user
    claims = {node: number for node in nodes if (number := payer_of(batch, tenant, user, node).claim_lease)}
    return {lease.node: lease.id for lease in leases} | claims


def priced_of(resources: Mapping[str, int]) -> dict[str, int]:
    """The resources that can have a price."""
    return {name: amount for name, amount in resources.items() if name not in UNPRICED and amount}


def gpus_in(amounts: Mapping[str, int]) -> int:
    """The number of GPUs in these amounts, in thousandths, of all vendors."""
    return sum(amount for name, amount in amounts.items() if is_gpu(name))


def settle(ledger: Ledger | None, gone: Sequence[Placement], measured: int | None) -> None:
    """Close the leases of placements that are confirmed gone, by the node's measurement or the ledger's clock."""
    for one in gone:
        if not one.lease:
            continue
        assert ledger is not None, "the leases of ending work are read with it"
        lease = ledger.leases.get(one.lease)
        if lease is None or lease.state is not LeaseState.OPEN:
            continue  # It was closed before: it expired, or was closed by a command.
        if lease.uid != one.uid:
            continue  # It pays for the claim of the whole node, and stays open.
        if measured is None:
            ledger.close(lease)
            continue
        # No work ran longer than its lease exists, whatever the node's clock says.
        micros = max(0, min(measured, lease.longest(ledger.now)))
        if micros:
            ledger.start(lease)  # It ran, but ended before its first heartbeat.
        ledger.close(lease, micros)
