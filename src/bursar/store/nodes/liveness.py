"""Liveness of nodes: their last heartbeats, and the conditions recorded for them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from bursar.core.nodes.liveness import Liveness, SeenHeartbeat, Sighting
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/liveness")


class LivenessLook(NamedTuple):
    """All nodes at one moment: those that are silent or were said to be, and how many were ever heard."""

    now: datetime
    heard: int
    sightings: list[Sighting]
    settings: bytes  # the stored settings that were in force; empty where there are none


async def load_look(db: Connection, silent_seconds: float) -> LivenessLook:
    """The nodes that were not heard for so long, and all of which something was said."""
    *rows, whole = sorted(await db.fetch(SQL.look, silent_seconds), key=lambda row: row["name"] or "\U0010ffff")
    assert whole["name"] is None
    return LivenessLook(whole["now"], whole["heard"], [_sighting(row) for row in rows], whole["settings"] or b"")


async def lock(db: Connection, nodes: Iterable[str]) -> dict[str, SeenHeartbeat]:
    """Keep nodes from being heard until the transaction ends; when they last were, of those that ever were."""
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
    """How many nodes there are in each phase."""
    return {row["phase"]: row["nodes"] for row in await db.fetch(SQL.phases)}


async def count_silent(db: Connection, silent_seconds: float) -> tuple[int, int]:
    """(nodes that were ever heard and are not lost, those of them that are silent)."""
    row = await db.fetchrow(SQL.silent, silent_seconds)
    return row["heard"], row["silent"]
