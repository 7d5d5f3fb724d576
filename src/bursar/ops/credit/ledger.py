"""The ledger's walks: lock accounts, then leases, decide in a book, save, once per batch.

Lease extensions are by far the most frequent and have a lane of their own: a heartbeat is idempotent by its sequence
number and needs no idempotency key. Every other change of money or prices (`ops/credit/credit.py`) is claimed by its
request_id and answered once for ever. Commands that spend money beside other things, such as a bind, load their
accounts and leases here as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from bursar.core.credit.account import Account, Owner, books_closed, is_filed, no_account
from bursar.core.credit.lease import Grant, Lease, LeaseState, fenced, lease_name
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import Price
from bursar.core.quota.tenant_tree import Tree
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit.price import Prices
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.ops.runtime.idempotency import claim, decide_once, remember
from bursar.ops.runtime.lane import Lane, Overloaded, put_all, raise_first
from bursar.store.credit import ledger as store
from bursar.store.credit import price as price_store
from bursar.store.db.database import Connection, Stale
from bursar.store.db.idempotency import IdempotencyKey, RequestKey
from bursar.store.quota import tenant_tree as tree_store

if TYPE_CHECKING:
    from bursar.ops.runtime.runtime import Runtime

EXTENDING = 2  # lanes of extensions
EXTENSIONS_MAX = 768
CREDITS_MAX = 256
KNOWN_MAX = 500_000
SCOPE = "ledger:"  # of requests that are never forgotten


async def ledger_for(
    db: Connection,
    prices: Prices,
    accounts: Iterable[int],
    leases: Iterable[int],
    new: int = 0,
    *,
    ended: Iterable[int] = (),
    payers: PayerCache | None = None,
) -> Ledger:
    """A book of these accounts and leases, locked until the transaction ends, with numbers for `new` leases more.

    The accounts of the leases come with them. Leases that are not open are not in it, but for those of `ended`, which
    are locked to put right what was posted for them.
    """
    open_, past = set(leases), set(ended)
    paying = await (payers or PayerCache()).of(db, open_ | past) if open_ or past else {}
    numbers = await store.reserve_numbers(db, new)
    # A lease that was not there a moment ago is not read now: its account is not among those that are locked.
    locked = await store.lock(db, chain(accounts, paying.values()), open_ & paying.keys())
    if past:
        locked.leases.update(await store.lock_ended(db, past))
    return Ledger(locked.now, await prices.at(db, locked.prices), locked.accounts, locked.leases, iter(numbers))


class PayerCache:
    """Which account pays for a lease: it never changes, so it is asked once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    async def of(self, db: Connection, leases: set[int]) -> dict[int, int]:
        found = {one: self._known[one] for one in leases if one in self._known}
        if missing := leases - found.keys():
            asked = await store.accounts_of_leases(db, missing)
            if len(self._known) > KNOWN_MAX:
                self._known.clear()
            self._known.update(asked)
            found |= asked
        return found

    def known(self, lease: int) -> int:
        """The account, or the lease's own number while nobody has asked for it."""
        return self._known.get(lease, lease)

    def forget(self, lease: int) -> None:
        self._known.pop(lease, None)


# Extensions.


class Extend(Struct, frozen=True):
    """A beat of a lease: `seq` rises over all that ever beat for it. `running` is what the node says."""

    lease: int
    seq: int
    running: bool = True


class ExtendBatch:
    def __init__(self, prices: Prices, payers: PayerCache) -> None:
        self._prices = prices
        self._payers = payers

    async def __call__(self, db: Connection, commands: Sequence[Extend]) -> Sequence[Grant | Refusal]:
        ledger = await ledger_for(db, self._prices, (), {one.lease for one in commands}, payers=self._payers)
        answers = [self._extended(ledger, one) for one in commands]
        await store.save(db, ledger)
        return answers

    def _extended(self, ledger: Ledger, one: Extend) -> Grant | Refusal:
        lease = ledger.leases.get(one.lease)
        if lease is None:
            self._payers.forget(one.lease)
            return fenced(lease_name(one.lease))
        return ledger.heartbeat(lease, one.seq, running=one.running)


