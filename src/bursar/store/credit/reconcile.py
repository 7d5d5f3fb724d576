"""Ended leases and their measured usage, in the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bursar.core.credit.drift import Drift
from bursar.core.values.money import MICROS
from bursar.store.db.columns import lists
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/reconcile")


class EndedLease(NamedTuple):
    lease: int
    account: int


class LastWord(NamedTuple):
    """A node's final report of the run time of a placement, in microseconds."""

    uid: str
    epoch: int
    node: str
    micros: int


class Measures(NamedTuple):
    """Measured run times of locked leases; leases that were reconciled meanwhile are left out."""

    by_node: Mapping[int, int | None]  # microseconds, of every lease
    told: Mapping[int, int]  # microseconds, of leases with a final report of their nodes
    by_events: Mapping[int, int]  # amounts, of leases with usage events
    missing: int  # count of events that never arrived


async def load_due(db: Connection, wait_micros: int, gap_micros: int, limit: int) -> list[EndedLease]:
    """List leases that can be reconciled now, the oldest first."""
    return [EndedLease(*row) for row in await db.fetch(SQL.due, wait_micros, gap_micros, limit)]


async def lock_sums(db: Connection, leases: Sequence[int]) -> dict[int, int]:
    """Lock the sums of the usage events of these leases; return the sums of those that have any."""
    await db.execute(SQL.claim_sums, leases)
    rows = await db.fetch(SQL.lock_sums, leases)
    return {row["lease"]: int(row["amount"]) for row in rows if row["events"]}


async def load_measures(db: Connection, leases: Sequence[int], sums: Mapping[int, int]) -> Measures:
    """Load the measured run times. Call it after all locks are held."""
    rows = await db.fetch(SQL.open_questions, leases)
    by_node = {row["id"]: None if row["seconds"] is None else round(row["seconds"] * MICROS) for row in rows}
    told = {row["id"]: row["told"] for row in rows if row["told"] is not None}
    return Measures(by_node, told, sums, await db.fetchval(SQL.missing, leases))


async def save_last_words(db: Connection, words: Sequence[LastWord]) -> None:
    """Save final reports of nodes for leases that ended without one; there is one per placement."""
    last = sorted({(one.uid, one.epoch, one.node): one for one in words}.values())
    await db.execute(SQL.save_last_words, *lists(last, 4))


async def save_settled(db: Connection, measured: Mapping[int, int | None]) -> None:
    await db.execute(SQL.settle, list(measured), list(measured.values()))


async def count(db: Connection, outcomes: Mapping[str, tuple[int, int]]) -> None:
    """Add leases and amounts to the totals of each outcome."""
    await db.execute(SQL.count, *lists(((name, *outcomes[name]) for name in sorted(outcomes)), 3))


class MoreDrift(NamedTuple):
    """An amount by which the drift of an account in the present hour rises."""

    leases: int = 0
    amount: int = 0
    alerted: bool = False


async def load_drifts(db: Connection, accounts: Iterable[int], first_hour: int) -> dict[int, Drift]:
    """Load the drift of these accounts since an hour; accounts without drift are absent."""
    rows = await db.fetch(SQL.drifts, sorted(set(accounts)), first_hour)
    return {row["account"]: Drift(int(row["amount"]), row["alerted"]) for row in rows}


async def add_drifts(db: Connection, hour: int, more: Mapping[int, MoreDrift]) -> None:
    """Add to the drift of accounts, under their locks."""
    accounts = sorted(more)
    await db.execute(SQL.add_drifts, hour, accounts, *lists((more[one] for one in accounts), 3))


async def count_drifting(db: Connection, first_hour: int, limit: int) -> int:
    """Count the accounts whose drift since an hour is above a limit."""
    return int(await db.fetchval(SQL.drifting, first_hour, limit))


async def forget_drifts(db: Connection, first_hour: int) -> None:
    """Drop the drift of all accounts before an hour."""
    await db.execute(SQL.forget_drifts, first_hour)


async def load_totals(db: Connection) -> dict[str, tuple[int, int]]:
    """Leases and nanocredits, by outcome."""
    return {row["outcome"]: (row["leases"], int(row["amount"])) for row in await db.fetch(SQL.totals)}


async def load_backlog(db: Connection, wait_micros: int) -> tuple[int, int]:
    """Return how many leases are overdue for reconciliation, and since when, in microseconds."""
    row = await db.fetchrow(SQL.backlog, wait_micros)
    return row["leases"], row["oldest_micros"]
