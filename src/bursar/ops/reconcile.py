"""Reconciling leases that have ended: what was posted is brought to what was measured, exactly, and no balance below
zero. What cannot be paid is written off; what differs by much is told.

A lease may be reconciled again, when usage of it comes late: only what is still missing is posted then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog
from msgspec import Struct

from bursar.core.account import WRITE_OFF
from bursar.core.book import Book
from bursar.core.money import MICROS, credits_of
from bursar.core.price import PriceList
from bursar.core.usage_event import measured, micros_of
from bursar.ops.office import Office
from bursar.store import ledger as ledger_store
from bursar.store import reconcile as store
from bursar.store.database import Connection
from bursar.store.reconcile import Ended, LastWord

log = structlog.get_logger()

# How much longer than others leases are waited for whose events have gaps.
GAP_MICROS = 3600 * MICROS


class Reconcile(Struct, frozen=True):
    """A lease that has ended; differences beyond `drift` nanocredits are told."""

    ended: Ended
    drift: int


class Reconciled(Struct, frozen=True):
    """What came of it; None as what was measured: nobody knows better than what was posted."""

    lease: int
    account: str
    measured: int | None
    difference: int = 0  # what had to be posted more, or less
    written_off: int = 0


async def reconcile(db: Connection, commands: Sequence[Reconcile]) -> list[Reconciled | None]:
    """One batch, in a transaction; None where somebody else was faster."""
    ids = sorted({one.ended.lease for one in commands})
    locked = await ledger_store.lock(db, {one.ended.account for one in commands}, ())
    sums = await store.lock_sums(db, ids)
    leases = await ledger_store.lock_ended(db, ids)
    measures = await store.load_measures(db, ids, sums)
    book = Book(locked.now, PriceList(), locked.accounts, leases)
    done: dict[int, Reconciled] = {}
    for one in commands:
        if one.ended.lease in measures.by_node and one.ended.lease not in done:
            done[one.ended.lease] = _decide(book, measures, one)
    if done:
        await store.save_settled(db, {one.lease: one.measured for one in done.values()})
        await store.count(db, _outcomes(done.values(), measures.missing))
        await ledger_store.save(db, book)
    return [done.get(one.ended.lease) for one in commands]


def _decide(book: Book, measures: store.Measures, command: Reconcile) -> Reconciled:
    lease = book.leases[command.ended.lease]
    account, total = book.accounts[lease.account], measures.by_events.get(lease.id)
    by_events = None if total is None else micros_of(total, lease)
    used = measured(lease, measures.by_node[lease.id], by_events, told=measures.told.get(lease.id))
    if used is None:
        return Reconciled(lease.id, account.name, None)
    before = len(book.entries)
    difference = book.reconcile(lease, used, drift=command.drift)
    written_off = sum(entry.amount for entry in book.entries[before:] if entry.debit == WRITE_OFF)
    return Reconciled(lease.id, account.name, used, difference, written_off)


def _outcomes(done: Iterable[Reconciled], missing: int) -> dict[str, tuple[int, int]]:
    """Leases and nanocredits by outcome; of events that never came, how many."""
    found: dict[str, tuple[int, int]] = {"missing events": (missing, 0)} if missing else {}
    for one in done:
        parts = [(_outcome(one), abs(one.difference))]
        if one.written_off:
            parts.append(("written off", one.written_off))
        for name, amount in parts:
            leases, total = found.get(name, (0, 0))
            found[name] = (leases + 1, total + amount)
    return found


def _outcome(one: Reconciled) -> str:
    if one.measured is None:
        return "unmeasured"
    return "exact" if not one.difference else "debited" if one.difference > 0 else "refunded"


async def settle_late(office: Office, words: Sequence[LastWord]) -> None:
    """Leases that ended before their nodes could say how long they ran are reconciled by that, and by nothing else."""
    async with office.database.reader() as db:
        await store.save_last_words(db, words)


def tell(done: Iterable[Reconciled], drift: int) -> None:
    """Say what differed by much, once it is committed."""
    for one in done:
        if abs(one.difference) > drift or one.written_off:
            log.warning(
                "a lease cost other than was posted", lease=one.lease, account=one.account,
                difference=credits_of(one.difference), written_off=credits_of(one.written_off),
            )  # fmt: skip
