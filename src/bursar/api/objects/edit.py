"""Handlers that change objects: replace, and the four kinds of patch."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.http.body import (
    check,
    claim_of,
    convert,
    dry_run,
    faulty_causes,
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
    origin_of,
    recalled,
    written_answer,
)
from bursar.core.objects.object import Stored
from bursar.core.quota.tenant_tree import sees
from bursar.core.values.access import Role, allows, reach
from bursar.core.values.names import quoted
from bursar.core.values.patch import PatchError, TestFailed, json_patch, merge, strategic
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.lifecycle.dispatch import change_command, owner_of
from bursar.ops.nodes.node import cap
from bursar.ops.objects import object as ops
from bursar.ops.objects.object import conflict
from bursar.ops.runtime.command import Command, Written
from bursar.wire.kinds.node import Node
from bursar.wire.shared.bounds import VALUES_MAX, has_more_values
from bursar.wire.shared.kind import Kind, Object

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
SPEC_REMOVED = "it would remove the whole spec, every limit and setting in it"
SPEC_HINT = 'Name the fields to change or, where all of them are meant to go, replace the object with "spec": {}.'
PATCHES = (MERGE_PATCH, STRATEGIC_PATCH, JSON_PATCH, APPLY_PATCH)


async def replace_object(call: Call) -> Outcome:
    """PUT: the body is the whole object; what it does not say is gone. The status has its own place."""
    kind = kind_of(call)
    body = await read_object(call, kind)
    if isinstance(body, Refusal):
        return body
    pinned = body.object.metadata.resource_version or ""
    wanted: dict[str, Any] = msgspec.to_builtins(body.object)
    return await edit_object(
        call,
        lambda _: wanted,
        pinned=pinned,
        request_id=body.request_id,
        warnings=body.warnings,
        lacks_spec=not wanted.get("spec") and _says_no_spec(call),
    )


def _says_no_spec(call: Call) -> bool:
    """Whether a body leaves spec out, or says null: neither asks for an empty one."""
    document = read_document(call)
    return isinstance(document, dict) and document.get("spec") is None


async def patch_object(call: Call) -> Outcome:
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
        # A part of what does not exist cannot be made without the rest.
        return missing if call.route.subresource else await _apply_new(call, kind, patch)

    def edited(document: dict[str, Any]) -> Any:
        if media == JSON_PATCH:
            return json_patch(document, patch)
        if media == STRATEGIC_PATCH:
            return strategic(
                document, patch, {"metadata.ownerReferences": "uid", "metadata.finalizers": "", **kind.merge_keys}
            )
        return merge(document, patch)

    if media != JSON_PATCH and not isinstance(patch, dict):
        return invalid("a merge patch must be an object")
    request_id = patch.pop("request_id", "") if isinstance(patch, dict) else ""
    lacks_spec = True if media == STRATEGIC_PATCH and _deletes_spec(patch) else None
    return await edit_object(call, edited, pinned="", request_id=request_id, lacks_spec=lacks_spec)


def _deletes_spec(patch: dict[str, Any]) -> bool:
    """Whether a strategic merge patch takes all of spec away by its directive, which leaves an empty object."""
    spec = patch.get("spec")
    return isinstance(spec, dict) and spec.get("$patch") == "delete"


async def _apply_new(call: Call, kind: Kind, document: Any) -> Outcome:
    """Server-side apply of what does not exist yet creates it, for those who may."""
    if not allows(call.identity, "create", kind.plural):
        return Refusal(
            Code.FORBIDDEN,
            f"{kind.plural} {quoted(call.parameters['name'])} not found, "
            f"and role {call.identity.role} may not create {kind.plural}",
        )
    body = convert(call, kind, document)
    if isinstance(body, Refusal):
        return body
    causes = identify(call, kind, body.object) + name_faults(body.object.metadata) + check(kind, body.object)
    return faulty_causes(kind, causes) if causes else await create_object(call, kind, body)


async def edit_object(
    call: Call,
    edited: Any,
    *,
    pinned: str,
    request_id: Any = "",
    warnings: tuple[str, ...] = (),
    lacks_spec: bool | None = None,
) -> Outcome:
    """Apply an edit to the latest version, and again while others are faster, unless the caller named a version.

    An edit that `lacks_spec` asks for none, and is refused where there is one to lose; where that is None, an edit
    lacks it if its result does.
    """
    kind, key = kind_of(call), key_of(call)
    claim, dry = claim_of(call, request_id), dry_run(call)
    if isinstance(claim, Refusal):
        return claim
    if isinstance(dry, Refusal):
        return dry
    found = await find(call, key)
    if isinstance(found, Refusal):
        return await recalled(call, claim, found)
    unchanged: list[Stored] = []

    def edit(before: Stored, document: dict[str, Any]) -> Command | Refusal:
        unchanged.clear()
        result = next_version(call, kind, before, document, edited, lacks_spec=lacks_spec)
        if isinstance(result, Refusal):
            return result
        one, spec_changed = result
        if one is None:
            unchanged.append(before)
            return Refusal(Code.CONFLICT, "nothing to change")
        if refusal := _out_of_sight(call, kind, before, one) or finalizers_refused(call, kind, one, before):
            return refusal
        if isinstance(one, Node) and call.identity.role is Role.NODE:
            # A token may be stolen: what its node has was said by whoever registered it.
            cap(one)
        return change_command(
            kind,
            before,
            one,
            origin_of(call),
            claim,
            spec_changed=spec_changed,
            status=call.route.subresource == "status",
            admin=is_admin(call),
        )

    reply = await ops.change(
        call.context.runtime,
        key,
        edit,
        tenant=found.tenant or call.identity.tenant,
        dry_run=dry,
        pinned=bool(pinned),
        first=found,
    )
    if unchanged:
        one = unchanged[0]
        return await recalled(call, claim, Written(one.key, one.doc, one.status, one.revision))
    return await written_answer(call, kind, reply, 200, warnings)


def _out_of_sight(call: Call, kind: Kind, before: Stored, one: Object) -> Refusal | None:
    """Nobody moves a namespace into a tenant that they do not see; the tree was read when the object was found."""
    owner, whose = owner_of(kind, one), reach(call.identity)
    if kind.name != "Namespace" or owner == before.tenant or whose.everything:
        return None
    if sees(call.context.runtime.trees.latest, whose, owner):
        return None
    return Refusal(Code.FORBIDDEN, f"you may not put a namespace into tenant {owner!r}")


def next_version(
    call: Call, kind: Kind, before: Stored, document: dict[str, Any], edited: Any, *, lacks_spec: bool | None = None
) -> tuple[Object | None, bool] | Refusal:
    """The object after an edit, and whether its spec changed; None where nothing did."""
    try:
        wanted = edited(document)
    except TestFailed as error:
        return Refusal(Code.UNPROCESSABLE, f"the patch's test failed: {error}")
    except PatchError as error:
        return invalid(f"the patch cannot be applied: {error}")
    if not isinstance(wanted, dict) or not isinstance(wanted.get("metadata", {}), dict) or too_deep(wanted):
        return invalid("the result of the patch is not an object, or is nested too deep")
    if has_more_values(wanted, VALUES_MAX):
        return invalid(f"the result of the patch has more than {VALUES_MAX} values", hint="Remove some of them first.")
    version = str(wanted.get("metadata", {}).get("resourceVersion") or before.revision)
    if version != str(before.revision):
        return conflict(before.key)
    if refusal := _other_identity(before, wanted):
        return refusal
    is_status = call.route.subresource == "status"
    merged = _only_what_may_change(is_status, document, wanted)
    loses_spec = not is_status and (wanted.get("spec") is None if lacks_spec is None else lacks_spec)
    if merged == document:
        return None, False
    body = convert(call, kind, merged)
    if isinstance(body, Refusal):
        return body
    if causes := identify(call, kind, body.object) + check(kind, body.object):
        return faulty_causes(kind, causes)
    kind.normalise(body.object)
    after: dict[str, Any] = msgspec.to_builtins(body.object)
    after["metadata"]["resourceVersion"] = document["metadata"]["resourceVersion"]
    if after == document:
        return None, False
    if loses_spec and document.get("spec") and after.get("spec") != document["spec"]:
        return invalid(SPEC_REMOVED, hint=SPEC_HINT)
    return body.object, _spec(after) != _spec(document)


def _spec(document: dict[str, Any]) -> dict[str, Any]:
    """Everything but metadata and status: not every kind calls it spec."""
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}


def _other_identity(before: Stored, wanted: dict[str, Any]) -> Refusal | None:
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


def _only_what_may_change(is_status: bool, before: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """A write of the status changes nothing else; a write of the object never changes its status."""
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
