"""Verbs that stop placed work, so that it is pending again: eviction and preemption."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.commands.command import Reply
from bursar.commands.scheduling.evict import Evict, Preempt
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.ops.runtime.lane_plan import feed
from bursar.ops.runtime.runtime import Runtime


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
