"""What a node says in the end of how long something ran there, where its lease had ended before.

So it is with a node that was given up and comes back, and with leases that ran out while nobody was heard: what they
cost was put down as well as it could be known, and is put right now.
"""

from __future__ import annotations

from collections.abc import Mapping

from bursar.core.nodes.liveness import WENT_WITH_ITS_NODE
from bursar.core.values.money import MICROS
from bursar.ops.credit.reconcile import settle_late
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.codec import ENDS, Spoken
from bursar.rpc.hub import AgentStream
from bursar.store.credit.reconcile import LastWord
from bursar.store.db.database import Unavailable
from bursar.store.nodes.heartbeat import ReportedPlacement


async def hear_last(
    runtime: Runtime, stream: AgentStream, ended: list[Spoken], claims: Mapping[str, ReportedPlacement]
) -> list[Spoken]:
    """Write it down; which of these ends can be acknowledged. The others are said again with the next beat."""
    words = [
        LastWord(one.uid, one.epoch, stream.node, micros)
        for one in ended
        if (micros := measured_of(one)) is not None and _may_be_paid(one, claims.get(one.uid))
    ]
    if not words:
        return ended
    try:
        await settle_late(runtime, words)
    except Unavailable:
        stream.unsaid |= {one.place: one for one in ended}
        return []
    return ended


def measured_of(one: Spoken) -> int | None:
    """For how many microseconds it ran, where the node knows that. Of what went with it, it knows what it had written
    down, if anything."""
    if one.state not in ENDS or one.usage is None or (one.reason in WENT_WITH_ITS_NODE and not one.usage.seconds):
        return None
    return round(one.usage.seconds * MICROS)


def _may_be_paid(one: Spoken, claim: ReportedPlacement | None) -> bool:
    """Of what is not placed here any more nobody knows."""
    return claim is None or claim.epoch != one.epoch or claim.lease > 0
