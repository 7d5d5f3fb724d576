"""Rate limit of requests per minute: a token bucket that holds a minute's worth.

Each tenant and each node has a bucket, and so has each approver and each service, so that a flood by one of them delays
none of the others.

Buckets are in memory for one process, or in Redis (`redis_ratelimit`) if several share the limit. A bucket stores its
debt: requests taken minus those refilled, in integer parts of a request, so that rounding never admits one too many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from bursar.core.values.access import OF_TENANTS, Identity

LIMIT_PER_MINUTE_DEFAULT = 1000
# Of an approver or a service, which acts for all tenants.
SERVICE_LIMIT_PER_MINUTE_DEFAULT = 20 * LIMIT_PER_MINUTE_DEFAULT

NS_PER_SECOND = 1_000_000_000
# A bucket of limit n refills n requests per minute, which is n parts per nanosecond if a request has this many parts.
_PARTS = 60 * NS_PER_SECOND


class RateVerdict(msgspec.Struct, frozen=True, gc=False):
    """The rate limit of a request, as in the response headers. `reset_epoch_seconds` is when the bucket is full again
    if no further request arrives."""

    allowed: bool
    limit: int
    remaining: int
    reset_epoch_seconds: int
    retry_after_seconds: int


class RateLimit(Protocol):
    async def take(self, key: str, limit_per_minute: int) -> RateVerdict: ...

    async def close(self) -> None: ...


def message(identity: Identity, limit: int) -> str:
    """The message of a request beyond the limit, which names whose limit it is."""
    kind, name = str(identity.role), identity.node or identity.user
    if identity.role in OF_TENANTS:
        kind, name = "tenant", identity.tenant
    return f"Rate limit exceeded. {kind.capitalize()} '{name}' limited to {limit} req/min."


class _Bucket:
    __slots__ = ("at_ns", "debt", "limit")

    def __init__(self, at_ns: int) -> None:
        self.debt = 0
        self.at_ns = at_ns
        self.limit = 0

    def debt_at(self, now_ns: int) -> int:
        return max(0, self.debt - (now_ns - self.at_ns) * self.limit)


class MemoryRateLimit:
    """Token buckets of this process. Full ones are evicted when there are too many."""

    def __init__(
        self,
        *,
        keys_max: int = 100_000,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._buckets: dict[str, _Bucket] = {}
        self._keys_max = keys_max
        self._clock_ns = clock_ns
        self._wall_seconds = wall_seconds

    def __len__(self) -> int:
        return len(self._buckets)

    async def close(self) -> None:
        """Do nothing: buckets in memory hold no resources."""

    async def take(self, key: str, limit_per_minute: int) -> RateVerdict:
        return self.take_now(key, limit_per_minute)

    def take_now(self, key: str, limit_per_minute: int) -> RateVerdict:
        now_ns = self._clock_ns()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._add(key, now_ns)
        debt = bucket.debt - (now_ns - bucket.at_ns) * limit_per_minute
        if debt < 0:
            debt = 0
        allowed = debt + _PARTS <= limit_per_minute * _PARTS
        if allowed:
            debt += _PARTS
        bucket.debt = debt
        bucket.at_ns = now_ns
        bucket.limit = limit_per_minute
        return verdict_of(allowed, limit_per_minute, debt, _PARTS, self._wall_seconds())

    def _add(self, key: str, now_ns: int) -> _Bucket:
        if len(self._buckets) >= self._keys_max:
            self._evict(now_ns)
        bucket = self._buckets[key] = _Bucket(now_ns)
        return bucket

    def _evict(self, now_ns: int) -> None:
        """Evict the full buckets, which does not change any verdict; if that is not enough, the fullest of the others.

        A quarter is evicted at once, so that the cost of the scan is amortized.
        """
        debts = sorted((bucket.debt_at(now_ns), key) for key, bucket in self._buckets.items())
        quarter = max(1, self._keys_max // 4)
        for place, (debt, key) in enumerate(debts):
            if debt and place >= quarter:
                break
            del self._buckets[key]


def verdict_of(allowed: bool, limit: int, debt: int, parts: int, wall_seconds: float) -> RateVerdict:
    """The verdict for a bucket's debt, in parts of a request, of which a minute refills `parts` times the limit."""
    if limit <= 0:
        return RateVerdict(False, 0, 0, int(wall_seconds) + 60, 60)
    parts_per_second = parts // 60 * limit
    remaining = (limit * parts - debt) // parts
    lacking = 0 if allowed else debt + parts - limit * parts
    return RateVerdict(
        allowed,
        limit,
        max(0, remaining),
        int(wall_seconds) + -(-debt // parts_per_second),
        -(-lacking // parts_per_second),
    )
