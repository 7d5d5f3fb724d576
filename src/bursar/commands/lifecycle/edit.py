"""Edits of objects: from the stored version and a patch to the command that stores the next version, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from bursar.commands.command import Command, Unchanged
from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.objects.object import conflict, finalizers_refused, not_below, out_of_sight
from bursar.core.objects.object import Origin, Stored
from bursar.core.quota.tenant_tree import Tree, sees
from bursar.core.values.access import Identity, Role, is_delegate, reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.patch import PatchError, TestFailed
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.wire.shared.bounds import VALUES_MAX, has_more_values
from bursar.wire.shared.kind import Kind, Object
from bursar.wire.shared.reading import ObjectPath, read, too_deep

Document: TypeAlias = dict[str, Any]

SPEC_REMOVED = "it would remove the whole spec, every limit and setting in it"
SPEC_HINT = 'Name the fields to change or, to remove all of them, replace the object with "spec": {}.'


def as_it_is(_: Object) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """An edit of an object: a pure function of the version that it is applied to, so that it can be retried.

    An edit that `lacks_spec` requests no spec, and is refused if the object has one; if that is None, the result of the
    patch decides.
    """

    kind: Kind
    at: ObjectPath
    patch: Callable[[Document], Any]  # from the stored document to the requested one
    identity: Identity
    origin: Origin
    tree: Tree
    idempotency_key: IdempotencyKey | None = None
    status: bool = False  # whether only the status is written
    lacks_spec: bool | None = None
    settle: Callable[[Object], None] = as_it_is  # adjusts the checked object

    def next(self, before: Stored, document: Document) -> Unchanged | Command | Refusal:
        """Make the command that stores the next version of an object; `document` is the stored version."""
        wanted = self._wanted(before, document)
        if isinstance(wanted, Refusal):
            return wanted
        merged = _only_what_may_change(self.status, document, wanted)
        if merged == document:
            return Unchanged(before)
        body = read(self.kind, merged, self.at)
        if isinstance(body, Refusal):
            return body
        one = body.object
        self.kind.normalise(one)
        after: Document = msgspec.to_builtins(one)
        after["metadata"]["resourceVersion"] = document["metadata"]["resourceVersion"]
        if after == document:
            return Unchanged(before)
        if self._loses_spec(wanted) and document.get("spec") and after.get("spec") != document["spec"]:
            return invalid(SPEC_REMOVED, hint=SPEC_HINT)
        if refusal := self._out_of_sight(before, one) or finalizers_refused(self.identity, self.kind, one, before):
            return refusal
        self.settle(one)
        return change_command(
            self.kind,
            before,
            one,
            self.origin,
            self.idempotency_key,
            spec_changed=_spec(after) != _spec(document),
            status=self.status,
            admin=self.identity.role is Role.SYSTEM_ADMIN,
        )

    def _wanted(self, before: Stored, document: Document) -> Document | Refusal:
        """Apply the patch; refuse a result that is unreadable or belongs to another object or version."""
        try:
            wanted = self.patch(document)
        except TestFailed as error:
            return Refusal(Code.UNPROCESSABLE, f"the patch's test failed: {error}")
        except PatchError as error:
            return invalid(f"the patch cannot be applied: {error}")
        if not isinstance(wanted, dict) or not isinstance(wanted.get("metadata", {}), dict) or too_deep(wanted):
            return invalid("the result of the patch is not an object, or is nested too deep")
        if has_more_values(wanted, VALUES_MAX):
            message = f"the result of the patch has more than {VALUES_MAX} values"
            return invalid(message, hint="Remove some of them first.")
        version = str(wanted.get("metadata", {}).get("resourceVersion") or before.revision)
        if version != str(before.revision):
            return conflict(before.key)
        return _other_identity(before, wanted) or wanted

    def _loses_spec(self, wanted: Document) -> bool:
        lacks = wanted.get("spec") is None if self.lacks_spec is None else self.lacks_spec
        return lacks and not self.status

    def _out_of_sight(self, before: Stored, one: Object) -> Refusal | None:
        """Refuse to move an object into a tenant that the caller does not see, or manages only from above."""
        above = self.kind.above
        if above is not None and is_delegate(self.identity):
            given = {name for name, _ in self.identity.tenants}
            if before.key.name in given or not sees(self.tree, reach(self.identity), above(one)):
                return not_below(self.identity, self.kind)
        owner, whose = self.kind.owner(one), reach(self.identity)
        if owner in ("", before.tenant) or whose.everything or sees(self.tree, whose, owner):
            return None
        return out_of_sight(self.kind, owner)


def _spec(document: Document) -> Document:
    """All fields except metadata and status: not every kind calls them spec."""
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}


def _other_identity(before: Stored, wanted: Document) -> Refusal | None:
    metadata = wanted.get("metadata", {})
    if metadata.get("uid", before.uid) != before.uid:
        return conflict(before.key, f"its uid is {before.uid}")
    if metadata.get("name", before.key.name) != before.key.name:
        return invalid("metadata.name cannot be changed")
    return None


# Set by the server, whatever a client sends.
_OURS = (
    "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
    "namespace", "name",
)  # fmt: skip


def _only_what_may_change(is_status: bool, before: Document, wanted: Document) -> Document:
    """Limit a write of the status to the status, and a write of the object to the rest."""
    if is_status:
        return {**before, "status": wanted.get("status") or {}}
    metadata = {
        name: value for name, value in (wanted.get("metadata") or {}).items() if name not in _OURS and value is not None
    }
    metadata.pop("managedFields", None)
    metadata.pop("selfLink", None)
    metadata |= {name: before["metadata"][name] for name in _OURS if name in before["metadata"]}
    rest = {name: value for name, value in wanted.items() if name not in ("metadata", "status", "kind", "apiVersion")}
    result = {"apiVersion": before["apiVersion"], "kind": before["kind"], "metadata": metadata, **rest}
    if "status" in before:
        result["status"] = before["status"]
    return result
