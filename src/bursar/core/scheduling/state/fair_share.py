"""Fair share: what each tenant holds of the cluster, what it should hold, and how far it is behind.

Tenants form a tree. A tenant's share is that of everything below it, and its children divide what it is worth. Work
that belongs to a tenant which also has children stands beside them, as one more child of weight 1: otherwise a parent
would have to be compared with its own parts.

`Shares` lives for one cycle. Targets are settled once, from who wants something and how full the cluster is at the
start; what is held moves with every placement, because the next decision must see the last one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import truediv
from typing import Final

ShareAmounts = Iterable[tuple[str, int]]  # (resource, amount)
RunningAmounts = tuple[float, str, Sequence[tuple[str, int]]]  # (started_at, uid, amounts)

BURST_BELOW: Final = 0.8  # the cluster's utilisation from which nobody may go beyond the target
TARGET_MIN: Final = 1e-12  # a smaller part of the system is nothing, and too small to reckon with
WEIGHT_MIN: Final = 1e-6
WEIGHT_MAX: Final = 1e6
BURST_MAX: Final = 1e3
ROUNDING: Final = 1e-9  # shares are quotients: what differs by less than this is equal


@dataclass(frozen=True, slots=True)
class ShareOf:
    """A tenant as fairness sees it. `target` is a fraction of the whole system; weights divide the parent's share."""

    name: str
    parent: str = ""
    weight: float = 1.0
    target: float | None = None
    burst: float = 1.0
    penalty: float = 1.0


@dataclass(slots=True, eq=False)
class Seat:
    """A place at which shares are compared: a tenant with all below it, or a tenant's own work beside its children."""

    name: str
    share: ShareOf
    used: list[int]
    path: tuple[Seat, ...] = ()  # itself, then upwards to the top tenant
    children: list[Seat] = field(default_factory=list)
    wants: bool = False  # has pending or running work in its subtree
    actual: float = 0.0
    target: float = 0.0
    effective: float = 0.0
    # The target as if nobody could burst. It decides who is evicted: one that moved with the cluster's load could make
    # whoever was just evicted the evictor.
    base: float = 0.0
    claimed: float = 0.0  # the explicit targets of those children that want something
    weights: float = 0.0  # the weights of those that want something and have no explicit target


def effective_share(target: float, burst: float, utilisation: float) -> float:
    """The target, raised by the burst allowance as far as the cluster is idle: fully at 0 %, not at all from 80 %."""
    return target * (1.0 + (burst - 1.0) * max(0.0, (BURST_BELOW - utilisation) / BURST_BELOW))


def share_deficit(effective: float, actual: float) -> float:
    """How far behind its share someone is: 1 holds nothing, 0 holds all of it or more. No share is never behind."""
    return (effective - actual) / effective if effective > actual and effective > 0.0 else 0.0


def standing(seat: Seat) -> int:
    """Deficit × budget penalty in whole hundredths, rounded down, so that those who are nearly equal count as equal."""
    return stands_at(seat, seat.actual)


def stands_at(seat: Seat, actual: float) -> int:
    """The standing that a share would give."""
    return int(share_deficit(seat.effective, actual) * seat.share.penalty * 100.0 + ROUNDING)


def sound(share: ShareOf) -> ShareOf:
    """The same with numbers that can be reckoned with; what is not a number counts as not set.

    Weights are held to 0.000001…1,000,000: a weight of zero or less is the smallest, which is next to nothing beside
    others and an equal part among its like. Targets and penalties are held to 0…1, burst to 1…1000.
    """
    target = share.target
    return ShareOf(
        share.name,
        share.parent,
        _held(share.weight, WEIGHT_MIN, WEIGHT_MAX),
        None if target is None or math.isnan(target) else _held(target if target >= TARGET_MIN else 0.0, 0.0, 1.0),
        _held(share.burst, 1.0, BURST_MAX),
        _held(share.penalty, 0.0, 1.0),
    )


def _held(number: float, least: float, most: float) -> float:
    return 1.0 if math.isnan(number) else min(max(number, least), most)


