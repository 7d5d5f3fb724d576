"""Projects (project.openshift.io/v1): namespaces under another name. A new project gets a tenant of its own.

The tenant has the name of the project, below the first tenant of the caller's token, and outlives the project with its
usage and its ledger. Its members end with the project.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from msgspec import UNSET

from bursar.api.http.body import (
    dry_run,
    idempotency_key_of,
    path_of,
    read_document,
)
from bursar.api.http.route import JSON, Answer, Call, Outcome, Stream
from bursar.api.objects import delete as deletion
from bursar.api.objects import edit
from bursar.api.objects import object as objects
from bursar.commands.objects.object import not_below
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.tenant_tree import Namespace as NamespaceRule
from bursar.core.values.access import Identity, Role, is_delegate
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.core.values.replace import replace
from bursar.core.values.selector import parse_fields
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as ops
from bursar.store.objects import listing
from bursar.store.objects.listing import Query
from bursar.wire.kinds.member import MEMBER
from bursar.wire.kinds.namespace import NAMESPACE, TENANT_LABEL, Namespace, NamespaceSpec
from bursar.wire.kinds.tenant import TENANT, Tenant, TenantSpec
from bursar.wire.shared.document import encode
from bursar.wire.shared.meta import ObjectMeta, Text, Wire
from bursar.wire.shared.reading import read

PROJECT_API: Final = "project.openshift.io/v1"
# On the tenant that a project brought: a later project of the name may have it.
PROJECT_LABEL: Final = "bursar.io/project"
_DISPLAY_NAME: Final = "openshift.io/display-name"
_DESCRIPTION: Final = "openshift.io/description"

CHANGES: Final = tuple(media for media in edit.PATCHES if media != edit.APPLY_PATCH)

# The beginning of a stored namespace and of a list of them. Inside a JSON text no quote is unescaped, so no value of an
# object contains these.
_HEADS: Final = (
    (b'{"apiVersion":"v1","kind":"Namespace",', b'{"apiVersion":"%s","kind":"Project",' % PROJECT_API.encode()),
    (b'{"kind":"NamespaceList","apiVersion":"v1",', b'{"kind":"ProjectList","apiVersion":"%s",' % PROJECT_API.encode()),
)
_HEAD_BYTES_MAX: Final = max(len(namespace) for namespace, _ in _HEADS)


class Project(Namespace, kw_only=True):
    """A namespace, as projects show it."""


class ProjectRequest(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    display_name: Text = UNSET
    description: Text = UNSET


# Reading.


async def list_projects(call: Call) -> Outcome:
    call = _on_namespaces(call)
    query = await objects.query_of(call)
    return query if isinstance(query, Refusal) else _as_projects(await objects.list_objects(call, query))


async def get_project(call: Call) -> Outcome:
    return _as_projects(await objects.get(_on_namespaces(call)))


def _on_namespaces(call: Call) -> Call:
    """The same request, on namespaces."""
    return replace(call, route=replace(call.route, kind=NAMESPACE))


def _as_projects(outcome: Outcome) -> Outcome:
    match outcome:
        case Refusal():
            return replace(outcome, message=outcome.message.replace('namespaces "', 'projects "', 1))
        case Answer():
            return replace(outcome, body=_renamed(outcome.body))
        case Stream():
            # Its length has changed.
            return replace(outcome, pieces=_renamed_pieces(outcome.pieces), headers={})


def _renamed(body: bytes) -> bytes:
    for namespace, project in _HEADS:
        body = body.replace(namespace, project)
    return body


async def _renamed_pieces(pieces: Any) -> AsyncGenerator[bytes, None]:
    """Rename in a stream. The end of a piece is held back, because a beginning may span two pieces."""
    held = b""
    try:
        async for piece in pieces:
            text = _renamed(held + piece)
            held = text[1 - _HEAD_BYTES_MAX :]
            yield text[: 1 - _HEAD_BYTES_MAX]
        yield held
    finally:
        await pieces.aclose()


# Writing.


async def create_project(call: Call) -> Outcome:
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    return await _create(call, document, "Project")


async def request_project(call: Call) -> Outcome:
    """Create a project from a request, whose texts become annotations."""
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
        return invalid("the body must be an object with metadata")
    if refusal := _wrong_kind(document, "ProjectRequest"):
        return refusal
    try:
        request = msgspec.convert(document, ProjectRequest)
    except msgspec.ValidationError as error:
        return invalid(f"ProjectRequest is invalid: {error}")
    texts = {_DISPLAY_NAME: request.display_name, _DESCRIPTION: request.description}
    given = request.metadata.annotations or {}
    request.metadata.annotations = {**{name: text for name, text in texts.items() if text}, **given}
    return await _create(call, {"metadata": msgspec.to_builtins(request.metadata)}, "Project")


async def may_request(_: Call) -> Outcome:
    """Answer clients that ask first whether they may request projects."""
    return Answer(200, encode({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))


async def _create(call: Call, document: Any, kind: str) -> Outcome:
    """Create the namespace of a project, after its tenant."""
    if isinstance(document, dict) and (refusal := _wrong_kind(document, kind)):
        return refusal
    asked, call = call, _on_namespaces(call)
    body = read(NAMESPACE, _without_kind(document), path_of(call))
    if isinstance(body, Refusal):
        return body
    one: Namespace = body.object
    asked.subject = call.subject = one.metadata.name or ""
    taken = (await call.context.tree(fresh=True)).namespaces.get(call.subject)
    if taken is not None and idempotency_key_of(call, body.request_id) is None:
        return _exists(taken)
    labels = dict(one.metadata.labels or {})
    if TENANT_LABEL not in labels:
        if taken is None and (refused := await _ensure_tenant(call, one)):
            return refused
        labels[TENANT_LABEL] = call.subject
    one.metadata.labels = labels
    one.spec = one.spec if isinstance(one.spec, NamespaceSpec) else NamespaceSpec()
    if one.spec.quota_required is UNSET:
        # A portal replaces a quota by deleting it first: meanwhile nothing is admitted.
        one.spec.quota_required = True
    return _as_projects(await objects.create_object(call, NAMESPACE, body))


def _exists(taken: NamespaceRule) -> Refusal:
    message = f'projects "{taken.name}" already exists'
    if taken.terminating:
        return Refusal(Code.ALREADY_EXISTS, f"object is being deleted: {message}", "Wait until it is gone.")
    return Refusal(Code.ALREADY_EXISTS, message, "Choose another name.")


def _wrong_kind(document: dict[str, Any], kind: str) -> Refusal | None:
    given = (document.get("apiVersion") or PROJECT_API, document.get("kind") or kind)
    if given == (PROJECT_API, kind):
        return None
    return invalid(f"this path is for {kind} of {PROJECT_API}")


def _without_kind(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    return {name: value for name, value in document.items() if name not in ("apiVersion", "kind")}


async def _ensure_tenant(call: Call, namespace: Namespace) -> Refusal | None:
    """Create the tenant of a new project, or take over that of an earlier project of the name, without its members."""
    name, parent = call.subject, _parent(call.identity)
    spec = TenantSpec()
    if parent:
        spec.parent = parent
    if text := (namespace.metadata.annotations or {}).get(_DISPLAY_NAME):
        spec.display_name = text
    tenant = Tenant(metadata=ObjectMeta(name=name, labels={PROJECT_LABEL: "true"}), spec=spec)
    if parent and not await call.context.sees(call.identity, parent):
        return not_below(call.identity, TENANT)
    command = create_command(TENANT, tenant, objects.origin_of(call))
    reply = await ops.submit(call.context.runtime, command, tenant=parent)
    call.context.forget_tree()
    if not isinstance(reply, Refusal) or reply.code is not Code.ALREADY_EXISTS:
        return reply if isinstance(reply, Refusal) else None
    found = await ops.get(call.context.runtime, Key(TENANT.name, "", name))
    if isinstance(found, Refusal) or not is_of_project(found) or not await call.context.sees(call.identity, name):
        return Refusal(Code.ALREADY_EXISTS, f'tenants "{name}" already exists', "Choose another name for the project.")
    return await _end_members(call, name)


def _parent(identity: Identity) -> str:
    """The tenant below which the caller's projects get their tenants; empty for callers who manage all tenants."""
    return identity.tenants[0][0] if is_delegate(identity) else ""


