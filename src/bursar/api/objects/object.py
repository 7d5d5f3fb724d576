"""Handlers for objects of any kind: Kubernetes' verbs on top of the verbs in ops."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from bursar.api.http.body import dry_run, idempotency_key_of, read_object
from bursar.api.http.route import JSON, Answer, Call, Outcome, Stream
from bursar.api.http.seats import party
from bursar.api.http.spool import Spool, SpooledPieces, SpoolFull
from bursar.api.objects.queue_position import with_estimate, with_place
from bursar.api.objects.render import rows, show, show_written
from bursar.api.objects.table import table, wants_table
from bursar.api.objects.watch import is_watch, watch
from bursar.commands.command import Reply, Written
from bursar.commands.objects.object import Recall, finalizers_refused, no_namespace, not_below, not_found, out_of_sight
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.access import Identity, Role, is_delegate, reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal, invalid
from bursar.core.values.replace import replace
from bursar.core.values.selector import SelectorError, parse, parse_fields
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as ops
from bursar.ops.quota.cluster_ceiling import unsatisfiable
from bursar.store.objects import listing
from bursar.store.objects.listing import ListedObject, ListPage, Query
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode, render_list
from bursar.wire.shared.kind import Kind, Object
from bursar.wire.shared.reading import Body

LIMIT_MAX = 10_000
PAGE_MAX = 200  # objects read by one statement
WHOLE_BYTES_MAX = 256 << 10  # longer responses are spooled for slow clients
_NOT_OURS = invalid("the continue token is invalid", hint="Start the list again without it.")


def kind_of(call: Call) -> Kind:
    assert call.route.kind is not None
    return call.route.kind


def key_of(call: Call) -> Key:
    return Key(kind_of(call).name, call.parameters.get("namespace", ""), call.parameters.get("name", ""))


def origin_of(call: Call, reason: str = "") -> Origin:
    return Origin(call.identity.actor, call.route.verb, reason)


def is_admin(call: Call) -> bool:
    """Whether the caller may exempt work from the permits of its tenant."""
    return call.identity.role is Role.SYSTEM_ADMIN


# Reading.


async def find(call: Call, key: Key) -> Stored | Refusal:
    """Find an object that the caller may see; another tenant's object is not found."""
    found = await ops.get(call.context.runtime, key)
    if isinstance(found, Refusal):
        return found
    return found if await may_see(call, found) else not_found(key)


async def may_see(call: Call, one: Stored) -> bool:
    if BY_NAME[one.key.kind].placed and reach(call.identity).node:
        nodes = {node["name"] for node in msgspec.json.decode(one.status).get("nodes", ())}
        return reach(call.identity).sees_bound(nodes)
    return await call.context.sees(call.identity, one.tenant)


async def get(call: Call) -> Outcome:
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    return await one_answer(call, 200, item(await with_estimate(call, found)))


def item(one: Stored) -> ListedObject:
    return ListedObject(one.key.namespace, one.key.name, one.tenant, one.revision, one.doc, one.status)


async def one_answer(call: Call, status: int, one: ListedObject) -> Answer:
    kind = kind_of(call)
    if wants_table(call.headers.get("accept", "")):
        plain = await rows(call.context, kind, [one], call.identity)
        return Answer(
            status,
            encode(table(kind, plain, now_seconds=time.time(), list_meta={"resourceVersion": str(one.revision)})),
        )
    (body,) = await show(call.context, kind, [one], call.identity)
    return Answer(status, body)


async def query_of(call: Call) -> Query | Refusal:
    """Parse the query of a list, a watch or the deletion of a collection. In a namespace of another tenant it matches
    nothing, as in a missing one, so that the two cannot be distinguished."""
    kind = kind_of(call)
    try:
        labels = parse(call.query.get("labelSelector", ""))
        fields = parse_fields(
            call.query.get("fieldSelector", ""), ("metadata.name", "metadata.namespace", *kind.selectable)
        )
    except SelectorError as error:
        return invalid(str(error))
    tenants, node = await call.context.visible_tenants(call.identity), ""
    if kind.visible_to_all:
        tenants = None
    elif kind.placed and call.identity.node:
        tenants, node = None, call.identity.node
    return Query(kind.name, call.parameters.get("namespace", ""), tenants, node, labels, fields)


