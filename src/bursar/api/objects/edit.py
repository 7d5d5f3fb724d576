"""Handlers that change objects: replace, and the four kinds of patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec

from bursar.api.http.body import (
    check,
    convert,
    dry_run,
    faulty_causes,
    idempotency_key_of,
    identify,
    name_faults,
    read_document,
    read_object,
    too_deep,
)
from bursar.api.http.route import Call, Outcome
from bursar.api.objects.object import (
    create_object,
    finalizers_refused,
    find,
    is_admin,
    key_of,
    kind_of,
    not_below,
    origin_of,
    out_of_sight,
    recalled,
    written_answer,
)
from bursar.commands.command import Command, Written
from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.objects.object import conflict
from bursar.core.objects.object import Stored
from bursar.core.quota.tenant_tree import Tree, sees
from bursar.core.values.access import is_delegate, reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.names import quoted
from bursar.core.values.patch import PatchError, TestFailed, json_patch, merge, strategic
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.objects import object as ops
from bursar.ops.objects.object import Unchanged
from bursar.wire.shared.bounds import VALUES_MAX, has_more_values
from bursar.wire.shared.kind import Kind, Object

Document: TypeAlias = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
SPEC_REMOVED = "it would remove the whole spec, every limit and setting in it"
SPEC_HINT = 'Name the fields to change or, to remove all of them, replace the object with "spec": {}.'
PATCHES = (MERGE_PATCH, STRATEGIC_PATCH, JSON_PATCH, APPLY_PATCH)


def as_it_is(_: Object) -> None:
    return None


async def replace_object(call: Call, settle: Callable[[Object], None] = as_it_is) -> Outcome:
    """PUT: the body is the complete object; omitted fields are removed. The status has its own path."""
    kind = kind_of(call)
    body = await read_object(call, kind)
    if isinstance(body, Refusal):
        return body
    pinned = body.object.metadata.resource_version or ""
    wanted: Document = msgspec.to_builtins(body.object)
    return await edit_object(
        call,
        lambda _: wanted,
        pinned=pinned,
        request_id=body.request_id,
        warnings=body.warnings,
        lacks_spec=not wanted.get("spec") and _says_no_spec(call),
        settle=settle,
    )


def _says_no_spec(call: Call) -> bool:
    """Whether a body omits spec or sets it to null; neither requests an empty one."""
    document = read_document(call)
    return isinstance(document, dict) and document.get("spec") is None


async def patch_object(call: Call, settle: Callable[[Object], None] = as_it_is) -> Outcome:
    kind = kind_of(call)
    media = call.media_type
    if media not in PATCHES:
        return Refusal(
            Code.UNSUPPORTED_MEDIA,
            f"a patch of type {media[:80]!r} is not understood",
            f"Send one of {', '.join(PATCHES)}.",
        )
    patch = read_document(call)
    if isinstance(patch, Refusal):
        return patch
    if media == APPLY_PATCH and isinstance(missing := await find(call, key_of(call)), Refusal):
        # A subresource of a missing object cannot be created.
        return missing if call.route.subresource else await _apply_new(call, kind, patch)

    if media != JSON_PATCH and not isinstance(patch, dict):
        return invalid("a merge patch must be an object")
    request_id = patch.pop("request_id", "") if isinstance(patch, dict) else ""
    lacks_spec = True if media == STRATEGIC_PATCH and _deletes_spec(patch) else None
    return await edit_object(
        call, partial(_patched, kind, media, patch), request_id=request_id, lacks_spec=lacks_spec, settle=settle
    )


def _patched(kind: Kind, media: str, patch: Any, document: Document) -> Any:
    if media == JSON_PATCH:
        return json_patch(document, patch)
    if media == STRATEGIC_PATCH:
        keys = {"metadata.ownerReferences": "uid", "metadata.finalizers": "", **kind.merge_keys}
        return strategic(document, patch, keys)
    return merge(document, patch)


def _deletes_spec(patch: Document) -> bool:
    """Whether a strategic merge patch deletes the whole spec by its directive, which leaves an empty object."""
    spec = patch.get("spec")
    return isinstance(spec, dict) and spec.get("$patch") == "delete"


async def _apply_new(call: Call, kind: Kind, document: Any) -> Outcome:
    """Create an object by server-side apply, if it does not exist yet and the caller may create it."""
    if not call.context.policy.allows(call.identity, "create", kind.plural):
        return Refusal(
            Code.FORBIDDEN,
            f"{kind.plural} {quoted(call.parameters['name'])} not found, "
            f"and role {call.identity.role} may not create {kind.plural}",
        )
    body = convert(call, kind, document)
    if isinstance(body, Refusal):
        return body
    causes = identify(call, kind, body.object) + name_faults(kind, body.object.metadata) + check(kind, body.object)
    return faulty_causes(kind, causes) if causes else await create_object(call, kind, body)


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit of an object: a pure function of the version that it is applied to, so that it can be retried.

    An edit that `lacks_spec` requests no spec, and is refused if the object has one; if that is None, the result of the
    patch decides.
    """

    call: Call
    patch: Callable[[Document], Any]  # from the stored document to the requested one
    tree: Tree
    idempotency_key: IdempotencyKey | None = None
    lacks_spec: bool | None = None
    settle: Callable[[Object], None] = as_it_is  # adjusts the checked object

    def next(self, before: Stored, document: Document) -> Unchanged | Command | Refusal:
        """Make the command that stores the next version of an object; `document` is the stored version."""
        wanted = self._wanted(before, document)
        if isinstance(wanted, Refusal):
            return wanted
        merged = _only_what_may_change(self._is_status, document, wanted)
        if merged == document:
            return Unchanged(before)
        one = self._checked(merged)
        if isinstance(one, Refusal):
            return one
        after: Document = msgspec.to_builtins(one)
        after["metadata"]["resourceVersion"] = document["metadata"]["resourceVersion"]
        if after == document:
            return Unchanged(before)
        if self._loses_spec(wanted) and document.get("spec") and after.get("spec") != document["spec"]:
            return invalid(SPEC_REMOVED, hint=SPEC_HINT)
        if refusal := self._out_of_sight(before, one) or finalizers_refused(self.call, self._kind, one, before):
            return refusal
        self.settle(one)
        return change_command(
            self._kind,
            before,
            one,
            origin_of(self.call),
            self.idempotency_key,
            spec_changed=_spec(after) != _spec(document),
            status=self._is_status,
            admin=is_admin(self.call),
        )

    @property
    def _kind(self) -> Kind:
        return kind_of(self.call)

    @property
    def _is_status(self) -> bool:
        return self.call.route.subresource == "status"

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

    def _checked(self, document: Document) -> Object | Refusal:
        """Decode a document to an object in its stored form."""
        body = convert(self.call, self._kind, document)
        if isinstance(body, Refusal):
            return body
        if causes := identify(self.call, self._kind, body.object) + check(self._kind, body.object):
            return faulty_causes(self._kind, causes)
        self._kind.normalise(body.object)
        return body.object

    def _loses_spec(self, wanted: Document) -> bool:
        lacks = wanted.get("spec") is None if self.lacks_spec is None else self.lacks_spec
        return lacks and not self._is_status

    def _out_of_sight(self, before: Stored, one: Object) -> Refusal | None:
        """Refuse to move an object into a tenant that the caller does not see."""
        above, identity = self._kind.above, self.call.identity
        if above is not None and is_delegate(identity):
            given = {name for name, _ in identity.tenants}
            if before.key.name in given or not sees(self.tree, reach(identity), above(one)):
                return not_below(identity, self._kind)
        owner, whose = self._kind.owner(one), reach(self.call.identity)
        if owner in ("", before.tenant) or whose.everything or sees(self.tree, whose, owner):
            return None
        return out_of_sight(self._kind, owner)


