"""Cost estimates: the cost of work, and whether it could be paid for now. They take no locks and hold no credit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from bursar.commands.workloads.allocation import request_in
from bursar.core.batch.placement_billing import leases_of, payment_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import lease_number
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import class_of
from bursar.core.credit.shortfall import end_words, time_left
from bursar.core.nodes.node import NodeCapacity
from bursar.core.objects.object import Stored
from bursar.core.quota.quota import Counters
from bursar.core.values.money import MICROS, cost
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.clock import new_uid, now
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.wire.kinds.node import node_key
from bursar.wire.shared.instant import time_text


@dataclass(frozen=True, slots=True)
class Quote:
    """A cost estimate in nanocredits. `lacking` is why it could not be paid for, after the estimates before it."""

    account: str = ""
    rate: int = 0  # a second
    window_seconds: int = 0
    first: int = 0  # the hold when it is placed
    available: int = 0  # before any of this was held
    lacking: Refusal | None = None


async def quote(runtime: Runtime, wanted: Sequence[tuple[Stored, Sequence[str]]]) -> list[Quote | None]:
    """Estimate these allocations, one after another, on the nodes that each would have; None for one that is not
    prepaid, or whose nodes are unknown."""
    async with runtime.database.reader() as db:
        tree = await runtime.trees.refresh(db)
        batch = UnitOfWork(now(), tree, Counters(tree, {}), new_uid)
        payments = [payment_of(batch, one, nodes) if nodes else None for one, nodes in wanted]
        asked = [one for one in payments if one is not None]
        if not asked:
            return [None] * len(wanted)
        names = {name for one in asked for name in one.nodes}
        batch.payers = await ledger_store.find_accounts(db, {owner for one in asked for owner in one.owners})
        nodes = await object_store.load(db, {node_key(name) for name in names})
        batch.classes = {key.name: class_of(node.labels) for key, node in nodes.items()}
        capacities = await node_store.load(db, names)
        accounts = await ledger_store.load_accounts(db, batch.payers.values())
        at, prices = await ledger_store.load_now(db), await runtime.prices.refresh(db)
    ledger = Ledger(at, prices, accounts, numbers=count(1))
    before = {number: account.available for number, account in accounts.items()}
    return [
        _quote(batch, ledger, before, one, [(name, _taken(one, capacities.get(name))) for name in places])
        if payment is not None
        else None
        for (one, places), payment in zip(wanted, payments, strict=True)
    ]


def _taken(one: Stored, capacity: NodeCapacity | None) -> Mapping[str, int]:
    request = request_in(one.doc)
    return capacity.allocatable if request.exclusive and capacity is not None else request.requests


def _quote(
    batch: UnitOfWork,
    ledger: Ledger,
    before: Mapping[int, int],
    one: Stored,
    taken: Sequence[tuple[str, Mapping[str, int]]],
) -> Quote:
    leases = leases_of(batch, one, taken)
    if isinstance(leases, Refusal):
        return Quote(lacking=leases)
    account = ledger.accounts[leases[0].account]
    priced = [(ledger.prices.rate(each.amounts, each.klass, ledger.now, each.discount), each.window) for each in leases]
    rates = [(rate, window) for rate, window in priced if isinstance(rate, int)]
    lacking = ledger.lacking(leases)
    if lacking is None:
        for lease in leases:
            ledger.open(lease, started=False)
    return Quote(
        account.name,
        sum(rate for rate, _ in rates),
        leases[0].window // MICROS,
        sum(cost(rate, window) for rate, window in rates),
        before[account.id],
        lacking,
    )


async def refused_time(runtime: Runtime, leases: Iterable[str]) -> str:
    """Why the leases of running work are not extended, in words; empty if they are."""
    numbers = [number for name in leases if (number := lease_number(name)) is not None]
    if not numbers:
        return ""
    async with runtime.database.reader() as db:
        found, at = await ledger_store.load_leases(db, numbers), await ledger_store.load_now(db)
    final = [one for one in found.values() if one.final]
    if not final:
        return ""
    first = min(final, key=lambda one: one.paid_until)
    if first.final == Code.SPEND_RATE_EXCEEDED:
        return f"paid until {time_text(first.paid_until)}, and not extended: {first.final}"
    return end_words(first.final, time_left((first.paid_until - at) / MICROS))
