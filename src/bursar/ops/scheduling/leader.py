"""Verbs of leading: stand for election, renew, resign.

One controller decides for all. What it commits carries the fence of its term, and is refused once another has taken
over: a leader that was paused does no harm when it wakes.
"""

from __future__ import annotations

from dataclasses import dataclass

from bursar.store.db.database import Database
from bursar.store.scheduling import leader as leader_store
from bursar.store.scheduling.leader import Leader


@dataclass(frozen=True, slots=True)
class LeaderFence:
    """The number of a term. It rises with every takeover and stays with every renewal."""

    number: int
    renewed: bool  # False: it was taken over just now


async def stand(database: Database, holder: str, seconds: float) -> LeaderFence | None:
    """Lead for so many seconds from now: by renewing one's own term, or by taking over when the last one has run out.
    None while another leads. `holder` must be the name of one candidate alone."""
    async with database.reader() as db:
        renewed = await leader_store.renew(db, holder, seconds)
        if renewed is not None:
            return LeaderFence(renewed, renewed=True)
        taken = await leader_store.take(db, holder, seconds)
        return LeaderFence(taken, renewed=False) if taken is not None else None


async def resign(database: Database, holder: str) -> bool:
    """End one's own term, so that another need not wait for its end; whether there was one."""
    async with database.reader() as db:
        return await leader_store.resign(db, holder)


async def load_leader(database: Database) -> Leader:
    """Who leads, or led last."""
    async with database.reader() as db:
        return await leader_store.load(db)
