"""Finding out why something cannot be placed, with the numbers that explain it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import MEMBERS, NODES, Reason, Short, Why
from bursar.core.quota.quota import Exceeded
from bursar.core.scheduling.cycle import inter_pod
from bursar.core.scheduling.cycle.placer import Chooser, Slot
from bursar.core.scheduling.state.cluster_state import World
from bursar.core.scheduling.state.equivalence import Band
from bursar.core.scheduling.state.fleet import PODS, Bools
from bursar.core.scheduling.state.node_filter import by_isolation, by_parts, by_tenants


def explain(world: World, chooser: Chooser, slot: Slot, asks: Sequence[Ask]) -> Reason:
    """The dominant reason why the slots of a unit, alike or led by this one, have no room now."""
    fleet, slots = world.fleet, sum(ask.shape.nodes for ask in asks)
    there = np.zeros(fleet.now.placed.shape[0], np.bool_)
    there[list(fleet.row_of.values())] = True
    nodes = len(fleet)
    if not (there & fleet.now.open).any():
        return Reason(Why.NO_NODES_ACTIVE, nodes=nodes)
    terrain = world.terrains.of(slot.ask.shape.where)
    excluded = _excluded(world, slot, there)
    if reason := unclaimed(world, slot, there):
        return reason
    right = terrain.allowed & fleet.now.open
    if not right.any():
        return Reason(Why.NO_MATCHING_NODES, nodes=nodes, excluded=excluded)
    matching = int(np.count_nonzero(right))
    for why, mask in inter_pod.masks(slot.ask, slot.kin, terrain, fleet, world.tallies):
        if kept_out := int(np.count_nonzero(right & ~mask)):
            excluded = (*excluded, (str(why), kept_out))
        right &= mask
        if not right.any():
            absent = inter_pod.absent(slot.ask, slot.kin, world.tallies) if why is Why.AFFINITY else ""
            return Reason(why, nodes=nodes, excluded=excluded, matching=matching, absent=absent)
    short = shortages(world, slot, right)
    fitting = right & fleet.now.fits(slot.need, fleet.allocatable)
    if not fitting.any():
        resource = short[0].resource if short else "nodes"
        return Reason(Why.NO_CAPACITY, resource, nodes, excluded, short, matching=matching)
    if slots == 1 and not (chooser.scores(slot)[: fleet.size] > float("-inf")).any():
        return Reason(Why.HELD, nodes=nodes, excluded=excluded, short=short, matching=matching)
    # Each has room, but not all of them together: what is short is neither this nor that, but room for the others.
    resource = short[0].resource if short else next((name for name, _ in slot.ask.shape.requests), "nodes")
    fits = int(np.count_nonzero(fitting))
    parts = NODES if any(ask.shape.nodes > 1 for ask in asks) else MEMBERS
    missing = Short(parts, slots, min(chooser.count(asks), slots - 1), int(np.count_nonzero(right)) - fits)
    return Reason(Why.NO_CAPACITY, resource, nodes, (*excluded, ("together", fits)), (missing,), matching=matching)


def unclaimed(world: World, slot: Slot, there: Bools) -> Reason | None:
    """That sensitive work waits for a node that its user has not claimed yet; None where it does not."""
    where = slot.ask.shape.where
    if not where.sensitive or (there & world.terrains.of(where).claimable).any():
        return None
    return Reason(Why.NO_CLAIMED_NODES, nodes=len(world.fleet), said=where.claimant)


def gang_reason(band: Band) -> Reason:
    """That members are missing; `until` is when it is given up, where it ever is."""
    until = band.since + band.timeout_seconds if band.timeout_seconds else 0.0
    return Reason(Why.GANG_INCOMPLETE, members=len(band.waiting), members_min=band.min_members, until=until)


def quota_reason(exceeded: Sequence[Exceeded]) -> Reason:
    return Reason(
        Why.QUOTA_EXCEEDED,
        limits=tuple((one.scope, one.dimension, one.limit, one.used, one.requested) for one in exceeded),
    )


def _excluded(world: World, slot: Slot, there: Bools) -> tuple[tuple[str, int], ...]:
    """How many nodes each constraint on their labels, taints and state keeps out."""
    terrain = world.terrains.of(slot.ask.shape.where)
    counts = (
        ("not_ready_or_cordoned", there & ~world.fleet.now.open),
        ("labels", there & ~terrain.selected),
        ("taints", there & ~terrain.tolerated),
        ("claims", there & ~terrain.claimable),
        ("tenants", there & ~by_tenants(world.fleet, slot.ask.shape.where)),
        ("fractions", there & ~by_parts(world.fleet, slot.ask.shape.where)),
        ("isolation", there & ~by_isolation(world.fleet, slot.ask.shape.where)),
    )
    return tuple((name, int(np.count_nonzero(mask))) for name, mask in counts if mask.any())


def shortages(world: World, slot: Slot, right: Bools) -> tuple[Short, ...]:
    """The resources that are short on some of the right nodes; that which is short on most of them first."""
    fleet, now = world.fleet, world.fleet.now
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
