"""Heartbeats of nodes: time and stream of the last one, ends of run-leases, running placements, and measured usage.

Each statement handles many nodes at once. Its cost depends on the placements of these nodes, not on the size of the
cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from msgspec import Struct

from bursar.core.credit.shortfall import Shortfall
from bursar.core.nodes.liveness import Liveness
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.objects.allocation import Peer
from bursar.core.objects.object import Key
from bursar.store.db.columns import documents, numbers, texts
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/heartbeat")

_decode_peers = msgspec.json.Decoder(tuple[Peer, ...]).decode
_decode_claim = msgspec.json.Decoder(NodeClaim).decode

LOAD_SECONDS_MAX = 300  # older measurements are outdated


class NodeSession(Struct, frozen=True):
    """One heartbeat. `generation` is that of the node's certificate; 0 if the listener is insecure and there is
    none."""

    node: str
    session: str
    generation: int
    lease_seconds: int
    address: str = ""
    agent: str = ""

    @property
    def stream(self) -> tuple[str, str]:
        return self.node, self.session


class ReportedPlacement(NamedTuple):
    """A placement that its node reported."""

    key: Key
    uid: str
    epoch: int
    gang: str
    phase: str
    lease: int = 0  # the credit lease that pays for it; 0: none
    frozen: bool = False  # recorded as frozen; False for a new placement
    short: Shortfall | None = None  # the recorded shortfall; None for a new placement


class WantedPlace(NamedTuple):
    """A placement on a node, and whether it should run or stop."""

    key: Key
    uid: str
    tenant: str
    epoch: int
    wanted: bool
    gang: str
    doc: bytes
    status: bytes
    lease: int = 0
    tenant_uid: str = ""


class WantedSet(NamedTuple):
    """All placements of a node at a revision."""

    revision: int
    places: tuple[WantedPlace, ...]
    claim: NodeClaim | None = None  # the claim of the node, if it is claimed


class UsageRow(NamedTuple):
    """Measured usage of a placement on a node since its start."""

    uid: str
    epoch: int
    node: str
    seconds: float
    cpu_seconds: float
    memory_bytes: int
    memory_bytes_max: int
    gpu_seconds: float


async def save_first(db: Connection, heartbeats: Sequence[NodeSession]) -> dict[str, tuple[str, int]]:
    """Save the first heartbeats of streams, one per node; each stream replaces its node's previous one.

    Returns the accepted nodes, each with its liveness (Ready, or the recorded one) and the time of the heartbeat by the
    database's clock, which the ledger counts by.
    """
    rows = await db.fetch(
        SQL.meet,
        *_heartbeats(heartbeats),
        texts([one.address for one in heartbeats]),
        texts([one.agent for one in heartbeats]),
    )
    return {row["node"]: (row["silent"] or Liveness.READY, row["began"]) for row in rows}


async def save_next(db: Connection, heartbeats: Sequence[NodeSession]) -> dict[tuple[str, str], str]:
    """Save later heartbeats; return the accepted ones by (node, session), each with the liveness of its node.

    Rows are locked in order of node names, as in every statement.
    """
    sessions = {one.node: one.session for one in heartbeats}
    if len(sessions) == len(heartbeats):
        rows = await db.fetch(SQL.heartbeat, *_heartbeats(sorted(heartbeats, key=lambda one: one.node)))
        return {(row["node"], sessions[row["node"]]): row["silent"] or Liveness.READY for row in rows}
    # Two streams claim one node: only one of them is current, and a single row could not show which.
    heard: dict[tuple[str, str], str] = {}
    rest = list(heartbeats)
    while rest:
        some = {one.node: one for one in reversed(rest)}
        heard |= await save_next(db, list(some.values()))
        rest = [one for one in rest if some[one.node] is not one]
    return heard


def _heartbeats(heartbeats: Sequence[NodeSession]) -> tuple[str, str, str, str]:
    return (
        texts([one.node for one in heartbeats]),
        texts([one.session for one in heartbeats]),
        numbers([one.generation for one in heartbeats]),
        numbers([one.lease_seconds for one in heartbeats]),
    )


async def load_claims(db: Connection, asked: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ReportedPlacement]:
    """Load those of the given (node, uid) pairs that are placed on that node."""
    rows = await db.fetch(SQL.claims, texts([node for node, _ in asked]), texts([uid for _, uid in asked]))
    return {
        (row["node"], row["uid"]): ReportedPlacement(
            Key("Allocation", row["namespace"], row["name"]),
            row["uid"],
            row["epoch"],
            row["gang"],
            row["phase"] or "",
            row["lease"] or 0,
        )
        for row in rows
    }


async def load_wanted(db: Connection, nodes: Iterable[str]) -> dict[str, WantedSet]:
    """Load the complete wanted set of each node."""
    revision = 0
    places: dict[str, list[WantedPlace]] = {}
    claims: dict[str, NodeClaim] = {}
    for row in await db.fetch(SQL.wanted, sorted(set(nodes))):
        revision = row["revision"]
        there = places.setdefault(row["node"], [])
        if row["claim"] is not None:
            claims[row["node"]] = _decode_claim(row["claim"])
        if row["uid"] is not None:
            there.append(
                WantedPlace(
                    Key("Allocation", row["namespace"], row["name"]), row["uid"], row["tenant"], row["epoch"],
                    row["wanted"], row["gang"], row["doc"], row["status"] or b"{}",
                    row["lease"] or 0, row["tenant_uid"] or "",
                )
            )  # fmt: skip
    return {node: WantedSet(revision, tuple(some), claims.get(node)) for node, some in places.items()}


class Needed(NamedTuple):
    """A placement, and the data that it needs before it can start."""

    key: Key
    epoch: int
    doc: bytes
    status: bytes
    peers: tuple[Peer, ...] = ()
    stdin: bytes | None = None  # None: not submitted yet


async def load_needed(db: Connection, node: str, uid: str) -> Needed | None:
    """Load the data that a placement on a node needs to start; None if it is not placed there."""
    row = await db.fetchrow(SQL.prepare, node, uid)
    if row is None:
        return None
    key = Key("Allocation", row["namespace"], row["name"])
    peers = _decode_peers(row["peers"]) if row["peers"] else ()
    return Needed(key, row["epoch"], row["doc"], row["status"] or b"{}", peers, row["stdin"])


async def load_addresses(db: Connection, nodes: Iterable[str]) -> dict[str, str]:
    """Load the addresses of nodes: the one an administrator set, else the one where the agent serves calls, else
    empty."""
    return {row["name"]: row["address"] for row in await db.fetch(SQL.addresses, sorted(set(nodes)))}


async def load_address(db: Connection, node: str) -> str:
    """Load the address at which a node's agent serves calls; empty if it gave none, or there is no such node."""
    return await db.fetchval(SQL.address, node) or ""


