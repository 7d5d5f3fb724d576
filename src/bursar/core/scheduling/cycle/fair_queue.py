"""The order in which waiting work is looked at: nine factors make a score, and a walk down the tenant tree decides.

Between tenants fairness decides, and the score only among those that are about equally far behind; inside a tenant the
score alone. So a long backlog or a high priority moves a tenant's own work to its front, and takes nothing from others.

Factors are plain numbers, mostly from 0 to 1. What is not known counts as 0.5: neither for nor against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

from bursar.core.scheduling.state.fair_share import Seat, Shares, standing

if TYPE_CHECKING:  # arrays are only multiplied and added here: whoever needs the names of the profiles needs no NumPy
    import numpy as np
    from numpy.typing import NDArray

    Column: TypeAlias = NDArray[np.float64]

T = TypeVar("T")
N = TypeVar("N")

UNKNOWN: Final = 0.5
PRIORITY_HALFWAY: Final = 1000  # the priority that is halfway between an ordinary one and the highest
BACKLOG_HALFWAY: Final = 100  # the number of waiting allocations at which a queue counts as half full


class Factors(NamedTuple, Generic[N]):
    """f1 to f9, each a number or a column of them; also the weights of a profile, in the same order."""

    priority: N
    waiting: N
    deficit: N
    topology: N
    data: N
    backlog: N
    energy: N
    checkpoint: N
    conformance: N


@dataclass(frozen=True, slots=True)
class Profile:
    """How much each factor counts in a queue; the weights add up to 1."""

    name: str
    weights: Factors[float]


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


def score(profile: Profile, factors: Factors[float], penalty: float = 1.0) -> float:
    """(Σ wᵢ·fᵢ) × budget penalty; the highest is looked at first."""
    w, f = profile.weights, factors
    total = w[0] * f[0] + w[1] * f[1] + w[2] * f[2] + w[3] * f[3] + w[4] * f[4]
    return (total + w[5] * f[5] + w[6] * f[6] + w[7] * f[7] + w[8] * f[8]) * penalty


def scores(profile: Profile, factors: Factors[Column], penalty: Column | float = 1.0) -> Column:
    """The scores of many at once, equal to the last bit to those of one by one: the same sums in the same order."""
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
    """f6: how full the queue is: 0 when nothing waits, a half at 100 waiting allocations, towards 1 from there."""
    waiting = max(0, depth)
    return waiting / (waiting + BACKLOG_HALFWAY)


def energy_factor(price: float | None) -> float:
    """f7: 1 − the price of energy, which runs from 0 (the cheapest) to 1 (the dearest)."""
    return UNKNOWN if price is None or math.isnan(price) else 1.0 - min(max(price, 0.0), 1.0)


def checkpoint_factor(checkpoint_seconds: int, ttl_seconds: int) -> float:
    """f8: the part of its run that survives being stopped at the worst moment.

    What never saves its work loses all of it. How much is at stake is unknown where nobody knows how long it runs.
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


# The walk.


class _Stop(Generic[T]):
    """A stop on the walk: a seat of the tenant tree below which something waits.

    Where work is counted it holds items, best first; elsewhere the stops below it, in the order of their standing.
    `entry` is this stop as it now stands in the heap of the stop above. Entries of earlier standings stay in that heap
    until they come to its front, where they are known by not being the current one.
    """

    __slots__ = ("above", "entry", "items", "seat", "stops")

    def __init__(self, seat: Seat, above: _Stop[T] | None) -> None:
        self.seat = seat
        self.above = above
        self.entry: _Entry[T] | None = None
        self.items: list[tuple[float, str, int, T]] = []  # (−score, tie, number, item)
        self.stops: list[_Entry[T]] = []

    def best(self) -> float | None:
        """−score of the item to which the walk would come from here; none when nothing waits here any more."""
        if self.items:
            return self.items[0][0]
        stops = self.stops
        while stops and stops[0][3].entry is not stops[0]:
            heappop(stops)
        return stops[0][1] if stops else None


_Entry = tuple[int, float, str, _Stop[T]]  # (−standing, −score of its best, name, stop); names differ at each level


class FairQueue(Generic[T]):
    """Everything that waits, taken one by one in the order that the shares of the moment ask for.

    The walk goes down the tenant tree, at each level to whoever has the larger standing; among equals to whose next
    item has the higher score, then by name. A tenant's own items compete with its children as one more child. Inside a
    tenant the highest score comes first, then the smaller tie.

    Shares move while the line is walked, in both directions. What they touched is put right before the next item is
    taken, so a pop costs some heap operations per level of the tree, however many tenants there are.
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
        """Let an item wait; what was taken before may come back, with whatever score."""
        assert score == score, f"the score of {tie} is not a number"
        seat = self._shares.seat(tenant)
        stop = self._stops.get(seat) or self._open(seat)
        heappush(stop.items, (-score, tie, next(self._numbers), item))
        self._touched.add(seat)
        self._length += 1

    def next_score(self) -> float | None:
        """The score of the item that would be taken next; none when nothing waits."""
        self._catch_up()
        best = self._root.best()
        return -best if best is not None else None

    def peek(self) -> T | None:
        """The item that would be taken next; none when nothing waits."""
        stop = self._next()
        return stop.items[0][3] if stop is not None else None

    def pop(self) -> T | None:
        """Take the next item; none when nothing waits."""
        stop = self._next()
        if stop is None:
            return None
        self._touched.add(stop.seat)
        self._length -= 1
        return heappop(stop.items)[3]

    def _next(self) -> _Stop[T] | None:
        """Where the walk ends."""
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
        """From the bottom up, because where a stop stands depends on the best below it."""
        stops = self._stops
        for touched in self._touched:
            for seat in touched.path:
                stop = stops.get(seat)
                if stop is not None:
                    _restand(stop)
        self._touched.clear()


def _restand(stop: _Stop[T]) -> None:
    """Enter the stop anew above if its standing or its best item has changed."""
    best = stop.best()
    if best is None:
        stop.entry = None
        return
    rank, old = -standing(stop.seat), stop.entry
    if old is None or old[0] != rank or old[1] != best:
        assert stop.above is not None
        stops = stop.above.stops
        stop.entry = (rank, best, stop.seat.name, stop)
        # Whoever was taken last stands at the front: one step instead of leaving its old entry to be thrown away.
        if stops and stops[0] is old:
            heapreplace(stops, stop.entry)
        else:
            heappush(stops, stop.entry)
