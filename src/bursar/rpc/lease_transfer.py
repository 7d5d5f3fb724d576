"""Work that is paid by another lease than when its node was told of it.

So it is when the node is claimed by its user: from then on the claim's lease pays for what runs there, and its own is
closed. A stream learns of that when it extends the old one: nobody is told that their time is over before it is known
whether it really is.
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
    """Those of which there is nothing to tell yet: another lease pays for them, and is extended by the next beat; or
    nobody can be asked."""
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
