"""`bursar bench schedule`: decisions and durable bindings per second.

Deciding is measured on a cluster state in memory, against a plain loop over all nodes. Binding is measured on a
real PostgreSQL: a submitted backlog until all of it is bound. Latency is that of one submission at a time on an idle
cluster, from the call until its placement can be read by another connection; and once more as a user has it, from the
request over HTTP to the processes of `bursar serve` until a watch shows the placement.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from bursar.bench.crowd import percentile_ms
from bursar.bench.server import BenchServer, create, register, running_runtime, running_server
from bursar.core.nodes.node import NodeCapacity, Shortage, device_list, fit
from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask, InterPodTerm, Operator, Requirement, Shape, Spread, Where
from bursar.core.objects.charge import Charge
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.values.selector import Op, Selector, SelectorTerm
from bursar.loops.schedule import Scheduler
from bursar.ops.runtime.feed import Feed
from bursar.ops.runtime.gc_tuning import calm_collector
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader import resign, stand
from bursar.sim.shape import NodeShape

GIB = 1 << 30
GANG_SIZE = 8
TENANTS = 8
NODE = {"cpu": 96_000, "memory": 768 * GIB, "nvidia.com/gpu": 8000, "pods": 110_000}
NOW = 1_700_000_000.0
LEADER = "bench"
DATABASE_URL = "BURSAR_DATABASE_URL"
WARM_UP = 20  # submissions to a server that has just started
SAMPLE = 20  # decisions of the baseline, which is slow
SIZES = ((1, 4, 16), (1, 8, 32), (1, 8, 64), (2, 16, 64))  # GPUs, cores and GiB, requested round robin
GPUS = [gpus for gpus, _, _ in SIZES]
STALL_SECONDS = 60.0  # without a placement: then no more will come
IDLE_CYCLES = 3  # that decide nothing, one after another: then none will

Log = Callable[[str], None]


class TooMuch(ValueError):
    """A benchmark that the nodes cannot hold; the message has their capacity."""


def require_capacity(*, nodes: int, allocations: int, mix: str, singles: int) -> None:
    """Refuse work that would stay pending for ever, by its GPUs, the scarcest resource."""
    if mix == "preempt":
        return
    there = nodes * NODE["nvidia.com/gpu"] // 1000
    if mix == "gang" and allocations % GANG_SIZE:
        raise TooMuch(f"--allocations must be a multiple of {GANG_SIZE} for gangs of {GANG_SIZE}, got {allocations}")
    if (asked := _gpus(allocations)) > there:
        most = max(count for count in range(there + 1) if _gpus(count) <= there)
        raise TooMuch(
            f"{nodes} nodes have {there} GPUs, and {allocations} allocations ask for {asked}: they would wait for ever."
            f" Ask for at most {most} --allocations, or for more --nodes."
        )
    # They are measured one by one on a cluster of their own, and once more over HTTP.
    if (asked := _gpus(singles) + WARM_UP + singles) > there:
        raise TooMuch(
            f"{nodes} nodes have {there} GPUs, and {singles} submissions measured one at a time need {asked}:"
            " ask for fewer --singles, or for more --nodes."
        )


def _gpus(count: int) -> int:
    return count // len(GPUS) * sum(GPUS) + sum(GPUS[: count % len(GPUS)])


async def run(*, nodes: int, allocations: int, mix: str, singles: int, growth: bool, log: Log) -> dict[str, Any]:
    require_capacity(nodes=nodes, allocations=allocations, mix=mix, singles=singles)
    figures: dict[str, Any] = {"bench": "schedule", "nodes": nodes, "allocations": allocations, "mix": mix}
    figures |= measure_decisions(nodes, allocations, mix)
    log(
        f"decide   {figures['decide_per_s']:9.0f}/s  {mix}, {nodes} nodes;"
        f" a loop over the nodes {figures['loop_per_s']:.0f}/s"
    )
    if figures["decided"] < allocations and mix != "preempt":
        raise TooMuch(f"{nodes} nodes hold only {figures['decided']} of the {allocations} allocations")
    if growth:
        figures["growth"] = []
        for size in (1000, 5000, 20_000):
            grown = measure_decisions(size, min(allocations, 4 * size), mix)
            figures["growth"].append({"nodes": size, "decide_per_s": grown["decide_per_s"]})
            log(f"decide   {grown['decide_per_s']:9.0f}/s  {mix}, {size} nodes")
    if mix != "preempt":
        async with _sample_cluster(nodes) as (runtime, _):
            figures |= await _bind_backlog(runtime, allocations, mix)
            log(f"bound    {figures['bound_per_s']:9.0f}/s  {allocations} submitted before, until durably bound")
        async with _sample_cluster(nodes) as (runtime, url):
            waits = sorted(await _bind_singles(runtime, singles))
            figures |= {"singles": singles, "p50_ms": percentile_ms(waits, 0.5), "p99_ms": percentile_ms(waits, 0.99)}
            log(f"single   {figures['p50_ms']:9.1f} ms p50, {figures['p99_ms']:.1f} ms p99, submitted until bound")
            await resign(runtime.database, LEADER)
            async with running_server(environment={DATABASE_URL: url}) as server:
                waits = sorted(await _serve_singles(server, singles))
            figures |= {"served_p50_ms": percentile_ms(waits, 0.5), "served_p99_ms": percentile_ms(waits, 0.99)}
            log(f"served   {figures['served_p50_ms']:9.1f} ms p50, {figures['served_p99_ms']:.1f} ms p99, over HTTP")
    return figures


# Deciding.


def measure_decisions(nodes: int, allocations: int, mix: str) -> dict[str, Any]:
    cluster = _cluster(nodes, mix)
    asks = list(_asks(allocations, mix))
    for ask in asks:
        cluster.wait(ask)
    policy = SchedulingPolicy(min_runtime_seconds=60.0)
    calm_collector()  # as the scheduler does once its state is loaded
    started, decided, idle = time.perf_counter(), 0, 0
    more = True
    while more and idle < IDLE_CYCLES:
        plan = decide(cluster, policy, NOW)
        now = sum(len(one.members) for one in plan.bindings) + sum(len(one.asks) for one in plan.preemptions)
        decided, idle, more = decided + now, 0 if now else idle + 1, plan.more
    seconds = time.perf_counter() - started
    loop = _loop_over_nodes(nodes, asks)
    return {
        "decided": decided,
        "decide_per_s": round(decided / seconds),
        "loop_per_s": round(loop, 1),
        "decide_vs_loop": round(decided / seconds / loop, 1),
    }


def _cluster(nodes: int, mix: str) -> ClusterState:
    cluster = ClusterState()
    for index in range(nodes):
        labels = {
            "kubernetes.io/hostname": f"node-{index:05}",
            "rack": f"rack-{index // 32}",
            "topology.kubernetes.io/zone": f"zone-{index % 5}",
            "gpu-type": ("a100", "h100")[index % 2],
        }
        cluster.put_node(f"node-{index:05}", NODE, labels=labels)
    if mix == "preempt":
        _fill(cluster, nodes)
    return cluster


def _fill(cluster: ClusterState, nodes: int) -> None:
    """Every device taken by work of low priority that has run for a while."""
    shape = Shape((("cpu", 8000), ("memory", 64 * GIB), ("nvidia.com/gpu", 1000)))
    for index in range(8 * nodes):
        cluster.wait(Ask(f"low-{index}", "low", f"low-{index}", "low", shape, NOW - 7200.0, priority=0))
    more = True
    while more:
        more = decide(cluster, SchedulingPolicy(placements_max=100_000), NOW - 3600.0).more


def _asks(count: int, mix: str) -> Iterator[Ask]:
    shapes = [replace(shape, where=_where(mix)) for shape in _shapes()]
    labels = {"app": "bench"}
    for index in range(count):
        shape = shapes[index % len(shapes)]
        gang = None
        if mix == "gang":
            shape = shapes[index // GANG_SIZE % len(shapes)]
            gang = Gang(f"gang-{index // GANG_SIZE}", GANG_SIZE)
        yield Ask(
            f"ask-{index:06}", f"team-{index % TENANTS}" if gang is None else "team-0", f"ask-{index:06}",
            f"team-{index % TENANTS}" if gang is None else "team-0", shape, NOW - 60.0 + index * 1e-4,
            priority=1000, gang=gang, labels=labels if mix == "spread" else {}, charge=_CHARGE,
        )  # fmt: skip


_CHARGE = Charge()


def _shapes() -> list[Shape]:
    return [
        Shape((("cpu", cpu * 1000), ("memory", memory * GIB), ("nvidia.com/gpu", gpus * 1000)))
        for gpus, cpu, memory in SIZES
    ]


def _where(mix: str) -> Where:
    if mix == "affinity":
        either = (Requirement("gpu-type", Operator.IN, ("a100", "h100")), Requirement("rack", Operator.EXISTS))
        rather = (Requirement("topology.kubernetes.io/zone", Operator.IN, ("zone-1", "zone-2")),)
        return Where(node_labels=(("gpu-type", "a100"),), required=(either,), preferred=((50, rather),))
    if mix == "spread":
        app = Selector((SelectorTerm("app", Op.IN, ("bench",)),))
        return Where(spreads=(Spread("topology.kubernetes.io/zone", 1, True, app),), rather_apart=((1, _BESIDE),))
    return Where()


_BESIDE = InterPodTerm("kubernetes.io/hostname", Selector((SelectorTerm("app", Op.IN, ("other",)),)))


def _loop_over_nodes(nodes: int, asks: list[Ask]) -> float:
    """The baseline: for each decision, test every node, and take the fullest that fits."""
    capacities = [NodeCapacity(f"node-{index:05}", 1, True, NODE, {}, device_list(NODE, {})) for index in range(nodes)]
    started = time.perf_counter()
    for ask in asks[:SAMPLE]:
        requests = dict(ask.shape.requests)
        best = min(
            (capacity for capacity in capacities if not isinstance(fit(capacity, requests, exclusive=False), Shortage)),
            key=lambda capacity: capacity.allocatable["cpu"] - capacity.allocated.get("cpu", 0),
        )
        assert best is not None
    return SAMPLE / (time.perf_counter() - started)


# Binding.


@asynccontextmanager
async def _sample_cluster(nodes: int) -> AsyncIterator[tuple[Runtime, str]]:
    """A runtime on a database of its own with nodes and namespaces, and the database's URL."""
    async with running_runtime() as (runtime, url):
        await register(runtime, NodeShape(nodes))
        for index in range(TENANTS):
            await create(runtime, "Tenant", {"metadata": {"name": f"team-{index}"}, "spec": {}})
            labels = {"bursar.io/tenant": f"team-{index}"}
            await create(runtime, "Namespace", {"metadata": {"name": f"team-{index}", "labels": labels}})
        yield runtime, url


