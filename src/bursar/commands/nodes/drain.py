"""Drains: a drain is stored in the node's status until the node accepts work again, so it survives restarts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import status_of, unchanged
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.node import EXCLUSIVE, WHOLE, NodeCapacity
from bursar.core.objects.object import Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.wire.shared.document import encode

GRACE_SECONDS = 300

DRAINING, DRAINED, CANCELLED = "Draining", "Drained", "Cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Command):
    """Cordon a node and store the drain. A repetition may shorten the deadline of a drain, but never extend it."""

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
            # An empty node keeps the time since when it is drained.
            return dict(open_) if open_.get("state") == DRAINED else {**after, "endedAt": at}
        return after


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishDrain(Command):
    """Mark a node as drained, if it is empty."""

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
    """The number of allocations on a node: each counts as one pod, and an exclusive one is alone."""
    return 1 if EXCLUSIVE in capacity.allocated else capacity.allocated.get("pods", 0) // WHOLE


def drain_of(node: Stored) -> dict[str, Any]:
    drain: dict[str, Any] = status_of(node).get("drain") or {}
    return drain


# Fields that changes of a node, such as a cordon, must keep.


def keep_drain(before: Stored, after: Stored, *, schedulable: bool, at: str) -> Stored:
    """The next version of a node with its drain unchanged: only uncordoning the node ends it."""
    if b'"drain"' not in before.status and b'"drain"' not in after.status:
        return after
    status, drain = status_of(after), drain_of(before)
    status.pop("drain", None)
    if drain and schedulable and drain["state"] == DRAINING:
        drain |= {"state": CANCELLED, "endedAt": at}
    # A finished drain is dropped once the node accepts work again.
    if drain and not (schedulable and drain["state"] == DRAINED):
        status["drain"] = drain
    return replace(after, status=encode(status))
