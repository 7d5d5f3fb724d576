"""Room that is kept, from one cycle to the next, for those for whom others were told to stop.

Every cycle keeps its promises before it looks at anybody else. Most are as they were: nobody came or went on their
nodes. What is held for those stays; only where something happened is it worked out anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.cycle.node_reservation import NodeReservations
from bursar.core.scheduling.cycle.plan import UnitKey

if TYPE_CHECKING:
    from bursar.core.scheduling.state.cluster_state import ClusterState, Nomination


class NominatedCapacity(Struct, frozen=True, eq=False):
    """Who waits for room to be cleared, where, when that will be, and until when it is kept."""

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
    holds: NodeReservations
    seen: int = 0  # how much of the log of touched rows is in what is held
    standing: dict[str, NominatedCapacity] = field(default_factory=dict)  # by the uid of each who waits
    held: dict[str, Counter[str]] = field(default_factory=dict)  # what they will hold, by tenant
    _passing: set[int] = field(default_factory=set)  # rows that are held for this cycle alone
    _on_row: dict[int, dict[int, NominatedCapacity]] = field(default_factory=dict)  # by the identity of each

    def keep(self, nominated: NominatedCapacity) -> None:
        """Hold its room, and remember it for as long as nothing happens there."""
        self.holds.add(nominated.slots, nominated.start)
        for ask in nominated.asks:
            self.standing[ask.uid] = nominated
        for _, row in nominated.slots:
            self._on_row.setdefault(row, {})[id(nominated)] = nominated
        held = self.held.setdefault(nominated.tenant, Counter())
        for name, amount in nominated.amounts:
            held[name] += amount

    def hold(self, slots: Sequence[tuple[Ask, int]], start: float) -> None:
        """Hold room, and look at it again in the next cycle whatever happens."""
        self.holds.add(slots, start)
        self._passing.update([row for _, row in slots])

    def review(self, cluster: ClusterState, now: float) -> None:
        """Let go of the promises that are not as they were.

        Those who share a node with one of them are looked at again with it: each finds the room that those before it
        leave.
        """
        changed = self._passing.union(self.holds.fleet.now.touched[self.seen :])
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
        self.holds.drop(changed)

    def note(self) -> None:
        """Whatever happens from now on makes those on its nodes be looked at again."""
        self.seen = len(self.holds.fleet.now.touched)

    def _forget(self, nominated: NominatedCapacity) -> None:
        for ask in nominated.asks:
            del self.standing[ask.uid]
        for row in {row for _, row in nominated.slots}:
            del self._on_row[row][id(nominated)]
        held = self.held[nominated.tenant]
        for name, amount in nominated.amounts:
            held[name] -= amount


def _is_wanted(nominated: NominatedCapacity, cluster: ClusterState) -> bool:
    """Whether room is still being made for the same ones, on the same nodes."""
    for ask, nomination in zip(nominated.asks, nominated.nominations, strict=True):
        if cluster.nominated.get(ask.uid) is not nomination or cluster.waiting[ask.uid].members[ask.uid] is not ask:
            return False
    return nominated.asks[0].gang is None or cluster.unit_key(nominated.asks[0].uid) == nominated.key


def open_nominations(known: Nominations | None, cluster: ClusterState) -> Nominations:
    """What the cycle before this one left, if it can be read on: the log is there, and nodes have the same columns."""
    fleet = cluster.fleet
    if known is None or known.seen > len(fleet.now.touched) or not known.holds.matches():
        return Nominations(NodeReservations(fleet, cluster.placed, cluster.running), len(fleet.now.touched))
    return known