class ExtendLanes:
    """Lanes beside each other, each for its share of the accounts: while one is decided, another is saved.

    An account's leases go the same way, so that lanes seldom wait for each other's locks. A lease that is not known yet
    goes anywhere: nothing depends on it but time.
    """

    def __init__(self, lanes: Sequence[Lane[Extend, Grant | Refusal]], payers: PayerCache) -> None:
        self.lanes = lanes
        self._payers = payers

    def put(self, command: Extend, tenant: str = "") -> asyncio.Future[Grant | Refusal]:
        return self.lanes[self._payers.known(command.lease) % len(self.lanes)].put(command, tenant)

    async def submit(self, command: Extend, tenant: str = "") -> Grant | Refusal:
        return await self.put(command, tenant)

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self.lanes))

    @property
    def size(self) -> int:
        return sum(lane.size for lane in self.lanes)


async def extend(runtime: Runtime, asked: Sequence[Extend]) -> list[Grant | Refusal]:
    """All that a beat asks for, at once. What was not taken is refused for now: it is asked again by the next beat."""
    return [_overloaded(one) if isinstance(one, Overloaded) else one for one in await _extended(runtime, asked)]


async def _extended(runtime: Runtime, asked: Sequence[Extend]) -> list[Grant | Refusal | Overloaded]:
    answers = await put_all(runtime.extending, asked)
    raise_first([one for one in answers if not isinstance(one, Overloaded)])
    return [one for one in answers if isinstance(one, Grant | Refusal | Overloaded)]


def _overloaded(error: Overloaded) -> Refusal:
    return Refusal(Code.OVERLOADED, str(error), retry_after_seconds=error.retry_after_seconds)


# Everything else.


class Receipt(Struct, frozen=True, omit_defaults=True):
    """What was decided, as things stood then."""

    at: int
    account: Account | None = None
    lease: Lease | None = None
    grant: Grant | None = None
    price: Price | None = None
    replayed: bool = False  # that the request was answered before: this is that answer


