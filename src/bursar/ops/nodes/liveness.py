"""Saying whether nodes are alive, and ending the work of those that are gone.

What is decided here was judged from a look at all nodes that may be old by a moment. Everything is judged again under
locks, that of the node's last beat among them: a node that is heard meanwhile is not given up, and one whose work was
given up learns of it before it starts anything. So any number of controllers may do this at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.nodes.liveness import (
    Liveness,
    OnLost,
    Patience,
    SeenHeartbeat,
    Sighting,
    gone_at,
    requeues,
    seconds_to_wait,
)
from bursar.core.nodes.node import Placement
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.nodes.node_conditions import heard, is_silent, sighting_of, silenced, standing_of
from bursar.ops.objects.object import get, not_found
from bursar.ops.runtime.clock import new_uid, timestamp
from bursar.ops.runtime.command import Command, Reply, Result, Written
from bursar.ops.runtime.lane_plan import feed
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import (
    PLACED,
    phase_of,
    set_condition,
    status_of,
    take_lost,
    unchanged,
    with_status,
)
from bursar.ops.workloads.report import Report
from bursar.ops.workloads.stop import members_of, stop_members, told_to_stop
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.wire.shared.document import is_ending

CONTROLLER = "system:nodes"
NODES_AT_ONCE = 100  # whose work is read in one statement
DEFAULT = Patience()
LIVE = PLACED | {Phase.TERMINATING}

_MARK = f'"{EvictionReason.NODE_LOST}"'.encode()


def node_key(name: str) -> Key:
    return Key("Node", "", name)


# Commands on nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReadiness(Command):
    """Say that a node is Ready, NotReady or Lost, if it is. Phase, conditions and what it may be given change at once;
    a cordoned node stays without new work."""

    standing: Liveness
    after_seconds: float = 0.0  # of silence
    why: str = ""
    unfence: bool = False  # an administrator takes a fence back: it need not have been heard

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def heartbeats(self) -> Iterable[str]:
        return (self.key.name,)

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or self.key.name not in batch.nodes:
            return not_found(self.key)
        now = sighting_of(before, batch.heartbeats.get(self.key.name))
        if self.standing is Liveness.READY:
            return self._welcome(batch, before, now)
        if now.heartbeat is None or now.heard_since or now.silent_seconds < self.after_seconds:
            return Refusal(Code.STALE, f"node {self.key.name} was heard")
        if now.standing.gone or now.standing is self.standing:
            return unchanged(before)
        at = timestamp(now.heartbeat.at)
        message = f"No heartbeat since {at}" + (f"; {self.why}" if self.why else "")
        return batch.put(silenced(batch, before, self.standing, now.heartbeat.at, message), self.origin)

    def _welcome(self, batch: UnitOfWork, before: Stored, now: Sighting) -> Result:
        if self.unfence and now.standing is not Liveness.FENCED:
            return not_fenced(self.key)
        if not is_silent(before):
            return unchanged(before)
        if not now.heard_since and not self.unfence:
            return Refusal(Code.STALE, f"node {self.key.name} was not heard")
        return batch.put(heard(batch, before), self.origin)


def not_fenced(key: Key) -> Refusal:
    return Refusal(Code.CONFLICT, f"node {key.name} is not fenced", "There is nothing to take back.")


# Commands on what is placed on nodes that are gone.


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLost(Command):
    """Say that the node of an allocation is lost, and what will become of it. It stays as it is."""

    uid: str
    node: str
    epoch: int
    message: str

    def objects(self) -> Iterable[Key]:
        return (self.key, node_key(self.node))

    def heartbeats(self) -> Iterable[str]:
        return (self.node,)

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.uid != self.uid or _part(batch, before, self.node, self.epoch) is None:
            return Refusal(Code.STALE, f"{self.key.name} is no longer on node {self.node}")
        if refusal := _alive(batch, self.node):
            return refusal
        if is_marked(before) or phase_of(before) not in LIVE:
            return unchanged(before)
        status = status_of(before)
        if not status.get("reason"):
            status |= {"reason": EvictionReason.NODE_LOST, "message": self.message}
        set_condition(
            status, EvictionReason.NODE_LOST, "True", EvictionReason.NODE_LOST, self.message, timestamp(batch.now)
        )
        return batch.put(with_status(before, status), self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmark(Command):
    """The node of an allocation is heard again: that it was lost is no longer said."""

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        status = status_of(before)
        return batch.put(with_status(before, status), self.origin) if take_lost(status) else unchanged(before)


def _new_id() -> str:
    return new_uid("lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLost(Report):
    """What ran on a node that is gone has ended there: it waits again or fails, as it wished.

    One part takes the others with it: those of the same allocation on other nodes, and those of its gang, are told to
    stop; the whole waits again or fails when the last of them is confirmed gone. `confirmed` is the node's own word
    that nothing of it runs there: because no lease was granted in time, or because it was restarted itself. With
    `only_leased`, what did not ask to wait again has failed, as the node says.
    """

    phase: Phase = Phase.FAILED
    reason: str = EvictionReason.NODE_LOST
    patience: Patience = DEFAULT
    confirmed: bool = False
    only_leased: bool = False
    id: str = field(default_factory=_new_id)

    def objects(self) -> Iterable[Key]:
        return (self.key, node_key(self.node))

    def heartbeats(self) -> Iterable[str]:
        return () if self.confirmed else (self.node,)

    def placed(self, batch: UnitOfWork) -> Iterable[Key]:
        return (self.key, *members_of(batch, self.gangs()))

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.uid != self.uid or before.gang != self.gang:
            return Refusal(Code.STALE, f"{self.key.name} was deleted and created anew")
        if is_ending(before.doc) and self.phase is not Phase.CANCELLED:
            return replace(self, phase=Phase.CANCELLED).decide(batch)
        if _part(batch, before, self.node, self.epoch) is None:
            return Refusal(Code.STALE, f"{self.key.name} is no longer on node {self.node}")
        on_lost = on_lost_of(before.doc)
        if self.only_leased and not on_lost.leased:
            return Report.decide(self, batch)
        if not self.confirmed and (refusal := self._may_run(batch, on_lost)):
            return refusal
        return self._give_up(batch, before, requeue=requeues(on_lost))

    def _may_run(self, batch: UnitOfWork, on_lost: OnLost) -> Refusal | None:
        """Why it cannot be given up yet, judged anew: the node may have been heard since."""
        if refusal := _alive(batch, self.node):
            return refusal
        standing, heartbeat = standing_of(batch.objects[node_key(self.node)]), batch.heartbeats.get(self.node)
        if seconds_to_wait(standing, on_lost, heartbeat, self.patience) > 0:
            return Refusal(Code.STALE, f"{self.key.name} may still be running on node {self.node}")
        return None

    def _give_up(self, batch: UnitOfWork, before: Stored, *, requeue: bool) -> Result:
        if is_ending(before.doc):
            return self._end(batch, before, stops_others=False)
        notice = Notice(EvictionReason.NODE_LOST, EvictionRule.NODE_LOST, f"node/{self.node}", self.message)
        alone = len(batch.placements[before.uid]) == 1
        after = before if alone and not requeue else told_to_stop(batch, before, notice, self.id, requeue=requeue)
        written = self._end(batch, after, stops_others=False)
        for gang in self.gangs():
            stop_members(batch, gang, notice, self.id, self.origin, requeue=requeue)
        return written


def _part(batch: UnitOfWork, one: Stored, node: str, epoch: int | None) -> Placement | None:
    """What of an allocation is placed on a node, if it is still the placement that is meant."""
    there = (part for part in batch.placements.get(one.uid, ()) if part.node == node)
    return next((part for part in there if epoch in (None, part.epoch)), None)


def _alive(batch: UnitOfWork, name: str) -> Refusal | None:
    node = batch.objects.get(node_key(name))
    now = sighting_of(node, batch.heartbeats.get(name)) if node is not None else None
    if now is not None and now.standing.gone and not now.heard_since:
        return None
    return Refusal(Code.STALE, f"node {name} is not lost")


class _Spec(msgspec.Struct, rename="camel"):
    on_node_lost: OnLost = OnLost.KEEP


class _Document(msgspec.Struct):
    spec: _Spec


_decode = msgspec.json.Decoder(_Document).decode


def on_lost_of(doc: bytes) -> OnLost:
    """What a stored allocation wants when its node is lost."""
    return _decode(doc).spec.on_node_lost if b'"onNodeLost"' in doc else OnLost.KEEP


def is_marked(one: Stored) -> bool:
    return _MARK in one.status and any(
        condition["type"] == EvictionReason.NODE_LOST for condition in status_of(one).get("conditions", ())
    )


# Verbs.


async def set_readiness(
    runtime: Runtime, transitions: Sequence[tuple[str, Liveness]], patience: Patience, why: str = ""
) -> list[Reply]:
    """Say of each node as what it stands now. What is no longer so comes back refused, and has changed nothing."""
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
    """These nodes were heard: those that were said to be silent are Ready at once. Which of them that were.

    That they were lost is first taken back on their work: should this end in between, the nodes are still to be
    welcomed, and whoever does that next finds what is left.
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
        origin = Origin(CONTROLLER, "mark", "the node is heard again")
        marked = {one.key for _, one in work if is_marked(one)}
        await feed(runtime.binding, [Unmark(key=key, origin=origin) for key in sorted(marked)])


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of the work of nodes that are gone; `next_at` is when more can be done, by node."""

    ended: tuple[Written, ...] = ()
    next_at: Mapping[str, datetime | None] = field(default_factory=dict)
    unsettled: frozenset[str] = frozenset()  # nodes of whose work something was refused, as by a full lane


async def settle(
    runtime: Runtime,
    nodes: Sequence[Sighting],
    patience: Patience,
    *,
    calm_seconds: float = math.inf,
    watched_seconds: float = math.inf,
    origin: Origin | None = None,
) -> Settled:
    """End the work of nodes that are gone where none of it can be running any more, and mark the rest."""
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
    """What is placed on nodes, part by part, with its allocation."""
    async with runtime.database.reader() as db:
        parts = await node_store.load_placements_on(db, names)
        objects = await object_store.load(db, {Key("Allocation", one.namespace, one.name) for one in parts})
    found = ((one, objects.get(Key("Allocation", one.namespace, one.name))) for one in parts)
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
        f"it waits again after {timestamp(at)}, unless the node is heard"
        if at is not None
        else f"it stays bound until the node is heard, or fenced: bursar node fence {part.node}"
    )
    return MarkLost(
        key=one.key, origin=Origin(CONTROLLER, "mark", f"node {part.node} is lost"), uid=one.uid, node=part.node,
        epoch=part.epoch, message=f"Node {part.node} is lost: {_last_heard(node.heartbeat)}; {then}",
    )  # fmt: skip


def _last_heard(heartbeat: SeenHeartbeat | None) -> str:
    return f"last heard at {timestamp(heartbeat.at)}" if heartbeat is not None else "it was never heard"
