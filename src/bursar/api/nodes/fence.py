"""Handlers of fencing: an administrator guarantees that nothing runs on a lost node, or revokes that."""

from __future__ import annotations

import msgspec

from bursar.api.http.action import faulty, read_action, words_faults
from bursar.api.http.body import dry_run
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, key_of, kind_of, origin_of, written_answer
from bursar.core.values.refusal import Refusal, field_fault
from bursar.ops.nodes import fence as ops
from bursar.wire.shared.document import encode


class FenceNode(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The reason why nothing can run there, for instance that it is switched off."""

    reason: str = ""


class FencedAllocations(msgspec.Struct):
    """The effect on placed work; parts of `stopping` allocations still run on other nodes."""

    requeued: int
    failed: int
    stopping: int
    left: int


class FenceStatus(msgspec.Struct, rename="camel"):
    status: str
    node: str
    allocations: FencedAllocations


async def start(call: Call) -> Outcome:
    """Fence a silent node. Repeating it has no further effect."""
    asked = read_action(call, FenceNode, "fence")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    reason = wanted.reason.strip()
    causes = words_faults(reason=reason)
    if not reason:
        causes.append(field_fault("reason", "must state why nothing can be running on this node"))
    if causes:
        return faulty("fence", causes)
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    done = await ops.fence(
        call.context.runtime, found.key.name, origin_of(call, reason), reason, idempotency_key=idempotency_key,
        dry_run=dry,
    )  # fmt: skip
    if isinstance(done, Refusal):
        return done
    ended = FencedAllocations(done.requeued, done.failed, done.stopping, done.left)
    return Answer(200, encode(FenceStatus("Fenced", found.key.name, ended)))


async def end(call: Call) -> Outcome:
    """Remove a fence, so that the node can be used again."""
    dry = dry_run(call)
    if isinstance(dry, Refusal):
        return dry
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    reply = await ops.unfence(call.context.runtime, found.key.name, origin_of(call), dry_run=dry)
    return await written_answer(call, kind_of(call), reply)
