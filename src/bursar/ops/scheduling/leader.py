"""Leader election: stand for election, renew, resign.

One controller, the leader, makes all decisions. Its commands carry the fencing token of its term, and are refused once
another has taken over: a leader that was paused does no harm when it resumes.
"""

from __future__ import annotations

from dataclasses import dataclass

from bursar.store.db.database import Database
from bursar.store.scheduling import leader as leader_store


@dataclass(frozen=True, slots=True)
class LeaderFence:
    """The fencing token of a term. It rises with every takeover and stays with every renewal."""

    number: int
    renewed: bool  # False: it was taken over just now


async def stand(database: Database, holder: str, seconds: float) -> LeaderFence | None:
    """Lead for `seconds` from now, by renewing the own term or by taking over an expired one.
    None while another leads. `holder` must be unique to the candidate."""
    async with database.reader() as db:
        renewed = await leader_store.renew(db, holder, seconds)
        if renewed is not None:
            return LeaderFence(renewed, renewed=True)
        taken = await leader_store.take(db, holder, seconds)
        return LeaderFence(taken, renewed=False) if taken is not None else None


async def resign(database: Database, holder: str) -> bool:
    """End the own term, so that the next leader need not wait for it to expire; whether there was one."""
    async with database.reader() as db:
        return await leader_store.resign(db, holder)
