"""Changes of a pending allocation's spec: priority, queue, ttl, tolerations.

It keeps its submission time, and with it its place among equals. The change is validated like a submission. Once it is
placed only `onMemberFailure` may change, which is read when a member fails: its node got all else when it started.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import (
    ChangeObject,
    ObjectChange,
    absent_refusal,
    change_object,
    changed_draft,
    conflict,
    not_found,
    sight_of,
    submitter,
)
from bursar.commands.objects.status import status_of
from bursar.commands.workloads.allocation import phase_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.objects.charge import Charge, Facts
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.permit import NOTHING_ASKED, Asking, beyond, too_small
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.allocation import GANG_SIZE, MAX_WAIT, Allocation, AllocationSpec, asking_of, facts_of, gang_of
from bursar.wire.kinds.queue import QUEUE
from bursar.wire.shared.document import encode, is_ending
from bursar.wire.shared.scheduling import Scheduling

MAY_CHANGE = "priority, priorityClass, queue, ttl, onMemberFailure and scheduling.tolerations"
PLACED_MAY_CHANGE = "onMemberFailure"  # it is read when a node or a member fails

_decode = msgspec.json.Decoder(Allocation).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Revise(ChangeObject):
    """Replace a pending allocation by a draft with the same resources and other scheduling fields."""

    facts: Facts  # the facts that quotas select it by from now on
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
        if phase_of(before) is not Phase.PENDING:
            refusal = revisable(before, _decode(self.draft.doc))
            return refusal or batch.put(replace(self.draft, charge=before.charge, status=before.status), self.origin)
        missing = ended(before) or absent_refusal(batch, self.wants, self.asking)
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


def ended(one: Stored) -> Refusal | None:
    """The refusal of any change of the spec; None while it is pending or placed."""
    phase = phase_of(one)
    if is_ending(one.doc):
        return Refusal(Code.IMMUTABLE, f"allocation {one.key.name!r} is being deleted: its spec cannot change")
    return _immutable(one, phase) if phase in ENDED else None


def _immutable(one: Stored, phase: str) -> Refusal:
    but = f", except {PLACED_MAY_CHANGE}" if phase not in ENDED else ""
    return Refusal(
        Code.IMMUTABLE,
        f"allocation {one.key.name!r} is {phase}: its spec cannot change once it is placed{but}",
        f"Delete it and create it again; labels and annotations may be changed. While Pending, so may {MAY_CHANGE}.",
    )


def change_allocation(change: ObjectChange) -> Command | Refusal:
    """The command of a change: `Revise` for the spec, otherwise as for other kinds, except that the gang is fixed."""
    one: Allocation = change.one
    if change.status:
        return change_object(change)
    refusal = (revisable(change.before, one) if change.spec_changed else None) or _another_gang(change.before, one)
    if refusal is not None:
        return refusal
    return _revise(change, one) if change.spec_changed else change_object(change)


def _revise(change: ObjectChange, one: Allocation) -> Revise:
    draft = changed_draft(change.kind, change.before, one, spec_changed=True, keep_charge=True)
    return Revise(
        key=change.before.key, origin=change.origin, idempotency_key=change.idempotency_key, draft=draft,
        expected=change.before.revision, subject=change.kind.singular, facts=facts_of(one.spec), asking=asking_of(one),
        admin=change.admin, wants=(("spec.queue", Key(QUEUE.name, "", one.spec.queue)),) if one.spec.queue else (),
    )  # fmt: skip


def _another_gang(before: Stored, one: Allocation) -> Refusal | None:
    """The refusal of changing the gang: all annotations may change except its size and wait."""
    if not before.gang:
        return None
    was = _decode(before.doc)
    if gang_of(was.metadata, was.spec) == gang_of(one.metadata, one.spec):
        return None
    return Refusal(
        Code.IMMUTABLE,
        f"the gang of allocation {before.key.name!r} cannot be changed after creation",
        f"Leave the annotations {GANG_SIZE} and {MAX_WAIT} as they were, or delete it and create it again.",
    )


def revisable(before: Stored, one: Allocation) -> Refusal | None:
    """The refusal of a change; None if it is allowed."""
    if refusal := ended(before):
        return refusal
    was, phase = _decode(before.doc).spec, phase_of(before)
    if phase is not Phase.PENDING:
        return None if _but_policy(was) == _but_policy(one.spec) else _immutable(before, phase)
    if _rest(was) == _rest(one.spec):
        return None
    return Refusal(
        Code.IMMUTABLE,
        f"the spec of allocation {before.key.name!r} cannot be changed after creation, except {MAY_CHANGE}",
        "Delete it and create it again; labels and annotations may be changed.",
    )


def _but_policy(spec: AllocationSpec) -> AllocationSpec:
    """The spec without the field that may change once it is placed."""
    return msgspec.structs.replace(spec, on_member_failure=UNSET)


def _rest(spec: AllocationSpec) -> Any:
    """The spec without the fields that may change."""
    plain: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(
            spec, priority=UNSET, priority_class=UNSET, queue=UNSET, ttl=UNSET, on_member_failure=UNSET
        )
    )
    if isinstance(spec.scheduling, Scheduling):
        plain["scheduling"].pop("tolerations", None)
        if not plain["scheduling"]:
            del plain["scheduling"]
    return plain
