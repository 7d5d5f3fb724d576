"""The allocations of jobs in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/job")


class BoostedJob(msgspec.Struct, frozen=True):
    """A temporary priority of a job's allocations, until it expires."""

    priority: int
    expires: str


_encode = msgspec.json.Encoder().encode
_decode_map = msgspec.json.Decoder(dict[str, str]).decode
_decode_boost = msgspec.json.Decoder(BoostedJob).decode


class Found(NamedTuple):
    """An allocation, reduced to the fields that its job needs."""

    name: str
    fields: dict[str, str]
    doc: bytes
    status: bytes


async def load_members(db: Connection, namespace: str, names: Sequence[str], count_max: int) -> list[Found]:
    """Load at most `count_max` of the named allocations that exist."""
    rows = await db.fetch(SQL.members, namespace, names, count_max)
    return [Found(row["name"], _decode_map(row["fields"]), row["doc"], row["status"] or b"{}") for row in rows]


async def list_shown(
    db: Connection, namespace: str, names: Sequence[str], labels: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Load the selectable fields of the named allocations that match the labels, by name."""
    rows = await db.fetch(SQL.shown, namespace, names, _encode(labels))
    return {row["name"]: _decode_map(row["fields"]) for row in rows}


async def load_boosts(db: Connection, jobs: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], BoostedJob]:
    """Load the boosts of those of these jobs that have one, by (namespace, name, uid)."""
    if not jobs:
        return {}
    rows = await db.fetch(SQL.boosts, *([one[place] for one in jobs] for place in range(3)))
    return {(row["namespace"], row["name"], row["uid"]): _decode_boost(row["boost"]) for row in rows}
