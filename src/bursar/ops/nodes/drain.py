"""Draining a node: it accepts no new work, and the work placed there is evicted.

The drain is stored in the node's status, so it continues after a restart. Any process may evict the work that is left,
and repeating it is harmless. The node is drained when the last of its work is confirmed gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.nodes.drain import DRAINED, DRAINING, Drain, FinishDrain, drain_of
from bursar.commands.workloads.stop import standing_deadline
from bursar.core.nodes.eviction import DO_NOT_EVICT, EvictionReason, EvictionRule, Notice, drain_message
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Refusal
from bursar.ops.objects.object import get
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import evict
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.wire.kinds.node import node_key


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The progress of a drain. `left` is the work that only a forced drain would evict."""

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
    """The progress of a node's drain; None if it is not being drained."""
    found = await get(runtime, node_key(name))
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
    """The allocations placed on a node."""
    async with runtime.database.reader() as db:
        placements = await node_store.load_placements_on(db, [name])
        keys = [one.key for one in placements]
        objects = await object_store.load(db, keys)
    uids = {one.uid for one in placements}
    return [one for _, one in sorted(objects.items()) if one.uid in uids]


# Verbs.


async def drain(runtime: Runtime, command: Drain, *, dry_run: bool = False) -> Reply:
    """Start draining a node. The first evictions are made at once; `continue_drain` makes the rest."""
    lane = runtime.trying if dry_run else runtime.changing
    reply = await lane.submit(command, "")
    if not isinstance(reply, Refusal) and not dry_run:
        await continue_drain(runtime, command.key.name)
    return reply


async def continue_drain(runtime: Runtime, name: str) -> None:
    """Evict the work that is still on a draining node, and mark the node as drained when none is left."""
    found = await get(runtime, node_key(name))
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
        *(evict(runtime, one, notice, origin) for one in there if _needs_notice(one, drain, latest)),
    )


def _needs_notice(one: Stored, drain: Mapping[str, Any], latest: str) -> bool:
    """Whether work has no stop notice yet, or one with a later deadline."""
    told = standing_deadline(one)
    return told > latest if told else not _is_protected(one, drain)
