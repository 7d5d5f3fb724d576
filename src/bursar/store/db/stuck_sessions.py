"""Stuck sessions: other Bursar sessions that hold locks and do not read their results."""

from __future__ import annotations

import asyncio

import structlog

from bursar.store.db.database import AWAY, KEPT_NAME, Database
from bursar.store.db.sql_loader import statements

log = structlog.get_logger()

SQL = statements("db/stuck_sessions")

STUCK_SECONDS = 3.0  # since its statement began; statements of lanes take milliseconds
# The delay before the second look: a statement's time includes lock waits, and large results take a moment to send.
LOOK_AGAIN_SECONDS = 0.5


async def end_stuck(database: Database) -> None:
    """Terminate sessions that hold locks while their process does not read results. Called after a lock timeout, so
    that a paused process cannot block the others."""
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
