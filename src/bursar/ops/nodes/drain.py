"""Emptying a node: it takes nothing new, and what is placed there is evicted.

That a node is being drained stands on the node itself, so it goes on after a restart; whoever comes first evicts what
is still there, and doing it twice is harmless. The node is drained when the last of its work is confirmed gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import DO_NOT_EVICT, EvictionReason, EvictionRule, Notice, drain_message
from bursar.core.nodes.node import EXCLUSIVE, WHOLE, NodeCapacity
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import get, not_found
from bursar.ops.runtime.clock import now, timestamp
from bursar.ops.runtime.command import Command, Reply, Result
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.evict import evict
from bursar.ops.workloads.allocation import status_of, unchanged
from bursar.ops.workloads.stop import standing_deadline
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.wire.shared.document import encode

GRACE_SECONDS = 300

DRAINING, DRAINED, CANCELLED = "Draining", "Drained", "Cancelled"


# Commands.


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Command):
    """Cordon a node and write down that it is to be emptied. Repeating it may hasten a drain, never delay it."""

    grace_seconds: int = GRACE_SECONDS
    reason: str = ""
    force: bool = False

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def decide(self, batch: UnitOfWork) -> Result:
        before, capacity = batch.objects.get(self.key), batch.nodes.get(self.key.name)
        if before is None or capacity is None:
            return not_found(self.key)
        status, document = status_of(before), msgspec.json.decode(before.doc)
        after = self._written(drain_of(before), capacity, timestamp(batch.now), self._deadline(batch))
        is_cordoned = (document.get("spec") or {}).get("unschedulable") is True
        if is_cordoned and after == status.get("drain"):
            return unchanged(before)
        if capacity.schedulable:
            batch.set_node(replace(capacity, generation=capacity.generation + 1, schedulable=False))
        if not is_cordoned:
            document["spec"] = {**(document.get("spec") or {}), "unschedulable": True}
            document["metadata"]["generation"] = document["metadata"].get("generation", 1) + 1
        fields = {**before.fields, "spec.unschedulable": "true"}
        status["drain"] = after
        return batch.put(replace(before, doc=encode(document), status=encode(status), fields=fields), self.origin)

    def _deadline(self, batch: UnitOfWork) -> str:
        return timestamp(batch.now + timedelta(seconds=self.grace_seconds))

    def _written(self, open_: Mapping[str, Any], capacity: NodeCapacity, at: str, deadline: str) -> dict[str, Any]:
        goes_on = open_.get("state") == DRAINING
        after = {
            "state": DRAINING if any(capacity.allocated.values()) else DRAINED,
            "startedAt": open_["startedAt"] if goes_on else at,
            "deadline": min(deadline, open_["deadline"]) if goes_on else deadline,
            "gracePeriodSeconds": min(self.grace_seconds, open_["gracePeriodSeconds"])
            if goes_on
            else self.grace_seconds,
            "by": open_["by"] if goes_on else self.origin.actor,
            "total": open_["total"] if goes_on else placed_on(capacity),
            "force": self.force or (goes_on and open_["force"]),
        }
        if reason := self.reason or (open_.get("reason", "") if goes_on else ""):
            after["reason"] = reason
        if after["state"] == DRAINED:
            # A node that is empty stays drained since when it was.
            return dict(open_) if open_.get("state") == DRAINED else {**after, "endedAt": at}
        return after


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishDrain(Command):
    """Say that a node is drained, if it is empty by now."""

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def decide(self, batch: UnitOfWork) -> Result:
        before, capacity = batch.objects.get(self.key), batch.nodes.get(self.key.name)
        if before is None or capacity is None:
            return not_found(self.key)
        status = status_of(before)
        if drain_of(before).get("state") != DRAINING or any(capacity.allocated.values()):
            return unchanged(before)
        status["drain"] |= {"state": DRAINED, "endedAt": timestamp(batch.now)}
        return batch.put(replace(before, status=encode(status)), self.origin)


def placed_on(capacity: NodeCapacity) -> int:
    """How many allocations a node carries: everything placed counts as one pod, and what has it whole is alone."""
    return 1 if EXCLUSIVE in capacity.allocated else capacity.allocated.get("pods", 0) // WHOLE


def drain_of(node: Stored) -> dict[str, Any]:
    drain: dict[str, Any] = status_of(node).get("drain") or {}
    return drain


# How it stands.


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """A drain, and how far it has come. `left` are those that only force would evict."""

    state: str
    total: int
    pending: int
    estimated_end: str
    left: tuple[Key, ...] = ()

    @property
    def failed(self) -> int:
        return len(self.left)

    @property
    def evicted(self) -> int:
        return max(0, self.total - self.pending - self.failed)


async def standing(runtime: Runtime, name: str) -> DrainProgress | Refusal | None:
    """How a node's drain stands; None where it is not being drained."""
    found = await get(runtime, Key("Node", "", name))
    if isinstance(found, Refusal):
        return found
    drain = drain_of(found)
    if not drain:
        return None
    there = [] if drain["state"] == DRAINED else await placed_there(runtime, name)
    return standing_of(drain, there)


