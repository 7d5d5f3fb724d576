"""Fencing a node: the statement that nothing on it runs any more. A node that sends heartbeats cannot be fenced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.command import Command, Result
from bursar.commands.nodes.node_conditions import sighting_of, silenced
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import unchanged
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.liveness import Liveness
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceCommand(Command):
    """Fence a node: store that nothing on it runs any more, unless it sends heartbeats."""

    reason: str
    silent_seconds: float  # the minimum time without a heartbeat

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
        f"node {key.name} sent a heartbeat {max(0, round(silent_seconds))} s ago: it is alive",
        f"To move its work away: bursar drain {key.name}. To fence it, switch it off first.",
    )
