"""The scheduler's loop on a real database, with simulated nodes: from being submitted to having run."""

import asyncio
from collections.abc import Callable
from time import time
from typing import Any

import msgspec
import pytest
import structlog.testing

from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.loops.schedule import Scheduler
from bursar.ops.nodes.drain import Drain, continue_drain, drain
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Office
from bursar.ops.workloads import job as job_ops
from bursar.store.db.database import Connection, connect
from support.runtime.runtime import TEST, change, code, create, delete, end, namespace, node, tenant
from support.scheduling.evictions import assert_books_balance
from support.scheduling.schedulers import (
    GPU,
    HASTY,
    acting,
    changes,
    edit,
    gang,
    history,
    is_in,
    label,
    loaded,
    portrait,
    scheduling,
    settled,
    status,
    submit,
    term,
    until,
    waits_for,
)

RUNNING = is_in("Running")
SUCCEEDED = is_in("Succeeded")


async def node_of(office: Office, name: str, where: str = "default") -> str:
    return str((await status(office, name, where)).get("nodeName"))


# The common walk.


async def test_what_is_submitted_is_bound_runs_and_ends(office: Office) -> None:
    await node(office, "n1", gpu=4)
    async with acting(office), scheduling(office):
        await submit(office, "quick", seconds=0.05)
        await until(office, "quick", SUCCEEDED)
    assert await history(office, "quick") == ["Pending", "Scheduled", "Running", "Succeeded"]
    await assert_books_balance(office)


async def test_what_was_submitted_before_is_bound_as_well(office: Office) -> None:
    await submit(office, "early")
    await node(office, "n1", gpu=4)
    async with scheduling(office) as scheduler:
        await settled(scheduler)
    assert await node_of(office, "early") == "n1"


async def test_room_that_comes_back_is_given_to_the_next(office: Office) -> None:
    await node(office, "n1", gpu=2)
    names = [f"job-{number}" for number in range(12)]
    async with acting(office, default_seconds=0.02), scheduling(office) as scheduler:
        await asyncio.gather(*(submit(office, name) for name in names))
        for name in names:
            await until(office, name, SUCCEEDED)
        await settled(scheduler)
        assert not scheduler.world.placed
    await assert_books_balance(office)


async def test_after_all_that_the_world_is_what_would_be_loaded(office: Office) -> None:
    """Binds of our own, ends, evictions and refusals, with a limit that is counted."""
    await change(office, "Tenant", "", "default", limits={GPU: 6}, enforcement="Queue")
    for name in ("n1", "n2"):
        await node(office, name, gpu=4)
    async with acting(office), scheduling(office, HASTY) as scheduler:
        for number in range(20):
            urgent = {"priority": 100 if number % 5 == 4 else 0}
            await submit(office, f"job-{number}", seconds=0.05, spec=urgent)
            if number % 4 == 3:
                await label(office, "Node", "", "n1", round=str(number))
        for number in range(20):
            await until(office, f"job-{number}", SUCCEEDED)
        await submit(office, "last")
        await until(office, "last", RUNNING)
        await settled(scheduler)
        followed = portrait(scheduler.keeper)
    fresh = portrait(await loaded(office))
    for part in ("nodes", "limits", "used", "bands", "nominated", "waiting", "kin", "noted"):
        assert followed[part] == fresh[part], part
    await assert_books_balance(office)


# Why things wait.


async def reasons(office: Office, name: str) -> list[str]:
    """Every reason that was ever written, as often as it was."""
    told = [msgspec.json.decode(one.status).get("reason", "") for one in await changes(office, name)]
    return [reason for reason in told if reason not in ("", "Unscheduled")]


async def test_a_reason_is_stored_once_with_its_message_and_is_gone_when_it_runs(office: Office) -> None:
    await node(office, "n1", gpu=2)
    async with scheduling(office) as scheduler:
        await submit(office, "first", gpu=2)
        await settled(scheduler)
        await submit(office, "second", gpu=2)
        told = await until(office, "second", waits_for(f"no_capacity_{GPU}"))
        assert told["message"].startswith(f"no node has 2 {GPU} free")
        # Many cycles later, in which its numbers were looked at again, it has been written no second time.
        for number in range(2):
            await label(office, "Node", "", "n1", round=str(number))
            await submit(office, f"other-{number}", gpu=1)
            await until(office, f"other-{number}", lambda now: now.get("reason", "").startswith("no_capacity"))
        assert await reasons(office, "second") == [f"no_capacity_{GPU}"]
        await end(office, "default", "first")
        bound = await until(office, "second", is_in("Scheduled"))
        assert not {"reason", "message"} & set(bound)


