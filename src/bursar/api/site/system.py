"""Handlers about the server itself: health, readiness, metrics, discovery, the OpenAPI documents and the docs page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from bursar.api.http import metrics
from bursar.api.http.route import JSON, Answer, Call, Handler, Outcome
from bursar.api.nodes.cluster import show_nodes, show_scheduling
from bursar.api.site.gauges import show_approvals, show_budgets, show_drift, show_sealing
from bursar.core.quota.quota import Counter
from bursar.core.values.access import reach
from bursar.core.values.quantity import UNLIMITED, is_bytes
from bursar.core.values.refusal import Code, Refusal
from bursar.store.db.database import AWAY
from bursar.store.objects import change as change_store
from bursar.store.quota import quota as quota_store
from bursar.wire.shared.document import encode

if TYPE_CHECKING:
    from bursar.api.http.context import ApiContext


async def hello(_: Call) -> Outcome:
    """The minimal route, as a baseline for benchmarks."""
    return Answer(200, b'{"hello":"world"}')


async def healthz(_: Call) -> Outcome:
    """Liveness: the process runs and its event loop responds."""
    return Answer(200, b"ok", "text/plain; charset=utf-8")


async def readyz(call: Call) -> Outcome:
    """Readiness: the database answers and accepts writes."""
    if fault := await call.context.fault():
        return Refusal(Code.UNAVAILABLE, f"not ready: {fault}", retry_after_seconds=1)
    return Answer(200, b"ok", "text/plain; charset=utf-8")


async def show_metrics(call: Call) -> Outcome:
    """The metrics, which name every tenant: for roles that see everything, from any address.

    A client address is no authentication: behind a proxy on this machine, all requests come from it.
    """
    identity = await call.context.authenticate(call.headers)
    if isinstance(identity, Refusal):
        return identity
    if not reach(identity).everything:
        return Refusal(
            Code.FORBIDDEN,
            f"role {identity.role} may not read the metrics of all tenants",
            "Use a token that sees all tenants, as that of a service does, or serve them with --metrics HOST:PORT.",
        )
    return Answer(200, await read_metrics(call.context), CONTENT_TYPE_LATEST)


async def read_metrics(context: ApiContext) -> bytes:
    """Render the counters of this process, and usage from the database, in Prometheus' text format."""
    await show_scheduling(context)
    await show_nodes(context)
    await show_approvals(context.runtime)
    await show_drift(context.runtime)
    await show_budgets(context.runtime)
    await show_sealing(context.runtime)
    runtime = context.runtime
    for lane in (runtime.creating, runtime.changing, runtime.binding, runtime.shaping):
        metrics.LANE_DEPTH.labels(lane.name).set(lane.size)
    try:
        async with context.database.reader() as db:
            rows = await quota_store.load_tenants(db)
            position = await change_store.load_position(db)
        metrics.FEED_REVISION.set(position.revision)
        behind = position.revision - context.feed.revision if context.feed.followers else 0
        metrics.FEED_BEHIND.set(max(0, behind))
        _show_usage(rows)
    except AWAY:
        pass  # The counters of this process are still useful.
    return generate_latest()


def _show_usage(rows: Mapping[tuple[str, str], Counter]) -> None:
    metrics.USAGE.clear()
    metrics.LIMIT.clear()
    for (scope, dimension), counter in rows.items():
        tenant = scope.partition(":")[2] or scope
        unit = 1 if is_bytes(dimension) else 1000
        metrics.USAGE.labels(tenant, dimension, "accepted").set(counter.accepted / unit)
        metrics.USAGE.labels(tenant, dimension, "bound").set(counter.bound / unit)
        if counter.hard != UNLIMITED:
            metrics.LIMIT.labels(tenant, dimension).set(counter.hard / unit)


def fixed(body: bytes, media_type: str = JSON, headers: Mapping[str, str] | None = None) -> Handler:
    """A handler that serves a constant document."""
    answer = Answer(200, body, media_type, headers or {})

    async def handler(_: Call) -> Outcome:
        return answer

    return handler


async def api_paths(_: Call) -> Outcome:
    return Answer(200, encode({"paths": ["/api", "/api/v1", "/apis", "/docs", "/healthz", "/metrics", "/openapi.json",
                                         "/readyz", "/version"]}))  # fmt: skip
