"""What usually arrives: the shapes that matter for keeping room usable, learned from those that came so far.

Whoever packs must guess what comes next, and the best guess is more of the same. Everything that arrives is counted;
now and then the count is looked at, and the few shapes that make up nearly all of it become the typical ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bursar.core.nodes.node import WHOLE, is_device
from bursar.core.objects.ask import Shape, Where

TYPICAL_MAX = 48
COVERED = 0.99  # the typical shapes need not stand for more than this part of what arrived
GROWTH = 1.1  # the count is looked at again when so much more has arrived
CHANGE_MIN = 0.02  # the part of the weight that must have moved before scores are worked out anew
SEEN_MAX = 65_536  # beyond this, what is old counts half: habits change
COUNTED_MAX = 4096  # different shapes that are counted
ALLOCATION_WEIGHT = 3.0  # an allocation matters by its devices, and by this because it is one


@dataclass(frozen=True, slots=True)
class Typical:
    """A shape that is likely to arrive, with its part of all that ask for devices; the parts add up to 1."""

    shape: Shape
    weight: float


class ArrivalHistory:
    """What arrived, and what of it is typical. `version` rises when scores are worth working out anew."""

    def __init__(self) -> None:
        self.version = 0
        self.typical: tuple[Typical, ...] = ()
        self._counts: dict[Shape, int] = {}
        self._seen = 0
        self._look_at = 1

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
        """Let everything count half, and forget what then counts nothing, or least."""
        halved = sorted(((n // 2, shape) for shape, n in self._counts.items() if n > 1), key=lambda one: -one[0])
        self._counts = {shape: n for n, shape in halved[: COUNTED_MAX // 2]}
        self._seen = sum(self._counts.values())


def typical_of(counts: Mapping[Shape, int]) -> tuple[Typical, ...]:
    """The shapes with devices that make up nearly all that arrived, each weighted by how often it did.

    Which of them are typical depends on the devices they ask for as well: work that takes whole nodes is rare, and
    hardest to find room for.
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
    """What of a shape decides where it could run: preferences and company come and go."""
    where = shape.where
    plain = replace(
        shape,
        nodes=1,
        where=Where(node_labels=where.node_labels, required=where.required, tolerations=where.tolerations),
    )
    # Most are plain. They stay what they are and not only equal to it: whoever looks one up need not compare it then.
    return shape if plain == shape else plain


def _moved(before: tuple[Typical, ...], after: tuple[Typical, ...]) -> float:
    """The part of the weight that lies on other shapes than it did."""
    if not before or not after:
        return float(before != after)
    weights = {one.shape: one.weight for one in before}
    return sum(max(0.0, one.weight - weights.get(one.shape, 0.0)) for one in after)
