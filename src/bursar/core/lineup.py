"""Who stands where in the line: the order in which the cycle would take everything that waits.

The front of the line is walked as the cycle walks it, as if each were placed in turn, so that shares move and tenants
alternate. Who comes far behind that stands in the order of submission: long before it is their turn, everything will
have changed anyway.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop

from bursar.core.answer import Ahead
from bursar.core.ask import Ask
from bursar.core.cycle import Cycle, Policy, Unit
from bursar.core.order import Factors, score, waiting_factor
from bursar.core.world import Band, Boost, Group, GroupKey, World

WALK_MAX = 2000
FRESH_SECONDS = 1.0
SECONDS_PER_ENTRY = 1e-4  # how long a line stays good for each that stands in it: looking at a long one costs more


@dataclass(slots=True)
class Lineup:
    made_at: float = 0.0
    overall: dict[str, int] = field(default_factory=dict)  # by uid, from 1 on
    in_queue: dict[str, int] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)  # of each position
    _depths: Counter[str] = field(default_factory=Counter)

    def add(self, ask: Ask, group: Group) -> None:
        self.groups.append(group)
        self._depths[ask.queue] += 1
        self.overall[ask.uid] = len(self.groups)
        self.in_queue[ask.uid] = self._depths[ask.queue]

    def ahead(self, uid: str) -> list[tuple[Group, int]]:
        """The groups that have somebody standing before this one, and how many."""
        position = self.overall.get(uid, len(self.groups) + 1)
        by_id = Counter(map(id, self.groups[: position - 1]))
        known = {id(group): group for group in self.groups[: position - 1]}
        return [(known[which], count) for which, count in by_id.items()]


def asked(ahead: list[tuple[Group, int]]) -> Ahead:
    """How many allocations these are, and what they ask for together."""
    amounts: dict[str, int] = {}
    for group, count in ahead:
        for name, amount in group.key.shape.requests:
            amounts[name] = amounts.get(name, 0) + amount * group.key.shape.nodes * count
    return Ahead(sum(count for _, count in ahead), amounts)


def line_up(world: World, policy: Policy, now: float) -> Lineup:
    """Everything that could be taken. Gangs that are not complete do not stand in line."""
    return _Walk(Cycle(world, policy, now)).run()


def line_up_boosted(world: World, policy: Policy, now: float, job: tuple[str, str], priority: int) -> Lineup:
    """The line as it would be with a job's priority replaced."""
    before = world.boosts.get(job)
    world.boosts[job] = Boost(priority, float("inf"))
    try:
        return line_up(world, policy, now)
    finally:
        if before is None:
            del world.boosts[job]
        else:
            world.boosts[job] = before


class Lineups:
    """The last line, for as long as it is good enough: it is not made anew for everybody who asks."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._line = Lineup()

    def of(self, world: World, policy: Policy, now: float, uid: str = "") -> Lineup:
        """The line; somebody who is not in it yet has it made anew sooner."""
        age, length = now - self._line.made_at, len(self._line.groups)
        good_for = length * SECONDS_PER_ENTRY
        if not uid or uid in self._line.overall:
            good_for += FRESH_SECONDS
        if self._world is not world or not 0 <= age <= good_for:
            self._world, self._line = world, line_up(world, policy, now)
        return self._line


class _Walk:
    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.world = cycle.world
        self.lineup = Lineup(cycle.now)
        self._orders: dict[int, list[tuple[float, str]]] = {}  # what of each group is not in line yet
        self._factors: dict[GroupKey, Factors[float]] = {}

    def run(self) -> Lineup:
        self.cycle.count_depths()
        for promised in self.cycle.nominated():
            self._take(promised)
        for band in self.world.bands.values():
            self._push_band(band)
        for group in self.world.groups.values():
            if group.key.gang is None or self.world.bands[group.key.gang].placed:
                self._orders[id(group)] = list(group.order)
                self._push(group)
        line = self.cycle.line
        while len(self.lineup.groups) < WALK_MAX and (unit := line.pop()) is not None:
            self._take(unit)
            for ask in unit.asks:
                self.cycle.shares.add(ask.tenant, self.world.amounts(ask, [0] * ask.shape.nodes))
            if unit.group is not None:
                self._push(unit.group)
        self._take_the_rest()
        return self.lineup

    def _take(self, unit: Unit) -> None:
        for ask in unit.asks:
            if ask.uid not in self.lineup.overall:
                self.lineup.add(ask, self.world.waiting[ask.uid])

    def _push(self, group: Group) -> None:
        ask = self._next(group)
        if ask is None:
            return
        unit = Unit(group.key, (ask,), group)
        factors = self._factors.get(group.key)
        if factors is None:
            factors = self._factors[group.key] = self.cycle.factors(unit)
        factors = factors._replace(
            waiting=waiting_factor(self.cycle.now - ask.submitted_at), deficit=self.cycle.shares.deficit(ask.tenant)
        )
        self._line_push(unit, factors)

    def _next(self, group: Group) -> Ask | None:
        order = self._orders[id(group)]
        while order:
            uid = heappop(order)[1]
            if uid in group.members and uid not in self.world.nominated:
                return group.members[uid]
        return None

    def _push_band(self, band: Band) -> None:
        """All members of a complete gang stand together; those beyond its size come right behind."""
        if band.placed or not band.waiting or not band.complete:
            return
        members = sorted(band.waiting.values(), key=lambda ask: (ask.submitted_at, ask.uid))
        unit = Unit(band.key, tuple(members))
        self._line_push(unit, self.cycle.factors(Unit(band.key, tuple(members[: band.min_members]))))

    def _line_push(self, unit: Unit, factors: Factors[float]) -> None:
        points = score(self.cycle.profile(unit), factors, self.cycle.penalty(unit))
        self.cycle.line.push(unit.tenant, points, unit.asks[0].uid, unit)

    def _take_the_rest(self) -> None:
        rest = [entry for order in self._orders.values() for entry in order]
        while (unit := self.cycle.line.pop()) is not None:
            rest += [(ask.submitted_at, ask.uid) for ask in unit.asks]
        rest.sort()
        for _, uid in rest:
            group = self.world.waiting.get(uid)
            if group is not None and uid not in self.lineup.overall:
                self.lineup.add(group.members[uid], group)