def is_of_project(tenant: Stored) -> bool:
    """Whether a project brought the tenant, and not an administrator."""
    return tenant.labels.get(PROJECT_LABEL) == "true"


async def change_project(call: Call) -> Outcome:
    """PUT and PATCH: the body may name the object by the kind of the path."""
    if call.media_type == edit.APPLY_PATCH:
        return Refusal(
            Code.UNSUPPORTED_MEDIA,
            "projects are not created or changed by server-side apply",
            f"Send one of {', '.join(CHANGES)}.",
        )
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    if isinstance(document, dict) and (refusal := _wrong_kind(document, "Project")):
        return refusal
    change = edit.replace_object if call.route.method == "PUT" else edit.patch_object
    media = JSON if call.route.method == "PUT" else call.media_type
    namespaces = replace(
        _on_namespaces(call),
        body=encode(_without_kind(document)),
        document=_without_kind(document),
        headers={**call.headers, "content-type": media},
    )
    return _as_projects(await change(namespaces))


async def delete_project(call: Call) -> Outcome:
    """Delete the namespace, which ends its work, and the members of a tenant that has no other."""
    call = _on_namespaces(call)
    found = await objects.find(call, objects.key_of(call))
    if isinstance(found, Refusal):
        return _as_projects(found)
    tenant = await ops.get(call.context.runtime, Key(TENANT.name, "", found.tenant))
    is_own = not isinstance(tenant, Refusal) and is_of_project(tenant) and found.tenant == found.key.name
    if not is_own and call.identity.role is Role.SERVICE:
        return Refusal(
            Code.FORBIDDEN,
            f'projects "{found.key.name}" was not created as a project: role {call.identity.role} may not delete it',
            "Delete the namespace as an administrator.",
        )
    outcome = await deletion.delete(call)
    is_done = isinstance(outcome, Answer) and not dry_run(call)
    if is_own and is_done and (refusal := await _end_members(call, found.tenant)):
        return refusal
    return _as_projects(outcome)


async def _end_members(call: Call, tenant: str) -> Refusal | None:
    """Remove the members of a tenant: a later project of the name begins without them."""
    others = [one for one in (await call.context.tree(fresh=True)).namespaces.values() if one.tenant == tenant]
    if any(one.name != tenant for one in others):
        return None
    of_tenant = parse_fields(f"spec.tenant={tenant}", MEMBER.selectable)
    async with call.context.database.reader() as db:
        page = await listing.load_page(db, Query(MEMBER.name, fields=of_tenant))
    replies = await deletion.delete_all(call, MEMBER, page.items, None, dry=False, reason="its project was deleted")
    failed = [one for one in replies if isinstance(one, Refusal) and one.code is not Code.NOT_FOUND]
    return failed[0] if failed else None