async def _bind_backlog(runtime: Runtime, allocations: int, mix: str) -> dict[str, Any]:
    documents = [_document(index, mix) for index in range(allocations)]
    for first in range(0, allocations, 1024):
        await asyncio.gather(*(create(runtime, "Allocation", one) for one in documents[first : first + 1024]))
    scheduler = await _elected(runtime)
    gc.collect()
    started = time.perf_counter()
    running = asyncio.create_task(scheduler.run())
    try:
        await scheduler.loaded.wait()
        loaded = time.perf_counter()
        await _until_idle(runtime, scheduler)
        seconds = time.perf_counter() - loaded
        bound = await _count_bound(runtime)
    finally:
        await _stop(running)
    return {"bound": bound, "bound_per_s": round(bound / seconds), "load_s": round(loaded - started, 2)}


async def _until_idle(runtime: Runtime, scheduler: Scheduler) -> None:
    """Run cycles until nothing is pending, or nothing more is placed."""
    bound, since = -1, time.perf_counter()
    while not scheduler.idle.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await scheduler.idle.wait()
        if scheduler.idle.is_set():
            return
        now = await _count_bound(runtime)
        if now != bound:
            bound, since = now, time.perf_counter()
        elif time.perf_counter() - since > STALL_SECONDS:
            raise TooMuch(f"only {bound} were placed: nothing more was within {STALL_SECONDS:g} s")


