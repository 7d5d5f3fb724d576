"""The feed in the database: gapless, in commit order, in partitions that come and go."""

import asyncio

from bursar.commands.command import Reply, Written
from bursar.core.objects.allocation import Phase
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Connection, connect
from bursar.store.objects import change as change_store
from bursar.store.objects.change import (
    PARTITION_SIZE,
    drop_before,
    ensure_partitions,
    load_position,
    load_since,
    raise_floor,
)
from support.runtime.runtime import allocation, code, counters, delete, end, namespace, opened, tenant


def revision(reply: Reply) -> int:
    assert isinstance(reply, Written), reply
    return reply.revision


async def partitions(db: Connection) -> list[str]:
    return sorted(row["name"] for row in await db.fetch(change_store.SQL.partitions))


async def test_revisions_are_gapless_and_in_commit_order_under_writers_from_two_processes(
    runtime: Runtime, database_url: str, db: Connection
) -> None:
    """A reader that always asks for what is above the last revision it saw misses nothing and sees no number twice."""
    seen: list[int] = []
    written = asyncio.Event()

    async def follow() -> None:
        last = start
        while True:
            finished = written.is_set()
            found = await load_since(db, last, 1000)
            if not found and finished:
                return
            assert [one.revision for one in found] == list(range(last + 1, last + 1 + len(found)))
            seen.extend(one.revision for one in found)
            last += len(found)
            await asyncio.sleep(0)

    async def work(one: Runtime, name: str) -> list[int]:
        revisions = []
        for number in range(8):
            revisions.append(revision(await allocation(one, "default", f"{name}-{number}", gpu=1)))
            if number % 3 == 0:
                revisions.append(revision(await end(one, "default", f"{name}-{number}", Phase.FAILED)))
            if number % 3 == 1:
                revisions.append(revision(await delete(one, "Allocation", "default", f"{name}-{number}")))
            if number % 4 == 0:
                revisions.append(revision(await tenant(one, f"{name}-{number}")))
        return revisions

    async with opened(database_url) as other:
        start = (await load_position(db)).revision
        following = asyncio.create_task(follow())
        told = await asyncio.gather(*(work(one, f"w{index}") for index, one in enumerate((runtime, other) * 6)))
        written.set()
        await following
    answered = sorted(number for revisions in told for number in revisions)
    assert answered == seen == list(range(start + 1, start + 1 + len(seen)))
    assert all(revisions == sorted(revisions) for revisions in told)
    assert (await load_position(db)).revision == seen[-1]


async def test_a_refused_command_takes_no_number(runtime: Runtime, db: Connection) -> None:
    await allocation(runtime, "default", "one")
    before = await load_position(db)
    assert code(await allocation(runtime, "default", "one")) == "already_exists"
    assert code(await namespace(runtime, "x", "nobody")) == "invalid"
    assert await load_position(db) == before


async def test_a_new_database_has_partitions_for_this_million_and_the_next(runtime: Runtime, db: Connection) -> None:
    assert await partitions(db) == ["change_000000000", "change_000000001"]


async def test_the_boundary_between_partitions_is_no_gap(runtime: Runtime, db: Connection) -> None:
    await db.execute("UPDATE revision SET value = $1", PARTITION_SIZE - 3)
    answers = await asyncio.gather(*(allocation(runtime, "default", f"a-{number}") for number in range(6)))
    assert sorted(map(revision, answers)) == list(range(PARTITION_SIZE - 2, PARTITION_SIZE + 4))
    found = await load_since(db, PARTITION_SIZE - 3, 100)
    assert [one.revision for one in found] == list(range(PARTITION_SIZE - 2, PARTITION_SIZE + 4))


async def test_a_missing_partition_is_made_when_the_first_change_needs_it(runtime: Runtime, db: Connection) -> None:
    far = 7 * PARTITION_SIZE + 5
    await db.execute("UPDATE revision SET value = $1", far)
    answers = await asyncio.gather(*(allocation(runtime, "default", f"a-{number}", gpu=1) for number in range(5)))
    assert sorted(map(revision, answers)) == list(range(far + 1, far + 6))
    assert await partitions(db) == [f"change_{index:09d}" for index in (0, 1, 7, 8)]
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].accepted == 5000


async def test_two_processes_that_miss_the_same_partition_both_go_on(
    runtime: Runtime, database_url: str, db: Connection
) -> None:
    async with opened(database_url) as other:
        for index in (3, 9, 15):
            await db.execute("UPDATE revision SET value = $1", index * PARTITION_SIZE)
            answers = await asyncio.gather(
                *(allocation(one, "default", f"{name}-{index}") for name, one in (("a", runtime), ("b", other))),
                *(tenant(one, f"{name}-{index}") for name, one in (("a", runtime), ("b", other))),
            )
            assert sorted(map(revision, answers)) == [index * PARTITION_SIZE + offset for offset in range(1, 5)]


async def test_making_partitions_twice_or_at_once_is_harmless(database_url: str, db: Connection) -> None:
    other = await connect(database_url)
    await db.execute("UPDATE revision SET value = $1", 4 * PARTITION_SIZE)
    await asyncio.gather(ensure_partitions(db), ensure_partitions(other))
    await ensure_partitions(db)
    await other.close()
    assert (await partitions(db))[-2:] == ["change_000000004", "change_000000005"]


async def test_the_floor_only_rises(db: Connection) -> None:
    await raise_floor(db, 10)
    await raise_floor(db, 7)
    assert (await load_position(db)).floor == 10


async def test_only_partitions_that_lie_wholly_below_are_dropped(runtime: Runtime, db: Connection) -> None:
    await allocation(runtime, "default", "old")
    await db.execute("UPDATE revision SET value = $1", PARTITION_SIZE)
    await allocation(runtime, "default", "new")
    assert await drop_before(db, PARTITION_SIZE - 1) == []
    assert (await load_position(db)).floor == 0
    assert await drop_before(db, PARTITION_SIZE + 1) == ["change_000000000"]
    assert (await load_position(db)).floor == PARTITION_SIZE
    assert [one.key.name for one in await load_since(db, 0, 100)] == ["new"]


async def test_a_process_whose_feed_was_dropped_reads_the_tree_anew(
    runtime: Runtime, database_url: str, db: Connection
) -> None:
    """What happened to the tree meanwhile can no longer be read from the feed; it is read from the objects."""
    async with opened(database_url) as other:
        assert code(await tenant(other, "lab", limits={"nvidia.com/gpu": 1})) == "ok"
        assert code(await namespace(other, "lab", "lab")) == "ok"
        await db.execute("UPDATE revision SET value = $1", PARTITION_SIZE)
        await drop_before(db, PARTITION_SIZE)
        assert code(await allocation(runtime, "lab", "one", gpu=1)) == "ok"
        assert code(await allocation(runtime, "lab", "two", gpu=1)) == "quota_exceeded"
