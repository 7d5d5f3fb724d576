"""Stopping what is placed, so that it waits again.

An evicted allocation is told to end by a deadline. It keeps what it was accepted for and the time it was submitted; its
nodes and its bound quota come back when the last of its nodes has said that it is gone (`Report`), and not before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from bursar.core.allocation import Phase
from bursar.core.charge import Charge
from bursar.core.eviction import STOPPABLE, Notice
from bursar.core.object import Key, Origin, Stored
from bursar.core.refusal import Code, Refusal
from bursar.core.sheet import Sheet
from bursar.ops.allocation import phase_of, set_condition, status_of, unchanged, with_status
from bursar.ops.command import Command, Reply, Result
from bursar.ops.object import conflict, not_found
from bursar.ops.office import Office, new_uid, timestamp
from bursar.store import object as object_store
from bursar.store.request import Claim

PLACED = frozenset({Phase.SCHEDULED, Phase.RUNNING})


def _new_id() -> str:
    return new_uid("preempt")


@dataclass(frozen=True, slots=True)
class Victim:
    """An allocation that has to go, and what it is told."""

    key: Key
    uid: str
    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Command):
    """Stop a placed allocation; `others`, such as the rest of its gang, are stopped with it where they still run."""

    notice: Notice
    uid: str = ""  # the allocation that is meant, should the name have been given to another
    others: tuple[Victim, ...] = ()
    id: str = field(default_factory=_new_id)

    def objects(self) -> Iterable[Key]:
        return (self.key, *(one.key for one in self.others))

    def charges(self, _: Sheet) -> Iterable[tuple[str, Charge]]:
        return ()  # Nothing comes back before it is gone.

    def decide(self, sheet: Sheet) -> Result:
        before = sheet.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if self.uid not in ("", before.uid):
            return conflict(self.key, f"its uid is {before.uid}, not {self.uid}")
        if phase_of(before) not in STOPPABLE:
            return not_placed(before)
        for other in self.others:
            stop_if_placed(sheet, other, self.id, self.origin)
        return stop(sheet, before, self.notice, self.id, self.origin)


@dataclass(frozen=True, slots=True)
class Nominee:
    """A pending allocation, and the nodes whose room is held for it until then."""

    key: Key
    uid: str
    nodes: tuple[str, ...]
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(Command):
    """Stop victims and hold their room for a pending allocation, the nominee: all of it, or nothing.

    `key` is the nominee's; `with_it` are the others of its gang. The nomination is written with the evictions, so
    whoever leads next does not evict again. Victims that ended, or are ending, since the plan was made are skipped.
    """

    uid: str
    nominated: tuple[str, ...]  # the nodes whose room is held for it
    until: datetime
    victims: tuple[Victim, ...]
    with_it: tuple[Nominee, ...] = ()
    id: str = field(default_factory=_new_id)

    def objects(self) -> Iterable[Key]:
        return (self.key, *(one.key for one in self.with_it), *(one.key for one in self.victims))

    def charges(self, _: Sheet) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, sheet: Sheet) -> Result:
        nominees = (Nominee(self.key, self.uid, self.nominated, self.until), *self.with_it)
        for one in nominees:
            if refusal := _waits_no_more(sheet, one):
                return refusal
        for victim in self.victims:
            there = sheet.objects.get(victim.key)
            if there is not None and there.uid != victim.uid:
                return Refusal(Code.STALE, f"{victim.key.name} was deleted and created anew")
        for victim in self.victims:
            stop_if_placed(sheet, victim, self.id, self.origin)
        writes = [_nominate(sheet, one, self.origin) for one in nominees]
        return writes[0]


def _waits_no_more(sheet: Sheet, one: Nominee) -> Refusal | None:
    there = sheet.objects.get(one.key)
    if there is None or there.uid != one.uid:
        return Refusal(Code.STALE, f"{one.key.name}, for which room was to be made, is gone")
    if phase_of(there) is not Phase.PENDING:
        return Refusal(Code.STALE, f"{one.key.name} is {phase_of(there)}, not Pending")
    return None


def _nominate(sheet: Sheet, one: Nominee, origin: Origin) -> Result:
    before, until = sheet.objects[one.key], timestamp(one.until)
    status = {**status_of(before), "nominated": [{"node": node, "until": until} for node in one.nodes]}
    return sheet.put(with_status(before, status), origin)


def not_placed(one: Stored) -> Refusal:
    return Refusal(
        Code.STALE,
        f"{one.key.name} is {phase_of(one)}: there is nothing to stop",
        "Only what is Scheduled or Running can be preempted; delete what should not run at all.",
    )


def stop_if_placed(sheet: Sheet, victim: Victim, id_: str, origin: Origin) -> None:
    there = sheet.objects.get(victim.key)
    if there is not None and there.uid == victim.uid and phase_of(there) in PLACED:
        stop(sheet, there, victim.notice, id_, origin)


def stop(sheet: Sheet, before: Stored, notice: Notice, id_: str, origin: Origin) -> Result:
    """Tell what is placed to end. Being told twice is harmless: the earlier deadline stands, and the first reason."""
    deadline = timestamp(sheet.now + timedelta(seconds=notice.grace_seconds))
    status = status_of(before)
    told: dict[str, Any] | None = status.get("eviction")
    standing = standing_deadline(before)
    if told is not None and standing <= deadline:
        return unchanged(before)
    if told is not None:
        status["eviction"] = {**told, "deadline": deadline, "gracePeriodSeconds": notice.grace_seconds}
        return sheet.put(with_status(before, status), origin)
    deleted = bool(standing)  # Who deleted it is waited for by the deletion; it does not come back.
    status["eviction"] = {
        "id": id_,
        "reason": notice.reason,
        "rule": notice.rule,
        "by": notice.by,
        "message": notice.message,
        "gracePeriodSeconds": notice.grace_seconds,
        "deadline": min(deadline, standing) if deleted else deadline,
        "requeue": not deleted,
    }
    if not deleted:
        status |= {"phase": Phase.TERMINATING, "reason": notice.reason, "message": notice.message}
        set_condition(status, "Terminating", "True", notice.reason, notice.message, timestamp(sheet.now))
        sheet.place([replace(one, wanted=False) for one in sheet.placements[before.uid]])
    return sheet.put(with_status(before, status), origin)


class _Deletion(msgspec.Struct, rename="camel"):
    deletion_timestamp: str = ""


class _Metadata(msgspec.Struct):
    metadata: _Deletion


_deletion = msgspec.json.Decoder(_Metadata)


def standing_deadline(one: Stored) -> str:
    """By when it was told to end; empty when it was not. Times in UTC, to the second, sort as text."""
    told = (status_of(one).get("eviction") or {}).get("deadline", "")
    deleted = _deletion.decode(one.doc).metadata.deletion_timestamp
    return min(told, deleted) if told and deleted else told or deleted


# Verbs.


async def evict(
    office: Office,
    one: Stored,
    notice: Notice,
    origin: Origin,
    *,
    claim: Claim | None = None,
    dry_run: bool = False,
) -> Reply:
    """Stop an allocation, and with it whatever of its gang is placed: a gang runs as a whole or not at all."""
    others = await _rest_of_gang(office, one, notice)
    command = Evict(key=one.key, uid=one.uid, notice=notice, others=others, origin=origin, claim=claim)
    lane = office.trying if dry_run else office.binding
    return await lane.submit(command, one.key.namespace)


async def _rest_of_gang(office: Office, one: Stored, notice: Notice) -> tuple[Victim, ...]:
    if not one.gang:
        return ()
    async with office.database.reader() as db:
        keys = await object_store.load_gang_members(db, [(one.key.namespace, one.gang)])
        members = await object_store.load(db, keys)
    rest = (member for key, member in sorted(members.items()) if key != one.key)
    return tuple(Victim(member.key, member.uid, notice) for member in rest if phase_of(member) in PLACED)


async def preempt(office: Office, commands: Sequence[Preempt]) -> list[Reply]:
    """Make room for each nominee. What went stale comes back with its reason, and has changed nothing."""
    return list(await asyncio.gather(*(office.binding.submit(command, command.key.namespace) for command in commands)))
