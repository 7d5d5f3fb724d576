"""The leader's row, as a test reads it: holder, fencing token and end of the term."""

from datetime import datetime
from typing import NamedTuple

from bursar.store.db.database import Connection, Database


class Leader(NamedTuple):
    holder: str
    fence: int
    until: datetime
    leads: bool  # whether its term has not run out yet


async def read_leader(db: Connection) -> Leader:
    row = await db.fetchrow("SELECT holder, fence, until, until > clock_timestamp() AS leads FROM leader WHERE id = 1")
    return Leader(*row)


async def load_leader(database: Database) -> Leader:
    async with database.reader() as db:
        return await read_leader(db)
