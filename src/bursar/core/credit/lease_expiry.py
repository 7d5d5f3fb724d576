"""Lease expiry: a timer queue that finds the open leases whose paid time has run out.

For each open lease it remembers the `paid_until` read last and skips the lease until then, however often it is extended
meanwhile. So a scan reads only leases that may have expired, and those opened since the last scan.

It compares two clocks: the database's, by which leases are paid, in microseconds; and the process's monotonic clock, in
seconds, which reveals jumps of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from bursar.core.values.money import MICROS

LOOKED_MAX = 20_000  # leases per scan
UNBEGUN_MICROS = 30 * MICROS  # until leases whose work has not started are scanned again
JUMP_MICROS = 3 * MICROS
ROUND_SECONDS = 600.0  # the period of a full scan of all leases
GAP_SECONDS = 60.0  # how long missing numbers are scanned: leases become visible in any order
GAPS_MAX = 4_000  # below the newest number: only leases being opened now are missing


@dataclass(slots=True)
class ExpiryWatch:
    """The timer queue of open leases. `since` has the overdue ones by (number, paid until), with the monotonic time."""

    since: dict[tuple[int, int], float] = field(default_factory=dict)
    newest: int = 0  # all leases up to this number were seen, or are gaps
    looked: int = 0  # leases read by the last scan
    _looks: list[tuple[int, int]] = field(default_factory=list)  # a heap of (time of the next scan, lease)
    _gaps: dict[int, float] = field(default_factory=dict)
    _clocks: tuple[float, int] | None = None
    _began_at: float = 0.0

    def heed(self, at: float, now: int) -> None:
        """Record both clocks. After a jump of the database's clock, or once in a while, scan all leases again."""
        before, self._clocks = self._clocks, (at, now)
        jumped = before is not None and abs((now - before[1]) - (at - before[0]) * MICROS) > JUMP_MICROS
        if before is None or jumped or at - self._began_at >= ROUND_SECONDS:
            self.restart(at)

    def restart(self, at: float) -> None:
        """Scan all leases again. Overdue leases stay overdue until they are scanned."""
        self._looks, self._gaps, self.newest, self._began_at = [], {}, 0, at

    def take(self, at: float, now: int) -> list[int]:
        """The leases to scan now. The caller reports the result to `see`, or restarts."""
        self.looked = 0
        self._gaps = {lease: since for lease, since in self._gaps.items() if at - since < GAP_SECONDS}
        taken = list(self._gaps)
        while self._looks and self._looks[0][0] <= now and len(taken) < LOOKED_MAX:
            taken.append(heappop(self._looks)[1])
        return taken

    def see(self, asked: Collection[int], found: Iterable[tuple[int, int, int | None]], at: float, now: int) -> None:
        """Record the open leases among the scanned and newer ones: (number, paid until, time of expiry)."""
        there = {lease: (paid_until, over_at) for lease, paid_until, over_at in found}
        gone = {*asked, *there}
        known = self.since
        self.since = {one: since for one, since in known.items() if one[0] not in gone}
        for lease, (paid_until, over_at) in there.items():
            overdue = over_at is not None and over_at < now
            if overdue:
                self.since[lease, paid_until] = known.get((lease, paid_until), at)
            # Overdue leases are scanned each time, until they are extended or ended.
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
        """The leases that have been overdue for this long."""
        return dict([one for one, since in self.since.items() if at - since >= seconds][:limit])

    def settled(self, leases: Iterable[tuple[int, int]]) -> None:
        """Forget leases that were ended, or are not overdue after all."""
        for one in leases:
            self.since.pop(one, None)
