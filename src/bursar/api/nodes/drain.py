"""Handlers of drains: start and stop one, and report its progress."""

from __future__ import annotations

import msgspec

from bursar.api.http.action import faulty, grace_faults, read_action
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, key_of, origin_of
from bursar.commands.command import Written
from bursar.commands.nodes.drain import GRACE_SECONDS, Drain
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.nodes import drain as ops
from bursar.ops.nodes.drain import DrainProgress
from bursar.wire.shared.document import encode

LEFT_SHOWN_MAX = 100


class DrainNode(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The options of `kubectl drain`; the last two have no effect on allocations."""

    grace_period_seconds: int = GRACE_SECONDS
    force: bool = False
    reason: str = ""
    delete_empty_dir_data: bool = False
    ignore_daemon_sets: bool = False


class Progress(msgspec.Struct):
    evicted: int
    pending: int
    failed: int


class DrainStatus(msgspec.Struct, rename="camel", omit_defaults=True):
    status: str
    allocations_to_evict: int
    estimated_completion_time: str
    progress: Progress
    blocked_by: list[str] = []  # namespace/name of allocations that need force


async def start(call: Call) -> Outcome:
    """Cordon a node and evict its allocations. Repeating it has no further effect."""
    asked = read_action(call, DrainNode, "drain")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    if causes := grace_faults(wanted.grace_period_seconds):
        return faulty("drain", causes)
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    command = Drain(
        key=found.key, origin=origin_of(call, wanted.reason), idempotency_key=idempotency_key,
        grace_seconds=wanted.grace_period_seconds, reason=wanted.reason, force=wanted.force,
    )  # fmt: skip
    reply = await ops.drain(call.context.runtime, command, dry_run=dry)
    if isinstance(reply, Refusal):
        return reply
    assert isinstance(reply, Written)
    if dry:
        there = await ops.placed_there(call.context.runtime, found.key.name)
        return _answer(ops.standing_of(msgspec.json.decode(reply.status)["drain"], there))
    return await show(call)


async def show(call: Call) -> Outcome:
    name = key_of(call).name
    standing = await ops.standing(call.context.runtime, name)
    if isinstance(standing, Refusal):
        return standing
    if standing is None:
        return Refusal(Code.NOT_FOUND, f'nodes "{name}" is not being drained', f"Begin with: bursar drain {name}")
    return _answer(standing)


def _answer(one: DrainProgress) -> Answer:
    left = [f"{key.namespace}/{key.name}" for key in one.left[:LEFT_SHOWN_MAX]]
    progress = Progress(one.evicted, one.pending, one.failed)
    return Answer(200, encode(DrainStatus(one.state, one.total, one.estimated_end, progress, left)))
