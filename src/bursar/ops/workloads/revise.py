"""Changing what a pending allocation asks for: how urgent it is, where it waits, how long it runs, what it tolerates.

It keeps its place: the time of its submission stays. The change is judged as a submission is. Once it is placed nothing
of its spec changes any more: its node was told it when it started.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Charge, Facts
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.permit import NOTHING_ASKED, Asking, beyond, too_small
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects.object import ChangeObject, absent_refusal, conflict, not_found, sight_of, submitter
from bursar.ops.runtime.command import Result
from bursar.ops.workloads.allocation import phase_of, status_of
from bursar.wire.kinds.allocation import Allocation, AllocationSpec
from bursar.wire.shared.document import encode, is_ending
from bursar.wire.shared.scheduling import Scheduling

MAY_CHANGE = "priority, priorityClass, queue, ttl and scheduling.tolerations"

_decode = msgspec.json.Decoder(Allocation).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Revise(ChangeObject):
    """Replace a pending allocation by a draft that asks for the same resources otherwise."""

    facts: Facts  # by which quotas recognise it from now on
    wants: tuple[tuple[str, Key], ...] = ()
    asking: Asking = NOTHING_ASKED
    admin: bool = False

    def needs(self) -> Iterable[Key]:
        return (key for _, key in self.wants)

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        if before := batch.objects.get(self.key):
            yield self.key.namespace, before.charge
            yield self.key.namespace, replace(before.charge, facts=self.facts)

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.revision != self.expected:
            return conflict(self.key)
        missing = placed(before) or absent_refusal(batch, self.wants, self.asking)
        if refusal := missing or too_small(batch.tree, self.asking):
            return refusal
        more = beyond(batch.tree, batch.tenant_of(before), self.asking)
        if more is not None and not self.admin:
            return more
        charge = replace(before.charge, facts=self.facts)
        if exceeded := batch.counters.move([Move(self.key.namespace, before.charge, charge)]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        status = self._status(before, exempt=more is not None)
        return batch.put(replace(self.draft, charge=charge, status=encode(status)), self.origin)

    def _status(self, before: Stored, *, exempt: bool) -> dict[str, Any]:
        status = {**status_of(before)}
        status.pop("permittedBy", None)
        return status | ({"permittedBy": submitter(self.origin)} if exempt else {})


def placed(one: Stored) -> Refusal | None:
    """Why nothing of its spec may be changed; None while it is pending."""
    phase = phase_of(one)
    if is_ending(one.doc):
        return Refusal(
            Code.IMMUTABLE, f"allocation {one.key.name!r} is being deleted: its spec cannot be changed any more"
        )
    if phase is Phase.PENDING:
        return None
    return Refusal(
        Code.IMMUTABLE,
        f"allocation {one.key.name!r} is {phase}: its spec cannot be changed after creation, once it is placed",
        f"Delete it and create it anew; labels and annotations may be changed. While Pending, so may {MAY_CHANGE}.",
    )


def revisable(before: Stored, one: Allocation) -> Refusal | None:
    """Why an allocation cannot be changed so; None where it can."""
    if refusal := placed(before):
        return refusal
    if _rest(_decode(before.doc).spec) == _rest(one.spec):
        return None
    return Refusal(
        Code.IMMUTABLE,
        f"the spec of allocation {before.key.name!r} cannot be changed after creation, but for {MAY_CHANGE}",
        "Delete it and create it anew; labels and annotations may be changed.",
    )


def _rest(spec: AllocationSpec) -> Any:
    """All that stays as it is."""
    plain: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(spec, priority=UNSET, priority_class=UNSET, queue=UNSET, ttl=UNSET)
    )
    if isinstance(spec.scheduling, Scheduling):
        plain["scheduling"].pop("tolerations", None)
        if not plain["scheduling"]:
            del plain["scheduling"]
    return plain
