"""Fencing a node: an administrator's word that nothing of it runs any more.

It is the only way to give up work that has no lease while its node is silent, so it is believed at once: whatever was
placed there waits again or fails. A node that is heard is not fenced. One that is heard afterwards is Ready again, and
whatever it still runs of the past is stopped, for its epoch is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.liveness import Liveness, Patience, requeues
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.nodes.drain import placed_there
from bursar.ops.nodes.liveness import SetReadiness, node_key, on_lost_of, settle
from bursar.ops.nodes.node_conditions import sighting_of, silenced, standing_of
from bursar.ops.objects.object import get, not_found
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Command, Reply, Result
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import unchanged
from bursar.store.db.idempotency import IdempotencyKey
from bursar.wire.kinds.settings import SYSTEM, patience_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceCommand(Command):
    """Write down that nothing of a node runs any more. Who is heard is alive, and is not fenced."""

    reason: str
    silent_seconds: float  # for how long it must have been silent

    def nodes(self) -> Iterable[str]:
        return (self.key.name,)

    def heartbeats(self) -> Iterable[str]:
        return (self.key.name,)

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before, heartbeat = batch.objects.get(self.key), batch.heartbeats.get(self.key.name)
        if before is None or self.key.name not in batch.nodes:
            return not_found(self.key)
        now = sighting_of(before, heartbeat)
        if heartbeat is not None and (now.heard_since or heartbeat.silent_seconds < self.silent_seconds):
            return _alive(self.key, heartbeat.silent_seconds)
        if now.standing is Liveness.FENCED:
            return unchanged(before)
        fence = {"at": timestamp(batch.now), "by": self.origin.actor, "reason": self.reason}
        message = f"Fenced by {self.origin.actor}: {self.reason}"
        since = heartbeat.at if heartbeat is not None else batch.now
        return batch.put(silenced(batch, before, Liveness.FENCED, since, message, fence), self.origin)


def _alive(key: Key, silent_seconds: float) -> Refusal:
    return Refusal(
        Code.CONFLICT,
        f"node {key.name} was heard {max(0, round(silent_seconds))} s ago: it is alive",
        f"To move its work away: bursar drain {key.name}. To fence it, switch it off first.",
    )


@dataclass(frozen=True, slots=True)
class Fenced:
    """What became of the work of a fenced node. `stopping` are those of which parts still run on other nodes."""

    requeued: int = 0
    failed: int = 0
    stopping: int = 0
    left: int = 0  # what is still placed there: it is ended by the controller


async def fence(
    runtime: Runtime,
    name: str,
    origin: Origin,
    reason: str,
    *,
    claim: IdempotencyKey | None = None,
    dry_run: bool = False,
) -> Fenced | Refusal:
    """Fence a node and end its work. Repeating it is harmless, and ends what was left."""
    patience = await load_patience(runtime)
    command = FenceCommand(
        key=node_key(name), origin=origin, claim=claim, reason=reason, silent_seconds=patience.not_ready_seconds
    )
    reply = await (runtime.trying if dry_run else runtime.changing).submit(command, "")
    if isinstance(reply, Refusal):
        return reply
    if dry_run:
        return _foreseen(await placed_there(runtime, name))
    node = await get(runtime, node_key(name))
    if isinstance(node, Refusal):
        return node
    if standing_of(node) is not Liveness.FENCED:
        return Fenced(left=len(await placed_there(runtime, name)))  # It was heard in between.
    settled = await settle(runtime, [sighting_of(node, None)], patience, origin=origin)
    return await _outcome(runtime, name, [one.key for one in settled.ended])


async def unfence(runtime: Runtime, name: str, origin: Origin, *, dry_run: bool = False) -> Reply:
    """Take a fence back. The node is Ready, unless its silence goes on."""
    command = SetReadiness(key=node_key(name), origin=origin, standing=Liveness.READY, unfence=True)
    return await (runtime.trying if dry_run else runtime.changing).submit(command, "")


async def load_patience(runtime: Runtime) -> Patience:
    found = await get(runtime, Key("Settings", "", SYSTEM))
    return Patience() if isinstance(found, Refusal) else patience_of(found.doc)


def _foreseen(there: Iterable[Stored]) -> Fenced:
    wait_again = [requeues(on_lost_of(one.doc)) for one in there]
    return Fenced(requeued=sum(wait_again), failed=len(wait_again) - sum(wait_again))


async def _outcome(runtime: Runtime, name: str, ended: Iterable[Key]) -> Fenced:
    phases: list[str] = []
    for key in dict.fromkeys(ended):
        found = await get(runtime, key)
        # What was being deleted is gone by now.
        phases.append(Phase.CANCELLED if isinstance(found, Refusal) else found.fields["status.phase"])
    left = len(await placed_there(runtime, name))
    stopping = phases.count(Phase.TERMINATING)
    failed = sum(one in (Phase.FAILED, Phase.CANCELLED) for one in phases)
    return Fenced(len(phases) - stopping - failed, failed, stopping, left)
