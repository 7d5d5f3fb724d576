"""A batch that waited for an object decides on its latest version, and on no earlier data."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from bursar.commands.scheduling.bind import Bind
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader import stand
from bursar.store.db.database import Connection
from bursar.store.nodes import node as node_store
from support.runtime.runtime import TEST, allocation, assert_counters_equal_charges, code, delete, gpus, member, node

LOCK = "SELECT uid FROM object WHERE (kind, namespace, name) = ('Allocation', 'default', $1) FOR NO KEY UPDATE"


@pytest.fixture
async def holder(runtime: Runtime, db: Connection) -> AsyncIterator[Connection]:
    """A rival that locks allocation `a`; `b` exists as well, and there is capacity for both."""
    await node(runtime, "n1", gpu=8)
    for name in ("a", "b"):
        assert code(await allocation(runtime, "default", name, gpu=1)) == "ok"
    async with db.transaction():
        await db.fetchval(LOCK, "a")
        yield db


async def until_somebody_waits(runtime: Runtime) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with runtime.database.reader() as db, asyncio.timeout(30):
        while not await db.fetchval(waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def unit(runtime: Runtime, *names: str, fence: int | None = None) -> Bind:
    """To be placed together, as they are now."""
    members = [await member(runtime, "default", name, "n1") for name in names]
    return Bind.unit([one for one in members if not isinstance(one, Refusal)], TEST, fence)


async def placed(runtime: Runtime) -> int:
    async with runtime.database.reader() as db:
        return len(await node_store.load_placements_on(db, ["n1"]))


@pytest.mark.parametrize("fenced", [False, True])
async def test_what_was_created_anew_while_another_was_waited_for_is_not_placed(
    runtime: Runtime, rival: Runtime, holder: Connection, fenced: bool
) -> None:
    leads = await stand(runtime.database, "test", 3600.0)
    assert leads is not None
    command = await unit(runtime, "a", "b", fence=leads.number if fenced else None)
    binding = asyncio.create_task(runtime.binding.submit(command, "test"))
    await until_somebody_waits(rival)
    assert code(await delete(rival, "Allocation", "default", "b")) == "ok"
    assert code(await allocation(rival, "default", "b", gpu=2)) == "ok"
    await holder.execute("COMMIT; BEGIN")
    assert code(await binding) == "not_found"
    assert await placed(rival) == 0
    assert await gpus(rival, "tenant:default") == (3, 0)
    await assert_counters_equal_charges(rival)


async def test_who_creates_what_was_deleted_and_created_anew_meanwhile_is_told_that_it_exists(
    runtime: Runtime, holder: Connection
) -> None:
    creating = asyncio.create_task(allocation(runtime, "default", "a", gpu=1))
    await until_somebody_waits(runtime)
    await holder.execute(
        """CREATE TEMPORARY TABLE kept AS SELECT * FROM object WHERE kind = 'Allocation' AND name = 'a';
           DELETE FROM object WHERE kind = 'Allocation' AND name = 'a';
           INSERT INTO object SELECT * FROM kept;
           COMMIT; BEGIN"""
    )
    assert code(await creating) == "already_exists"
    await assert_counters_equal_charges(runtime)


async def test_of_two_who_waited_to_place_one_allocation_the_second_finds_it_placed(
    runtime: Runtime, rival: Runtime, holder: Connection
) -> None:
    """What the first wrote is in the row that the second waited for."""
    first, second = await unit(runtime, "a"), await unit(rival, "a")
    both = [
        asyncio.create_task(runtime.binding.submit(first, "test")),
        asyncio.create_task(rival.binding.submit(second, "test")),
    ]
    await until_somebody_waits(runtime)
    await holder.execute("COMMIT; BEGIN")
    assert sorted(code(answer) for answer in await asyncio.gather(*both)) == ["ok", "stale"]
    assert await placed(runtime) == 1
    assert await gpus(runtime, "tenant:default") == (2, 1)
    await assert_counters_equal_charges(runtime)
