"""The feed in memory: one reader per process follows the changes and hands each to those who follow along.

It reads `revision > seen`, so it misses nothing and repeats nothing. It runs only while somebody listens. Followers
have bounded queues: one that does not keep up is let go, and resumes from the last revision it saw. So are all of them
when the reader itself fails: what it may have missed is read again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from typing import Any

import msgspec
import structlog

from bursar.ops.runtime import metrics
from bursar.store.db.database import AWAY, Connection, Database
from bursar.store.objects import change as store
from bursar.store.objects.change import CHANNEL, Change

log = structlog.get_logger()

POLL_SECONDS = 0.5
READ_START = 64
READ_MAX = 1000
READ_BYTES_MAX = 4 << 20
QUEUE_MAX = 2000
QUEUE_BYTES_MAX = 4 * READ_BYTES_MAX

_decode_map = msgspec.json.Decoder(dict[str, str]).decode


class _Placed(msgspec.Struct):
    name: str


class _Status(msgspec.Struct):
    """As much of an allocation's status as says where it runs."""

    nodes: list[_Placed] = []


_decode_status = msgspec.json.Decoder(_Status).decode


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
    def nodes(self) -> frozenset[str]:
        """The nodes that an allocation is bound to; the selectable field names only the first."""
        return self._bound(self.fields.get("spec.nodeName", ""))

    @cached_property
    def before_nodes(self) -> frozenset[str]:
        """The nodes that it was bound to. It stays on the ones it was given, so they are those it has now; where it
        lost them all, only the first is known."""
        return self._bound((self.before_fields or {}).get("spec.nodeName", ""))

    @property
    def size(self) -> int:
        return size_of(self.change)

    @cached_property
    def rendered(self) -> dict[Any, bytes]:
        """Bytes already made of this change, by format."""
        return {}

    def _bound(self, first: str) -> frozenset[str]:
        return (frozenset(self._status_nodes) | {first}) if first else frozenset()

    @cached_property
    def _status_nodes(self) -> list[str]:
        try:
            return [one.name for one in _decode_status(self.change.status).nodes]
        except msgspec.MsgspecError:
            return []  # Another kind's status may mean something else by the word.

    def _named(self, fields: dict[str, str]) -> dict[str, str]:
        key = self.change.key
        return {"metadata.name": key.name, "metadata.namespace": key.namespace, **fields}


def size_of(change: Change) -> int:
    return len(change.doc) + len(change.status)


def next_limit(limit: int, read: Sequence[Change], limit_max: int) -> int:
    """How many changes to read next: fewer when the last ones were big, more again when they were many and small."""
    size = sum(map(size_of, read))
    if size > READ_BYTES_MAX:
        return max(1, limit // 2)
    return min(limit_max, limit * 2) if len(read) >= limit and size <= READ_BYTES_MAX // 2 else limit


class FeedLagging(Exception):
    """A follower did not keep up, or the feed could not, and it was let go."""


class Follower:
    """One listener's queue of changes of one kind."""

    def __init__(self, kind: str, namespace: str, after: int) -> None:
        self.kind = kind
        self.namespace = namespace
        self.after = after
        self.lagging = False
        self._queue: deque[FedChange] = deque()
        self._queue_bytes = 0
        self._wake = asyncio.Event()

    def offer(self, fed: FedChange) -> None:
        if fed.change.revision <= self.after or self.lagging:
            return
        if len(self._queue) >= QUEUE_MAX or self._queue_bytes + fed.size > QUEUE_BYTES_MAX:
            self.let_go()
            return
        self._queue.append(fed)
        self._queue_bytes += fed.size
        self._wake.set()

    def let_go(self) -> None:
        self.lagging = True
        self._queue.clear()
        self._queue_bytes = 0
        self._wake.set()

    async def wait(self, seconds: float) -> list[FedChange]:
        """What came since; empty when nothing did for so long."""
        if not self._queue and not self.lagging:
            self._wake.clear()
            # Not wait_for: it may swallow a cancellation that comes together with what it waits for.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
        if self.lagging:
            raise FeedLagging
        taken = list(self._queue)
        self._queue.clear()
        self._queue_bytes = 0
        return taken


class Feed:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: dict[str, set[Follower]] = {}  # by kind; "" follows everything
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._limit = READ_START
        self._announced = 0  # the last change that the database told of
        self._reading = False
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
                        db, self._announced = await self._database.connect(), 0
                        await db.add_listener(CHANNEL, lambda *told: self._told(int(told[3])))
                    await self._read_all(db)
                except AWAY as error:
                    log.info("feed waits for the database", error=repr(error))
                    await asyncio.sleep(POLL_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake.wait()
            # From here on a new listener starts a new reader.
            self._task = None
            if db is not None:
                with suppress(*AWAY):
                    await db.close()
        except Exception:
            # Nobody may wait for a reader that is gone, nor for what a new one, which begins later, will not read.
            log.exception("the feed failed; its followers are let go")
            self._task = None
            self._let_go()
        finally:
            if db is not None and not db.is_closed():
                db.terminate()

    def _told(self, revision: int) -> None:
        """The database tells of a change. Of those made by this process we know already, or are just reading them."""
        self._announced = revision
        if revision > self.revision and not self._reading:
            self._wake.set()

    async def _read_all(self, db: Connection) -> None:
        self._wake.clear()
        self._reading = True
        try:
            await self._read(db)
        finally:
            self._reading = False
        if self._announced > self.revision:
            self._wake.set()

    async def _read(self, db: Connection) -> None:
        while True:
            limit = self._limit
            changes = await store.load_since(db, self.revision, limit)
            if changes and changes[0].revision != self.revision + 1:
                # Numbers have no gaps: what lay between was dropped before it was read.
                log.warning("the feed fell behind what is kept", seen=self.revision, next=changes[0].revision)
                self._let_go()
            self._limit = next_limit(limit, changes, READ_MAX)
            for change in changes:
                self._hand_out(FedChange(change))
            if changes:
                self.revision = changes[-1].revision
                metrics.FEED_LAG.observe(max(0.0, (datetime.now(UTC) - changes[-1].at).total_seconds()))
            if len(changes) < limit:
                return

    def _hand_out(self, fed: FedChange) -> None:
        for kind in (fed.change.key.kind, ""):
            for follower in self._followers.get(kind, ()):
                if not follower.namespace or follower.namespace == fed.change.key.namespace:
                    follower.offer(fed)

    def _let_go(self) -> None:
        for follower in chain.from_iterable(self._followers.values()):
            follower.let_go()