async def test_quota_that_waits_is_told_and_goes_on_as_soon_as_something_ends(office: Office) -> None:
    await tenant(office, "lab", limits={GPU: 2}, enforcement="Queue")
    await namespace(office, "lab", "lab")
    await node(office, "n1", gpu=8)
    # It would try again by itself only after ten minutes.
    async with scheduling(office, quota_backoff_seconds=600.0):
        for name in ("one", "two"):
            await submit(office, name, where="lab")
            await until(office, name, is_in("Scheduled"), "lab")
        await submit(office, "three", where="lab")
        told = await until(office, "three", waits_for("quota_exceeded"), "lab")
        assert told["message"] == f"waiting for quota headroom: tenant lab has 2 of 2 {GPU} bound, 1 asked"
        await end(office, "lab", "one")
        await until(office, "three", is_in("Scheduled"), "lab")
        await submit(office, "four", where="lab")
        await until(office, "four", waits_for("quota_exceeded"), "lab")
        await change(office, "Tenant", "", "lab", limits={GPU: 3})
        await until(office, "four", is_in("Scheduled"), "lab")
    await assert_books_balance(office)


async def test_limits_are_known_to_a_leader_that_comes_to_running_work(office: Office) -> None:
    """What runs is counted once, although it is both in the counters and in the world."""
    await change(office, "Tenant", "", "default", limits={GPU: 4}, enforcement="Queue")
    await node(office, "n1", gpu=8)
    async with scheduling(office) as first:
        await submit(office, "one", gpu=2)
        await settled(first)
    async with scheduling(office, fence=await term(office, "second", depose=True)) as second:
        await submit(office, "two", gpu=2)
        await settled(second)
        await submit(office, "three")
        await until(office, "three", waits_for("quota_exceeded"))


async def test_nodes_that_do_not_match_are_told_and_a_label_lets_it_run(office: Office) -> None:
    await node(office, "n1", gpu=4)
    await submit(office, "picky", spec={"nodeSelector": {"disk": "fast"}})
    async with scheduling(office):
        await until(office, "picky", waits_for("no_matching_nodes"))
        await label(office, "Node", "", "n1", disk="fast")
        await until(office, "picky", is_in("Scheduled"))


async def test_without_nodes_it_waits_for_one(office: Office) -> None:
    async with scheduling(office):
        await submit(office, "early")
        await until(office, "early", waits_for("no_nodes_active"))
        await node(office, "n1", gpu=1)
        await until(office, "early", is_in("Scheduled"))


@pytest.mark.parametrize("how", ["cordon", "not ready", "taint"])
async def test_a_node_that_takes_nothing_gets_nothing_until_it_does_again(office: Office, how: str) -> None:
    await node(office, "n1", gpu=4)
    taint = {"key": "broken", "effect": "NoSchedule"}

    def set_to(document: dict[str, Any], well: bool) -> None:
        if how == "not ready":
            document.setdefault("status", {})["phase"] = "Ready" if well else "NotReady"
        else:
            document["spec"] |= {"taints": [] if well else [taint]} if how == "taint" else {"unschedulable": not well}

    async def describe(well: bool) -> None:
        reply = await edit(office, "Node", "", "n1", lambda one: set_to(one, well), status=how == "not ready")
        assert code(reply) == "ok"

    async with scheduling(office):
        await describe(well=False)
        await submit(office, "one")
        await until(office, "one", lambda now: now.get("reason") in ("no_nodes_active", "no_matching_nodes"))
        await describe(well=True)
        await until(office, "one", is_in("Scheduled"))


# Gangs.


