"""Leading: a candidate stands for election, works while it leads, and stops when it may not be leading any more.

Its own deadline is counted on the monotonic clock from before the renewal was sent, so it ends no later than the term
in the database. Even a leader that missed that, because it was paused, commits nothing: every bind checks its fence.

The term is renewed by a thread of its own: a decision that takes seconds does not cost the lead. A process that has
done nothing at all for much longer than that has got stuck, and is not renewed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import structlog

from bursar.ops.scheduling.leader import LeaderFence, resign, stand
from bursar.store.db.database import AWAY, RACES, Database
from bursar.store.db.stuck_sessions import end_stuck

log = structlog.get_logger()

RESIGN_SECONDS_MAX = 2.0

LeaderWork = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LeaderTerms:
    term_seconds: float = 5.0
    renew_seconds: float = 1.5
    ask_seconds: float = 0.5  # how often a candidate looks whether the leader is gone
    stuck_seconds: float = 60.0  # without a sign of life from the work's own event loop


DEFAULT_TERMS = LeaderTerms()


async def run_lead(database: Database, holder: str, on_elected: LeaderWork, terms: LeaderTerms = DEFAULT_TERMS) -> None:
    """For ever: lead whenever nobody else does. `on_elected` is run with the fence, and cancelled when the lead is
    lost; should it end by itself, the lead is given up. Cancelled, this resigns: another takes over at once."""
    # Its own connection, so that a renewal waits for no other reader; its own name, should an earlier life of the same
    # process still be remembered as the leader.
    own = await Database.open(database.url, readers=1)
    name = f"{holder}/{secrets.token_hex(4)}"
    try:
        while True:
            asked_at = monotonic()
            fence = await _ask(own, name, terms.term_seconds)
            if isinstance(fence, _Unknown):
                # A leader that was paused in the middle of a commit may hold the row.
                await end_stuck(own)
            if isinstance(fence, LeaderFence):
                await _lead(own, name, fence, asked_at + terms.term_seconds, on_elected, terms)
            await asyncio.sleep(terms.ask_seconds)
    finally:
        await own.close()


class _Unknown:
    """The database did not say whether we lead."""


async def _ask(database: Database, name: str, seconds: float) -> LeaderFence | _Unknown | None:
    try:
        async with asyncio.timeout(seconds):
            return await stand(database, name, seconds)
    except (*AWAY, *RACES) as error:
        log.info("no answer about the lead", holder=name, error=repr(error))
        return _Unknown()


async def _lead(
    database: Database, name: str, fence: LeaderFence, deadline: float, on_elected: LeaderWork, terms: LeaderTerms
) -> None:
    log.info("leading", holder=name, fence=fence.number)
    renewal = _Renewal(database.url, name, fence, deadline, terms)
    work = asyncio.ensure_future(on_elected(fence.number))
    lost = asyncio.get_running_loop().run_in_executor(None, renewal.run)
    try:
        while not work.done() and not lost.done():
            renewal.alive_at = monotonic()
            await asyncio.wait({work, lost}, timeout=terms.ask_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        renewal.end()
        await _stop(work)
        await asyncio.wait({lost})
        await _resign(database, name)
        log.info("leading no more", holder=name, fence=fence.number)


@dataclass(slots=True)
class _Renewal:
    """Renews a term, in a thread and an event loop of its own, until it is told to end or cannot."""

    url: str
    name: str
    fence: LeaderFence
    deadline: float
    terms: LeaderTerms
    alive_at: float = field(default_factory=monotonic)
    _over: bool = False
    _loop: asyncio.AbstractEventLoop | None = None
    _told: asyncio.Event | None = None

    def run(self) -> None:
        """Returns when the lead is lost, or when it was told to end."""
        asyncio.run(self._run())

    def end(self) -> None:
        """From another thread: renew no more."""
        self._over = True
        loop, told = self._loop, self._told
        if loop is not None and told is not None and not loop.is_closed():
            loop.call_soon_threadsafe(told.set)

    async def _run(self) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        try:
            database = await Database.open(self.url, readers=1)
        except AWAY as error:
            log.warning("the lead cannot be renewed", holder=self.name, error=repr(error))
            return
        try:
            await self._renew(database, self._told)
        finally:
            await database.close()
            self._loop = None

    async def _renew(self, database: Database, told: asyncio.Event) -> None:
        """Ends when another leads, when no renewal was confirmed before the deadline, or when the work is stuck."""
        while not self._over and (left := self.deadline - monotonic()) > 0:
            with suppress(TimeoutError):
                # Where little is left, half of that: a term is never given up without having been asked for.
                async with asyncio.timeout(min(self.terms.renew_seconds, left / 2)):
                    await told.wait()
            asked_at = monotonic()
            if self._over or self.deadline <= asked_at:
                break
            if asked_at - self.alive_at > self.terms.stuck_seconds:
                log.error("the leader is stuck; the lead is given up", holder=self.name, fence=self.fence.number)
                return
            answer = await _ask_before(database, self.name, self.terms.term_seconds, self.deadline)
            if isinstance(answer, _Unknown):
                await asyncio.sleep(min(self.terms.ask_seconds, max(0.0, self.deadline - monotonic())))
            elif answer is None or answer.number != self.fence.number:
                # A term that ran out and was taken anew has another fence: what was begun under the old one must end.
                log.warning("the lead was lost", holder=self.name, fence=self.fence.number)
                return
            else:
                self.deadline = asked_at + self.terms.term_seconds
        if not self._over:
            log.warning("the lead could not be renewed in time", holder=self.name, fence=self.fence.number)


async def _ask_before(database: Database, name: str, seconds: float, deadline: float) -> LeaderFence | _Unknown | None:
    try:
        async with asyncio.timeout(max(0.0, deadline - monotonic())):
            return await _ask(database, name, seconds)
    except TimeoutError:
        return _Unknown()


async def _stop(work: asyncio.Future[None]) -> None:
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error("what the leader did has failed", error=repr(error), exc_info=error)


async def _resign(database: Database, name: str) -> None:
    """As well as may be: a term that nobody ends runs out by itself."""
    try:
        async with asyncio.timeout(RESIGN_SECONDS_MAX):
            await resign(database, name)
    except (*AWAY, *RACES) as error:
        log.info("could not resign", holder=name, error=repr(error))
