"""Nodes' room and placements in the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from bursar.core.nodes.node import Gate, NodeRoom, Placement
from bursar.core.nodes.node_claim import Claim
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row
from bursar.store.db.columns import documents, numbers, texts
from bursar.store.db.database import Connection, Stale
from bursar.store.db.sql_loader import statements
from bursar.store.quota import quota

SQL = statements("nodes/node")

_encode = msgspec.json.Encoder().encode
_decode_amounts = msgspec.json.Decoder(dict[str, int]).decode
_decode_labels = msgspec.json.Decoder(dict[str, str]).decode
_decode_claim = msgspec.json.Decoder(Claim).decode
_decode_gate = msgspec.json.Decoder(Gate).decode
_decode_devices = msgspec.json.Decoder(dict[str, tuple[int, ...]]).decode


# Many nodes have the same taints.
@lru_cache(4096)
def _gate(raw: bytes) -> Gate:
    return _decode_gate(raw)


def _room(row: Any) -> NodeRoom:
    return NodeRoom(
        row["name"],
        row["generation"],
        row["schedulable"],
        _decode_amounts(row["allocatable"]),
        _decode_amounts(row["allocated"]),
        _decode_devices(row["devices"]),
        row["uid"],
        _decode_claim(row["claim"]) if row["claim"] is not None else None,
        _gate(row["gate"]) if row["gate"] is not None else None,
        row["soiled"],
    )


def _placement(row: Any) -> Placement:
    return Placement(
        row["node"],
        row["uid"],
        row["namespace"],
        row["name"],
        row["tenant"],
        row["epoch"],
        row["exclusive"],
        _decode_amounts(row["resources"]),
        _decode_devices(row["devices"]),
        row["wanted"],
        row["lease"] or 0,
    )


async def lock(db: Connection, names: Iterable[str]) -> dict[str, NodeRoom]:
    """Lock the nodes that exist, in order; their room."""
    return {row["name"]: _room(row) for row in await db.fetch(SQL.lock, texts(sorted(names)))}


async def lock_after_counters(
    db: Connection, rows: Iterable[Row], names: Iterable[str]
) -> tuple[dict[Row, Counter], dict[str, NodeRoom]]:
    """Lock the counters that exist, then the nodes, each in order; what they count, and the nodes' room."""
    found = await db.fetch(SQL.lock_after_counters, *quota.text_columns(rows), texts(sorted(names)))
    first = next((place for place, row in enumerate(found) if row["name"] is not None), len(found))
    return quota.counters_of(found[:first]), {row["name"]: _room(row) for row in found[first:]}


async def load(db: Connection, names: Iterable[str]) -> dict[str, NodeRoom]:
    return {row["name"]: _room(row) for row in await db.fetch(SQL.read, sorted(names))}


async def load_all(db: Connection) -> dict[str, NodeRoom]:
    return {row["name"]: _room(row) for row in await db.fetch(SQL.read_all)}


async def load_claimed(db: Connection) -> dict[str, NodeRoom]:
    """The nodes that are claimed, and those that are not wiped yet."""
    return {row["name"]: _room(row) for row in await db.fetch(SQL.read_claimed)}


async def count_claimed(db: Connection) -> int:
    count: int = await db.fetchval(SQL.count_claimed)
    return count


async def count(db: Connection) -> int:
    number: int = await db.fetchval(SQL.count)
    return number


async def list_names(db: Connection) -> list[str]:
    return [row["name"] for row in await db.fetch(SQL.names)]


async def list_kept_for(db: Connection, tenant: str) -> list[str]:
    """The nodes whose spec names a tenant, in order."""
    return [row["name"] for row in await db.fetch(SQL.kept_for, tenant)]


async def put(db: Connection, rooms: Sequence[NodeRoom], uids: Mapping[str, str]) -> None:
    ordered = sorted(rooms, key=lambda room: room.name)
    await db.execute(
        SQL.put,
        [room.name for room in ordered],
        [uids.get(room.name, "") for room in ordered],
        [room.generation for room in ordered],
        [room.schedulable for room in ordered],
        [_encode(room.allocatable) for room in ordered],
        [_encode(room.allocated) for room in ordered],
        [_encode(room.devices) for room in ordered],
        [_encode(room.claim) if room.claim is not None else None for room in ordered],
        [_encode(room.gate) if room.gate is not None else None for room in ordered],
        [room.soiled for room in ordered],
    )


async def use(db: Connection, rooms: Sequence[NodeRoom]) -> None:
    """Save the room of nodes that are locked and otherwise as they were."""
    tag = await db.execute(SQL.use, *room_columns(rooms))
    if tag != f"UPDATE {len(rooms)}":
        raise Stale(f"{len(rooms)} nodes to save, but: {tag}")


def room_columns(rooms: Sequence[NodeRoom]) -> tuple[str, ...]:
    """What is left of nodes' room, as columns."""
    return (
        texts([room.name for room in rooms]),
        documents([_encode(room.allocated) for room in rooms]),
        documents([_encode(room.devices) for room in rooms]),
        numbers([room.soiled for room in rooms]),
    )


async def remove(db: Connection, names: Sequence[str]) -> None:
    await db.execute(SQL.remove, list(names))


async def load_labels(db: Connection, names: Iterable[str]) -> dict[str, dict[str, str]]:
    return {row["name"]: _decode_labels(row["labels"]) for row in await db.fetch(SQL.labels, texts(sorted(names)))}


async def load_placements_of(db: Connection, uids: Iterable[str]) -> list[Placement]:
    return [_placement(row) for row in await db.fetch(SQL.placements_of, sorted(uids))]


async def load_placements_on(db: Connection, names: Iterable[str]) -> list[Placement]:
    return [_placement(row) for row in await db.fetch(SQL.placements_on, sorted(names))]


def placement_columns(placements: Sequence[Placement], places: Sequence[int]) -> tuple[str, ...]:
    """Placements as columns of the statement that saves a batch; `places` are those of their lines in it."""
    return (
        texts([one.node for one in placements]),
        texts([one.uid for one in placements]),
        texts([one.namespace for one in placements]),
        texts([one.name for one in placements]),
        texts([one.tenant for one in placements]),
        numbers([one.epoch for one in placements]),
        numbers([one.exclusive for one in placements]),
        documents([_encode(one.resources) for one in placements]),
        documents([_encode(one.devices) for one in placements]),
        numbers([one.wanted for one in placements]),
        numbers(places),
        numbers([one.lease for one in placements]),
    )


async def remove_placements(db: Connection, keys: Iterable[tuple[str, str]]) -> None:
    """Remove placements by (node, uid)."""
    ordered = sorted(keys)
    await db.execute(SQL.remove_placements, [key[0] for key in ordered], [key[1] for key in ordered])


async def save_seen(db: Connection, names: Sequence[str]) -> None:
    await db.execute(SQL.seen, list(names))


async def load_last_seen(db: Connection, names: Sequence[str]) -> dict[str, datetime]:
    return {row["node"]: row["at"] for row in await db.fetch(SQL.last_seen, list(names))}
