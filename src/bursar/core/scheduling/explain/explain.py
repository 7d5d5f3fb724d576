"""Explain, simulate and figures: answers from the cluster state.

Nothing here changes the cluster state. Simulations run on a copy, with the same `decide` as the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bursar.core.nodes.node_affinity import untolerated
from bursar.core.objects.ask import Ask, Requirement
from bursar.core.objects.pending_reason import UNPAID, PendingReason, ReasonCode
from bursar.core.scheduling.cycle import diagnosis
from bursar.core.scheduling.cycle.backfill import earliest
from bursar.core.scheduling.cycle.cycle import Cycle, decide
from bursar.core.scheduling.cycle.diagnosis import all_nodes, gang_reason, quota_reason
from bursar.core.scheduling.cycle.fair_queue import score
from bursar.core.scheduling.cycle.placer import Slot
from bursar.core.scheduling.cycle.plan import Plan, SchedulingPolicy, Unit
from bursar.core.scheduling.explain.explain_types import (
    Ahead,
    Evicted,
    ExplainAnswer,
    FactorTerm,
    Figures,
    Holding,
    ProposedPlacement,
    QueueEstimate,
    QueueFigures,
    ReservedFor,
    Score,
    ShareFigures,
    SimulatedOutcome,
)
from bursar.core.scheduling.explain.queue_position import QueueOrder, QueuePosition, order_queue
from bursar.core.scheduling.explain.wait_stats import WaitStats
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.equivalence import EquivalenceClass, EquivalenceKey
from bursar.core.scheduling.state.fleet import Bools
from bursar.core.scheduling.state.node_filter import CONSTRAINTS, OPEN, by_label, meets
from bursar.core.scheduling.state.placed_columns import Spot

ROUNDS_MAX = 2  # plans per simulation: a first one may leave work that still fits
PRECEDENCE = {one: place for place, one in enumerate(ReasonCode)}
# Reasons that end when other work ends: only these have an estimated start.
PASSING = (ReasonCode.NO_CAPACITY, ReasonCode.HELD, ReasonCode.NOT_TRIED)


# Explain.


def explain(
    cluster: ClusterState, uid: str, policy: SchedulingPolicy, now: float, queue_order: QueueOrder | None = None
) -> ExplainAnswer | None:
    """Explain with all known figures why an allocation is pending; None if it is not."""
    if uid not in cluster.waiting:
        return None
    queue_order = queue_order or order_queue(cluster, policy, now)
    cycle, unit = surveyed(cluster, policy, now, uid), unit_of(cluster, uid)
    ask = cluster.waiting[uid].members[uid]
    dominant, others = reasons(cycle, unit)
    position = queue_order.position(ask, cluster.waiting[uid])
    return ExplainAnswer(
        uid=uid,
        reason=dominant,
        others=others,
        queue=ask.queue,
        position=position.in_queue if position is not None else None,
        position_overall=position.overall if position is not None else None,
        ahead=position.ahead if position is not None else Ahead(),
        ahead_own=position.ahead_of(ask.tenant) if position is not None else Ahead(),
        score=_score(cycle, unit),
        share=_share(cycle, ask.tenant),
        starts_at=_starts_at(cycle, unit, dominant, position),
        nomination=_nomination(cluster, uid),
        reservation=_reservation(cluster, uid),
    )


def holding(cluster: ClusterState, uid: str, policy: SchedulingPolicy, now: float) -> Holding | None:
    """The share and burst mark of placed work; none if it is not placed."""
    if uid not in cluster.placed:
        return None
    cycle = Cycle(cluster, policy, now)
    return Holding(_share(cycle, cluster.placed[uid].ask.tenant), cycle.preemption.is_burst(uid))


def estimate(
    cluster: ClusterState, uid: str, policy: SchedulingPolicy, now: float, queue_order: QueueOrder
) -> QueueEstimate | None:
    """The position and the estimated start of a pending allocation. The start, which is the expensive part, is computed
    once for its class in each queue order."""
    group = cluster.waiting.get(uid)
    if group is None:
        return None
    position = queue_order.position(group.members[uid], group)
    if group.key not in queue_order.starts:
        cycle, unit = surveyed(cluster, policy, now, uid), unit_of(cluster, uid)
        queue_order.starts[group.key] = _starts_at(cycle, unit, _dominant(cycle, unit), position)
    return QueueEstimate(position.in_queue if position is not None else None, queue_order.starts[group.key])


def unit_of(cluster: ClusterState, uid: str) -> Unit:
    """The unit that an allocation is placed with: its gang, until that has begun."""
    group = cluster.waiting[uid]
    ask = group.members[uid]
    if ask.gang is None or cluster.has_begun((ask.namespace, ask.gang.group_id)):
        return Unit(group.key, (ask,), group)
    gang = cluster.gangs[ask.namespace, ask.gang.group_id]
    members = sorted(gang.waiting.values(), key=lambda one: (one.uid != uid, one.submitted_at, one.uid))
    return Unit(gang.key, tuple(members[: gang.min_members]))


def surveyed(cluster: ClusterState, policy: SchedulingPolicy, now: float, uid: str) -> Cycle:
    """A cycle that has not run, with the reservations and nominations that this allocation must respect."""
    cycle = Cycle(cluster, policy, now)
    cycle.scoring.count_depths()
    for unit in cycle.nominated():
        if all(ask.uid != uid for ask in unit.asks):
            slots = [(ask, row) for ask in unit.asks for row in cycle.nominated_rows(ask)]
            cycle.reservations.add(slots, cycle.cleared_at(slots))
    found = cluster.memory.reservation
    if found is not None and found.start > now and all(uid != ask.uid in cluster.waiting for ask, _ in found.slots):
        cycle.reservations.add(found.slots, found.start)
    return cycle


def reasons(cycle: Cycle, unit: Unit) -> tuple[PendingReason, tuple[PendingReason, ...]]:
    """The reason that the cycle would give, and all others that apply, in order of precedence."""
    dominant = _dominant(cycle, unit)
    others = {one.why: one for one in _applying(cycle, unit) if one.why is not dominant.why}
    return dominant, tuple(sorted(others.values(), key=lambda one: PRECEDENCE[one.why]))


def _dominant(cycle: Cycle, unit: Unit) -> PendingReason:
    """The reason that the cycle would give: the first that applies, in the order of its checks."""
    cluster = cycle.cluster
    if found := next(_before_nodes(cycle, unit), None):
        return found
    choice = cycle.placer.choose(unit.asks)
    if choice is not None:
        exceeded = cycle.exceeded(choice)
        return quota_reason(exceeded) if exceeded else PendingReason(ReasonCode.NOT_TRIED, nodes=len(cluster.fleet))
    slot = cycle.placer.slots(unit.asks)[0]
    return _detailed(cluster, slot, diagnosis.diagnose(cluster, cycle.placer, slot, unit.asks))


def _applying(cycle: Cycle, unit: Unit) -> list[PendingReason]:
    """All causes that apply, each examined independently of the others."""
    cluster, slot = cycle.cluster, cycle.placer.slots(unit.asks)[0]
    return [
        *_before_nodes(cycle, unit),
        *(
            _detailed(cluster, slot, reason) if reason.why is ReasonCode.NO_MATCHING_NODES else reason
            for reason in diagnosis.others(cluster, cycle.reservations, slot)
        ),
    ]


def _before_nodes(cycle: Cycle, unit: Unit) -> Iterator[PendingReason]:
    """The reasons that apply before any node is examined, in order of precedence."""
    cluster = cycle.cluster
    if all(ask.uid in cluster.nominated for ask in unit.asks):
        slots = [(ask, row) for ask in unit.asks for row in cycle.nominated_rows(ask)]
        yield PendingReason(ReasonCode.PREEMPTING, until=cycle.cleared_at(slots))
    gang = cluster.gangs.get(unit.key) if not isinstance(unit.key, EquivalenceKey) else None
    if gang is not None and not gang.complete:
        yield gang_reason(gang)
    if exceeded := cycle.exceeded([(ask, ()) for ask in unit.asks]):
        yield quota_reason(exceeded)
    # The refusal by the account that pays, until the next attempt.
    known = cluster.memory.blocked.get(unit.key)
    if known is not None and known.reason.why in UNPAID and known.until > cycle.now:
        yield known.reason


# Excluded nodes, by constraint.


def _detailed(cluster: ClusterState, slot: Slot, reason: PendingReason) -> PendingReason:
    """The reason with the nodes behind it: matching nodes that are closed, and each constraint on nodes by its name,
    such as a label or a taint, with the nodes that it alone keeps out."""
    reason = replace(reason, closed=_closed(cluster, slot))
    if reason.why not in (ReasonCode.NO_MATCHING_NODES, ReasonCode.NO_CAPACITY):
        return reason
    there, rules = all_nodes(cluster), {OPEN, *CONSTRAINTS}
    named = [
        (name, count) for name, met in _constraints(cluster, slot) if (count := int(np.count_nonzero(there & ~met)))
    ]
    return replace(reason, excluded=(*named, *(one for one in reason.excluded if one[0] not in rules)))


def _closed(cluster: ClusterState, slot: Slot) -> tuple[tuple[str, str], ...]:
    """Nodes that match and take no work, because they are cordoned or not ready."""
    fleet = cluster.fleet
    rows = np.flatnonzero(
        all_nodes(cluster) & ~fleet.now.open & cluster.memory.node_filters.of(slot.ask.shape.where).allowed
    )
    names = sorted((fleet.names[row], "cordoned" if fleet.cordoned[row] else "not ready") for row in rows.tolist())
    return tuple(names)


def _constraints(cluster: ClusterState, slot: Slot) -> list[tuple[str, Bools]]:
    """The constraints with labels and taints one by one."""
    fleet, where = cluster.fleet, slot.ask.shape.where
    masks = cluster.memory.node_filters.of(where).constraints(fleet)
    found = [(OPEN, masks.pop(OPEN))]
    for key, value in where.node_labels:
        column = fleet.label(key)
        found.append((f"nodeSelector {key}={value}", column.codes == column.code_of.get(value, -2)))
    if len(where.required) == 1:
        found += [(f"node affinity {_written(one)}", by_label(fleet, one)) for one in where.required[0]]
    elif where.required:
        any_term = np.zeros(fleet.now.placed.shape[0], np.bool_)
        for term in where.required:
            any_term |= meets(fleet, term)
        found.append((f"node affinity, any of {len(where.required)} terms", any_term))
    del masks["labels"], masks["taints"]
    return [*found, *_taints(cluster, slot), *masks.items()]


def _taints(cluster: ClusterState, slot: Slot) -> list[tuple[str, Bools]]:
    """Each taint that is not tolerated."""
    fleet, where = cluster.fleet, slot.ask.shape.where
    taints = {taint for each in fleet.taint_sets for taint in untolerated(where.tolerations, each, where.reserved)}
    found = []
    for taint in sorted(taints, key=lambda one: (one.key, one.value, one.effect)):
        without = np.array([taint not in each for each in fleet.taint_sets], np.bool_)[fleet.taint_code]
        value = f"={taint.value}" if taint.value else ""
        found.append((f"taint {taint.key}{value}:{taint.effect}", without))
    return found


def _written(requirement: Requirement) -> str:
    values = f" ({', '.join(requirement.values)})" if requirement.values else ""
    return f"{requirement.key} {requirement.operator}{values}"


# Figures of a pending allocation.


def _score(cycle: Cycle, unit: Unit) -> Score:
    profile, factors, penalty = cycle.scoring.profile(unit), cycle.scoring.factors(unit), cycle.scoring.penalty(unit)
    terms = tuple(
        FactorTerm(name, value, weight)
        for name, value, weight in zip(factors._fields, factors, profile.weights, strict=True)
    )
    return Score(score(profile, factors, penalty), penalty, profile.name, terms)


def _share(cycle: Cycle, tenant: str) -> ShareFigures:
    shares, known = cycle.shares, cycle.cluster.tenants.get(tenant)
    return ShareFigures(
        tenant,
        shares.actual(tenant),
        shares.target(tenant),
        shares.effective(tenant),
        shares.deficit(tenant),
        known.penalty if known is not None else 1.0,
    )


def _nomination(cluster: ClusterState, uid: str) -> ReservedFor | None:
    found = cluster.nominated.get(uid)
    return ReservedFor(found.nodes, found.until) if found is not None else None


def _reservation(cluster: ClusterState, uid: str) -> ReservedFor | None:
    found = cluster.memory.reservation
    rows = [row for ask, row in found.slots if ask.uid == uid] if found is not None else []
    if found is None or not rows:
        return None
    return ReservedFor(tuple(cluster.fleet.names[row] for row in rows), found.start)


# When it starts.


def _starts_at(cycle: Cycle, unit: Unit, reason: PendingReason, position: QueuePosition | None) -> float | None:
    """The estimated start: when it fits, and the work ahead of it fits, by known ends."""
    cluster = cycle.cluster
    if reason.why is ReasonCode.PREEMPTING:
        return max(reason.until, cycle.now)
    if (reserved := _reservation(cluster, unit.asks[0].uid)) is not None and reserved.at > cycle.now:
        return reserved.at
    if reason.why not in PASSING:
        return None
    if reason.why is ReasonCode.NOT_TRIED:
        own = cycle.now
    else:
        found = earliest(cluster, unit.asks, cycle.reservations, cycle.now)
        if found is None:
            return None
        own = found.start
    behind = _after_those(cycle, unit, position.before if position is not None else ())
    return None if behind is None else max(own, behind)


def _after_those(cycle: Cycle, unit: Unit, ahead: Sequence[tuple[EquivalenceClass, int]]) -> float | None:
    """The time at which free capacity on the matching nodes covers the sum of this unit and the work ahead. Nodes are
    not distinguished, so the cost does not depend on the length of the queue."""
    cluster, ask = cycle.cluster, unit.asks[0]
    right: Bools = cluster.memory.node_filters.of(ask.shape.where).allowed & cluster.fleet.now.open
    wanted = _wanted(unit, _rivals(cluster, ahead, right))
    running = cluster.running.lines
    lines = np.flatnonzero((running.row >= 0) & np.isfinite(running.ends_at))
    lines = lines[right[running.row[lines]]]
    lines = lines[np.argsort(running.ends_at[lines], kind="stable")]
    ends = np.maximum(running.ends_at[lines], cycle.now)
    latest = cycle.now
    for name, amount in wanted.items():
        column = cluster.fleet.column_of.get(name)
        if column is None:
            return None
        open_now: Bools = right & ~cluster.fleet.now.exclusive
        missing = amount - int(np.maximum(cluster.fleet.now.free[column, open_now], 0).sum())
        if missing <= 0:
            continue
        amounts = np.where(
            running.exclusive[lines],
            cluster.fleet.allocatable[column, running.row[lines]],
            running.amounts[column, lines],
        )
        enough = int(np.searchsorted(np.cumsum(amounts), missing))
        if enough >= lines.size:
            return None
        latest = max(latest, float(ends[enough]))
    return latest


def _rivals(
    cluster: ClusterState, ahead: Sequence[tuple[EquivalenceClass, int]], right: Bools
) -> list[tuple[EquivalenceClass, int]]:
    """The classes ahead that may use some of the same nodes."""
    known: dict[int, bool] = {}
    found = []
    for group, count in ahead:
        where = group.key.shape.where
        overlaps = known.get(id(where))
        if overlaps is None:
            overlaps = known[id(where)] = bool((cluster.memory.node_filters.of(where).allowed & right).any())
        if overlaps:
            found.append((group, count))
    return found


def _wanted(unit: Unit, rivals: Sequence[tuple[EquivalenceClass, int]]) -> dict[str, int]:
    """The total requests of this unit and its rivals, in the resources of this unit."""
    wanted: dict[str, int] = {}
    for ask in unit.asks:
        for name, amount in ask.shape.requests:
            wanted[name] = wanted.get(name, 0) + amount * ask.shape.nodes
    for group, count in rivals:
        for name, amount in group.key.shape.requests:
            if name in wanted:
                wanted[name] += amount * group.key.shape.nodes * count
    return wanted


# Simulation.


def simulate(
    cluster: ClusterState, asks: Sequence[Ask], policy: SchedulingPolicy, now: float
) -> tuple[SimulatedOutcome, ...]:
    """Simulate a submission of these, all together, on a copy of the cluster state."""
    trial = cluster.copy()
    for ask in asks:
        trial.pretend(ask)
    plans = _plans(trial, policy, now)
    places = {ask.uid: spots for plan in plans for one in plan.bindings for ask, spots in one.members}
    queue_order: QueueOrder | None = None
    found = []
    for ask in asks:
        if ask.uid in places:
            found.append(_runs(trial, ask, places[ask.uid], now))
            continue
        queue_order = queue_order or order_queue(trial, policy, now)
        found.append(_waits(trial, ask, plans, policy, now, queue_order))
    return tuple(found)


def _plans(trial: ClusterState, policy: SchedulingPolicy, now: float) -> list[Plan]:
    plans: list[Plan] = []
    while len(plans) < ROUNDS_MAX and (not plans or plans[-1].more):
        plans.append(decide(trial, policy, now))
    return plans


def _runs(trial: ClusterState, ask: Ask, spots: Sequence[Spot], now: float) -> SimulatedOutcome:
    names = {column: name for name, column in trial.fleet.device_column_of.items()}
    places = tuple(
        ProposedPlacement(trial.fleet.names[spot.row], {names[column]: indices for column, indices in spot.devices})
        for spot in spots
    )
    return SimulatedOutcome(ask.uid, ask.namespace, ask.name, True, places, starts_at=now)


def _waits(
    trial: ClusterState, ask: Ask, plans: Sequence[Plan], policy: SchedulingPolicy, now: float, queue_order: QueueOrder
) -> SimulatedOutcome:
    waits = explain(trial, ask.uid, policy, now, queue_order)
    if waits is None:  # its gang was given up
        return SimulatedOutcome(ask.uid, ask.namespace, ask.name)
    nominated = waits.nomination.nodes if waits.nomination is not None else ()
    victims = tuple(
        Evicted(one.namespace, one.name, one.tenant, str(victim.rule))
        for plan in plans
        for preempting in plan.preemptions
        if any(asker.uid == ask.uid for asker in preempting.asks)
        for victim in preempting.victims
        for one in (trial.placed[victim.uid].ask,)
    )
    places = tuple(ProposedPlacement(name) for name in nominated)
    return SimulatedOutcome(ask.uid, ask.namespace, ask.name, False, places, victims, waits.starts_at, waits)


# The scheduler in numbers.


def figures(cluster: ClusterState, waits: WaitStats, now: float, revision: int = 0) -> Figures:
    return Figures(
        queues=queues(cluster, waits, now),
        waiting=len(cluster.waiting),
        waiting_by_reason=waiting_by_reason(cluster),
        per_second=waits.per_second(now),
        latency=waits.overall(now),
        preemptions=waits.preemptions(now),
        revision=revision,
    )


def queues(cluster: ClusterState, waits: WaitStats, now: float) -> tuple[QueueFigures, ...]:
    """Every queue there is, and every other that something waits in, by name."""
    depths: dict[str, int] = dict.fromkeys(cluster.profiles, 0)
    oldest: dict[str, float] = {}
    for group in cluster.groups.values():
        queue = group.key.queue
        depths[queue] = depths.get(queue, 0) + len(group.members)
        first = group.first()
        if first is not None:
            oldest[queue] = min(oldest.get(queue, first.submitted_at), first.submitted_at)
    for uid in cluster.nominated:
        ask = cluster.waiting[uid].members[uid]
        oldest[ask.queue] = min(oldest.get(ask.queue, ask.submitted_at), ask.submitted_at)
    return tuple(
        QueueFigures(name, depth, oldest.get(name), waits.queue(name, now)) for name, depth in sorted(depths.items())
    )


def waiting_by_reason(cluster: ClusterState) -> dict[str, int]:
    """The number of pending allocations by code of reason."""
    nominated = Counter(id(cluster.waiting[uid]) for uid in cluster.nominated)
    counts = Counter({str(ReasonCode.PREEMPTING): len(cluster.nominated)})
    for group in cluster.groups.values():
        counts[_code(cluster, group)] += len(group.members) - nominated[id(group)]
    return {code: count for code, count in sorted(counts.items()) if count}


def _code(cluster: ClusterState, group: EquivalenceClass) -> str:
    gang = group.key.gang
    together = gang is not None and not cluster.has_begun(gang)
    if gang is not None and together and (cluster.gangs[gang].placed or not cluster.gangs[gang].complete):
        return str(ReasonCode.GANG_INCOMPLETE)
    known = cluster.memory.blocked.get(gang if gang is not None and together else group.key)
    return known.reason.code if known is not None else str(ReasonCode.NOT_TRIED)
