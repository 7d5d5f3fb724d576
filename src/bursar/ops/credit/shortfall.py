"""Noting in an allocation's status that its lease could not be extended, and until when it is paid; or that it was
extended again. Whoever extends leases compares what was granted with what is noted, so only news are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Grant
from bursar.core.credit.shortfall import Shortfall, shortfall_of
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Command, Reply, Result
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.allocation import PLACED, phase_of, set_shortfall, status_of, unchanged, with_status

ACTOR = "system:credit"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteShortfall(Command):
    """Note until when an allocation is paid on a node, where no more was granted; None where it is paid again."""

    uid: str
    node: str
    epoch: int
    short: Shortfall | None

    def placed(self, _: UnitOfWork) -> Iterable[Key]:
        return ()

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None or before.uid != self.uid:
            return Refusal(Code.STALE, f"{self.key.name} is gone")
        known, status = status_of(before), status_of(before)
        if phase_of(before) not in PLACED or known.get("epoch") != self.epoch:
            return Refusal(Code.STALE, f"{self.key.name} is not placed in epoch {self.epoch} any more")
        set_shortfall(status, self.node, self.short, timestamp(batch.now))
        return unchanged(before) if status == known else batch.put(with_status(before, status), self.origin)


def granted_shortfall(grant: Grant) -> Shortfall | None:
    return shortfall_of(grant.paid_until // MICROS, grant.reason if grant.final else "")


def note_of(key: Key, uid: str, node: str, epoch: int, short: Shortfall | None) -> NoteShortfall:
    origin = Origin(ACTOR, "grant") if short is None else Origin(ACTOR, "refuse", short.code)
    return NoteShortfall(key=key, uid=uid, node=node, epoch=epoch, short=short, origin=origin)


async def note_shortfalls(runtime: Runtime, notes: Sequence[NoteShortfall]) -> list[Reply | BaseException]:
    """Save all of them, each answered by its reply or by what went wrong. They go by the lane of changes: nothing that
    can run waits for them."""
    taken = (runtime.changing.submit(one, one.key.namespace) for one in notes)
    return await asyncio.gather(*taken, return_exceptions=True)
