"""Drains: evict the work that is still placed on draining nodes, and mark them drained when none is left.

The command that starts a drain makes the first evictions; this loop makes those that remain after a crash or a race,
and detects the end. Any number of processes may run it: evicting twice is harmless.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from bursar.commands.nodes.drain import DRAINING
from bursar.core.values.selector import parse_fields
from bursar.ops.nodes.drain import continue_drain
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
    """Run forever; wait while the database is away."""
    while True:
        try:
            await continue_drains(runtime)
        except AWAY as error:
            log.info("drains_wait", message="drains wait for the database", error=repr(error))
        except Exception:
            log.exception("drains_failed", message="drains failed and are tried again")
        await asyncio.sleep(PAUSE_SECONDS)


async def continue_drains(runtime: Runtime) -> list[str]:
    """Continue every drain; return the draining nodes."""
    async with runtime.database.reader() as db:
        page = await listing.load_page(db, Query("Node", fields=_CORDONED))
    draining = [one.name for one in page.items if _decode(one.status).drain.state == DRAINING]
    for name in draining:
        await continue_drain(runtime, name)
    return draining
