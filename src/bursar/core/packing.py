"""Where to put something so that the least is spoilt for what comes next."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from bursar.core.ask import Shape
from bursar.core.fleet import Columns, Fleet, Rows
from bursar.core.node import WHOLE
from bursar.core.node import choose_devices as choose


class Habits:
    def __init__(self) -> None:
        self.version = 0

    def learn(self, shape: Shape, count: int = 1) -> None:
        pass


def state_key(fleet: Fleet, columns: Columns, row: int) -> Hashable:
    return (columns.free[:, row].tobytes(), fleet.allocatable[:, row].tobytes())


def rate(fleet: Fleet, columns: Columns, shape: Shape, rows: Rows, habits: Habits) -> NDArray[np.float64]:
    whole = np.maximum(fleet.allocatable[:, rows], 1)
    result: NDArray[np.float64] = 1.0 - (columns.free[:, rows] / whole).mean(axis=0)
    return result


def choose_devices(fleet: Fleet, columns: Columns, row: int, shape: Shape, habits: Habits) -> list[tuple[int, tuple[int, ...]]]:
    need = fleet.need(shape)
    chosen = []
    for column, amount in [(c, n * WHOLE) for c, n in need.whole] + list(need.shared):
        found = choose([WHOLE - int(part) for part in columns.devices[column][row]], amount, None)
        assert found is not None
        chosen.append((column, found))
    return chosen
