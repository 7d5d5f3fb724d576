"""The placement policies that the paper "Beware of Fragmentation" compares, to be replayed beside our own.

Written from its description. Scores are whole numbers up to 100 and the first node by name wins ties, as there;
that is part of how these policies fare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Protocol

import numpy as np

from bursar.core.nodes.node import WHOLE
from bursar.core.nodes.node import choose_devices as choose
from bursar.core.objects.ask import Shape
from bursar.core.scheduling.state.arrival_history import ArrivalHistory, Typical, devices_asked
from bursar.core.scheduling.state.fleet import Fleet, Need, NodeColumns, Rows
from bursar.core.scheduling.state.node_filter import Floats, NodeFilters
from bursar.core.scheduling.state.node_scores import NO
from bursar.core.scheduling.state.packing import PackingOutlook, TakenCapacity

CPU_MAX, GPUS_MAX = 128_000, 8  # of the largest node: the scale of scores
POPULAR = 0.95  # the part of arrivals that the typical pods cover
SHARING = 0  # the class of pods that share a GPU, beside those that request 1, 2, 4 …


class Rating(Protocol):
    """A policy: scores of nodes, and its memory."""

    version: int  # rises when all nodes must be scored again

    def arrived(self, shape: Shape) -> None: ...

    def rate(self, shape: Shape, rows: Rows) -> Floats: ...

    def devices(self, row: int, shape: Shape) -> TakenCapacity: ...

    def placed(self, row: int, shape: Shape) -> None: ...


class Rival:
    """A policy's scores for every shape, each caught up with the nodes that changed since it was last asked for."""

    def __init__(self, rating: Rating, fleet: Fleet) -> None:
        self._rating = rating
        self._fleet = fleet
        self._node_filters = NodeFilters(fleet)
        self._known: dict[Shape, tuple[Floats, int, int]] = {}  # scores, length of the log, version

    def arrived(self, shape: Shape) -> None:
        self._rating.arrived(shape)

    def scores(self, shape: Shape) -> Floats:
        fleet, touched = self._fleet, self._fleet.now.touched
        score, seen, version = self._known.get(shape, (np.empty(0), 0, -1))
        if version != self._rating.version:
            score, rows = np.full(fleet.now.placed.shape[0], NO), np.arange(fleet.size)
        else:
            rows = np.unique(np.array(touched[seen:], np.intp))
            score[rows] = NO
        fits = (
            fleet.now.fits(fleet.need(shape), fleet.allocatable, rows)
            & self._node_filters.of(shape.where).allowed[rows]
        )
        if fits.any():
            score[rows[fits]] = self._rating.rate(shape, rows[fits])
        self._known[shape] = (score, len(touched), self._rating.version)
        return score

    def devices(self, row: int, shape: Shape) -> TakenCapacity:
        return self._rating.devices(row, shape)

    def placed(self, row: int, shape: Shape) -> None:
        self._rating.placed(row, shape)


class BestFit:
    """Best fit: least remaining cpu and GPU, with equal weights."""

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        self.version = 0
        self._fleet = fleet
        self._chance = chance

    @property
    def _columns(self) -> NodeColumns:
        return self._fleet.now

    def arrived(self, shape: Shape) -> None:
        """Nothing is learned."""

    def placed(self, row: int, shape: Shape) -> None:
        """Nothing is remembered."""

    def rate(self, shape: Shape, rows: Rows) -> Floats:
        cpu, gpus = self._free(rows)
        left = 0.5 * (cpu - _cpu(shape)) / CPU_MAX + 0.5 * (gpus - devices_asked(shape)) / GPUS_MAX
        return np.floor(100 * (1 - left))

    def devices(self, row: int, shape: Shape) -> TakenCapacity:
        """Whole devices from the left, a share on the fullest."""
        need = self._fleet.need(shape)
        return [
            (column, choose([WHOLE - part for part in self._parts(row)], amount, None) or ())
            for column, amount in _asked(need)
        ]

    def _free(self, rows: Rows) -> tuple[Floats, Floats]:
        free = self._columns.free[:, rows]
        return free[self._fleet.column_of["cpu"]].astype(float), self._gpus(rows)

    def _gpus(self, rows: Rows) -> Floats:
        gpus: Floats = np.maximum(self._columns.devices[0][rows], 0).sum(axis=1) / WHOLE
        return gpus

    def _parts(self, row: int) -> list[int]:
        parts: list[int] = self._columns.devices[0][row].tolist()
        return parts


class Anywhere(BestFit):
    """Any node, any device."""

    def arrived(self, shape: Shape) -> None:  # noqa: ARG002
        self.version += 1  # so that each pod draws anew

    def rate(self, shape: Shape, rows: Rows) -> Floats:  # noqa: ARG002
        score = np.zeros(rows.size)
        score[self._chance.randrange(rows.size)] = 1.0
        return score

    def devices(self, row: int, shape: Shape) -> TakenCapacity:
        need = self._fleet.need(shape)
        if not need.shared:
            return super().devices(row, shape)
        column, part = need.shared[0]
        return [(column, (self._chance.choice([i for i, left in enumerate(self._parts(row)) if left >= part]),))]


