"""Finding out why something cannot be placed, with the numbers that explain it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import MEMBERS, NODES, PendingReason, ReasonCode, Short
from bursar.core.quota.quota import Exceeded
from bursar.core.scheduling.cycle import inter_pod
from bursar.core.scheduling.cycle.placer import Placer, Slot
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.equivalence import GangState
from bursar.core.scheduling.state.fleet import PODS, Bools
from bursar.core.scheduling.state.node_filter import by_isolation, by_parts, by_tenants


def explain(cluster: ClusterState, chooser: Placer, slot: Slot, asks: Sequence[Ask]) -> PendingReason:
    """The dominant reason why the slots of a unit, alike or led by this one, have no room now."""
    fleet, slots = cluster.fleet, sum(ask.shape.nodes for ask in asks)
    there = np.zeros(fleet.now.placed.shape[0], np.bool_)
    there[list(fleet.row_of.values())] = True
    nodes = len(fleet)
    if not (there & fleet.now.open).any():
        return PendingReason(ReasonCode.NO_NODES_ACTIVE, nodes=nodes)
    node_filter = cluster.terrains.of(slot.ask.shape.where)
    excluded = _excluded(cluster, slot, there)
    if reason := unclaimed(cluster, slot, there):
        return reason
    right = node_filter.allowed & fleet.now.open
    if not right.any():
        return PendingReason(ReasonCode.NO_MATCHING_NODES, nodes=nodes, excluded=excluded)
    matching = int(np.count_nonzero(right))
    for why, mask in inter_pod.masks(slot.ask, slot.kin, node_filter, fleet, cluster.topology_counts):
        if kept_out := int(np.count_nonzero(right & ~mask)):
            excluded = (*excluded, (str(why), kept_out))
        right &= mask
        if not right.any():
            absent = inter_pod.absent(slot.ask, slot.kin, cluster.topology_counts) if why is ReasonCode.AFFINITY else ""
            return PendingReason(why, nodes=nodes, excluded=excluded, matching=matching, absent=absent)
    short = shortages(cluster, slot, right)
    fitting = right & fleet.now.fits(slot.need, fleet.allocatable)
    if not fitting.any():
        resource = short[0].resource if short else "nodes"
        return PendingReason(ReasonCode.NO_CAPACITY, resource, nodes, excluded, short, matching=matching)
    if slots == 1 and not (chooser.scores(slot)[: fleet.size] > float("-inf")).any():
        return PendingReason(ReasonCode.HELD, nodes=nodes, excluded=excluded, short=short, matching=matching)
    # Each has room, but not all of them together: what is short is neither this nor that, but room for the others.
    resource = short[0].resource if short else next((name for name, _ in slot.ask.shape.requests), "nodes")
    fits = int(np.count_nonzero(fitting))
    parts = NODES if any(ask.shape.nodes > 1 for ask in asks) else MEMBERS
    missing = Short(parts, slots, min(chooser.count(asks), slots - 1), int(np.count_nonzero(right)) - fits)
    return PendingReason(
        ReasonCode.NO_CAPACITY, resource, nodes, (*excluded, ("together", fits)), (missing,), matching=matching
    )


def unclaimed(cluster: ClusterState, slot: Slot, there: Bools) -> PendingReason | None:
    """That sensitive work waits for a node that its user has not claimed yet; None where it does not."""
    where = slot.ask.shape.where
    if not where.sensitive or (there & cluster.terrains.of(where).claimable).any():
        return None
    return PendingReason(ReasonCode.NO_CLAIMED_NODES, nodes=len(cluster.fleet), said=where.claimant)


def gang_reason(band: GangState) -> PendingReason:
    """That members are missing; `until` is when it is given up, where it ever is."""
    until = band.since + band.timeout_seconds if band.timeout_seconds else 0.0
    return PendingReason(
        ReasonCode.GANG_INCOMPLETE, members=len(band.waiting), members_min=band.min_members, until=until
    )


def quota_reason(exceeded: Sequence[Exceeded]) -> PendingReason:
    return PendingReason(
        ReasonCode.QUOTA_EXCEEDED,
        limits=tuple((one.scope, one.dimension, one.limit, one.used, one.requested) for one in exceeded),
    )


def _excluded(cluster: ClusterState, slot: Slot, there: Bools) -> tuple[tuple[str, int], ...]:
    """How many nodes each constraint on their labels, taints and state keeps out."""
    node_filter = cluster.terrains.of(slot.ask.shape.where)
    counts = (
        ("not_ready_or_cordoned", there & ~cluster.fleet.now.open),
        ("labels", there & ~node_filter.selected),
        ("taints", there & ~node_filter.tolerated),
        ("claims", there & ~node_filter.claimable),
        ("tenants", there & ~by_tenants(cluster.fleet, slot.ask.shape.where)),
        ("fractions", there & ~by_parts(cluster.fleet, slot.ask.shape.where)),
        ("isolation", there & ~by_isolation(cluster.fleet, slot.ask.shape.where)),
    )
    return tuple((name, int(np.count_nonzero(mask))) for name, mask in counts if mask.any())


def shortages(cluster: ClusterState, slot: Slot, right: Bools) -> tuple[Short, ...]:
    """The resources that are short on some of the right nodes; that which is short on most of them first."""
    fleet, now = cluster.fleet, cluster.fleet.now
    found = [
        Short(name, amount, 0, int(right.sum()))
        for name, amount in slot.ask.shape.requests
        if name in slot.need.unknown
    ]
    if slot.need.exclusive:
        taken = right & ((now.placed > 0) | now.exclusive)
        if taken.any():
            found.append(Short("nodes", slot.ask.shape.nodes, int(np.count_nonzero(right & ~taken)), int(taken.sum())))
    wholes, shares = dict(slot.need.whole), dict(slot.need.shared)
    one_more = () if slot.need.exclusive or PODS in dict(slot.ask.shape.requests) else ((PODS, WHOLE),)
    for name, amount in (*slot.ask.shape.requests, *one_more):
        if name not in fleet.column_of:
            continue
        column, device = fleet.column_of[name], fleet.device_column_of.get(name)
        free = fleet.allocatable[column] if slot.need.exclusive else np.where(now.exclusive, 0, now.free[column])
        if device in wholes and not slot.need.exclusive:
            free = np.minimum(free, now.whole[device].astype(np.int64) * WHOLE)
        if device in shares and not slot.need.exclusive:
            free = np.minimum(free, now.widest[device])
        lacking = right & (free < amount)
        if lacking.any():
            most = int(free[right].max())
            at_most = int(np.count_nonzero(free[right] == most))
            found.append(Short(name, amount, max(0, most), int(np.count_nonzero(lacking)), at_most))
    return tuple(sorted(found, key=lambda one: (-one.nodes, one.resource)))
