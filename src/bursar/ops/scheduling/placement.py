"""Verbs on placements: bind, evict, preempt, report that work runs or has ended; and note why work is pending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from bursar.commands.command import Reply
from bursar.commands.scheduling.bind import Bind, NotePending
from bursar.commands.scheduling.evict import Evict, Preempt
from bursar.commands.workloads.report import Report
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.lane import feed
from bursar.ops.runtime.runtime import Runtime

# The revision of each member of a placed unit, or the refusal of the whole unit.
Bound: TypeAlias = tuple[int, ...] | Refusal


async def bind(runtime: Runtime, commands: Sequence[Bind]) -> list[Bound]:
    """Bind each unit to its planned nodes. A stale unit is refused with its reason; the others are committed."""
    return [_bound(reply) for reply in await feed(runtime.binding, commands)]


def _bound(reply: Reply) -> Bound:
    if isinstance(reply, Refusal):
        return reply
    assert isinstance(reply, tuple), "a unit is answered member by member"
    return tuple([member.revision for member in reply])


async def note(runtime: Runtime, commands: Sequence[NotePending]) -> list[Reply]:
    """Store why allocations are pending. Notes use the lane of changes, so that binding does not wait for them."""
    return await feed(runtime.changing, commands)


async def evict(
    runtime: Runtime,
    one: Stored,
    notice: Notice,
    origin: Origin,
    *,
    idempotency_key: IdempotencyKey | None = None,
    dry_run: bool = False,
) -> Reply:
    """Stop an allocation, and its gang with it."""
    command = Evict(
        key=one.key, uid=one.uid, notice=notice, gang=one.gang, origin=origin, idempotency_key=idempotency_key
    )
    lane = runtime.trying if dry_run else runtime.binding
    return await lane.submit(command, one.key.namespace)


async def preempt(runtime: Runtime, commands: Sequence[Preempt]) -> list[Reply]:
    """Evict the victims of each nominee. A stale preemption is refused with its reason, and changes nothing."""
    return await feed(runtime.binding, commands)


async def report(runtime: Runtime, command: Report) -> Reply:
    """Record that an allocation runs, or how it ended."""
    return await runtime.binding.submit(command, command.key.namespace)
