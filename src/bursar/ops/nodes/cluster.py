"""Cluster totals from the database: nodes by state, and their capacity, requests and usage.

Only changed nodes are read again; the allocated amounts are read each time. Calls within one second get the same
figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from bursar.core.nodes.node import EXCLUSIVE, NodeCapacity
from bursar.core.objects.charge import Amounts
from bursar.store.db.database import Connection, Database
from bursar.store.nodes import heartbeat as heartbeat_store
from bursar.store.nodes import node as node_store
from bursar.store.quota import cluster_ceiling as store
from bursar.store.quota.cluster_ceiling import Edition
from bursar.wire.kinds.node import capacity_in
from bursar.wire.shared.limits import amounts
from bursar.wire.shared.meta import Quantity
from bursar.wire.to_scheduler.ask import node_of

AGE_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class NodeFigures:
    ready: bool
    cordoned: bool
    capacity: Amounts
    used: Amounts | None  # measured by the node; None if it does not report it


@dataclass(slots=True)
class ClusterTotals:
    """The totals of each resource, over all nodes. `used` has only resources that are measured."""

    total: int = 0
    ready: int = 0
    not_ready: int = 0
    cordoned: int = 0  # of those that are ready
    capacity: dict[str, int] = field(default_factory=dict)
    allocatable: dict[str, int] = field(default_factory=dict)
    requested: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)


class ClusterCache:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._nodes: dict[str, NodeFigures] = {}
        self._edition = Edition()
        self._totals = ClusterTotals()
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()

    async def totals(self) -> ClusterTotals:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._read_at > AGE_SECONDS_MAX:
                async with self._database.reader() as db:
                    await self._read_nodes(db)
                    loads = {name: _amounts_in(used) for name, used in (await heartbeat_store.load_loads(db)).items()}
                    self._totals = totals_of(self._nodes, await node_store.load_all(db), loads)
                self._read_at = now
            return self._totals

    async def _read_nodes(self, db: Connection) -> None:
        edition = await store.load_edition(db)
        if edition == self._edition:
            return
        changed = await store.load_nodes(db, self._edition.revision)
        nodes = {**self._nodes, **{name: figures_of(doc, status) for name, doc, status in changed}}
        if len(nodes) != edition.nodes:
            # Nodes were removed or added meanwhile; only a full read shows which.
            nodes = {name: figures_of(doc, status) for name, doc, status in await store.load_nodes(db)}
        self._nodes, self._edition = nodes, edition


class _Measured(msgspec.Struct):
    used: dict[str, Quantity] | None = None


_decode_measured = msgspec.json.Decoder(_Measured).decode


def figures_of(doc: bytes, status: bytes) -> NodeFigures:
    view, used = node_of(doc, status), _decode_measured(status).used
    return NodeFigures(
        view.ready, view.unschedulable, capacity_in(doc, status), amounts(used) if used is not None else None
    )


def _amounts_in(used: bytes) -> Amounts:
    return amounts(msgspec.json.decode(used, type=dict[str, Quantity]))


def totals_of(
    nodes: Mapping[str, NodeFigures], capacities: Mapping[str, NodeCapacity], loads: Mapping[str, Amounts] | None = None
) -> ClusterTotals:
    """Sum up nodes, each in one state. Usage measured by the agent takes precedence over usage in the status."""
    totals = ClusterTotals(total=len(nodes))
    for name, one in nodes.items():
        totals.not_ready += not one.ready
        totals.cordoned += one.ready and one.cordoned
        totals.ready += one.ready and not one.cordoned
        _add(totals.capacity, one.capacity)
        _add(totals.used, (loads or {}).get(name, one.used or {}))
    for capacity in capacities.values():
        _add(totals.allocatable, capacity.allocatable)
        # An exclusive allocation counts as a request for the whole node.
        _add(totals.requested, capacity.allocatable if EXCLUSIVE in capacity.allocated else capacity.allocated)
    return totals


def _add(sums: dict[str, int], more: Amounts) -> None:
    for name, amount in more.items():
        sums[name] = sums.get(name, 0) + amount
