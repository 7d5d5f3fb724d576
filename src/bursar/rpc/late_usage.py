"""Late usage: corrects the cost of leases that ended before the node reported how long the work ran.

This happens when a lost node returns, and when leases expire while a node is silent: their cost was an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping

from bursar.core.nodes.liveness import WENT_WITH_ITS_NODE
from bursar.core.values.money import MICROS
from bursar.ops.credit.reconcile import settle_late
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.codec import ENDS, PlacementReport
from bursar.rpc.hub import AgentStream
from bursar.store.credit.reconcile import LastWord
from bursar.store.db.database import Unavailable
from bursar.store.nodes.heartbeat import ReportedPlacement


async def hear_last(
    runtime: Runtime, stream: AgentStream, ended: list[PlacementReport], claims: Mapping[str, ReportedPlacement]
) -> list[PlacementReport]:
    """Record the usage of these ends; returns the ends to acknowledge. The others stay for the next heartbeat."""
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


def measured_of(one: PlacementReport) -> int | None:
    """The measured run time in microseconds, if known. After a node failure that is what the node's journal has."""
    if one.state not in ENDS or one.usage is None or (one.reason in WENT_WITH_ITS_NODE and not one.usage.seconds):
        return None
    return round(one.usage.seconds * MICROS)


def _may_be_paid(one: PlacementReport, claim: ReportedPlacement | None) -> bool:
    """Whether a lease may pay for it; for placements without a claim that is unknown."""
    return claim is None or claim.epoch != one.epoch or claim.lease > 0
