"""Short words for what tests do with nodes that fall silent."""

import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from bursar.core.objects.object import Stored
from bursar.loops.node_liveness import Watch, look_after
from bursar.ops.runtime.runtime import Office
from bursar.store.nodes import node as node_store
from support.runtime.runtime import change, get

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
REQUEUE = {"onNodeLost": "requeue"}
FAIL = {"onNodeLost": "fail"}


def watch() -> Watch:
    """Of a controller that has been there for years."""
    return Watch(since=-math.inf, calm_since=-math.inf)


async def look(office: Office, times: int = 1) -> None:
    for _ in range(times):
        await look_after(office, watch())


async def hear(office: Office, *names: str) -> None:
    """A beat of each of these nodes, now."""
    async with office.database.reader() as db:
        await node_store.save_seen(db, names)


async def silence(office: Office, *names: str, seconds: float = 70, granted: float | None = None) -> None:
    """As if these nodes had been heard last so long ago, and their leases had run out so long ago (or not at all)."""
    async with office.database.reader() as db:
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


async def regrant(office: Office, *names: str, granted: float) -> None:
    """As if the leases of these nodes had run out so long ago, while their silence goes on."""
    async with office.database.reader() as db:
        await db.execute(
            "UPDATE node_seen SET granted_until = clock_timestamp() - make_interval(secs => $2) WHERE node = ANY($1)",
            list(names),
            granted,
        )


async def patience(office: Office, **seconds: int) -> None:
    """Set how long silent nodes are waited for."""
    await change(office, "Settings", "", "system", nodes=seconds)


async def stored_node(office: Office, name: str) -> Stored:
    return await get(office, "Node", "", name)


async def node_status(office: Office, name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored_node(office, name)).status)
    return found


async def schedulable(office: Office, name: str) -> bool:
    async with office.database.reader() as db:
        return (await node_store.load(db, [name]))[name].schedulable


def condition(status: dict[str, Any], name: str) -> dict[str, Any]:
    """A condition, or nothing."""
    found: list[dict[str, Any]] = [one for one in status.get("conditions", ()) if one["type"] == name]
    return found[0] if found else {}
