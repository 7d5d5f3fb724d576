"""One cycle of the scheduler: who is placed where, who must make room, and why the others wait.

    1. Promises are kept: those for whom room is being made come first, and it stays theirs while they wait.
    2. What waits is lined up: fairness between tenants, score within them.
    3. Each in turn is placed, or blocked. Placing raises its tenant's share at once.
    4. The first that is blocked gets a reservation; others may only jump ahead if they cannot delay it. Until it starts
       its turn comes before that of everybody who is not ahead of it for good.
    5. Who may, and is blocked, clears room: victims get a notice, and the room is nominated.

`decide` reads nothing but the world, the policy and the time, so the same world gives the same plan. The plan enters
the world while it is made; `ClusterState.unassume` takes out what could not be committed.
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
from bursar.core.scheduling.cycle.diagnosis import explain, gang_reason, quota_reason
from bursar.core.scheduling.cycle.nomination import NominatedCapacity, Nominations, open_nominations
from bursar.core.scheduling.cycle.placer import Choice, Placer
from bursar.core.scheduling.cycle.plan import Binding, Plan, Preempting, SchedulingPolicy, Unit, UnitKey
from bursar.core.scheduling.cycle.preemption import Preemptor
from bursar.core.scheduling.cycle.priority_score import PriorityScore
from bursar.core.scheduling.cycle.queue_turns import QueueTurns
from bursar.core.scheduling.state.cluster_state import Blocked, ClusterState, Nomination, Reservation
from bursar.core.scheduling.state.credit_slow_start import CreditSlowStart
from bursar.core.scheduling.state.equivalence import EquivalenceClass, EquivalenceKey, GangState
from bursar.core.scheduling.state.fair_share import Shares
from bursar.core.scheduling.state.placed_columns import Spot

MOMENT = 1e-5  # a difference of scores that is less than a second's wait


TIMELY = frozenset({ReasonCode.NO_CAPACITY, ReasonCode.HELD})  # there will be room when others have ended


def decide(cluster: ClusterState, policy: SchedulingPolicy, now: float) -> Plan:
    cluster.views.trim()
    nominations, cluster.nominations = open_nominations(cluster.nominations, cluster), None
    plan = Cycle(cluster, policy, now, nominations).run()
    cluster.nominations = nominations
    return plan


class Cycle:
    def __init__(
        self, cluster: ClusterState, policy: SchedulingPolicy, now: float, nominations: Nominations | None = None
    ) -> None:
        self.cluster = cluster
        self.policy = policy
        self.now = now
        self.plan = Plan()
        self.nominations = nominations or open_nominations(None, cluster)
        self.holds = self.nominations.holds
        self.chooser = Placer(cluster, self.holds, now)
        wanting = {group.key.tenant for group in cluster.groups.values()}
        self.shares = Shares(cluster.tenants, cluster.capacity, cluster.used, wanting)
        self.turns = QueueTurns(cluster, self.shares, now)
        self.preemption = Preemptor(cluster, self.shares, self.chooser, self.holds, now, policy.min_runtime_seconds)
        self.reserved = False
        self.placements = 0
        self._blocked_count = 0
        self._reasons: dict[Shape, PendingReason] = {}
        self.probing = CreditSlowStart(cluster.probes)
        self.scoring = PriorityScore(cluster, self.shares, now, policy.energy_price)

    def run(self) -> Plan:
        if self.cluster.reserved_for not in self.cluster.groups and self.cluster.reserved_for not in self.cluster.bands:
            self.cluster.reserved_for = self.cluster.reservation = None
        self._keep_nominations()
        self._order_queue()
        while (unit := self.turns.next()) is not None:
            if self.placements >= self.policy.placements_max or self._blocked_count >= self.policy.blocked_max:
                self.plan.more = True
                break
            self.plan.tried += 1
            self._try(unit)
        if not self.reserved and not self.plan.more:
            self.cluster.reserved_for = self.cluster.reservation = None
        return self.plan

    # 1. Promises.

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
        """Place it if its room is there, else hold it, unless it is too late."""
        if not self._still_promised(unit):
            for ask in unit.asks:
                self.cluster.renounce(ask.uid)
            return
        slots = tuple((ask, row) for ask in unit.asks for row in self.nominated_rows(ask))
        start = self.cleared_at(slots)
        amounts = [pair for ask in unit.asks for pair in self.cluster.amounts(ask, self.nominated_rows(ask))]
        if not self._has_room(slots):
            nominations = tuple(self.cluster.nominated[ask.uid] for ask in unit.asks)
            until = min(one.until for one in nominations)
            self.nominations.keep(
                NominatedCapacity(unit.key, unit.asks, nominations, slots, tuple(amounts), start, until)
            )
            return
        choice = self.chooser.choose(unit.asks, self._mask(row for _, row in slots))
        if choice is not None and not self.exceeded(choice):
            self._place(choice)
            return
        # The room is there, and what else is in its way may go without anything happening there: not to be remembered.
        self.nominations.hold(slots, start)
        self.shares.add(unit.tenant, amounts)
        self._tell_nominated(unit.key, start)

    def _tell_nominated(self, key: UnitKey, start: float) -> None:
        """Of several that are alike, the first to have its room is told of."""
        known = self.plan.reasons.get(key)
        if known is None or start < known.until:
            self.plan.reasons[key] = PendingReason(ReasonCode.PREEMPTING, until=start)

    def _has_room(self, slots: Iterable[tuple[Ask, int]]) -> bool:
        """Whether those who were told to stop may have: whoever has no room on any of its nodes need not be tried."""
        fleet = self.cluster.fleet
        rows: dict[str, bool] = {}
        for ask, row in slots:
            if not rows.get(ask.uid):
                rows[ask.uid] = fleet.now.fits_at(fleet.need(ask.shape), fleet.allocatable, row)
        return all(rows.values())

    def _still_promised(self, unit: Unit) -> bool:
        """Not when it is too late, when a node is gone, or when a gang has lost a member meanwhile."""
        whole = isinstance(unit.key, EquivalenceKey) or len(unit.asks) >= self.cluster.bands[unit.key].min_members
        return whole and all(
            self.cluster.nominated[ask.uid].until >= self.now and len(self.nominated_rows(ask)) == ask.shape.nodes
            for ask in unit.asks
        )

    def nominated(self, without: Container[str] = ()) -> list[Unit]:
        """Those for whom room is being made, the longest waiting first; a gang is one."""
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
        """When the last of those who were told to stop there will have."""
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

    # 2. The line.

    def _order_queue(self) -> None:
        self.scoring.count_depths()
        for band in [band for band in self.cluster.bands.values() if band.waiting]:
            self._order_gang(band)
        for group in list(self.cluster.groups.values()):
            gang = group.key.gang
            if (gang is None or self.cluster.has_begun(gang)) and not self._is_blocked(group.key):
                self._push(group)

    def _push(self, group: EquivalenceClass) -> None:
        """The one of a group that waits longest; the next is pushed when it was placed."""
        first = group.first(self.cluster.nominated)
        if first is not None:
            unit = Unit(group.key, (first,), group)
            self.turns.enter(unit, self.scoring.of_member(group, first.submitted_at))

    def _order_gang(self, band: GangState) -> None:
        if band.placed:
            if not self.cluster.has_begun(band.key):  # it is being stopped, and begins again when all of it has
                self._wait_together(band)
            return
        if not band.complete:
            self._wait_for_members(band)
            return
        if self._is_blocked(band.key):
            return
        members = band.front
        if not self.cluster.nominated or not any(ask.uid in self.cluster.nominated for ask in members):
            unit = Unit(band.key, members)
            self.turns.enter(unit, self.scoring.of_gang(unit))

    def _wait_for_members(self, band: GangState) -> None:
        reason = gang_reason(band)
        if band.timeout_seconds and band.since + band.timeout_seconds <= self.now:
            self.plan.failed.extend((ask, reason) for ask in band.waiting.values())
        else:
            self._wait_together(band)

    def _wait_together(self, band: GangState) -> None:
        reason = self.plan.reasons[band.key] = gang_reason(band)
        self.cluster.blocked[band.key] = Blocked(reason, self.cluster.freed, self.cluster.limits.changed, self.now)

    def _is_blocked(self, key: UnitKey) -> bool:
        """Whether nothing has changed that could help since it was tried last. What is reserved for is always tried."""
        known = self.cluster.blocked.get(key)
        if known is None or key == self.cluster.reserved_for or known.until <= self.now:
            return False
        if known.firm:
            return True
        if known.moved is not None:
            return known.moved == self.cluster.moved
        if known.reason.why is ReasonCode.QUOTA_EXCEEDED:
            return known.limits_changed == self.cluster.limits.changed
        if (
            self.cluster.reserved_for is None
            and self.policy.backfill
            and known.reservable
            and known.reason.why in TIMELY
        ):
            return False  # nobody has a reservation: it may be the first that is blocked
        return known.freed == self.cluster.freed

    # 3. Placing.

    def _try(self, unit: Unit) -> None:
        if exceeded := self.exceeded([(ask, ()) for ask in unit.asks]):
            self._block(unit, quota_reason(exceeded))
            return
        choice = self.chooser.choose(unit.asks)
        if choice is None:
            self._blocked(unit)
            return
        if exceeded := self.exceeded(choice):
            self._block(unit, quota_reason(exceeded))
            return
        if self.cluster.blocked:
            self.cluster.blocked.pop(unit.key, None)
        if unit.group is None:
            self._place(choice)
            if not isinstance(unit.key, EquivalenceKey):
                self._push_late(self.cluster.bands[unit.key])
            return
        members = self._fellows(unit, unit.group, choice[0][1][0].row)
        if len(members) > 1:
            self._place_many(members, choice[0][1][0].row)
        else:
            self._place(choice)
        if self.probing.tried(unit.group.key, len(members)):
            self._push(unit.group)

    def _fellows(self, unit: Unit, group: EquivalenceClass, row: int) -> list[Ask]:
        """The unit, and more of the same that the walk and the choice would bring to the same node anyway.

        That is so while the node gets no worse, the tenant's standing is what it was, and nobody else in the line has
        a score that is better by more than a moment's wait.
        """
        ask = unit.asks[0]
        most = min(len(group.members), self.policy.placements_max - self.placements, self.probing.left(group.key))
        if most < 2 or ask.shape.nodes > 1 or ask.gang is not None or row in self.holds.starts:
            return [ask]
        if not inter_pod.is_free(ask, self.cluster.topology_counts):
            return [ask]
        most = min(most, self.chooser.run_length(ask.shape, row))
        most = self.shares.repeats(unit.tenant, ask.shape.requests, most)
        if most < 2:
            return [ask]
        members = group.next(most, self.cluster.nominated)
        rival = self.turns.next_score()
        while len(members) > 1 and not self._keeps_up(group, members, row, rival):
            group.wait_again(members.pop())
        return members

    def _keeps_up(self, group: EquivalenceClass, members: list[Ask], row: int, rival: float | None) -> bool:
        """Whether the last of these comes no later than who is next in the line, and all are within their limits."""
        if rival is not None and self.scoring.of_member(group, members[-1].submitted_at) < rival - MOMENT:
            return False
        return not self.cluster.limits.cells or not self.exceeded([(one, (Spot(row),)) for one in members])

    def _place_many(self, members: Sequence[Ask], row: int) -> None:
        first = members[0]
        devices = self.chooser.devices_for(first.shape, row, len(members))
        placed: Choice = [(ask, (Spot(row, own),)) for ask, own in zip(members, devices, strict=True)]
        self.plan.bindings.extend([Binding((one,)) for one in placed])
        self.placements += len(members)
        self._assume_many(placed)

    def _push_late(self, band: GangState) -> None:
        """A gang has begun: its members beyond those that it needs are placed one by one."""
        for group in {id(group): group for group in map(self.cluster.waiting.__getitem__, band.waiting)}.values():
            self._push(group)

    def _place(self, choice: Choice) -> None:
        self.plan.bindings.append(Binding(tuple(choice)))
        self.placements += len(choice)
        if len(choice) == 1:
            self._assume(choice)
        else:
            for _, some in groupby(choice, key=self._place_of):
                self._assume(list(some))
        if self.holds.starts:
            for ask, spots in choice:
                slot = self.chooser.slot(ask)
                for spot in spots:
                    self.holds.take(spot, slot.need, slot.ends_at)

    def _place_of(self, one: tuple[Ask, tuple[Spot, ...]]) -> tuple[int, int]:
        """Those of one group that go to one node may be entered together."""
        return id(self.cluster.waiting[one[0].uid]), one[1][0].row

    def _assume(self, placed: Choice) -> None:
        first = placed[0][0]
        need = self.cluster.fleet.need(first.shape)
        alone = len(placed) == 1 and first.gang is not None  # who may be all of a gang, which then begins anew
        if not (alone or first.shape.nodes > 1 or need.shared or need.exclusive):
            self._assume_many(placed)
            return
        for ask, spots in placed:
            self.cluster.assume(ask, spots, self.now)
            self.shares.add(ask.tenant, self.cluster.amounts(ask, [spot.row for spot in spots]))

    def _assume_many(self, placed: Choice) -> None:
        """Members of one group on one node, none of which shares a device."""
        first = placed[0][0]
        self.cluster.assume_many([ask for ask, _ in placed], [spots for _, spots in placed], self.now)
        amounts = [(name, amount * len(placed)) for name, amount in first.shape.requests]
        self.shares.add(first.tenant, amounts)

    def exceeded(self, members: Sequence[tuple[Ask, tuple[Spot, ...]]]) -> list[Exceeded]:
        """The limits without room for these together; before it is known where they go, nodes count as little as
        they can."""
        limits, fleet = self.cluster.limits, self.cluster.fleet
        if not limits.cells:
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
        """Why it has no room. Room only shrinks in a cycle: what is true of one is true of the next of its shape."""
        ask = unit.asks[0]
        plain = len(unit.asks) == 1 and inter_pod.is_free(ask, self.cluster.topology_counts) and not self.holds.starts
        if plain and ask.shape in self._reasons:
            return self._reasons[ask.shape]
        reason = explain(self.cluster, self.chooser, self.chooser.slots(unit.asks)[0], unit.asks)
        if plain:
            self._reasons[ask.shape] = reason
        return reason

    def _may_preempt(self, unit: Unit) -> bool:
        return self.policy.preemption and all(ask.preempts for ask in unit.asks)

    def _block(self, unit: Unit, reason: PendingReason, *, reservable: bool = True) -> None:
        """Remember it, so that it is not tried again before something changed that could help."""
        self.plan.reasons[unit.key] = reason
        until, moved = self.now + self.policy.quota_backoff_seconds, None
        if reason.why is ReasonCode.HELD or not all(
            inter_pod.is_free(ask, self.cluster.topology_counts) for ask in unit.asks
        ):
            until, moved = self.now + self.policy.reservation_seconds, self.cluster.moved
        elif reason.why is ReasonCode.NO_CAPACITY and self._may_preempt(unit):
            until = self.now + self.policy.preemption_retry_seconds
        self.cluster.blocked[unit.key] = Blocked(
            reason, self.cluster.freed, self.cluster.limits.changed, until, reservable, moved
        )  # fmt: skip

    def _reserve(self, unit: Unit) -> bool:
        """Keep room for it from the earliest time on at which there is any; whether such a time is known."""
        found = self._standing_reservation(unit) or earliest(self.cluster, unit.asks, self.holds, self.now)
        if found is None:
            return False
        self.reserved = True
        if found is not self.cluster.reservation:
            self.cluster.reserved_for, self.cluster.reservation = unit.key, found
            self.cluster.reserved_at, self.cluster.reserved_moved = self.now, self.cluster.moved
        self.holds.add(found.slots, found.start)
        return True

    def _standing_reservation(self, unit: Unit) -> Reservation | None:
        """The one that was found before, while it can still be right."""
        found = self.cluster.reservation
        if found is None or self.cluster.reserved_for != unit.key or found.start <= self.now:
            return None
        if {ask.uid for ask, _ in found.slots} != {ask.uid for ask in unit.asks}:
            return None
        fresh = self.now - self.cluster.reserved_at < self.policy.reservation_seconds
        return found if fresh or self.cluster.reserved_moved == self.cluster.moved else None

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
            self._push(unit.group)
        return True
