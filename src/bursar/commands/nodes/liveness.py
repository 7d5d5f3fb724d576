"""Readiness of nodes, and the end of work whose node is lost.

The caller decided from a snapshot of all nodes that may be slightly stale. The commands decide again under locks,
including that of the node's last heartbeat: a node that sends one meanwhile keeps its work, and one whose work was
given up learns of it before it starts anything. So any number of controllers may do this at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bursar.commands.command import Command, Result
from bursar.commands.nodes.node_conditions import heard, is_silent, sighting_of, silenced, standing_of
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import set_condition, status_of, unchanged
from bursar.commands.workloads.allocation import PLACED, phase_of, take_lost, with_status
from bursar.commands.workloads.report import Report
from bursar.commands.workloads.stop import members_of, stop_members, with_stop_notice
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.nodes.liveness import Liveness, OnLost, Patience, Sighting, requeues, seconds_to_wait
from bursar.core.nodes.node import Placement
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.node import node_key
from bursar.wire.shared.document import is_ending

DEFAULT = Patience()
LIVE = PLACED | {Phase.TERMINATING}

_MARK = f'"{EvictionReason.NODE_LOST}"'.encode()


# Commands on nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReadiness(Command):
    """Set a node to Ready, NotReady or Lost, if that is so. Phase, conditions and schedulability change together; a
    cordoned node still accepts no new work."""

    standing: Liveness
    after_seconds: float = 0.0  # without a heartbeat
    why: str = ""
    unfence: bool = False  # an administrator removes a fence: no heartbeat is needed

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
            return self._back(batch, before, now)
        if now.heartbeat is None or now.heard_since or now.silent_seconds < self.after_seconds:
            return Refusal(Code.STALE, f"node {self.key.name} has sent a heartbeat")
        if now.standing.gone or now.standing is self.standing:
            return unchanged(before)
        at = timestamp(now.heartbeat.at)
        message = f"No heartbeat since {at}" + (f"; {self.why}" if self.why else "")
        return batch.put(silenced(batch, before, self.standing, now.heartbeat.at, message), self.origin)

    def _back(self, batch: UnitOfWork, before: Stored, now: Sighting) -> Result:
        if self.unfence and now.standing is not Liveness.FENCED:
            return not_fenced(self.key)
        if not is_silent(before):
            return unchanged(before)
        if not now.heard_since and not self.unfence:
            return Refusal(Code.STALE, f"node {self.key.name} has sent no heartbeat")
        return batch.put(heard(batch, before), self.origin)


def not_fenced(key: Key) -> Refusal:
    return Refusal(Code.CONFLICT, f"node {key.name} is not fenced", "There is no fence to remove.")


# Commands on the work of lost nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLost(Command):
    """Note that the node of an allocation is lost, and what will happen next. The allocation stays placed."""

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
    """Remove the note that an allocation's node is lost, because the node sends heartbeats again."""

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        status = status_of(before)
        return batch.put(with_status(before, status), self.origin) if take_lost(status) else unchanged(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLost(Report):
    """End the part of an allocation that ran on a lost node: it is requeued or fails, as its spec says.

    Its parts on other nodes and the rest of its gang are stopped; the whole is requeued or fails when the last part is
    confirmed gone. `confirmed` means that the node itself reports that nothing of it runs there, because no lease was
    granted in time, or because the node was restarted. With `only_leased`, an allocation that did not ask to be
    requeued has failed, as the node reports.
    """

    phase: Phase = Phase.FAILED
    reason: str = EvictionReason.NODE_LOST
    patience: Patience = DEFAULT
    confirmed: bool = False
    only_leased: bool = False

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
            return Refusal(Code.STALE, f"{self.key.name} was deleted and created again")
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
        """Why it cannot be given up yet, checked again, because the node may have sent a heartbeat since."""
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
        alone, stop_id = len(batch.placements[before.uid]) == 1, batch.new_uid("lost")
        after = before if alone and not requeue else with_stop_notice(batch, before, notice, stop_id, requeue=requeue)
        written = self._end(batch, after, stops_others=False)
        for gang in self.gangs():
            stop_members(batch, gang, notice, stop_id, self.origin, requeue=requeue)
        return written


def _part(batch: UnitOfWork, one: Stored, node: str, epoch: int | None) -> Placement | None:
    """An allocation's placement on a node, if it is still of the expected epoch."""
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
    """The `onNodeLost` of a stored allocation."""
    return _decode(doc).spec.on_node_lost if b'"onNodeLost"' in doc else OnLost.KEEP


def is_marked(one: Stored) -> bool:
    return _MARK in one.status and any(
        condition["type"] == EvictionReason.NODE_LOST for condition in status_of(one).get("conditions", ())
    )
