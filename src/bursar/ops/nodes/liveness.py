"""Verbs on the readiness of nodes, and on the work of lost nodes.

The caller decides from a snapshot of all nodes that may be slightly stale; the commands decide again under locks
(`commands/nodes/liveness.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from bursar.commands.command import Reply, Written
from bursar.commands.nodes.liveness import LIVE, EndLost, MarkLost, SetReadiness, Unmark, is_marked, on_lost_of
from bursar.commands.nodes.node_conditions import is_silent, standing_of
from bursar.commands.workloads.allocation import phase_of
from bursar.core.nodes.liveness import Liveness, Patience, SeenHeartbeat, Sighting, gone_at, seconds_to_wait
from bursar.core.nodes.node import Placement
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Refusal
from bursar.ops.objects.object import get
from bursar.ops.runtime.lane import feed
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.wire.kinds.node import node_key

CONTROLLER = "system:nodes"
NODES_AT_ONCE = 100  # nodes whose work is read in one statement


async def set_readiness(
    runtime: Runtime, transitions: Sequence[tuple[str, Liveness]], patience: Patience, why: str = ""
) -> list[Reply]:
    """Set the readiness of nodes. A change that no longer applies is refused, and changes nothing."""
    silence = {Liveness.NOT_READY: patience.not_ready_seconds, Liveness.LOST: patience.lost_seconds}
    commands = [
        SetReadiness(
            key=node_key(name),
            origin=Origin(CONTROLLER, "mark", f"{standing}" + (f": {why}" if why else "")),
            standing=standing,
            after_seconds=silence[standing],
            why=why,
        )
        for name, standing in transitions
    ]
    return await feed(runtime.changing, commands)


async def node_alive(runtime: Runtime, names: Sequence[str]) -> list[str]:
    """Make nodes Ready that were silent and send heartbeats again; return their names.

    The marks on their work are removed first: if this is interrupted, the nodes are still marked silent, and the next
    call does the rest.
    """
    found = await asyncio.gather(*(get(runtime, node_key(name)) for name in dict.fromkeys(names)))
    silent = [one for one in found if isinstance(one, Stored) and is_silent(one)]
    await _unmark(runtime, [one.key.name for one in silent if standing_of(one).gone])
    commands = [
        SetReadiness(key=one.key, origin=Origin(CONTROLLER, "mark", "Ready"), standing=Liveness.READY) for one in silent
    ]
    replies = await feed(runtime.changing, commands)
    return [one.key.name for one, reply in zip(silent, replies, strict=True) if isinstance(reply, Written)]


async def _unmark(runtime: Runtime, names: Sequence[str]) -> None:
    for start in range(0, len(names), NODES_AT_ONCE):
        work = await _work_on(runtime, names[start : start + NODES_AT_ONCE])
        origin = Origin(CONTROLLER, "mark", "the node sends heartbeats again")
        marked = {one.key for _, one in work if is_marked(one)}
        await feed(runtime.binding, [Unmark(key=key, origin=origin) for key in sorted(marked)])


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome for the work of lost nodes; `next_at` is the time of the next possible step, by node."""

    ended: tuple[Written, ...] = ()
    next_at: Mapping[str, datetime | None] = field(default_factory=dict)
    unsettled: frozenset[str] = frozenset()  # nodes with work for which a command was refused, as by a full lane


async def settle(
    runtime: Runtime,
    nodes: Sequence[Sighting],
    patience: Patience,
    *,
    calm_seconds: float = math.inf,
    watched_seconds: float = math.inf,
    origin: Origin | None = None,
) -> Settled:
    """End the work of lost nodes that cannot be running any more, and mark the rest."""
    ended: list[Written] = []
    unsettled: set[str] = set()
    next_at: dict[str, datetime | None] = {}
    for start in range(0, len(nodes), NODES_AT_ONCE):
        some = {one.node: one for one in nodes[start : start + NODES_AT_ONCE]}
        work = await _work_on(runtime, list(some))
        ends: list[EndLost] = []
        fingerprints: list[MarkLost] = []
        next_at |= dict.fromkeys(some)
        for part, one in work:
            node, on_lost = some[part.node], on_lost_of(one.doc)
            left = seconds_to_wait(
                node.standing,
                on_lost,
                node.heartbeat,
                patience,
                calm_seconds=calm_seconds,
                watched_seconds=watched_seconds,
            )
            if left <= 0:
                ends.append(_end(part, one, node, patience, origin))
                continue
            if left < math.inf and node.heartbeat is not None:
                at, known = node.heartbeat.now + timedelta(seconds=left), next_at[part.node]
                next_at[part.node] = at if known is None else min(at, known)
            if not is_marked(one) and phase_of(one) in LIVE:
                fingerprints.append(_mark(part, one, node, gone_at(on_lost, node.heartbeat, patience)))
        commands: list[EndLost | MarkLost] = [*ends, *fingerprints]
        replies = await feed(runtime.binding, commands)
        ended += [reply for reply in replies[: len(ends)] if isinstance(reply, Written)]
        unsettled |= {one.node for one, reply in zip(commands, replies, strict=True) if isinstance(reply, Refusal)}
    return Settled(tuple(ended), next_at, frozenset(unsettled))


async def _work_on(runtime: Runtime, names: Sequence[str]) -> list[tuple[Placement, Stored]]:
    """The placements on these nodes, each with its allocation."""
    async with runtime.database.reader() as db:
        parts = await node_store.load_placements_on(db, names)
        objects = await object_store.load(db, {one.key for one in parts})
    found = ((one, objects.get(one.key)) for one in parts)
    return [(part, one) for part, one in found if one is not None and one.uid == part.uid]


def _end(part: Placement, one: Stored, node: Sighting, patience: Patience, origin: Origin | None) -> EndLost:
    said = origin or Origin(CONTROLLER, "end", f"node {part.node} is lost")
    why = "was fenced" if node.standing is Liveness.FENCED else f"is lost: {_last_heard(node.heartbeat)}"
    return EndLost(
        key=one.key, origin=said, uid=one.uid, gang=one.gang, node=part.node, epoch=part.epoch, patience=patience,
        message=f"Node {part.node} {why}",
    )  # fmt: skip


def _mark(part: Placement, one: Stored, node: Sighting, at: datetime | None) -> MarkLost:
    then = (
        f"it is pending again after {timestamp(at)}, unless the node returns"
        if at is not None
        else f"it stays bound until the node returns or is fenced: bursar node fence {part.node}"
    )
    return MarkLost(
        key=one.key, origin=Origin(CONTROLLER, "mark", f"node {part.node} is lost"), uid=one.uid, node=part.node,
        epoch=part.epoch, message=f"Node {part.node} is lost: {_last_heard(node.heartbeat)}; {then}",
    )  # fmt: skip


def _last_heard(heartbeat: SeenHeartbeat | None) -> str:
    return f"last heartbeat at {timestamp(heartbeat.at)}" if heartbeat is not None else "it never sent a heartbeat"
