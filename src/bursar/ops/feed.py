"""The feed in memory: one reader per process follows the changes and hands each to those who follow along.

It reads `revision > seen`, so it misses nothing and repeats nothing. It runs only while somebody listens. Followers
have bounded queues: one that does not keep up is let go, and resumes from the last revision it saw.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec
import structlog

from bursar.ops import metrics
from bursar.store import change as store
from bursar.store.change import CHANNEL, Change
from bursar.store.database import AWAY, Connection, Database

log = structlog.get_logger()

POLL_SECONDS = 0.5
READ_MAX = 1000
QUEUE_MAX = 2000

_decode_map = msgspec.json.Decoder(dict[str, str]).decode


class FedChange:
    """A change as it is handed out: what selectors ask about is decoded once, for all followers, when first asked."""

    __slots__ = ("__dict__", "change")

    def __init__(self, change: Change) -> None:
        self.change = change

    @cached_property
    def labels(self) -> dict[str, str]:
        return _decode_map(self.change.labels)

    @cached_property
    def fields(self) -> dict[str, str]:
        return self._named(_decode_map(self.change.fields))

    @cached_property
    def before_labels(self) -> dict[str, str] | None:
        return _decode_map(self.change.before_labels) if self.change.before_labels is not None else None

    @cached_property
    def before_fields(self) -> dict[str, str] | None:
        raw = self.change.before_fields
        return self._named(_decode_map(raw)) if raw is not None else None

    @cached_property
    def rendered(self) -> dict[Any, bytes]:
        """Bytes already made of this change, by format."""
        return {}

    def _named(self, fields: dict[str, str]) -> dict[str, str]:
        key = self.change.key
        return {"metadata.name": key.name, "metadata.namespace": key.namespace, **fields}


class Lagging(Exception):
    """A follower did not keep up and was let go."""


class Follower:
    """One listener's queue of changes of one kind."""

    def __init__(self, kind: str, namespace: str, after: int) -> None:
        self.kind = kind
        self.namespace = namespace
        self.after = after
        self.lagging = False
        self._queue: deque[FedChange] = deque()
        self._wake = asyncio.Event()

    def offer(self, fed: FedChange) -> None:
        if fed.change.revision <= self.after or self.lagging:
            return
        if len(self._queue) >= QUEUE_MAX:
            self.lagging = True
            self._queue.clear()
        else:
            self._queue.append(fed)
        self._wake.set()

    async def wait(self, seconds: float) -> list[FedChange]:
        """What came since; empty when nothing did for so long."""
        if not self._queue and not self.lagging:
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), seconds)
        if self.lagging:
            raise Lagging
        taken = list(self._queue)
        self._queue.clear()
        return taken


class Feed:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: dict[str, set[Follower]] = {}  # by kind; "" follows everything
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.revision = 0

    def nudge(self) -> None:
        """Something was committed: look now rather than at the next poll."""
        self._wake.set()

    async def follow(self, kind: str, namespace: str = "", after: int | None = None) -> Follower:
        """Begin to listen. Changes after the returned follower's `after` come by queue; earlier ones are the caller's
        to read."""
        # Whoever starts the reader also sets where it begins; nobody may move that afterwards.
        async with self._starting:
            await self._ensure_running()
        follower = Follower(kind, namespace, self.revision if after is None else max(after, self.revision))
        self._followers.setdefault(kind, set()).add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.get(follower.kind, set()).discard(follower)

    @property
    def followers(self) -> int:
        return sum(len(group) for group in self._followers.values())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _ensure_running(self) -> None:
        if self._task is not None and not self._task.done():
            return
        async with self._database.reader() as db:
            self.revision = (await store.load_position(db)).revision
        self._task = asyncio.create_task(self._run(), name="feed")

    async def _run(self) -> None:
        """Follow for as long as anybody listens; when the database is away, go on where it stopped."""
        db: Connection | None = None
        try:
            while self.followers:
                try:
                    if db is None or db.is_closed():
                        db = await self._database.connect()
                        await db.add_listener(CHANNEL, lambda *_: self._wake.set())
                    await self._read(db)
                except AWAY as error:
                    log.info("feed waits for the database", error=repr(error))
                    await asyncio.sleep(POLL_SECONDS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)
            # From here on a new listener starts a new reader.
            self._task = None
            if db is not None:
                await db.close()
        finally:
            if db is not None and not db.is_closed():
                db.terminate()

    async def _read(self, db: Connection) -> None:
        self._wake.clear()
        while True:
            changes = await store.load_since(db, self.revision, READ_MAX)
            for change in changes:
                self._hand_out(FedChange(change))
            if changes:
                self.revision = changes[-1].revision
                metrics.FEED_LAG.observe(max(0.0, (datetime.now(UTC) - changes[-1].at).total_seconds()))
            if len(changes) < READ_MAX:
                return

    def _hand_out(self, fed: FedChange) -> None:
        for kind in (fed.change.key.kind, ""):
            for follower in self._followers.get(kind, ()):
                if not follower.namespace or follower.namespace == fed.change.key.namespace:
                    follower.offer(fed)
