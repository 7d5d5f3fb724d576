"""Handlers for objects of any kind: Kubernetes' verbs over the verbs of ops."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import replace
from typing import Any

import msgspec

from bursar.api.body import Body, check, claim_of, convert, dry_run, identify, read_document, read_object, too_deep
from bursar.api.route import JSON, Answer, Call, Outcome
from bursar.api.show import documents, show, show_written, shown
from bursar.api.table import table, wants_table
from bursar.api.watch import watch
from bursar.core.access import reach
from bursar.core.object import Key, Origin, Stored
from bursar.core.patch import PatchError, TestFailed, json_patch, merge, strategic
from bursar.core.refusal import Code, Refusal, invalid
from bursar.core.selector import SelectorError, parse, parse_fields
from bursar.ops import object as ops
from bursar.ops.command import Command, Reply, Written
from bursar.ops.dispatch import change_command, create_command, delete_command, owner_of
from bursar.ops.object import Preconditions, conflict, not_found
from bursar.store import listing
from bursar.store.listing import Item, Query
from bursar.store.request import Claim
from bursar.wire.document import encode, render_list
from bursar.wire.kind import Kind, Object
from bursar.wire.namespace import DEFAULT_TENANT, TENANT_LABEL

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PATCHES = (MERGE_PATCH, STRATEGIC_PATCH, JSON_PATCH, APPLY_PATCH)

LIMIT_MAX = 10_000
AT_ONCE = 256


def kind_of(call: Call) -> Kind:
    assert call.route.kind is not None
    return call.route.kind


def key_of(call: Call) -> Key:
    return Key(kind_of(call).name, call.parameters.get("namespace", ""), call.parameters.get("name", ""))


def origin_of(call: Call, reason: str = "") -> Origin:
    return Origin(call.identity.actor, call.route.verb, reason)


# Reading.


async def find(call: Call, key: Key) -> Stored | Refusal:
    """An object that the caller may see. What is another tenant's does not exist."""
    found = await ops.get(call.house.office, key)
    if isinstance(found, Refusal):
        return found
    return found if await may_see(call, found) else not_found(key)


async def may_see(call: Call, one: Stored) -> bool:
    if one.key.kind == "Allocation" and reach(call.identity).node:
        nodes = {node["name"] for node in msgspec.json.decode(one.status).get("nodes", ())}
        return reach(call.identity).sees_bound(nodes)
    return await call.house.sees(call.identity, one.tenant)


async def get(call: Call) -> Outcome:
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    return await one_answer(call, 200, item(found))


def item(one: Stored) -> Item:
    return Item(one.key.namespace, one.key.name, one.tenant, one.revision, one.doc, one.status)


async def one_answer(call: Call, status: int, one: Item) -> Answer:
    kind = kind_of(call)
    if wants_table(call.headers.get("accept", "")):
        plain = await documents(call.house.database, kind, [one])
        return Answer(
            status,
            encode(table(kind, plain, now_seconds=time.time(), list_meta={"resourceVersion": str(one.revision)})),
        )
    (body,) = await show(call.house.database, kind, [one])
    return Answer(status, body)


async def query_of(call: Call) -> Query | Refusal:
    kind = kind_of(call)
    try:
        labels = parse(call.query.get("labelSelector", ""))
        fields = parse_fields(
            call.query.get("fieldSelector", ""), ("metadata.name", "metadata.namespace", *kind.selectable)
        )
    except SelectorError as error:
        return invalid(str(error))
    if refusal := await _namespace_hidden(call):
        return refusal
    tenants, node = await call.house.visible_tenants(call.identity), ""
    if tenants is not None and (kind.name in ("Node", "PriorityClass", "Queue", "Tier", "Settings")):
        tenants = None
    if tenants == () and kind.name == "Allocation" and call.identity.node:
        tenants, node = None, call.identity.node
    return Query(kind.name, call.parameters.get("namespace", ""), tenants, node, labels, fields)


