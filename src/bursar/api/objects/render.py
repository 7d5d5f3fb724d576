"""How objects are shown: most as they are stored, some with figures that are joined when they are read.

Usage, heartbeats and what a node has given away change with every write elsewhere; they are never stored in the object
they belong to, so they cost no change, and are always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from bursar.api.http.context import ApiContext
from bursar.core.nodes.node import EXCLUSIVE
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Tree, quota_scope
from bursar.core.quota.visibility import conceal_grant, is_strangers
from bursar.core.values.access import Identity, Reach, reach
from bursar.core.values.quantity import UNLIMITED, format_amount, percent
from bursar.core.values.redaction import LAST_APPLIED
from bursar.ops.runtime.clock import now, timestamp
from bursar.ops.runtime.command import Written
from bursar.store.db.database import Connection, Database
from bursar.store.nodes import heartbeat as heartbeat_store
from bursar.store.nodes import node as node_store
from bursar.store.objects.listing import ListedObject
from bursar.store.quota import quota as quota_store
from bursar.wire.shared.document import encode, render
from bursar.wire.shared.kind import Kind
from bursar.wire.shared.limits import dimension_name

JOINED = frozenset({"ResourceQuota", "Node"})
# Everybody may read these, and they name tenants that not everybody may know of.
NAMING = frozenset({"Node", "PriorityClass"})


def shown(written: Written) -> bytes:
    return render(written.doc, written.status, max(written.revision, 0))


def conceals(kind: Kind, reader: Identity) -> bool:
    """Whether objects of a kind are shown to somebody without the names and figures of tenants they do not see."""
    return kind.name in NAMING and not reach(reader).everything


async def show(context: ApiContext, kind: Kind, items: Sequence[ListedObject], reader: Identity) -> list[bytes]:
    """The items as this reader sees them."""
    if not items or not (kind.name in JOINED or conceals(kind, reader)):
        return [render(item.doc, item.status, item.revision) for item in items]
    return [encode(document) for document in await _told(context, kind, items, reader)]


async def rows(
    context: ApiContext, kind: Kind, items: Sequence[ListedObject], reader: Identity
) -> list[dict[str, Any]]:
    """The same, as plain documents for a table: of allocations with the priority that is in force."""
    plain = await _told(context, kind, items, reader)
    if kind.name == "Allocation" and plain:
        for one, priority in zip(plain, await context.priorities.of(plain), strict=True):
            one["status"] = {**(one.get("status") or {}), "priority": priority}
    return plain


async def _told(
    context: ApiContext, kind: Kind, items: Sequence[ListedObject], reader: Identity
) -> list[dict[str, Any]]:
    plain = await documents(context.database, kind, items)
    if conceals(kind, reader):
        whose = reach(reader)
        tree = await context.tree_for(whose)
        for one in plain:
            _conceal(tree, whose, kind, one)
    return plain


def _conceal(tree: Tree, whose: Reach, kind: Kind, document: dict[str, Any]) -> None:
    """Names of tenants that the reader does not see, and the figures of nodes that are for such tenants alone: these
    are those tenants' own. A node reads its own object as it is."""
    is_node = kind.name == "Node"
    if is_node and whose.node == document["metadata"]["name"]:
        return
    where, field = (document.get("spec") or {}, "tenants") if is_node else (document, "allowedTenants")
    names = where.get(field) or []
    if (told := conceal_grant(tree, whose, names)) == names:
        return
    where[field] = told
    # What kubectl applied names them as well.
    (document["metadata"].get("annotations") or {}).pop(LAST_APPLIED, None)
    if is_node and is_strangers(tree, whose, names):
        for figures in ("allocated", "used"):
            document["status"].pop(figures, None)


async def documents(database: Database, kind: Kind, items: Sequence[ListedObject]) -> list[dict[str, Any]]:
    """The same, as plain documents."""
    plain: list[dict[str, Any]] = [msgspec.json.decode(render(one.doc, one.status, one.revision)) for one in items]
    if kind.name in JOINED and plain:
        async with database.reader() as db:
            await (_join_quotas if kind.name == "ResourceQuota" else _join_nodes)(db, plain)
    return plain


async def show_written(context: ApiContext, kind: Kind, written: Written, reader: Identity) -> bytes:
    key = written.key
    item = ListedObject(key.namespace, key.name, "", max(written.revision, 0), written.doc, written.status)
    (one,) = await show(context, kind, [item], reader)
    return one


async def _join_quotas(db: Connection, quotas: Sequence[dict[str, Any]]) -> None:
    scopes = [quota_scope(one["metadata"]["namespace"], one["metadata"]["name"]) for one in quotas]
    counters = await quota_store.load_scopes(db, scopes)
    earlier = await quota_store.load_trend(db, scopes, now() - timedelta(hours=24))
    for scope, one in zip(scopes, quotas, strict=True):
        spec = one.get("spec", {})
        one["status"] = quota_status(spec, scope, counters, earlier)


def quota_status(
    spec: dict[str, Any],
    scope: str,
    counters: dict[tuple[str, str], Counter],
    earlier: dict[tuple[str, str], tuple[int, int]],
) -> dict[str, Any]:
    """hard, used and how they relate; soft limits only warn."""
    hard, soft = spec.get("hard", {}), spec.get("soft", {})
    status: dict[str, Any] = {"hard": hard, "used": {}, "utilization": {}, "bound": {}}
    trend: dict[str, str] = {}
    warnings: list[str] = []
    for name in {**hard, **soft}:
        dimension = dimension_name(name)
        counter = counters.get((scope, dimension), Counter())
        status["used"][name] = format_amount(dimension, counter.accepted)
        status["bound"][name] = format_amount(dimension, counter.bound)
        if counter.hard != UNLIMITED:
            status["utilization"][name] = percent(counter.accepted, counter.hard)
            before = earlier.get((scope, dimension))
            if before is not None and before[0] not in (0, UNLIMITED) and counter.hard:
                points = round(100 * counter.accepted / counter.hard) - round(100 * before[1] / before[0])
                trend[name] = f"{points:+d}% over 24h"
        if counter.soft is not None and counter.accepted > counter.soft:
            limit = format_amount(dimension, counter.soft)
            warnings.append(f"{name}: {status['used'][name]} used, soft limit {limit}")
    if soft:
        status["soft"] = soft
    if trend:
        status["trend"] = trend
    if warnings:
        status["warnings"] = warnings
    return status


async def _join_nodes(db: Connection, nodes: Sequence[dict[str, Any]]) -> None:
    names = [one["metadata"]["name"] for one in nodes]
    capacities = await node_store.load(db, names)
    seen = await node_store.load_last_seen(db, names)
    loads = await heartbeat_store.load_loads(db, names)
    for name, one in zip(names, nodes, strict=True):
        status = one.setdefault("status", {})
        if name in capacities:
            given = {key: value for key, value in capacities[name].allocated.items() if key != EXCLUSIVE}
            status["allocated"] = {key: format_amount(key, value) for key, value in given.items()}
        if name in seen:
            status["lastHeartbeatTime"] = timestamp(seen[name])
        if name in loads:
            status["used"] = msgspec.json.decode(loads[name])
