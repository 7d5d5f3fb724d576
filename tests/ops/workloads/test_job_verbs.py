"""What is done to jobs that are there, on a real database: cancelled, boosted, deleted with what they made."""

import asyncio
from datetime import timedelta

import msgspec
import pytest

from bursar.commands.command import Reply, Written
from bursar.commands.lifecycle.dispatch import delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.loops.housekeeping import finish_namespaces
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.ops.workloads import job as job_ops
from bursar.ops.workloads.job_controller import step
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    GPU,
    TEST,
    allocation,
    assert_counters_equal_charges,
    code,
    counters,
    delete,
    document,
    get,
    opened,
    quota,
)
from support.scheduling.jobs import cancel, eight_gpus, finish, job, key, phases, run, status, stored


def is_deleted(reply: Reply) -> bool:
    return isinstance(reply, Written) and reply.deleted


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    return await eight_gpus(runtime)


# Cancelling.


async def test_cancelling_what_runs_waits_for_its_end(lab: Runtime) -> None:
    await job(lab, parallelism=3)
    await run(lab, "train-0", "train-1")
    cancelling = document(await cancel(lab))["status"]
    assert cancelling["phase"] == "Cancelling"
    assert cancelling["message"] == "Graceful cancellation initiated, 60s grace period"
    assert cancelling["cancellationReason"] == "superseded"
    assert await phases(lab) == {"train-0": "Terminating", "train-1": "Terminating"}
    one = document(await placement_ops.report(lab, _running("train-0")))
    assert one["metadata"]["deletionGracePeriodSeconds"] == 60
    await finish(lab, "train-0", phase=Phase.CANCELLED)
    await step(lab, key())
    assert (await status(lab))["phase"] == "Cancelling"
    assert (await status(lab))["active"] == 1
    await finish(lab, "train-1", phase=Phase.CANCELLED)
    assert await step(lab, key()) is None
    ended = await status(lab)
    assert (ended["phase"], ended["active"], ended["failed"]) == ("Cancelled", 0, 0)
    assert ended["completionTime"]
    await assert_counters_equal_charges(lab)


def _running(name: str) -> Report:
    return Report(key=Key("Allocation", "lab", name), origin=TEST, phase=Phase.TERMINATING)


async def test_cancelling_while_others_step_leaves_nothing_behind(lab: Runtime, database_url: str) -> None:
    async with opened(database_url) as other:
        for number in range(8):
            name = f"train-{number}"
            await job(lab, name, parallelism=2, completions=6)
            await run(lab, f"{name}-0")
            await finish(lab, f"{name}-0")
            await asyncio.gather(step(other, key(name)), cancel(lab, name), step(lab, key(name)))
            await step(lab, key(name))
            assert (await status(lab, name))["phase"] == "Cancelled"
        assert set((await phases(lab)).values()) == {"Succeeded"}
    await assert_counters_equal_charges(lab)


# Boosting.


async def boost(runtime: Runtime, priority: int = 500, seconds: int = 3600) -> Reply:
    return await job_ops.boost(
        runtime,
        await stored(runtime),
        Origin("user:root", "boost", "incident"),
        priority=priority,
        seconds=seconds,
        reason="incident",
        approved_by="boss@example.com",
    )


async def test_a_boost_is_kept_until_it_expires(lab: Runtime) -> None:
    await job(lab, priority=200)
    first = document(await boost(lab))["status"]["boost"]
    assert first | {"expires": ""} == {
        "priority": 500,
        "previousPriority": 200,
        "reason": "incident",
        "approvedBy": "boss@example.com",
        "by": "user:root",
        "expires": "",
    }
    second = document(await boost(lab, 700, 60))["status"]["boost"]
    assert (second["priority"], second["previousPriority"]) == (700, 500)
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.look_at is not None
    await step(lab, key(), stepped.look_at - timedelta(seconds=1))
    assert "boost" in await status(lab)
    await step(lab, key(), stepped.look_at)
    assert "boost" not in await status(lab)
    third = document(await boost(lab))["status"]["boost"]
    assert third["previousPriority"] == 200


