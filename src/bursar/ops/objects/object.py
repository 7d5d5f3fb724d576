"""Verbs on objects of any kind: create, change, delete.

A change is computed from a version that was read without a lock, and committed only if that is still the version: the
revision proves that what was decided from is what stands. A caller that named no version is retried on the new one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import Gang, GangKey, GangRow
from bursar.core.objects.charge import NOTHING, Charge, deferred, fallen_due
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.permit import NOTHING_ASKED, Asking, beyond, missing_classes, too_small
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.quota.visibility import Sees, reader_of, sight
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects import removal
from bursar.ops.runtime.clock import new_uid, now, timestamp
from bursar.ops.runtime.command import Command, Reply, Result, weight_of_drafts
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import EMPTY, decode, encode, encode_object
from bursar.wire.shared.kind import Kind, Object, user_field

TRIES_MAX = 32


# Commands.


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateObject(Command):
    draft: Stored
    gang: Gang | None = None
    wants: tuple[tuple[str, Key], ...] = ()  # (field, object that must exist)
    subject: str = "object"
    seen_tenant: str | None = None  # whose namespace the door took it for when it let the caller in
    asking: Asking = NOTHING_ASKED  # what of it has to be permitted
    admin: bool = False  # whether an administrator submits it, who may let in anything

    def weight(self) -> int:
        return weight_of_drafts(self.draft)

    def needs(self) -> Iterable[Key]:
        return (key for _, key in self.wants)

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang.group_id): self.gang.min_members} if self.gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        yield self.key.namespace, self.draft.charge
        if self.gang:
            for member in batch.members(self.key.namespace, self.gang.group_id):
                yield self.key.namespace, fallen_due(member.charge)

    def decide(self, batch: UnitOfWork) -> Result:
        if refusal := self._refusal(batch):
            return refusal
        draft = self.draft
        tenant = tenant_of(batch, self.key, draft.tenant)
        if tenant != draft.tenant:
            draft = replace(draft, tenant=tenant)
        if self.asking is not NOTHING_ASKED and (beyond_permit := beyond(batch.tree, tenant, self.asking)):
            if not self.admin:
                return beyond_permit
            draft = permitted_by(draft, self.origin)
        if self.gang is not None:
            return self._join_gang(batch, draft, self.gang)
        if exceeded := batch.counters.move([Move(self.key.namespace, after=draft.charge)]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        return self._save(batch, draft)

    def _refusal(self, batch: UnitOfWork) -> Refusal | None:
        if self.key.namespace and (refusal := namespace_refusal(batch, self.key, self.seen_tenant)):
            return refusal
        if self.key in batch.objects:
            return already_exists(self.key)
        if refusal := absent_refusal(batch, self.wants, self.asking):
            return refusal
        return too_small(batch.tree, self.asking) if self.asking is not NOTHING_ASKED else None

    def _join_gang(self, batch: UnitOfWork, draft: Stored, gang: Gang) -> Result:
        """Members wait uncharged until the gang is complete; then all of them are charged together, or none."""
        key = (self.key.namespace, gang.group_id)
        row = batch.gangs.get(key)
        if row is None or not row.members:
            row = GangRow(gang.min_members)
        if row.min_members != gang.min_members:
            return gang_differs(gang, row)
        waiting = [one for one in batch.members(*key) if one.charge.due]
        if not row.charged and row.members + 1 < row.min_members:
            batch.set_gang(key, replace(row, members=row.members + 1))
            return self._save(batch, replace(draft, charge=deferred(draft.charge)))
        moves = [Move(key[0], one.charge, fallen_due(one.charge)) for one in waiting]
        if exceeded := batch.counters.move([Move(key[0], after=draft.charge), *moves]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        for one in waiting:
            batch.recharge(replace(one, charge=fallen_due(one.charge)))
        batch.set_gang(key, replace(row, members=row.members + 1, charged=True))
        return self._save(batch, draft)

    def _save(self, batch: UnitOfWork, draft: Stored) -> Result:
        return batch.put(draft, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeObject(Command):
    """Replace an object by a draft that was made from revision `expected`."""

    draft: Stored
    expected: int
    subject: str = "object"
    # What the object holds is none of this change's business. It may have moved since the draft was made, without a new
    # revision: a gang was completed and charged.
    keep_charge: bool = False

    def weight(self) -> int:
        return weight_of_drafts(self.draft)

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        yield self.key.namespace, self.draft.charge
        if before := batch.objects.get(self.key):
            yield self.key.namespace, before.charge

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.revision != self.expected:
            return conflict(self.key)
        if removal.may_go(before, self.draft):
            return self._remove(batch)
        if not self.keep_charge and self.draft.charge != before.charge:
            moves = [Move(self.key.namespace, before.charge, self.draft.charge)]
            if exceeded := batch.counters.move(moves):
                return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        return self._save(batch, before)

    def _save(self, batch: UnitOfWork, before: Stored) -> Result:
        draft = replace(self.draft, charge=before.charge) if self.keep_charge else self.draft
        return batch.put(draft, self.origin)

    def _remove(self, batch: UnitOfWork) -> Result:
        """Nobody has to clean up any more, and it was deleted before."""
        return removal.finish(batch, self.draft, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(Command):
    """Answer a repeated request as it was answered before; a new one is answered `otherwise`, and does nothing."""

    otherwise: Reply

    def objects(self) -> Iterable[Key]:
        return ()

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, _: UnitOfWork) -> Result:
        return self.otherwise


@dataclass(frozen=True, slots=True)
class DeletePreconditions:
    uid: str = ""
    revision: int | None = None
    tenant: str | None = None  # whose it was when the caller was let in

    def refusal(self, before: Stored) -> Refusal | None:
        if self.tenant not in (None, before.tenant):
            return not_found(before.key)
        if self.uid and self.uid != before.uid:
            return conflict(before.key, f"its uid is {before.uid}, not {self.uid}")
        if self.revision is not None and self.revision != before.revision:
            return conflict(before.key)
        return None


NO_PRECONDITIONS = DeletePreconditions()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteObject(Command):
    preconditions: DeletePreconditions = NO_PRECONDITIONS

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if refusal := self.preconditions.refusal(before):
            return refusal
        if before.charge is not NOTHING:
            batch.counters.move([Move(self.key.namespace, before.charge)])
        return removal.remove(batch, before, self.origin)


def absent_refusal(batch: UnitOfWork, wants: Iterable[tuple[str, Key]], asking: Asking) -> Refusal | None:
    """That something is named which is not there."""
    absent = [(field, Key("PriorityClass", "", name)) for field, name in missing_classes(batch.tree, asking)]
    absent += [(field, key) for field, key in wants if key not in batch.objects and key not in batch.recent]
    if not absent:
        return None
    causes = tuple(
        Cause("FieldValueNotFound", f"{key.kind} {key.name!r} does not exist", field=field) for field, key in absent
    )
    kinds = ",".join(dict.fromkeys(plural_of(key) for _, key in absent))
    hint = f"Create it first, or name one that there is: bursar get {kinds}"
    return Refusal(Code.INVALID, "; ".join(one.message for one in causes), hint, causes)


def gang_differs(gang: Gang, row: GangRow) -> Refusal:
    message = f"gang {gang.group_id!r} has minMembers {row.min_members}, this member says {gang.min_members}"
    return Refusal(Code.INVALID, message, causes=(Cause("FieldValueInvalid", message, field="minMembers"),))


# Refusals that every kind shares, in Kubernetes' words.


def plural_of(key: Key) -> str:
    return BY_NAME[key.kind].plural


def not_found(key: Key) -> Refusal:
    return Refusal(Code.NOT_FOUND, f'{plural_of(key)} "{key.name}" not found')


def already_exists(key: Key) -> Refusal:
    return Refusal(
        Code.ALREADY_EXISTS,
        f'{plural_of(key)} "{key.name}" already exists',
        "Choose another name, or change what is there.",
    )


def conflict(key: Key, why: str = "it was changed meanwhile") -> Refusal:
    return Refusal(
        Code.CONFLICT,
        f'Operation cannot be fulfilled on {plural_of(key)} "{key.name}": {why}',
        "Read the object again and apply the change to its latest version.",
    )


def namespace_refusal(batch: UnitOfWork, key: Key, seen_tenant: str | None = None) -> Refusal | None:
    namespace = batch.tree.namespaces.get(key.namespace)
    if namespace is None or seen_tenant not in (None, namespace.tenant):
        return Refusal(
            Code.NOT_FOUND,
            f'namespaces "{key.namespace}" not found',
            f"Create it first: bursar create namespace {key.namespace}",
        )
    if namespace.terminating:
        return Refusal(
            Code.TERMINATING,
            f'unable to create new content in namespace "{key.namespace}" because it is being terminated',
            "Use another namespace, or wait until this one is gone and create it anew.",
        )
    return None


def tenant_of(batch: UnitOfWork, key: Key, default: str) -> str:
    namespace = batch.tree.namespaces.get(key.namespace)
    return namespace.tenant if namespace is not None else default


def sight_of(batch: UnitOfWork, command: Command) -> Sees:
    """Whose figures may be told in answer to a command."""
    return sight(batch.tree, reader_of(command.origin.actor, tenant_of(batch, command.key, "")))


def permitted_by(one: Stored, origin: Origin) -> Stored:
    """The same, let in by an administrator beyond what its tenant may ask for."""
    return replace(one, status=encode({**msgspec.json.decode(one.status), "permittedBy": submitter(origin)}))


# Drafts: everything is encoded before locks are taken.


def submitter(origin: Origin) -> str:
    """Who submits something, as its status says it: `tenant/name` for somebody of a tenant."""
    return origin.actor.removeprefix("user:")


def new_draft(
    kind: Kind,
    one: Object,
    *,
    tenant: str = "",
    status: dict[str, Any] | None = None,
    user: str = "",
    permitted: str = "",
) -> Stored:
    """A new object from what a client sent: identity, times and the first status are ours, and in it who sent it."""
    at = timestamp(now())
    kind.normalise(one)
    metadata = one.metadata
    metadata.uid = new_uid(kind.uid_prefix)
    metadata.creation_timestamp = at
    metadata.generation = 1
    metadata.deletion_timestamp = UNSET
    metadata.deletion_grace_period_seconds = UNSET
    first = status if status is not None else kind.first_status(one, at)
    if user:
        first["user"] = user
    if permitted:
        first["permittedBy"] = permitted
    if hasattr(one, "status"):
        one.status = UNSET
    fields = {**kind.fields(one), **user_field(user)}
    return Stored(
        key=Key(kind.name, metadata.namespace or "", metadata.name),
        uid=metadata.uid,
        tenant=tenant,
        labels=dict(metadata.labels or {}),
        fields=fields,
        doc=encode_object(kind, one),
        status=encode(first) if first else EMPTY,
        charge=kind.charge(one),
    )


def changed_draft(kind: Kind, before: Stored, one: Object, *, spec_changed: bool, keep_charge: bool) -> Stored:
    """The next version of an object: its identity stays, whatever the client sent."""
    status = encode(one.status) if getattr(one, "status", None) else EMPTY
    kind.normalise(one)
    metadata = one.metadata
    metadata.uid = before.uid
    if spec_changed:
        metadata.generation = (metadata.generation or 1) + 1
    fields = kind.fields(one)
    charge = before.charge if keep_charge else kind.charge(one)
    return replace(
        before,
        labels=dict(metadata.labels or {}),
        fields=fields,
        status=status,
        charge=charge,
        doc=encode_object(kind, one),
    )


# Verbs.


async def get(runtime: Runtime, key: Key) -> Stored | Refusal:
    """One object. Those who ask at the same time are answered by one statement."""
    found = await runtime.reading.submit(key)
    return found if found is not None else not_found(key)


Edit = Callable[[Stored, dict[str, Any]], Command | Refusal]


async def change(
    runtime: Runtime,
    key: Key,
    edit: Edit,
    *,
    tenant: str,
    dry_run: bool = False,
    pinned: bool = False,
    first: Stored | None = None,
) -> Reply:
    """Read, let `edit` make a command for that version, and submit it; again, while others are faster.

    `pinned` callers named the version they changed: they are told of the conflict at once. `first` is a version that
    the caller has read already.
    """
    reply: Reply = not_found(key)
    for tries in range(TRIES_MAX):
        if tries > 2:
            # The same few would win again and again.
            await asyncio.sleep(random.uniform(0, 0.002 * tries))  # noqa: S311
        before = first or await get(runtime, key)
        first = None
        if isinstance(before, Refusal):
            return before
        command = edit(before, decode(before.doc, before.status, before.revision))
        if isinstance(command, Refusal):
            return command
        reply = await submit(runtime, command, tenant=tenant, dry_run=dry_run)
        if pinned or not (isinstance(reply, Refusal) and reply.code is Code.CONFLICT):
            return reply
    return reply


async def submit(runtime: Runtime, command: Command, *, tenant: str, dry_run: bool = False) -> Reply:
    """Put a command into its lane."""
    shape = BY_NAME[command.key.kind].in_tree
    if dry_run:
        lane = runtime.trying_shape if shape else runtime.trying
    elif shape:
        lane = runtime.shaping
    else:
        lane = runtime.creating if isinstance(command, CreateObject) else runtime.changing
        lane = runtime.bulk if command.many else lane
    reply = await lane.submit(command, tenant)
    if command.key.kind == "Node":
        runtime.ceilings.forget()
    return reply
