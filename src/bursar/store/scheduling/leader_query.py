"""Questions to the leader and its answers, in the database: any process can ask, whichever machine the leader is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("scheduling/leader_query")

ASKED = "bursar_inquiry"  # notifies the leader
ANSWERED = "bursar_answer"  # notifies the askers, with the ids


class StoredQuestion(NamedTuple):
    id: int
    question: bytes


async def ask(db: Connection, questions: Sequence[bytes]) -> list[int]:
    """Put questions; their ids, in order. None where nobody leads: then nothing was asked."""
    return [row["id"] for row in await db.fetch(SQL.ask, list(questions))]


async def load_unanswered(db: Connection, limit: int, seconds_max: float) -> list[StoredQuestion]:
    """The oldest questions that somebody still waits for."""
    return [StoredQuestion(*row) for row in await db.fetch(SQL.unanswered, limit, seconds_max)]


async def answer(db: Connection, answers: Sequence[tuple[int, bytes]], fence: int | None = None) -> None:
    """Give these answers, if the term of this fence is not over."""
    await db.execute(SQL.answer, [one[0] for one in answers], [one[1] for one in answers], fence)


async def collect(db: Connection, ids: Iterable[int]) -> dict[int, bytes]:
    """The answers that have come, which are then gone from the table."""
    return {row["id"]: row["answer"] for row in await db.fetch(SQL.collect, list(ids))}


async def withdraw(db: Connection, ids: Iterable[int]) -> None:
    await db.execute(SQL.withdraw, list(ids))


async def forget(db: Connection, seconds: float) -> None:
    """Remove old questions, whose askers are gone."""
    await db.execute(SQL.forget, seconds)
