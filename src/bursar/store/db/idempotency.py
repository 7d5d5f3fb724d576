"""Idempotency keys and their recorded outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("db/idempotency")


class Remembered(NamedTuple):
    fingerprint: str
    outcome: bytes | None


def _columns(keys: Sequence[RequestKey]) -> tuple[list[str], list[str]]:
    return [key.scope for key in keys], [key.request_id for key in keys]


async def begin(db: Connection, marker: str) -> bool:
    """Begin a transaction and claim its marker, in one message; return whether the marker was free.

    Waits for a concurrent transaction that claims the same marker.
    """
    assert marker.isalnum(), "a marker is ours, and plain"
    tag: str = await db.execute(SQL.begin.replace("$marker", marker))
    return tag == "INSERT 0 1"


async def claim(db: Connection, claims: Sequence[IdempotencyKey]) -> set[RequestKey]:
    """Claim idempotency keys; return the newly claimed ones."""
    ordered = sorted(claims)
    rows = await db.fetch(SQL.claim, *_columns([one.key for one in ordered]), [one.fingerprint for one in ordered])
    return {RequestKey(row["scope"], row["request_id"]) for row in rows}


async def load(db: Connection, keys: Sequence[RequestKey]) -> dict[RequestKey, Remembered]:
    rows = await db.fetch(SQL.read, *_columns(keys))
    return {RequestKey(row["scope"], row["request_id"]): Remembered(row["fingerprint"], row["outcome"]) for row in rows}


async def save_outcomes(db: Connection, outcomes: Mapping[RequestKey, bytes]) -> None:
    keys = sorted(outcomes)
    await db.execute(SQL.save_outcomes, *_columns(keys), [outcomes[key] for key in keys])


async def forget(db: Connection, keys: Sequence[RequestKey]) -> None:
    await db.execute(SQL.forget, *_columns(sorted(keys)))


async def expire(db: Connection, *, markers_before: datetime, answers_before: datetime) -> int:
    return affected(await db.execute(SQL.expire, markers_before, answers_before))
