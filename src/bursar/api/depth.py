"""How many wait in each queue, for those who submit: known within a second, without anybody asking for each of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from bursar.core.refusal import Refusal
from bursar.ops.inquiry import Inquiries
from bursar.store.database import AWAY

FRESH_SECONDS = 1.0
STALE_SECONDS = 5.0
WAIT_SECONDS_MAX = 0.05  # for the first answer: whoever submits waits for nobody else


class Depths:
    """What the leader said last. It is asked while a submission is being committed, once a second at most."""

    def __init__(self, inquiries: Inquiries) -> None:
        self._inquiries = inquiries
        self._depths: dict[str, int] = {}
        self._revision = 0  # of the last change that is counted in them
        self._read_at = self._asked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Somebody will want to know."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= FRESH_SECONDS and (self._reading is None or self._reading.done()):
            self._asked_at = now
            self._reading = asyncio.create_task(self._read(now), name="depths")

    async def last_place(self, queue: str, revision: int) -> int | None:
        """Where in its queue something stands that was committed just now, with this revision, if nothing makes it
        overtake; None where nobody knows."""
        now = asyncio.get_running_loop().time()
        patience = self._asked_at + WAIT_SECONDS_MAX - now
        if self._reading is not None and self._asked_at > self._read_at and patience > 0:
            await asyncio.wait({self._reading}, timeout=patience)
        if now - self._read_at >= STALE_SECONDS:
            return None
        depth = self._depths.get(queue, 0)
        return max(depth, 1) if revision <= self._revision else depth + 1

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, now: float) -> None:
        with suppress(*AWAY):
            found = await self._inquiries.figures(STALE_SECONDS)
            if not isinstance(found, Refusal):
                self._depths, self._revision = {one.name: one.depth for one in found.queues}, found.revision
                self._read_at = now
