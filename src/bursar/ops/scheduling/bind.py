"""Verbs that commit the scheduler's plan: binding units, and noting why work is pending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from bursar.commands.command import Reply
from bursar.commands.scheduling.bind import Bind, NotePending
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.lane_plan import feed
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