async def edit_object(
    call: Call,
    patch: Callable[[Document], Any],
    *,
    pinned: str = "",
    request_id: Any = "",
    warnings: tuple[str, ...] = (),
    lacks_spec: bool | None = None,
    settle: Callable[[Object], None] = as_it_is,
) -> Outcome:
    """Apply an edit to the latest version; retry after conflicts, unless the caller named a version."""
    key = key_of(call)
    idempotency_key, dry = idempotency_key_of(call, request_id), dry_run(call)
    if isinstance(idempotency_key, Refusal):
        return idempotency_key
    if isinstance(dry, Refusal):
        return dry
    found = await find(call, key)
    if isinstance(found, Refusal):
        return await recalled(call, idempotency_key, found)
    # Finding the object has refreshed the tree.
    edit = Edit(call, patch, call.context.runtime.trees.latest, idempotency_key, lacks_spec, settle)
    reply = await ops.change(
        call.context.runtime,
        key,
        edit.next,
        tenant=found.tenant or call.identity.tenant,
        dry_run=dry,
        pinned=bool(pinned),
        first=found,
    )
    if isinstance(reply, Unchanged):
        one = reply.before
        return await recalled(call, idempotency_key, Written(one.key, one.doc, one.status, one.revision))
    return await written_answer(call, kind_of(call), reply, 200, warnings)


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
