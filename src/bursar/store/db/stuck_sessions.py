"""Stuck sessions: other sessions of Bursar that hold locks and do not read their answers."""

from __future__ import annotations

import asyncio

import structlog

from bursar.store.db.database import AWAY, KEPT_NAME, Database
from bursar.store.db.sql_loader import statements

log = structlog.get_logger()

SQL = statements("db/stuck_sessions")

STUCK_SECONDS = 3.0  # since its statement began: what lanes ask is answered in milliseconds
# Until they are looked at again: the time of a statement includes its waits for locks, and large answers take a moment.
LOOK_AGAIN_SECONDS = 0.5


async def end_stuck(database: Database) -> None:
    """End sessions that hold locks while their process does not read its answers, after a lock was waited for in vain:
    a process that is paused must not freeze the others."""
    try:
        async with database.reader() as db:
            found = await db.fetch(SQL.stuck, KEPT_NAME, STUCK_SECONDS)
            if not found:
                return
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            pids, since = [row["pid"] for row in found], [row["query_start"] for row in found]
            ended = await db.fetchval(SQL.end_stuck, pids, since)
    except AWAY as error:
        log.info("stuck_sessions_unknown", message="could not look for stuck sessions", error=repr(error))
        return
    if ended:
        log.warning("stuck_sessions_ended", message="ended sessions that nobody reads from", count=ended)
