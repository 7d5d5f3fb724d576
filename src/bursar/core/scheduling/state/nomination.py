"""Nominations: capacity that preemption clears, kept from one cycle to the next for the preemptors.

Every cycle serves its nominations before any other pending work. Most are unchanged, because nothing changed on their
nodes; their reservations stay. Only nominations on changed nodes are computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.equivalence import UnitKey
from bursar.core.scheduling.state.node_reservation import NodeReservations

if TYPE_CHECKING:
    from bursar.core.scheduling.state.cluster_state import ClusterState, Nomination


class NominatedCapacity(Struct, frozen=True, eq=False):
    """Capacity nominated to a unit: the nodes, when the victims will have stopped, and until when it is kept."""

    key: UnitKey
    asks: tuple[Ask, ...]
    nominations: tuple[Nomination, ...]
    slots: tuple[tuple[Ask, int], ...]
    amounts: tuple[tuple[str, int], ...]
    start: float
    until: float

    @property
    def tenant(self) -> str:
        return self.asks[0].tenant


@dataclass(slots=True)
class Nominations:
    """Capacity that preemption clears, kept from cycle to cycle for the nominated preemptors."""

    reservations: NodeReservations
    seen: int = 0  # the position in the log of touched rows up to which reservations are current
    standing: dict[str, NominatedCapacity] = field(default_factory=dict)  # by uid of the pending allocation
    held: dict[str, Counter[str]] = field(default_factory=dict)  # amounts they will hold, by tenant
    _passing: set[int] = field(default_factory=set)  # rows that are reserved for this cycle only
    _on_row: dict[int, dict[int, NominatedCapacity]] = field(default_factory=dict)  # by the identity of each

    def keep(self, nominated: NominatedCapacity) -> None:
        """Reserve its capacity, and keep it until something changes on its nodes."""
        self.reservations.add(nominated.slots, nominated.start)
        for ask in nominated.asks:
            self.standing[ask.uid] = nominated
        for _, row in nominated.slots:
            self._on_row.setdefault(row, {})[id(nominated)] = nominated
        held = self.held.setdefault(nominated.tenant, Counter())
        for name, amount in nominated.amounts:
            held[name] += amount

    def hold(self, slots: Sequence[tuple[Ask, int]], start: float) -> None:
        """Reserve capacity for this cycle; the next one decides again."""
        self.reservations.add(slots, start)
        self._passing.update([row for _, row in slots])

    def review(self, cluster: ClusterState, now: float) -> None:
        """Drop the nominations that changed, so that they are decided again.

        Nominations that share a node with one of them are dropped too: each uses the capacity that earlier ones leave.
        """
        changed = self._passing.union(self.reservations.fleet.now.touched[self.seen :])
        self._passing.clear()
        for nominated in list(self.standing.values()):
            if nominated.start <= now or nominated.until < now or not _is_wanted(nominated, cluster):
                changed.update([row for _, row in nominated.slots])
        look = list(changed)
        while look:
            for nominated in list(self._on_row.get(look.pop(), {}).values()):
                self._forget(nominated)
                look += [row for _, row in nominated.slots if row not in changed]
                changed.update([row for _, row in nominated.slots])
        self.reservations.drop(changed)

    def note(self) -> None:
        """Mark the log as read: later changes to a node make its nominations be decided again."""
        self.seen = len(self.reservations.fleet.now.touched)

    def _forget(self, nominated: NominatedCapacity) -> None:
        for ask in nominated.asks:
            del self.standing[ask.uid]
        for row in {row for _, row in nominated.slots}:
            del self._on_row[row][id(nominated)]
        held = self.held[nominated.tenant]
        for name, amount in nominated.amounts:
            held[name] -= amount


def _is_wanted(nominated: NominatedCapacity, cluster: ClusterState) -> bool:
    """Whether the same allocations are still nominated to the same nodes."""
    for ask, nomination in zip(nominated.asks, nominated.nominations, strict=True):
        if cluster.nominated.get(ask.uid) is not nomination or cluster.waiting[ask.uid].members[ask.uid] is not ask:
            return False
    return nominated.asks[0].gang is None or cluster.unit_key(nominated.asks[0].uid) == nominated.key


def open_nominations(known: Nominations | None, cluster: ClusterState) -> Nominations:
    """The last cycle's nominations, if its log and its columns are still valid; else new ones."""
    fleet = cluster.fleet
    if known is None or known.seen > len(fleet.now.touched) or not known.reservations.matches():
        return Nominations(NodeReservations(fleet, cluster.placed, cluster.running), len(fleet.now.touched))
    return known
