"""Reports of nodes on allocations: that they run, or how they ended.

Nodes and bound quota are released only when the work is confirmed gone. The first failure of a multi-node allocation or
a gang stops the rest of it, unless its spec has `onMemberFailure: wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import conflict, not_found
from bursar.commands.objects.removal import remove
from bursar.commands.objects.status import set_condition, status_of, unchanged
from bursar.commands.workloads.allocation import (
    PLACED,
    failure_document,
    failure_in,
    leave_gang,
    phase_of,
    request_in,
    requeued_status,
    set_frozen,
    set_shortfall,
    take_frozen,
    take_lost,
    take_notice,
    take_shortfall,
    with_status,
)
from bursar.commands.workloads.stop import members_of, stop_members, with_stop_notice
from bursar.core.batch.placement_billing import settle
from bursar.core.batch.unit_of_work import UnitOfWork, begin_usage, end_usage
from bursar.core.nodes.bind_check import unplace
from bursar.core.nodes.eviction import Failure, Notice, ended_as, member_notice
from bursar.core.nodes.node import Placement
from bursar.core.objects.allocation import ENDED, NEXT, GangKey, Phase
from bursar.core.objects.charge import NOTHING, unbound
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.quota import Move
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.shared.document import is_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Command):
    """A node's report on an allocation that is bound to it: that it runs, or how it ended."""

    phase: Phase
    uid: str = ""  # the expected allocation, in case another one has the name now
    node: str = ""  # the reporting node; empty for an administrator, who reports for all nodes
    epoch: int | None = None  # the placement; a report on another epoch is stale
    stopped: bool = False  # whether it ended because it was stopped; if it is being deleted, it counts as cancelled
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    measured: int | None = None  # the microseconds that it ran on that node
    frozen: bool | None = None  # whether it is frozen on that node; None: unknown
    expected: int | None = None
    gang: str = ""
    unless_complete: bool = False  # only if its gang, which waited too long for members, is still incomplete

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang): 0} if self.gang else {}

    def placed(self, batch: UnitOfWork) -> Iterable[Key]:
        """The placements of the rest of its gang as well, because a failure stops them."""
        before = batch.objects.get(self.key)
        stops = self.phase is Phase.FAILED and before is not None and phase_of(before) in PLACED
        return (self.key, *members_of(batch, self.gangs())) if stops else (self.key,)

    def meters(self, batch: UnitOfWork) -> Iterable[str]:
        before = batch.objects.get(self.key)
        if before is None or phase_of(before) is self.phase or not (self.phase is Phase.RUNNING or self.measured):
            return ()
        return [one.node for one in batch.placements.get(before.uid, ())]

    def leases(self, batch: UnitOfWork) -> Iterable[int]:
        before = batch.objects.get(self.key)
        if before is None or (self.phase not in ENDED and self.phase is not Phase.PENDING):
            return ()
        there = batch.placements.get(before.uid, ())
        return [one.lease for one in there if one.lease and self.node in ("", one.node)]

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self._refusal(batch, before):
            return refusal
        if self.stopped and is_ending(before.doc):
            return replace(self, stopped=False, phase=Phase.CANCELLED).decide(batch)
        current = phase_of(before)
        if current is not self.phase and self.phase not in NEXT[current]:
            return Refusal(Code.IMMUTABLE, f"{self.key.name} is {current} and cannot become {self.phase}")
        if current is not self.phase and (self.phase in ENDED or self.phase is Phase.PENDING):
            return self._end(batch, before)
        known, status = status_of(before), self._progress(before, timestamp(batch.now))
        if status == known:
            return unchanged(before)  # A repeated report is no change.
        if "startTime" in status and "startTime" not in known:
            self._begin(batch, before.uid, known)
        return batch.put(with_status(before, status), self.origin)

    def _refusal(self, batch: UnitOfWork, before: Stored) -> Refusal | None:
        if before.uid != (self.uid or before.uid) or before.gang != self.gang:
            return conflict(self.key, "it was deleted and created again")
        if self.expected is not None and self.expected != before.revision:
            return conflict(self.key)
        row = batch.gangs.get((self.key.namespace, self.gang))
        if self.unless_complete and row is not None and row.members >= row.min_members:
            return Refusal(Code.STALE, f"the gang of {self.key.name} is complete now")
        if self.epoch is not None and self.epoch != (now := self._epoch(batch, before)):
            return Refusal(Code.STALE, f"{self.key.name} is in epoch {now}; the report is for epoch {self.epoch}")
        bound = {one.node for one in batch.placements.get(before.uid, ())}
        if self.node and self.node not in bound and phase_of(before) is not self.phase:
            return Refusal(Code.FORBIDDEN, f"{self.key.name} is not bound to node {self.node}")
        return None

    def _epoch(self, batch: UnitOfWork, before: Stored) -> int:
        """The epoch of its placement, or of its last one."""
        for one in batch.placements.get(before.uid, ()):
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

    def _begin(self, batch: UnitOfWork, uid: str, status: Mapping[str, Any]) -> None:
        """Begin counting the usage of all parts, with the first report that one runs. The usage of a claimed node is
        counted by its claim."""
        for part in batch.placements.get(uid, ()):
            if not _is_claimed(batch, part):
                begin_usage(batch, part, status.get("user", ""))

    def _end(self, batch: UnitOfWork, before: Stored, *, stops_others: bool = True) -> Result:
        """End work that is confirmed gone: release nodes and quota, and settle its leases.

        A node reports for itself only: an allocation on several nodes ends with the report of the last one.
        """
        gone = batch.lift(before.uid, self.node)
        for capacity in unplace(batch.nodes, request_in(before.doc), gone):
            batch.use_node(capacity)
        settle(batch.ledger, gone, self.measured)
        self._end_usage(batch, before, gone)
        notice = self._notice(before) if gone and stops_others else None
        stop_id = batch.new_uid("stop") if notice is not None else ""
        if batch.placements.get(before.uid):
            after = with_status(before, self._ended_here(before, timestamp(batch.now)))
            if notice is not None:
                after = with_stop_notice(batch, after, notice, stop_id, requeue=False)
            result: Result = batch.put(after, self.origin)
        else:
            result = self._end_whole(batch, before)
        if notice is not None:
            for gang in self.gangs():
                stop_members(batch, gang, notice, stop_id, self.origin, requeue=False)
        return result

    def _notice(self, before: Stored) -> Notice | None:
        """The stop notice for the rest of it if it failed by itself, and not because it was stopped."""
        if self.phase is not Phase.FAILED or phase_of(before) not in PLACED or is_ending(before.doc):
            return None
        if waits_for_members(before.doc):
            return None
        where = _reporting_node(self.node, status_of(before))
        return member_notice(self.key.name, self._failure_on(where), self.gang)

    def _failure_on(self, node: str) -> Failure:
        return Failure(node, self.exit_code, self.reason, self.message)

    def _end_whole(self, batch: UnitOfWork, before: Stored) -> Result:
        """End the whole allocation, after the report of its last node."""
        status = self._final(before, timestamp(batch.now))
        if status["phase"] is not Phase.PENDING and self.measured is not None and "startTime" not in status:
            # Its end is the first report that it ran, for the time that its node measured.
            status["startTime"] = timestamp(batch.now - timedelta(microseconds=self.measured))
        requeued = status["phase"] is Phase.PENDING
        charge = unbound(before.charge) if requeued else NOTHING
        batch.counters.move([Move(self.key.namespace, before.charge, charge)])
        last = with_status(before, status, node="", charge=charge)
        if not requeued:
            leave_gang(batch, before)
        if is_ending(before.doc):
            return remove(batch, before, self.origin, last)
        return batch.put(last, self.origin)

    def _end_usage(self, batch: UnitOfWork, before: Stored, gone: Iterable[Placement]) -> None:
        """End counting its usage. If its end is the first report that it ran, the node's measurement counts."""
        status = status_of(before)
        for part in gone:
            if self.measured and "startTime" not in status and not _is_claimed(batch, part):
                longest = batch.now.timestamp() - _epoch_seconds(status.get("scheduledTime", ""), batch.now)
                begin_usage(batch, part, status.get("user", ""), seconds_ago=min(self.measured / 1e6, longest))
            end_usage(batch, part.uid, part.node, self.phase, self.reason or status.get("reason", ""))

    def _ended_here(self, before: Stored, at: str) -> dict[str, Any]:
        status = status_of(before)
        if any(one.get("frozen") for one in status["nodes"]):
            set_frozen(status, self.node, False, at)
        if any(one.get("unpaid") for one in status["nodes"]):
            set_shortfall(status, self.node, None, at)
        self._note_end(status)
        return status

    def _note_end(self, status: dict[str, Any]) -> None:
        """Write how it ended on the node, and note the first failure."""
        where = _reporting_node(self.node, status)
        told = {"phase": self.phase, "exitCode": self.exit_code, "reason": self.reason, "message": self.message}
        shown = {name: value for name, value in told.items() if value not in ("", None)}
        status["nodes"] = [{**node, **shown} if node["name"] == where else node for node in status["nodes"]]
        if self.phase is Phase.FAILED and "failure" not in status and "eviction" not in status:
            status["failure"] = failure_document(self._failure_on(where))

    def _final(self, before: Stored, at: str) -> dict[str, Any]:
        status = status_of(before)
        alone = len(status.get("nodes", ())) < 2
        if _reporting_node(self.node, status) and (not alone or self.phase is Phase.FAILED):
            self._note_end(status)
        notice = take_notice(status)
        take_lost(status)
        take_frozen(status)
        take_shortfall(status)
        waits_again = notice is not None and notice["requeue"]
        earlier = {Phase(node["phase"]) for node in status.get("nodes", ()) if "phase" in node}
        phase = ended_as(self.phase, earlier, evicted=waits_again, deleted=is_ending(before.doc))
        status["phase"] = phase
        told = {"reason": self.reason, "message": self.message, "exitCode": self.exit_code}
        if notice is not None:
            # A node that only reports the end repeats the reason of the notice.
            told |= {name: "" for name in ("reason", "message") if told[name] == notice[name]}
        if phase is Phase.PENDING:
            return requeued_status(status, notice or told, at)
        if notice is not None and not waits_again and phase is Phase.FAILED and not is_ending(before.doc):
            told |= {name: notice[name] for name in ("reason", "message")}  # It failed because it was stopped.
        first = failure_in(status)
        if phase is Phase.FAILED and first is not None and not first.allocation:
            words = first.words_alone if alone else first.words
            told = {"reason": first.reason, "message": words, "exitCode": first.exit_code}
        status |= {name: value for name, value in told.items() if value not in ("", None)}
        status["endTime"] = at
        set_condition(status, "Ready", "False", str(phase), str(told["message"]), at)
        return status


# Decoding.


def _reporting_node(node: str, status: Mapping[str, Any]) -> str:
    """The node of a report; an administrator names none, which is clear only for an allocation on one node."""
    nodes = status.get("nodes", ())
    return node or (nodes[0]["name"] if len(nodes) == 1 else "")


class _Spec(msgspec.Struct, rename="camel"):
    on_member_failure: str = ""


class _Document(msgspec.Struct):
    spec: _Spec


_decode = msgspec.json.Decoder(_Document).decode


def waits_for_members(doc: bytes) -> bool:
    """Whether the rest of a stored allocation continues when one node or member fails."""
    return b'"onMemberFailure"' in doc and _decode(doc).spec.on_member_failure == "wait"


def _is_claimed(batch: UnitOfWork, part: Placement) -> bool:
    capacity = batch.nodes.get(part.node)
    return capacity is not None and capacity.claim is not None


def _epoch_seconds(text: str, otherwise: datetime) -> float:
    return (datetime.fromisoformat(text) if text else otherwise).timestamp()
