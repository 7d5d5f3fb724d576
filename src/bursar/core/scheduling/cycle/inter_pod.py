"""Inter-pod rules: pod affinity, pod anti-affinity and topology spread.

Each rule becomes one array over the domains of a topology, which is then expanded to the nodes in them. Anti-affinity
is symmetric: placed work with an anti-affinity rule excludes others as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bursar.core.objects.ask import Ask, Spread
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.state.fleet import NOWHERE, Bools, Fleet, LabelColumn
from bursar.core.scheduling.state.node_filter import Floats, NodeFilter
from bursar.core.scheduling.state.topology_counts import (
    CountedGroup,
    MatchKey,
    TopologyCounts,
    crowd_of,
    match_key_of,
    own_crowd,
)

FEW_DOMAINS = 64
HANDED_OUT_MAX = 256  # answers of one topology that are kept
SOFT_WEIGHT = 1.0  # preferred inter-pod rules weigh as much as packing


def is_free(ask: Ask, topology_counts: TopologyCounts) -> bool:
    """Whether no inter-pod rule applies: neither one of its own nor one of placed work."""
    where = ask.shape.where
    if where.near or where.apart or where.spreads or where.rather_near or where.rather_apart:
        return False
    return not topology_counts.shunning or not topology_counts.shunned(match_key_of(ask))


def masks(
    ask: Ask, match_key: MatchKey, node_filter: NodeFilter, fleet: Fleet, topology_counts: TopologyCounts
) -> Iterator[tuple[ReasonCode, Bools]]:
    """The nodes that each hard rule allows."""
    where = ask.shape.where
    for inter_pod in where.near:
        topology_count = topology_counts.of(inter_pod.topology_key, crowd_of(inter_pod, ask))
        # The first of a group with mutual affinity may go anywhere that has the topology.
        alone = not topology_count.total and topology_count.includes(match_key)
        yield (
            ReasonCode.AFFINITY,
            _hand_out(fleet, inter_pod.topology_key, (topology_count.counts > 0) | alone, elsewhere=False),
        )
    for inter_pod in where.apart:
        counts = topology_counts.counts(inter_pod.topology_key, crowd_of(inter_pod, ask))
        yield ReasonCode.ANTI_AFFINITY, _hand_out(fleet, inter_pod.topology_key, counts == 0, elsewhere=True)
    for key, rows in topology_counts.shunned(match_key):
        column = fleet.label(key)
        admits = np.ones(len(column.values) + 1, np.bool_)
        admits[column.codes[list(rows)]] = False
        admits[NOWHERE] = True
        yield ReasonCode.ANTI_AFFINITY, admits[column.codes]
    for spread in where.spreads:
        if spread.hard and (found := _crowd(ask, spread)) is not None:
            yield ReasonCode.SPREAD, _even(spread, found, match_key, node_filter, fleet, topology_counts)


def absent(ask: Ask, match_key: MatchKey, topology_counts: TopologyCounts) -> str:
    """The topology key of the first affinity rule that no placed work satisfies; empty if there is none."""
    for inter_pod in ask.shape.where.near:
        topology_count = topology_counts.of(inter_pod.topology_key, crowd_of(inter_pod, ask))
        if not topology_count.total and not topology_count.includes(match_key):
            return inter_pod.topology_key
    return ""


def wishes(ask: Ask, node_filter: NodeFilter, fleet: Fleet, topology_counts: TopologyCounts) -> Floats | None:
    """The bonus of each node from preferred inter-pod rules; none if there are none."""
    where = ask.shape.where
    soft = [spread for spread in where.spreads if not spread.hard]
    if not (where.rather_near or where.rather_apart or soft):
        return None
    bonus: Floats | None = None
    for sign, wished in ((1.0, where.rather_near), (-1.0, where.rather_apart)):
        for weight, inter_pod in wished:
            topology_count = topology_counts.of(inter_pod.topology_key, crowd_of(inter_pod, ask))
            if not topology_count.total:  # no placed work matches, so no node is better than another
                continue
            there = _hand_out(fleet, inter_pod.topology_key, topology_count.counts > 0, elsewhere=False)
            bonus = _more(bonus, (sign * SOFT_WEIGHT * weight / 100 * there).astype(np.float64, copy=False))
    for spread in soft:
        crowd = _crowd(ask, spread)
        if crowd is not None:
            counts = topology_counts.counts(spread.topology_key, crowd)
            above = counts - _least(counts, spread.topology_key, node_filter, fleet)
            column = fleet.label(spread.topology_key)
            # Each one more than in the emptiest domain costs as much again; no domain at all is as bad as the worst.
            table = np.append(above, max(1, above.max(initial=0)))
            bonus = _more(bonus, -SOFT_WEIGHT * table[column.codes])
    return bonus


def _more(bonus: Floats | None, more: Floats) -> Floats:
    return more if bonus is None else bonus + more


def _crowd(ask: Ask, spread: Spread) -> CountedGroup | None:
    return own_crowd(ask) if spread.selector is None else (spread.selector, (ask.namespace,), ask.tenant)


def _even(
    spread: Spread,
    crowd: CountedGroup,
    match_key: MatchKey,
    node_filter: NodeFilter,
    fleet: Fleet,
    topology_counts: TopologyCounts,
) -> Bools:
    """The nodes in domains that one more would not make too full, against the emptiest domain it could go to."""
    topology_count = topology_counts.of(spread.topology_key, crowd)
    more = 1 if topology_count.includes(match_key) else 0
    most = _least(topology_count.counts, spread.topology_key, node_filter, fleet) + spread.skew_max - more
    return _hand_out(fleet, spread.topology_key, topology_count.counts <= most, elsewhere=False)


def _least(counts: NDArray[np.int64], key: str, node_filter: NodeFilter, fleet: Fleet) -> int:
    """The fewest in any domain that has a node of the right kind."""
    domains = node_filter.domains_of(fleet, key)
    return int(counts[domains].min()) if domains.size else 0


def _hand_out(fleet: Fleet, key: str, by_domain: Bools, *, elsewhere: bool) -> Bools:
    """An answer for each domain, as an answer for each node; `elsewhere` is that for nodes in no domain."""
    column = fleet.label(key)
    if len(column.values) > FEW_DOMAINS:
        return _look_up(column, by_domain, elsewhere=elsewhere)
    # Between few domains the same answers come again and again.
    answer = (by_domain.tobytes(), elsewhere)
    known = column.handed_out.get(answer)
    if known is None:
        if len(column.handed_out) >= HANDED_OUT_MAX:
            column.handed_out.clear()
        known = column.handed_out[answer] = _look_up(column, by_domain, elsewhere=elsewhere)
        known.flags.writeable = False
    return known


def _look_up(column: LabelColumn, by_domain: Bools, *, elsewhere: bool) -> Bools:
    table = np.full(len(column.values) + 1, elsewhere, np.bool_)
    table[: len(column.values)] = by_domain[: len(column.values)]
    return table[column.codes]
