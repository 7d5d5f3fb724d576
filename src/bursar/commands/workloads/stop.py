"""Stopping placed work: the stop notice in its status, which its nodes get as a directive, and its deadline."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import msgspec

from bursar.commands.command import Result
from bursar.commands.objects.status import set_condition, status_of, unchanged
from bursar.commands.workloads.allocation import PLACED, failure_document, phase_of, with_status
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import GangKey, Phase
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace


def members_of(batch: UnitOfWork, gangs: Iterable[GangKey]) -> list[Key]:
    return [one.key for gang in gangs for one in batch.members(*gang)]


def stop_members(
    batch: UnitOfWork, gang: GangKey, notice: Notice, id_: str, origin: Origin, *, requeue: bool = True
) -> None:
    """Stop the placed members of a gang, including those placed since the decision."""
    for one in batch.members(*gang):
        if phase_of(one) in PLACED:
            stop(batch, one, notice, id_, origin, requeue=requeue)


def stop(
    batch: UnitOfWork, before: Stored, notice: Notice, id_: str, origin: Origin, *, requeue: bool = True
) -> Result:
    """Stop placed work. A repetition keeps the earlier deadline and the first reason."""
    after = with_stop_notice(batch, before, notice, id_, requeue=requeue)
    return unchanged(before) if after is before else batch.put(after, origin)


def with_stop_notice(batch: UnitOfWork, before: Stored, notice: Notice, id_: str, *, requeue: bool = True) -> Stored:
    """The allocation with a stop notice; unchanged if it has one with the same or an earlier deadline."""
    deadline = timestamp(batch.now + timedelta(seconds=notice.grace_seconds))
    status = status_of(before)
    told: dict[str, Any] | None = status.get("eviction")
    standing = standing_deadline(before)
    if told is not None and standing <= deadline:
        return before
    if told is not None:
        status["eviction"] = {**told, "deadline": deadline, "gracePeriodSeconds": notice.grace_seconds}
        return with_status(before, status)
    deleted = bool(standing)  # It is being deleted, and must not be requeued.
    status["eviction"] = {
        "id": id_,
        "reason": notice.reason,
        "rule": notice.rule,
        "by": notice.by,
        "message": notice.message,
        "gracePeriodSeconds": notice.grace_seconds,
        "deadline": min(deadline, standing) if deleted else deadline,
        "requeue": requeue and not deleted,
    }
    if not deleted:
        status |= {"phase": Phase.TERMINATING, "reason": notice.reason, "message": notice.message}
        if notice.failure is not None:
            status.setdefault("failure", failure_document(notice.failure))
        set_condition(status, "Terminating", "True", notice.reason, notice.message, timestamp(batch.now))
        batch.place([replace(one, wanted=False) for one in batch.placements[before.uid]])
    return with_status(before, status)


class _Deletion(msgspec.Struct, rename="camel"):
    deletion_timestamp: str = ""


class _Metadata(msgspec.Struct):
    metadata: _Deletion


_deletion = msgspec.json.Decoder(_Metadata)


def standing_deadline(one: Stored) -> str:
    """The deadline of its stop; empty if it has none. Times in UTC, to the second, sort as text."""
    told = (status_of(one).get("eviction") or {}).get("deadline", "")
    deleted = _deletion.decode(one.doc).metadata.deletion_timestamp
    return min(told, deleted) if told and deleted else told or deleted
