"""Draining nodes: what is still placed on them is evicted, and they are told drained when nothing is left.

Whoever starts a drain makes the first evictions; this loop makes those that remain after a crash or a race, and notices
the end. Any number of processes may run it: evicting twice is harmless.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from bursar.core.values.selector import parse_fields
from bursar.ops.nodes.drain import DRAINING, continue_drain
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY
from bursar.store.objects import listing
from bursar.store.objects.listing import Query

log = structlog.get_logger()

PAUSE_SECONDS = 1.0
_CORDONED = parse_fields("spec.unschedulable=true", ("spec.unschedulable",))


class _Drain(msgspec.Struct):
    state: str = ""


class _Status(msgspec.Struct):
    drain: _Drain = msgspec.field(default_factory=_Drain)


_decode = msgspec.json.Decoder(_Status).decode


async def run_drains(runtime: Runtime) -> None:
    """For ever. A database that is away is waited for."""
    while True:
        try:
            await continue_drains(runtime)
        except AWAY as error:
            log.info("drains wait for the database", error=repr(error))
        except Exception:
            log.exception("drains failed")
        await asyncio.sleep(PAUSE_SECONDS)


async def continue_drains(runtime: Runtime) -> list[str]:
    """Go on with every drain there is; the nodes that are being drained."""
    async with runtime.database.reader() as db:
        page = await listing.load_page(db, Query("Node", fields=_CORDONED))
    draining = [one.name for one in page.items if _decode(one.status).drain.state == DRAINING]
    for name in draining:
        await continue_drain(runtime, name)
    return draining
