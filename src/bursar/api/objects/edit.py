"""Handlers that change objects: replace, and the four kinds of patch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from bursar.api.http.body import dry_run, idempotency_key_of, path_of, read_document, read_object
from bursar.api.http.route import Call, Outcome
from bursar.api.objects.object import create_object, find, key_of, kind_of, origin_of, recalled, written_answer
from bursar.commands.command import Unchanged, Written
from bursar.commands.lifecycle.edit import Document, Edit, as_it_is
from bursar.core.values.names import quoted
from bursar.core.values.patch import json_patch, merge, strategic
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.objects import object as ops
from bursar.wire.shared.kind import Kind, Object
from bursar.wire.shared.reading import read

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PATCHES = (MERGE_PATCH, STRATEGIC_PATCH, JSON_PATCH, APPLY_PATCH)


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
    body = read(kind, document, path_of(call, is_new=True))
    return body if isinstance(body, Refusal) else await create_object(call, kind, body)


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
    edit = Edit(
        kind=kind_of(call), at=path_of(call), patch=patch, identity=call.identity, origin=origin_of(call),
        tree=call.context.runtime.trees.latest, idempotency_key=idempotency_key,
        status=call.route.subresource == "status", lacks_spec=lacks_spec, settle=settle,
    )  # fmt: skip
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