async def save_usage(db: Connection, rows: Iterable[UsageRow]) -> None:
    """Save the last measurement of each placement. Placements on other nodes are skipped."""
    last = list({(one.uid, one.epoch, one.node): one for one in rows}.values())
    await db.execute(
        SQL.save_usage,
        texts([one.uid for one in last]),
        numbers([one.epoch for one in last]),
        texts([one.node for one in last]),
        _reals([one.seconds for one in last]),
        _reals([one.cpu_seconds for one in last]),
        numbers([one.memory_bytes for one in last]),
        numbers([one.memory_bytes_max for one in last]),
        _reals([one.gpu_seconds for one in last]),
    )


async def save_loads(db: Connection, loads: Mapping[str, bytes]) -> None:
    """Save the measured usage of these nodes: JSON by resource."""
    nodes = sorted(loads)
    await db.execute(SQL.save_load, texts(nodes), documents([loads[node] for node in nodes]))


async def load_loads(db: Connection, nodes: Sequence[str] | None = None) -> dict[str, bytes]:
    """Load recent measurements of these nodes (None: of all)."""
    rows = await db.fetch(SQL.load, LOAD_SECONDS_MAX, None if nodes is None else list(nodes))
    return {row["node"]: row["used"] for row in rows}


async def forget_usage(db: Connection, before: datetime, limit: int = 10_000) -> int:
    """Drop up to `limit` measurements from before a time; return their number."""
    return affected(await db.execute(SQL.forget_usage, before, limit))


async def forget_gone(db: Connection) -> int:
    """Drop the heartbeats of deleted nodes; return their number."""
    return affected(await db.execute(SQL.forget_gone))


def _reals(values: Sequence[float]) -> str:
    return ",".join(map(repr, map(float, values)))


async def load_agents(db: Connection) -> int:
    """Count the nodes that have agents."""
    return int(await db.fetchval(SQL.agents))
