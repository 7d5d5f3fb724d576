"""Node filter: the nodes that match by labels, taints, claims and tenants, as one array over all nodes.

A requirement is evaluated once per distinct value of a label, and the result is expanded to the nodes with that value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bursar.core.nodes.node import is_open_to
from bursar.core.nodes.node_affinity import holds, tolerates, untolerated
from bursar.core.objects.ask import Effect, Requirement, Requirements, Where
from bursar.core.scheduling.state.fleet import NOWHERE, Bools, Fleet, GateTerms, Rows

FILTERS_MAX = 4096

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """The nodes on which a shape may run, and its preference for each from 0 to 1."""

    met: Mapping[str, Bools]  # by constraint
    allowed: Bools  # all constraints are met
    preference: Floats | None
    described: int
    # By topology: the domains of nodes with the labels; filled lazily.
    domains: dict[str, Rows] = field(default_factory=dict, compare=False)

    @property
    def selected(self) -> Bools:
        return self.met["labels"]

    @property
    def claimable(self) -> Bools:
        return self.met["claims"]

    def constraints(self, fleet: Fleet) -> dict[str, Bools]:
        """The nodes that meet each constraint by itself, whether they accept work now included."""
        return {OPEN: fleet.now.open, **self.met}

    def domains_of(self, fleet: Fleet, key: str) -> Rows:
        known = self.domains.get(key)
        if known is None:
            codes = fleet.label(key).codes[self.selected]
            known = self.domains[key] = np.unique(codes[codes != NOWHERE])
        return known


class NodeFilters:
    """Cached results of filtering nodes by labels, taints, claims and tenants."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[Where, NodeFilter] = {}

    def of(self, where: Where) -> NodeFilter:
        known = self._known.get(where)
        if known is not None and known.described == self._fleet.described:
            return known
        if len(self._known) >= FILTERS_MAX:
            self._known.clear()
        self._known[where] = node_filter = survey(self._fleet, where)
        return node_filter


def survey(fleet: Fleet, where: Where) -> NodeFilter:
    met = {name: mask(fleet, where) for name, mask in CONSTRAINTS.items()}
    allowed: Bools = np.logical_and.reduce(list(met.values()))
    return NodeFilter(met, allowed, _preference(fleet, where), fleet.described)


def tolerated(fleet: Fleet, where: Where) -> Bools:
    """Nodes without a taint that keeps it off."""
    return by_taints(fleet, lambda taints: not untolerated(where.tolerations, taints, where.reserved))


def by_tenants(fleet: Fleet, where: Where) -> Bools:
    """Nodes that are not dedicated to other tenants."""
    return _by_gate(fleet, lambda gate: is_open_to(gate[0], where.tenants))


def by_parts(fleet: Fleet, where: Where) -> Bools:
    """Nodes that admit its fractions of devices, by their own setting or the system default."""
    return _by_gate(fleet, lambda gate: not (where.fractional and (where.whole_only if gate[1] is None else gate[1])))


def by_isolation(fleet: Fleet, where: Where) -> Bools:
    """Nodes that isolate tenants, if its tenant requires it; else all."""
    return _by_gate(fleet, lambda gate: gate[2] or not where.isolated)


def _by_gate(fleet: Fleet, answer: Callable[[GateTerms], bool]) -> Bools:
    return np.array([answer(gate) for gate in fleet.gate_sets], np.bool_)[fleet.gate_code]


def by_claim(fleet: Fleet, where: Where) -> Bools:
    """Nodes that are unclaimed or claimed by its user; for sensitive work, only the latter."""
    own: Bools = fleet.claim_code == (fleet.holders.get(where.claimant, -1) if where.claimant else -1)
    return own if where.sensitive else own | (fleet.claim_code == 0)


def has_labels(fleet: Fleet, where: Where) -> Bools:
    """Nodes with the labels that it selects or requires."""
    rows = fleet.now.placed.shape[0]
    selected = np.zeros(rows, np.bool_)
    selected[list(fleet.row_of.values())] = True
    for key, value in where.node_labels:
        column = fleet.label(key)
        selected &= column.codes == column.code_of.get(value, -2)
    if where.required:
        any_term = np.zeros(rows, np.bool_)
        for term in where.required:
            any_term |= meets(fleet, term)
        selected &= any_term
    return selected


def meets(fleet: Fleet, term: Requirements) -> Bools:
    """The nodes that meet all requirements of a term; no node meets an empty term."""
    rows = fleet.now.placed.shape[0]
    met = np.full(rows, bool(term), np.bool_)
    for requirement in term:
        met &= by_label(fleet, requirement)
    return met


def by_label(fleet: Fleet, requirement: Requirement) -> Bools:
    column = fleet.label(requirement.key)
    answers = [holds(requirement, {requirement.key: value}) for value in column.values]
    # The last entry is the answer for nodes without the label: their code, −1, points there.
    table = np.array([*answers, holds(requirement, _NO_LABELS)], np.bool_)
    return table[column.codes]


_NO_LABELS: Mapping[str, str] = {}


def by_taints(fleet: Fleet, answer: Callable[..., bool]) -> Bools:
    return np.array([answer(taints) for taints in fleet.taint_sets], np.bool_)[fleet.taint_code]


# The constraints of nodes by the names in which explanations count the nodes that they exclude.
OPEN: Final = "not_ready_or_cordoned"
CONSTRAINTS: Final[Mapping[str, Callable[[Fleet, Where], Bools]]] = {
    "labels": has_labels,
    "taints": tolerated,
    "claims": by_claim,
    "tenants": by_tenants,
    "fractions": by_parts,
    "isolation": by_isolation,
}


def _preference(fleet: Fleet, where: Where) -> Floats | None:
    """The weight of the preferences that a node meets, as a fraction of all; PreferNoSchedule taints cost a half."""
    unwelcome = by_taints(
        fleet,
        lambda taints: any(
            taint.effect is Effect.PREFER_NO_SCHEDULE and not tolerates(where.tolerations, taint, where.reserved)
            for taint in taints
        ),
    )
    if not where.preferred and not unwelcome.any():
        return None
    met = np.zeros(fleet.now.placed.shape[0])
    for weight, term in where.preferred:
        met += weight * meets(fleet, term)
    total = sum(weight for weight, _ in where.preferred)
    return np.where(unwelcome, -0.5, 0.0) + (met / total if total else met)
