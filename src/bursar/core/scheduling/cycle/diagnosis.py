"""Diagnosis of pending work: one ladder of rules that a node must pass, in the order of precedence of their reasons.

The cycle stores the first cause that leaves no node; explain lists every cause that would by itself leave none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
from bursar.core.scheduling.state.node_reservation import NodeReservations

# Causes after which no other is examined: no node is left to examine.
FINAL: Final = frozenset({ReasonCode.NO_NODES_ACTIVE, ReasonCode.NO_CLAIMED_NODES, ReasonCode.NO_MATCHING_NODES})
INTER_POD: Final = frozenset({ReasonCode.AFFINITY, ReasonCode.ANTI_AFFINITY, ReasonCode.SPREAD})

Excluded = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PendingCause:
    """One rung of the ladder: a rule, and the nodes that pass it."""

    why: ReasonCode
    matching: Bools  # nodes on which the rule is judged by itself
    before: Bools  # nodes that pass every rule above this one
    passing: Bools

    @property
    def decides(self) -> bool:
        """This rule and those above it leave no node."""
        return not (self.before & self.passing).any()

    @property
    def applies(self) -> bool:
        """This rule alone would leave no node."""
        return not (self.matching & self.passing).any()


def causes(cluster: ClusterState, reservations: NodeReservations, slot: Slot) -> Iterator[PendingCause]:
    """The rules that a node must pass to take a slot, in the order of precedence of their reasons."""
    fleet, where = cluster.fleet, slot.ask.shape.where
    node_filter, there = cluster.memory.node_filters.of(where), all_nodes(cluster)
    yield PendingCause(ReasonCode.NO_NODES_ACTIVE, there, there, fleet.now.open)
    if where.sensitive:
        yield PendingCause(ReasonCode.NO_CLAIMED_NODES, there, there, node_filter.claimable)
    matching: Bools = node_filter.allowed & fleet.now.open
    yield PendingCause(ReasonCode.NO_MATCHING_NODES, there, there, matching)
    left = matching
    for why, mask in inter_pod.masks(slot.ask, slot.match_key, node_filter, fleet, cluster.topology_counts):
        yield PendingCause(why, matching, left, mask)
        left = left & mask
    fits = fleet.now.fits(slot.need, fleet.allocatable)
    yield PendingCause(ReasonCode.NO_CAPACITY, matching, left, fits)
    left = left & fits
    if left.any() and (free := reservations.mask(slot.need, slot.ends_at)) is not None:
        yield PendingCause(ReasonCode.HELD, matching, left, left & free)


def diagnose(cluster: ClusterState, placer: Placer, slot: Slot, asks: Sequence[Ask]) -> PendingReason:
    """The dominant reason why a unit, whose slots are like this one or led by it, cannot be placed now."""
    count, kept_out, right = sum(ask.shape.nodes for ask in asks), list[tuple[str, int]](), all_nodes(cluster)
    for cause in causes(cluster, placer.reservations, slot):
        if cause.why in INTER_POD and (number := int(np.count_nonzero(cause.before & ~cause.passing))):
            kept_out.append((str(cause.why), number))
        if cause.why is ReasonCode.NO_CAPACITY:
            right = cause.before
        if cause.decides and (cause.why is not ReasonCode.HELD or count == 1):
            excluded = () if cause.why in FINAL - {ReasonCode.NO_MATCHING_NODES} else _excluded(cluster, slot)
            return _reason(cluster, slot, cause, right, (*excluded, *kept_out))
    return _not_together(cluster, placer, slot, asks, right, (*_excluded(cluster, slot), *kept_out))


def others(cluster: ClusterState, reservations: NodeReservations, slot: Slot) -> Iterator[PendingReason]:
    """Every cause that would by itself keep a slot from being placed."""
    for cause in causes(cluster, reservations, slot):
        if cause.applies:
            excluded = ((str(cause.why), int(np.count_nonzero(cause.matching))),) if cause.why in INTER_POD else ()
            yield _reason(cluster, slot, cause, cause.matching if cause.why is not ReasonCode.HELD else None, excluded)
            if cause.why in FINAL:
                return


def _reason(
    cluster: ClusterState, slot: Slot, cause: PendingCause, right: Bools | None, excluded: Excluded
) -> PendingReason:
    """A cause with its numbers; shortages are counted on the right nodes."""
    nodes, why = len(cluster.fleet), cause.why
    if why in FINAL:
        claimant = slot.ask.shape.where.claimant if why is ReasonCode.NO_CLAIMED_NODES else ""
        return PendingReason(why, nodes=nodes, excluded=excluded, said=claimant)
    matching = int(np.count_nonzero(cause.matching))
    if why in INTER_POD:
        absent = (
            inter_pod.absent(slot.ask, slot.match_key, cluster.topology_counts) if why is ReasonCode.AFFINITY else ""
        )
        return PendingReason(why, nodes=nodes, excluded=excluded, matching=matching, absent=absent)
    short = shortages(cluster, slot, right) if right is not None else ()
    resource = (short[0].resource if short else NODES) if why is ReasonCode.NO_CAPACITY else ""
    return PendingReason(why, resource, nodes, excluded, short, matching=matching)


def _not_together(
    cluster: ClusterState, placer: Placer, slot: Slot, asks: Sequence[Ask], right: Bools, excluded: Excluded
) -> PendingReason:
    """The reason of slots that fit one by one but not all at once: the number that fits together is short."""
    fleet, slots = cluster.fleet, sum(ask.shape.nodes for ask in asks)
    short = shortages(cluster, slot, right)
    resource = short[0].resource if short else next((name for name, _ in slot.ask.shape.requests), NODES)
    fits = int(np.count_nonzero(right & fleet.now.fits(slot.need, fleet.allocatable)))
    parts = NODES if any(ask.shape.nodes > 1 for ask in asks) else MEMBERS
    missing = Short(parts, slots, min(placer.count(asks), slots - 1), int(np.count_nonzero(right)) - fits)
    matching = int(np.count_nonzero(cluster.memory.node_filters.of(slot.ask.shape.where).allowed & fleet.now.open))
    return PendingReason(
        ReasonCode.NO_CAPACITY, resource, len(fleet), (*excluded, ("together", fits)), (missing,), matching=matching
    )


def all_nodes(cluster: ClusterState) -> Bools:
    there = np.zeros(cluster.fleet.now.placed.shape[0], np.bool_)
    there[list(cluster.fleet.row_of.values())] = True
    return there


def gang_reason(gang: GangState) -> PendingReason:
    """The reason of a gang with missing members; `until` is its timeout, if it has one."""
    until = gang.since + gang.timeout_seconds if gang.timeout_seconds else 0.0
    return PendingReason(
        ReasonCode.GANG_INCOMPLETE, members=len(gang.waiting), members_min=gang.min_members, until=until
    )


def quota_reason(exceeded: Sequence[Exceeded]) -> PendingReason:
    return PendingReason(
        ReasonCode.QUOTA_EXCEEDED,
        limits=tuple((one.scope, one.dimension, one.limit, one.used, one.requested) for one in exceeded),
    )


def _excluded(cluster: ClusterState, slot: Slot) -> Excluded:
    """The number of nodes that each constraint on labels, taints and state excludes."""
    node_filter, there = cluster.memory.node_filters.of(slot.ask.shape.where), all_nodes(cluster)
    counts = ((name, np.count_nonzero(there & ~met)) for name, met in node_filter.constraints(cluster.fleet).items())
    return tuple((name, int(count)) for name, count in counts if count)


def shortages(cluster: ClusterState, slot: Slot, right: Bools) -> tuple[Short, ...]:
    """The resources that are short on some matching node, ordered by the number of nodes on which they are short."""
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