async def _namespace_hidden(call: Call) -> Refusal | None:
    """A namespace of another tenant does not exist; one that nobody has is merely empty, as in Kubernetes."""
    name = call.parameters.get("namespace", "")
    if not name or reach(call.identity).everything or reach(call.identity).node:
        return None
    namespace = (await call.house.tree()).namespaces.get(name)
    if namespace is None or await call.house.sees(call.identity, namespace.tenant):
        return None
    return Refusal(Code.NOT_FOUND, f'namespaces "{name}" not found')


async def list_or_watch(call: Call) -> Outcome:
    query = await query_of(call)
    if isinstance(query, Refusal):
        return query
    if call.query.get("watch", "") in ("true", "1"):
        return await watch(call, query)
    return await list_objects(call, query)


async def list_objects(call: Call, query: Query) -> Outcome:
    page = _page_of(call, query)
    if isinstance(page, Refusal):
        return page
    query, first_revision = page
    async with call.house.database.reader() as db:
        found = await listing.load_page(db, query)
    revision = first_revision or found.revision
    token = ""
    if found.more:
        last = found.items[-1]
        token = base64.urlsafe_b64encode(encode([revision, last.namespace, last.name])).decode()
    kind = kind_of(call)
    if wants_table(call.headers.get("accept", "")):
        meta = {"resourceVersion": str(revision), **({"continue": token} if token else {})}
        plain = await documents(call.house.database, kind, found.items)
        include: Any = call.query.get("includeObject", "Metadata")
        if include not in ("None", "Metadata", "Object"):
            return invalid("includeObject must be None, Metadata or Object")
        return Answer(200, encode(table(kind, plain, now_seconds=time.time(), list_meta=meta, include_object=include)))
    return Answer(200, render_list(kind, await show(call.house.database, kind, found.items), revision, token))


def _page_of(call: Call, query: Query) -> tuple[Query, int] | Refusal:
    limit = call.query.get("limit", "0")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
        return invalid("limit must be a number from 0 on")
    query = replace(query, limit=min(int(limit), LIMIT_MAX) if int(limit) else 0)
    token = call.query.get("continue", "")
    if not token:
        return query, 0
    try:
        revision, namespace, name = msgspec.json.decode(
            base64.urlsafe_b64decode(token.encode()), type=tuple[int, str, str]
        )
    except (ValueError, msgspec.MsgspecError):
        return invalid("the continue token is not one of ours", hint="Start the list anew, without it.")
    return replace(query, after=(namespace, name)), revision


# Writing.


async def create(call: Call) -> Outcome:
    kind = kind_of(call)
    body = read_object(call, kind)
    if isinstance(body, Refusal):
        return body
    return await create_object(call, kind, body)


async def create_object(call: Call, kind: Kind, body: Body) -> Outcome:
    claim, dry = claim_of(call, body.request_id), dry_run(call)
    if isinstance(claim, Refusal):
        return claim
    if isinstance(dry, Refusal):
        return dry
    one = body.object
    if refusal := await adopt(call, kind, one):
        return refusal
    seen = await namespace_tenant(call, kind)
    if isinstance(seen, Refusal):
        return seen
    command = create_command(kind, one, origin_of(call), claim, seen_tenant=seen)
    reply = await ops.submit(call.house.office, command, tenant=seen or call.identity.tenant, dry_run=dry)
    return await written_answer(call, kind, reply, 201, body.warnings)


async def adopt(call: Call, kind: Kind, one: Object) -> Refusal | None:
    """A namespace without a tenant becomes its creator's; nobody creates or moves one into a tenant out of sight."""
    if kind.name != "Namespace":
        return None
    labels = dict(one.metadata.labels or {})
    labels.setdefault(TENANT_LABEL, call.identity.tenant or DEFAULT_TENANT)
    one.metadata.labels = labels
    if not await call.house.sees(call.identity, owner_of(kind, one)):
        return Refusal(Code.FORBIDDEN, f"you may not put a namespace into tenant {labels[TENANT_LABEL]!r}")
    return None


