"""Verbs on allocations: bind, start, release, and the two ways of deleting.

`bind` and `release` are what a scheduler and an agent call. What is bound comes back only when it is confirmed gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec

from bursar.core.allocation import ENDED, NEXT, GangKey, Phase, Request
from bursar.core.charge import NOTHING, Charge, unbound
from bursar.core.node import Placement
from bursar.core.object import Key, Stored
from bursar.core.placing import Placing, Target, bound_charge, place, unplace
from bursar.core.quantity import format_amount
from bursar.core.quota import Move
from bursar.core.refusal import Code, Refusal
from bursar.core.sheet import Sheet
from bursar.core.wording import quota_refusal
from bursar.ops.command import Command, Reply, Result
from bursar.ops.object import NO_PRECONDITIONS, Preconditions, not_found
from bursar.ops.office import Office, timestamp
from bursar.wire.allocation import Allocation, request_of
from bursar.wire.document import encode

GRACE_SECONDS = 30

_decode = msgspec.json.Decoder(Allocation).decode


def request_in(doc: bytes) -> Request:
    return request_of(_decode(doc))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind(Command):
    """Place a pending allocation on nodes."""

    targets: tuple[Target, ...]
    request: Request
    gang: str = ""

    def nodes(self) -> Iterable[str]:
        return (target.node for target in self.targets)

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def charges(self, sheet: Sheet) -> Iterable[tuple[str, Charge]]:
        before = sheet.objects.get(self.key)
        if before is not None:
            yield self.key.namespace, bound_charge(before.charge, 0)

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if phase_of(before) is not Phase.PENDING:
            return Refusal(Code.STALE, f"{self.key.name} is {phase_of(before)}, not Pending")
        if before.charge.due:
            return Refusal(Code.STALE, f"the gang of {self.key.name} is not complete")
        placing = place(sheet.nodes, self.request, self.targets, before.charge)
        if isinstance(placing, Refusal):
            return placing
        if exceeded := sheet.counters.move([Move(self.key.namespace, before.charge, placing.charge)]):
            return quota_refusal("allocation", exceeded)
        return self._save(sheet, before, placing)

    def _save(self, sheet: Sheet, before: Stored, placing: Placing) -> Result:
        for room in placing.rooms:
            sheet.set_node(room)
        sheet.place([
            Placement(
                target.node, before.uid, self.key.namespace, self.key.name, before.tenant, 1, self.request.exclusive,
                taken.resources, taken.devices,
            )
            for target, taken in zip(self.targets, placing.fits, strict=True)
        ])  # fmt: skip
        at = timestamp(sheet.now)
        first = self.targets[0].node
        status = {
            **status_of(before),
            "phase": Phase.SCHEDULED,
            "nodeName": first,
            "nodes": [
                {"name": target.node, "devices": {name: list(indices) for name, indices in taken.devices.items()}}
                for target, taken in zip(self.targets, placing.fits, strict=True)
            ],
            "allocatedResources": {name: format_amount(name, value) for name, value in self.request.requests.items()},
        }
        status.pop("reason", None)
        status.pop("message", None)
        set_condition(status, "Scheduled", "True", "Bound", f"Placed on {first}", at)
        node = sheet.objects.get(Key("Node", "", first))
        if node is not None:
            status["nodeId"] = node.uid
        return sheet.put(with_status(before, status, node=first, charge=placing.charge), self.origin)

    def needs(self) -> Iterable[Key]:
        return (Key("Node", "", target.node) for target in self.targets[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Command):
    """What a node says of an allocation that is bound to it: that it runs, or how it ended."""

    phase: Phase
    node: str = ""  # the node that reports; empty for an administrator
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    expected: int | None = None
    gang: str = ""

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if self.expected is not None and self.expected != before.revision:
            return Refusal(Code.CONFLICT, f"{self.key.name} was changed meanwhile")
        current = phase_of(before)
        if self.node and self.node not in {one.node for one in sheet.placements.get(before.uid, ())}:
            return Refusal(Code.FORBIDDEN, f"{self.key.name} is not bound to node {self.node}")
        if current is self.phase:
            return sheet.put(before, self.origin)
        if self.phase not in NEXT[current]:
            return Refusal(Code.IMMUTABLE, f"{self.key.name} is {current} and cannot become {self.phase}")
        if self.phase in ENDED or self.phase is Phase.PENDING:
            return self._end(sheet, before)
        return sheet.put(with_status(before, self._progress(before, timestamp(sheet.now))), self.origin)

    def _progress(self, before: Stored, at: str) -> dict[str, Any]:
        status = {**status_of(before), "phase": self.phase}
        if self.phase is Phase.RUNNING:
            status.setdefault("startTime", at)
            set_condition(status, "Ready", "True", "Running", "", at)
        return status

    def _end(self, sheet: Sheet, before: Stored) -> Result:
        """Confirmed gone: the nodes and the quotas get back exactly what was taken."""
        gone = sheet.lift(before.uid)
        for room in unplace(sheet.nodes, request_in(before.doc), gone):
            sheet.set_node(room)
        requeued = self.phase is Phase.PENDING
        charge = unbound(before.charge) if requeued else NOTHING
        sheet.counters.move([Move(self.key.namespace, before.charge, charge)])
        last = with_status(before, self._final(before, timestamp(sheet.now)), node="", charge=charge)
        if not requeued:
            leave_gang(sheet, before)
        if is_deleted(before):
            return sheet.remove(self.key, self.origin, replace(last, revision=before.revision))
        return sheet.put(last, self.origin)

    def _final(self, before: Stored, at: str) -> dict[str, Any]:
        status = {**status_of(before), "phase": self.phase}
        told = {"reason": self.reason, "message": self.message, "exitCode": self.exit_code}
        status |= {name: value for name, value in told.items() if value not in ("", None)}
        if self.phase is Phase.PENDING:
            for name in ("nodeName", "nodeId", "nodes", "startTime", "allocatedResources"):
                status.pop(name, None)
            set_condition(status, "Scheduled", "False", self.reason or "Requeued", self.message, at)
            return status
        status["endTime"] = at
        set_condition(status, "Ready", "False", str(self.phase), self.message, at)
        return status


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Command):
    """Delete an allocation: at once if nothing runs, else ask its nodes to stop it and wait for their word."""

    grace_seconds: int = GRACE_SECONDS
    preconditions: Preconditions = NO_PRECONDITIONS
    gang: str = ""

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        if not sheet.placements.get(before.uid):
            sheet.counters.move([Move(self.key.namespace, before.charge)])
            leave_gang(sheet, before)
            status = {**status_of(before)}
            if phase_of(before) not in ENDED:
                status |= {"phase": Phase.CANCELLED, "endTime": timestamp(sheet.now)}
            last = with_status(before, status, charge=NOTHING)
            return sheet.remove(self.key, self.origin, replace(last, revision=before.revision))
        return self._stop(sheet, before)

    def _stop(self, sheet: Sheet, before: Stored) -> Result:
        document = msgspec.json.decode(before.doc)
        metadata = document["metadata"]
        grace = min(self.grace_seconds, metadata.get("deletionGracePeriodSeconds", self.grace_seconds))
        metadata.setdefault("deletionTimestamp", timestamp(sheet.now + timedelta(seconds=grace)))
        metadata["deletionGracePeriodSeconds"] = grace
        status = {**status_of(before), "phase": Phase.TERMINATING}
        set_condition(
            status, "Terminating", "True", "UserRequested", "Graceful termination in progress", timestamp(sheet.now)
        )
        sheet.place([replace(one, wanted=False) for one in sheet.placements[before.uid]])
        after = replace(with_status(before, status), doc=encode(document))
        return sheet.put(after, self.origin)


# Helpers of the commands.


def phase_of(one: Stored) -> Phase:
    return Phase(one.fields.get("status.phase", Phase.PENDING))


def status_of(one: Stored) -> dict[str, Any]:
    status: dict[str, Any] = msgspec.json.decode(one.status)
    return status


def is_deleted(one: Stored) -> bool:
    return "deletionTimestamp" in msgspec.json.decode(one.doc)["metadata"]


def set_condition(status: dict[str, Any], name: str, value: str, reason: str, message: str, at: str) -> None:
    """Set a condition; its transition time moves only when its value does."""
    before = next((one for one in status.get("conditions", ()) if one["type"] == name), None)
    since = (
        before["lastTransitionTime"] if before and before["status"] == value and "lastTransitionTime" in before else at
    )
    condition = {"type": name, "status": value, "reason": reason, "lastTransitionTime": since}
    if message:
        condition["message"] = message
    others = [one for one in status.get("conditions", ()) if one["type"] != name]
    status["conditions"] = [*others, condition]


def with_status(
    before: Stored, status: dict[str, Any], *, node: str | None = None, charge: Charge | None = None
) -> Stored:
    node = before.fields.get("spec.nodeName", "") if node is None else node
    fields = {**before.fields, "status.phase": status["phase"], "status.nodeName": node, "spec.nodeName": node}
    return replace(before, status=encode(status), fields=fields, charge=before.charge if charge is None else charge)


def leave_gang(sheet: Sheet, one: Stored) -> None:
    key = (one.key.namespace, one.gang)
    if one.gang and key in sheet.gangs and phase_of(one) not in ENDED:
        row = sheet.gangs[key]
        sheet.set_gang(key, replace(row, members=max(0, row.members - 1)))


# Verbs.


async def bind(office: Office, commands: Sequence[Bind]) -> list[Reply]:
    """Place each allocation where its targets say. What went stale comes back with its reason; the rest stands."""
    return list(await asyncio.gather(*(office.binding.submit(command, command.key.namespace) for command in commands)))


async def report(office: Office, command: Report) -> Reply:
    return await office.binding.submit(command, command.key.namespace)


async def release(office: Office, command: Release, *, dry_run: bool = False) -> Reply:
    lane = office.trying if dry_run else office.changing
    return await lane.submit(command, command.key.namespace)
