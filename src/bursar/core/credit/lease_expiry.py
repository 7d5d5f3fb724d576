"""When to look at which lease again, to find those that nobody extends any more.

A lease is known by until when it was paid when it was last looked at: before that it need not be looked at, however
often it is extended meanwhile. So a look costs what may be over by now, and what was opened since the last one.

Two clocks are told of: the database's, by which leases are paid, in microseconds; and our own, in seconds, which no
jump of the other moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from bursar.core.values.money import MICROS

LOOKED_MAX = 20_000  # at a time
UNBEGUN_MICROS = 30 * MICROS  # until what has not begun is looked at again
JUMP_MICROS = 3 * MICROS
ROUND_SECONDS = 600.0  # after so long all of them are looked at anew, whatever we believe to know
GAP_SECONDS = 60.0  # numbers become visible in any order: so long the missing ones are asked for
GAPS_MAX = 4_000  # below the newest: only what is being opened now is missing for a while


@dataclass(slots=True)
class ExpiryWatch:
    """What is known of open leases; and which are overdue, by (number, paid until), since when by our own clock."""

    since: dict[tuple[int, int], float] = field(default_factory=dict)
    newest: int = 0  # all up to this number were seen, or are among the gaps
    looked: int = 0  # how many were read by the last look
    _looks: list[tuple[int, int]] = field(default_factory=list)  # when to look at which lease, the soonest first
    _gaps: dict[int, float] = field(default_factory=dict)
    _clocks: tuple[float, int] | None = None
    _began_at: float = 0.0

    def heed(self, at: float, now: int) -> None:
        """What the clocks say. Should the database's have jumped, nothing that was worked out by it counts."""
        before, self._clocks = self._clocks, (at, now)
        jumped = before is not None and abs((now - before[1]) - (at - before[0]) * MICROS) > JUMP_MICROS
        if before is None or jumped or at - self._began_at >= ROUND_SECONDS:
            self.restart(at)

    def restart(self, at: float) -> None:
        """Look at all of them anew. What was overdue stays so until it is looked at."""
        self._looks, self._gaps, self.newest, self._began_at = [], {}, 0, at

    def take(self, at: float, now: int) -> list[int]:
        """What is to be looked at now. Whoever takes it says what was seen, or begins anew."""
        self.looked = 0
        self._gaps = {lease: since for lease, since in self._gaps.items() if at - since < GAP_SECONDS}
        taken = list(self._gaps)
        while self._looks and self._looks[0][0] <= now and len(taken) < LOOKED_MAX:
            taken.append(heappop(self._looks)[1])
        return taken

    def see(self, asked: Collection[int], found: Iterable[tuple[int, int, int | None]], at: float, now: int) -> None:
        """These of the asked, and of those after them, are open: (number, paid until, when it is over)."""
        there = {lease: (paid_until, over_at) for lease, paid_until, over_at in found}
        gone = {*asked, *there}
        known = self.since
        self.since = {one: since for one, since in known.items() if one[0] not in gone}
        for lease, (paid_until, over_at) in there.items():
            overdue = over_at is not None and over_at < now
            if overdue:
                self.since[lease, paid_until] = known.get((lease, paid_until), at)
            # What is overdue is looked at each time, until it is extended or ended.
            heappush(self._looks, (now if overdue else over_at or now + UNBEGUN_MICROS, lease))
        self._note_gaps(there, at)
        self.looked += len(there)

    def _note_gaps(self, there: Collection[int], at: float) -> None:
        newest = max(there, default=0)
        for lease in there:
            self._gaps.pop(lease, None)
        if newest > self.newest:
            oldest = newest - GAPS_MAX
            self._gaps = {lease: since for lease, since in self._gaps.items() if lease > oldest}
            missing = range(max(self.newest, oldest) + 1, newest)
            self._gaps |= {lease: at for lease in missing if lease not in there}
            self.newest = newest

    def due(self, at: float, seconds: float, limit: int) -> dict[int, int]:
        """Those that were overdue for so long."""
        return dict([one for one, since in self.since.items() if at - since >= seconds][:limit])

    def settled(self, leases: Iterable[tuple[int, int]]) -> None:
        """These were ended, or are not overdue after all."""
        for one in leases:
            self.since.pop(one, None)
