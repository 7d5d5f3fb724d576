"""Topology counts: the number of selected allocations in each domain of a topology.

Affinity, anti-affinity and spread need it. A count is computed when it is first needed, and then updated with every
placement and end; allocations with the same namespace, labels and tenant share a match key, and are matched once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bursar.core.objects.ask import Ask, InterPodTerm
from bursar.core.scheduling.state.fleet import NOWHERE, Fleet, LabelColumn
from bursar.core.values.selector import Op, Selector, SelectorTerm, matches

TALLIES_MAX = 4096
ASKERS_MAX = 64  # match results that one count caches

MatchKey = tuple[str, tuple[tuple[str, str], ...], str]  # (namespace, labels, tenant)
# The allocations that a selector picks in some namespaces of one tenant. Rules never cross tenants: they would reveal
# other tenants' placements, and anti-affinity could keep other tenants off nodes.
CountedGroup = tuple[Selector, tuple[str, ...], str]


# A spread without a selector counts the gang, or the job. No label has such a name.
GANG = ":gang"
JOB = ":job"


def match_key_of(ask: Ask) -> MatchKey:
    labels = tuple(sorted(ask.labels.items())) if ask.labels else ()
    if ask.shape.where.spreads and any(spread.selector is None for spread in ask.shape.where.spreads):
        labels += tuple((key, value) for key, value in ((GANG, _gang(ask)), (JOB, ask.job)) if value)
    return ask.namespace, labels, ask.tenant


def own_crowd(ask: Ask) -> CountedGroup | None:
    """The counted group of an allocation's own gang, else of its job."""
    key, value = (GANG, _gang(ask)) if ask.gang is not None else (JOB, ask.job)
    return (Selector((SelectorTerm(key, Op.IN, (value,)),)), (ask.namespace,), ask.tenant) if value else None


def _gang(ask: Ask) -> str:
    return ask.gang.group_id if ask.gang is not None else ""


def crowd_of(inter_pod: InterPodTerm, ask: Ask) -> CountedGroup:
    return inter_pod.selector, inter_pod.namespaces or (ask.namespace,), ask.tenant


def belongs(match_key: MatchKey, crowd: CountedGroup) -> bool:
    return match_key[2] == crowd[2] and match_key[0] in crowd[1] and matches(crowd[0], dict(match_key[1]))


@dataclass(slots=True)
class TopologyCount:
    """Counts by domain of one topology; valid until a node changes its domain."""

    topology_key: str
    crowd: CountedGroup
    counts: NDArray[np.int64]
    changed: int
    total: int = 0  # in all domains together
    _askers: dict[MatchKey, bool] = field(default_factory=dict)

    def includes(self, match_key: MatchKey) -> bool:
        """Whether allocations of this match key are counted; cached."""
        known = self._askers.get(match_key)
        if known is None:
            if len(self._askers) >= ASKERS_MAX:
                self._askers.clear()
            known = self._askers[match_key] = belongs(match_key, self.crowd)
        return known

    def add(self, column: LabelColumn, row: int, count: int) -> None:
        domain = column.codes[row]
        if domain != NOWHERE:
            self.counts[domain] += count
            self.total += count


@dataclass(slots=True)
class Index:
    """Index of counts by a label that all counted allocations have, so that a placement or an end visits few counts.
    Counts whose selector requires no label value are always visited."""

    _by_label: dict[tuple[str, str, str], dict[int, TopologyCount]] = field(
        default_factory=dict
    )  # (tenant, label, value)
    _others: dict[int, TopologyCount] = field(default_factory=dict)

    def add(self, topology_count: TopologyCount) -> None:
        for shelf in self._shelves(topology_count):
            shelf[id(topology_count)] = topology_count

    def remove(self, topology_count: TopologyCount) -> None:
        for shelf in self._shelves(topology_count):
            del shelf[id(topology_count)]

    def matching(self, match_key: MatchKey) -> list[TopologyCount]:
        shelves = [self._by_label.get((match_key[2], *label)) for label in match_key[1]]
        return [
            topology_count
            for shelf in (*shelves, self._others)
            if shelf
            for topology_count in shelf.values()
            if belongs(match_key, topology_count.crowd)
        ]

    def _shelves(self, topology_count: TopologyCount) -> list[dict[int, TopologyCount]]:
        selector, _, tenant = topology_count.crowd
        for term in selector.terms:
            if term.op is Op.IN:
                return [self._by_label.setdefault((tenant, term.key, value), {}) for value in term.values]
        return [self._others]


