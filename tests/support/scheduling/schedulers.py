"""Short words for the scheduler's tests: its world as plain values, the loop at work, and nodes that act."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import time
from typing import Any

import msgspec

from bursar.core.objects.object import Key, Stored
from bursar.core.scheduling.cycle.plan import Policy
from bursar.core.scheduling.state.cluster_state import World
from bursar.core.scheduling.state.fleet import ABSENT, NO_LIMIT, PODS
from bursar.core.scheduling.state.placed_columns import Placed
from bursar.core.values.quantity import UNLIMITED
from bursar.loops.informer import Keeper
from bursar.loops.schedule import Scheduler
from bursar.ops.lifecycle.dispatch import change_command
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.command import Reply
from bursar.ops.runtime.runtime import Office
from bursar.ops.scheduling.leader import stand
from bursar.sim.local import LocalNodes
from bursar.sim.work import SECONDS
from bursar.store.db.database import Connection
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.objects.change import Change
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import TEST, code, counters, create, get
from support.scheduling.evictions import assert_books_balance

GPU = "nvidia.com/gpu"
WAIT_SECONDS_MAX = 60.0
# What runs may be preempted at once, and a notice gives no time: tests need not wait for either.
HASTY = Policy(min_runtime_seconds=0.0, grace_seconds=0.0, preemption_retry_seconds=0.05, quota_backoff_seconds=600.0)


# The world as values that can be compared: by the names of nodes, whatever rows and columns they have.


def portrait(keeper: Keeper) -> dict[str, Any]:
    """All that decisions are made of, and the reasons that are stored."""
    world = keeper.world
    return {
        "nodes": {name: _node(world, row) for name, row in world.fleet.row_of.items()},
        "placed": {uid: _placed(world, one) for uid, one in world.placed.items()},
        "lines": _lines(world),
        "waiting": {uid: group.members[uid] for uid, group in world.waiting.items()},
        "groups": {(key, uid) for key, group in world.groups.items() for uid in group.members},
        "bands": {
            key: (one.min_members, one.timeout_seconds, set(one.waiting), set(one.placed), one.started)
            for key, one in world.bands.items()
        },
        "nominated": dict(world.nominated),
        "tenants": dict(world.tenants),
        "profiles": dict(world.profiles),
        "boosts": dict(world.boosts),
        "settings": dict(keeper.settings),
        "limits": {row: (cell.hard, cell.bound) for row, cell in world.limits.cells.items()},
        "tree": world.limits.tree,
        "used": {tenant: found for tenant, amounts in world.used.items() if (found := _nonzero(amounts))},
        "capacity": _nonzero(world.capacity),
        "kin": {kin: _by_name(world, rows) for kin, rows in world.tallies.rows.items()},
        "shunning": {key: _by_name(world, rows) for key, rows in world.tallies.shunning.items()},
        "noted": dict(keeper.noted),
    }


def _node(world: World, row: int) -> dict[str, Any]:
    fleet, now = world.fleet, world.fleet.now
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


def _placed(world: World, one: Placed) -> tuple[Any, ...]:
    names = {column: name for name, column in world.fleet.device_column_of.items()}
    spots = {
        (world.fleet.names[spot.row], tuple(sorted((names[column], indices) for column, indices in spot.devices)))
        for spot in one.spots
    }
    return one.ask, spots, one.since, one.ends_at, one.ending


def _lines(world: World) -> list[tuple[Any, ...]]:
    """What runs as columns, line by line."""
    lines, fleet = world.running.lines, world.fleet
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


def _by_name(world: World, rows: Mapping[int, int]) -> dict[str, int]:
    return {world.fleet.names[row]: count for row, count in rows.items()}


def _nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    return {name: amount for name, amount in amounts.items() if amount}


async def loaded(office: Office) -> Keeper:
    one = Keeper(office)
    await one.load()
    return one


async def assert_as_if_loaded(office: Office, keeper: Keeper) -> None:
    """What was followed is what would be loaded."""
    followed, fresh = portrait(keeper), portrait(await loaded(office))
    limited = {row: (one.hard, one.bound) for row, one in (await counters(office)).items() if one.hard != UNLIMITED}
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
    office: Office, kind: str, namespace: str, name: str, by: Callable[[dict[str, Any]], None], *, status: bool = False
) -> Reply:
    """Change a document, as somebody would with a patch."""

    def changed(before: Stored, document: dict[str, Any]) -> Any:
        spec_before = msgspec.json.encode(document.get("spec"))
        by(document)
        one = msgspec.convert(document, BY_NAME[kind].type)
        spec_changed = msgspec.json.encode(document.get("spec")) != spec_before
        return change_command(BY_NAME[kind], before, one, TEST, spec_changed=spec_changed, status=status)

    return await object_ops.change(office, Key(kind, namespace, name), changed, tenant="test")


async def label(office: Office, kind: str, namespace: str, name: str, **labels: str) -> Reply:
    def by(document: dict[str, Any]) -> None:
        document["metadata"].setdefault("labels", {}).update(labels)

    return await edit(office, kind, namespace, name, by)


async def annotate(office: Office, kind: str, namespace: str, name: str, notes: Mapping[str, str]) -> Reply:
    def by(document: dict[str, Any]) -> None:
        document["metadata"].setdefault("annotations", {}).update(notes)

    return await edit(office, kind, namespace, name, by)


async def submit(
    office: Office,
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
    assert code(await create(office, "Allocation", document)) == "ok"


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


async def uid_of(office: Office, name: str) -> str:
    return (await get(office, "Allocation", "default", name)).uid


async def status(office: Office, name: str, where: str = "default") -> dict[str, Any]:
    """Empty when there is no such allocation."""
    found = await object_ops.get(office, Key("Allocation", where, name))
    return msgspec.json.decode(found.status) if isinstance(found, Stored) else {}


async def until(
    office: Office, name: str, holds: Callable[[dict[str, Any]], bool], where: str = "default"
) -> dict[str, Any]:
    """Ask until it holds: the status then."""
    now: dict[str, Any] = {}
    try:
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while not holds(now := await status(office, name, where)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{name} stays {now}") from None
    return now


def is_in(*phases: str) -> Callable[[dict[str, Any]], bool]:
    return lambda now: now.get("phase") in phases


def waits_for(reason: str) -> Callable[[dict[str, Any]], bool]:
    return lambda now: now.get("phase") == "Pending" and now.get("reason") == reason


async def changes(office: Office, name: str, where: str = "default") -> list[Change]:
    """All that ever happened to an allocation of this name."""
    async with office.database.reader() as db:
        found = await change_store.load_since(db, 0, 100_000)
    return [one for one in found if one.key == Key("Allocation", where, name)]


async def history(office: Office, name: str, where: str = "default") -> list[str]:
    """The phases that it went through."""
    phases = [msgspec.json.decode(one.status).get("phase") for one in await changes(office, name, where)]
    return [phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase]


async def times_bound(office: Office) -> dict[str, int]:
    """How often each allocation went from waiting to being placed."""
    async with office.database.reader() as db:
        rows = await db.fetch(
            "SELECT name, count(*) AS times FROM change WHERE kind = 'Allocation' AND verb = 'bind' GROUP BY name"
        )
    return {row["name"]: row["times"] for row in rows}


async def assert_placed_once(office: Office, *names: str) -> None:
    """Everything has its place, was given it once, and the books balance."""
    assert await times_bound(office) == dict.fromkeys(names, 1)
    async with office.database.reader() as db:
        rooms = await node_store.load_all(db)
        placements = await node_store.load_placements_on(db, rooms)
    assert sorted(one.name for one in placements) == sorted(names)
    await assert_books_balance(office)


# The loop at work.


async def term(office: Office, holder: str = "test", *, depose: bool = False) -> int:
    """The fence of a term that lasts; `depose` ends the one before."""
    async with office.database.reader() as db:
        if depose:
            await db.execute("UPDATE leader SET until = clock_timestamp()")
    fence = await stand(office.database, holder, 3600)
    assert fence is not None
    return fence.number


@asynccontextmanager
async def scheduling(
    office: Office,
    policy: Policy | None = None,
    *,
    fence: int | None = None,
    clock: Callable[[], float] = time,
    **changed: Any,
) -> AsyncIterator[Scheduler]:
    """A leader that schedules from when its world is loaded."""
    number = await term(office) if fence is None else fence
    one = Scheduler(office, number, replace(policy or Policy(), **changed), clock)
    task = asyncio.create_task(one.run())
    loading = asyncio.create_task(one.loaded.wait())
    try:
        await asyncio.wait({task, loading}, timeout=WAIT_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        yield one
    finally:
        loading.cancel()
        await stopped(task)


@asynccontextmanager
async def acting(office: Office, **options: Any) -> AsyncIterator[LocalNodes]:
    """Nodes that run what is bound to them, for ever unless it says how long."""
    one = LocalNodes(office, **options)
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
