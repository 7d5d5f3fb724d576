"""Beats of nodes' agents: hundreds in one statement, answered once they are committed.

What a beat grants is written before it is told: `granted_until` never lies before the end of a lease that some agent
believes to have. A beat changes no object and never enters the feed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from bursar.store import beat as store
from bursar.store.beat import Claim, SeenBeat, UsageRow, WantedSet
from bursar.store.database import LOSSES, Connection, Database, Unavailable

C = TypeVar("C")
A = TypeVar("A")

BEATS_MAX = 512
# Of how many nodes the whole wanted set is read at once: all of it is in memory until it is sent.
RECALLS_MAX = 32


class Beat(Struct, frozen=True):
    """One beat: who speaks, on which stream, whether it is the stream's first, what is asked and what was measured."""

    seen: SeenBeat
    first: bool = False
    asked: tuple[str, ...] = ()  # uids of which the node says something
    usages: tuple[UsageRow, ...] = ()


class Heard(Struct, frozen=True):
    """A beat that counts: as what the node stood until now, and what of the asked is placed on it, by uid."""

    standing: str
    claims: Mapping[str, Claim]


class Kept(Generic[C, A]):
    """What a lane runs on a connection of its own, which is made anew when it was lost. Statements stand alone."""

    def __init__(self, database: Database, answer: Callable[[Connection, Sequence[C]], Awaitable[Sequence[A]]]) -> None:
        self._database = database
        self._answer = answer
        self._db: Connection | None = None

    async def __call__(self, commands: Sequence[C]) -> Sequence[A]:
        if self._db is None or self._db.is_closed():
            self._db = await self._database.connect()
        try:
            return await self._answer(self._db, commands)
        except LOSSES as error:
            db, self._db = self._db, None
            db.terminate()
            raise Unavailable(f"the database is away: {error}") from error

    async def close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            db.terminate()


async def hear(db: Connection, beats: Sequence[Beat]) -> list[Heard | None]:
    """Write down that these nodes were heard, and answer each; None where a beat does not count: its node is gone, its
    certificate was revoked, or a younger stream is the node's."""
    standings = await _meet(db, beats)
    if later := [one.seen for one in beats if not one.first]:
        standings |= await store.save_next(db, later)
    heard = [one for one in beats if one.seen.stream in standings]
    if usages := [row for one in heard for row in one.usages]:
        await store.save_usage(db, usages)
    asked = [(one.seen.node, uid) for one in heard for uid in one.asked]
    claims = await store.load_claims(db, asked) if asked else {}
    return [
        Heard(standings[one.seen.stream], _of_node(claims, one)) if one.seen.stream in standings else None
        for one in beats
    ]


async def _meet(db: Connection, beats: Sequence[Beat]) -> dict[tuple[str, str], str]:
    """Of several streams that a node begins at once, the last is its own."""
    last = {one.seen.node: one.seen for one in beats if one.first}
    if not last:
        return {}
    standings = await store.save_first(db, list(last.values()))
    return {(node, last[node].session): standing for node, standing in standings.items()}


def _of_node(claims: Mapping[tuple[str, str], Claim], one: Beat) -> dict[str, Claim]:
    return {uid: claims[one.seen.node, uid] for uid in one.asked if (one.seen.node, uid) in claims}


async def recall(db: Connection, nodes: Sequence[str]) -> list[WantedSet]:
    """The whole wanted set of each node."""
    found = await store.load_wanted(db, nodes)
    return [found[node] for node in nodes]
