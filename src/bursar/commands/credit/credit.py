"""Commands of the ledger: top up, refund, adjust, lease by name, close expired leases, set limits and prices.

Each is decided under locks; those of users once per request_id, whose answer is kept for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from bursar.commands.credit.ledger import Credit, LedgerBatch, Receipt, no_lease
from bursar.core.batch.placement_billing import gpus_in
from bursar.core.credit.account import Account, Owner
from bursar.core.credit.lease import Lease, Mode, fenced, lease_name
from bursar.core.credit.price import Price
from bursar.core.nodes.node_claim import is_claim
from bursar.core.values.money import AMOUNT_MAX, MICROS, credits_of
from bursar.core.values.refusal import Code, Refusal, field_fault, invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Movement(Credit):
    """A command that adds credit to an account or removes it."""

    whose: Owner
    amount: int
    reason: str = ""
    for_lease: int = 0

    def owner(self) -> Owner:
        return self.whose

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        account = batch.account(self.whose, creates=self.creates(), tenant_uid=self.tenant_uid)
        if isinstance(account, Refusal):
            return account
        if not -AMOUNT_MAX <= self.amount <= AMOUNT_MAX:
            return invalid(f"an amount must be at most {credits_of(AMOUNT_MAX)} credits")
        refusal = self.move(batch, account)
        return refusal if refusal is not None else batch.receipt(account)

    def move(self, batch: LedgerBatch, account: Account) -> Refusal | None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class TopUp(_Movement):
    def creates(self) -> bool:
        """A tenant's pool is opened by its first top-up; a user's account is opened explicitly."""
        return not self.whose.user

    def move(self, batch: LedgerBatch, account: Account) -> Refusal | None:
        return batch.ledger.top_up(account, self.amount, request=self.request_id, actor=self.actor, reason=self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refund(_Movement):
    """Refund credit to an account; of a named lease, never more than it cost."""

    def lease(self) -> int:
        return self.for_lease

    def move(self, batch: LedgerBatch, account: Account) -> Refusal | None:
        lease = batch.open_lease(self.for_lease) or batch.ended_lease(self.for_lease)
        if self.for_lease and (lease is None or lease.account != account.id):
            return no_lease(self.for_lease)
        return batch.ledger.refund(
            account, self.amount, lease=lease, request=self.request_id, actor=self.actor, reason=self.reason
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjust(_Movement):
    def move(self, batch: LedgerBatch, account: Account) -> Refusal | None:
        return batch.ledger.adjust(
            account, self.amount, lease=self.for_lease, request=self.request_id, actor=self.actor, reason=self.reason
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease(Credit):
    """Open a named lease, for work that Bursar does not place. It runs from now on."""

    whose: Owner
    job: str
    amounts: Mapping[str, int]  # thousandths, or bytes
    klass: str = ""
    window: int = 0  # microseconds
    discount: int = 0
    mode: Mode = Mode.STRICT

    def owner(self) -> Owner:
        return self.whose

    def opens(self) -> int:
        return 1

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        account = batch.account(self.whose, tenant_uid=self.tenant_uid)
        if isinstance(account, Refusal):
            return account
        if self.window < MICROS:
            return invalid("a lease must last at least one second")
        lease = Lease(
            0, account.id, self.job, window=self.window, amounts=dict(self.amounts), klass=self.klass,
            gpus=gpus_in(self.amounts), discount=self.discount, mode=self.mode, opened_by=self.actor,
        )  # fmt: skip
        refusal = batch.ledger.open(lease, started=True)
        return refusal if refusal is not None else batch.receipt(account, lease=lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfLease(Credit):
    number: int

    def lease(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendLeaseCommand(_OfLease):
    """Extend a named lease by microseconds, at most to `ahead_max` from now."""

    delta: int
    ahead_max: int

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        lease = batch.open_lease(self.number)
        if lease is None:
            gone = dataclasses.replace(fenced(lease_name(self.number)), seconds_left=0.0)
            return gone if batch.ended_lease(self.number) else no_lease(self.number)
        if lease.uid:
            return _in_use(lease, "Its node extends it for as long as it runs.", "The controller extends it.")
        if self.delta <= 0:
            return invalid("a lease must be extended by at least one second")
        grant = batch.ledger.extend(lease, self.delta, batch.ledger.now + self.ahead_max)
        if isinstance(grant, Refusal):
            return dataclasses.replace(grant, seconds_left=max(0, lease.paid_until - batch.ledger.now) / MICROS)
        return batch.receipt(batch.ledger.accounts[lease.account], lease=lease, grant=grant)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLeaseCommand(_OfLease):
    """Close a lease, and settle it by the measured microseconds or the ledger's clock. For a closed lease, the answer
    is its settlement."""

    measured: int | None = None

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        lease = batch.open_lease(self.number)
        if lease is None:
            ended = batch.ended_lease(self.number)
            return no_lease(self.number) if ended is None else Receipt(batch.ledger.now, lease=replace(ended))
        if lease.uid:
            release = f"Release the node: its lease is closed with the claim. bursar node release {lease.node}"
            return _in_use(lease, "Cancel the allocation: its lease is closed with it.", release)
        if self.measured is not None and self.measured < 0:
            return invalid("the measured time must not be negative")
        batch.ledger.close(lease, self.measured)
        return batch.receipt(batch.ledger.accounts[lease.account], lease=lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapse(_OfLease):
    """Close a lease, if its `paid_until` has not changed."""

    paid_until: int

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        lease = batch.open_lease(self.number)
        if lease is None:
            return no_lease(self.number)
        if lease.paid_until != self.paid_until:
            return Refusal(Code.STALE, f"{lease_name(self.number)} was extended")
        batch.ledger.lapse(lease)
        return batch.receipt(batch.ledger.accounts[lease.account], lease=lease)


def _in_use(lease: Lease, of_placement: str, of_claim: str) -> Refusal:
    """The refusal to change a lease that pays for a placement or a claim: it lasts as long as that."""
    if is_claim(lease.uid):
        return Refusal(Code.IN_USE, f"{lease.name} pays for the claim of node {lease.node}", of_claim)
    return Refusal(Code.IN_USE, f"{lease.name} pays for a running allocation on node {lease.node}", of_placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAccount(Credit):
    """Open an account, and set its standing and limits (`core/credit/account_change.py` names them). With `only_new` it
    must not exist, with `only_old` it must."""

    whose: Owner
    changes: Mapping[str, Any]
    only_new: bool = False
    only_old: bool = False

    def owner(self) -> Owner:
        return self.whose

    def creates(self) -> bool:
        return not self.only_old

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        account = batch.account(self.whose, creates=self.creates(), tenant_uid=self.tenant_uid)
        if isinstance(account, Refusal):
            return account
        there = account.id not in batch.added or account.id in batch.ledger.changed
        if self.only_new and there:
            return Refusal(Code.ALREADY_EXISTS, f"account {account.name} already exists")
        if refusal := batch.ledger.amend(account, self.changes):
            return refusal
        batch.amended.add(account.id)
        return batch.receipt(account)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPrice(Credit):
    """Set a price that begins now or later. A price that has begun is never changed."""

    resource: str
    klass: str
    per_second: int
    effective_from: int | None = None  # microseconds since 1970; None: now

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        now = batch.ledger.now
        begin = now if self.effective_from is None else self.effective_from
        if now - RECENT <= begin < now:
            begin = now  # The caller meant now, by a clock that is behind ours, or in a request that was delayed.
        if not 0 <= self.per_second <= AMOUNT_MAX:
            return invalid("a price must not be negative", field_fault("per_second", "must not be negative"))
        if begin < now:
            return Refusal(
                Code.UNPROCESSABLE,
                "a price cannot begin in the past: usage until now is already charged",
                "Leave effective_from out to have it begin now.",
                (field_fault("effective_from", "must not be in the past"),),
            )
        price = Price(self.resource, self.klass, self.per_second, begin)
        known = batch.ledger.prices.at(self.resource, self.klass, begin)
        if known is not None and (known.klass, known.effective_from) == (self.klass, begin):
            if known.per_second != self.per_second:
                return Refusal(
                    Code.ALREADY_EXISTS,
                    f"{self.resource} has another price from that time on: {credits_of(known.per_second)} a second",
                    "Choose a later time for the new one.",
                )
            return Receipt(now, price=known)
        batch.prices.append((price, self.actor))
        batch.ledger.prices = batch.ledger.prices.having(price)
        return Receipt(now, price=price)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPrice(Credit):
    """Withdraw a price that has not begun, by which nothing was charged."""

    resource: str
    klass: str
    effective_from: int

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        known = batch.ledger.prices.version(self.resource, self.klass, self.effective_from)
        name = f"{self.resource} {self.klass}".strip()
        if known is None:
            return Refusal(
                Code.NOT_FOUND,
                f"{name} has no price that begins at that time",
                f"List its prices: bursar price list --resource {self.resource} --history",
            )
        if known.effective_from <= batch.ledger.now + SETTLED:
            return Refusal(
                Code.IN_USE,
                f"this price of {name} has begun, or is about to begin, and cannot be withdrawn",
                "Set another price after it: bursar price set "
                f"{self.resource} CREDITS{f' --class {self.klass}' if self.klass else ''}",
            )
        ours = [one for one in batch.prices if one[0] == known]
        if ours:
            batch.prices.remove(ours[0])
        else:
            batch.dropped.append(known)
        batch.ledger.prices = batch.ledger.prices.without(known)
        return Receipt(batch.ledger.now, price=known)


# A price whose begin is at most this long ago begins now.
RECENT = 60 * MICROS
# Clock tolerance: another process may already see a price as begun that begins within this time.
SETTLED = 5 * MICROS
