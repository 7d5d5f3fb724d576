"""The loop that watches over nodes: when it believes itself, and how it goes on for ever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta

import pytest

from bursar.core.nodes.liveness import LivenessVerdict
from bursar.loops.node_liveness import GAP_SECONDS_MAX, LivenessWatch, look_after, run_nodes
from bursar.ops.runtime.runtime import Runtime
from support.api.site import eventually
from support.nodes.liveness import LONG_AGO, hear, node_status, patience, regrant, silence, watch
from support.nodes.local_nodes import LocalNodes
from support.runtime.runtime import node, opened
from support.scheduling.evictions import running, status

SHORT = {"heartbeatSeconds": 1, "notReadySeconds": 2, "lostSeconds": 3, "killGraceSeconds": 0, "clockSkewSeconds": 0}


def begin(watch: LivenessWatch, at: float, jumped: float = 0.0) -> None:
    """A look at this second, of a database whose clock has jumped by so much."""
    watch.begin(LONG_AGO + timedelta(seconds=at + jumped), at)


def test_watching_begins_with_the_first_look_and_anew_after_every_absence() -> None:
    one = LivenessWatch()
    begin(one, 100)
    assert (one.watched_seconds(), one.calm_seconds()) == (0, 0)
    begin(one, 105)
    assert (one.watched_seconds(), one.calm_seconds()) == (5, 5)
    one.lose()
    begin(one, 106)
    assert one.watched_seconds() == 0, "the database was away"
    begin(one, 107)
    begin(one, 107 + GAP_SECONDS_MAX + 1)
    assert one.watched_seconds() == 0, "we were"


@pytest.mark.parametrize("jump", [3600, 3, -3, -3600])
def test_when_the_databases_clock_jumps_watching_begins_anew(jump: float) -> None:
    one = LivenessWatch()
    begin(one, 100)
    begin(one, 105)
    begin(one, 106, jump)
    assert (one.watched_seconds(), one.calm_seconds()) == (0, 0)
    begin(one, 108, jump + 1)
    assert one.watched_seconds() == 2, "by our own clock; theirs may be a little faster"


def test_an_alarm_ends_the_calm_and_not_the_watching() -> None:
    one = LivenessWatch()
    for second in range(5):
        begin(one, second)
    one.hear(LivenessVerdict(alarm=True, silent=4, heartbeating=9))
    begin(one, 5)
    one.hear(LivenessVerdict())
    assert (one.watched_seconds(), one.calm_seconds()) == (5, 1)


@pytest.fixture
async def looping(runtime: Runtime, database_url: str) -> AsyncIterator[None]:
    """Two controllers at once, each with a runtime of its own."""
    async with opened(database_url) as other:
        tasks = [asyncio.create_task(run_nodes(one)) for one in (runtime, other)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def phase_of(runtime: Runtime, name: str) -> str:
    return str((await node_status(runtime, name))["phase"])


@pytest.mark.usefixtures("looping")
async def test_a_node_falls_silent_is_lost_and_comes_back(runtime: Runtime) -> None:
    await patience(runtime, **SHORT)
    await node(runtime, "n1", gpu=4)
    await node(runtime, "never", gpu=4)
    await running(runtime, "a", "n1", spec={"onNodeLost": "requeue"})
    await hear(runtime, "n1")

    async def is_(phase: str) -> bool:
        return await phase_of(runtime, "n1") == phase

    await eventually(lambda: is_("NotReady"))
    await regrant(runtime, "n1", granted=-1000)
    await eventually(lambda: is_("Lost"))
    assert (await status(runtime, "a"))["phase"] == "Running", "its lease still runs"
    await regrant(runtime, "n1", granted=1)
    await hear(runtime, "n1")
    await eventually(lambda: is_("Ready"))
    assert (await status(runtime, "a"))["phase"] == "Running", "it was heard before it was given up"
    await regrant(runtime, "n1", granted=1)

    async def waits_again() -> bool:
        return bool((await status(runtime, "a"))["phase"] == "Pending")

    await eventually(waits_again)
    assert await phase_of(runtime, "never") == "Ready"


@pytest.mark.usefixtures("looping")
async def test_the_loop_goes_on_when_its_connections_are_cut(runtime: Runtime) -> None:
    await patience(runtime, **SHORT)
    await node(runtime, "n1", gpu=4)
    async with runtime.database.reader() as db:
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
    await hear(runtime, "n1")

    async def is_lost() -> bool:
        return await phase_of(runtime, "n1") == "Lost"

    await eventually(is_lost)


async def test_after_a_jump_of_the_clock_leased_work_is_left_for_as_long_as_it_may_live(runtime: Runtime) -> None:
    """By the database's clock its lease is over for long; we have listened since the jump, and not for so long."""
    await node(runtime, "n1", gpu=4)
    await running(runtime, "a", "n1", spec={"onNodeLost": "requeue"})
    await silence(runtime, "n1", seconds=3600, granted=3450)
    since = asyncio.get_running_loop().time() - 100
    mine = LivenessWatch(since=since, calm_since=since)
    await look_after(runtime, mine)
    assert await phase_of(runtime, "n1") == "Lost"
    assert (await status(runtime, "a"))["phase"] == "Running"
    mine.since, mine.due = since - 55, {}
    await look_after(runtime, mine)
    assert (await status(runtime, "a"))["phase"] == "Pending"


async def test_simulated_nodes_send_heartbeats_and_stay_ready(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    simulated = asyncio.create_task(LocalNodes(runtime).run())
    try:

        async def is_heard() -> bool:
            async with runtime.database.reader() as db:
                return bool(await db.fetchval("SELECT count(*) FROM node_seen"))

        await eventually(is_heard)
        before = watch()
        assert (await look_after(runtime, before)).transitions == ()
    finally:
        simulated.cancel()
        with suppress(asyncio.CancelledError):
            await simulated
    await silence(runtime, "n1", seconds=20)
    assert [name for name, _ in (await look_after(runtime, before)).transitions] == ["n1"]
