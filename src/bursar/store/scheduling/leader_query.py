"""Queries to the leader and its answers, in the database, so that any process on any machine can ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("scheduling/leader_query")

ASKED = "bursar_inquiry"  # channel that notifies the leader
ANSWERED = "bursar_answer"  # channel that notifies the clients, with the ids


class StoredQuestion(NamedTuple):
    id: int
    question: bytes


async def ask(db: Connection, questions: Sequence[bytes]) -> list[int]:
    """Insert queries and return their ids in order; no ids if there is no leader: then nothing was inserted."""
    return [row["id"] for row in await db.fetch(SQL.ask, list(questions))]


async def load_unanswered(db: Connection, limit: int, seconds_max: float) -> list[StoredQuestion]:
    """Load the oldest queries whose client still waits."""
    return [StoredQuestion(*row) for row in await db.fetch(SQL.unanswered, limit, seconds_max)]


async def answer(db: Connection, answers: Sequence[tuple[int, bytes]], fence: int | None = None) -> None:
    """Save answers, if the term of this fence is not over."""
    await db.execute(SQL.answer, [one[0] for one in answers], [one[1] for one in answers], fence)


async def collect(db: Connection, ids: Iterable[int]) -> dict[int, bytes]:
    """Take the available answers and remove them from the table."""
    return {row["id"]: row["answer"] for row in await db.fetch(SQL.collect, list(ids))}


async def withdraw(db: Connection, ids: Iterable[int]) -> None:
    await db.execute(SQL.withdraw, list(ids))


async def forget(db: Connection, seconds: float) -> None:
    """Remove old queries, whose clients have given up."""
    await db.execute(SQL.forget, seconds)
