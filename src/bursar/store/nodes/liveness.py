"""Liveness of nodes: their last heartbeats, and their recorded conditions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from bursar.core.nodes.liveness import Liveness, SeenHeartbeat, Sighting
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/liveness")


class LivenessLook(NamedTuple):
    """The liveness of nodes at one moment: those that are silent or recorded as such, and how many have ever sent
    heartbeats."""

    now: datetime
    heard: int
    sightings: list[Sighting]
    settings: bytes  # the stored settings in force; empty if none are stored


async def load_look(db: Connection, silent_seconds: float) -> LivenessLook:
    """Load the nodes whose last heartbeat is older than `silent_seconds`, and those that have a recorded condition."""
    *rows, whole = sorted(await db.fetch(SQL.look, silent_seconds), key=lambda row: row["name"] or "\U0010ffff")
    assert whole["name"] is None
    return LivenessLook(whole["now"], whole["heard"], [_sighting(row) for row in rows], whole["settings"] or b"")


async def lock(db: Connection, nodes: Iterable[str]) -> dict[str, SeenHeartbeat]:
    """Block heartbeats of nodes until the transaction ends; return the last heartbeat of those that have any."""
    return {row["node"]: _heartbeat(row) for row in await db.fetch(SQL.lock, sorted(nodes))}


def _heartbeat(row: Any) -> SeenHeartbeat:
    return SeenHeartbeat(row["at"], row["now"], row["granted_until"])


def _sighting(row: Any) -> Sighting:
    return Sighting(
        row["name"],
        Liveness(row["silent"]) if row["silent"] else Liveness.READY,
        _heartbeat(row) if row["at"] is not None else None,
        datetime.fromisoformat(row["since"]) if row["since"] else None,
    )


async def count_phases(db: Connection) -> dict[str, int]:
    """Count nodes by phase."""
    return {row["phase"]: row["nodes"] for row in await db.fetch(SQL.phases)}


async def count_silent(db: Connection, silent_seconds: float) -> tuple[int, int]:
    """Count the nodes that have sent heartbeats and are not lost; return (all of them, the silent ones)."""
    row = await db.fetchrow(SQL.silent, silent_seconds)
    return row["heard"], row["silent"]
