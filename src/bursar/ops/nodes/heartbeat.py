"""Heartbeats of node agents: hundreds in one statement, answered after the commit.

A grant is committed before the agent gets it, so `granted_until` is never before the end of a lease that an agent
holds. A heartbeat changes no object and never enters the feed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from bursar.store.db.database import LOSSES, Connection, Database, Unavailable
from bursar.store.nodes import heartbeat as store
from bursar.store.nodes.heartbeat import NodeSession, ReportedPlacement, UsageRow, WantedSet

C = TypeVar("C")
A = TypeVar("A")

HEARTBEATS_MAX = 512
# Nodes whose whole wanted set is read at once: it is in memory until it is sent.
RECALLS_MAX = 32


class Heartbeat(Struct, frozen=True):
    """One heartbeat: the node, its stream, whether it is the stream's first, the placements asked for, the load."""

    seen: NodeSession
    first: bool = False
    asked: tuple[str, ...] = ()  # uids that the node reports on
    usages: tuple[UsageRow, ...] = ()
    load: bytes = b""  # the node's measured usage, if it is to be stored


class HeartbeatHeard(Struct, frozen=True):
    """The answer to a heartbeat that counts: the node's liveness until now, and the placements asked for, by uid."""

    standing: str
    claims: Mapping[str, ReportedPlacement]
    began: int = 0  # the time of a stream's first heartbeat, in microseconds of the database's clock


class KeptConnection(Generic[C, A]):
    """A lane's batch function with a connection of its own, which is opened again after a loss. It needs no
    transaction."""

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
    """Store the heartbeats of these nodes, and answer each. None: the heartbeat does not count, because its node was
    deleted, its certificate was revoked, or the node has a newer stream."""
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
    """Register new streams. Of several streams that a node starts at once, the last one counts."""
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
