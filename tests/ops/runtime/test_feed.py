"""The feed alone: nobody waits for a reader that is gone, and nobody's queue grows without end."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from bursar.core.objects.object import Key
from bursar.core.values.replace import replace
from bursar.ops.runtime import feed as feed_module
from bursar.ops.runtime.feed import READ_BYTES_MAX, FedChange, Feed, FeedLagging, Follower, next_limit
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects import change as change_store
from bursar.store.objects.change import Change
from support.runtime.runtime import tenant

MIB = 1 << 20


def a_change(revision: int, size: int = 2, **but: Any) -> Change:
    one = Change(revision, Key("Allocation", "team", "job"), "uid", "team", "MODIFIED", b"{}", b"{}", b"{}", b"{}",
                 "team", b"x" * size, b"{}", datetime.now(UTC))  # fmt: skip
    return replace(one, **but)


@pytest.fixture
async def feed(runtime: Runtime) -> AsyncIterator[Feed]:
    one = Feed(runtime.database)
    runtime.on_commit.append(one.nudge)
    yield one
    await one.close()


async def heard(follower: Follower) -> list[str]:
    async with asyncio.timeout(10):
        while not (fed := await follower.wait(1)):
            pass
    return [one.change.key.name for one in fed]


async def test_when_the_feed_fails_its_followers_are_let_go_and_the_next_one_is_served(
    runtime: Runtime, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = await feed.follow("Tenant")
    load_since = change_store.load_since

    async def broken(*_: Any) -> list[Change]:
        raise ValueError("a row that nobody can read")

    monkeypatch.setattr(change_store, "load_since", broken)
    await tenant(runtime, "first")
    with pytest.raises(FeedLagging):
        await heard(follower)
    monkeypatch.setattr(change_store, "load_since", load_since)
    feed.leave(follower)
    follower = await feed.follow("Tenant")
    await tenant(runtime, "second")
    assert await heard(follower) == ["second"]
    feed.leave(follower)


async def test_followers_are_let_go_when_what_they_wait_for_was_dropped_unread(runtime: Runtime, feed: Feed) -> None:
    follower = await feed.follow("Tenant")
    async with runtime.database.reader() as db:
        await db.execute("UPDATE revision SET value = value + 10")
    await tenant(runtime, "beyond")
    with pytest.raises(FeedLagging):
        await heard(follower)
    feed.leave(follower)


async def test_a_follower_is_cancelled_also_at_the_moment_when_something_comes() -> None:
    follower = Follower("Allocation", "", 0)
    waiting = asyncio.create_task(follower.wait(60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    follower.offer(FedChange(a_change(1)))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_queue_is_bounded_in_bytes() -> None:
    follower = Follower("Allocation", "", 0)
    fitting = feed_module.QUEUE_BYTES_MAX // MIB
    for revision in range(fitting):
        follower.offer(FedChange(a_change(revision + 1, MIB - 2)))
    assert len(await follower.wait(0)) == fitting
    for revision in range(fitting):
        follower.offer(FedChange(a_change(fitting + revision + 1, MIB)))
    # As many, each a little bigger, do not fit.
    with pytest.raises(FeedLagging):
        await follower.wait(0)


@pytest.mark.parametrize(
    ("limit", "sizes", "expected"),
    [
        (64, [100] * 64, 128),
        (64, [100] * 63, 64),
        (800, [100] * 800, 1000),
        (64, [MIB] * 5, 32),
        (1, [READ_BYTES_MAX * 2], 1),
        (4, [MIB] * 3, 4),
        (2, [MIB // 2] * 2, 4),
    ],
    ids=["full and light", "not full", "at most", "too heavy", "at least one", "heavy enough", "light again"],
)
def test_fewer_changes_are_read_at_once_when_they_are_big(limit: int, sizes: list[int], expected: int) -> None:
    assert next_limit(limit, [a_change(at, size) for at, size in enumerate(sizes)], 1000) == expected


async def test_what_is_big_is_read_in_pieces(runtime: Runtime, feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "READ_BYTES_MAX", 1500)
    monkeypatch.setattr(feed_module, "QUEUE_BYTES_MAX", 1 << 30)
    load_since, limits = change_store.load_since, []

    async def counted(db: Any, revision: int, limit: int) -> list[Change]:
        limits.append(limit)
        return await load_since(db, revision, limit)

    monkeypatch.setattr(change_store, "load_since", counted)
    follower = await feed.follow("Tenant")
    names = [f"tenant-{index:02}" for index in range(40)]
    seen: list[str] = []
    for name in names:
        await tenant(runtime, name, limits={f"example.com/thing-{index}": "1" for index in range(60)})
    while len(seen) < len(names):
        seen += await heard(follower)
    assert seen == names
    assert min(limits) < 8 < max(limits)
    feed.leave(follower)


def test_all_nodes_of_an_allocation_are_known() -> None:
    bound = b'{"spec.nodeName":"one"}'
    status = b'{"nodes":[{"name":"one","devices":{}},{"name":"two"}],"phase":"Running"}'
    fed = FedChange(a_change(1, fields=bound, before_fields=b"{}", status=status))
    assert (fed.nodes, fed.before_nodes) == (frozenset({"one", "two"}), frozenset())
    ended = FedChange(a_change(1, fields=b"{}", before_fields=bound, status=status))
    assert (ended.nodes, ended.before_nodes) == (frozenset(), frozenset({"one", "two"}))
    other = FedChange(a_change(1, fields=bound, before_fields=None, status=b'{"nodes":7}'))
    assert (other.nodes, other.before_nodes) == (frozenset({"one"}), frozenset())
