"""Leading: a candidate stands for election, works while it leads, and stops when it may not be leading any more.

Its own deadline is counted on the monotonic clock from before the renewal was sent, so it ends no later than the term
in the database. Even a leader that missed that, because it was paused, commits nothing: every bind checks its fence.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from bursar.ops.leader import Fence, resign, stand
from bursar.store.database import AWAY, RACES, Database

log = structlog.get_logger()

RESIGN_SECONDS_MAX = 2.0

Work = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Terms:
    term_seconds: float = 5.0
    renew_seconds: float = 1.5
    ask_seconds: float = 0.5  # how often a candidate looks whether the leader is gone


DEFAULT_TERMS = Terms()


async def run_lead(database: Database, holder: str, on_elected: Work, terms: Terms = DEFAULT_TERMS) -> None:
    """For ever: lead whenever nobody else does. `on_elected` is run with the fence, and cancelled when the lead is
    lost; should it end by itself, the lead is given up. Cancelled, this resigns: another takes over at once."""
    # Its own connection, so that a renewal waits for no other reader; its own name, should an earlier life of the same
    # process still be remembered as the leader.
    own = await Database.open(database.url, readers=1)
    name = f"{holder}/{secrets.token_hex(4)}"
    try:
        while True:
            asked_at = asyncio.get_running_loop().time()
            fence = await _ask(own, name, terms.term_seconds)
            if isinstance(fence, Fence):
                await _lead(own, name, fence, asked_at + terms.term_seconds, on_elected, terms)
            await asyncio.sleep(terms.ask_seconds)
    finally:
        await own.close()


class _Unknown:
    """The database did not say whether we lead."""


async def _ask(database: Database, name: str, seconds: float) -> Fence | _Unknown | None:
    try:
        async with asyncio.timeout(seconds):
            return await stand(database, name, seconds)
    except (*AWAY, *RACES) as error:
        log.info("no answer about the lead", holder=name, error=repr(error))
        return _Unknown()


async def _lead(database: Database, name: str, fence: Fence, deadline: float, on_elected: Work, terms: Terms) -> None:
    log.info("leading", holder=name, fence=fence.number)
    work = asyncio.ensure_future(on_elected(fence.number))
    try:
        await _renew_while(work, database, name, fence, deadline, terms)
    finally:
        await _stop(work)
        await _resign(database, name)
        log.info("leading no more", holder=name, fence=fence.number)


async def _renew_while(
    work: asyncio.Future[None], database: Database, name: str, fence: Fence, deadline: float, terms: Terms
) -> None:
    """Returns when the work has ended, when another leads, or when no renewal was confirmed before the deadline."""
    loop = asyncio.get_running_loop()
    while (left := deadline - loop.time()) > 0:
        await asyncio.wait({work}, timeout=min(terms.renew_seconds, left))
        if work.done():
            return
        asked_at = loop.time()
        if deadline <= asked_at:
            return
        answer = await _ask_before(database, name, terms.term_seconds, deadline)
        if isinstance(answer, _Unknown):
            await asyncio.sleep(min(terms.ask_seconds, max(0.0, deadline - loop.time())))
            continue
        if answer is None or answer.number != fence.number:
            # A term that ran out and was taken anew has another fence: what was begun under the old one must end.
            log.warning("the lead was lost", holder=name, fence=fence.number)
            return
        deadline = asked_at + terms.term_seconds
    log.warning("the lead could not be renewed in time", holder=name, fence=fence.number)


async def _ask_before(database: Database, name: str, seconds: float, deadline: float) -> Fence | _Unknown | None:
    try:
        async with asyncio.timeout_at(deadline):
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
