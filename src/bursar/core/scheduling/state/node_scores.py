"""Node scores: the score of every node for each shape, kept up to date.

The scores of a shape are computed once for all nodes, and then only for nodes whose capacity changed: placing one more
of a known shape scores one node. Scores are cached per state of a node, because clusters have thousands of nodes of few
kinds, which go through the same states.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from bursar.core.objects.ask import Shape
from bursar.core.scheduling.state.fleet import Fleet, Need, Rows
from bursar.core.scheduling.state.node_filter import Floats, NodeFilter, NodeFilters
from bursar.core.scheduling.state.node_fingerprint import NodeFingerprints
from bursar.core.scheduling.state.packing import ArrivalMix, choose_devices, rate, state_key

NO = float("-inf")
VIEWS_MAX = 2048
MEMO_MAX = 20_000
RUN_MAX = 256
FEW = 48  # the number of rows up to which scoring one by one is cheaper
LOG_MAX = 1_000_000
PREFERENCE_WEIGHT = 2.0  # preferences outweigh packing


class NodeScores:
    """The scores of all nodes for one shape; minus infinity where it may not run or does not fit."""

    __slots__ = ("memo", "need", "node_filter", "runs", "score", "seen", "shape", "version")

    def __init__(self, shape: Shape, need: Need, node_filter: NodeFilter) -> None:
        self.shape = shape
        self.need = need
        self.node_filter = node_filter
        self.score: Floats = np.empty(0)
        self.seen = -1
        self.version = -1
        # By the number of a node's state: its score, and the number of further placements before the score falls.
        self.memo: dict[int, float] = {}
        self.runs: dict[int, int] = {}


class NodeScoreCache:
    """Cached scores of all nodes per shape, updated for nodes that changed."""

    def __init__(self, fleet: Fleet, arrival_mix: ArrivalMix, node_filters: NodeFilters) -> None:
        self._fleet = fleet
        self._arrival_mix = arrival_mix
        self._node_filters = node_filters
        self._views: dict[Shape, NodeScores] = {}
        self._fingerprints = NodeFingerprints(fleet)
        # The states of scored rows, valid until a row is touched.
        self._states: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._states_of = (-1, -1)
        self._states_seen = 0

    def of(self, shape: Shape) -> NodeScores:
        """The scores of a shape, updated with everything that was placed and freed since."""
        view = self._views.get(shape)
        fleet = self._fleet
        if view is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            view = self._views[shape] = NodeScores(shape, fleet.need(shape), self._node_filters.of(shape.where))
        touched = fleet.now.touched
        if view.node_filter.described != fleet.described or view.version != self._arrival_mix.version or view.seen < 0:
            self._survey(view)
        elif view.seen < len(touched):
            self._catch_up(view, touched[view.seen :])
        view.seen = len(touched)
        return view

    def run_length(self, view: NodeScores, row: int) -> int:
        """The number of these, without shared devices, that a node takes before its score falls: the best node stays
        the best for so many."""
        self._forget_states()
        state = self._states.get(row)
        if state is None:
            state = self._states[row] = self._number(row)
        if state not in view.runs:
            self._try_run(view, row)
        return view.runs[state]

    def _try_run(self, view: NodeScores, row: int) -> None:
        """Place one after another until the score falls or the node is full; cache the run length of every state."""
        now, need = self._fleet.now, view.need
        taken: list[list[tuple[int, tuple[int, ...]]]] = []
        states = [self._number(row)]
        last = self._rate_anew(view, row)
        while last > NO and len(taken) < RUN_MAX:
            taken.append(choose_devices(self._fleet, now, row, view.shape, self._arrival_mix))
            now.take(row, need, taken[-1])
            states.append(self._number(row))
            after = view.memo[states[-1]] = self._rate_anew(view, row)
            if NO < after < last:
                break
            last = after
        for devices in reversed(taken):
            now.give_back(row, need, devices)
        # The state in which the score fell begins a run of its own.
        for done, state in enumerate(states[: len(taken)] or states):
            view.runs[state] = len(taken) - done

    def trim(self) -> None:
        """Drop the log of changes once it is long; scores that have not read it are computed again."""
        log = self._fleet.now.touched
        if len(log) > LOG_MAX:
            for view in self._views.values():
                view.seen = 0 if view.seen == len(log) else -1
            self._forget_states()
            self._states_seen = 0
            self._fingerprints.forget_log()
            log.clear()

    def _survey(self, view: NodeScores) -> None:
        fleet = self._fleet
        view.need = fleet.need(view.shape)
        view.node_filter = self._node_filters.of(view.shape.where)
        view.version = self._arrival_mix.version
        view.memo, view.runs = {}, {}
        view.score = np.full(fleet.now.placed.shape[0], NO)
        fitting = fleet.now.fits(view.need, fleet.allocatable) & view.node_filter.allowed
        self._rate(view, np.flatnonzero(fitting))

    def _catch_up(self, view: NodeScores, touched: list[int]) -> None:
        rows = set(touched)
        if len(rows) > FEW:
            some = np.fromiter(rows, np.intp, len(rows))
            view.score[some] = NO
            fitting = self._fleet.now.fits(view.need, self._fleet.allocatable, some) & view.node_filter.allowed[some]
            self._rate(view, some[fitting])
            return
        self._forget_states()
        states, memo, allowed, score = self._states, view.memo, view.node_filter.allowed, view.score
        preference = view.node_filter.preference
        for row in rows:
            state = states.get(row)
            if state is None:
                state = states[row] = self._number(row)
            known = memo.get(state)
            if known is None:
                known = memo[state] = self._rate_anew(view, row)
            if known != NO and preference is not None:
                known += PREFERENCE_WEIGHT * float(preference[row])
            score[row] = known if allowed[row] else NO

    def _rate(self, view: NodeScores, rows: Rows) -> None:
        if rows.size:
            fleet, fingerprints = self._fleet, self._fingerprints.of(rows)
            view.score[rows] = rate(fleet, fleet.now, view.shape, rows, self._arrival_mix, fingerprints=fingerprints)
            if view.node_filter.preference is not None:
                view.score[rows] += PREFERENCE_WEIGHT * view.node_filter.preference[rows]

    def _rate_anew(self, view: NodeScores, row: int) -> float:
        fleet = self._fleet
        if not fleet.now.fits_at(view.need, fleet.allocatable, row):
            return NO
        return float(rate(fleet, fleet.now, view.shape, np.array([row]), self._arrival_mix)[0])

    def _number(self, row: int) -> int:
        """The number of a node's state, which covers everything that decides fit and score."""
        fleet, now = self._fleet, self._fleet.now
        empty = now.placed[row] == 0
        flags = (now.open[row], now.exclusive[row], empty)
        # Exclusive work is compared with the capacity of an empty node.
        offered = fleet.allocatable[:, row].tobytes() if empty else b""
        state = (state_key(fleet, now, row, self._arrival_mix), flags, offered)
        return self._numbers.setdefault(state, len(self._numbers))

    def _forget_states(self) -> None:
        version = (self._arrival_mix.version, self._fleet.described)
        touched = self._fleet.now.touched
        if version != self._states_of or len(self._numbers) > MEMO_MAX:
            self._states.clear()
            self._numbers.clear()
            for view in self._views.values():
                view.memo.clear()
                view.runs.clear()
            self._states_of = version
        else:
            for row in touched[self._states_seen :]:
                self._states.pop(row, None)
        self._states_seen = len(touched)
