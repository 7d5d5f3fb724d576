"""Fair queue: the order of pending work, from a score of nine factors and a descent of the tenant tree.

Fairness orders tenants, and the score only decides among tenants that are about equally far below their share; within a
tenant the score alone decides. So a long backlog or a high priority reorders a tenant's own work only.

Factors are plain numbers, mostly from 0 to 1. An unknown factor counts as 0.5: neither for nor against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from bursar.core.scheduling.state.fair_share import Seat, Shares, standing

T = TypeVar("T")

UNKNOWN: Final = 0.5
PRIORITY_HALFWAY: Final = 1000  # the priority that is halfway between an ordinary one and the highest
BACKLOG_HALFWAY: Final = 100  # the number of waiting allocations at which a queue counts as half full


class Factors(NamedTuple):
    """f1 to f9; also the weights of a profile, in the same order."""

    priority: float
    waiting: float
    deficit: float
    topology: float
    data: float
    backlog: float
    energy: float
    checkpoint: float
    conformance: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The weights of the factors in a queue; they add up to 1."""

    name: str
    weights: Factors


DEFAULT_PROFILE: Final = "default"
PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        name: Profile(name, Factors(*weights))
        for name, weights in {
            "hpc": (0.15, 0.20, 0.20, 0.15, 0.10, 0.05, 0.00, 0.05, 0.10),
            "ml": (0.10, 0.10, 0.10, 0.25, 0.15, 0.05, 0.05, 0.10, 0.10),
            "service": (0.15, 0.05, 0.10, 0.05, 0.10, 0.05, 0.10, 0.10, 0.30),
            "sensitive": (0.90, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.10),
            "interactive": (0.10, 0.30, 0.10, 0.00, 0.05, 0.15, 0.00, 0.00, 0.30),
            DEFAULT_PROFILE: (0.20, 0.20, 0.20, 0.15, 0.10, 0.05, 0.00, 0.00, 0.10),
        }.items()
    }
)


def score(profile: Profile, factors: Factors, penalty: float = 1.0) -> float:
    """(Σ wᵢ·fᵢ) × budget penalty; the highest is tried first."""
    w, f = profile.weights, factors
    total = w[0] * f[0] + w[1] * f[1] + w[2] * f[2] + w[3] * f[3] + w[4] * f[4]
    return (total + w[5] * f[5] + w[6] * f[6] + w[7] * f[7] + w[8] * f[8]) * penalty


# The factors.


def priority_factor(priority: int) -> float:
    """f1: any priority between 0 and 1, in its order, and 0 in the middle.

    The classes that are shipped, 0, 100, 500, 1,000 and 1,000,000, come to 0.5, 0.545, 0.667, 0.75 and 0.9995.
    """
    return 0.5 + priority / (2.0 * (abs(priority) + PRIORITY_HALFWAY))


def waiting_factor(wait_seconds: float) -> float:
    """f2: ln(1 + hours waited). It grows without end, ever more slowly; a clock that ran backwards is no wait."""
    return math.log1p(max(0.0, wait_seconds) / 3600.0)


def topology_factor(nodes: int, nodes_together: int | None) -> float:
    """f4: the part of the nodes asked for that the best single domain of the topology holds."""
    return UNKNOWN if nodes_together is None else _part(nodes_together, nodes)


def data_factor(ready: float | None) -> float:
    """f5: the part of the data that is where it is needed."""
    return UNKNOWN if ready is None or math.isnan(ready) else min(max(ready, 0.0), 1.0)


def backlog_factor(depth: int) -> float:
    """f6: how full the queue is: 0 if it is empty, a half at 100 pending allocations, towards 1 from there."""
    waiting = max(0, depth)
    return waiting / (waiting + BACKLOG_HALFWAY)


def energy_factor(price: float | None) -> float:
    """f7: 1 − the price of energy, which runs from 0 (the cheapest) to 1 (the dearest)."""
    return UNKNOWN if price is None or math.isnan(price) else 1.0 - min(max(price, 0.0), 1.0)


def checkpoint_factor(checkpoint_seconds: int, ttl_seconds: int) -> float:
    """f8: the part of its run that survives being stopped at the worst moment.

    Work without checkpoints loses everything. Without a known run time the factor is unknown.
    """
    if checkpoint_seconds <= 0:
        return 0.0
    if ttl_seconds <= 0:
        return UNKNOWN
    return 1.0 - min(1.0, checkpoint_seconds / ttl_seconds)


def conformance_factor(nodes: int, nodes_alike: int) -> float:
    """f9: the largest group of uniform nodes over the nodes asked for, at most 1."""
    return _part(nodes_alike, nodes)


