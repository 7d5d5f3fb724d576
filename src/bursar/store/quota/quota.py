"""Quota counters in the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bursar.core.quota.quota import Counter, ScopePair
from bursar.core.quota.tenant_tree import Enforcement, Row, Tree, enforcement_of, hard_of
from bursar.core.values.quantity import UNLIMITED
from bursar.store.db.columns import lists, texts
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("quota/quota")


def counters_of(found: Iterable[Any]) -> dict[Row, Counter]:
    return {
        (row["scope"], row["dimension"]): Counter(row["hard"], row["soft"], row["accepted"], row["bound"])
        for row in found
    }


def text_columns(rows: Iterable[Row]) -> tuple[str, str]:
    """The keys of counters to lock, as columns."""
    ordered = sorted(rows)
    return texts([row[0] for row in ordered]), texts([row[1] for row in ordered])


def _columns(rows: Iterable[Row]) -> list[list[str]]:
    return lists(sorted(rows), 2)


async def ensure(db: Connection, tree: Tree, rows: Iterable[Row]) -> None:
    ordered = sorted(rows)
    await db.execute(SQL.ensure, *_columns(ordered), [hard_of(tree, row) for row in ordered])


async def lock(db: Connection, rows: Iterable[Row]) -> dict[Row, Counter]:
    """Lock the existing counters among these in key order; return their counts."""
    return counters_of(await db.fetch(SQL.lock, *text_columns(rows)))


async def load_scopes(db: Connection, scopes: Sequence[str]) -> dict[Row, Counter]:
    return counters_of(await db.fetch(SQL.read_scopes, list(scopes)))


async def load_tenants(db: Connection) -> dict[Row, Counter]:
    return counters_of(await db.fetch(SQL.read_tenants))


async def load_limited(db: Connection) -> dict[Row, Counter]:
    """Load the counters that have a hard limit."""
    return counters_of(await db.fetch(SQL.read_limited))


async def load_all(db: Connection) -> dict[Row, Counter]:
    return counters_of(await db.fetch(SQL.read_all))


def delta_columns(tree: Tree, changes: Mapping[Row, ScopePair]) -> tuple[list[Any], ...]:
    """The changes of counters in a batch, as columns of the statement that saves it."""
    ordered = sorted(changes)
    return (
        *_columns(ordered),
        [changes[row][0] for row in ordered],
        [changes[row][1] for row in ordered],
        [enforcement_of(tree, row[0]) is Enforcement.REJECT for row in ordered],
    )


async def put(db: Connection, counters: Mapping[Row, Counter]) -> None:
    """Set counters to the values that a change of the tree gives them. The caller holds the tree's exclusive lock, so
    nobody charges meanwhile."""
    ordered = sorted(counters.items())
    rows = ((*row, min(one.hard, UNLIMITED), one.soft, one.accepted, one.bound) for row, one in ordered)
    await db.execute(SQL.put, *lists(rows, 6))


async def remove(db: Connection, rows: Iterable[Row]) -> None:
    await db.execute(SQL.remove, *_columns(rows))


async def prune(db: Connection) -> int:
    """Drop counters without usage and limits. The caller holds the tree's exclusive lock."""
    return affected(await db.execute(SQL.prune))


async def load_trend(db: Connection, scopes: Sequence[str], at: datetime) -> dict[Row, tuple[int, int]]:
    """Load (hard, accepted) of each counter about a time, from samples."""
    found = await db.fetch(SQL.trend, list(scopes), at)
    return {(row["scope"], row["dimension"]): (row["hard"], row["accepted"]) for row in found}


async def forget_samples(db: Connection, before: datetime, limit: int = 10_000) -> int:
    """Drop up to `limit` old samples; return their number."""
    return affected(await db.execute(SQL.forget_samples, before, limit))


async def save_sample(db: Connection, now: datetime) -> None:
    await db.execute(SQL.sample, now)
