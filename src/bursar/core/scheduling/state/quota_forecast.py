"""Quota forecast: the headroom below the hard limits of each scope while a plan is made.

The counters start from the stored ones and follow every placement and every end. The commit checks again, under locks.
Only scopes with a limit are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Ask
from bursar.core.objects.charge import Charge
from bursar.core.quota.quota import Counter, Exceeded, Move, nearest_first, uncovered_increases
from bursar.core.quota.tenant_tree import Row, Tree, rows_of
from bursar.core.quota.units import charged
from bursar.core.values.quantity import UNLIMITED

NODES = "nodes"


@dataclass(slots=True)
class ForecastCell:
    """The bound amount and the hard limit of one counter, in the forecast."""

    row: Row
    hard: int
    bound: int


@dataclass(slots=True)
class QuotaForecast:
    """Bound amounts of quota counters while a plan is made."""

    tree: Tree = field(default_factory=Tree)
    cells: dict[Row, ForecastCell] = field(default_factory=dict)
    changed: int = 0  # rises when headroom may have grown
    _known: dict[tuple[str, int], tuple[Charge, tuple[tuple[ForecastCell, int], ...]]] = field(default_factory=dict)

    @property
    def limited(self) -> bool:
        """Whether anything limits what may be placed."""
        return bool(self.cells or self.tree.covered)

    def load(self, tree: Tree, counters: Mapping[Row, Counter]) -> None:
        """Reset the forecast to the stored state: the tree in force, and the counters with a limit."""
        self.tree = tree
        self.cells = {
            row: ForecastCell(row, counter.hard, counter.bound)
            for row, counter in counters.items()
            if counter.hard != UNLIMITED
        }
        self._known.clear()
        self.changed += 1

    def copy(self) -> QuotaForecast:
        cells = {row: ForecastCell(row, cell.hard, cell.bound) for row, cell in self.cells.items()}
        return QuotaForecast(self.tree, cells, self.changed)

    def exceeded(self, members: Sequence[tuple[Ask, int]]) -> list[Exceeded]:
        """The limits that these would exceed together, with thousandths of nodes for each; nearest scope first."""
        more: dict[Row, int] = {}
        faults: dict[Row, Exceeded] = {}
        for ask, nodes in members:
            if ask.namespace in self.tree.covered:
                faults |= {(one.scope, one.dimension): one for one in uncovered_increases(self.tree, _binding(ask))}
            for cell, amount in self._touched(ask):
                asked = more.get(cell.row, 0) + (nodes if cell.row[1] == NODES else amount)
                more[cell.row] = asked
                if asked and cell.bound + asked > cell.hard:
                    faults[cell.row] = Exceeded(*cell.row, cell.hard, cell.bound, asked)
        return nearest_first(self.tree, faults.values()) if faults else []

    def bind(self, ask: Ask, nodes: int, sign: int) -> None:
        for cell, amount in self._touched(ask):
            cell.bound += sign * (nodes if cell.row[1] == NODES else amount)
            if sign < 0:
                self.changed += 1

    def _touched(self, ask: Ask) -> tuple[tuple[ForecastCell, int], ...]:
        """The limited counters that an allocation raises, with the amounts."""
        if not self.cells:
            return ()
        key = (ask.namespace, id(ask.charge))
        known = self._known.get(key)
        # Keeping the charge alive prevents another object from reusing its id.
        if known is not None and known[0] is ask.charge:
            return known[1]
        if ask.namespace not in self.tree.namespaces:
            return ()
        wanted = charged(self.tree.quota_policy, ask.charge, placed=True)
        charge = replace(wanted, bound={**wanted.accepted, **wanted.due, NODES: WHOLE})
        touched = tuple(
            (self.cells[row], charge.bound.get(row[1], 0))
            for row in rows_of(self.tree, ask.namespace, charge)
            if row in self.cells
        )
        if len(self._known) >= 50_000:
            self._known.clear()
        self._known[key] = (ask.charge, touched)
        return touched


def _binding(ask: Ask) -> Move:
    """The move of binding an allocation that was accepted before."""
    return Move(ask.namespace, ask.charge, replace(ask.charge, bound={**ask.charge.accepted, **ask.charge.due}))
