"""Figures joined to objects when they are read: quota counters, the load of nodes, priorities, identities of users.

They change with writes elsewhere and are never stored in the objects that show them, so they cause no changes and are
always exact. `JOINS` has them by kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias

import msgspec

from bursar.api.http.context import ApiContext
from bursar.core.nodes.node import EXCLUSIVE
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import quota_scope
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import UNLIMITED, format_amount, percent
from bursar.ops.runtime.clock import now
from bursar.store.access import identity as identity_store
from bursar.store.db.database import Connection
from bursar.store.nodes import heartbeat as heartbeat_store
from bursar.store.nodes import node as node_store
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.node import NODE
from bursar.wire.kinds.resourcequota import RESOURCE_QUOTA
from bursar.wire.kinds.user import USER
from bursar.wire.shared.limits import dimension_name

Documents: TypeAlias = Sequence[dict[str, Any]]


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
    """hard, used and their relation; soft limits only warn."""
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


async def _join_identities(db: Connection, users: Documents) -> None:
    found = await identity_store.load_identities(db, [one["metadata"]["uid"] for one in users])
    for one in users:
        one["identities"] = found.get(one["metadata"]["uid"], [])


async def _join_priorities(context: ApiContext, allocations: Documents) -> None:
    for one, priority in zip(allocations, await context.priorities.of(allocations), strict=True):
        one["status"] = {**(one.get("status") or {}), "priority": priority}


JOINS: Final[Mapping[str, Callable[[Connection, Documents], Awaitable[None]]]] = {
    RESOURCE_QUOTA.name: _join_quotas,
    NODE.name: _join_nodes,
    USER.name: _join_identities,
}
# Figures that only columns of a table show.
TABLE_JOINS: Final[Mapping[str, Callable[[ApiContext, Documents], Awaitable[None]]]] = {
    ALLOCATION.name: _join_priorities,
}