async def test_a_gang_waits_for_its_members_and_is_bound_as_one(office: Office) -> None:
    for name in ("n1", "n2"):
        await node(office, name, gpu=2)
    async with acting(office), scheduling(office):
        for name in ("a", "b"):
            await submit(office, name, spec=gang("g", 3))
        told = await until(office, "b", waits_for("gang_incomplete"))
        assert told["message"] == "waiting for gang members: 2 of 3 are there"
        await submit(office, "c", spec=gang("g", 3))
        for name in ("a", "b", "c"):
            await until(office, name, RUNNING)
    bound = [
        one.revision
        for name in ("a", "b", "c")
        for one in await changes(office, name)
        if msgspec.json.decode(one.status)["phase"] == "Scheduled"
    ]
    assert sorted(bound) == list(range(min(bound), min(bound) + 3)), "nothing came between them"
    await assert_books_balance(office)


async def test_a_gang_that_is_not_complete_in_time_fails(office: Office) -> None:
    await node(office, "n1", gpu=4)
    async with scheduling(office):
        for name in ("a", "b"):
            await submit(office, name, spec=gang("g", 3, "1s"))
        for name in ("a", "b"):
            told = await until(office, name, is_in("Failed"))
            assert (told["reason"], told["message"]) == ("GangTimeout", "waiting for gang members: 2 of 3 are there")
    await assert_books_balance(office)


async def test_members_that_come_back_while_others_run_come_one_by_one(office: Office) -> None:
    await node(office, "n1", gpu=4)
    async with scheduling(office) as scheduler:
        for name in ("a", "b", "c"):
            await submit(office, name, spec=gang("g", 3))
        await settled(scheduler)
        for name in ("a", "b"):
            await end(office, "default", name, Phase.PENDING)
        await settled(scheduler)
        assert {(await status(office, name))["phase"] for name in ("a", "b", "c")} == {"Scheduled"}
    await assert_books_balance(office)


async def test_what_is_left_of_a_gang_runs_again(office: Office) -> None:
    """One member has succeeded; a leader that never saw it knows all the same that the gang was complete once, and
    that no time can run out any more."""
    await node(office, "n1", gpu=4)
    async with scheduling(office) as scheduler:
        for name in ("a", "b", "c"):
            await submit(office, name, spec=gang("g", 3, "10m"))
        await settled(scheduler)
    await end(office, "default", "c")
    for name in ("a", "b"):
        await end(office, "default", name, Phase.PENDING)
    async with scheduling(office, clock=lambda: time() + 3600) as scheduler:
        await settled(scheduler)
    assert {(await status(office, name))["phase"] for name in ("a", "b")} == {"Scheduled"}
    await assert_books_balance(office)


# Making room.


async def test_a_victim_is_stopped_the_urgent_runs_in_its_place_and_the_victim_runs_later(office: Office) -> None:
    await node(office, "n1", gpu=2)
    async with acting(office, stop_seconds=0.1), scheduling(office, HASTY, grace_seconds=5.0):
        await submit(office, "low", gpu=2)
        await until(office, "low", RUNNING)
        await submit(office, "urgent", gpu=2, spec={"priority": 1000}, seconds=1.5)
        stopping = await until(office, "low", is_in("Terminating"))
        await until(office, "urgent", RUNNING)
        waits = await until(office, "low", waits_for("Preempted"))
        await until(office, "urgent", SUCCEEDED)
        await until(office, "low", RUNNING)
    notice = stopping["eviction"]
    assert (notice["reason"], notice["rule"], notice["by"]) == ("Preempted", "LowerPriority", "default/urgent")
    assert waits["phase"] == "Pending"
    phases = ["Pending", "Scheduled", "Running", "Terminating", "Pending", "Scheduled", "Running"]
    assert await history(office, "low") == phases
    nominated = [msgspec.json.decode(one.status).get("nominated") for one in await changes(office, "urgent")]
    assert [one["node"] for told in nominated for one in told or ()][:1] == ["n1"]
    await assert_books_balance(office)


