"""Short words for what tests do with nodes that fall silent."""

import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from bursar.core.objects.object import Stored
from bursar.loops.node_liveness import LivenessWatch, look_after
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import node as node_store
from support.runtime.runtime import change, get

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
REQUEUE = {"onNodeLost": "requeue"}
FAIL = {"onNodeLost": "fail"}


def watch() -> LivenessWatch:
    """Of a controller that has been there for years."""
    return LivenessWatch(since=-math.inf, calm_since=-math.inf)


async def look(runtime: Runtime, times: int = 1) -> None:
    for _ in range(times):
        await look_after(runtime, watch())


async def hear(runtime: Runtime, *names: str) -> None:
    """A heartbeat of each of these nodes, now."""
    async with runtime.database.reader() as db:
        await node_store.save_seen(db, names)


async def silence(runtime: Runtime, *names: str, seconds: float = 70, granted: float | None = None) -> None:
    """As if these nodes had been heard last so long ago, and their leases had run out so long ago (or not at all)."""
    async with runtime.database.reader() as db:
        await db.execute(
            """INSERT INTO node_seen (node, at, granted_until)
               SELECT name, clock_timestamp() - make_interval(secs => $2),
                      coalesce(clock_timestamp() - make_interval(secs => $3), '-infinity')
                 FROM unnest($1::text[]) AS line (name)
                   ON CONFLICT (node) DO UPDATE SET at = excluded.at, granted_until = excluded.granted_until""",
            list(names),
            seconds,
            granted,
        )


async def regrant(runtime: Runtime, *names: str, granted: float) -> None:
    """As if the leases of these nodes had run out so long ago, while their silence goes on."""
    async with runtime.database.reader() as db:
        await db.execute(
            "UPDATE node_seen SET granted_until = clock_timestamp() - make_interval(secs => $2) WHERE node = ANY($1)",
            list(names),
            granted,
        )


async def patience(runtime: Runtime, **seconds: int) -> None:
    """Set how long silent nodes are waited for."""
    await change(runtime, "Settings", "", "system", nodes=seconds)


async def stored_node(runtime: Runtime, name: str) -> Stored:
    return await get(runtime, "Node", "", name)


async def node_status(runtime: Runtime, name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored_node(runtime, name)).status)
    return found


async def schedulable(runtime: Runtime, name: str) -> bool:
    async with runtime.database.reader() as db:
        return (await node_store.load(db, [name]))[name].schedulable


def condition(status: dict[str, Any], name: str) -> dict[str, Any]:
    """A condition, or nothing."""
    found: list[dict[str, Any]] = [one for one in status.get("conditions", ()) if one["type"] == name]
    return found[0] if found else {}
