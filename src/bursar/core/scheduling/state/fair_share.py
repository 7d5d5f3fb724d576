"""Fair share: each tenant's dominant share of the cluster, its target share, and its deficit.

Tenants form a tree. A tenant's share includes its subtree, and its children divide its target. The own work of a tenant
with children competes with them as one more child of weight 1: otherwise a parent would have to be compared with its
own parts.

`Shares` lives for one cycle. Targets are computed once, from the tenants with work and the utilisation at the start;
actual shares change with every placement, because the next decision must see the last one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import truediv
from typing import Final

ShareAmounts = Iterable[tuple[str, int]]  # (resource, amount)
RunningAmounts = tuple[float, str, Sequence[tuple[str, int]]]  # (started_at, uid, amounts)

BURST_BELOW: Final = 0.8  # the utilisation of the cluster from which no tenant may exceed its target
TARGET_MIN: Final = 1e-12  # smaller targets count as 0, to keep the arithmetic sound
WEIGHT_MIN: Final = 1e-6
WEIGHT_MAX: Final = 1e6
BURST_MAX: Final = 1e3
ROUNDING: Final = 1e-9  # shares are quotients: smaller differences count as equal


@dataclass(frozen=True, slots=True)
class ShareOf:
    """The fair-share settings of a tenant. `target` is a fraction of the system; weights divide the parent's share."""

    name: str
    parent: str = ""
    weight: float = 1.0
    target: float | None = None
    burst: float = 1.0
    penalty: float = 1.0


@dataclass(slots=True, eq=False)
class Seat:
    """A node of the share tree: a tenant with its subtree, or a tenant's own work beside its children."""

    name: str
    share: ShareOf
    used: list[int]
    path: tuple[Seat, ...] = ()  # itself, then upwards to the top tenant
    children: list[Seat] = field(default_factory=list)
    wants: bool = False  # has pending or running work in its subtree
    actual: float = 0.0
    target: float = 0.0
    effective: float = 0.0
    # The target without burst. It decides evictions: a target that changed with the load of the cluster could make the
    # victim of one cycle the preemptor of the next.
    base: float = 0.0
    claimed: float = 0.0  # the explicit targets of children with work
    weights: float = 0.0  # the weights of children with work and without an explicit target


def effective_share(target: float, burst: float, utilisation: float) -> float:
    """The target, raised by the burst allowance as far as the cluster is idle: fully at 0 %, not at all from 80 %."""
    return target * (1.0 + (burst - 1.0) * max(0.0, (BURST_BELOW - utilisation) / BURST_BELOW))


def share_deficit(effective: float, actual: float) -> float:
    """The deficit of a tenant: 1 if it holds nothing, 0 if it holds its share or more, 0 without a share."""
    return (effective - actual) / effective if effective > actual and effective > 0.0 else 0.0


def standing(seat: Seat) -> int:
    """The standing: deficit × budget penalty in whole hundredths, rounded down, so that near ties are ties."""
    return stands_at(seat, seat.actual)


def stands_at(seat: Seat, actual: float) -> int:
    """The standing of a seat if its actual share were this."""
    return int(share_deficit(seat.effective, actual) * seat.share.penalty * 100.0 + ROUNDING)


