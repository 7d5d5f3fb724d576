"""One scheduling cycle: place pending work, pick victims, and diagnose what stays pending.

    1. Nominations are kept: nominated work comes first, and its capacity stays reserved while it is pending.
    2. The queue is filled: fairness orders tenants, the score orders the work of one tenant.
    3. One after another, each unit is placed or blocked. Placing raises its tenant's share at once.
    4. The first blocked unit gets a reservation. Other work may only run ahead of it if that cannot delay it. Until it
       starts, it comes before all work that has no lasting claim to go ahead of it.
    5. A blocked unit that may preempt picks victims; they are evicted, and their capacity is nominated to the unit.

`decide` reads nothing but the cluster state, the policy and the time, so the same state gives the same plan. The plan
enters the state while it is made; `ClusterState.unassume` takes out what could not be committed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import groupby

import numpy as np

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.ask import Ask, Shape
from bursar.core.objects.pending_reason import PendingReason, ReasonCode
from bursar.core.quota.quota import Exceeded
from bursar.core.scheduling.cycle import inter_pod
from bursar.core.scheduling.cycle.backfill import earliest
from bursar.core.scheduling.cycle.diagnosis import diagnose, gang_reason, quota_reason
from bursar.core.scheduling.cycle.placer import Choice, Placer
from bursar.core.scheduling.cycle.plan import Binding, Plan, Preempting, SchedulingPolicy, Unit
from bursar.core.scheduling.cycle.preemption import Preemptor
from bursar.core.scheduling.cycle.priority_score import PriorityScore
from bursar.core.scheduling.cycle.queue_traversal import QueueTraversal
from bursar.core.scheduling.state.cluster_state import ClusterState, Nomination
from bursar.core.scheduling.state.credit_slow_start import CreditSlowStart
from bursar.core.scheduling.state.equivalence import EquivalenceClass, EquivalenceKey, GangState, UnitKey
from bursar.core.scheduling.state.fair_share import Shares
from bursar.core.scheduling.state.nomination import NominatedCapacity, Nominations, open_nominations
from bursar.core.scheduling.state.placed_columns import Spot
from bursar.core.scheduling.state.scheduler_memory import Blocked, Reservation

MOMENT = 1e-5  # a difference of scores that is less than a second's wait


TIMELY = frozenset({ReasonCode.NO_CAPACITY, ReasonCode.HELD})  # capacity becomes free when other work ends


def decide(cluster: ClusterState, policy: SchedulingPolicy, now: float) -> Plan:
    cluster.memory.node_scores.trim()
    nominations, cluster.memory.nominations = open_nominations(cluster.memory.nominations, cluster), None
    plan = Cycle(cluster, policy, now, nominations).run()
    cluster.memory.nominations = nominations
    return plan


class Cycle:
    """One scheduling cycle over the cluster state; it decides a plan."""

    def __init__(
        self, cluster: ClusterState, policy: SchedulingPolicy, now: float, nominations: Nominations | None = None
    ) -> None:
        self.cluster = cluster
        self.memory = cluster.memory
        self.policy = policy
        self.now = now
        self.plan = Plan()
        self.nominations = nominations or open_nominations(None, cluster)
        self.reservations = self.nominations.reservations
        self.placer = Placer(cluster, self.reservations, now)
        wanting = {group.key.tenant for group in cluster.groups.values()}
        self.shares = Shares(cluster.tenants, cluster.capacity, cluster.used, wanting)
        self.preemption = Preemptor(
            cluster, self.shares, self.placer, self.reservations, now, policy.min_runtime_seconds
        )
        self.reserved = False
        self.placements = 0
        self._blocked_count = 0
        self._reasons: dict[Shape, PendingReason] = {}
        self.probing = CreditSlowStart(cluster.memory.probes)
        self.scoring = PriorityScore(cluster, self.shares, now, policy.energy_price)
        self.queue = QueueTraversal(
            cluster, self.shares, self.scoring, now, lambda group: group.first(cluster.nominated)
        )

    def run(self) -> Plan:
        if self.memory.reserved_for not in self.cluster.groups and self.memory.reserved_for not in self.cluster.gangs:
            self.memory.reserved_for = self.memory.reservation = None
        self._keep_nominations()
        self._review_gangs()
        self.queue.fill(list(self.cluster.groups.values()), self._is_blocked)
        while (unit := self.queue.next()) is not None:
            if self.placements >= self.policy.placements_max or self._blocked_count >= self.policy.blocked_max:
                self.plan.more = True
                break
            self.plan.tried += 1
            self._try(unit)
        if not self.reserved and not self.plan.more:
            self.memory.reserved_for = self.memory.reservation = None
        return self.plan

    # 1. Nominations.

    def _keep_nominations(self) -> None:
        self.nominations.review(self.cluster, self.now)
        for unit in self.nominated(self.nominations.standing):
            self._keep(unit)
        for tenant, held in self.nominations.held.items():
            self.shares.add(tenant, held.items())
        starts: dict[UnitKey, float] = {}
        for nominated in self.nominations.standing.values():
            starts[nominated.key] = min(nominated.start, starts.get(nominated.key, nominated.start))
        for key, start in starts.items():
            self._tell_nominated(key, start)
        self.nominations.note()

    def _keep(self, unit: Unit) -> None:
        """Place a nominated unit if its capacity is free, else keep the nomination, unless it has expired."""
        if not self._is_valid(unit):
            for ask in unit.asks:
                self.cluster.renounce(ask.uid)
            return
        slots = tuple((ask, row) for ask in unit.asks for row in self.nominated_rows(ask))
        start = self.cleared_at(slots)
        amounts = [pair for ask in unit.asks for pair in self.cluster.amounts(ask, self.nominated_rows(ask))]
        if not self._has_capacity(slots):
            nominations = tuple(self.cluster.nominated[ask.uid] for ask in unit.asks)
            until = min(one.until for one in nominations)
            self.nominations.keep(
                NominatedCapacity(unit.key, unit.asks, nominations, slots, tuple(amounts), start, until)
            )
            return
        choice = self.placer.choose(unit.asks, self._mask(row for _, row in slots))
        if choice is not None and not self.exceeded(choice):
            self._place(choice)
            return
        # The capacity is free. The obstacle may vanish without a change on these nodes, so this is not cached.
        self.nominations.hold(slots, start)
        self.shares.add(unit.tenant, amounts)
        self._tell_nominated(unit.key, start)

    def _tell_nominated(self, key: UnitKey, start: float) -> None:
        """Of several units of one class, report the one that starts first."""
        known = self.plan.reasons.get(key)
        if known is None or start < known.until:
            self.plan.reasons[key] = PendingReason(ReasonCode.PREEMPTING, until=start)

    def _has_capacity(self, slots: Iterable[tuple[Ask, int]]) -> bool:
        """Whether each allocation fits on at least one of its nodes by now; else trying to place them is pointless."""
        fleet = self.cluster.fleet
        rows: dict[str, bool] = {}
        for ask, row in slots:
            if not rows.get(ask.uid):
                rows[ask.uid] = fleet.now.fits_at(fleet.need(ask.shape), fleet.allocatable, row)
        return all(rows.values())

    def _is_valid(self, unit: Unit) -> bool:
        """Whether the nomination is still valid: not expired, all nodes exist, and a gang still has enough members."""
        whole = isinstance(unit.key, EquivalenceKey) or len(unit.asks) >= self.cluster.gangs[unit.key].min_members
        return whole and all(
            self.cluster.nominated[ask.uid].until >= self.now and len(self.nominated_rows(ask)) == ask.shape.nodes
            for ask in unit.asks
        )

    def nominated(self, without: Container[str] = ()) -> list[Unit]:
        """The units with a nomination, in order of submission; a gang is one."""
        units: dict[str | GangKey, list[Ask]] = {}
        for uid in self.cluster.nominated:
            if uid in without:
                continue
            ask = self.cluster.waiting[uid].members[uid]
            key = self.cluster.unit_key(ask.uid)
            units.setdefault(uid if isinstance(key, EquivalenceKey) else key, []).append(ask)
        found = [
            Unit(self.cluster.unit_key(asks[0].uid), tuple(sorted(asks, key=lambda ask: (ask.submitted_at, ask.uid))))
            for asks in units.values()
        ]
        return sorted(found, key=lambda unit: (unit.asks[0].submitted_at, unit.asks[0].uid))

    def nominated_rows(self, ask: Ask) -> list[int]:
        row_of = self.cluster.fleet.row_of
        return [row_of[name] for name in self.cluster.nominated[ask.uid].nodes if name in row_of]

    def cleared_at(self, slots: Iterable[tuple[Ask, int]]) -> float:
        """The time at which the last evicted allocation on these nodes has stopped."""
        ends = [
            self.cluster.placed[uid].ends_at
            for row in {row for _, row in slots}
            for uid in self.cluster.running.on_row.get(row, ())
            if self.cluster.placed[uid].ending
        ]
        return max([self.now, *ends])

    def _mask(self, rows: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask = np.zeros(self.cluster.fleet.now.placed.shape[0], np.bool_)
        mask[list(rows)] = True
        return mask

    # 2. The queue.

    def _review_gangs(self) -> None:
        """Block gangs that cannot start yet: members are missing, or the gang is stopping, to restart as a whole."""
        for gang in self.cluster.gangs.values():
            if gang.placed:
                if gang.waiting and not self.cluster.has_begun(gang.key):
                    self._wait_together(gang)
            elif gang.waiting and not gang.complete:
                self._wait_for_members(gang)

    def _wait_for_members(self, gang: GangState) -> None:
        reason = gang_reason(gang)
        if gang.timeout_seconds and gang.since + gang.timeout_seconds <= self.now:
            self.plan.failed.extend((ask, reason) for ask in gang.waiting.values())
        else:
            self._wait_together(gang)

    def _wait_together(self, gang: GangState) -> None:
        reason = self.plan.reasons[gang.key] = gang_reason(gang)
        self.memory.blocked[gang.key] = Blocked(reason, self.cluster.freed, self.cluster.limits.changed, self.now)

    def _is_blocked(self, key: UnitKey) -> bool:
        """Whether nothing that could help changed since the last attempt; false for the owner of the reservation."""
        known = self.memory.blocked.get(key)
        if known is None or key == self.memory.reserved_for or known.until <= self.now:
            return False
        if known.firm:
            return True
        if known.moved is not None:
            return known.moved == self.cluster.moved
        if known.reason.why is ReasonCode.QUOTA_EXCEEDED:
            return known.limits_changed == self.cluster.limits.changed
        if (
            self.memory.reserved_for is None
            and self.policy.backfill
            and known.reservable
            and known.reason.why in TIMELY
        ):
            return False  # there is no reservation: this may be the first blocked unit
        return known.freed == self.cluster.freed

    # 3. Placing.

    def _try(self, unit: Unit) -> None:
        if exceeded := self.exceeded([(ask, ()) for ask in unit.asks]):
            self._block(unit, quota_reason(exceeded))
            return
        choice = self.placer.choose(unit.asks)
        if choice is None:
            self._blocked(unit)
            return
        if exceeded := self.exceeded(choice):
            self._block(unit, quota_reason(exceeded))
            return
        if self.memory.blocked:
            self.memory.blocked.pop(unit.key, None)
        if unit.group is None:
            self._place(choice)
            if not isinstance(unit.key, EquivalenceKey):
                self._push_late(self.cluster.gangs[unit.key])
            return
        members = self._fellows(unit, unit.group, choice[0][1][0].row)
        if len(members) > 1:
            self._place_many(members, choice[0][1][0].row)
        else:
            self._place(choice)
        if self.probing.tried(unit.group.key, len(members)):
            self.queue.enter_next(unit.group)

    def _fellows(self, unit: Unit, group: EquivalenceClass, row: int) -> list[Ask]:
        """The unit and more of its class that queue and placer would bring to the same node one by one anyway.

        They would while the score of the node does not fall, the tenant's standing is unchanged, and no other pending
        work has a score that is better by more than a moment's wait.
        """
        ask = unit.asks[0]
        most = min(len(group.members), self.policy.placements_max - self.placements, self.probing.left(group.key))
        if most < 2 or ask.shape.nodes > 1 or ask.gang is not None or row in self.reservations.starts:
            return [ask]
        if not inter_pod.is_free(ask, self.cluster.topology_counts):
            return [ask]
        most = min(most, self.placer.run_length(ask.shape, row))
        most = self.shares.repeats(unit.tenant, ask.shape.requests, most)
        if most < 2:
            return [ask]
        members = group.next(most, self.cluster.nominated)
        rival = self.queue.next_score()
        while len(members) > 1 and not self._keeps_up(group, members, row, rival):
            group.wait_again(members.pop())
        return members

    def _keeps_up(self, group: EquivalenceClass, members: list[Ask], row: int, rival: float | None) -> bool:
        """Whether the last of these precedes the next item of the queue, and all are within their limits."""
        if rival is not None and self.scoring.of_member(group, members[-1].submitted_at) < rival - MOMENT:
            return False
        return not self.cluster.limits.limited or not self.exceeded([(one, (Spot(row),)) for one in members])

    def _place_many(self, members: Sequence[Ask], row: int) -> None:
        first = members[0]
        devices = self.placer.devices_for(first.shape, row, len(members))
        placed: Choice = [(ask, (Spot(row, own),)) for ask, own in zip(members, devices, strict=True)]
        self.plan.bindings.extend([Binding((one,)) for one in placed])
        self.placements += len(members)
        self._assume_many(placed)

    def _push_late(self, gang: GangState) -> None:
        """Queue the members of a started gang beyond its minimum; they are placed one by one."""
        for group in {id(group): group for group in map(self.cluster.waiting.__getitem__, gang.waiting)}.values():
            self.queue.enter_next(group)

    def _place(self, choice: Choice) -> None:
        self.plan.bindings.append(Binding(tuple(choice)))
        self.placements += len(choice)
        if len(choice) == 1:
            self._assume(choice)
        else:
            for _, some in groupby(choice, key=self._place_of):
                self._assume(list(some))
        if self.reservations.starts:
            for ask, spots in choice:
                slot = self.placer.slot(ask)
                for spot in spots:
                    self.reservations.take(spot, slot.need, slot.ends_at)

    def _place_of(self, one: tuple[Ask, tuple[Spot, ...]]) -> tuple[int, int]:
        """The key under which allocations are assumed together: members of one class on one node."""
        return id(self.cluster.waiting[one[0].uid]), one[1][0].row

    def _assume(self, placed: Choice) -> None:
        first = placed[0][0]
        need = self.cluster.fleet.need(first.shape)
        alone = len(placed) == 1 and first.gang is not None  # it may be the whole gang, which then starts again
        if not (alone or first.shape.nodes > 1 or need.shared or need.exclusive):
            self._assume_many(placed)
            return
        for ask, spots in placed:
            self.cluster.assume(ask, spots, self.now)
            self.shares.add(ask.tenant, self.cluster.amounts(ask, [spot.row for spot in spots]))

    def _assume_many(self, placed: Choice) -> None:
        """Assume members of one class on one node, none of which shares a device."""
        first = placed[0][0]
        self.cluster.assume_many([ask for ask, _ in placed], [spots for _, spots in placed], self.now)
        amounts = [(name, amount * len(placed)) for name, amount in first.shape.requests]
        self.shares.add(first.tenant, amounts)

    def exceeded(self, members: Sequence[tuple[Ask, tuple[Spot, ...]]]) -> list[Exceeded]:
        """The limits that these would exceed together; before nodes are chosen, the smallest possible share of a node
        counts."""
        limits, fleet = self.cluster.limits, self.cluster.fleet
        if not limits.limited:
            return []
        return limits.exceeded(
            [
                (
                    ask,
                    sum(fleet.node_part(spot.row, ask.shape) for spot in spots)
                    or (WHOLE * ask.shape.nodes if ask.shape.exclusive else 0),
                )
                for ask, spots in members
            ]
        )

    # 4. and 5. Blocked.

    def _blocked(self, unit: Unit) -> None:
        if self._may_preempt(unit) and self._clear(unit):
            return
        self._blocked_count += unit.nodes
        reason = self._why(unit)
        reservable = True
        if reason.why in TIMELY and self.policy.backfill and not self.reserved:
            reservable = self._reserve(unit)
        self._block(unit, reason, reservable=reservable)

    def _why(self, unit: Unit) -> PendingReason:
        """The reason why it does not fit. Capacity only shrinks in a cycle, so the reason is cached per shape."""
        ask = unit.asks[0]
        plain = (
            len(unit.asks) == 1
            and inter_pod.is_free(ask, self.cluster.topology_counts)
            and not self.reservations.starts
        )
        if plain and ask.shape in self._reasons:
            return self._reasons[ask.shape]
        reason = diagnose(self.cluster, self.placer, self.placer.slots(unit.asks)[0], unit.asks)
        if plain:
            self._reasons[ask.shape] = reason
        return reason

    def _may_preempt(self, unit: Unit) -> bool:
        return self.policy.preemption and all(ask.preempts for ask in unit.asks)

    def _block(self, unit: Unit, reason: PendingReason, *, reservable: bool = True) -> None:
        """Remember a blocked unit, so that it is not tried again before something changes that could help."""
        self.plan.reasons[unit.key] = reason
        until, moved = self.now + self.policy.quota_backoff_seconds, None
        if reason.why is ReasonCode.HELD or not all(
            inter_pod.is_free(ask, self.cluster.topology_counts) for ask in unit.asks
        ):
            until, moved = self.now + self.policy.reservation_seconds, self.cluster.moved
        elif reason.why is ReasonCode.NO_CAPACITY and self._may_preempt(unit):
            until = self.now + self.policy.preemption_retry_seconds
        self.memory.blocked[unit.key] = Blocked(
            reason, self.cluster.freed, self.cluster.limits.changed, until, reservable, moved
        )  # fmt: skip

    def _reserve(self, unit: Unit) -> bool:
        """Reserve capacity for it from the earliest possible start; false if no start is known."""
        found = self._standing_reservation(unit) or earliest(self.cluster, unit.asks, self.reservations, self.now)
        if found is None:
            return False
        self.reserved = True
        if found is not self.memory.reservation:
            self.memory.reserved_for, self.memory.reservation = unit.key, found
            self.memory.reserved_at, self.memory.reserved_moved = self.now, self.cluster.moved
        self.reservations.add(found.slots, found.start)
        return True

    def _standing_reservation(self, unit: Unit) -> Reservation | None:
        """The reservation found earlier, while it is still valid."""
        found = self.memory.reservation
        if found is None or self.memory.reserved_for != unit.key or found.start <= self.now:
            return None
        if {ask.uid for ask, _ in found.slots} != {ask.uid for ask in unit.asks}:
            return None
        fresh = self.now - self.memory.reserved_at < self.policy.reservation_seconds
        return found if fresh or self.memory.reserved_moved == self.cluster.moved else None

    def _clear(self, unit: Unit) -> bool:
        priority = min(self.cluster.priority(ask, self.now) for ask in unit.asks)
        clearing = self.preemption.clear(unit.asks, priority)
        if clearing is None:
            return False
        deadline = self.now + self.policy.grace_seconds
        self.preemption.evict(clearing, deadline)
        names = self.cluster.fleet.names
        nominations = tuple(
            Nomination(
                tuple(names[row] for one, row in clearing.slots if one.uid == ask.uid),
                deadline + self.policy.nomination_seconds,
            )
            for ask in unit.asks
        )
        for ask, nomination in zip(unit.asks, nominations, strict=True):
            self.cluster.nominated[ask.uid] = nomination
            self.shares.add(ask.tenant, self.cluster.amounts(ask, [row for one, row in clearing.slots if one is ask]))
        self.plan.preemptions.append(Preempting(unit.asks, nominations, clearing.victims, deadline, priority))
        self.plan.reasons[unit.key] = PendingReason(ReasonCode.PREEMPTING, until=deadline)
        self.placements += 1
        if unit.group is not None:
            self.queue.enter_next(unit.group)
        return True
