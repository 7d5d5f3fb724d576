"""Handlers of cluster figures: capacity, utilisation and queues."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from bursar.api.http import metrics
from bursar.api.http.context import ApiContext
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.workloads.explanation import time_of
from bursar.core.nodes.liveness import is_alarming
from bursar.core.nodes.node import WHOLE
from bursar.core.nodes.node_claim import ClaimState
from bursar.core.scheduling.explain.explain_types import Figures, QueueFigures
from bursar.core.values.access import Reach
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import format_granted
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes.claim import load_pool
from bursar.ops.nodes.cluster import ClusterTotals
from bursar.ops.nodes.fence import load_patience
from bursar.ops.runtime.clock import now
from bursar.store.db.database import AWAY
from bursar.store.nodes import liveness as liveness_store
from bursar.wire.shared.document import encode

# Without a leader, the cluster's figures are shown without the scheduler's.
FIGURES_SECONDS_MAX = 1.0
GPU = "/gpu"
UNKNOWN = float("nan")


class NodeCounts(msgspec.Struct, rename="camel"):
    total: int
    ready: int
    not_ready: int
    cordoned: int


class MeasuredResource(msgspec.Struct, rename="camel"):
    """The capacity and use of a resource; `used` and `utilization` are null if no node measures it."""

    capacity: str
    allocatable: str
    requested: str
    used: str | None
    utilization: float | None


class CountedDevices(msgspec.Struct, rename="camel"):
    capacity: int | float
    allocatable: int | float
    requested: int | float
    used: int | float | None
    utilization: float | None


class ClusterFigures(msgspec.Struct, rename="camel"):
    nodes: NodeCounts
    cpu: MeasuredResource
    memory: MeasuredResource
    gpu: CountedDevices


class SchedulingFigures(msgspec.Struct):
    pending_allocations: int = msgspec.field(name="pendingAllocations")
    scheduling_rate: str = msgspec.field(name="schedulingRate")
    avg_latency: int = msgspec.field(name="avgSchedulingLatencyMs")
    p99_latency: int = msgspec.field(name="p99SchedulingLatencyMs")
    preemptions: int = msgspec.field(name="preemptionsLast1h")


class Utilization(msgspec.Struct, rename="camel"):
    timestamp: str
    cluster: ClusterFigures
    scheduling: SchedulingFigures | UnsetType = UNSET


class QueueState(msgspec.Struct, rename="camel", kw_only=True):
    name: str
    depth: int
    oldest_item: str | UnsetType = UNSET
    avg_wait_time: str
    p50_wait_time: str
    p99_wait_time: str
    scheduled: int = msgspec.field(name="scheduledLast1h")


class QueueStates(msgspec.Struct, rename="camel"):
    queues: list[QueueState]


async def queues(call: Call) -> Outcome:
    found = await call.context.leader_queries.figures()
    if isinstance(found, Refusal):
        return found
    return Answer(200, encode(QueueStates([_queue(one) for one in found.queues])))


async def utilization(call: Call) -> Outcome:
    totals = await call.context.cluster.totals()
    found = await call.context.leader_queries.figures(FIGURES_SECONDS_MAX)
    scheduling = UNSET if isinstance(found, Refusal) else _scheduling(found)
    return Answer(200, encode(Utilization(timestamp(now()), _cluster(totals), scheduling)))


def _queue(one: QueueFigures) -> QueueState:
    wait = one.wait
    return QueueState(
        name=one.name,
        depth=one.depth,
        oldest_item=time_of(one.oldest_at) or UNSET,
        avg_wait_time=_seconds(wait.avg_seconds),
        p50_wait_time=_seconds(wait.p50_seconds),
        p99_wait_time=_seconds(wait.p99_seconds),
        scheduled=wait.count,
    )


def _seconds(seconds: float) -> str:
    return f"{round(seconds)}s"


def _cluster(totals: ClusterTotals) -> ClusterFigures:
    nodes = NodeCounts(totals.total, totals.ready, totals.not_ready, totals.cordoned)
    return ClusterFigures(nodes, _measured(totals, "cpu"), _measured(totals, "memory"), _gpus(totals))


def _measured(totals: ClusterTotals, name: str) -> MeasuredResource:
    allocatable, used = totals.allocatable.get(name, 0), totals.used.get(name)
    return MeasuredResource(
        format_granted(name, totals.capacity.get(name, 0)),
        format_granted(name, allocatable),
        format_granted(name, totals.requested.get(name, 0)),
        None if used is None else format_granted(name, used),
        None if used is None else _part(used, allocatable),
    )


def _gpus(totals: ClusterTotals) -> CountedDevices:
    """Devices of all vendors together."""

    def total(amounts: dict[str, int]) -> int:
        return sum(amount for name, amount in amounts.items() if name.endswith(GPU))

    allocatable = total(totals.allocatable)
    used = total(totals.used) if any(name.endswith(GPU) for name in totals.used) else None
    return CountedDevices(
        _devices(total(totals.capacity)),
        _devices(allocatable),
        _devices(total(totals.requested)),
        None if used is None else _devices(used),
        None if used is None else _part(used, allocatable),
    )


def _devices(amount: int) -> int | float:
    return amount / WHOLE if amount % WHOLE else amount // WHOLE


def _part(used: int, of: int) -> float:
    return round(used / of, 4) if of else 0.0


def _scheduling(found: Figures) -> SchedulingFigures:
    return SchedulingFigures(
        found.waiting,
        rate(found.per_second),
        round(found.latency.avg_seconds * 1000),
        round(found.latency.p99_seconds * 1000),
        found.preemptions,
    )


def rate(per_second: float) -> str:
    """A rate, rounded: below ten to two digits, so that a low rate is not shown as 0."""
    return f"{per_second:.2g}/sec" if per_second < 10 else f"{round(per_second)}/sec"


# For Prometheus.


async def show_nodes(context: ApiContext) -> None:
    """The liveness of nodes as gauges."""
    metrics.NODES.clear()
    metrics.NODES_CLAIMED.clear()
    try:
        patience = await load_patience(context.runtime)
        async with context.database.reader() as db:
            phases = await liveness_store.count_phases(db)
            heard, silent = await liveness_store.count_silent(db, patience.not_ready_seconds)
        pool = await load_pool(context.runtime, Reach(everything=True))
    except AWAY:
        metrics.NODES_SILENT.set(UNKNOWN)
        metrics.NODES_ALARM.set(UNKNOWN)
        return
    for phase, count in phases.items():
        metrics.NODES.labels(phase).set(count)
    for state in ClaimState:
        metrics.NODES_CLAIMED.labels(str(state)).set(sum(claim.state is state for _, claim in pool.claims))
    metrics.NODES_CLAIMABLE.set(pool.size)
    metrics.NODES_SILENT.set(silent / heard if heard else 0.0)
    metrics.NODES_ALARM.set(is_alarming(silent, heard))


async def show_scheduling(context: ApiContext) -> None:
    """The leader's figures as gauges; without a leader that answers there are none."""
    for one in (metrics.WAITING, metrics.QUEUE_DEPTH, metrics.QUEUE_AGE, metrics.TIME_TO_SCHEDULE):
        one.clear()
    metrics.SCHEDULED_PER_SECOND.set(UNKNOWN)
    metrics.PREEMPTIONS.set(UNKNOWN)
    try:
        found = await context.leader_queries.figures(FIGURES_SECONDS_MAX)
    except AWAY:
        return
    if isinstance(found, Refusal):
        return
    for code, count in found.waiting_by_reason.items():
        metrics.WAITING.labels(code).set(count)
    at = datetime.now(UTC).timestamp()
    for queue in found.queues:
        oldest_at = at if queue.oldest_at is None else queue.oldest_at
        metrics.QUEUE_DEPTH.labels(queue.name).set(queue.depth)
        metrics.QUEUE_AGE.labels(queue.name).set(max(0.0, at - oldest_at))
        for quantile, seconds in (("0.5", queue.wait.p50_seconds), ("0.99", queue.wait.p99_seconds)):
            metrics.TIME_TO_SCHEDULE.labels(queue.name, quantile).set(seconds)
    metrics.SCHEDULED_PER_SECOND.set(found.per_second)
    metrics.PREEMPTIONS.set(found.preemptions)
