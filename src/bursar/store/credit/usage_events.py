"""Usage events of jobs in the database: each event is stored once, and summed by lease."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from bursar.core.credit.usage_events import PayingLease, UsageEvent
from bursar.core.values.money import MICROS
from bursar.store.db.columns import lists
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("credit/usage_events")

# For how long after its end usage of a lease is accepted. Events are kept for longer, so that none is counted twice.
LATE_MICROS_MAX = 30 * 86_400 * MICROS
KEPT_MICROS = LATE_MICROS_MAX + 86_400 * MICROS


class EventKey(NamedTuple):
    account: int
    job: str
    seq: int


class MeteredEvent(NamedTuple):
    """A usage event with its lease."""

    event: UsageEvent
    payer: PayingLease

    @property
    def key(self) -> EventKey:
        return EventKey(self.payer.account, self.event.job, self.event.seq)


class UsageSum(NamedTuple):
    """The sum of some usage events of one lease."""

    account: int
    job: str
    lease: int
    events: int
    seq_min: int
    seq_max: int
    amount: int


async def load_payers(db: Connection, jobs: Iterable[str]) -> dict[str, list[PayingLease]]:
    """Load the leases of these jobs."""
    found: dict[str, list[PayingLease]] = {}
    for row in await db.fetch(SQL.payers, sorted(set(jobs)), LATE_MICROS_MAX):
        found.setdefault(row["job"], []).append(PayingLease(*row))
    return found


async def save(db: Connection, lines: Sequence[MeteredEvent]) -> set[EventKey]:
    """Save events with distinct keys; return the new ones. Waits for concurrent writers of the same keys."""
    events, payers = [line.event for line in lines], [line.payer for line in lines]
    rows = await db.fetch(
        SQL.save,
        [one.account for one in payers],
        [one.job for one in events],
        [one.seq for one in events],
        [one.id for one in payers],
        [one.node for one in events],
        [one.klass for one in events],
        [one.gpus for one in events],
        [one.begin for one in events],
        [one.end for one in events],
        [one.micros for one in events],
        [one.monotonic for one in events],
        [one.utilization for one in events],
    )
    return {EventKey(*row) for row in rows}


async def load(db: Connection, keys: Sequence[EventKey]) -> dict[EventKey, tuple[int, UsageEvent]]:
    """Load events that were saved before, each with its lease."""
    rows = await db.fetch(SQL.load, *lists(keys, 3))
    return {
        EventKey(account, job, seq): (lease, UsageEvent(job, seq, *rest)) for account, job, seq, lease, *rest in rows
    }


async def add_up(db: Connection, sums: Iterable[UsageSum]) -> None:
    """Add to the sums of these leases; the rows stay locked, so that no reconciliation starts before the commit."""
    await db.execute(SQL.add_up, *lists(sums, 7))


async def reopen(db: Connection, leases: Iterable[int]) -> set[int]:
    """Schedule leases that were already reconciled for another reconciliation; return which."""
    return {row["id"] for row in await db.fetch(SQL.reopen, sorted(set(leases)))}


async def forget(db: Connection, limit: int = 10_000) -> int:
    """Drop up to `limit` events, and the sums, of leases that ended too long ago to be reconciled again."""
    before = datetime.now(UTC) - timedelta(microseconds=KEPT_MICROS)
    if events := affected(await db.execute(SQL.forget_events, before, KEPT_MICROS, limit)):
        return events
    return affected(await db.execute(SQL.forget_sums, before, KEPT_MICROS, limit))


def sums_of(lines: Iterable[tuple[MeteredEvent, int]]) -> list[UsageSum]:
    """Sum these events by lease."""
    found: dict[tuple[int, str, int], UsageSum] = {}
    for (event, payer), amount in lines:
        key = (payer.account, event.job, payer.id)
        before = found.get(key) or UsageSum(*key, 0, event.seq, event.seq, 0)
        found[key] = UsageSum(
            *key, before.events + 1, min(before.seq_min, event.seq), max(before.seq_max, event.seq),
            before.amount + amount,
        )  # fmt: skip
    return list(found.values())