async def list_or_watch(call: Call) -> Outcome:
    query = await query_of(call)
    if isinstance(query, Refusal):
        return query
    if is_watch(call):
        return await watch(call, query)
    return await list_objects(call, query)


async def list_objects(call: Call, query: Query) -> Outcome:
    page = _page_of(call, query)
    if isinstance(page, Refusal):
        return page
    if call.query.get("includeObject", "Metadata") not in ("None", "Metadata", "Object"):
        return invalid("includeObject must be None, Metadata or Object")
    query, first_revision = page
    if not 0 < query.limit <= PAGE_MAX:
        return await _list_in_pages(call, query, first_revision)
    async with call.context.database.reader() as db:
        found = await listing.load_page(db, query)
    items = b",".join(await _shown(call, found.items))
    head, tail = _around(call, first_revision or found.revision, found)
    if len(items) <= WHOLE_BYTES_MAX:
        return Answer(200, b"".join((head, items, tail)))
    spool = call.context.spools.open(party(call.identity))
    try:
        await spool.write(items)
    except SpoolFull as full:
        spool.close()
        return full.refusal
    return _spooled(head, spool, tail)


async def _list_in_pages(call: Call, query: Query, first_revision: int) -> Outcome:
    """Spool a list of several pages, and send it without holding a connection."""
    context = call.context
    spool = context.spools.open(party(call.identity))
    try:
        async with (
            context.lists.taken(call.identity),
            context.database.reader() as db,
            aclosing(listing.load_all(db, query, PAGE_MAX)) as pages,
        ):
            async for found in pages:
                if items := await _shown(call, found.items):
                    await spool.write(b"," * bool(spool.size) + b",".join(items))
        head, tail = _around(call, first_revision or found.revision, found)
        if spool.size <= WHOLE_BYTES_MAX:
            body = b"".join([head, *[piece async for piece in spool.read()], tail])
            spool.close()
            return Answer(200, body)
        return _spooled(head, spool, tail)
    except SpoolFull as full:
        spool.close()
        return full.refusal
    except BaseException:
        spool.close()
        raise


def _spooled(head: bytes, spool: Spool, tail: bytes) -> Stream:
    """A response of known length whose middle is in a spool. If it is truncated, the connection breaks."""
    length = len(head) + spool.size + len(tail)
    return Stream(SpooledPieces(head, spool, tail), JSON, {"Content-Length": str(length)}, breaks=True)


async def _shown(call: Call, items: Sequence[ListedObject]) -> list[bytes]:
    """Render objects of a list, or rows of a table."""
    kind = kind_of(call)
    if not wants_table(call.headers.get("accept", "")):
        return await show(call.context, kind, items, call.identity)
    include: Any = call.query.get("includeObject", "Metadata")
    plain = await rows(call.context, kind, items, call.identity)
    shown = table(kind, plain, now_seconds=time.time(), include_object=include, with_columns=False)
    return [encode(row) for row in shown["rows"]]


def _around(call: Call, revision: int, found: ListPage) -> tuple[bytes, bytes]:
    """The text before and after the objects of a list or the rows of a table."""
    kind, token = kind_of(call), ""
    if found.more:
        last = found.items[-1]
        token = base64.urlsafe_b64encode(encode([revision, last.namespace, last.name])).decode()
    if wants_table(call.headers.get("accept", "")):
        meta = {"resourceVersion": str(revision), **({"continue": token} if token else {})}
        whole = encode(table(kind, (), now_seconds=0, list_meta=meta))
    else:
        whole = render_list(kind, (), revision, token)
    return whole[:-2], whole[-2:]


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
        return _NOT_OURS
    if not 0 <= revision < 2**63 or "\0" in namespace + name:
        return _NOT_OURS
    return replace(query, after=(namespace, name)), revision


# Writing.


async def create(call: Call) -> Outcome:
    kind = kind_of(call)
    body = await read_object(call, kind)
    if isinstance(body, Refusal):
        return body
    return await create_object(call, kind, body)


