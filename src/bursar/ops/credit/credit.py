"""What people do with credit: top up, refund, adjust, lease by name, set limits and prices.

Each is one command of the ledger's lane, decided under locks and answered once per request_id, for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec.structs import replace

from bursar.core.batch.placement_billing import gpus_in
from bursar.core.credit.account import Account, Owner, books_closed, is_filed, no_account
from bursar.core.credit.lease import Lease, Mode, fenced, lease_name
from bursar.core.credit.price import Price
from bursar.core.nodes.node_claim import is_claim
from bursar.core.values.money import AMOUNT_MAX, MICROS, credits_of
from bursar.core.values.refusal import Code, Refusal, field_fault, invalid
from bursar.ops.credit.ledger import Credit, Desk, Receipt, no_lease
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as store
from bursar.store.db.idempotency import IdempotencyKey

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Movement(Credit):
    """Money that comes to an account or leaves it."""

    whose: Owner
    amount: int
    reason: str = ""
    for_lease: int = 0

    def owner(self) -> Owner:
        return self.whose

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        account = desk.account(self.whose, creates=self.creates(), tenant_uid=self.tenant_uid)
        if isinstance(account, Refusal):
            return account
        if not -AMOUNT_MAX <= self.amount <= AMOUNT_MAX:
            return invalid(f"at most {credits_of(AMOUNT_MAX)} credits can be counted")
        refusal = self.move(desk, account)
        return refusal if refusal is not None else desk.receipt(account)

    def move(self, desk: Desk, account: Account) -> Refusal | None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class TopUp(_Movement):
    def creates(self) -> bool:
        """A tenant's pool begins with its first top-up; a user's account is opened on purpose."""
        return not self.whose.user

    def move(self, desk: Desk, account: Account) -> Refusal | None:
        return desk.ledger.top_up(account, self.amount, request=self.request_id, actor=self.actor, reason=self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refund(_Movement):
    """Of a lease that is named, never more than it cost."""

    def lease(self) -> int:
        return self.for_lease

    def move(self, desk: Desk, account: Account) -> Refusal | None:
        lease = desk.open_lease(self.for_lease) or desk.ended_lease(self.for_lease)
        if self.for_lease and (lease is None or lease.account != account.id):
            return no_lease(self.for_lease)
        return desk.ledger.refund(
            account, self.amount, lease=lease, request=self.request_id, actor=self.actor, reason=self.reason
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjust(_Movement):
    def move(self, desk: Desk, account: Account) -> Refusal | None:
        return desk.ledger.adjust(
            account, self.amount, lease=self.for_lease, request=self.request_id, actor=self.actor, reason=self.reason
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease(Credit):
    """A lease that somebody asks for by name, for work that we do not place. It runs from now on."""

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

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        account = desk.account(self.whose, tenant_uid=self.tenant_uid)
        if isinstance(account, Refusal):
            return account
        if self.window < MICROS:
            return invalid("a lease is for a second or more")
        lease = Lease(
            0, account.id, self.job, window=self.window, amounts=dict(self.amounts), klass=self.klass,
            gpus=gpus_in(self.amounts), discount=self.discount, mode=self.mode, opened_by=self.actor,
        )  # fmt: skip
        refusal = desk.ledger.open(lease, started=True)
        return refusal if refusal is not None else desk.receipt(account, lease=lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfLease(Credit):
    number: int

    def lease(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendLeaseCommand(_OfLease):
    """So much more time, in microseconds, but never further ahead than `ahead_max`."""

    delta: int
    ahead_max: int

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        lease = desk.open_lease(self.number)
        if lease is None:
            gone = dataclasses.replace(fenced(lease_name(self.number)), seconds_left=0.0)
            return gone if desk.ended_lease(self.number) else no_lease(self.number)
        if lease.uid:
            return _in_use(lease, "Its node extends it for as long as it runs.", "The controller extends it.")
        if self.delta <= 0:
            return invalid("a lease is extended by a second or more")
        grant = desk.ledger.extend(lease, self.delta, desk.ledger.now + self.ahead_max)
        if isinstance(grant, Refusal):
            return dataclasses.replace(grant, seconds_left=max(0, lease.paid_until - desk.ledger.now) / MICROS)
        return desk.receipt(desk.ledger.accounts[lease.account], lease=lease, grant=grant)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLeaseCommand(_OfLease):
    """Settle it by what was measured (microseconds), or by our own clock. One that has ended is answered as it did."""

    measured: int | None = None

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        lease = desk.open_lease(self.number)
        if lease is None:
            ended = desk.ended_lease(self.number)
            return no_lease(self.number) if ended is None else Receipt(desk.ledger.now, lease=replace(ended))
        if lease.uid:
            release = f"Release the node: its lease is closed with the claim. bursar node release {lease.node}"
            return _in_use(lease, "Cancel the allocation: its lease is closed with it.", release)
        if self.measured is not None and self.measured < 0:
            return invalid("nothing runs for less than no time")
        desk.ledger.close(lease, self.measured)
        return desk.receipt(desk.ledger.accounts[lease.account], lease=lease)


def _in_use(lease: Lease, of_placement: str, of_claim: str) -> Refusal:
    """That a lease lasts as long as what it pays for."""
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

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        account = desk.account(self.whose, creates=self.creates(), tenant_uid=self.tenant_uid)
        if isinstance(account, Refusal):
            return account
        there = account.id not in desk.added or account.id in desk.ledger.changed
        if self.only_new and there:
            return Refusal(Code.ALREADY_EXISTS, f"there is an account {account.name} already")
        if refusal := desk.ledger.amend(account, self.changes):
            return refusal
        desk.amended.add(account.id)
        return desk.receipt(account)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPrice(Credit):
    """A price that begins now or later. What has begun is never changed."""

    resource: str
    klass: str
    per_second: int
    effective_from: int | None = None  # microseconds since 1970; None: now

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        now = desk.ledger.now
        begin = now if self.effective_from is None else self.effective_from
        if now - RECENT <= begin < now:
            begin = now  # They meant now, by a clock that is behind ours, or wrote it a moment ago.
        if not 0 <= self.per_second <= AMOUNT_MAX:
            return invalid("a price is nothing or more", field_fault("per_second", "must not be negative"))
        if begin < now:
            return Refusal(
                Code.UNPROCESSABLE,
                "a price cannot begin in the past: what was used then is paid",
                "Leave effective_from out to have it begin now.",
                (field_fault("effective_from", "must not be in the past"),),
            )
        price = Price(self.resource, self.klass, self.per_second, begin)
        known = desk.ledger.prices.at(self.resource, self.klass, begin)
        if known is not None and (known.klass, known.effective_from) == (self.klass, begin):
            if known.per_second != self.per_second:
                return Refusal(
                    Code.ALREADY_EXISTS,
                    f"{self.resource} has another price from that time on: {credits_of(known.per_second)} a second",
                    "Let the new one begin later.",
                )
            return Receipt(now, price=known)
        desk.prices.append((price, self.actor))
        desk.ledger.prices = desk.ledger.prices.having(price)
        return Receipt(now, price=price)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPrice(Credit):
    """Take a price back that has not begun: nobody was ever charged by it."""

    resource: str
    klass: str
    effective_from: int

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        known = desk.ledger.prices.version(self.resource, self.klass, self.effective_from)
        name = f"{self.resource} {self.klass}".strip()
        if known is None:
            return Refusal(
                Code.NOT_FOUND,
                f"{name} has no price that begins just then",
                f"See when they begin: bursar price list --resource {self.resource} --history",
            )
        if known.effective_from <= desk.ledger.now + SETTLED:
            return Refusal(
                Code.IN_USE,
                f"this price of {name} has begun, or is about to: what has begun is never changed",
                "Let another one follow it: bursar price set "
                f"{self.resource} CREDITS{f' --class {self.klass}' if self.klass else ''}",
            )
        ours = [one for one in desk.prices if one[0] == known]
        if ours:
            desk.prices.remove(ours[0])
        else:
            desk.dropped.append(known)
        desk.ledger.prices = desk.ledger.prices.without(known)
        return Receipt(desk.ledger.now, price=known)


# A price that is to begin no longer ago than this begins now.
RECENT = 60 * MICROS
# Whoever decides at this moment may already see a price as begun that we see as about to.
SETTLED = 5 * MICROS


# Verbs.


async def top_up(
    runtime: Runtime,
    owner: Owner,
    amount: int,
    *,
    actor: str,
    claim: IdempotencyKey | None = None,
    reason: str = "",
    tenant_uid: str = "",
) -> Receipt | Refusal:
    """`tenant_uid` is of the tenant that the claim is made for, where the caller has asked (`find_tenant`)."""
    whose = tenant_uid or await find_tenant(runtime, owner)
    if isinstance(whose, Refusal):
        return whose
    command = TopUp(claim=claim, actor=actor, tenant_uid=whose, whose=owner, amount=amount, reason=reason)
    return await submit(runtime, command, owner)


async def refund(
    runtime: Runtime,
    owner: Owner,
    amount: int,
    *,
    actor: str,
    reason: str,
    lease: int = 0,
    claim: IdempotencyKey | None = None,
    tenant_uid: str = "",
) -> Receipt | Refusal:
    command = Refund(
        claim=claim, actor=actor, tenant_uid=tenant_uid, whose=owner, amount=amount, reason=reason, for_lease=lease
    )
    return await submit(runtime, command, owner)


async def adjust(
    runtime: Runtime,
    owner: Owner,
    amount: int,
    *,
    actor: str,
    reason: str,
    lease: int = 0,
    claim: IdempotencyKey | None = None,
    tenant_uid: str = "",
) -> Receipt | Refusal:
    command = Adjust(
        claim=claim, actor=actor, tenant_uid=tenant_uid, whose=owner, amount=amount, reason=reason, for_lease=lease
    )
    return await submit(runtime, command, owner)


async def open_lease(runtime: Runtime, command: OpenLease) -> Receipt | Refusal:
    return await submit(runtime, command, command.whose)


async def extend_lease(runtime: Runtime, command: ExtendLeaseCommand, tenant: str = "") -> Receipt | Refusal:
    return await submit(runtime, command, Owner(tenant))


async def close_lease(runtime: Runtime, command: CloseLeaseCommand, tenant: str = "") -> Receipt | Refusal:
    return await submit(runtime, command, Owner(tenant))


async def put_account(runtime: Runtime, command: PutAccount) -> Receipt | Refusal:
    if not command.tenant_uid:
        whose = await find_tenant(runtime, command.whose)
        if isinstance(whose, Refusal):
            return whose
    return await submit(runtime, command, command.whose)


async def put_price(runtime: Runtime, command: PutPrice) -> Receipt | Refusal:
    return await submit(runtime, command, Owner(""))


async def drop_price(runtime: Runtime, command: DropPrice) -> Receipt | Refusal:
    reply = await submit(runtime, command, Owner(""))
    if not isinstance(reply, Refusal):
        log.info("a price was taken back", resource=command.resource, klass=command.klass, by=command.actor)
    return reply


async def submit(runtime: Runtime, command: Credit, owner: Owner) -> Receipt | Refusal:
    return await runtime.crediting.submit(command, owner.tenant)


async def paying_account(runtime: Runtime, tenant: str, user: str) -> Owner | None:
    """Who pays for what a user does: the user's own account if there is one, else the tenant's pool."""
    async with runtime.database.reader() as db:
        found = await store.find_accounts(db, {(tenant, user), (tenant, "")})
    return next((Owner(*one) for one in ((tenant, user), (tenant, "")) if one in found), None)


async def find_tenant(runtime: Runtime, owner: Owner) -> str | Refusal:
    """The uid of the tenant that an account is, or would be, of. Accounts are opened for tenants that there are, and
    nothing comes to what a deleted one has left behind."""
    if is_filed(owner.tenant):
        return books_closed(owner)
    async with runtime.database.reader() as db:
        tree = await runtime.trees.refresh(db)
    if owner.tenant in tree.tenants:
        return tree.tenants[owner.tenant].uid
    hint = f"There must be a tenant first: bursar create tenant {owner.tenant}"
    return dataclasses.replace(no_account(owner), hint=hint)
