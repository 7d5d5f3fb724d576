"""Arrival history: the typical shapes, learned from past arrivals, that packing keeps capacity usable for.

Packing depends on future arrivals, and the best prediction is more of the same. All arrivals are counted; from time to
time, the few shapes that make up nearly all of them become the typical ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Shape, Where
from bursar.core.values.quantity import is_device

TYPICAL_MAX = 48
COVERED = 0.99  # the fraction of arrivals that the typical shapes have to cover
GROWTH = 1.1  # the growth of the count after which the typical shapes are computed again
CHANGE_MIN = 0.02  # the fraction of the weight that must shift before scores are computed again
SEEN_MAX = 65_536  # beyond this, old arrivals count half, because workloads change
COUNTED_MAX = 4096  # different shapes that are counted
ALLOCATION_WEIGHT = 3.0  # the weight of an allocation beside its devices


@dataclass(frozen=True, slots=True)
class Typical:
    """A shape that is likely to arrive, with its fraction of all shapes with devices; the fractions add up to 1."""

    shape: Shape
    weight: float


class ArrivalHistory:
    """Counts of arrivals and the typical shapes. `version` rises when scores are worth computing again."""

    def __init__(self) -> None:
        self.version = 0
        self.typical: tuple[Typical, ...] = ()
        self._counts: dict[Shape, int] = {}
        self._seen = 0
        self._look_at = 1

    def copy_history(self, other: ArrivalHistory) -> None:
        self.version, self.typical = other.version, other.typical
        self._counts, self._seen, self._look_at = dict(other._counts), other._seen, other._look_at

    @property
    def counts(self) -> Mapping[Shape, int]:
        return self._counts

    def learn(self, shape: Shape, count: int = 1) -> None:
        self._counts[shape] = self._counts.get(shape, 0) + count * shape.nodes
        self._seen += count * shape.nodes
        if self._seen >= self._look_at or len(self._counts) > COUNTED_MAX:
            self._look()

    def _look(self) -> None:
        if self._seen >= SEEN_MAX or len(self._counts) > COUNTED_MAX:
            self._fade()
        self._look_at = max(self._seen + 1, int(self._seen * GROWTH))
        found = typical_of(self._counts)
        if _moved(self.typical, found) > CHANGE_MIN:
            self.typical = found
            self.version += 1

    def _fade(self) -> None:
        """Halve all counts, and forget the smallest."""
        halved = sorted(((n // 2, shape) for shape, n in self._counts.items() if n > 1), key=lambda one: -one[0])
        self._counts = {shape: n for n, shape in halved[: COUNTED_MAX // 2]}
        self._seen = sum(self._counts.values())


def typical_of(counts: Mapping[Shape, int]) -> tuple[Typical, ...]:
    """The shapes with devices that make up nearly all that arrived, each weighted by how often it did.

    The ranking also counts the requested devices: work on whole nodes is rare, and hardest to place.
    """
    merged: dict[Shape, int] = defaultdict(int)
    for shape, count in counts.items():
        if devices_asked(shape):
            merged[_plain(shape)] += count
    rank = {shape: count * (ALLOCATION_WEIGHT + devices_asked(shape)) for shape, count in merged.items()}
    wanted = COVERED * sum(rank.values())
    chosen: list[Shape] = []
    covered = 0.0
    for shape in sorted(rank, key=lambda one: -rank[one]):
        if covered >= wanted or len(chosen) == TYPICAL_MAX:
            break
        chosen.append(shape)
        covered += rank[shape]
    total = sum(merged[shape] for shape in chosen)
    return tuple(Typical(shape, merged[shape] / total) for shape in chosen)


def devices_asked(shape: Shape) -> float:
    return sum(amount for name, amount in shape.requests if is_device(name)) / WHOLE


def _plain(shape: Shape) -> Shape:
    """A shape without preferences and pod affinity: the part that decides on which nodes it could run."""
    where = shape.where
    plain = replace(
        shape,
        nodes=1,
        where=Where(node_labels=where.node_labels, required=where.required, tolerations=where.tolerations),
    )
    # Most shapes are plain already. Returning the same object makes dictionary lookups skip the comparison.
    return shape if plain == shape else plain


def _moved(before: tuple[Typical, ...], after: tuple[Typical, ...]) -> float:
    """The fraction of the weight that moved to other shapes."""
    if not before or not after:
        return float(before != after)
    weights = {one.shape: one.weight for one in before}
    return sum(max(0.0, one.weight - weights.get(one.shape, 0.0)) for one in after)
