"""Statistics of recent scheduling: queue waits, placements per second, preemptions.

Everything is bounded: of each queue the newest waits of the last hour are kept, and no more than so many of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

HOUR_SECONDS: Final = 3600.0
MINUTE_SECONDS: Final = 60.0
KEPT_PER_QUEUE: Final = 10_000
QUEUES_MAX: Final = 1_000
KEPT_SECONDS_OF_RATE: Final = 61  # whole seconds: the minute, and the one that has begun


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits of the last hour, from being submitted to being placed for the first time."""

    count: int = 0
    avg_seconds: float = 0.0
    p50_seconds: float = 0.0
    p99_seconds: float = 0.0


@dataclass(slots=True)
class WaitStats:
    """Bounded statistics of recent waits, placements and preemptions."""

    _by_queue: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)  # (placed at, waited)
    _all: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_PER_QUEUE))
    _placed: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_SECONDS_OF_RATE))
    _preempted: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PER_QUEUE))

    def bound(self, queue: str, submitted_at: float, bound_at: float) -> None:
        """Something was placed. A clock that ran backwards is no wait."""
        one = (bound_at, max(0.0, bound_at - submitted_at))
        self._ring(queue).append(one)
        self._all.append(one)
        self._count(bound_at)

    def bound_again(self, at: float) -> None:
        """Something was placed that had a place before. It is counted, but is no wait: it ran for part of the time."""
        self._count(at)

    def _count(self, at: float) -> None:
        second = int(at)
        if self._placed and self._placed[-1][0] == second:
            self._placed[-1] = (second, self._placed[-1][1] + 1)
        else:
            self._placed.append((second, 1))

    def preempted(self, at: float) -> None:
        self._preempted.append(at)

    def queue(self, name: str, now: float) -> Wait:
        return _summary(self._by_queue.get(name, ()), now)

    def overall(self, now: float) -> Wait:
        return _summary(self._all, now)

    def per_second(self, now: float) -> float:
        """Placements per second, averaged over the last minute."""
        return sum(count for second, count in self._placed if second > now - MINUTE_SECONDS) / MINUTE_SECONDS

    def preemptions(self, now: float) -> int:
        """Of the last hour; those that are not kept any more are not counted."""
        return sum(1 for at in self._preempted if at > now - HOUR_SECONDS)

    def _ring(self, queue: str) -> deque[tuple[float, float]]:
        ring = self._by_queue.get(queue)
        if ring is None:
            if len(self._by_queue) >= QUEUES_MAX:
                self._by_queue.pop(min(self._by_queue, key=lambda name: self._by_queue[name][-1][0]))
            ring = self._by_queue[queue] = deque(maxlen=KEPT_PER_QUEUE)
        return ring


def _summary(ring: Sequence[tuple[float, float]] | deque[tuple[float, float]], now: float) -> Wait:
    waited = sorted(seconds for at, seconds in ring if at > now - HOUR_SECONDS)
    if not waited:
        return Wait()
    return Wait(len(waited), sum(waited) / len(waited), quantile(waited, 0.5), quantile(waited, 0.99))


def quantile(ordered: Sequence[float], part: float) -> float:
    """The smallest that at least this part of them do not exceed."""
    return ordered[max(0, ceil(part * len(ordered)) - 1)]