@dataclass(slots=True)
class Desk:
    """The book of a batch, with what is found by name, and what no book knows of."""

    ledger: Ledger
    owners: dict[Owner, int]
    past: dict[int, Lease] = field(default_factory=dict)  # leases that had ended before
    added: set[int] = field(default_factory=set)  # accounts that do not exist until they are saved
    amended: set[int] = field(default_factory=set)  # accounts whose limits change
    prices: list[tuple[Price, str]] = field(default_factory=list)
    dropped: list[Price] = field(default_factory=list)  # prices that are taken back

    def account(self, owner: Owner, *, creates: bool = False, tenant_uid: str = "") -> Account | Refusal:
        """One that does not exist yet is there only for those who create it. Where a uid is given, the account must be
        that tenant's: another may have been given its name since."""
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
        """One that had ended before, or has in this very batch. It is in the book from then on: what is put right of it
        is saved."""
        if number in self.past:
            self.ledger.leases.setdefault(number, self.past[number])
        lease = self.ledger.leases.get(number)
        return lease if lease is not None and lease.state is not LeaseState.OPEN else None

    def receipt(
        self, account: Account, *, lease: Lease | None = None, grant: Grant | None = None, price: Price | None = None
    ) -> Receipt:
        """Copies: what is decided next changes the book again."""
        return Receipt(
            self.ledger.now,
            msgspec.structs.replace(account, version=account.version + 1),
            msgspec.structs.replace(lease) if lease is not None else None,
            grant,
            price,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One thing to do in the ledger. `decide` is called under locks, after everything named here was read."""

    claim: IdempotencyKey | None = None
    actor: str = ""
    tenant_uid: str = ""  # whose request ids the claim is among; empty: of whoever has the name

    def owner(self) -> Owner | None:
        """Whose account to lock."""
        return None

    def creates(self) -> bool:
        """Whether the owner's account is made if there is none."""
        return False

    def lease(self) -> int:
        """The lease to lock."""
        return 0

    def opens(self) -> int:
        """How many leases it may open."""
        return 0

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        raise NotImplementedError

    @property
    def request_id(self) -> str:
        return self.claim.key.request_id if self.claim is not None else ""


class CreditBatch:
    def __init__(self, trees: TreeCache, prices: Prices, payers: PayerCache) -> None:
        self._trees = trees
        self._prices = prices
        self._payers = payers

    async def __call__(self, db: Connection, commands: Sequence[Credit]) -> Sequence[Receipt | Refusal]:
        claimed, remembered = await claim(db, commands)
        fresh = [one for one in commands if one.claim is None or one.claim.key in claimed]
        desk = await self._read(db, fresh)
        replies = decide_once(commands, remembered, _decoded, lambda one: one.decide(desk))
        if desk.prices or desk.dropped:
            await _change_prices(db, desk)
        await store.save(db, desk.ledger, added=desk.added, amended=desk.amended)
        if desk.prices or desk.dropped:
            await price_store.raise_version(db)
        await remember(db, commands, claimed, replies, _encoded)
        return _marked(commands, claimed, replies)

    async def _read(self, db: Connection, commands: Sequence[Credit]) -> Desk:
        names = {owner for one in commands if (owner := one.owner()) is not None}
        owners = {Owner(*owner): number for owner, number in (await store.find_accounts(db, names)).items()}
        leases = {one.lease() for one in commands if one.lease()}
        new = sum(one.opens() for one in commands)
        wanted = {owner for one in commands if one.creates() and (owner := one.owner())} - owners.keys()
        # The tree is locked before accounts are, and only where one is to be opened: seldom.
        tree = await self._trees.at(db, await tree_store.lock_shared(db)) if wanted else None
        ledger = await ledger_for(db, self._prices, owners.values(), leases, new, payers=self._payers)
        # A tenant that was deleted since has its accounts under another name.
        living = {owner: number for owner, number in owners.items() if ledger.accounts[number].tenant == owner.tenant}
        desk = Desk(ledger, living)
        if gone := leases - ledger.leases.keys():
            desk.past = await store.load_ended(db, gone)
        if tree is not None:
            await _add_accounts(db, desk, wanted, tree)
        return desk


def _marked(
    commands: Sequence[Credit], claimed: set[RequestKey], replies: Sequence[Receipt | Refusal]
) -> list[Receipt | Refusal]:
    """Answers, each of which says whether it was given before."""
    fresh, marked = set(claimed), list(replies)
    for place, (command, reply) in enumerate(zip(commands, replies, strict=True)):
        if command.claim is None:
            continue
        if command.claim.key in fresh:
            fresh.discard(command.claim.key)
        elif isinstance(reply, Receipt):
            marked[place] = msgspec.structs.replace(reply, replayed=True)
    return marked


async def _add_accounts(db: Connection, desk: Desk, wanted: Iterable[Owner], tree: Tree) -> None:
    """Those that are missing are in the book, and are stored once something was decided on them. A tenant cannot be
    deleted meanwhile: the tree is held still."""
    missing = sorted(owner for owner in wanted if owner.tenant in tree.tenants)
    for owner, number in zip(missing, await store.reserve_accounts(db, len(missing)), strict=True):
        desk.owners[owner] = number
        desk.ledger.accounts[number] = Account(number, *owner, tenant_uid=tree.tenants[owner.tenant].uid)
        desk.added.add(number)


async def _change_prices(db: Connection, desk: Desk) -> None:
    """Before the ledger's row is locked: somebody who sets the same price may have to be waited for."""
    if desk.dropped and await price_store.drop(db, desk.dropped) != len(desk.dropped):
        raise Stale("somebody else took the same price back")
    if desk.prices and await price_store.add(db, desk.prices) != len(desk.prices):
        raise Stale("somebody else set a price for the same time")
    await store.tell_all(db)  # what had no price may have one


def no_lease(number: int) -> Refusal:
    return Refusal(Code.NOT_FOUND, f"there is no lease {lease_name(number)}")


# Requests are answered once, and the same ever after.


def ledger_claim(tenant_uid: str, verb: str, request_id: str, fingerprint: str) -> IdempotencyKey:
    """A claim that is kept for ever, of this tenant or, where that is empty, of the system. `fingerprint` is the
    request's body, or its hash."""
    return IdempotencyKey(RequestKey(f"{SCOPE}{tenant_uid}/{verb}", request_id), fingerprint)


class _Outcome(Struct, omit_defaults=True):
    refusal: Refusal | None = None
    receipt: Receipt | None = None


_encode = msgspec.json.Encoder().encode
_outcome = msgspec.json.Decoder(_Outcome)


def _encoded(reply: Receipt | Refusal) -> bytes:
    return _encode(_Outcome(reply) if isinstance(reply, Refusal) else _Outcome(None, reply))


def _decoded(raw: bytes) -> Receipt | Refusal:
    outcome = _outcome.decode(raw)
    reply = outcome.refusal or outcome.receipt
    assert reply is not None
    return reply
