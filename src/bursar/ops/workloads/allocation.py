"""Verbs on allocations: what their nodes report of them, and deleting.

What is bound comes back only when it is confirmed gone. Binding itself is in bind.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import FROZEN
from bursar.core.credit.shortfall import OUT_OF_CREDIT, Shortfall, end_words
from bursar.core.nodes.eviction import EvictionReason as Stopped
from bursar.core.nodes.eviction import Failure
from bursar.core.objects.allocation import ENDED, GangKey, Phase, ResourceRequest
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.objects.object import Stored
from bursar.core.quota.quota import Move
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import NO_PRECONDITIONS, DeletePreconditions, conflict, not_found
from bursar.ops.objects.removal import remove
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Command, Result, Written
from bursar.wire.kinds.allocation import Allocation, request_of
from bursar.wire.shared.document import encode

GRACE_SECONDS = 30

# What a status tells of one placement, and not of the next.
OF_A_PLACEMENT = (
    "nodeName", "nodeId", "nodes", "startTime", "allocatedResources", "scheduledTime", "failure", "rank", "size",
)  # fmt: skip

PLACED = frozenset({Phase.SCHEDULED, Phase.RUNNING})

_decode = msgspec.json.Decoder(Allocation).decode
_decode_status = msgspec.json.Decoder(dict[str, Any]).decode


def request_in(doc: bytes) -> ResourceRequest:
    return request_of(_decode(doc))


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Command):
    """Delete an allocation: at once if nothing runs, else ask its nodes to stop it and wait for their word."""

    grace_seconds: int = GRACE_SECONDS
    preconditions: DeletePreconditions = NO_PRECONDITIONS
    gang: str = ""

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        if before.gang != self.gang:
            return conflict(self.key, "it was deleted and created anew")
        if not batch.placements.get(before.uid):
            batch.counters.move([Move(self.key.namespace, before.charge)])
            leave_gang(batch, before)
            status = {**status_of(before)}
            if phase_of(before) not in ENDED:
                status |= {"phase": Phase.CANCELLED, "endTime": timestamp(batch.now)}
            last = with_status(before, status, charge=NOTHING)
            return remove(batch, before, self.origin, last)
        return self._stop(batch, before)

    def _stop(self, batch: UnitOfWork, before: Stored) -> Result:
        document = msgspec.json.decode(before.doc)
        metadata = document["metadata"]
        grace = min(self.grace_seconds, metadata.get("deletionGracePeriodSeconds", self.grace_seconds))
        metadata.setdefault("deletionTimestamp", timestamp(batch.now + timedelta(seconds=grace)))
        metadata["deletionGracePeriodSeconds"] = grace
        status = {**status_of(before), "phase": Phase.TERMINATING}
        if "eviction" in status:
            status["eviction"]["requeue"] = False
        set_condition(
            status, "Terminating", "True", "UserRequested", "Graceful termination in progress", timestamp(batch.now)
        )
        batch.place([replace(one, wanted=False) for one in batch.placements[before.uid]])
        after = replace(with_status(before, status), doc=encode(document))
        return batch.put(after, self.origin)


# Helpers of the commands.


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


def failure_document(failure: Failure) -> dict[str, Any]:
    """The first failure, as `status.failure` has it."""
    told = {
        "allocation": failure.allocation,
        "node": failure.node,
        "exitCode": failure.exit_code,
        "reason": failure.reason,
        "message": failure.message,
    }
    return {name: value for name, value in told.items() if name == "node" or value not in ("", None)}


def failure_in(status: Mapping[str, Any]) -> Failure | None:
    told = status.get("failure")
    if told is None:
        return None
    reason, message, member = (told.get(name, "") for name in ("reason", "message", "allocation"))
    return Failure(told["node"], told.get("exitCode"), reason, message, member)


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


def set_shortfall(status: dict[str, Any], node: str, short: Shortfall | None, at: str) -> None:
    """That no more of its time is paid for on a node, or that it is again. What ends first is told."""
    for one in status.get("nodes", ()):
        if one["name"] == node and short is not None:
            one |= {"unpaid": short.code, "paidUntil": _second(short.until)}
        elif one["name"] == node:
            _forget(one, "unpaid", "paidUntil")
    short_there = [one for one in status.get("nodes", ()) if one.get("unpaid")]
    if not short_there:
        take_shortfall(status)
        return
    first = min(short_there, key=lambda one: one["paidUntil"])
    message = end_words(first["unpaid"], f"at {first['paidUntil']}")
    set_condition(status, OUT_OF_CREDIT, "True", OUT_OF_CREDIT, message, at)
    if "eviction" not in status:
        status |= {"reason": OUT_OF_CREDIT, "message": message}


def take_shortfall(status: dict[str, Any]) -> None:
    """Remove that no more of its time is paid for."""
    if not any(one["type"] == OUT_OF_CREDIT for one in status.get("conditions", ())):
        return
    drop_conditions(status, OUT_OF_CREDIT)
    for one in status.get("nodes", ()):
        _forget(one, "unpaid", "paidUntil")
    if status.get("reason") == OUT_OF_CREDIT:
        _forget(status, "reason", "message")


def _second(seconds: int) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def _forget(some: dict[str, Any], *names: str) -> None:
    for name in names:
        some.pop(name, None)


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
    for name in OF_A_PLACEMENT:
        status.pop(name, None)
    status["restarts"] = status.get("restarts", 0) + 1
    status["lastRestart"] = {"reason": why["reason"] or "Requeued", "time": at}
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


def leave_gang(batch: UnitOfWork, one: Stored) -> None:
    key = (one.key.namespace, one.gang)
    if one.gang and key in batch.gangs and phase_of(one) not in ENDED:
        row = batch.gangs[key]
        batch.set_gang(key, replace(row, members=max(0, row.members - 1)))
