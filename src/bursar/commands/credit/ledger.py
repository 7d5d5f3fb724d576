"""The base type of the ledger's commands, the `LedgerBatch` that they decide on, and their receipts."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from bursar.core.credit.account import Account, Owner, books_closed, is_filed, no_account
from bursar.core.credit.lease import Grant, Lease, LeaseState, lease_name
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import Price
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Code, Refusal


class Receipt(Struct, frozen=True, omit_defaults=True):
    """The outcome of a command, with the state right after it."""

    at: int
    account: Account | None = None
    lease: Lease | None = None
    grant: Grant | None = None
    price: Price | None = None
    replayed: bool = False  # whether this is the answer of an earlier request


@dataclass(slots=True)
class LedgerBatch:
    """The ledger of a batch, with indexes by name, and with data that is not in the ledger."""

    ledger: Ledger
    owners: dict[Owner, int]
    past: dict[int, Lease] = field(default_factory=dict)  # leases that had ended before
    added: set[int] = field(default_factory=set)  # accounts that do not exist until they are saved
    amended: set[int] = field(default_factory=set)  # accounts whose limits change
    prices: list[tuple[Price, str]] = field(default_factory=list)
    dropped: list[Price] = field(default_factory=list)  # withdrawn prices

    def account(self, owner: Owner, *, creates: bool = False, tenant_uid: str = "") -> Account | Refusal:
        """The account of an owner; a missing one is returned only if `creates`. With a uid, the account must be that
        tenant's, because another tenant may have the name now."""
        if is_filed(owner.tenant):
            return books_closed(owner)
        number = self.owners.get(owner)
        if number is None or (number in self.added and number not in self.ledger.changed and not creates):
            return no_account(owner)
        account = self.ledger.accounts[number]
        return account if tenant_uid in ("", account.tenant_uid) else no_account(owner)

    def open_lease(self, number: int) -> Lease | None:
        lease = self.ledger.leases.get(number)
        return lease if lease is not None and lease.state is LeaseState.OPEN else None

    def ended_lease(self, number: int) -> Lease | None:
        """A lease that ended before, or in this batch. It is added to the ledger, so that a correction is saved."""
        if number in self.past:
            self.ledger.leases.setdefault(number, self.past[number])
        lease = self.ledger.leases.get(number)
        return lease if lease is not None and lease.state is not LeaseState.OPEN else None

    def receipt(
        self, account: Account, *, lease: Lease | None = None, grant: Grant | None = None, price: Price | None = None
    ) -> Receipt:
        """The receipt, with copies, because the next command changes the ledger again."""
        return Receipt(
            self.ledger.now,
            msgspec.structs.replace(account, version=account.version + 1),
            msgspec.structs.replace(lease) if lease is not None else None,
            grant,
            price,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One operation in the ledger. `decide` is called under locks, after everything named here was read."""

    idempotency_key: IdempotencyKey | None = None
    actor: str = ""
    tenant_uid: str = ""  # the scope of the idempotency key; empty: the tenant that has the name now

    def owner(self) -> Owner | None:
        """The owner whose account to lock."""
        return None

    def creates(self) -> bool:
        """Whether a missing account of the owner is opened."""
        return False

    def lease(self) -> int:
        """The lease to lock."""
        return 0

    def opens(self) -> int:
        """The number of leases that it may open."""
        return 0

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        raise NotImplementedError

    @property
    def request_id(self) -> str:
        return self.idempotency_key.key.request_id if self.idempotency_key is not None else ""


def no_lease(number: int) -> Refusal:
    return Refusal(Code.NOT_FOUND, f"there is no lease {lease_name(number)}")
