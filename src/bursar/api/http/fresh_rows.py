"""Rows of the database that are read by key for every request, and cached for two seconds, also that there is none.

Lookups that arrive while a query is running are batched into the next one, so however many requests arrive, with good
keys or bad ones, the database gets one query at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar

from bursar.store.db.database import Connection, Database, Unavailable

FRESH_SECONDS = 2.0
# While the database is away, rows that were read recently stay valid: watches continue, other requests get a 503.
FRESH_WHILE_AWAY_SECONDS = 30.0
ANSWER_SECONDS_MAX = 2.0
RETRY_SECONDS = 1.0

_KNOWN_MAX = 50_000
_UNKNOWN_MAX = 10_000

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A bounded cache of values with the times at which they were read."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, not_before: float) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0] >= not_before else None

    def put(self, key: K, at: float, value: V) -> None:
        self._entries[key] = (at, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._size_max:
            self._entries.popitem(last=False)

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)


class FreshRows(Generic[V]):
    """A cache of rows by text keys. `read` returns the rows of many keys; keys without a row are left out."""

    def __init__(
        self,
        database: Database,
        read: Callable[[Connection, Collection[str]], Awaitable[Mapping[str, V]]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._read_rows = read
        self._monotonic = monotonic
        self._known: Recent[str, V] = Recent(_KNOWN_MAX)
        # A separate cache, so that a flood of invented keys cannot evict valid ones.
        self._unknown: Recent[str, bool] = Recent(_UNKNOWN_MAX)
        # The row, None if there is none, or the reason why it could not be read.
        self._questions: dict[str, asyncio.Future[V | Unavailable | None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._reads: set[asyncio.Task[Mapping[str, V] | Unavailable]] = set()
        self._forgotten_meanwhile: set[str] = set()
        self._away_until = float("-inf")

    @property
    def unknown(self) -> int:
        """The number of keys that are known to have no row."""
        return len(self._unknown)

    async def get(self, key: str) -> V | None:
        """The row of a key. Raises Unavailable if the database is needed and away."""
        now = self._monotonic()
        if (row := self._known.get(key, now - FRESH_SECONDS)) is not None:
            return row
        if self._unknown.get(key, now - FRESH_SECONDS):
            return None
        answer = Unavailable("the database is away") if now < self._away_until else await self._ask(key)
        if not isinstance(answer, Unavailable):
            return answer
        if (row := self._known.get(key, self._monotonic() - FRESH_WHILE_AWAY_SECONDS)) is not None:
            return row
        raise Unavailable(str(answer))

    def forget(self, key: str) -> None:
        """Forget the cached row of a key, because it has changed."""
        self._known.drop(key)
        self._unknown.drop(key)
        self._forgotten_meanwhile.add(key)

    async def close(self) -> None:
        tasks = [*self._reads, *([self._asking] if self._asking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: str) -> V | Unavailable | None:
        question = self._questions.get(key)
        if question is None:
            question = self._questions[key] = asyncio.get_running_loop().create_future()
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_database())
        # Shielded: a client that disconnects must not cancel the query of the others.
        return await asyncio.shield(question)

    async def _ask_database(self) -> None:
        while self._questions:
            questions, self._questions = self._questions, {}
            self._forgotten_meanwhile.clear()
            asked_at = self._monotonic()
            try:
                found = await self._read_in_time(list(questions))
                if isinstance(found, Unavailable):
                    self._away_until = self._monotonic() + RETRY_SECONDS
                    _answer_all(questions, found)
                else:
                    self._remember(asked_at, questions, found)
            finally:
                # After a bug, or at the end of this process: no request is left waiting.
                _answer_all(questions, Unavailable("credentials could not be read"))

    async def _read_in_time(self, keys: list[str]) -> Mapping[str, V] | Unavailable:
        # Not by asyncio.timeout: a hanging connection takes seconds more to be released, and no request waits for it.
        read = asyncio.create_task(self._read(keys))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        done, _ = await asyncio.wait({read}, timeout=ANSWER_SECONDS_MAX)
        if done:
            return read.result()
        read.cancel()
        return Unavailable("the database does not answer")

    async def _read(self, keys: list[str]) -> Mapping[str, V] | Unavailable:
        try:
            async with self._database.reader() as db:
                return await self._read_rows(db, keys)
        except Unavailable as error:
            return error

    def _remember(
        self, asked_at: float, questions: dict[str, asyncio.Future[V | Unavailable | None]], found: Mapping[str, V]
    ) -> None:
        for key, question in questions.items():
            row = found.get(key)
            if key not in self._forgotten_meanwhile:
                self._known.drop(key)
                if row is None:
                    self._unknown.put(key, asked_at, True)
                else:
                    self._known.put(key, asked_at, row)
            _answer(question, row)


def _answer_all(questions: dict[str, asyncio.Future[V | Unavailable | None]], answer: Unavailable) -> None:
    for question in questions.values():
        _answer(question, answer)


def _answer(question: asyncio.Future[V | Unavailable | None], answer: V | Unavailable | None) -> None:
    if not question.done():
        question.set_result(answer)