async def create_object(call: Call, kind: Kind, body: Body) -> Outcome:
    idempotency_key, dry = idempotency_key_of(call, body.request_id), dry_run(call)
    if isinstance(idempotency_key, Refusal):
        return idempotency_key
    if isinstance(dry, Refusal):
        return dry
    one = body.object
    call.subject = one.metadata.name or ""
    if refusal := finalizers_refused(call.identity, kind, one) or await adopt(call, kind, one):
        return refusal
    seen = await namespace_tenant(call, kind)
    if isinstance(seen, Refusal):
        return seen
    if never := await never_runs(call, kind, one, seen):
        # A request that was accepted before gets the same response, whatever has become of the nodes.
        reply = await recall(call, idempotency_key, never)
        if isinstance(reply, Written):
            reply = await with_place(call, kind, one, reply)
        return await written_answer(call, kind, reply, 201, body.warnings)
    if kind.queue is not None:
        call.context.depths.look()
    command = create_command(kind, one, origin_of(call), idempotency_key, seen_tenant=seen, admin=is_admin(call))
    reply = await ops.submit(call.context.runtime, command, tenant=seen or call.identity.tenant, dry_run=dry)
    if isinstance(reply, Written):
        reply = await with_place(call, kind, one, reply)
    return await written_answer(call, kind, reply, 201, body.warnings)


async def never_runs(call: Call, kind: Kind, one: Object, tenant: str | None) -> Refusal | None:
    """Refuse work that could never run on the nodes that its tenant may use."""
    if kind.demand is None:
        return None
    demand = kind.demand(one)
    return await unsatisfiable(call.context.runtime, demand.spec, demand.members, tenant=tenant or "", path=demand.path)


async def adopt(call: Call, kind: Kind, one: Object) -> Refusal | None:
    """Complete a new object by its creator's tenant; refuse to create it in a tenant that the creator does not see."""
    given = next((name for name, _ in call.identity.tenants), "") if is_delegate(call.identity) else ""
    kind.adopt(one, call.identity.tenant or given)
    owner = kind.owner(one)
    if kind.above is not None and is_delegate(call.identity):
        above = kind.above(one)
        if not above or not await call.context.sees(call.identity, above):
            return not_below(call.identity, kind)
        return None
    if not await call.context.sees(call.identity, owner):
        return out_of_sight(kind, owner)
    return None


async def namespace_tenant(call: Call, kind: Kind) -> str | Refusal | None:
    """The tenant of the namespace in the path; None for kinds without namespaces."""
    return await tenant_of_namespace(call) if kind.namespaced else None


async def tenant_of_namespace(call: Call) -> str | Refusal:
    """The tenant of the namespace in the path."""
    name = call.parameters["namespace"]
    namespace = (await call.context.tree()).namespaces.get(name)
    if namespace is None:
        namespace = (await call.context.tree(fresh=True)).namespaces.get(name)
    if namespace is None or not await call.context.sees(call.identity, namespace.tenant):
        return _missing_namespace(call.identity, name)
    return namespace.tenant


def _missing_namespace(identity: Identity, name: str) -> Refusal:
    """Not found; the hint to create the namespace is only for callers who see all: for others it may exist and be
    hidden."""
    hint = "" if reach(identity).everything else "Name another namespace with -n: `bursar get namespaces` lists yours."
    return no_namespace(name, hint)


async def written_answer(
    call: Call, kind: Kind, reply: Reply, status: int = 200, warnings: tuple[str, ...] = ()
) -> Outcome:
    if isinstance(reply, Refusal):
        return reply
    assert isinstance(reply, Written)
    if kind.in_tree:
        call.context.forget_tree()
    headers = {"Warning": ", ".join(f"299 - {json.dumps(one[:256])}" for one in warnings[:32])} if warnings else {}
    accept = call.headers.get("accept", "")
    if wants_table(accept):
        key = reply.key
        return await one_answer(
            call, status, ListedObject(key.namespace, key.name, "", max(reply.revision, 0), reply.doc, reply.status)
        )
    return Answer(status, await show_written(call.context, kind, reply, call.identity), JSON, headers)


async def recalled(call: Call, idempotency_key: IdempotencyKey | None, otherwise: Reply) -> Outcome:
    """Answer a request that changes nothing; a repeated request gets its earlier response."""
    return await written_answer(call, kind_of(call), await recall(call, idempotency_key, otherwise))


async def recall(call: Call, idempotency_key: IdempotencyKey | None, otherwise: Reply) -> Reply:
    if idempotency_key is None:
        return otherwise
    command = Recall(key=key_of(call), origin=origin_of(call), idempotency_key=idempotency_key, otherwise=otherwise)
    return await call.context.runtime.changing.submit(command, call.identity.tenant)