async def test_the_nominee_gets_the_room_that_was_made_for_it(office: Office) -> None:
    """Others that would fit into what the first victims leave do not get it."""
    await node(office, "n1", gpu=4)
    async with acting(office) as nodes, scheduling(office, HASTY, grace_seconds=600.0):
        for name in ("a", "b"):
            await submit(office, name, gpu=2)
            await until(office, name, RUNNING)
        assert nodes.running == 2
    # Nobody acts for the node now: the victims go when the test says so.
    async with scheduling(office, HASTY, grace_seconds=600.0):
        await submit(office, "urgent", gpu=4, spec={"priority": 1000})
        for name in ("a", "b"):
            await until(office, name, is_in("Terminating"))
        told = await until(office, "urgent", lambda now: bool(now.get("nominated")))
        assert [one["node"] for one in told["nominated"]] == ["n1"]
        await until(office, "urgent", waits_for("waiting_for_preemption"))
        await end(office, "default", "a", Phase.CANCELLED)
        await submit(office, "small")
        await until(office, "small", lambda now: now.get("reason", "Unscheduled") != "Unscheduled")
        await end(office, "default", "b", Phase.CANCELLED)
        await until(office, "urgent", is_in("Scheduled"))
        assert await node_of(office, "urgent") == "n1"
        for name in ("a", "b", "small"):
            assert (await status(office, name))["phase"] == "Pending"
    await assert_books_balance(office)


async def test_an_evicted_gang_comes_back_whole(office: Office) -> None:
    """One member is gone while the other still stops: it does not run alone where there is room for one."""
    for name, gpus in (("n1", 2), ("n2", 1)):
        await node(office, name, gpu=gpus)
    await submit(office, "fixed", spec={"nodeSelector": {"kubernetes.io/hostname": "n2"}})
    async with scheduling(office, HASTY, grace_seconds=600.0) as scheduler:
        await settled(scheduler)
        for name in ("a", "b"):
            await submit(office, name, spec=gang("g", 2))
        await settled(scheduler)
        await submit(office, "urgent", gpu=2, spec={"priority": 1000})
        for name in ("a", "b"):
            await until(office, name, is_in("Terminating"))
        await end(office, "default", "fixed")
        await end(office, "default", "a", Phase.CANCELLED)
        await submit(office, "after", spec={"nodeSelector": {"kubernetes.io/hostname": "n2"}})
        await until(office, "after", is_in("Scheduled"))
        assert (await status(office, "a"))["phase"] == "Pending"
        await end(office, "default", "b", Phase.CANCELLED)
        await until(office, "urgent", is_in("Scheduled"))
        await end(office, "default", "urgent")
        for name in ("a", "b"):
            await until(office, name, is_in("Scheduled"))
    await assert_books_balance(office)


async def test_a_drain_moves_work_elsewhere(office: Office) -> None:
    await node(office, "n1", gpu=4)
    async with acting(office, stop_seconds=0.05), scheduling(office) as scheduler:
        for name in ("a", "b"):
            await submit(office, name)
            await until(office, name, RUNNING)
        await node(office, "n2", gpu=4)
        assert code(await drain(office, Drain(key=Key("Node", "", "n1"), origin=TEST))) == "ok"
        for name in ("a", "b"):
            await until(office, name, lambda now: now["phase"] == "Running" and now["nodeName"] == "n2")
        await continue_drain(office, "n1")
        await settled(scheduler)
        waits, now = scheduler.waits, time()
        assert (waits.overall(now).count, round(waits.per_second(now) * 60)) == (2, 4), "they ran for part of the time"
    found = await object_ops.get(office, Key("Node", "", "n1"))
    assert isinstance(found, Stored)
    assert msgspec.json.decode(found.status)["drain"]["state"] == "Drained"
    await assert_books_balance(office)


async def test_a_boosted_job_goes_first(office: Office) -> None:
    await node(office, "n1", gpu=1)
    async with scheduling(office) as scheduler:
        await submit(office, "running")
        await settled(scheduler)
        template = {"spec": {"resources": {"requests": {GPU: "1"}}}}
        for name in ("first", "second"):
            body = {"metadata": {"name": name, "namespace": "default"}, "spec": {"template": template}}
            assert code(await create(office, "Job", body)) == "ok"
            await until(office, f"{name}-0", waits_for(f"no_capacity_{GPU}"))
        job = await object_ops.get(office, Key("Job", "default", "second"))
        assert isinstance(job, Stored)
        boosted = job_ops.boost(office, job, TEST, priority=1_000_000, seconds=600, reason="", approved_by="me")
        assert code(await boosted) == "ok"
        await end(office, "default", "running")
        await until(office, "second-0", is_in("Scheduled"))
        assert (await status(office, "first-0"))["phase"] == "Pending"