def sound(share: ShareOf) -> ShareOf:
    """Clamp the numbers of a share to sound ranges; NaN counts as not set.

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
    """The actual share and the target of every tenant during one cycle.

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
    ) -> None:
        self._tenants = tenants
        self._parents = frozenset(tenant.parent for tenant in tenants.values() if tenant.parent)
        full = {resource: amount for resource, amount in capacity.items() if amount > 0}  # a share of 1 of each
        self.resources = {resource: place for place, resource in enumerate(full)}
        self.full = list(full.values())
        self.root = Seat("", ShareOf(""), [0] * len(full), effective=1.0, base=1.0)
        self.utilisation = 0.0
        self._seats: dict[str, Seat] = {}  # the tenant with all below it
        self._own: dict[str, Seat] = {}  # where the tenant's own work is counted
        self._watchers: list[set[Seat]] = []
        self._load(used, wanting)

    def add(self, tenant: str, amounts: ShareAmounts, sign: int = 1) -> None:
        """Add amounts to the usage of the tenant and its ancestors; with sign −1, subtract them."""
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
        """The number of times that this may be added before a standing on the path changes; at most `most`."""
        steps = [(self.resources[name], amount) for name, amount in amounts if name in self.resources]
        for seat in self.seat(tenant).path:
            stands = standing(seat)
            # Usage never raises a standing: if the last step leaves it unchanged, all earlier ones do.
            while most and stands_at(seat, self._after(seat, steps, most)) != stands:
                most -= 1
        return most

    def _after(self, seat: Seat, steps: Sequence[tuple[int, int]], count: int) -> float:
        """The share of a seat after `count` more steps."""
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
        """The tenant's deficit against its effective share, from 0 to 1."""
        seat = self._seats.get(tenant) or self._seat(tenant)
        return share_deficit(seat.effective, seat.actual)

    def within_target_after(self, tenant: str, amounts: ShareAmounts) -> bool:
        """Whether the tenant and every ancestor would stay within their targets without burst."""
        more = self.placed(amounts)
        return all(
            (used + more.get(place, 0)) / full <= seat.base + ROUNDING
            for seat in self.seat(tenant).path
            for place, (used, full) in enumerate(zip(seat.used, self.full, strict=True))
        )

    def placed(self, amounts: ShareAmounts) -> dict[int, int]:
        """Amounts by the index of their resource in `full`; resources that no node offers are left out."""
        found: dict[int, int] = {}
        for resource, amount in amounts:
            place = self.resources.get(resource)
            if place is not None:
                found[place] = found.get(place, 0) + amount
        return found

    def seat(self, tenant: str) -> Seat:
        """The seat that counts the tenant's own work: beside its children if it has any."""
        self._seat(tenant)
        return self._own[tenant]

    def compare(self, one: str, other: str) -> int:
        """The difference of standings where the paths of two tenants part; positive if the first comes earlier."""
        for first, second in zip(reversed(self.seat(one).path), reversed(self.seat(other).path), strict=False):
            if first is not second:
                return standing(first) - standing(second)
        return 0

    def watch(self, touched: set[Seat]) -> None:
        """Collect in this set every seat whose usage changes from now on; its ancestors change as well."""
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
        """Divide targets from the top down: each tenant's among its children with work."""
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


def _target(above: Seat, child: Seat, pool: float) -> float:
    """An explicit target, or a part by weight of the rest that explicit targets leave.

    Only siblings with work divide, so that the shares of idle tenants are available to others. Explicit targets are
    scaled down if they add up to more than the target of the parent.
    """
    own = child.share
    if own.target is not None:
        claimed = above.claimed if child.wants else above.claimed + own.target
        return own.target * pool / claimed if claimed > pool else own.target
    weights = above.weights if child.wants else above.weights + own.weight
    return max(0.0, pool - above.claimed) * own.weight / weights if weights > 0.0 else 0.0


def burst_marks(shares: Shares, running: Mapping[str, Iterable[RunningAmounts]]) -> frozenset[str]:
    """The uids of burst work: per tenant the newest whose removal brings it back to its target.

    The deepest tenants come first. Excess that remains at an ancestor is taken from the newest work of its subtree.
    Work that uses no resource above the target is skipped: removing it would not help.
    """
    works: dict[Seat, list[_Work]] = {}
    known: dict[Sequence[tuple[str, int]], dict[int, int]] = {}
    for tenant, running_of_it in running.items():
        path = shares.seat(tenant).path
        for started_at, uid, listed in running_of_it:
            # Allocations of one template have equal amounts, which are converted once.
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
    """Mark the newest work of one seat until it is back at its target, and subtract it from all ancestors."""
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
