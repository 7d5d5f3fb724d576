"""Commands on allocations: release, and the parts of their status that several commands change.

Nodes and bound quota are released only when the work is confirmed gone. Binding is in bind.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from bursar.commands.command import Command, Result
from bursar.commands.objects.gate import awaits_approval, withdrawn
from bursar.commands.objects.object import NO_PRECONDITIONS, DeletePreconditions, ObjectDeletion, conflict, not_found
from bursar.commands.objects.removal import remove
from bursar.commands.objects.status import drop_conditions, set_condition, status_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import FROZEN
from bursar.core.credit.shortfall import OUT_OF_CREDIT, Shortfall, end_words
from bursar.core.nodes.eviction import EvictionReason as Stopped
from bursar.core.nodes.eviction import Failure
from bursar.core.objects.allocation import ENDED, GangKey, Phase, ResourceRequest
from bursar.core.objects.approval import DUE_FIELD
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.objects.object import Stored
from bursar.core.quota.quota import Move
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.allocation import Allocation, request_of
from bursar.wire.shared.document import encode

GRACE_SECONDS = 30

# Status fields that belong to one placement.
OF_A_PLACEMENT = (
    "nodeName", "nodeId", "nodes", "startTime", "allocatedResources", "scheduledTime", "failure", "rank", "size",
)  # fmt: skip

PLACED = frozenset({Phase.SCHEDULED, Phase.RUNNING})

_decode = msgspec.json.Decoder(Allocation).decode


def request_in(doc: bytes) -> ResourceRequest:
    return request_of(_decode(doc))


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Command):
    """Delete an allocation: at once if nothing runs, else after its nodes have confirmed that they stopped it."""

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
            return conflict(self.key, "it was deleted and created again")
        if not batch.placements.get(before.uid):
            batch.counters.move([Move(self.key.namespace, before.charge)])
            leave_gang(batch, before)
            status = {**status_of(before)}
            if phase_of(before) not in ENDED:
                status |= {"phase": Phase.CANCELLED, "endTime": timestamp(batch.now)}
            last = with_status(before, status, charge=NOTHING)
            if awaits_approval(before):
                last = withdrawn(last, batch.now)
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


def release_allocation(deletion: ObjectDeletion) -> Release:
    grace, before = deletion.grace_seconds, deletion.before
    return Release(
        key=before.key, origin=deletion.origin, idempotency_key=deletion.idempotency_key,
        preconditions=deletion.preconditions, grace_seconds=GRACE_SECONDS if grace is None else grace, gang=before.gang,
    )  # fmt: skip


# Statuses and refusals.


def phase_of(one: Stored) -> Phase:
    return Phase(one.fields.get("status.phase", Phase.PENDING))


def waits_no_more(one: Stored) -> Refusal | None:
    """The refusal of changing an allocation that is no longer pending."""
    if (phase := one.fields.get("status.phase", Phase.PENDING)) != Phase.PENDING:
        return Refusal(Code.STALE, f"{one.key.name} is {phase}, not Pending")
    return None


def failure_document(failure: Failure) -> dict[str, Any]:
    """The first failure, as in `status.failure`."""
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
    """Remove and return the stop notice, if there is one, after the eviction is complete."""
    notice: dict[str, Any] | None = status.pop("eviction", None)
    if notice is not None:
        for name in ("reason", "message"):
            if status.get(name) == notice[name]:
                del status[name]
        drop_conditions(status, "Terminating")
    return notice


def take_lost(status: dict[str, Any]) -> bool:
    """Remove the note that its node is lost; whether there was one."""
    if not any(one["type"] == Stopped.NODE_LOST for one in status.get("conditions", ())):
        return False
    drop_conditions(status, Stopped.NODE_LOST)
    if status.get("reason") == Stopped.NODE_LOST and "eviction" not in status:
        for name in ("reason", "message"):
            status.pop(name, None)
    return True


def set_frozen(status: dict[str, Any], node: str, frozen: bool, at: str) -> None:
    """Note that it is frozen on a node, or resumed there. The condition stays while it is frozen on any node."""
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
    message = f"its account spends too fast: it is frozen on {where}, and resumes once the account may spend more"
    set_condition(status, FROZEN, "True", FROZEN, message, at)
    if "eviction" not in status:
        status |= {"reason": FROZEN, "message": message}


def set_shortfall(status: dict[str, Any], node: str, short: Shortfall | None, at: str) -> None:
    """Note that its lease on a node is refused more time, or extended again. The message shows the earliest end."""
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
    """Remove the notes that its leases are not extended."""
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
    """Remove the notes that it is frozen."""
    if not any(one["type"] == FROZEN for one in status.get("conditions", ())):
        return
    drop_conditions(status, FROZEN)
    for one in status.get("nodes", ()):
        one.pop("frozen", None)
    if status.get("reason") == FROZEN:
        for name in ("reason", "message"):
            status.pop(name, None)


def requeued_status(status: dict[str, Any], why: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The status of a requeued allocation: without its placement, but with the reason for its end."""
    for name in OF_A_PLACEMENT:
        status.pop(name, None)
    status["restarts"] = status.get("restarts", 0) + 1
    status["lastRestart"] = {"reason": why["reason"] or "Requeued", "time": at}
    drop_conditions(status, "Ready", "Terminating")
    status |= {name: why[name] for name in ("reason", "message") if why[name]}
    set_condition(status, "Scheduled", "False", why["reason"] or "Requeued", why["message"], at)
    return status


def with_status(
    before: Stored, status: dict[str, Any], *, node: str | None = None, charge: Charge | None = None
) -> Stored:
    node = before.fields.get("spec.nodeName", "") if node is None else node
    # An ended allocation is bound to no node, but still shows where it ran.
    ran_on = status.get("nodeName", "")
    fields = {**before.fields, "status.phase": status["phase"], "status.nodeName": ran_on, "spec.nodeName": node}
    if DUE_FIELD in fields and status["phase"] in ENDED:
        del fields[DUE_FIELD]  # Its approval has nothing left to end.
    charge = before.charge if charge is None else charge
    # Not replace(), which would cost more than all else here.
    return Stored(
        before.key, before.uid, before.tenant, before.labels, fields, before.doc, encode(status), charge, before.gang
    )


def leave_gang(batch: UnitOfWork, one: Stored) -> None:
    key = (one.key.namespace, one.gang)
    if one.gang and key in batch.gangs and phase_of(one) not in ENDED:
        row = batch.gangs[key]
        batch.set_gang(key, replace(row, members=max(0, row.members - 1)))
