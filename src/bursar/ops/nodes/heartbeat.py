"""Beats of nodes' agents: hundreds in one statement, answered once they are committed.

What a beat grants is written before it is told: `granted_until` never lies before the end of a lease that some agent
believes to have. A beat changes no object and never enters the feed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from bursar.store.db.database import LOSSES, Connection, Database, Unavailable
from bursar.store.nodes import heartbeat as store
from bursar.store.nodes.heartbeat import ReportedPlacement, SeenBeat, UsageRow, WantedSet

C = TypeVar("C")
A = TypeVar("A")

HEARTBEATS_MAX = 512
# Of how many nodes the whole wanted set is read at once: all of it is in memory until it is sent.
RECALLS_MAX = 32


class Heartbeat(Struct, frozen=True):
    """One beat: who speaks, on which stream, whether it is the stream's first, what is asked and what was measured."""

    seen: SeenBeat
    first: bool = False
    asked: tuple[str, ...] = ()  # uids of which the node says something
    usages: tuple[UsageRow, ...] = ()
    load: bytes = b""  # what is in use on the node, where that is to be written down


class HeartbeatHeard(Struct, frozen=True):
    """A beat that counts: as what the node stood until now, and what of the asked is placed on it, by uid."""

    standing: str
    claims: Mapping[str, ReportedPlacement]
    began: int = 0  # of a stream's first beat: when that was, in microseconds of the database's clock


class KeptConnection(Generic[C, A]):
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


async def hear(db: Connection, heartbeats: Sequence[Heartbeat]) -> list[HeartbeatHeard | None]:
    """Write down that these nodes were heard, and answer each; None where a beat does not count: its node is gone, its
    certificate was revoked, or a younger stream is the node's."""
    met = await _meet(db, heartbeats)
    standings = {stream: standing for stream, (standing, _) in met.items()}
    if later := [one.seen for one in heartbeats if not one.first]:
        standings |= await store.save_next(db, later)
    heard = [one for one in heartbeats if one.seen.stream in standings]
    if usages := [row for one in heard for row in one.usages]:
        await store.save_usage(db, usages)
    if loads := {one.seen.node: one.load for one in heard if one.load}:
        await store.save_loads(db, loads)
    asked = [(one.seen.node, uid) for one in heard for uid in one.asked]
    claims = await store.load_claims(db, asked) if asked else {}
    return [
        HeartbeatHeard(standings[one.seen.stream], _of_node(claims, one), met[one.seen.stream][1] if one.first else 0)
        if one.seen.stream in standings
        else None
        for one in heartbeats
    ]


async def _meet(db: Connection, heartbeats: Sequence[Heartbeat]) -> dict[tuple[str, str], tuple[str, int]]:
    """Of several streams that a node begins at once, the last is its own."""
    last = {one.seen.node: one.seen for one in heartbeats if one.first}
    if not last:
        return {}
    met = await store.save_first(db, list(last.values()))
    return {(node, last[node].session): one for node, one in met.items()}


def _of_node(claims: Mapping[tuple[str, str], ReportedPlacement], one: Heartbeat) -> dict[str, ReportedPlacement]:
    return {uid: claims[one.seen.node, uid] for uid in one.asked if (one.seen.node, uid) in claims}


async def recall(db: Connection, nodes: Sequence[str]) -> list[WantedSet]:
    """The whole wanted set of each node."""
    found = await store.load_wanted(db, nodes)
    return [found[node] for node in nodes]