def _part(have: int, asked: int) -> float:
    return min(1.0, max(0, have) / max(1, asked))


# The descent.


class _Stop(Generic[T]):
    """A node of the descent: a seat of the tenant tree with pending work below it.

    A leaf holds items, best first; an inner node holds the stops below it, in the order of their standing. `entry` is
    the current entry of this stop in the heap of the stop above. Outdated entries are deleted lazily: they stay in that
    heap until they come to its front, and are recognised there because they are not the current one.
    """

    __slots__ = ("above", "entry", "items", "seat", "stops")

    def __init__(self, seat: Seat, above: _Stop[T] | None) -> None:
        self.seat = seat
        self.above = above
        self.entry: _Entry[T] | None = None
        self.items: list[tuple[float, str, int, T]] = []  # (−score, tie, number, item)
        self.stops: list[_Entry[T]] = []

    def best(self) -> float | None:
        """−score of the item to which the descent leads from here; none if nothing is pending below."""
        if self.items:
            return self.items[0][0]
        stops = self.stops
        while stops and stops[0][3].entry is not stops[0]:
            heappop(stops)
        return stops[0][1] if stops else None


_Entry = tuple[int, float, str, _Stop[T]]  # (−standing, −score of its best, name, stop); names differ at each level


class FairQueue(Generic[T]):
    """Priority queue of pending work, whose order follows the current fair shares.

    Each pop descends the tenant tree, at each level to the child with the larger standing; among equals to the one
    whose next item has the higher score, then by name. A tenant's own items compete with its children as one more
    child. Within a tenant the highest score comes first, then the smaller tie.

    Shares rise and fall while the queue is consumed. The seats that changed are reordered before the next pop, so a pop
    costs some heap operations per level of the tree, however many tenants there are.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._root: _Stop[T] = _Stop(shares.root, None)
        self._stops: dict[Seat, _Stop[T]] = {}
        self._numbers = count()
        self._length = 0
        self._touched: set[Seat] = set()
        shares.watch(self._touched)

    def __len__(self) -> int:
        return self._length

    def push(self, tenant: str, score: float, tie: str, item: T) -> None:
        """Add an item; one that was taken may be added again, with any score."""
        assert score == score, f"the score of {tie} is not a number"
        seat = self._shares.seat(tenant)
        stop = self._stops.get(seat) or self._open(seat)
        heappush(stop.items, (-score, tie, next(self._numbers), item))
        self._touched.add(seat)
        self._length += 1

    def next_score(self) -> float | None:
        """The score of the next item; none if the queue is empty."""
        self._catch_up()
        best = self._root.best()
        return -best if best is not None else None

    def peek(self) -> T | None:
        """The next item, which stays in the queue; none if the queue is empty."""
        stop = self._next()
        return stop.items[0][3] if stop is not None else None

    def pop(self) -> T | None:
        """Take the next item; none if the queue is empty."""
        stop = self._next()
        if stop is None:
            return None
        self._touched.add(stop.seat)
        self._length -= 1
        return heappop(stop.items)[3]

    def _next(self) -> _Stop[T] | None:
        """The stop whose best item is next."""
        self._catch_up()
        stop = self._root
        while not stop.items:
            if stop.best() is None:
                return None
            stop = stop.stops[0][3]
        return stop

    def _open(self, seat: Seat) -> _Stop[T]:
        stop = self._root
        for each in reversed(seat.path):
            below = self._stops.get(each)
            if below is None:
                below = self._stops[each] = _Stop(each, stop)
            stop = below
        return stop

    def _catch_up(self) -> None:
        """Reorder touched stops from the bottom up, because the order of a stop depends on the best item below it."""
        stops = self._stops
        for touched in self._touched:
            for seat in touched.path:
                stop = stops.get(seat)
                if stop is not None:
                    _restand(stop)
        self._touched.clear()


def _restand(stop: _Stop[T]) -> None:
    """Enter the stop again in the heap above if its standing or its best item has changed."""
    best = stop.best()
    if best is None:
        stop.entry = None
        return
    rank, old = -standing(stop.seat), stop.entry
    if old is None or old[0] != rank or old[1] != best:
        assert stop.above is not None
        stops = stop.above.stops
        stop.entry = (rank, best, stop.seat.name, stop)
        # The stop taken last is at the front: replacing it is one step, and leaves no outdated entry.
        if stops and stops[0] is old:
            heapreplace(stops, stop.entry)
        else:
            heappush(stops, stop.entry)