async def _count_bound(runtime: Runtime) -> int:
    async with runtime.database.reader() as db:
        bound: int = await db.fetchval("SELECT count(*) FROM placement")
    return bound


async def _bind_singles(runtime: Runtime, count: int) -> list[float]:
    """One at a time: submitted, decided and bound here, and seen by a reader of the feed. The cluster is idle, and
    nothing is being started any more."""
    scheduler = await _elected(runtime)
    running = asyncio.create_task(scheduler.run())
    await scheduler.loaded.wait()
    scheduler.worker.call()
    await scheduler.worker.arrived()
    feed = Feed(runtime.database)
    runtime.on_commit.append(feed.nudge)
    follower = await feed.follow("Allocation")
    waits = []
    for index in range(count):
        started = time.perf_counter()
        await create(runtime, "Allocation", _document(index, "basic"))
        async with asyncio.timeout(STALL_SECONDS):
            bound = False
            while not bound:
                bound = any(fed.fields["status.phase"] == "Scheduled" for fed in await follower.wait(5.0))
        waits.append(time.perf_counter() - started)
    await feed.close()
    await _stop(running)
    return waits


async def _serve_singles(server: BenchServer, count: int) -> list[float]:
    """One at a time: submitted by one connection, seen by another that watches."""
    path, waits = "/api/v1/namespaces/team-0/allocations", []
    async with server.client() as client:
        revision = (await client.get(path)).json()["metadata"]["resourceVersion"]
        following = {"watch": "true", "resourceVersion": revision}
        async with client.stream("GET", path, params=following) as watch:
            told = watch.aiter_lines()
            for number in range(WARM_UP + count):
                started = time.perf_counter()
                answer = await client.post(path, json=_document((count + number) * TENANTS, "basic"))
                answer.raise_for_status()
                # An event of this allocation: earlier ones have passed, and the next is not submitted yet.
                async with asyncio.timeout(STALL_SECONDS):
                    while json.loads(await anext(told))["object"]["status"]["phase"] != "Scheduled":
                        pass
                waits.append(time.perf_counter() - started)
    return waits[WARM_UP:]


async def _elected(runtime: Runtime) -> Scheduler:
    fence = await stand(runtime.database, LEADER, 3600.0)
    assert fence is not None
    return Scheduler(runtime, fence.number)


async def _stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _document(index: int, mix: str) -> dict[str, Any]:
    gpus, cpu, memory = SIZES[index % len(SIZES)]
    scheduling: dict[str, Any] = {}
    team, labels = index % TENANTS, {}
    if mix == "affinity":
        scheduling = {"nodeSelector": {"gpu-type": "nvidia-a100"}}
    elif mix == "spread":
        labels = {"app": "bench"}
        spread = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": labels}}
        scheduling = {"topologySpreadConstraints": [spread]}
    elif mix == "gang":
        team = index // GANG_SIZE % TENANTS
        scheduling = {"gangScheduling": {"groupId": f"gang-{index // GANG_SIZE}", "minMembers": GANG_SIZE}}
    return {
        "metadata": {"name": f"job-{index:06}", "namespace": f"team-{team}", "labels": labels},
        "spec": {
            "resources": {"requests": {"cpu": str(cpu), "memory": f"{memory}Gi", "nvidia.com/gpu": str(gpus)}},
            **({"scheduling": scheduling} if scheduling else {}),
        },
    }
