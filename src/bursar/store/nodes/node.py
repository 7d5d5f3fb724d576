"""Free resources of nodes, and placements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from bursar.core.nodes.node import NodeCapacity, NodeGate, Placement
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row
from bursar.store.db.columns import documents, lists, numbers, texts
from bursar.store.db.database import Connection, Stale
from bursar.store.db.sql_loader import statements
from bursar.store.quota import quota

SQL = statements("nodes/node")

_encode = msgspec.json.Encoder().encode
_decode_amounts = msgspec.json.Decoder(dict[str, int]).decode
_decode_labels = msgspec.json.Decoder(dict[str, str]).decode
_decode_claim = msgspec.json.Decoder(NodeClaim).decode
_decode_gate = msgspec.json.Decoder(NodeGate).decode
_decode_devices = msgspec.json.Decoder(dict[str, tuple[int, ...]]).decode


# Many nodes have the same taints.
@lru_cache(4096)
def _gate(raw: bytes) -> NodeGate:
    return _decode_gate(raw)


def _capacity(row: Any) -> NodeCapacity:
    return NodeCapacity(
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
    node, uid, namespace, name, tenant, epoch, exclusive, resources, devices, wanted, lease = row
    amounts, indices = _decode_amounts(resources), _decode_devices(devices)
    return Placement(node, uid, namespace, name, tenant, epoch, exclusive, amounts, indices, wanted, lease or 0)


async def lock(db: Connection, names: Iterable[str]) -> dict[str, NodeCapacity]:
    """Lock the existing nodes among these in order of name; return their free resources."""
    return {row["name"]: _capacity(row) for row in await db.fetch(SQL.lock, texts(sorted(names)))}


async def lock_after_counters(
    db: Connection, rows: Iterable[Row], names: Iterable[str]
) -> tuple[dict[Row, Counter], dict[str, NodeCapacity]]:
    """Lock the existing counters, then the existing nodes, each in key order; return counts and free resources."""
    found = await db.fetch(SQL.lock_after_counters, *quota.text_columns(rows), texts(sorted(names)))
    first = next((place for place, row in enumerate(found) if row["name"] is not None), len(found))
    return quota.counters_of(found[:first]), {row["name"]: _capacity(row) for row in found[first:]}


async def load(db: Connection, names: Iterable[str]) -> dict[str, NodeCapacity]:
    return {row["name"]: _capacity(row) for row in await db.fetch(SQL.read, sorted(names))}


async def load_all(db: Connection) -> dict[str, NodeCapacity]:
    return {row["name"]: _capacity(row) for row in await db.fetch(SQL.read_all)}


async def load_claimed(db: Connection) -> dict[str, NodeCapacity]:
    """Load the nodes that are claimed or not yet wiped."""
    return {row["name"]: _capacity(row) for row in await db.fetch(SQL.read_claimed)}


async def count_claimed(db: Connection) -> int:
    return int(await db.fetchval(SQL.count_claimed))


async def count(db: Connection) -> int:
    return int(await db.fetchval(SQL.count))


async def list_kept_for(db: Connection, tenant: str) -> list[str]:
    """List the nodes whose spec names a tenant, in order."""
    return [row["name"] for row in await db.fetch(SQL.kept_for, tenant)]


async def put(db: Connection, capacities: Sequence[NodeCapacity], uids: Mapping[str, str]) -> None:
    ordered = sorted(capacities, key=lambda capacity: capacity.name)
    await db.execute(
        SQL.put,
        [capacity.name for capacity in ordered],
        [uids.get(capacity.name, "") for capacity in ordered],
        [capacity.generation for capacity in ordered],
        [capacity.schedulable for capacity in ordered],
        [_encode(capacity.allocatable) for capacity in ordered],
        [_encode(capacity.allocated) for capacity in ordered],
        [_encode(capacity.devices) for capacity in ordered],
        [_encode(capacity.claim) if capacity.claim is not None else None for capacity in ordered],
        [_encode(capacity.gate) if capacity.gate is not None else None for capacity in ordered],
        [capacity.dirty for capacity in ordered],
    )


async def use(db: Connection, capacities: Sequence[NodeCapacity]) -> None:
    """Save the free resources of locked nodes whose other fields are unchanged."""
    tag = await db.execute(SQL.use, *capacity_columns(capacities))
    if tag != f"UPDATE {len(capacities)}":
        raise Stale(f"{len(capacities)} nodes to save, but: {tag}")


def capacity_columns(capacities: Sequence[NodeCapacity]) -> tuple[str, ...]:
    """The free resources of nodes, as columns."""
    return (
        texts([capacity.name for capacity in capacities]),
        documents([_encode(capacity.allocated) for capacity in capacities]),
        documents([_encode(capacity.devices) for capacity in capacities]),
        numbers([capacity.dirty for capacity in capacities]),
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
    """Placements as columns of the statement that saves a batch; `places` are the positions of their lines in the
    batch."""
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
    await db.execute(SQL.remove_placements, *lists(sorted(keys), 2))


async def save_seen(db: Connection, names: Sequence[str]) -> None:
    await db.execute(SQL.seen, list(names))


async def load_last_seen(db: Connection, names: Sequence[str]) -> dict[str, datetime]:
    return {row["node"]: row["at"] for row in await db.fetch(SQL.last_seen, list(names))}