async def namespace_tenant(call: Call, kind: Kind) -> str | Refusal | None:
    """Whose namespace the path names; None for kinds without one."""
    if not kind.namespaced:
        return None
    name = call.parameters["namespace"]
    namespace = (await call.house.tree()).namespaces.get(name)
    if namespace is None:
        namespace = (await call.house.tree(fresh=True)).namespaces.get(name)
    missing = Refusal(
        Code.NOT_FOUND, f'namespaces "{name}" not found', f"Create it first: bursar create namespace {name}"
    )
    if namespace is None or not await call.house.sees(call.identity, namespace.tenant):
        return missing
    return namespace.tenant


async def written_answer(
    call: Call, kind: Kind, reply: Reply, status: int = 200, warnings: tuple[str, ...] = ()
) -> Outcome:
    if isinstance(reply, Refusal):
        return reply
    assert isinstance(reply, Written)
    if kind.in_tree:
        call.house.forget_tree()
    headers = {"Warning": ", ".join(f'299 - "{one}"' for one in warnings)} if warnings else {}
    accept = call.headers.get("accept", "")
    if wants_table(accept):
        key = reply.key
        return await one_answer(
            call, status, Item(key.namespace, key.name, "", max(reply.revision, 0), reply.doc, reply.status)
        )
    return Answer(status, await show_written(call.house.database, kind, reply), JSON, headers)


async def replace_object(call: Call) -> Outcome:
    """PUT: the body is the whole object; what it does not say is gone. The status has its own place."""
    kind = kind_of(call)
    body = read_object(call, kind)
    if isinstance(body, Refusal):
        return body
    pinned = body.object.metadata.resource_version or ""
    wanted: dict[str, Any] = msgspec.to_builtins(body.object)
    return await edit_object(call, lambda _: wanted, pinned=pinned, request_id=body.request_id, warnings=body.warnings)


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
    if media == APPLY_PATCH and isinstance(await find(call, key_of(call)), Refusal):
        return await _apply_new(call, kind, patch)

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
    return await edit_object(call, edited, pinned="", request_id=request_id if isinstance(request_id, str) else "")


async def _apply_new(call: Call, kind: Kind, document: Any) -> Outcome:
    """Server-side apply of what does not exist yet creates it."""
    body = convert(call, kind, document)
    if isinstance(body, Refusal):
        return body
    if causes := identify(call, kind, body.object) + check(kind, body.object):
        return invalid("; ".join(f"{one.field}: {one.message}" for one in causes), *causes)
    return await create_object(call, kind, body)