async def test_the_priority_before_a_boost_may_be_that_of_the_class(lab: Runtime) -> None:
    await job(lab, priorityClass="high-priority")
    value = msgspec.json.decode((await get(lab, "PriorityClass", "", "high-priority")).doc)["value"]
    assert document(await boost(lab))["status"]["boost"]["previousPriority"] == value > 0


# Deleting.


async def test_deleting_a_job_that_waits_deletes_its_allocations(lab: Runtime) -> None:
    await job(lab, parallelism=3)
    assert is_deleted(await delete(lab, "Job", "lab", "train"))
    assert await phases(lab) == {}
    assert (await counters(lab))["tenant:lab", GPU].accepted == 0
    assert code(await job(lab, parallelism=3)) == "ok"


async def test_a_deleted_job_stays_until_what_runs_has_stopped(lab: Runtime) -> None:
    await job(lab, parallelism=2, completions=3)
    await run(lab, "train-0", "train-1")
    await finish(lab, "train-0")
    await step(lab, key())
    shown = document(await delete(lab, "Job", "lab", "train"))
    assert shown["metadata"]["deletionTimestamp"]
    assert shown["status"]["phase"] == "Cancelling"
    assert await phases(lab) == {"train-1": "Terminating"}
    await step(lab, key())
    assert code(await object_ops.get(lab, key())) == "ok"
    await finish(lab, "train-1", phase=Phase.CANCELLED)
    assert await step(lab, key()) is None
    assert code(await object_ops.get(lab, key())) == "not_found"
    assert await phases(lab) == {}
    await assert_counters_equal_charges(lab)


async def test_an_orphan_outlives_its_job(lab: Runtime) -> None:
    await job(lab)
    before = await stored(lab)
    command = delete_command(BY_NAME["Job"], before, TEST, preconditions=DeletePreconditions(), orphan=True)
    assert is_deleted(await object_ops.submit(lab, command, tenant="lab"))
    assert await phases(lab) == {"train-0": "Pending"}


async def test_a_job_that_moved_on_is_marked_and_deleted_by_the_controller(lab: Runtime) -> None:
    await job(lab, completions=3)
    old = await stored(lab)
    await run(lab, "train-0")
    await finish(lab, "train-0")
    await step(lab, key())
    command = delete_command(BY_NAME["Job"], replace(old), TEST, preconditions=DeletePreconditions())
    assert document(await object_ops.submit(lab, command, tenant="lab"))["metadata"]["deletionTimestamp"]
    assert await phases(lab) == {"train-1": "Pending"}
    assert await step(lab, key()) is None
    assert await phases(lab) == {}
    assert code(await object_ops.get(lab, key())) == "not_found"


async def test_an_allocation_of_the_same_name_that_is_not_the_job_s_is_left_alone(lab: Runtime) -> None:
    await job(lab)
    await delete(lab, "Allocation", "lab", "train-0")
    await allocation(lab, "lab", "train-0", gpu=1)
    assert is_deleted(await delete(lab, "Job", "lab", "train"))
    assert await phases(lab) == {"train-0": "Pending"}


async def test_a_namespace_that_ends_takes_its_jobs_along(lab: Runtime) -> None:
    await quota(lab, "lab", "small", hard={"pods": "10"})
    await job(lab, parallelism=2, completions=4)
    await run(lab, "train-0")
    await delete(lab, "Namespace", "", "lab")
    assert await finish_namespaces(lab) == 0
    await finish(lab, "train-0", phase=Phase.CANCELLED)
    await step(lab, key())
    assert await finish_namespaces(lab) == 1
    assert isinstance(await object_ops.get(lab, key()), Refusal)
    await assert_counters_equal_charges(lab)