class DotProduct(BestFit):
    """Where demand and free resources are least alike, so that large free nodes are kept for large demand."""

    def rate(self, shape: Shape, rows: Rows) -> Floats:
        cpu, gpus = self._free(rows)
        product = cpu * _cpu(shape) / CPU_MAX**2 + gpus * devices_asked(shape) / GPUS_MAX**2
        return np.floor(100 * (1 - product / 2))


class Packing(BestFit):
    """On shared devices first, then on nodes in use, then on idle ones."""

    def rate(self, shape: Shape, rows: Rows) -> Floats:
        asked = devices_asked(shape)
        if not asked:
            return np.zeros(rows.size)
        return np.array([self._rate_one(row, round(WHOLE * asked)) for row in rows.tolist()])

    def _rate_one(self, row: int, asked: int) -> float:
        parts = [part for part in self._parts(row) if part >= 0]
        idle = parts.count(WHOLE)
        if idle == len(parts):
            return max(33 - idle, idle)
        fullest = min(part for part in parts if part >= min(asked, WHOLE))
        if fullest == WHOLE:
            return max(50 - max(1, asked // WHOLE), 33)
        return max(100 - fullest // 100, 50)


class Clustering(BestFit):
    """Beside pods that ask for as many GPUs, best where there are no others."""

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        super().__init__(fleet, chance)
        self._sorts: dict[int, set[int]] = {}  # by row

    def placed(self, row: int, shape: Shape) -> None:
        if devices_asked(shape):
            self._sorts.setdefault(row, set()).add(_sort(shape))

    def rate(self, shape: Shape, rows: Rows) -> Floats:
        if not devices_asked(shape):
            return np.zeros(rows.size)
        fullness = np.floor(25 * (1 - self._gpus(rows) / GPUS_MAX))
        return fullness + [self._inter_pod(row, _sort(shape)) for row in rows.tolist()]

    def _inter_pod(self, row: int, sort: int) -> int:
        sorts = self._sorts.get(row, set())
        if sort in sorts:
            return 75 if len(sorts) == 1 else 50
        return 0 if sorts else 25


class LeastFragmentation(BestFit):
    """FGD: where the GPUs that the typical pods could not use grow least. The typical pods are learned as they come."""

    def __init__(self, fleet: Fleet, chance: Random) -> None:
        super().__init__(fleet, chance)
        self._history = ArrivalHistory()
        self._outlook = self._expected()

    def arrived(self, shape: Shape) -> None:
        self._history.learn(shape)
        if self._history.version != self.version:
            self.version = self._history.version
            self._outlook = self._expected()

    def _expected(self) -> PackingOutlook:
        return PackingOutlook(self._fleet, popular(self._history.counts), repeated=0.0, pressing=False)

    def rate(self, shape: Shape, rows: Rows) -> Floats:
        # The paper counts what cannot be used: it falls by what is taken, and grows by what is spoilt.
        lost = self._outlook.loss(self._columns, self._fleet.need(shape), rows)
        return np.floor(100 / (1 + np.exp(lost - devices_asked(shape))))

    def devices(self, row: int, shape: Shape) -> TakenCapacity:
        need = self._fleet.need(shape)
        if not need.shared:
            return super().devices(row, shape)
        column, part = need.shared[0]
        return [(column, (self._outlook.share_device(self._columns, need, row, column, part),))]


def popular(counts: Mapping[Shape, int]) -> tuple[Typical, ...]:
    """The most frequent pods, until they stand for most of what arrived; memory is left out, as in the paper."""
    merged: dict[Shape, int] = {}
    for shape, count in counts.items():
        plain = replace(shape, requests=tuple(one for one in shape.requests if one[0] != "memory"))
        merged[plain] = merged.get(plain, 0) + count
    wanted, covered = POPULAR * sum(merged.values()), 0
    chosen: list[Shape] = []
    for shape in sorted(merged, key=lambda one: -merged[one]):
        if covered >= wanted:
            break
        chosen.append(shape)
        covered += merged[shape]
    return tuple(Typical(shape, merged[shape] / covered) for shape in chosen)


def _cpu(shape: Shape) -> int:
    return dict(shape.requests).get("cpu", 0)


def _sort(shape: Shape) -> int:
    asked = devices_asked(shape)
    return SHARING if asked < 1 else round(asked)


def _asked(need: Need) -> list[tuple[int, int]]:
    return [(column, count * WHOLE) for column, count in need.whole] + list(need.shared)


RIVALS: Mapping[str, Callable[[Fleet, Random], Rating]] = {
    "random": Anywhere,
    "dotprod": DotProduct,
    "clustering": Clustering,
    "packing": Packing,
    "bestfit": BestFit,
    "fgd": LeastFragmentation,
}
