"""Running a batch as one transaction, exactly once, whatever happens to the connection.

Each batch claims a marker of its own in the transaction itself. When the connection is lost during COMMIT, the batch is
simply run again with the same marker: if the marker is taken, the first attempt was committed and its answers, still in
memory, are right; if not, it was not, and this attempt is the first. The claim waits for a transaction that is still
committing, so there is no moment at which the answer could be wrong.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

import structlog

from bursar.ops.runtime import metrics
from bursar.store.credit import ledger
from bursar.store.db import idempotency
from bursar.store.db.database import (
    AWAY,
    BLOCKED,
    LOSSES,
    RACES,
    Connection,
    Database,
    MissingPartition,
    Stale,
    Unavailable,
    is_missing_partition,
)
from bursar.store.db.stuck_sessions import end_stuck
from bursar.store.objects.change import ensure_partitions

C = TypeVar("C")
A = TypeVar("A")

log = structlog.get_logger()

# How long a batch is retried before its commands fail with Unavailable.
PATIENCE_SECONDS = 8.0

BatchHandler = Callable[[Connection, Sequence[C]], Awaitable[Sequence[A]]]


class Transactor(Generic[C, A]):
    """Owns one connection, reconnects when it is lost, and runs batches in transactions on it."""

    def __init__(
        self,
        name: str,
        database: Database,
        run_batch: BatchHandler[C, A],
        *,
        dry: bool = False,
        on_commit: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.name = name
        self._database = database
        self._run_batch = run_batch
        self._dry = dry  # Dry run: decide, and roll back.
        self._on_commit = on_commit
        self._db: Connection | None = None

    async def run(self, commands: Sequence[C]) -> Sequence[A]:
        marker = secrets.token_hex(16)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        attempt = _Attempt[A]()
        tries = 0
        while True:
            tries += 1
            try:
                return await self._once(marker, commands, attempt)
            except MissingPartition as error:
                await self._ensure_partitions()
                await self._note("partition", error, tries, loop.time() < deadline)
            except RACES as error:
                if isinstance(error, BLOCKED):
                    await end_stuck(self._database)
                await self._note("race", error, tries, loop.time() < deadline)
            except AWAY as error:
                self._drop()
                await self._note("loss", error, tries, loop.time() < deadline)

    async def close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            async with asyncio.timeout(5):
                await db.close()

    async def _once(self, marker: str, commands: Sequence[C], attempt: _Attempt[A]) -> Sequence[A]:
        db = await self._connected()
        try:
            if not await idempotency.begin(db, marker):
                assert attempt.unsure is not None, "a marker is taken only by an attempt that reached COMMIT"
                await db.execute("ROLLBACK;")
                return attempt.unsure
            attempt.unsure = None
            answers = await self._run_batch(db, commands)
        except BaseException as error:
            await self._roll_back(db)
            if is_missing_partition(error):
                raise MissingPartition from error
            raise
        if self._dry:
            await db.execute("ROLLBACK;")
            return answers
        attempt.unsure = answers  # Unknown until COMMIT has answered.
        try:
            with metrics.COMMIT_SECONDS.labels(self.name).time():
                ended = await db.execute("COMMIT;")
            if ended != "COMMIT":
                raise Stale(f"the transaction was undone: {ended}")
        except RACES:
            attempt.unsure = None  # The server reported that it rolled back.
            raise
        notify_watchers(self._on_commit)
        return answers

    async def _connected(self) -> Connection:
        if self._db is None or self._db.is_closed():
            self._db = await self._database.connect()
        return self._db

    async def _roll_back(self, db: Connection) -> None:
        if db.is_closed():
            return
        try:
            await db.execute("ROLLBACK;")
        except LOSSES:
            self._drop()

    def _drop(self) -> None:
        if self._db is not None:
            self._db.terminate()
            self._db = None

    async def _note(self, cause: str, error: BaseException, tries: int, patient: bool) -> None:
        metrics.TRANSACTION_RETRIES.labels(self.name, cause).inc()
        if not patient:
            raise Unavailable(f"the database did not take the change: {error}") from error
        log.info(
            "transaction_retried", message="a transaction is tried again", lane=self.name, cause=cause,
            error=repr(error), tries=tries,
        )  # fmt: skip
        await asyncio.sleep(min(0.5, 0.004 * 2 ** min(tries, 8)) * random.uniform(0.5, 1.0))  # noqa: S311

    async def _ensure_partitions(self) -> None:
        async with self._database.reader() as db:
            await ensure_partitions(db)
            await ledger.ensure_partitions(db)


class _Attempt(Generic[A]):
    """The answers of an attempt whose COMMIT was sent and whose outcome is unknown."""

    __slots__ = ("unsure",)

    def __init__(self) -> None:
        self.unsure: Sequence[A] | None = None


def notify_watchers(watchers: Iterable[Callable[[], None]]) -> None:
    """Call the watchers of commits. A watcher that fails must not make the committed batch fail or be retried."""
    for notify in watchers:
        try:
            notify()
        except Exception:
            log.exception("watcher_failed", message="a watcher of commits failed")
