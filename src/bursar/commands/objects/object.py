"""Commands on objects of any kind: create, change, delete; and the refusals that every kind shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bursar.commands.command import Command, Reply, Result, weight_of_drafts
from bursar.commands.objects import removal
from bursar.commands.objects.gate import (
    approval_of,
    awaits_approval,
    charged,
    gates_of,
    growth_withdrawn,
    held_back,
    kept_fields,
    pending_charge,
    requesting,
    with_approval,
    withdrawn,
)
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import Gang, GangKey, GangRow
from bursar.core.objects.charge import NOTHING, Charge, deferred, fallen_due
from bursar.core.objects.finalizer import added, reserved
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.permit import NOTHING_ASKED, Asking, beyond, missing_classes, too_small
from bursar.core.quota.quota import Move
from bursar.core.quota.quota_messages import quota_refusal
from bursar.core.quota.visibility import Sees, reader_of, sight
from bursar.core.values.access import Identity, Role, reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault
from bursar.core.values.replace import replace
from bursar.wire.kinds.priorityclass import PRIORITY_CLASS
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import EMPTY, encode, encode_object, finalizers_of, is_ending
from bursar.wire.shared.kind import Kind, Object


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateObject(Command):
    draft: Stored
    gang: Gang | None = None
    wants: tuple[tuple[str, Key], ...] = ()  # (field, object that must exist)
    subject: str = "object"
    seen_tenant: str | None = None  # the namespace's tenant when access was checked
    asking: Asking = NOTHING_ASKED  # the parts that need a permission
    admin: bool = False  # whether an administrator submits it, who may admit anything

    def weight(self) -> int:
        return weight_of_drafts(self.draft)

    def needs(self) -> Iterable[Key]:
        return (key for _, key in self.wants)

    def gangs(self) -> dict[GangKey, int]:
        return {(self.key.namespace, self.gang.group_id): self.gang.min_members} if self.gang else {}

    def charges(self, batch: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        charge = charged(batch, self.draft).charge
        yield self.key.namespace, charge
        if self._gates(batch):
            yield self.key.namespace, pending_charge(charge)
        if self.gang:
            for member in batch.members(self.key.namespace, self.gang.group_id):
                yield self.key.namespace, fallen_due(member.charge)

    def decide(self, batch: UnitOfWork) -> Result:
        if refusal := self._refusal(batch):
            return refusal
        draft = charged(batch, self.draft)
        tenant = tenant_of(batch, self.key, draft.tenant)
        if tenant != draft.tenant:
            draft = replace(draft, tenant=tenant)
        if self.asking is not NOTHING_ASKED and (beyond_permit := beyond(batch.tree, tenant, self.asking)):
            if not self.admin:
                return beyond_permit
            draft = permitted_by(draft, self.origin)
        if gates := self._gates(batch):
            return self._request(batch, held_back(draft, tenant, batch, gates))
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
        if refusal := owner_refusal(batch, self.draft):
            return refusal
        if refusal := absent_refusal(batch, self.wants, self.asking):
            return refusal
        return too_small(batch.tree, self.asking) if self.asking is not NOTHING_ASKED else None

    def _gates(self, batch: UnitOfWork) -> tuple[str, ...]:
        """The gates that the object must pass first. A gang is decided as a set: a member that joins members that
        await approval passes the same gates."""
        if gates := gates_of(batch, self.draft, tenant_of(batch, self.key, self.draft.tenant)):
            return gates
        members = batch.members(self.key.namespace, self.gang.group_id) if self.gang is not None else ()
        first = next((one for one in members if awaits_approval(one)), None)
        approval = approval_of(first) if first is not None else None
        return tuple(approval.gates) if approval is not None else ()

    def _request(self, batch: UnitOfWork, draft: Stored) -> Result:
        """Store a request, which counts as pending and holds nothing. A gang counts it as a member."""
        row = None
        if self.gang is not None:
            row = self._gang_row(batch, self.gang)
            if row.min_members != self.gang.min_members:
                return gang_differs(self.gang, row)
        if exceeded := batch.counters.move([Move(self.key.namespace, after=draft.charge)]):
            return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        if self.gang is not None and row is not None:
            batch.set_gang((self.key.namespace, self.gang.group_id), replace(row, members=row.members + 1))
            self._ask_again(batch, self.gang, draft)
        return batch.put(draft, requesting(self.origin, draft))

    def _ask_again(self, batch: UnitOfWork, gang: Gang, draft: Stored) -> None:
        """Have the members of a gang that passed gates pass them again with a new one: a smaller set was judged."""
        fresh = approval_of(draft)
        assert fresh is not None, "the draft awaits approval"
        for one in batch.members(self.key.namespace, gang.group_id):
            if awaits_approval(one) and (approval := approval_of(one)) is not None and approval.passed:
                again = replace(approval, gates=fresh.gates, reason="", by="", until="")
                batch.put(with_approval(one, again), self.origin)

    def _gang_row(self, batch: UnitOfWork, gang: Gang) -> GangRow:
        row = batch.gangs.get((self.key.namespace, gang.group_id))
        return row if row is not None and row.members else GangRow(gang.min_members)

    def _join_gang(self, batch: UnitOfWork, draft: Stored, gang: Gang) -> Result:
        """Add a member to its gang. Members are not charged until the gang is complete; then all are, or none."""
        key = (self.key.namespace, gang.group_id)
        row = self._gang_row(batch, gang)
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
    # Keep the stored charge instead of the draft's. It may have changed since the draft was made, without a new
    # revision, because a gang was completed and charged.
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
        return self._save_changed(batch, before)

    def _save_changed(self, batch: UnitOfWork, before: Stored) -> Result:
        if not self.keep_charge and self.draft.charge != before.charge:
            moves = [Move(self.key.namespace, before.charge, self.draft.charge)]
            if exceeded := batch.counters.move(moves):
                return quota_refusal(self.subject, exceeded, sight_of(batch, self))
        return self._save(batch, before)

    def _save(self, batch: UnitOfWork, before: Stored) -> Result:
        draft = replace(self.draft, charge=before.charge) if self.keep_charge else self.draft
        return batch.put(draft, self.origin)

    def _remove(self, batch: UnitOfWork) -> Result:
        """Remove an object that was deleted before and has lost its last finalizer."""
        before = batch.objects[self.key]
        if BY_NAME[self.key.kind].charged_until_gone and not before.charge.empty:
            batch.counters.move([Move(self.key.namespace, before.charge)])
        return removal.finish(batch, self.draft, self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(Command):
    """Repeat the answer of an earlier request; a new request is answered `otherwise`, and does nothing."""

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
    tenant: str | None = None  # the object's tenant when access was checked

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
        if awaits_approval(before):
            before = withdrawn(before, batch.now)
        elif BY_NAME[self.key.kind].charged_until_gone and finalizers_of(before.doc):
            last = growth_withdrawn(before, batch.now)
            batch.counters.move([Move(self.key.namespace, before.charge, last.charge)])
            return removal.remove(batch, before, self.origin, last)
        if before.charge is not NOTHING:
            batch.counters.move([Move(self.key.namespace, before.charge)])
            before = replace(before, charge=NOTHING)
        return removal.remove(batch, before, self.origin)


def owner_refusal(batch: UnitOfWork, draft: Stored) -> Refusal | None:
    """The refusal of an object without a namespace whose tenant does not exist. Changes of the tree are checked with
    the tree."""
    if draft.key.namespace or draft.tenant in batch.tree.tenants or not draft.tenant:
        return None
    if BY_NAME[draft.key.kind].in_tree:
        return None
    message = f"Tenant {draft.tenant!r} does not exist"
    cause = Cause("FieldValueNotFound", message, field="spec.tenant")
    return Refusal(Code.INVALID, message, "Create it first.", (cause,))


def absent_refusal(batch: UnitOfWork, wants: Iterable[tuple[str, Key]], asking: Asking) -> Refusal | None:
    """The refusal of a reference to an object that does not exist."""
    absent = [(field, Key(PRIORITY_CLASS.name, "", name)) for field, name in missing_classes(batch.tree, asking)]
    absent += [(field, key) for field, key in wants if key not in batch.objects and key not in batch.recent]
    if not absent:
        return None
    causes = tuple(
        Cause("FieldValueNotFound", f"{key.kind} {key.name!r} does not exist", field=field) for field, key in absent
    )
    kinds = ",".join(dict.fromkeys(plural_of(key) for _, key in absent))
    hint = f"Create it first, or name an existing one: bursar get {kinds}"
    return Refusal(Code.INVALID, "; ".join(one.message for one in causes), hint, causes)


def gang_differs(gang: Gang, row: GangRow) -> Refusal:
    message = f"gang {gang.group_id!r} has minMembers {row.min_members}, this member has {gang.min_members}"
    return Refusal(Code.INVALID, message, causes=(Cause("FieldValueInvalid", message, field="minMembers"),))


# The choice of the command: kinds with commands of their own have functions like these (lifecycle/dispatch.py).


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """A requested change: the next version of an object."""

    kind: Kind
    before: Stored
    one: Object
    origin: Origin
    idempotency_key: IdempotencyKey | None = None
    spec_changed: bool = False
    status: bool = False  # whether only the status is written
    admin: bool = False  # whether an administrator requests it, who may admit anything


@dataclass(frozen=True, slots=True)
class ObjectDeletion:
    """A requested deletion of an object."""

    before: Stored
    origin: Origin
    idempotency_key: IdempotencyKey | None = None
    preconditions: DeletePreconditions = NO_PRECONDITIONS
    grace_seconds: int | None = None
    orphan: bool = False  # whether the objects that it owns stay


def change_object(change: ObjectChange) -> ChangeObject | Refusal:
    """The command that stores the next version, with a charge that follows its spec."""
    kind, before = change.kind, change.before
    if change.spec_changed and not kind.mutable_spec:
        return Refusal(
            Code.IMMUTABLE,
            f"the spec of {kind.singular} {before.key.name!r} cannot be changed after creation",
            f"Delete the {kind.singular} and create it again; labels and annotations may be changed.",
        )
    tenant = kind.owner(change.one) or before.tenant
    keep = not kind.mutable_spec or change.status
    draft = changed_draft(kind, before, change.one, spec_changed=change.spec_changed, keep_charge=keep)
    draft = replace(draft, tenant=tenant)
    return ChangeObject(
        key=before.key, origin=change.origin, idempotency_key=change.idempotency_key, draft=draft,
        expected=before.revision, subject=kind.singular, keep_charge=keep,
    )  # fmt: skip


def delete_object(deletion: ObjectDeletion) -> DeleteObject:
    return DeleteObject(
        key=deletion.before.key, origin=deletion.origin, idempotency_key=deletion.idempotency_key,
        preconditions=deletion.preconditions,
    )  # fmt: skip


# Refusals that every kind shares, in Kubernetes' words.


def plural_of(key: Key) -> str:
    return BY_NAME[key.kind].plural


def not_found(key: Key) -> Refusal:
    return Refusal(Code.NOT_FOUND, f'{plural_of(key)} "{key.name}" not found')


def already_exists(key: Key) -> Refusal:
    return Refusal(
        Code.ALREADY_EXISTS,
        f'{plural_of(key)} "{key.name}" already exists',
        "Choose another name, or change the existing object.",
    )


def conflict(key: Key, why: str = "it was changed meanwhile") -> Refusal:
    return Refusal(
        Code.CONFLICT,
        f'Operation cannot be fulfilled on {plural_of(key)} "{key.name}": {why}',
        "Read the object again and apply the change to its latest version.",
    )


def no_namespace(name: str, hint: str = "") -> Refusal:
    hint = hint or f"Create it first: bursar create namespace {name}"
    return Refusal(Code.NOT_FOUND, f'namespaces "{name}" not found', hint)


def out_of_sight(kind: Kind, owner: str) -> Refusal:
    return Refusal(Code.FORBIDDEN, f"you may not put a {kind.singular} into tenant {owner!r}")


def not_below(identity: Identity, kind: Kind) -> Refusal:
    """Refuse to put a tenant where its creator manages none."""
    own = ", ".join(name for name, _ in identity.tenants)
    return Refusal(
        Code.FORBIDDEN,
        f"{identity.user} may only change {kind.plural} below {own}",
        f"Set spec.parent to {own}, or to a tenant below.",
    )


def finalizers_refused(identity: Identity, kind: Kind, one: Object, before: Stored | None = None) -> Refusal | None:
    """Refuse changed finalizers on a new object or version unless the caller may set them. A user of a tenant must not
    block the deletion of shared objects, nor release the finalizers of controllers."""
    were, are = finalizers_of(before.doc) if before is not None else (), tuple(one.metadata.finalizers or ())
    if were == are:
        return None
    if not kind.namespaced and not reach(identity).everything:
        return Refusal(
            Code.FORBIDDEN,
            f"role {identity.role} may not change the finalizers of {kind.plural}",
            "Ask an administrator of the system, or leave metadata.finalizers as it is.",
        )
    if kind.charged_until_gone and identity.role not in (Role.SYSTEM_ADMIN, Role.SERVICE):
        return Refusal(
            Code.FORBIDDEN,
            f"the finalizers of {kind.plural} are for the operators that provide them: "
            f"role {identity.role} may not change them",
            "Leave metadata.finalizers as it is; the operator removes its own once everything is taken back.",
        )
    new = added(were, are)
    wrong = reserved(new)
    if new and before is not None and is_ending(before.doc):
        wrong = f"cannot be added to an object that is being deleted: {', '.join(new)}"
    if not wrong:
        return None
    cause = field_fault("metadata.finalizers", wrong)
    return Refusal(Code.UNPROCESSABLE, f"metadata.finalizers: {wrong}", causes=(cause,))


def namespace_refusal(batch: UnitOfWork, key: Key, seen_tenant: str | None = None) -> Refusal | None:
    namespace = batch.tree.namespaces.get(key.namespace)
    if namespace is None or seen_tenant not in (None, namespace.tenant):
        return no_namespace(key.namespace)
    if namespace.terminating:
        return Refusal(
            Code.TERMINATING,
            f'unable to create new content in namespace "{key.namespace}" because it is being terminated',
            "Use another namespace, or wait until this one is removed and create it again.",
        )
    return None


def tenant_of(batch: UnitOfWork, key: Key, default: str) -> str:
    namespace = batch.tree.namespaces.get(key.namespace)
    return namespace.tenant if namespace is not None else default


def sight_of(batch: UnitOfWork, command: Command) -> Sees:
    """The tenants whose figures the answer to a command may show."""
    return sight(batch.tree, reader_of(command.origin.actor, tenant_of(batch, command.key, "")))


def permitted_by(one: Stored, origin: Origin) -> Stored:
    """The object, marked as admitted by an administrator beyond its tenant's permissions."""
    return replace(one, status=encode({**msgspec.json.decode(one.status), "permittedBy": submitter(origin)}))