def standing_of(drain: Mapping[str, Any], there: Iterable[Stored]) -> DrainProgress:
    there = list(there)
    left = tuple(one.key for one in there if not standing_deadline(one) and _is_protected(one, drain))
    ends = (drain["deadline"], *filter(None, map(standing_deadline, there)))
    return DrainProgress(
        drain["state"], drain["total"], len(there) - len(left), drain.get("endedAt") or max(ends), tuple(sorted(left))
    )


def _is_protected(one: Stored, drain: Mapping[str, Any]) -> bool:
    if drain["force"]:
        return False
    annotations = msgspec.json.decode(one.doc)["metadata"].get("annotations") or {}
    return bool(annotations.get(DO_NOT_EVICT) == "true")


async def placed_there(runtime: Runtime, name: str) -> list[Stored]:
    """What is placed on a node, as it stands."""
    async with runtime.database.reader() as db:
        placements = await node_store.load_placements_on(db, [name])
        keys = [Key("Allocation", one.namespace, one.name) for one in placements]
        objects = await object_store.load(db, keys)
    uids = {one.uid for one in placements}
    return [one for _, one in sorted(objects.items()) if one.uid in uids]


# Verbs.


async def drain(runtime: Runtime, command: Drain, *, dry_run: bool = False) -> Reply:
    """Begin to empty a node. The first evictions are made at once; `continue_drain` makes the rest."""
    lane = runtime.trying if dry_run else runtime.changing
    reply = await lane.submit(command, "")
    if not isinstance(reply, Refusal) and not dry_run:
        await continue_drain(runtime, command.key.name)
    return reply


async def continue_drain(runtime: Runtime, name: str) -> None:
    """Evict what is still on a node that is being drained, and say so when nothing is left."""
    found = await get(runtime, Key("Node", "", name))
    if isinstance(found, Refusal) or drain_of(found).get("state") != DRAINING:
        return
    drain = drain_of(found)
    origin = Origin(drain["by"], "drain", drain.get("reason", ""))
    there = await placed_there(runtime, name)
    if not there:
        await runtime.changing.submit(FinishDrain(key=found.key, origin=origin), "")
        return
    grace = drain["gracePeriodSeconds"]
    message = drain_message(name, drain["by"], drain.get("reason", ""))
    notice = Notice(EvictionReason.DRAINED, EvictionRule.DRAIN, drain["by"], message, grace)
    latest = timestamp(now() + timedelta(seconds=grace))
    await asyncio.gather(
        *(evict(runtime, one, notice, origin) for one in there if _must_be_told(one, drain, latest)),
    )


def _must_be_told(one: Stored, drain: Mapping[str, Any], latest: str) -> bool:
    """Whether it does not know yet that it has to go, or believes that it may take longer."""
    told = standing_deadline(one)
    return told > latest if told else not _is_protected(one, drain)


# What a node, or whoever cordons it, may not change.


def keep_drain(before: Stored, after: Stored, *, schedulable: bool, at: str) -> Stored:
    """The next version of a node with its drain as it was: only letting the node take work again ends it."""
    if b'"drain"' not in before.status and b'"drain"' not in after.status:
        return after
    status, drain = status_of(after), drain_of(before)
    status.pop("drain", None)
    if drain and schedulable and drain["state"] == DRAINING:
        drain |= {"state": CANCELLED, "endedAt": at}
    # A drain that was done is no news once the node takes work again.
    if drain and not (schedulable and drain["state"] == DRAINED):
        status["drain"] = drain
    return replace(after, status=encode(status))
