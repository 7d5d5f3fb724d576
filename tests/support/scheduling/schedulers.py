"""Support for tests of the scheduler: its cluster state as plain values, the loop at work, and nodes that act."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import time
from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.objects.object import Key, Stored
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fleet import ABSENT, NO_LIMIT, PODS
from bursar.core.scheduling.state.placed_columns import Placed
from bursar.core.values.quantity import UNLIMITED
from bursar.loops.informer import Informer
from bursar.loops.schedule import Scheduler
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader import stand
from bursar.sim.work import SECONDS
from bursar.store.db.database import Connection, Unavailable
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.objects.change import Change
from bursar.wire.kinds.registry import BY_NAME
from support.nodes.local_nodes import LocalNodes
from support.runtime.runtime import TEST, code, counters, create, get
from support.scheduling.evictions import assert_books_balance

GPU = "nvidia.com/gpu"
WAIT_SECONDS_MAX = 60.0
# What runs may be preempted at once, and a notice gives no time: tests need not wait for either.
HASTY = SchedulingPolicy(
    min_runtime_seconds=0.0, grace_seconds=0.0, preemption_retry_seconds=0.05, quota_backoff_seconds=600.0
)


# The cluster state as values that can be compared: by names of nodes, whatever rows and columns they have.


def portrait(informer: Informer) -> dict[str, Any]:
    """All that decisions are made of, and the reasons that are stored."""
    cluster = informer.cluster
    return {
        "nodes": {name: _node(cluster, row) for name, row in cluster.fleet.row_of.items()},
        "placed": {uid: _placed(cluster, one) for uid, one in cluster.placed.items()},
        "lines": _lines(cluster),
        "waiting": {uid: group.members[uid] for uid, group in cluster.waiting.items()},
        "groups": {(key, uid) for key, group in cluster.groups.items() for uid in group.members},
        "gangs": {
            key: (one.min_members, one.timeout_seconds, set(one.waiting), set(one.placed), one.started)
            for key, one in cluster.gangs.items()
        },
        "nominated": dict(cluster.nominated),
        "tenants": dict(cluster.tenants),
        "profiles": dict(cluster.profiles),
        "boosts": dict(cluster.boosts),
        "settings": dict(informer.settings),
        "limits": {row: (cell.hard, cell.bound) for row, cell in cluster.limits.cells.items()},
        "tree": cluster.limits.tree,
        "used": {tenant: found for tenant, amounts in cluster.used.items() if (found := _nonzero(amounts))},
        "capacity": _nonzero(cluster.capacity),
        "match_keys": {match_key: _by_name(cluster, rows) for match_key, rows in cluster.topology_counts.rows.items()},
        "shunning": {key: _by_name(cluster, rows) for key, rows in cluster.topology_counts.shunning.items()},
        "noted": dict(informer.noted),
    }


def _node(cluster: ClusterState, row: int) -> dict[str, Any]:
    fleet, now = cluster.fleet, cluster.fleet.now
    told = (fleet.labels[row], fleet.taints[row], fleet.generation[row], fleet.ready[row], fleet.cordoned[row])
    amounts = {
        name: (int(fleet.allocatable[column, row]), int(now.free[column, row]))
        for name, column in fleet.column_of.items()
        if name != PODS or fleet.allocatable[column, row] != NO_LIMIT
    }
    devices = {
        name: (_trimmed(now.devices[column][row].tolist()), int(now.whole[column, row]), int(now.widest[column, row]))
        for name, column in fleet.device_column_of.items()
    }
    return {
        "told": told,
        "amounts": {name: pair for name, pair in amounts.items() if pair != (0, 0)},
        "devices": {name: found for name, found in devices.items() if found != ([], 0, 0)},
        "state": (int(now.placed[row]), bool(now.exclusive[row]), bool(now.open[row])),
    }


def _trimmed(devices: list[int]) -> list[int]:
    """Without those at the end that were never there."""
    while devices and devices[-1] == ABSENT:
        devices.pop()
    return devices


def _placed(cluster: ClusterState, one: Placed) -> tuple[Any, ...]:
    names = {column: name for name, column in cluster.fleet.device_column_of.items()}
    spots = {
        (cluster.fleet.names[spot.row], tuple(sorted((names[column], indices) for column, indices in spot.devices)))
        for spot in one.spots
    }
    return one.ask, spots, one.since, one.ends_at, one.ending


def _lines(cluster: ClusterState) -> list[tuple[Any, ...]]:
    """What runs as columns, line by line."""
    lines, fleet = cluster.running.lines, cluster.fleet
    found = []
    for line in (lines.row >= 0).nonzero()[0].tolist():
        amounts = {name: int(lines.amounts[column, line]) for name, column in fleet.column_of.items()}
        devices = {
            name: {index: part for index, part in enumerate(lines.devices[column][line].tolist()) if part}
            for name, column in fleet.device_column_of.items()
        }
        times = (float(lines.since[line]), float(lines.ends_at[line]), int(lines.priority[line]))
        flags = (bool(lines.free_to_stop[line]), bool(lines.exclusive[line]))
        taken = sorted((name, amount) for name, amount in amounts.items() if amount and name != PODS)
        given = sorted((name, parts) for name, parts in devices.items() if parts)
        found.append((fleet.names[lines.row[line]], times, flags, taken, given))
    return sorted(found, key=repr)


def _by_name(cluster: ClusterState, rows: Mapping[int, int]) -> dict[str, int]:
    return {cluster.fleet.names[row]: count for row, count in rows.items()}


def _nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    return {name: amount for name, amount in amounts.items() if amount}


async def loaded(runtime: Runtime) -> Informer:
    one = Informer(runtime)
    await one.load()
    return one


async def assert_as_if_loaded(runtime: Runtime, informer: Informer) -> None:
    """What was followed is what would be loaded."""
    followed, fresh = portrait(informer), portrait(await loaded(runtime))
    limited = {row: (one.hard, one.bound) for row, one in (await counters(runtime)).items() if one.hard != UNLIMITED}
    assert fresh["limits"] == limited
    for one in (followed, fresh):
        # Which part of a node something took when it was bound is forgotten when that node offers something else.
        one["limits"] = {row: cell for row, cell in one["limits"].items() if row[1] != "nodes"}
    for part, expected in fresh.items():
        assert followed[part] == expected, f"{part}: {_difference(followed[part], expected)}"


def _difference(followed: Any, fresh: Any) -> str:
    if isinstance(followed, dict) and isinstance(fresh, dict):
        keys = [key for key in {**followed, **fresh} if followed.get(key) != fresh.get(key)]
        return "; ".join(f"{key}: {followed.get(key)} followed, {fresh.get(key)} loaded" for key in keys)
    return f"{followed} followed, {fresh} loaded"


# Changing things.


async def edit(
    runtime: Runtime,
    kind: str,
    namespace: str,
    name: str,
    by: Callable[[dict[str, Any]], None],
    *,
    status: bool = False,
) -> Reply:
    """Change a document, as somebody would with a patch."""

    def changed(before: Stored, document: dict[str, Any]) -> Any:
        spec_before = msgspec.json.encode(document.get("spec"))
        by(document)
        one = msgspec.convert(document, BY_NAME[kind].type)
        spec_changed = msgspec.json.encode(document.get("spec")) != spec_before
        return change_command(BY_NAME[kind], before, one, TEST, spec_changed=spec_changed, status=status)

    return await object_ops.change(runtime, Key(kind, namespace, name), changed, tenant="test")


async def label(runtime: Runtime, kind: str, namespace: str, name: str, **labels: str) -> Reply:
    def by(document: dict[str, Any]) -> None:
        document["metadata"].setdefault("labels", {}).update(labels)

    return await edit(runtime, kind, namespace, name, by)


async def annotate(runtime: Runtime, kind: str, namespace: str, name: str, notes: Mapping[str, str]) -> Reply:
    def by(document: dict[str, Any]) -> None:
        document["metadata"].setdefault("annotations", {}).update(notes)

    return await edit(runtime, kind, namespace, name, by)


async def submit(
    runtime: Runtime,
    name: str,
    *,
    where: str = "default",
    seconds: float | None = None,
    spec: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    **requests: Any,
) -> None:
    """`seconds` is how long it runs on simulated nodes: for ever, if nothing is said."""
    resources = {key.replace("gpu", GPU): str(value) for key, value in (requests or {"gpu": 1}).items()}
    metadata: dict[str, Any] = {"name": name, "namespace": where, "labels": dict(labels or {})}
    if seconds is not None:
        metadata["annotations"] = {SECONDS: str(seconds)}
    document = {"metadata": metadata, "spec": {"resources": {"requests": resources}, **(spec or {})}}
    async with asyncio.timeout(60):
        assert code(await _created(runtime, document)) == "ok"


async def _created(runtime: Runtime, document: dict[str, Any]) -> Reply:
    """Submitted as clients do, again after a 503: a process starved in the middle of a transaction is disconnected."""
    while True:
        try:
            return await create(runtime, "Allocation", document)
        except Unavailable:
            await asyncio.sleep(0.05)


def gang(group: str, members: int, timeout: str = "") -> dict[str, Any]:
    told: dict[str, Any] = {"groupId": group, "minMembers": members}
    return {"gangScheduling": {**told, "timeout": timeout} if timeout else told}


class Interrupted:
    """A connection on which something happens right after the first answer."""

    def __init__(self, db: Connection, act: Callable[[], Awaitable[Reply]]) -> None:
        self._db = db
        self._act: Callable[[], Awaitable[Reply]] | None = act

    async def fetch(self, *arguments: Any) -> Any:
        rows = await self._db.fetch(*arguments)
        if self._act is not None:
            act, self._act = self._act, None
            assert code(await act()) == "ok"
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


# Looking.


async def uid_of(runtime: Runtime, name: str) -> str:
    return (await get(runtime, "Allocation", "default", name)).uid


async def status(runtime: Runtime, name: str, where: str = "default") -> dict[str, Any]:
    """Empty when there is no such allocation."""
    found = await object_ops.get(runtime, Key("Allocation", where, name))
    return msgspec.json.decode(found.status) if isinstance(found, Stored) else {}


async def until(
    runtime: Runtime, name: str, holds: Callable[[dict[str, Any]], bool], where: str = "default"
) -> dict[str, Any]:
    """Ask until it holds: the status then."""
    now: dict[str, Any] = {}
    try:
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while not holds(now := await status(runtime, name, where)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{name} stays {now}") from None
    return now


def is_in(*phases: str) -> Callable[[dict[str, Any]], bool]:
    return lambda now: now.get("phase") in phases


def waits_for(reason: str) -> Callable[[dict[str, Any]], bool]:
    return lambda now: now.get("phase") == "Pending" and now.get("reason") == reason


async def changes(runtime: Runtime, name: str, where: str = "default") -> list[Change]:
    """All that ever happened to an allocation of this name."""
    async with runtime.database.reader() as db:
        found = await change_store.load_since(db, 0, 100_000)
    return [one for one in found if one.key == Key("Allocation", where, name)]


async def history(runtime: Runtime, name: str, where: str = "default") -> list[str]:
    """The phases that it went through."""
    phases = [msgspec.json.decode(one.status).get("phase") for one in await changes(runtime, name, where)]
    return [phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase]


async def times_bound(runtime: Runtime) -> dict[str, int]:
    """How often each allocation went from waiting to being placed."""
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT name, count(*) AS times FROM change WHERE kind = 'Allocation' AND verb = 'bind' GROUP BY name"
        )
    return {row["name"]: row["times"] for row in rows}


async def assert_placed_once(runtime: Runtime, *names: str) -> None:
    """Everything has its place, was given it once, and the books balance."""
    assert await times_bound(runtime) == dict.fromkeys(names, 1)
    async with runtime.database.reader() as db:
        capacities = await node_store.load_all(db)
        placements = await node_store.load_placements_on(db, capacities)
    assert sorted(one.name for one in placements) == sorted(names)
    await assert_books_balance(runtime)


# The loop at work.


async def term(runtime: Runtime, holder: str = "test", *, depose: bool = False) -> int:
    """The fence of a term that lasts; `depose` ends the one before."""
    async with runtime.database.reader() as db:
        if depose:
            await db.execute("UPDATE leader SET until = clock_timestamp()")
    fence = await stand(runtime.database, holder, 3600)
    assert fence is not None
    return fence.number


@asynccontextmanager
async def scheduling(
    runtime: Runtime,
    policy: SchedulingPolicy | None = None,
    *,
    fence: int | None = None,
    clock: Callable[[], float] = time,
    **changed: Any,
) -> AsyncIterator[Scheduler]:
    """A leader that schedules once its cluster state is loaded."""
    number = await term(runtime) if fence is None else fence
    one = Scheduler(runtime, number, replace(policy or SchedulingPolicy(), **changed), clock)
    task = asyncio.create_task(one.run())
    loading = asyncio.create_task(one.loaded.wait())
    try:
        await asyncio.wait({task, loading}, timeout=WAIT_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        yield one
    finally:
        loading.cancel()
        await stopped(task)


@asynccontextmanager
async def acting(runtime: Runtime, **options: Any) -> AsyncIterator[LocalNodes]:
    """Nodes that run what is bound to them, for ever unless it says how long."""
    one = LocalNodes(runtime, **options)
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        await stopped(task)


async def stopped(task: "asyncio.Task[None]") -> None:
    """Cancel it; what it failed with is told."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def settled(scheduler: Scheduler) -> None:
    """Until nothing waits, and nothing is being committed."""
    scheduler.idle.clear()
    scheduler.nudge()
    await asyncio.wait_for(scheduler.idle.wait(), WAIT_SECONDS_MAX)