def submitter(origin: Origin) -> str:
    """The submitter as written to the status: `tenant/name` for a member of a tenant."""
    return origin.actor.removeprefix("user:")


# Status fields of requests that only decisions change: operators write the rest.
_DECIDED = ("approval", "granted", "user")


def _next_status(kind: Kind, before: Stored, status: bytes) -> bytes:
    if not kind.requestable or status == before.status:
        return status
    was = msgspec.json.decode(before.status)
    said = {name: value for name, value in msgspec.json.decode(status).items() if name not in _DECIDED}
    return encode(said | {name: was[name] for name in _DECIDED if name in was})


def changed_draft(kind: Kind, before: Stored, one: Object, *, spec_changed: bool, keep_charge: bool) -> Stored:
    """The next version of an object: its identity stays, whatever the client sent."""
    said = encode(one.status) if getattr(one, "status", None) else EMPTY
    status = _next_status(kind, before, said)
    if status != said:
        one = msgspec.convert(msgspec.to_builtins(one) | {"status": msgspec.json.decode(status)}, kind.type)
    kind.normalise(one)
    metadata = one.metadata
    metadata.uid = before.uid
    if spec_changed:
        metadata.generation = (metadata.generation or 1) + 1
    fields = {**kind.fields(one), **kept_fields(before)}
    charge = before.charge if keep_charge else kind.charge_of(one)
    return replace(
        before,
        labels=dict(metadata.labels or {}),
        fields=fields,
        status=status,
        charge=charge,
        doc=encode_object(kind, one),
    )
