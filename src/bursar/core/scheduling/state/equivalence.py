"""Pending work in equivalence classes (alike in every decision) and gangs (placed together)."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from bursar.core.objects.allocation import GangKey
from bursar.core.objects.ask import Ask, Shape
from bursar.core.objects.charge import Charge
from bursar.core.scheduling.state.placed_columns import NEVER
from bursar.core.scheduling.state.topology_counts import MatchKey


@dataclass(frozen=True, slots=True)
class EquivalenceKey:
    """The fields that make two pending allocations alike for every decision."""

    tenant: str
    match_key: MatchKey
    queue: str
    priority: int
    preempts: bool
    ttl_seconds: int
    checkpoint_seconds: int
    data_ready: float | None
    shape: Shape
    job: str
    gang: GangKey | None = None
    charged: Hashable = None  # the parts that quotas count
    payer: str = ""
    owner: str = ""
    cross_tenant: bool = False


UnitKey: TypeAlias = EquivalenceKey | GangKey


@dataclass(slots=True)
class EquivalenceClass:
    """Equivalent pending allocations: if the first cannot be placed, none of them can."""

    key: EquivalenceKey
    charge: Charge
    members: dict[str, Ask] = field(default_factory=dict)
    order: list[tuple[float, str]] = field(default_factory=list)  # a heap of (submitted_at, uid)

    def copy(self) -> EquivalenceClass:
        return EquivalenceClass(self.key, self.charge, dict(self.members), list(self.order))

    def add(self, ask: Ask) -> None:
        self.members[ask.uid] = ask
        heappush(self.order, (ask.submitted_at, ask.uid))

    def first(self, nominated: Container[str] = ()) -> Ask | None:
        """The member that has waited longest, without nominated ones."""
        while self.order and (self.order[0][1] not in self.members or self.order[0][1] in nominated):
            heappop(self.order)
        return self.members[self.order[0][1]] if self.order else None

    def next(self, count: int, nominated: Container[str] = ()) -> list[Ask]:
        """The `count` members that have waited longest, or fewer; the caller places them or returns them."""
        found: dict[str, Ask] = {}  # by uid: one that was nominated for a while may be in the heap twice
        while len(found) < count and self.order:
            uid = heappop(self.order)[1]
            if uid in self.members and uid not in nominated:
                found[uid] = self.members[uid]
        return list(found.values())

    def wait_again(self, ask: Ask) -> None:
        heappush(self.order, (ask.submitted_at, ask.uid))

    def remove(self, *uids: str) -> None:
        for uid in uids:
            del self.members[uid]
        if len(self.order) > 2 * len(self.members) + 16:
            self.order = [entry for entry in self.order if entry[1] in self.members]
            heapify(self.order)


@dataclass(slots=True)
class GangState:
    """A gang: its pending members and its placed ones."""

    key: GangKey
    min_members: int
    timeout_seconds: int
    waiting: dict[str, Ask] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)
    started: bool = False  # once it has run, the remaining members may run again without the minimum
    _front: tuple[Ask, ...] | None = None

    def copy(self) -> GangState:
        return replace(self, waiting=dict(self.waiting), placed=set(self.placed))

    def come(self, ask: Ask) -> None:
        self.waiting[ask.uid], self._front = ask, None

    def leave(self, uid: str) -> None:
        self.waiting.pop(uid, None)
        self._front = None

    def begin(self, uids: Sequence[str]) -> None:
        """Move these pending members to the placed ones."""
        for uid in uids:
            self.leave(uid)
        self.placed.update(uids)
        self.started = True

    @property
    def front(self) -> tuple[Ask, ...]:
        """The members that are placed together: as many as the gang needs, in order of submission."""
        if self._front is None:
            order = sorted(self.waiting.values(), key=lambda ask: (ask.submitted_at, ask.uid))
            self._front = tuple(order[: self.min_members])
        return self._front

    @property
    def complete(self) -> bool:
        return self.started or len(self.waiting) + len(self.placed) >= self.min_members

    @property
    def since(self) -> float:
        return min((ask.submitted_at for ask in self.waiting.values()), default=NEVER)
