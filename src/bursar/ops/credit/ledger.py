"""Batches of the ledger: lock accounts, then leases, decide in a `Ledger`, save, once per batch.

Lease extensions are by far the most frequent and have a lane of their own: an extension is idempotent by its sequence
number and needs no idempotency key. Every other change of money or prices (`commands/credit/credit.py`) has its
request_id as idempotency key, which is kept for ever. Commands that spend credit among other things, such as a bind,
load their accounts and leases here as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from bursar.commands.credit.ledger import Credit, LedgerBatch, Receipt
from bursar.core.credit.account import Account, Owner
from bursar.core.credit.lease import Grant, fenced, lease_name
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import PriceList
from bursar.core.quota.tenant_tree import Tree
from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.ops.runtime.idempotency import claim, decide_once, remember
from bursar.ops.runtime.lane import Lane, Overloaded, put_all, raise_first
from bursar.store.credit import ledger as store
from bursar.store.credit import price as price_store
from bursar.store.db.database import Connection, Stale
from bursar.store.quota import tenant_tree as tree_store

if TYPE_CHECKING:
    from bursar.ops.runtime.runtime import Runtime

EXTENDING = 2  # lanes of extensions
EXTENSIONS_MAX = 768
CREDITS_MAX = 256
KNOWN_MAX = 500_000
SCOPE = "ledger:"  # of idempotency keys that are kept for ever


class Prices:
    """The price cache of one process. The version read under locks shows whether it is complete."""

    def __init__(self) -> None:
        self._version = -1
        self._list = PriceList()

    async def at(self, db: Connection, version: int) -> PriceList:
        """The prices of this version, or of a later one."""
        if self._version != version:
            # The version is read first: prices read afterwards are of that version or a later one.
            version = await price_store.load_version(db)
            self._list, self._version = await price_store.load_all(db), version
        return self._list

    async def refresh(self, db: Connection) -> PriceList:
        """The current prices, for callers that only read."""
        return await self.at(db, await price_store.load_version(db))


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
    """A ledger of these accounts and leases, locked until the transaction ends, with numbers for `new` more leases.

    The accounts of the leases are included. Leases that are not open are left out, except those of `ended`, which are
    locked to correct what was posted for them.
    """
    open_, past = set(leases), set(ended)
    paying = await (payers or PayerCache()).of(db, open_ | past) if open_ or past else {}
    numbers = await store.reserve_numbers(db, new)
    # A lease that has just appeared is not read: its account is not among the locked ones.
    locked = await store.lock(db, chain(accounts, paying.values()), open_ & paying.keys())
    if past:
        locked.leases.update(await store.lock_ended(db, past))
    return Ledger(locked.now, await prices.at(db, locked.prices), locked.accounts, locked.leases, iter(numbers))


class PayerCache:
    """A cache of the account that pays for each lease, which never changes."""

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
        """The account, or the lease's own number while its account is unknown."""
        return self._known.get(lease, lease)

    def forget(self, lease: int) -> None:
        self._known.pop(lease, None)


# Extensions.


