"""Dry runs: the command that creates allocations to see whether anything refuses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.commands.command import Result
from bursar.commands.objects.object import CreateObject, sight_of, tenant_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.permit import beyond
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearse(CreateObject):
    """Create all of these together, or none. A gang is charged as if it were complete."""

    drafts: tuple[Stored, ...]

    def objects(self) -> Iterable[Key]:
        return ()

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ((one.key.namespace, one.charge) for one in self.drafts)

    def decide(self, batch: UnitOfWork) -> Result:
        if refusal := self._refusal(batch):
            return refusal
        tenant = tenant_of(batch, self.key, self.draft.tenant)
        if not self.admin and (refusal := beyond(batch.tree, tenant, self.asking)):
            return refusal
        if exceeded := batch.counters.move([Move(one.key.namespace, after=one.charge) for one in self.drafts]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        return tuple(batch.put(one, self.origin) for one in self.drafts)
