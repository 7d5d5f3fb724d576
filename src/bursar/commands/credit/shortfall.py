"""Notes in an allocation's status on leases that could not be extended, with the time until which they are paid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.command import Command, Result
from bursar.commands.objects.status import status_of, unchanged
from bursar.commands.workloads.allocation import PLACED, phase_of, set_shortfall, with_status
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.lease import Grant
from bursar.core.credit.shortfall import Shortfall, shortfall_of
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin
from bursar.core.values.instant import timestamp
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Code, Refusal

ACTOR = "system:credit"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteShortfall(Command):
    """Note until when an allocation is paid on a node that was refused more time; None removes the note."""

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
            return Refusal(Code.STALE, f"{self.key.name} no longer exists")
        known, status = status_of(before), status_of(before)
        if phase_of(before) not in PLACED or known.get("epoch") != self.epoch:
            return Refusal(Code.STALE, f"{self.key.name} is no longer placed in epoch {self.epoch}")
        set_shortfall(status, self.node, self.short, timestamp(batch.now))
        return unchanged(before) if status == known else batch.put(with_status(before, status), self.origin)


def granted_shortfall(grant: Grant) -> Shortfall | None:
    return shortfall_of(grant.paid_until // MICROS, grant.reason if grant.final else "")


def note_of(key: Key, uid: str, node: str, epoch: int, short: Shortfall | None) -> NoteShortfall:
    origin = Origin(ACTOR, "grant") if short is None else Origin(ACTOR, "refuse", short.code)
    return NoteShortfall(key=key, uid=uid, node=node, epoch=epoch, short=short, origin=origin)
