"""A rehearsal of creating allocations: everything that would refuse them is asked, and nothing is kept.

It goes through the lane of dry runs, so names that exist and limits that have no room are those of this moment. Names
do not matter: what is tried out may be called like something that is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.permit import beyond, together
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import CreateObject, sight_of, tenant_of
from bursar.ops.runtime.command import Reply, Result
from bursar.ops.runtime.runtime import Runtime


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


async def rehearse(runtime: Runtime, creations: Sequence[CreateObject], tenant: str) -> Refusal | None:
    """Why these could not be created together now; None when they could."""
    first = creations[0]
    # A uid is a name that nothing has.
    drafts = tuple(replace(one.draft, key=Key(one.key.kind, one.key.namespace, one.draft.uid)) for one in creations)
    command = Rehearse(
        key=drafts[0].key,
        origin=first.origin,
        draft=drafts[0],
        drafts=drafts,
        wants=tuple(dict.fromkeys(want for one in creations for want in one.wants)),
        subject=first.subject,
        seen_tenant=first.seen_tenant,
        asking=together(one.asking for one in creations),
        admin=first.admin,
    )
    reply: Reply = await runtime.trying.submit(command, tenant)
    return reply if isinstance(reply, Refusal) else None
