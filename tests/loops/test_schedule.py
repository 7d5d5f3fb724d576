"""The scheduler's loop on a real database, with simulated nodes: from being submitted to having run."""

import asyncio
from collections.abc import Callable
from time import time
from typing import Any

import msgspec
import pytest
import structlog.testing

from bursar.commands.nodes.drain import Drain
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.loops.schedule import Scheduler
from bursar.ops.nodes.drain import continue_drain, drain
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
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


async def node_of(runtime: Runtime, name: str, where: str = "default") -> str:
    return str((await status(runtime, name, where)).get("nodeName"))


# The common path.


async def test_what_is_submitted_is_bound_runs_and_ends(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    async with acting(runtime), scheduling(runtime):
        await submit(runtime, "quick", seconds=0.05)
        await until(runtime, "quick", SUCCEEDED)
    assert await history(runtime, "quick") == ["Pending", "Scheduled", "Running", "Succeeded"]
    await assert_books_balance(runtime)


async def test_what_was_submitted_before_is_bound_as_well(runtime: Runtime) -> None:
    await submit(runtime, "early")
    await node(runtime, "n1", gpu=4)
    async with scheduling(runtime) as scheduler:
        await settled(scheduler)
    assert await node_of(runtime, "early") == "n1"


async def test_capacity_that_comes_back_is_given_to_the_next(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    names = [f"job-{number}" for number in range(12)]
    async with acting(runtime, default_seconds=0.02), scheduling(runtime) as scheduler:
        await asyncio.gather(*(submit(runtime, name) for name in names))
        for name in names:
            await until(runtime, name, SUCCEEDED)
        await settled(scheduler)
        assert not scheduler.cluster.placed
    await assert_books_balance(runtime)


async def test_after_all_that_the_cluster_state_is_what_would_be_loaded(runtime: Runtime) -> None:
    """Binds of our own, ends, evictions and refusals, with a limit that is counted."""
    await change(runtime, "Tenant", "", "default", limits={GPU: 6}, enforcement="Queue")
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=4)
    async with acting(runtime), scheduling(runtime, HASTY) as scheduler:
        for number in range(20):
            urgent = {"priority": 100 if number % 5 == 4 else 0}
            await submit(runtime, f"job-{number}", seconds=0.05, spec=urgent)
            if number % 4 == 3:
                await label(runtime, "Node", "", "n1", round=str(number))
        for number in range(20):
            await until(runtime, f"job-{number}", SUCCEEDED)
        await submit(runtime, "last")
        await until(runtime, "last", RUNNING)
        await settled(scheduler)
        followed = portrait(scheduler.informer)
    fresh = portrait(await loaded(runtime))
    for part in ("nodes", "limits", "used", "gangs", "nominated", "waiting", "match_keys", "noted"):
        assert followed[part] == fresh[part], part
    await assert_books_balance(runtime)


# Why things wait.


async def reasons(runtime: Runtime, name: str) -> list[str]:
    """Every reason that was ever written, as often as it was."""
    told = [msgspec.json.decode(one.status).get("reason", "") for one in await changes(runtime, name)]
    return [reason for reason in told if reason not in ("", "Unscheduled")]


async def test_a_reason_is_stored_once_with_its_message_and_is_gone_when_it_runs(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    async with scheduling(runtime) as scheduler:
        await submit(runtime, "first", gpu=2)
        await settled(scheduler)
        await submit(runtime, "second", gpu=2)
        told = await until(runtime, "second", waits_for(f"no_capacity_{GPU}"))
        assert told["message"].startswith(f"needs 2 {GPU} on one node")
        # Many cycles later, in which its numbers were looked at again, it has been written no second time.
        for number in range(2):
            await label(runtime, "Node", "", "n1", round=str(number))
            await submit(runtime, f"other-{number}", gpu=1)
            await until(runtime, f"other-{number}", lambda now: now.get("reason", "").startswith("no_capacity"))
        assert await reasons(runtime, "second") == [f"no_capacity_{GPU}"]
        await end(runtime, "default", "first")
        bound = await until(runtime, "second", is_in("Scheduled"))
        assert not {"reason", "message"} & set(bound)


async def test_quota_that_waits_is_told_and_goes_on_as_soon_as_something_ends(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={GPU: 2}, enforcement="Queue")
    await namespace(runtime, "lab", "lab")
    await node(runtime, "n1", gpu=8)
    # It would try again by itself only after ten minutes.
    async with scheduling(runtime, quota_backoff_seconds=600.0):
        for name in ("one", "two"):
            await submit(runtime, name, where="lab")
            await until(runtime, name, is_in("Scheduled"), "lab")
        await submit(runtime, "three", where="lab")
        told = await until(runtime, "three", waits_for("quota_exceeded"), "lab")
        assert told["message"] == f"waiting for quota headroom: tenant lab has 2 of 2 {GPU} bound, 1 asked"
        await end(runtime, "lab", "one")
        await until(runtime, "three", is_in("Scheduled"), "lab")
        await submit(runtime, "four", where="lab")
        await until(runtime, "four", waits_for("quota_exceeded"), "lab")
        await change(runtime, "Tenant", "", "lab", limits={GPU: 3})
        await until(runtime, "four", is_in("Scheduled"), "lab")
    await assert_books_balance(runtime)


async def test_limits_are_known_to_a_leader_that_comes_to_running_work(runtime: Runtime) -> None:
    """Running work is counted once, although it is both in the counters and in the cluster state."""
    await change(runtime, "Tenant", "", "default", limits={GPU: 4}, enforcement="Queue")
    await node(runtime, "n1", gpu=8)
    async with scheduling(runtime) as first:
        await submit(runtime, "one", gpu=2)
        await settled(first)
    async with scheduling(runtime, fence=await term(runtime, "second", depose=True)) as second:
        await submit(runtime, "two", gpu=2)
        await settled(second)
        await submit(runtime, "three")
        await until(runtime, "three", waits_for("quota_exceeded"))


async def test_nodes_that_do_not_match_are_told_and_a_label_lets_it_run(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    await submit(runtime, "picky", spec={"nodeSelector": {"disk": "fast"}})
    async with scheduling(runtime):
        await until(runtime, "picky", waits_for("no_matching_nodes"))
        await label(runtime, "Node", "", "n1", disk="fast")
        await until(runtime, "picky", is_in("Scheduled"))


async def test_without_nodes_it_waits_for_one(runtime: Runtime) -> None:
    async with scheduling(runtime):
        await submit(runtime, "early")
        await until(runtime, "early", waits_for("no_nodes_active"))
        await node(runtime, "n1", gpu=1)
        await until(runtime, "early", is_in("Scheduled"))


@pytest.mark.parametrize("how", ["cordon", "not ready", "taint"])
async def test_a_node_that_takes_nothing_gets_nothing_until_it_does_again(runtime: Runtime, how: str) -> None:
    await node(runtime, "n1", gpu=4)
    taint = {"key": "broken", "effect": "NoSchedule"}

    def set_to(document: dict[str, Any], well: bool) -> None:
        if how == "not ready":
            document.setdefault("status", {})["phase"] = "Ready" if well else "NotReady"
        else:
            document["spec"] |= {"taints": [] if well else [taint]} if how == "taint" else {"unschedulable": not well}

    async def describe(well: bool) -> None:
        reply = await edit(runtime, "Node", "", "n1", lambda one: set_to(one, well), status=how == "not ready")
        assert code(reply) == "ok"

    async with scheduling(runtime):
        await describe(well=False)
        await submit(runtime, "one")
        await until(runtime, "one", lambda now: now.get("reason") in ("no_nodes_active", "no_matching_nodes"))
        await describe(well=True)
        await until(runtime, "one", is_in("Scheduled"))


# Gangs.


async def test_a_gang_waits_for_its_members_and_is_bound_as_one(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=2)
    async with acting(runtime), scheduling(runtime):
        for name in ("a", "b"):
            await submit(runtime, name, spec=gang("g", 3))
        told = await until(runtime, "b", waits_for("gang_incomplete"))
        assert told["message"] == "waiting for gang members: 2 of 3 submitted"
        await submit(runtime, "c", spec=gang("g", 3))
        for name in ("a", "b", "c"):
            await until(runtime, name, RUNNING)
    bound = [
        one.revision
        for name in ("a", "b", "c")
        for one in await changes(runtime, name)
        if msgspec.json.decode(one.status)["phase"] == "Scheduled"
    ]
    assert sorted(bound) == list(range(min(bound), min(bound) + 3)), "nothing came between them"
    await assert_books_balance(runtime)


async def test_a_gang_that_is_not_complete_in_time_fails(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    async with scheduling(runtime):
        for name in ("a", "b"):
            await submit(runtime, name, spec=gang("g", 3, "1s"))
        for name in ("a", "b"):
            told = await until(runtime, name, is_in("Failed"))
            assert (told["reason"], told["message"]) == ("GangTimeout", "waiting for gang members: 2 of 3 submitted")
    await assert_books_balance(runtime)


async def test_members_that_come_back_while_others_run_come_one_by_one(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    async with scheduling(runtime) as scheduler:
        for name in ("a", "b", "c"):
            await submit(runtime, name, spec=gang("g", 3))
        await settled(scheduler)
        for name in ("a", "b"):
            await end(runtime, "default", name, Phase.PENDING)
        await settled(scheduler)
        assert {(await status(runtime, name))["phase"] for name in ("a", "b", "c")} == {"Scheduled"}
    await assert_books_balance(runtime)


async def test_what_is_left_of_a_gang_runs_again(runtime: Runtime) -> None:
    """One member has succeeded; a leader that never saw it knows all the same that the gang was complete once, and
    that no time can run out any more."""
    await node(runtime, "n1", gpu=4)
    async with scheduling(runtime) as scheduler:
        for name in ("a", "b", "c"):
            await submit(runtime, name, spec=gang("g", 3, "10m"))
        await settled(scheduler)
    await end(runtime, "default", "c")
    for name in ("a", "b"):
        await end(runtime, "default", name, Phase.PENDING)
    async with scheduling(runtime, clock=lambda: time() + 3600) as scheduler:
        await settled(scheduler)
    assert {(await status(runtime, name))["phase"] for name in ("a", "b")} == {"Scheduled"}
    await assert_books_balance(runtime)


# Preemption.


async def test_a_victim_is_stopped_the_urgent_runs_in_its_place_and_the_victim_runs_later(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    async with acting(runtime, stop_seconds=0.1), scheduling(runtime, HASTY, grace_seconds=5.0):
        await submit(runtime, "low", gpu=2)
        await until(runtime, "low", RUNNING)
        await submit(runtime, "urgent", gpu=2, spec={"priority": 1000}, seconds=1.5)
        stopping = await until(runtime, "low", is_in("Terminating"))
        await until(runtime, "urgent", RUNNING)
        waits = await until(runtime, "low", waits_for("Preempted"))
        await until(runtime, "urgent", SUCCEEDED)
        await until(runtime, "low", RUNNING)
    notice = stopping["eviction"]
    assert (notice["reason"], notice["rule"], notice["by"]) == ("Preempted", "LowerPriority", "default/urgent")
    assert waits["phase"] == "Pending"
    phases = ["Pending", "Scheduled", "Running", "Terminating", "Pending", "Scheduled", "Running"]
    assert await history(runtime, "low") == phases
    nominated = [msgspec.json.decode(one.status).get("nominated") for one in await changes(runtime, "urgent")]
    assert [one["node"] for told in nominated for one in told or ()][:1] == ["n1"]
    await assert_books_balance(runtime)


async def test_the_nominee_gets_the_capacity_that_was_made_for_it(runtime: Runtime) -> None:
    """Others that would fit into what the first victims leave do not get it."""
    await node(runtime, "n1", gpu=4)
    async with acting(runtime) as nodes, scheduling(runtime, HASTY, grace_seconds=600.0):
        for name in ("a", "b"):
            await submit(runtime, name, gpu=2)
            await until(runtime, name, RUNNING)
        assert nodes.running == 2
    # Nobody acts for the node now: the victims go when the test says so.
    async with scheduling(runtime, HASTY, grace_seconds=600.0):
        await submit(runtime, "urgent", gpu=4, spec={"priority": 1000})
        for name in ("a", "b"):
            await until(runtime, name, is_in("Terminating"))
        told = await until(runtime, "urgent", lambda now: bool(now.get("nominated")))
        assert [one["node"] for one in told["nominated"]] == ["n1"]
        await until(runtime, "urgent", waits_for("waiting_for_preemption"))
        await end(runtime, "default", "a", Phase.CANCELLED)
        await submit(runtime, "small")
        await until(runtime, "small", lambda now: now.get("reason", "Unscheduled") != "Unscheduled")
        await end(runtime, "default", "b", Phase.CANCELLED)
        await until(runtime, "urgent", is_in("Scheduled"))
        assert await node_of(runtime, "urgent") == "n1"
        for name in ("a", "b", "small"):
            assert (await status(runtime, name))["phase"] == "Pending"
    await assert_books_balance(runtime)


async def test_an_evicted_gang_comes_back_whole(runtime: Runtime) -> None:
    """One member is gone while the other still stops: it does not run alone where one would fit."""
    for name, gpus in (("n1", 2), ("n2", 1)):
        await node(runtime, name, gpu=gpus)
    await submit(runtime, "fixed", spec={"nodeSelector": {"kubernetes.io/hostname": "n2"}})
    async with scheduling(runtime, HASTY, grace_seconds=600.0) as scheduler:
        await settled(scheduler)
        for name in ("a", "b"):
            await submit(runtime, name, spec=gang("g", 2))
        await settled(scheduler)
        await submit(runtime, "urgent", gpu=2, spec={"priority": 1000})
        for name in ("a", "b"):
            await until(runtime, name, is_in("Terminating"))
        await end(runtime, "default", "fixed")
        await end(runtime, "default", "a", Phase.CANCELLED)
        await submit(runtime, "after", spec={"nodeSelector": {"kubernetes.io/hostname": "n2"}})
        await until(runtime, "after", is_in("Scheduled"))
        assert (await status(runtime, "a"))["phase"] == "Pending"
        await end(runtime, "default", "b", Phase.CANCELLED)
        await until(runtime, "urgent", is_in("Scheduled"))
        await end(runtime, "default", "urgent")
        for name in ("a", "b"):
            await until(runtime, name, is_in("Scheduled"))
    await assert_books_balance(runtime)


async def test_a_drain_moves_work_elsewhere(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=4)
    async with acting(runtime, stop_seconds=0.05), scheduling(runtime) as scheduler:
        for name in ("a", "b"):
            await submit(runtime, name)
            await until(runtime, name, RUNNING)
        await node(runtime, "n2", gpu=4)
        assert code(await drain(runtime, Drain(key=Key("Node", "", "n1"), origin=TEST))) == "ok"
        for name in ("a", "b"):
            await until(runtime, name, lambda now: now["phase"] == "Running" and now["nodeName"] == "n2")
        await continue_drain(runtime, "n1")
        await settled(scheduler)
        waits, now = scheduler.waits, time()
        assert (waits.overall(now).count, round(waits.per_second(now) * 60)) == (2, 4), "they ran for part of the time"
    found = await object_ops.get(runtime, Key("Node", "", "n1"))
    assert isinstance(found, Stored)
    assert msgspec.json.decode(found.status)["drain"]["state"] == "Drained"
    await assert_books_balance(runtime)


async def test_a_boosted_job_goes_first(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=1)
    async with scheduling(runtime) as scheduler:
        await submit(runtime, "running")
        await settled(scheduler)
        template = {"spec": {"resources": {"requests": {GPU: "1"}}}}
        for name in ("first", "second"):
            body = {"metadata": {"name": name, "namespace": "default"}, "spec": {"template": template}}
            assert code(await create(runtime, "Job", body)) == "ok"
            await until(runtime, f"{name}-0", waits_for(f"no_capacity_{GPU}"))
        job = await object_ops.get(runtime, Key("Job", "default", "second"))
        assert isinstance(job, Stored)
        boosted = job_ops.boost(runtime, job, TEST, priority=1_000_000, seconds=600, reason="", approved_by="me")
        assert code(await boosted) == "ok"
        await end(runtime, "default", "running")
        await until(runtime, "second-0", is_in("Scheduled"))
        assert (await status(runtime, "first-0"))["phase"] == "Pending"


# Plans that changes of the cluster overtake.


@pytest.fixture
async def gate(runtime: Runtime, database_url: str) -> "Gate":
    return Gate(runtime, await connect(database_url))


class Gate:
    """Holds up what is to be written of one object, until something else has happened."""

    def __init__(self, runtime: Runtime, db: Connection) -> None:
        self.runtime = runtime
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
        async with self.runtime.database.reader() as db, asyncio.timeout(30):
            while not await db.fetchval(waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_node_that_changed_between_plan_and_commit_is_planned_for_anew(runtime: Runtime, gate: Gate) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=1)
        await label(runtime, "Node", "", name, disk="fast")
    with structlog.testing.capture_logs() as logs:
        async with scheduling(runtime) as scheduler:
            async with gate:
                await submit(runtime, "picky", spec={"nodeSelector": {"disk": "fast"}})
                await gate.someone_waits()
                (placed,) = scheduler.cluster.placed.values()
                planned = scheduler.cluster.fleet.names[placed.spots[0].row]
                await label(runtime, "Node", "", planned, disk="slow")
            await until(runtime, "picky", is_in("Scheduled"))
            await settled(scheduler)
    assert {await node_of(runtime, "picky"), planned} == {"n1", "n2"}
    came_back = [one for one in logs if one["event"] == "bind_rejected"]
    assert [(one["code"], one["error"]) for one in came_back] == [
        ("stale", f"node {planned} has changed since the plan was made")
    ]
    await assert_books_balance(runtime)


async def test_what_was_deleted_between_plan_and_commit_is_forgotten(runtime: Runtime, gate: Gate) -> None:
    await node(runtime, "n1", gpu=1)
    async with scheduling(runtime) as scheduler:
        async with gate:
            await submit(runtime, "one")
            await gate.someone_waits()
            await delete(runtime, "Allocation", "default", "one")
            await submit(runtime, "next")
        await until(runtime, "next", is_in("Scheduled"))
        await settled(scheduler)
        assert len(scheduler.cluster.placed) == 1
    await assert_books_balance(runtime)


async def test_what_was_planned_for_a_node_that_is_gone_waits_again(runtime: Runtime, gate: Gate) -> None:
    await node(runtime, "n1", gpu=2)
    async with scheduling(runtime) as scheduler:
        async with gate:
            for name in ("a", "b"):
                await submit(runtime, name, spec=gang("g", 2))
            await gate.someone_waits()
            assert code(await delete(runtime, "Node", "", "n1")) == "ok"
            await seen(scheduler, lambda: not scheduler.cluster.fleet.row_of)
        await until(runtime, "a", waits_for("no_nodes_active"))
        await node(runtime, "n2", gpu=2)
        for name in ("a", "b"):
            await until(runtime, name, is_in("Scheduled"))
        await settled(scheduler)
    await assert_books_balance(runtime)


async def seen(scheduler: Scheduler, holds: Callable[[], bool]) -> None:
    """Until the scheduler has followed the feed so far."""
    async with asyncio.timeout(30):
        while not holds():
            scheduler.nudge()
            await asyncio.sleep(0.005)


async def test_a_scheduler_that_lost_its_place_begins_anew(runtime: Runtime, database_url: str) -> None:
    await node(runtime, "n1", gpu=4)
    db = await connect(database_url)
    with structlog.testing.capture_logs() as logs:
        async with scheduling(runtime) as scheduler:
            await submit(runtime, "one")
            await settled(scheduler)
            informer, scheduler.informer.revision = scheduler.informer, scheduler.informer.revision - 2
            await db.execute("DELETE FROM change WHERE revision = $1", informer.revision + 1)
            await submit(runtime, "two")
            await until(runtime, "two", is_in("Scheduled"))
            assert scheduler.informer is not informer
    await db.close()
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == ["cluster_state_reloaded"]
    await assert_books_balance(runtime)
