"""Lease transfer: running work whose lease was replaced while it ran.

When a user claims the node, the claim's lease pays for the user's work there, and the work's own lease is closed. A
stream notices when it extends the closed lease. It looks up the current lease before it reports to the agent that the
paid time is over.
"""

from __future__ import annotations

from collections.abc import Collection

from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.hub import AgentStream
from bursar.store.db.database import AWAY
from bursar.store.nodes import heartbeat as store


def is_fenced(grant: object) -> bool:
    return isinstance(grant, Refusal) and grant.code is Code.FENCED


async def follow_leases(runtime: Runtime, stream: AgentStream, fenced: Collection[str]) -> Collection[str]:
    """The placements whose grant is to be skipped: another lease pays for them and is extended at the next heartbeat,
    or the database is unreachable."""
    try:
        async with runtime.database.reader() as db:
            claims = await store.load_claims(db, [(stream.node, uid) for uid in fenced])
    except AWAY:
        return fenced
    moved = set()
    for (_, uid), claim in claims.items():
        place = stream.places.get(uid)
        if place is not None and place.epoch == claim.epoch and claim.lease not in (0, place.lease):
            place.lease = claim.lease
            moved.add(uid)
    return moved