class Extend(Struct, frozen=True):
    """A lease extension: `seq` rises with every extension of the lease. `running` is as the node reports it."""

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
    """Parallel lanes of extensions, sharded by account: while one batch is decided, another is saved.

    All leases of an account use the same lane, so that lanes seldom wait for each other's locks. A lease whose account
    is unknown may use any lane: only speed depends on it.
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
    """Extend all leases of a heartbeat. One that a full lane sheds is refused; the next heartbeat asks for it again."""
    return [_overloaded(one) if isinstance(one, Overloaded) else one for one in await _extended(runtime, asked)]


async def _extended(runtime: Runtime, asked: Sequence[Extend]) -> list[Grant | Refusal | Overloaded]:
    answers = await put_all(runtime.extending, asked)
    raise_first([one for one in answers if not isinstance(one, Overloaded)])
    return [one for one in answers if isinstance(one, Grant | Refusal | Overloaded)]


def _overloaded(error: Overloaded) -> Refusal:
    return Refusal(Code.OVERLOADED, str(error), retry_after_seconds=error.retry_after_seconds)


class CreditBatch:
    def __init__(self, trees: TreeCache, prices: Prices, payers: PayerCache) -> None:
        self._trees = trees
        self._prices = prices
        self._payers = payers

    async def __call__(self, db: Connection, commands: Sequence[Credit]) -> Sequence[Receipt | Refusal]:
        claimed, remembered = await claim(db, commands)
        fresh = [one for one in commands if one.idempotency_key is None or one.idempotency_key.key in claimed]
        batch = await self._read(db, fresh)
        replies = decide_once(commands, remembered, _decoded, lambda one: one.decide(batch))
        if batch.prices or batch.dropped:
            await _change_prices(db, batch)
        await store.save(db, batch.ledger, added=batch.added, amended=batch.amended)
        if batch.prices or batch.dropped:
            await price_store.raise_version(db)
        await remember(db, commands, claimed, replies, _encoded)
        return _marked(commands, claimed, replies)

    async def _read(self, db: Connection, commands: Sequence[Credit]) -> LedgerBatch:
        names = {owner for one in commands if (owner := one.owner()) is not None}
        owners = {Owner(*owner): number for owner, number in (await store.find_accounts(db, names)).items()}
        leases = {one.lease() for one in commands if one.lease()}
        new = sum(one.opens() for one in commands)
        wanted = {owner for one in commands if one.creates() and (owner := one.owner())} - owners.keys()
        # The tree is locked before the accounts, and only if an account may have to be opened, which is rare.
        tree = await self._trees.at(db, await tree_store.lock_shared(db)) if wanted else None
        ledger = await ledger_for(db, self._prices, owners.values(), leases, new, payers=self._payers)
        # The accounts of a tenant that was deleted meanwhile have another name.
        living = {owner: number for owner, number in owners.items() if ledger.accounts[number].tenant == owner.tenant}
        batch = LedgerBatch(ledger, living)
        if gone := leases - ledger.leases.keys():
            batch.past = await store.load_ended(db, gone)
        if tree is not None:
            await _add_accounts(db, batch, wanted, tree)
        return batch


def _marked(
    commands: Sequence[Credit], claimed: set[RequestKey], replies: Sequence[Receipt | Refusal]
) -> list[Receipt | Refusal]:
    """The answers, each marked whether it repeats an earlier one."""
    fresh, marked = set(claimed), list(replies)
    for place, (command, reply) in enumerate(zip(commands, replies, strict=True)):
        if command.idempotency_key is None:
            continue
        if command.idempotency_key.key in fresh:
            fresh.discard(command.idempotency_key.key)
        elif isinstance(reply, Receipt):
            marked[place] = msgspec.structs.replace(reply, replayed=True)
    return marked


async def _add_accounts(db: Connection, batch: LedgerBatch, wanted: Iterable[Owner], tree: Tree) -> None:
    """Add missing accounts to the ledger; they are stored once something is decided on them. The tree is locked, so no
    tenant is deleted meanwhile."""
    missing = sorted(owner for owner in wanted if owner.tenant in tree.tenants)
    for owner, number in zip(missing, await store.reserve_accounts(db, len(missing)), strict=True):
        batch.owners[owner] = number
        batch.ledger.accounts[number] = Account(number, *owner, tenant_uid=tree.tenants[owner.tenant].uid)
        batch.added.add(number)


async def _change_prices(db: Connection, batch: LedgerBatch) -> None:
    """Save changed prices before the ledger's row is locked, because a rival that sets the same price blocks this."""
    if batch.dropped and await price_store.drop(db, batch.dropped) != len(batch.dropped):
        raise Stale("another transaction withdrew the same price")
    if batch.prices and await price_store.add(db, batch.prices) != len(batch.prices):
        raise Stale("another transaction set a price for the same time")
    await store.tell_all(db)  # a resource without a price may have one now


# Idempotency keys.


def ledger_key(tenant_uid: str, verb: str, request_id: str, fingerprint: str) -> IdempotencyKey:
    """An idempotency key that is kept for ever, of this tenant or, if that is empty, of the system. `fingerprint` is
    the request's body, or its hash."""
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