# Plans that the world overtakes.


@pytest.fixture
async def gate(office: Office, database_url: str) -> "Gate":
    return Gate(office, await connect(database_url))


class Gate:
    """Holds up what is to be written of one object, until something else has happened."""

    def __init__(self, office: Office, db: Connection) -> None:
        self.office = office
        self.db = db

    async def __aenter__(self) -> "Gate":
        await self.db.execute("SET idle_in_transaction_session_timeout = 0")
        self.transaction = self.db.transaction()
        await self.transaction.start()
        await self.db.execute("SELECT 1 FROM leader FOR UPDATE")  # every bind waits to see its fence
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transaction.rollback()
        await self.db.close()

    async def someone_waits(self) -> None:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        async with self.office.database.reader() as db, asyncio.timeout(30):
            while not await db.fetchval(waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_node_that_changed_between_plan_and_commit_is_planned_for_anew(office: Office, gate: Gate) -> None:
    for name in ("n1", "n2"):
        await node(office, name, gpu=1)
        await label(office, "Node", "", name, disk="fast")
    with structlog.testing.capture_logs() as logs:
        async with scheduling(office) as scheduler:
            async with gate:
                await submit(office, "picky", spec={"nodeSelector": {"disk": "fast"}})
                await gate.someone_waits()
                (placed,) = scheduler.world.placed.values()
                planned = scheduler.world.fleet.names[placed.spots[0].row]
                await label(office, "Node", "", planned, disk="slow")
            await until(office, "picky", is_in("Scheduled"))
            await settled(scheduler)
    assert {await node_of(office, "picky"), planned} == {"n1", "n2"}
    came_back = [one for one in logs if one["event"] == "a placement came back"]
    assert [(one["code"], one["message"]) for one in came_back] == [
        ("stale", f"node {planned} has changed since the plan was made")
    ]
    await assert_books_balance(office)


async def test_what_was_deleted_between_plan_and_commit_is_forgotten(office: Office, gate: Gate) -> None:
    await node(office, "n1", gpu=1)
    async with scheduling(office) as scheduler:
        async with gate:
            await submit(office, "one")
            await gate.someone_waits()
            await delete(office, "Allocation", "default", "one")
            await submit(office, "next")
        await until(office, "next", is_in("Scheduled"))
        await settled(scheduler)
        assert len(scheduler.world.placed) == 1
    await assert_books_balance(office)


async def test_what_was_planned_for_a_node_that_is_gone_waits_again(office: Office, gate: Gate) -> None:
    await node(office, "n1", gpu=2)
    async with scheduling(office) as scheduler:
        async with gate:
            for name in ("a", "b"):
                await submit(office, name, spec=gang("g", 2))
            await gate.someone_waits()
            assert code(await delete(office, "Node", "", "n1")) == "ok"
            await seen(scheduler, lambda: not scheduler.world.fleet.row_of)
        await until(office, "a", waits_for("no_nodes_active"))
        await node(office, "n2", gpu=2)
        for name in ("a", "b"):
            await until(office, name, is_in("Scheduled"))
        await settled(scheduler)
    await assert_books_balance(office)


async def seen(scheduler: Scheduler, holds: Callable[[], bool]) -> None:
    """Until the scheduler has followed the feed so far."""
    async with asyncio.timeout(30):
        while not holds():
            scheduler.nudge()
            await asyncio.sleep(0.005)


async def test_a_scheduler_that_lost_its_place_begins_anew(office: Office, database_url: str) -> None:
    await node(office, "n1", gpu=4)
    db = await connect(database_url)
    with structlog.testing.capture_logs() as logs:
        async with scheduling(office) as scheduler:
            await submit(office, "one")
            await settled(scheduler)
            keeper, scheduler.keeper.revision = scheduler.keeper, scheduler.keeper.revision - 2
            await db.execute("DELETE FROM change WHERE revision = $1", keeper.revision + 1)
            await submit(office, "two")
            await until(office, "two", is_in("Scheduled"))
            assert scheduler.keeper is not keeper
    await db.close()
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == ["the scheduler loads its world anew"]
    await assert_books_balance(office)
