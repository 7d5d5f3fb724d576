"""Rate limits in Redis: token buckets that several API processes share.

Imported only if a Redis is configured: its client takes longer to import than most of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from bursar.api.http.ratelimit import NS_PER_SECOND, MemoryRateLimit, RateVerdict, verdict_of

ANSWER_SECONDS_MAX = 0.25

_log = structlog.get_logger(__name__)

# The same arithmetic in microseconds, because Lua's numbers are exact up to 2^53, and by the clock of Redis, which all
# share. A full bucket equals none, so a key lives as long as its debt.
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

_RETRY_NS = NS_PER_SECOND


class RedisRateLimit:
    """Token buckets that several API processes share. While Redis is away, each process counts alone, and logs that
    once."""

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
        """Create the client without connecting, so that a Redis outage does not block the start of the server."""
        # Time limits are short and there are no retries: a slow limiter is worse than one that counts alone.
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
        return verdict_of(bool(allowed), limit_per_minute, int(debt), _SCRIPT_PARTS, float(seconds))

    def _may_probe(self) -> bool:
        """Allow one request at a time to probe a Redis that is away; the others do not wait."""
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
                "redis_lost",
                message="Redis is away: each API process enforces rate limits by itself until it is back",
                error=repr(error),
            )

    def _found(self) -> None:
        if self._away:
            self._away = False
            _log.info("redis_returned", message="Redis is back: rate limits are shared again")