async def edit_object(
    call: Call, edited: Any, *, pinned: str, request_id: str = "", warnings: tuple[str, ...] = ()
) -> Outcome:
    """Apply an edit to the latest version, and again while others are faster, unless the caller named a version."""
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
        result = next_version(call, kind, before, document, edited)
        if isinstance(result, Refusal):
            return result
        one, spec_changed = result
        if one is None:
            unchanged.append(before)
            return Refusal(Code.CONFLICT, "nothing to change")
        return change_command(
            kind,
            before,
            one,
            origin_of(call),
            claim,
            spec_changed=spec_changed,
            status=call.route.subresource == "status",
        )

    reply = await ops.change(
        call.house.office,
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


async def recalled(call: Call, claim: Claim | None, otherwise: Reply) -> Outcome:
    """What a request that has nothing left to do is answered: as before, if it is a repetition."""
    if claim is not None:
        recall = ops.Recall(key=key_of(call), origin=origin_of(call), claim=claim, otherwise=otherwise)
        otherwise = await call.house.office.changing.submit(recall, call.identity.tenant)
    return await written_answer(call, kind_of(call), otherwise)


def next_version(
    call: Call, kind: Kind, before: Stored, document: dict[str, Any], edited: Any
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
    version = str(wanted.get("metadata", {}).get("resourceVersion") or before.revision)
    if version != str(before.revision):
        return conflict(before.key)
    if refusal := _other_identity(before, wanted):
        return refusal
    merged = _only_what_may_change(call.route.subresource == "status", document, wanted)
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
    return body.object, _spec(after) != _spec(document)


def _spec(document: dict[str, Any]) -> dict[str, Any]:
    """Everything but metadata and status: not every kind calls it spec."""
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}


def faulty_causes(kind: Kind, causes: list[Any]) -> Refusal:
    return Refusal(
        Code.INVALID,
        f"{kind.name} is invalid: " + "; ".join(f"{one.field}: {one.message}" for one in causes),
        causes=tuple(causes),
    )


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


# Deleting.


class DeleteOptions(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    grace_period_seconds: int | None = None
    propagation_policy: str | None = None
    orphan_dependents: bool | None = None
    preconditions: dict[str, str | None] | None = None
    dry_run: list[str] | None = None


def delete_options(call: Call) -> DeleteOptions | Refusal:
    options = DeleteOptions()
    if call.body.strip():
        document = read_document(call)
        if isinstance(document, Refusal):
            return document
        try:
            options = msgspec.convert(document, DeleteOptions)
        except msgspec.ValidationError as error:
            return invalid(f"DeleteOptions is invalid: {error}")
    grace = call.query.get("gracePeriodSeconds", "")
    if grace:
        if not (grace.isascii() and grace.isdigit() and len(grace) < 8):
            return invalid("gracePeriodSeconds must be a number of seconds")
        options.grace_period_seconds = int(grace)
    if options.grace_period_seconds is not None and not 0 <= options.grace_period_seconds < 10**7:
        return invalid("gracePeriodSeconds must be a number of seconds, not negative")
    if options.dry_run:
        call.query = {**call.query, "dryRun": options.dry_run[0]}
    return options


def _preconditions(options: DeleteOptions) -> Preconditions | Refusal:
    given = options.preconditions or {}
    revision = given.get("resourceVersion") or ""
    if revision and not (revision.isascii() and revision.isdigit()):
        return invalid("preconditions.resourceVersion must be a number")
    return Preconditions(given.get("uid") or "", int(revision) if revision else None)


async def delete(call: Call) -> Outcome:
    options = delete_options(call)
    if isinstance(options, Refusal):
        return options
    preconditions, claim, dry = _preconditions(options), claim_of(call), dry_run(call)
    for refusal in (preconditions, claim, dry):
        if isinstance(refusal, Refusal):
            return refusal
    kind = kind_of(call)
    assert not isinstance(claim, Refusal)
    assert isinstance(preconditions, Preconditions)
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return await recalled(call, claim, found)
    command = delete_command(
        kind,
        found,
        origin_of(call),
        claim,
        preconditions=preconditions,
        grace_seconds=options.grace_period_seconds,
    )
    reply = await ops.submit(call.house.office, command, tenant=found.tenant, dry_run=bool(dry))
    return await written_answer(call, kind, reply)


async def delete_collection(call: Call) -> Outcome:
    """Delete everything that matches; what was gone meanwhile is fine."""
    query, options, dry = await query_of(call), delete_options(call), dry_run(call)
    for refusal in (query, options, dry):
        if isinstance(refusal, Refusal):
            return refusal
    assert isinstance(query, Query)
    assert isinstance(options, DeleteOptions)
    kind = kind_of(call)
    async with call.house.database.reader() as db:
        page = await listing.load_page(db, query)
    replies = await delete_all(call, kind, page.items, options.grace_period_seconds, dry=bool(dry))
    items = [shown(reply) for reply in replies if isinstance(reply, Written)]
    refused = [one for one in replies if isinstance(one, Refusal) and one.code is not Code.NOT_FOUND]
    return refused[0] if refused else Answer(200, render_list(kind, items, page.revision))


async def delete_all(
    call: Call, kind: Kind, items: Any, grace_seconds: int | None, *, dry: bool, reason: str = ""
) -> list[Reply]:
    async def delete_one(one: Item) -> Reply:
        found = await ops.get(call.house.office, Key(kind.name, one.namespace, one.name))
        if isinstance(found, Refusal):
            return found
        command = delete_command(
            kind, found, origin_of(call, reason), preconditions=Preconditions(), grace_seconds=grace_seconds
        )
        return await ops.submit(call.house.office, command, tenant=one.tenant, dry_run=dry)

    replies: list[Reply] = []
    for start in range(0, len(items), AT_ONCE):
        replies += await asyncio.gather(*(delete_one(one) for one in items[start : start + AT_ONCE]))
    return replies
