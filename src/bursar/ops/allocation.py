"""Verbs on allocations: what their nodes report of them, and deleting.

What is bound comes back only when it is confirmed gone. Binding itself is in bind.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from bursar.core.allocation import ENDED, NEXT, GangKey, Phase, Request
from bursar.core.charge import NOTHING, Charge, unbound
from bursar.core.eviction import Reason as Stopped
from bursar.core.eviction import ended_as
from bursar.core.lease import FROZEN
from bursar.core.node import Placement
from bursar.core.object import Stored
from bursar.core.paying import settle
from bursar.core.placing import unplace
from bursar.core.quota import Move
from bursar.core.refusal import Code, Refusal
from bursar.core.sheet import Sheet, begin_usage, end_usage
from bursar.core.value import replace
from bursar.ops.command import Command, Reply, Result, Written
from bursar.ops.object import NO_PRECONDITIONS, Preconditions, conflict, not_found
from bursar.ops.office import Office, timestamp
from bursar.wire.allocation import Allocation, request_of
from bursar.wire.document import encode, is_ending

GRACE_SECONDS = 30

PLACED = frozenset({Phase.SCHEDULED, Phase.RUNNING})

_decode = msgspec.json.Decoder(Allocation).decode
_decode_status = msgspec.json.Decoder(dict[str, Any]).decode


def request_in(doc: bytes) -> Request:
    return request_of(_decode(doc))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Command):
    """What a node says of an allocation that is bound to it: that it runs, or how it ended."""

    phase: Phase
    uid: str = ""  # the allocation that is meant, should the name have been given to another
    node: str = ""  # the node that reports; empty for an administrator, who speaks for all
    epoch: int | None = None  # the placement that is meant: what is said of another is of the past
    stopped: bool = False  # whether it ended because it was asked to: what is being deleted was cancelled then
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    measured: int | None = None  # for how many microseconds it ran on that node
    frozen: bool | None = None  # whether it stands still on that node; None: nothing is said of it
    expected: int | None = None
    gang: str = ""
    unless_complete: bool = False  # of a gang that waited too long for its members: not if they are there by now

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def meters(self, sheet: Sheet) -> Iterable[str]:
        before = sheet.objects.get(self.key)
        if before is None or phase_of(before) is self.phase or not (self.phase is Phase.RUNNING or self.measured):
            return ()
        return [one.node for one in sheet.placements.get(before.uid, ())]

    def leases(self, sheet: Sheet) -> Iterable[int]:
        before = sheet.objects.get(self.key)
        if before is None or (self.phase not in ENDED and self.phase is not Phase.PENDING):
            return ()
        there = sheet.placements.get(before.uid, ())
        return [one.lease for one in there if one.lease and self.node in ("", one.node)]

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self._refusal(sheet, before):
            return refusal
        if self.stopped and is_ending(before.doc):
            return replace(self, stopped=False, phase=Phase.CANCELLED).decide(sheet)
        current = phase_of(before)
        if current is not self.phase and self.phase not in NEXT[current]:
            return Refusal(Code.IMMUTABLE, f"{self.key.name} is {current} and cannot become {self.phase}")
        if current is not self.phase and (self.phase in ENDED or self.phase is Phase.PENDING):
            return self._end(sheet, before)
        known, status = status_of(before), self._progress(before, timestamp(sheet.now))
        if status == known:
            return unchanged(before)  # A report that says nothing new is no change.
        if "startTime" in status and "startTime" not in known:
            self._begin(sheet, before.uid, known)
        return sheet.put(with_status(before, status), self.origin)

    def _refusal(self, sheet: Sheet, before: Stored) -> Refusal | None:
        if before.uid != (self.uid or before.uid) or before.gang != self.gang:
            return conflict(self.key, "it was deleted and created anew")
        if self.expected is not None and self.expected != before.revision:
            return conflict(self.key)
        row = sheet.gangs.get((self.key.namespace, self.gang))
        if self.unless_complete and row is not None and row.members >= row.min_members:
            return Refusal(Code.STALE, f"the gang of {self.key.name} is complete by now")
        if self.epoch is not None and self.epoch != (now := self._epoch(sheet, before)):
            return Refusal(Code.STALE, f"{self.key.name} is in epoch {now}; what was said is of epoch {self.epoch}")
        bound = {one.node for one in sheet.placements.get(before.uid, ())}
        if self.node and self.node not in bound and phase_of(before) is not self.phase:
            return Refusal(Code.FORBIDDEN, f"{self.key.name} is not bound to node {self.node}")
        return None

    def _epoch(self, sheet: Sheet, before: Stored) -> int:
        """Of its placement; where it has none any more, of its last one."""
        for one in sheet.placements.get(before.uid, ()):
            return one.epoch
        return int(status_of(before).get("epoch", 0))

    def _progress(self, before: Stored, at: str) -> dict[str, Any]:
        status = {**status_of(before), "phase": self.phase}
        told = {"reason": self.reason, "message": self.message}
        status |= {name: value for name, value in told.items() if value}
        if self.phase is Phase.RUNNING:
            status.setdefault("startTime", at)
            set_condition(status, "Ready", "True", "Running", "", at)
            if self.frozen is not None:
                set_frozen(status, self.node, self.frozen, at)
        return status

    def _begin(self, sheet: Sheet, uid: str, status: Mapping[str, Any]) -> None:
        """All of it runs from the first word on that any of it does. On a claimed node, the claim counts for all."""
        for part in sheet.placements.get(uid, ()):
            if not _is_claimed(sheet, part):
                begin_usage(sheet, part, status.get("user", ""))

    def _end(self, sheet: Sheet, before: Stored) -> Result:
        """Confirmed gone: the nodes and the quotas get back exactly what was taken, and what was paid is settled.

        A node speaks for itself alone: what runs on others as well ends when the last of them says so.
        """
        gone = sheet.lift(before.uid, self.node)
        for room in unplace(sheet.nodes, request_in(before.doc), gone):
            sheet.use_node(room)
        settle(sheet.book, gone, self.measured)
        self._end_usage(sheet, before, gone)
        if sheet.placements.get(before.uid):
            return sheet.put(with_status(before, self._ended_here(before, timestamp(sheet.now))), self.origin)
        status = self._final(before, timestamp(sheet.now))
        requeued = status["phase"] is Phase.PENDING
        charge = unbound(before.charge) if requeued else NOTHING
        sheet.counters.move([Move(self.key.namespace, before.charge, charge)])
        last = with_status(before, status, node="", charge=charge)
        if not requeued:
            leave_gang(sheet, before)
        if is_ending(before.doc):
            return sheet.remove(self.key, self.origin, last)
        return sheet.put(last, self.origin)

    def _end_usage(self, sheet: Sheet, before: Stored, gone: Iterable[Placement]) -> None:
        """What ended before anybody heard that it ran did run all the same, for as long as its node measured."""
        status = status_of(before)
        for part in gone:
            if self.measured and "startTime" not in status and not _is_claimed(sheet, part):
                longest = sheet.now.timestamp() - _epoch_seconds(status.get("scheduledTime", ""), sheet.now)
                begin_usage(sheet, part, status.get("user", ""), seconds_ago=min(self.measured / 1e6, longest))
            end_usage(sheet, part.uid, part.node, self.phase, self.reason or status.get("reason", ""))

    def _ended_here(self, before: Stored, at: str) -> dict[str, Any]:
        status = status_of(before)
        if any(one.get("frozen") for one in status["nodes"]):
            set_frozen(status, self.node, False, at)
        status["nodes"] = [
            {**node, "phase": self.phase} if node["name"] == self.node else node for node in status["nodes"]
        ]
        return status

    def _final(self, before: Stored, at: str) -> dict[str, Any]:
        status = status_of(before)
        notice = take_notice(status)
        take_lost(status)
        take_frozen(status)
        waits_again = notice is not None and notice["requeue"]
        earlier = {Phase(node["phase"]) for node in status.get("nodes", ()) if "phase" in node}
        phase = ended_as(self.phase, earlier, evicted=waits_again, deleted=is_ending(before.doc))
        status["phase"] = phase
        told = {"reason": self.reason, "message": self.message, "exitCode": self.exit_code}
        if notice is not None:
            # A node that only says how it ended repeats what stood there: the notice.
            told |= {name: "" for name in ("reason", "message") if told[name] == notice[name]}
        if phase is Phase.PENDING:
            return requeued_status(status, notice or told, at)
        if notice is not None and not waits_again and phase is Phase.FAILED and not is_ending(before.doc):
            told |= {name: notice[name] for name in ("reason", "message")}  # It failed because it was stopped.
        status |= {name: value for name, value in told.items() if value not in ("", None)}
        status["endTime"] = at
        set_condition(status, "Ready", "False", str(phase), str(told["message"]), at)
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
        if before.gang != self.gang:
            return conflict(self.key, "it was deleted and created anew")
        if not sheet.placements.get(before.uid):
            sheet.counters.move([Move(self.key.namespace, before.charge)])
            leave_gang(sheet, before)
            status = {**status_of(before)}
            if phase_of(before) not in ENDED:
                status |= {"phase": Phase.CANCELLED, "endTime": timestamp(sheet.now)}
            last = with_status(before, status, charge=NOTHING)
            return sheet.remove(self.key, self.origin, last)
        return self._stop(sheet, before)

    def _stop(self, sheet: Sheet, before: Stored) -> Result:
        document = msgspec.json.decode(before.doc)
        metadata = document["metadata"]
        grace = min(self.grace_seconds, metadata.get("deletionGracePeriodSeconds", self.grace_seconds))
        metadata.setdefault("deletionTimestamp", timestamp(sheet.now + timedelta(seconds=grace)))
        metadata["deletionGracePeriodSeconds"] = grace
        status = {**status_of(before), "phase": Phase.TERMINATING}
        if "eviction" in status:
            status["eviction"]["requeue"] = False
        set_condition(
            status, "Terminating", "True", "UserRequested", "Graceful termination in progress", timestamp(sheet.now)
        )
        sheet.place([replace(one, wanted=False) for one in sheet.placements[before.uid]])
        after = replace(with_status(before, status), doc=encode(document))
        return sheet.put(after, self.origin)


# Helpers of the commands.


def _is_claimed(sheet: Sheet, part: Placement) -> bool:
    room = sheet.nodes.get(part.node)
    return room is not None and room.claim is not None


def _epoch_seconds(text: str, otherwise: datetime) -> float:
    return (datetime.fromisoformat(text) if text else otherwise).timestamp()


def phase_of(one: Stored) -> Phase:
    return Phase(one.fields.get("status.phase", Phase.PENDING))


def waits_no_more(one: Stored) -> Refusal | None:
    """Why what was to be placed, or to be told why it waits, is left as it is."""
    if (phase := one.fields.get("status.phase", Phase.PENDING)) != Phase.PENDING:
        return Refusal(Code.STALE, f"{one.key.name} is {phase}, not Pending")
    return None


def status_of(one: Stored) -> dict[str, Any]:
    return _decode_status(one.status)


def unchanged(one: Stored) -> Written:
    return Written(one.key, one.doc, one.status, one.revision)


def set_condition(status: dict[str, Any], name: str, value: str, reason: str, message: str, at: str) -> None:
    """Set a condition; its transition time moves only when its value does."""
    condition = {"type": name, "status": value, "reason": reason, "lastTransitionTime": at}
    if message:
        condition["message"] = message
    conditions = []
    for one in status.get("conditions", ()):
        if one["type"] != name:
            conditions.append(one)
        elif one["status"] == value:
            condition["lastTransitionTime"] = one.get("lastTransitionTime", at)
    status["conditions"] = [*conditions, condition]


def take_notice(status: dict[str, Any]) -> dict[str, Any] | None:
    """Remove what an eviction wrote, now that it is over; the notice, where there was one."""
    notice: dict[str, Any] | None = status.pop("eviction", None)
    if notice is not None:
        for name in ("reason", "message"):
            if status.get(name) == notice[name]:
                del status[name]
        drop_conditions(status, "Terminating")
    return notice


def take_lost(status: dict[str, Any]) -> bool:
    """Remove that its node is lost, now that more is known; whether it was said."""
    if not any(one["type"] == Stopped.NODE_LOST for one in status.get("conditions", ())):
        return False
    drop_conditions(status, Stopped.NODE_LOST)
    if status.get("reason") == Stopped.NODE_LOST and "eviction" not in status:
        for name in ("reason", "message"):
            status.pop(name, None)
    return True


def set_frozen(status: dict[str, Any], node: str, frozen: bool, at: str) -> None:
    """That it stands still on a node, or goes on there. It is told of for as long as it does so anywhere."""
    for one in status.get("nodes", ()):
        if one["name"] == node and frozen:
            one["frozen"] = True
        elif one["name"] == node:
            one.pop("frozen", None)
    still = [one["name"] for one in status.get("nodes", ()) if one.get("frozen")]
    if not still:
        take_frozen(status)
        return
    where = still[0] if len(still) == 1 else f"{len(still)} of its nodes"
    message = f"its account spends too fast: it stands still on {where}, and goes on once more may be spent"
    set_condition(status, FROZEN, "True", FROZEN, message, at)
    if "eviction" not in status:
        status |= {"reason": FROZEN, "message": message}


def take_frozen(status: dict[str, Any]) -> None:
    """Remove that it stands still."""
    if not any(one["type"] == FROZEN for one in status.get("conditions", ())):
        return
    drop_conditions(status, FROZEN)
    for one in status.get("nodes", ()):
        one.pop("frozen", None)
    if status.get("reason") == FROZEN:
        for name in ("reason", "message"):
            status.pop(name, None)


def requeued_status(status: dict[str, Any], why: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Waiting again: nothing of where it ran is left, but why it does not."""
    for name in ("nodeName", "nodeId", "nodes", "startTime", "allocatedResources", "scheduledTime"):
        status.pop(name, None)
    drop_conditions(status, "Ready", "Terminating")
    status |= {name: why[name] for name in ("reason", "message") if why[name]}
    set_condition(status, "Scheduled", "False", why["reason"] or "Requeued", why["message"], at)
    return status


def drop_conditions(status: dict[str, Any], *names: str) -> None:
    status["conditions"] = [one for one in status.get("conditions", ()) if one["type"] not in names]


def with_status(
    before: Stored, status: dict[str, Any], *, node: str | None = None, charge: Charge | None = None
) -> Stored:
    node = before.fields.get("spec.nodeName", "") if node is None else node
    # What has ended is bound to no node any more, and still says where it ran.
    ran_on = status.get("nodeName", "")
    fields = {**before.fields, "status.phase": status["phase"], "status.nodeName": ran_on, "spec.nodeName": node}
    charge = before.charge if charge is None else charge
    # Spelled out: replace() would cost more than everything else here.
    return Stored(
        before.key, before.uid, before.tenant, before.labels, fields, before.doc, encode(status), charge, before.gang
    )


def leave_gang(sheet: Sheet, one: Stored) -> None:
    key = (one.key.namespace, one.gang)
    if one.gang and key in sheet.gangs and phase_of(one) not in ENDED:
        row = sheet.gangs[key]
        sheet.set_gang(key, replace(row, members=max(0, row.members - 1)))


# Verbs.


async def report(office: Office, command: Report) -> Reply:
    return await office.binding.submit(command, command.key.namespace)
