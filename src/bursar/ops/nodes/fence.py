"""Fencing a node: an administrator states that nothing runs on it any more.

It is the only way to give up work without a lease while its node is silent, so it takes effect at once: all work placed
there is pending again or fails. A node that sends heartbeats cannot be fenced. One that returns afterwards is Ready
again, and stops the work that it still runs, because the epoch of that work is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.command import Reply
from bursar.commands.nodes.fence import FenceCommand
from bursar.commands.nodes.liveness import SetReadiness, on_lost_of
from bursar.commands.nodes.node_conditions import sighting_of, standing_of
from bursar.core.nodes.liveness import Liveness, Patience, requeues
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes.drain import placed_there
from bursar.ops.nodes.liveness import settle
from bursar.ops.objects.object import get
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import node_key
from bursar.wire.kinds.settings import SETTINGS_KEY, patience_of


@dataclass(frozen=True, slots=True)
class Fenced:
    """The outcome for the work of a fenced node. `stopping` is work of which parts still run on other nodes."""

    requeued: int = 0
    failed: int = 0
    stopping: int = 0
    left: int = 0  # the number still placed there, which the controller ends


async def fence(
    runtime: Runtime,
    name: str,
    origin: Origin,
    reason: str,
    *,
    idempotency_key: IdempotencyKey | None = None,
    dry_run: bool = False,
) -> Fenced | Refusal:
    """Fence a node and end its work. A repetition ends the work that was left."""
    patience = await load_patience(runtime)
    command = FenceCommand(
        key=node_key(name), origin=origin, idempotency_key=idempotency_key, reason=reason,
        silent_seconds=patience.not_ready_seconds,
    )  # fmt: skip
    before = await placed_there(runtime, name)
    reply = await (runtime.trying if dry_run else runtime.changing).submit(command, "")
    if isinstance(reply, Refusal):
        return reply
    if dry_run:
        return _foreseen(before)
    node = await get(runtime, node_key(name))
    if isinstance(node, Refusal):
        return node
    if standing_of(node) is not Liveness.FENCED:
        return Fenced(left=len(await placed_there(runtime, name)))  # It has sent a heartbeat meanwhile.
    settled = await settle(runtime, [sighting_of(node, None)], patience, origin=origin)
    # The controller also ends work of fenced nodes, and may be first.
    keys = [*(one.key for one in before), *(one.key for one in settled.ended)]
    return await _outcome(runtime, name, keys)


async def unfence(runtime: Runtime, name: str, origin: Origin, *, dry_run: bool = False) -> Reply:
    """Remove a fence. The node is Ready again, unless it is still silent."""
    command = SetReadiness(key=node_key(name), origin=origin, standing=Liveness.READY, unfence=True)
    return await (runtime.trying if dry_run else runtime.changing).submit(command, "")


async def load_patience(runtime: Runtime) -> Patience:
    found = await get(runtime, SETTINGS_KEY)
    return Patience() if isinstance(found, Refusal) else patience_of(found.doc)


def _foreseen(there: Iterable[Stored]) -> Fenced:
    wait_again = [requeues(on_lost_of(one.doc)) for one in there]
    return Fenced(requeued=sum(wait_again), failed=len(wait_again) - sum(wait_again))


async def _outcome(runtime: Runtime, name: str, keys: Iterable[Key]) -> Fenced:
    """Count the outcomes of the work that was placed on the node."""
    left = {one.key for one in await placed_there(runtime, name)}
    phases: list[str] = []
    for key in dict.fromkeys(key for key in keys if key not in left):
        found = await get(runtime, key)
        # Work that was being deleted does not exist any more.
        phases.append(Phase.CANCELLED if isinstance(found, Refusal) else found.fields["status.phase"])
    stopping = phases.count(Phase.TERMINATING)
    failed = sum(one in (Phase.FAILED, Phase.CANCELLED) for one in phases)
    requeued = len(phases) - stopping - failed - phases.count(Phase.SUCCEEDED)
    return Fenced(requeued, failed, stopping, len(left))
