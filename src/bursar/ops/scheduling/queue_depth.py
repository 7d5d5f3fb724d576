"""Queue depth: the number of pending allocations in each queue, from which a submission gets its queue position.

The leader is asked at most once a second, however many submit; without a leader the database is counted. Either answer
has the revision up to which it counted. Work that this process submitted after that revision is added, so that nothing
is counted twice.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import defaultdict
from contextlib import suppress

from bursar.core.scheduling.explain.explain_types import FRESH_SECONDS
from bursar.core.values.refusal import Refusal
from bursar.ops.scheduling.leader_query import LeaderQueries
from bursar.store.db.database import AWAY, Database
from bursar.store.scheduling import queue as store

STALE_SECONDS = 5.0
LEADER_SECONDS_MAX = 1.0  # for the leader's answer, before the database is counted
REST_PER_COUNT = 20.0  # pause for each second that counting took
WAIT_SECONDS_MAX = 5.0  # for a refresh, if the known depths are stale
RECENT_MAX = 100_000


class QueueDepths:
    """The depths read last. They are refreshed while a submission is being committed."""

    def __init__(self, leader_queries: LeaderQueries, database: Database) -> None:
        self._leader_queries = leader_queries
        self._database = database
        self._depths: dict[str, int] = {}
        self._revision = 0  # of the last change that is counted in them
        self._recent: dict[str, list[int]] = defaultdict(list)  # revisions submitted here since then, in order
        self._read_at = self._asked_at = float("-inf")
        self._count_from = float("-inf")  # when the database may be counted again
        self._reading: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Start a refresh, if the depths are no longer fresh."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= FRESH_SECONDS and (self._reading is None or self._reading.done()):
            self._asked_at = now
            self._reading = asyncio.create_task(self._read(now), name="depths")

    async def last_place(self, queue: str, revision: int | None, members: int = 1) -> int | None:
        """The last position of a queue at this revision, just committed, or that of the first of its `members`.

        Without a revision (a dry run) it is the position that a submission would get; None while no depth is known.
        """
        await self._until_known()
        if self._read_at == float("-inf"):
            return None
        depth, recent = self._depths.get(queue, 0), self._recent[queue]
        if revision is None:
            return depth + len(recent) + 1
        if revision <= self._revision:
            return max(depth - members + 1, 1)
        before = bisect_left(recent, revision)
        if recent[before : before + 1] != [revision]:  # A repeated request is counted once.
            recent[before:before] = [revision] * min(members, RECENT_MAX - len(recent))
        return depth + before + 1

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _until_known(self) -> None:
        """Wait for the refresh under way if the depths are stale or unknown."""
        now = asyncio.get_running_loop().time()
        patience = self._asked_at + WAIT_SECONDS_MAX - now
        if now - self._read_at >= STALE_SECONDS and self._reading is not None and patience > 0:
            await asyncio.wait({self._reading}, timeout=patience)

    async def _read(self, now: float) -> None:
        with suppress(*AWAY):
            found = await self._leader_queries.figures(LEADER_SECONDS_MAX)
            if not isinstance(found, Refusal) and found.revision >= self._revision:
                self._learn({one.name: one.depth for one in found.queues}, found.revision, now)
            else:
                await self._count()

    async def _count(self) -> None:
        """Count in the database. That reads every allocation, so a slow count is repeated less often."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if began < self._count_from:
            self._read_at = began  # The known depths and the revisions since are the best there is.
            return
        async with self._database.reader() as db:
            depths, revision = await store.count_waiting(db)
        self._count_from = loop.time() + REST_PER_COUNT * (loop.time() - began)
        self._learn(depths, revision, began)

    def _learn(self, depths: dict[str, int], revision: int, at: float) -> None:
        self._depths, self._revision, self._read_at = depths, revision, at
        for queue, recent in list(self._recent.items()):
            del recent[: bisect_right(recent, revision)]
            if not recent:
                del self._recent[queue]