class Shares:
    """What every tenant holds and should hold, during one cycle.

    `used` is each tenant's own usage, without its children's; `wanting` are the tenants with pending or running work of
    their own. Only they and their ancestors cost anything: the others are seated when first asked about. A tenant that
    is not in the mapping is a top tenant of weight 1. A loop of parents is cut where it closes.
    """

    def __init__(
        self,
        tenants: Mapping[str, ShareOf],
        capacity: Mapping[str, int],
        used: Mapping[str, Mapping[str, int]],
        wanting: Collection[str],
        resource_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._tenants = tenants
        self._parents = frozenset(tenant.parent for tenant in tenants.values() if tenant.parent)
        # How much of each resource is the share 1: its capacity, and more of what weighs less.
        full = _full(capacity, resource_weights or {})
        self.resources = {resource: place for place, resource in enumerate(full)}
        self.full = list(full.values())
        self.root = Seat("", ShareOf(""), [0] * len(full), effective=1.0, base=1.0)
        self.utilisation = 0.0
        self._seats: dict[str, Seat] = {}  # the tenant with all below it
        self._own: dict[str, Seat] = {}  # where the tenant's own work is counted
        self._watchers: list[set[Seat]] = []
        self._load(used, wanting)

    def add(self, tenant: str, amounts: ShareAmounts, sign: int = 1) -> None:
        """Raise what the tenant holds, and all its ancestors; with sign −1, take it back."""
        seat = self._own.get(tenant) or self.seat(tenant)
        resources, full = self.resources, self.full
        deltas = [(resources[resource], sign * amount) for resource, amount in amounts if resource in resources]
        for each in seat.path:
            used = each.used
            for place, delta in deltas:
                used[place] += delta
            each.actual = max(map(truediv, used, full), default=0.0)
        for touched in self._watchers:
            touched.add(seat)

    def repeats(self, tenant: str, amounts: ShareAmounts, most: int) -> int:
        """How often this may be added before the tenant, or anybody above it, stands differently; at most `most`."""
        steps = [(self.resources[name], amount) for name, amount in amounts if name in self.resources]
        for seat in self.seat(tenant).path:
            stands = standing(seat)
            # Holding more never raises a standing: where the last step leaves it, so do all before it.
            while most and stands_at(seat, self._after(seat, steps, most)) != stands:
                most -= 1
        return most

    def _after(self, seat: Seat, steps: Sequence[tuple[int, int]], count: int) -> float:
        """The share that a seat would have with so many more."""
        used, full = seat.used, self.full
        return max(seat.actual, *[(used[place] + count * amount) / full[place] for place, amount in steps], 0.0)

    def actual(self, tenant: str) -> float:
        """The dominant share: the largest part that its subtree holds of any resource."""
        return self._seat(tenant).actual

    def target(self, tenant: str) -> float:
        """The part of the whole system that the tenant should hold; for one that wants nothing, as if it did."""
        return self._seat(tenant).target

    def effective(self, tenant: str) -> float:
        """The target, with the burst that the cluster's utilisation at the start of the cycle allows."""
        return self._seat(tenant).effective

    def deficit(self, tenant: str) -> float:
        """How far the tenant is behind its effective share, from 0 to 1."""
        seat = self._seats.get(tenant) or self._seat(tenant)
        return share_deficit(seat.effective, seat.actual)

    def within_target_after(self, tenant: str, amounts: ShareAmounts) -> bool:
        """Whether the tenant and every ancestor would hold no more than their targets, nobody's burst counted."""
        more = self.placed(amounts)
        return all(
            (used + more.get(place, 0)) / full <= seat.base + ROUNDING
            for seat in self.seat(tenant).path
            for place, (used, full) in enumerate(zip(seat.used, self.full, strict=True))
        )

    def placed(self, amounts: ShareAmounts) -> dict[int, int]:
        """Amounts by the place of their resource in `full`; what nobody offers is left out."""
        found: dict[int, int] = {}
        for resource, amount in amounts:
            place = self.resources.get(resource)
            if place is not None:
                found[place] = found.get(place, 0) + amount
        return found

    def seat(self, tenant: str) -> Seat:
        """Where the tenant's own work is counted: beside its children if it has any."""
        self._seat(tenant)
        return self._own[tenant]

    def compare(self, one: str, other: str) -> int:
        """By how much the first tenant stands ahead of the second, where the walk down the tree comes to part them."""
        for first, second in zip(reversed(self.seat(one).path), reversed(self.seat(other).path), strict=False):
            if first is not second:
                return standing(first) - standing(second)
        return 0

    def watch(self, touched: set[Seat]) -> None:
        """From now on, put every seat whose holdings are changed into this set; its ancestors changed as well."""
        self._watchers.append(touched)

    def _load(self, used: Mapping[str, Mapping[str, int]], wanting: Collection[str]) -> None:
        busy = {tenant for tenant, amounts in used.items() if any(amounts.values())}
        for tenant in sorted(busy.union(wanting)):
            for seat in self.seat(tenant).path:
                seat.wants = True
        for tenant in busy:
            self.add(tenant, used[tenant].items())
        held = [sum(amounts) for amounts in zip(*(top.used for top in self.root.children), strict=True)]
        self.utilisation = max(map(truediv, held, self.full), default=0.0)
        self._divide()

    def _divide(self) -> None:
        """From the top down: what each tenant is worth is divided among those of its children that want something."""
        levels = [self.root]
        for above in levels:
            wanting = [child.share for child in above.children if child.wants]
            above.claimed = math.fsum(share.target for share in wanting if share.target is not None)
            above.weights = math.fsum(share.weight for share in wanting if share.target is None)
            for child in above.children:
                self._settle(above, child)
            levels.extend(child for child in above.children if child.children)

    def _settle(self, above: Seat, child: Seat) -> None:
        child.base = _target(above, child, above.base)
        child.target = _target(above, child, above.effective)
        child.effective = effective_share(child.target, child.share.burst, self.utilisation)

    def _seat(self, tenant: str) -> Seat:
        seat = self._seats.get(tenant)
        if seat is None:
            for name in reversed(self._lineage(tenant)):
                if name not in self._seats:
                    self._take_seat(name)
            seat = self._seats[tenant]
        return seat

    def _lineage(self, tenant: str) -> list[str]:
        lineage = [tenant]
        while (known := self._tenants.get(lineage[-1])) and known.parent and known.parent not in lineage:
            lineage.append(known.parent)
        return lineage

    def _take_seat(self, tenant: str) -> None:
        share = self._tenants.get(tenant)
        above = self._seats.get(share.parent, self.root) if share else self.root
        seat = self._place(above, tenant, sound(share) if share else ShareOf(tenant))
        self._seats[tenant] = self._own[tenant] = seat
        if tenant in self._parents:
            self._own[tenant] = self._place(seat, tenant, ShareOf(tenant))

    def _place(self, above: Seat, name: str, share: ShareOf) -> Seat:
        seat = Seat(name, share, [0] * len(self.full))
        seat.path = (seat, *above.path)
        above.children.append(seat)
        self._settle(above, seat)
        return seat


def _full(capacity: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
    """Without what nobody offers, and without what weighs nothing; a weight that is no finite number is 1."""
    found = {}
    for resource, amount in capacity.items():
        weight = weights.get(resource, 1.0)
        weight = weight if math.isfinite(weight) else 1.0
        if amount > 0 and weight > 0.0:
            found[resource] = amount / weight
    return found


def _target(above: Seat, child: Seat, pool: float) -> float:
    """An explicit target, or a part by weight of what the explicit ones leave.

    Only siblings that want something divide, so that what the idle do not use is not kept from the others. Explicit
    targets that are more together than the parent is worth are scaled down to it.
    """
    own = child.share
    if own.target is not None:
        claimed = above.claimed if child.wants else above.claimed + own.target
        return own.target * pool / claimed if claimed > pool else own.target
    weights = above.weights if child.wants else above.weights + own.weight
    return max(0.0, pool - above.claimed) * own.weight / weights if weights > 0.0 else 0.0


def burst_marks(shares: Shares, running: Mapping[str, Iterable[RunningAmounts]]) -> frozenset[str]:
    """The uids of what runs beyond target: per tenant the newest whose removal brings it back to its target.

    The deepest tenants come first. What their burst does not cure higher up is taken from the newest of the whole
    subtree. Work that uses nothing of what is over its target is passed by: removing it would not help.
    """
    works: dict[Seat, list[_Work]] = {}
    known: dict[Sequence[tuple[str, int]], dict[int, int]] = {}
    for tenant, running_of_it in running.items():
        path = shares.seat(tenant).path
        for started_at, uid, listed in running_of_it:
            # Work of one template asks for the same: it is read once.
            amounts = tuple(listed)
            if amounts not in known:
                known[amounts] = shares.placed(amounts)
            work = _Work(started_at, uid, known[amounts], path)
            for seat in path:
                works.setdefault(seat, []).append(work)
    held = {seat: list(seat.used) for seat in works}
    marked: set[str] = set()
    for seat in sorted(works, key=lambda seat: -len(seat.path)):
        _mark(shares.full, seat, works[seat], held, marked)
    return frozenset(marked)


@dataclass(frozen=True, slots=True)
class _Work:
    started_at: float
    uid: str
    amounts: Mapping[int, int]
    path: tuple[Seat, ...]


def _mark(
    full: Sequence[float], seat: Seat, works: Iterable[_Work], held: Mapping[Seat, list[int]], marked: set[str]
) -> None:
    """Mark the newest works of one seat until it is back at its target, taking them out of everything above it."""
    own, most = held[seat], seat.base + ROUNDING
    over = {place for place, whole in enumerate(full) if own[place] / whole > most}
    if not over:
        return
    for work in sorted(works, key=lambda work: (work.started_at, work.uid), reverse=True):
        if work.uid in marked or not any(work.amounts.get(place, 0) > 0 for place in over):
            continue
        marked.add(work.uid)
        for each in work.path:
            for place, amount in work.amounts.items():
                held[each][place] -= amount
        over = {place for place in over if own[place] / full[place] > most}
        if not over:
            return
