"""How many requests a tenant, or a node, may make in a minute: a token bucket that holds a minute's worth.

In memory for one process; in Redis where several share the limit. A bucket is kept as its debt, what has been taken and
has not yet flowed back, in whole fractions of a request, so that no rounding ever lets one too many pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

LIMIT_PER_MINUTE_DEFAULT = 1000
ANSWER_SECONDS_MAX = 0.25

_log = structlog.get_logger(__name__)

_NS_PER_SECOND = 1_000_000_000
# In a minute a bucket of limit n gets n requests back, that is n for each nanosecond when a request is this many parts.
_PARTS = 60 * _NS_PER_SECOND


class RateVerdict(msgspec.Struct, frozen=True, gc=False):
    """What the answer's headers say. `reset_epoch_seconds` is when the bucket is full again, if nothing more comes."""

    allowed: bool
    limit: int
    remaining: int
    reset_epoch_seconds: int
    retry_after_seconds: int


class RateLimit(Protocol):
    async def take(self, key: str, limit_per_minute: int) -> RateVerdict: ...


def message(tenant: str, limit: int) -> str:
    return f"Rate limit exceeded. Tenant '{tenant}' limited to {limit} req/min."


class _Bucket:
    __slots__ = ("at_ns", "debt", "limit")

    def __init__(self, at_ns: int) -> None:
        self.debt = 0
        self.at_ns = at_ns
        self.limit = 0

    def debt_at(self, now_ns: int) -> int:
        return max(0, self.debt - (now_ns - self.at_ns) * self.limit)


class MemoryRateLimit:
    """Buckets of this process. Those that are full again are forgotten when there are too many."""

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
        return _verdict(allowed, limit_per_minute, debt, _PARTS, self._wall_seconds())

    def _add(self, key: str, now_ns: int) -> _Bucket:
        if len(self._buckets) >= self._keys_max:
            self._evict(now_ns)
        bucket = self._buckets[key] = _Bucket(now_ns)
        return bucket

    def _evict(self, now_ns: int) -> None:
        """Forget the full buckets, of which nobody can tell; if that is not enough, the fullest of the others.

        A quarter goes at once, so that the cost of looking at all of them is shared by many.
        """
        debts = sorted((bucket.debt_at(now_ns), key) for key, bucket in self._buckets.items())
        quarter = max(1, self._keys_max // 4)
        for place, (debt, key) in enumerate(debts):
            if debt and place >= quarter:
                break
            del self._buckets[key]


def _verdict(allowed: bool, limit: int, debt: int, parts: int, wall_seconds: float) -> RateVerdict:
    """The answer, from a bucket's debt in parts of a request, of which a minute gives `parts` times the limit."""
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


# The same arithmetic, in microseconds, as Lua's numbers are exact up to 2^53; by the server's clock, which all share.
# A bucket that is full again is the same as none, so the key lives just as long as its debt.
_SCRIPT = """
local limit = tonumber(ARGV[1])
local parts = 60000000
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local debt = 0
local kept = redis.call('GET', KEYS[1])
if kept then
  local colon = string.find(kept, ':', 1, true)
  local elapsed = math.min(math.max(0, now - tonumber(string.sub(kept, colon + 1))), 2 * parts)
  debt = math.max(0, tonumber(string.sub(kept, 1, colon - 1)) - elapsed * limit)
end
local allowed = 0
if debt + parts <= limit * parts then
  allowed = 1
  debt = debt + parts
  local milliseconds = math.ceil(debt / limit / 1000) + 1000
  redis.call('SET', KEYS[1], string.format('%.0f:%.0f', debt, now), 'PX', string.format('%.0f', milliseconds))
end
return {allowed, string.format('%.0f', debt), time[1]}
"""
_SCRIPT_PARTS = 60_000_000

_RETRY_NS = _NS_PER_SECOND


class RedisRateLimit:
    """Buckets that several API processes share. While Redis is away each process counts alone, and says so once."""

    def __init__(
        self,
        client: Redis,
        *,
        fallback: MemoryRateLimit | None = None,
        prefix: str = "bursar:rate:",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._client = client
        self._script: Any = client.register_script(_SCRIPT)
        self._fallback = fallback or MemoryRateLimit()
        self._prefix = prefix
        self._clock_ns = clock_ns
        self._away = False
        self._retry_at_ns = 0

    @classmethod
    def open(
        cls, url: str, *, fallback: MemoryRateLimit | None = None, answer_seconds_max: float = ANSWER_SECONDS_MAX
    ) -> RedisRateLimit:
        """Nothing is connected yet: a Redis that is away does not keep a server from starting."""
        # A limiter that is late is worse than one that counts alone: it answers soon, or it is away. No retries.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=16,
            timeout=answer_seconds_max,
            socket_timeout=answer_seconds_max,
            socket_connect_timeout=answer_seconds_max,
            retry=Retry(NoBackoff(), 0),
        )
        return cls(Redis.from_pool(pool), fallback=fallback)

    async def close(self) -> None:
        await self._client.aclose()

    async def take(self, key: str, limit_per_minute: int) -> RateVerdict:
        if limit_per_minute <= 0 or (self._away and not self._may_probe()):
            return self._fallback.take_now(key, limit_per_minute)
        try:
            allowed, debt, seconds = await self._script(keys=[self._prefix + key], args=[limit_per_minute])
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)
            return self._fallback.take_now(key, limit_per_minute)
        self._found()
        return _verdict(bool(allowed), limit_per_minute, int(debt), _SCRIPT_PARTS, float(seconds))

    def _may_probe(self) -> bool:
        """While it is away one request at a time finds out whether it is back; the others do not wait."""
        now_ns = self._clock_ns()
        if now_ns < self._retry_at_ns:
            return False
        self._retry_at_ns = now_ns + _RETRY_NS
        return True

    def _lost(self, error: Exception) -> None:
        self._retry_at_ns = self._clock_ns() + _RETRY_NS
        if not self._away:
            self._away = True
            _log.warning(
                "Redis is away: rate limits hold for each API process alone until it is back", error=repr(error)
            )

    def _found(self) -> None:
        if self._away:
            self._away = False
            _log.info("Redis is back: rate limits are shared again")