@dataclass(slots=True)
class TopologyCounts:
    """Counts of selected allocations per topology domain, for affinity and spread."""

    fleet: Fleet
    rows: dict[MatchKey, dict[int, int]] = field(
        default_factory=dict
    )  # by match key: the number of allocations on each row
    # Placed anti-affinity rules, by (topology, excluded group), with their rows: anti-affinity is symmetric.
    shunning: dict[tuple[str, CountedGroup], dict[int, int]] = field(default_factory=dict)
    _topology_counts: dict[tuple[str, CountedGroup], TopologyCount] = field(default_factory=dict)
    _index: Index = field(default_factory=Index)
    _tallies_of: dict[MatchKey, list[TopologyCount]] = field(default_factory=dict)
    _shunned_of: dict[MatchKey, list[tuple[str, Mapping[int, int]]]] = field(default_factory=dict)

    def copy(self, fleet: Fleet) -> TopologyCounts:
        """An independent copy of the counts for a copy of the fleet."""
        trial = TopologyCounts(
            fleet,
            {match_key: dict(rows) for match_key, rows in self.rows.items()},
            {key: dict(rows) for key, rows in self.shunning.items()},
            {
                key: TopologyCount(one.topology_key, one.crowd, one.counts.copy(), one.changed, one.total)
                for key, one in self._topology_counts.items()
            },
        )
        for topology_count in trial._topology_counts.values():
            trial._index.add(topology_count)
        return trial

    def counts(self, key: str, crowd: CountedGroup) -> NDArray[np.int64]:
        """The number of counted allocations in each domain of the topology."""
        return self.of(key, crowd).counts

    def of(self, key: str, crowd: CountedGroup) -> TopologyCount:
        column = self.fleet.label(key)
        topology_count = self._topology_counts.get((key, crowd))
        if topology_count is None or topology_count.changed != column.changed:
            if topology_count is not None:
                self._index.remove(topology_count)
            elif len(self._topology_counts) >= TALLIES_MAX:
                self._topology_counts.clear()
                self._index = Index()
            topology_count = TopologyCount(key, crowd, np.zeros(max(1, len(column.values)), np.int64), column.changed)
            self._topology_counts[key, crowd] = topology_count
            self._index.add(topology_count)
            self._tallies_of.clear()
            for match_key, rows in self.rows.items():
                if belongs(match_key, crowd):
                    for row, count in rows.items():
                        topology_count.add(column, row, count)
        return topology_count

    def come(self, ask: Ask, match_key: MatchKey, row: int, sign: int = 1) -> None:
        """Count an allocation that was placed on a node; with sign −1, one that left it."""
        _add(self.rows.setdefault(match_key, {}), row, sign)
        if not self.rows[match_key]:
            del self.rows[match_key]
        for inter_pod in ask.shape.where.apart:
            self._shun((inter_pod.topology_key, crowd_of(inter_pod, ask)), row, sign)
        if not self._topology_counts:
            return
        for topology_count in self._tallies_matching(match_key):
            column = self.fleet.label(topology_count.topology_key)
            if topology_count.changed == column.changed:
                topology_count.add(column, row, sign)

    def shunned(self, match_key: MatchKey) -> list[tuple[str, Mapping[int, int]]]:
        """The (topology, rows) from whose domains placed anti-affinity rules exclude this match key."""
        known = self._shunned_of.get(match_key)
        if known is None:
            if len(self._shunned_of) >= TALLIES_MAX:
                self._shunned_of.clear()
            known = [(key, rows) for (key, crowd), rows in self.shunning.items() if belongs(match_key, crowd)]
            self._shunned_of[match_key] = known
        return known

    def _shun(self, key: tuple[str, CountedGroup], row: int, sign: int) -> None:
        rows = self.shunning.get(key)
        if rows is None:
            rows = self.shunning[key] = {}
            self._shunned_of.clear()
        _add(rows, row, sign)
        if not rows:
            del self.shunning[key]
            self._shunned_of.clear()

    def _tallies_matching(self, match_key: MatchKey) -> list[TopologyCount]:
        known = self._tallies_of.get(match_key)
        if known is None:
            if len(self._tallies_of) >= TALLIES_MAX:
                self._tallies_of.clear()
            known = self._tallies_of[match_key] = self._index.matching(match_key)
        return known


def _add(rows: dict[int, int], row: int, sign: int) -> None:
    count = rows.get(row, 0) + sign
    if count:
        rows[row] = count
    else:
        rows.pop(row, None)
