"""The change feed in memory: one reader per process reads new changes and hands each to all followers.

It reads `revision > seen`, so it misses nothing and repeats nothing. It runs only while there are followers. Followers
have bounded queues: one that does not keep up is dropped, and resumes from the last revision it saw. If the reader
itself fails, all followers are dropped, and read again from there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

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
    """The part of an allocation's status that names its nodes."""

    nodes: list[_Placed] = []


_decode_status = msgspec.json.Decoder(_Status).decode


class FedChange:
    """A change in the feed. The fields that selectors use are decoded once for all followers, at first use."""

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
        """The nodes that it was bound to before. An allocation never moves, so they are its present nodes; if it has
        lost them all, only the first is known."""
        return self._bound((self.before_fields or {}).get("spec.nodeName", ""))

    @property
    def size(self) -> int:
        return size_of(self.change)

    @cached_property
    def rendered(self) -> dict[Any, bytes]:
        """The encoded forms of this change made so far, by format."""
        return {}

    def _bound(self, first: str) -> frozenset[str]:
        return (frozenset(self._status_nodes) | {first}) if first else frozenset()

    @cached_property
    def _status_nodes(self) -> list[str]:
        try:
            return [one.name for one in _decode_status(self.change.status).nodes]
        except msgspec.MsgspecError:
            return []  # The status of another kind may use the same field name for something else.

    def _named(self, fields: dict[str, str]) -> dict[str, str]:
        key = self.change.key
        return {"metadata.name": key.name, "metadata.namespace": key.namespace, **fields}


def size_of(change: Change) -> int:
    return len(change.doc) + len(change.status)


def next_limit(limit: int, read: Sequence[Change], limit_max: int) -> int:
    """The number of changes to read next: smaller after large changes, larger again after many small ones."""
    size = sum(map(size_of, read))
    if size > READ_BYTES_MAX:
        return max(1, limit // 2)
    return min(limit_max, limit * 2) if len(read) >= limit and size <= READ_BYTES_MAX // 2 else limit


class FeedLagging(Exception):
    """The follower was dropped, because it or the feed itself did not keep up."""


class Follower:
    """One follower's queue of changes of one kind."""

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

    def wake(self) -> None:
        """End the present wait, without a change."""
        self._wake.set()

    async def wait(self, seconds: float) -> list[FedChange]:
        """The changes since the last call; empty if none came within `seconds`."""
        if not self._queue and not self.lagging:
            self._wake.clear()
            # Not wait_for: it may swallow a cancellation that arrives at the same time as the result.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
        if self.lagging:
            raise FeedLagging
        taken = list(self._queue)
        self._queue.clear()
        self._queue_bytes = 0
        return taken


F = TypeVar("F", bound=Follower)


class Feed:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: dict[str, set[Follower]] = {}  # by kind; "" follows everything
        self._listeners: dict[str, list[Callable[[FedChange], None]]] = {}  # by kind
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._limit = READ_START
        self._announced = 0  # the last revision that the database announced
        self._reading = False
        self.revision = 0

    def nudge(self) -> None:
        """Read new changes now instead of at the next poll, because something was committed."""
        self._wake.set()

    async def follow(self, kind: str, namespace: str = "", after: int | None = None) -> Follower:
        """Start following. The queue delivers changes after the returned follower's `after`; the caller reads earlier
        ones."""
        return await self.join(lambda at: Follower(kind, namespace, at), after)

    async def join(self, follower_at: Callable[[int], F], after: int | None = None) -> F:
        """Start following with a follower made for the revision after which it gets changes."""
        # The call that starts the reader also sets its first revision; no later call may move it.
        async with self._starting:
            await self._ensure_running()
        follower = follower_at(self.revision if after is None else max(after, self.revision))
        self._followers.setdefault(follower.kind, set()).add(follower)
        return follower

    def listen(self, kind: str, hear: Callable[[FedChange], None]) -> None:
        """Call a function with each change of a kind that is read from now on. It does not keep the reader running, and
        must not wait."""
        self._listeners.setdefault(kind, []).append(hear)

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
        """Read changes while there are followers; after a database outage, resume at the last revision read."""
        db: Connection | None = None
        try:
            while self.followers:
                try:
                    if db is None or db.is_closed():
                        db, self._announced = await self._database.connect(), 0
                        await db.add_listener(CHANNEL, lambda *told: self._told(int(told[3])))
                    await self._read_all(db)
                except AWAY as error:
                    log.info("feed_waits", message="the change feed waits for the database", error=repr(error))
                    await asyncio.sleep(POLL_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake.wait()
            # From here on a new follower starts a new reader.
            self._task = None
            if db is not None:
                with suppress(*AWAY):
                    await db.close()
        except Exception:
            # No follower may wait for a reader that is gone, or for changes before the start of the next one.
            log.exception("feed_failed", message="the change feed failed, and its followers are dropped")
            self._task = None
            self._let_go()
        finally:
            if db is not None and not db.is_closed():
                db.terminate()

    def _told(self, revision: int) -> None:
        """Note a revision that the database announced. Changes by this process are known already, or being read."""
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
                # Revisions have no gaps: the missing changes were dropped before they were read.
                log.warning(
                    "feed_fell_behind", message="changes were dropped before the feed had read them",
                    seen=self.revision, first=changes[0].revision,
                )  # fmt: skip
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
        for hear in self._listeners.get(fed.change.key.kind, ()):
            hear(fed)
        for kind in (fed.change.key.kind, ""):
            for follower in self._followers.get(kind, ()):
                if not follower.namespace or follower.namespace == fed.change.key.namespace:
                    follower.offer(fed)

    def _let_go(self) -> None:
        for follower in chain.from_iterable(self._followers.values()):
            follower.let_go()
