"""Leader election: a candidate takes the term, works while it leads, and stops before the term may be another's.

Its own deadline is counted on the monotonic clock from before the renewal was sent, so it ends no later than the term
in the database. Even a leader that missed that, because it was paused, commits nothing: every bind checks its fence.

The term is renewed by a thread of its own: a decision that takes seconds does not cost the lead. A process that has
made no progress for much longer than that is stuck, and its term is not renewed.
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
    ask_seconds: float = 0.5  # the interval at which a candidate asks for the term
    stuck_seconds: float = 60.0  # without a sign of life from the work's own event loop


DEFAULT_TERMS = LeaderTerms()


async def run_election(
    database: Database, holder: str, on_elected: LeaderWork, terms: LeaderTerms = DEFAULT_TERMS
) -> None:
    """Run forever: lead whenever no other process does. `on_elected` runs with the fence, and is cancelled when the
    lead is lost; if it ends by itself, the term is resigned. When cancelled, resign: another takes over at once."""
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
    """The database did not answer whether this process leads."""


async def _ask(database: Database, name: str, seconds: float) -> LeaderFence | _Unknown | None:
    try:
        async with asyncio.timeout(seconds):
            return await stand(database, name, seconds)
    except (*AWAY, *RACES) as error:
        log.info("election_waits", message="the election waits for the database", holder=name, error=repr(error))
        return _Unknown()


async def _lead(
    database: Database, name: str, fence: LeaderFence, deadline: float, on_elected: LeaderWork, terms: LeaderTerms
) -> None:
    log.info("leader_elected", message="this controller leads", holder=name, fence=fence.number)
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
        log.info("leadership_ended", message="this controller leads no longer", holder=name, fence=fence.number)


@dataclass(slots=True)
class _Renewal:
    """Renews a term, in a thread and an event loop of its own, until it is stopped or fails."""

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
        """Return when the lead is lost, or after `end`."""
        asyncio.run(self._run())

    def end(self) -> None:
        """Stop renewing; called from another thread."""
        self._over = True
        loop, told = self._loop, self._told
        if loop is not None and told is not None and not loop.is_closed():
            loop.call_soon_threadsafe(told.set)

    async def _run(self) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        try:
            database = await Database.open(self.url, readers=1)
        except AWAY as error:
            log.warning(
                "lead_renewal_failed",
                message="the term could not be renewed and is tried again",
                holder=self.name,
                error=repr(error),
            )
            return
        try:
            await self._renew(database, self._told)
        finally:
            await database.close()
            self._loop = None

    async def _renew(self, database: Database, told: asyncio.Event) -> None:
        """Renew until another leads, a deadline passes without a confirmed renewal, or the work is stuck."""
        while not self._over and (left := self.deadline - monotonic()) > 0:
            with suppress(TimeoutError):
                # If little time is left, half of it: a renewal is always tried before the term is given up.
                async with asyncio.timeout(min(self.terms.renew_seconds, left / 2)):
                    await told.wait()
            asked_at = monotonic()
            if self._over or self.deadline <= asked_at:
                break
            if asked_at - self.alive_at > self.terms.stuck_seconds:
                log.error(
                    "leader_stuck",
                    message="the leader is stuck and gives up its term",
                    holder=self.name,
                    fence=self.fence.number,
                )
                return
            answer = await _ask_before(database, self.name, self.terms.term_seconds, self.deadline)
            if isinstance(answer, _Unknown):
                await asyncio.sleep(min(self.terms.ask_seconds, max(0.0, self.deadline - monotonic())))
            elif answer is None or answer.number != self.fence.number:
                # An expired term that was taken again has a new fence: work under the old fence must end.
                log.warning("lead_lost", message="another controller leads", holder=self.name, fence=self.fence.number)
                return
            else:
                self.deadline = asked_at + self.terms.term_seconds
        if not self._over:
            log.warning(
                "lead_expired",
                message="the term could not be renewed in time",
                holder=self.name,
                fence=self.fence.number,
            )


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
        log.error("leader_failed", message="a loop of the leader failed", error=repr(error), exc_info=error)


async def _resign(database: Database, name: str) -> None:
    """Resign, best effort: a term that is not resigned expires by itself."""
    try:
        async with asyncio.timeout(RESIGN_SECONDS_MAX):
            await resign(database, name)
    except (*AWAY, *RACES) as error:
        log.info(
            "resign_failed",
            message="the term could not be resigned and expires by itself",
            holder=name,
            error=repr(error),
        )
