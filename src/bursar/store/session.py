"""Other sessions of ours in the database, where they stand in everybody's way."""

from __future__ import annotations

import structlog

from bursar.store.database import AWAY, KEPT_NAME, Database
from bursar.store.statements import statements

log = structlog.get_logger()

SQL = statements("session")

STUCK_SECONDS = 3.0  # since its statement began: what lanes ask is answered in milliseconds


async def end_stuck(database: Database) -> None:
    """Whoever waited for a lock in vain has those sessions ended that hold theirs because nobody reads what they send:
    a process that is paused must not freeze the others."""
    try:
        async with database.reader() as db:
            ended = await db.fetchval(SQL.end_stuck, KEPT_NAME, STUCK_SECONDS)
    except AWAY as error:
        log.info("could not look for sessions that are stuck", error=repr(error))
        return
    if ended:
        log.warning("sessions were ended that nobody reads from", count=ended)
