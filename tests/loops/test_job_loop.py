"""The loop of jobs on a real database: what happens is noticed, by one of several controllers, and time passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.loops.jobs import AT_ONCE, BLOCKED_SECONDS, Agenda, run_jobs, unsettled
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.job_controller import Stepped
from bursar.store.objects.listing import Query, load_page
from support.api.site import eventually
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    code,
    create,
    delete,
    end,
    namespace,
    node,
    opened,
    tenant,
)

GPU = "nvidia.com/gpu"
NOW = datetime(2024, 1, 15, 11, tzinfo=UTC)


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await tenant(runtime, "lab", limits={GPU: 4})
    await namespace(runtime, "lab", "lab")
    await node(runtime, "n1", gpu=8)
    return runtime


@asynccontextmanager
async def looping(*offices: Runtime) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(run_jobs(runtime)) for runtime in offices]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def job(runtime: Runtime, name: str = "train", **spec: Any) -> None:
    template = {"spec": {"resources": {"requests": {GPU: "1"}}}}
    body = {"metadata": {"name": name, "namespace": "lab"}, "spec": {"template": template, **spec}}
    assert code(await create(runtime, "Job", body)) == "ok"


async def status(runtime: Runtime, name: str = "train") -> dict[str, Any]:
    found = await object_ops.get(runtime, Key("Job", "lab", name))
    return msgspec.json.decode(found.status) if isinstance(found, Stored) else {}


async def pending(runtime: Runtime) -> list[str]:
    async with runtime.database.reader() as db:
        page = await load_page(db, Query("Allocation", "lab"))
    return [one.name for one in page.items if msgspec.json.decode(one.status)["phase"] == "Pending"]


async def work_off(runtime: Runtime, phase: Phase = Phase.SUCCEEDED) -> None:
    """Run everything that waits, and end it."""
    for name in await pending(runtime):
        if name.startswith(("train", "one", "two")) and code(await bind(runtime, "lab", name, "n1")) == "ok":
            await end(runtime, "lab", name, Phase.RUNNING)
            await end(runtime, "lab", name, phase)


async def test_two_controllers_bring_jobs_to_their_end(lab: Runtime, database_url: str) -> None:
    async with opened(database_url) as other, looping(lab, other):
        await job(lab, "one", parallelism=2, completions=7)
        await job(lab, "two", completions=3)

        async def both_done() -> bool:
            await work_off(lab)
            return {(await status(lab, name)).get("phase") for name in ("one", "two")} == {"Succeeded"}

        await eventually(both_done)
    one, two = await status(lab, "one"), await status(lab, "two")
    assert (one["completedIndexes"], one["failed"], one["active"]) == ("0-6", 0, 0)
    assert (two["completedIndexes"], two["failed"], two["active"]) == ("0-2", 0, 0)
    assert await unsettled(lab) == []
    await assert_counters_equal_charges(lab)


async def test_what_happened_while_nobody_looked_is_made_up_for(lab: Runtime) -> None:
    await job(lab, completions=2)
    await work_off(lab)
    assert await unsettled(lab) == [Key("Job", "lab", "train")]
    async with looping(lab):
        await eventually(lambda: is_waiting(lab, "train-1"))


async def is_waiting(runtime: Runtime, name: str) -> bool:
    return name in await pending(runtime)


async def test_a_job_without_capacity_goes_on_as_soon_as_its_tenant_frees_something(lab: Runtime) -> None:
    await job(lab, completions=2)
    await allocation(lab, "lab", "other", gpu=3)
    await work_off(lab)
    assert code(await allocation(lab, "lab", "faster", gpu=1)) == "ok"
    async with looping(lab):

        async def blocked() -> bool:
            conditions = (await status(lab))["conditions"]
            return any(one["type"] == "Blocked" and one["status"] == "True" for one in conditions)

        await eventually(blocked)
        assert not await is_waiting(lab, "train-1")
        await delete(lab, "Allocation", "lab", "faster")
        # Long before it would have tried again by itself.
        await eventually(lambda: is_waiting(lab, "train-1"), BLOCKED_SECONDS / 2)
        assert not await blocked()


async def test_time_alone_ends_what_runs_too_long(lab: Runtime) -> None:
    async with looping(lab):
        await job(lab, activeDeadlineSeconds=1)
        await bind(lab, "lab", "train-0", "n1")
        await end(lab, "lab", "train-0", Phase.RUNNING)

        async def failed() -> bool:
            return (await status(lab)).get("reason") == "DeadlineExceeded"

        await eventually(failed)


async def test_a_deleted_job_goes_when_what_it_runs_has_gone(lab: Runtime) -> None:
    async with looping(lab):
        await job(lab, parallelism=2)
        await bind(lab, "lab", "train-0", "n1")
        await end(lab, "lab", "train-0", Phase.RUNNING)
        await delete(lab, "Job", "lab", "train")
        assert await status(lab)
        await end(lab, "lab", "train-0", Phase.CANCELLED)

        async def gone() -> bool:
            return not await status(lab)

        await eventually(gone)


# The agenda.


def key(name: str) -> Key:
    return Key("Job", "lab", name)


async def test_jobs_come_when_their_time_has_come() -> None:
    agenda = Agenda()
    agenda.note(key("soon"), Stepped("lab", NOW + timedelta(seconds=5)), NOW)
    agenda.note(key("later"), Stepped("lab", NOW + timedelta(seconds=50)), NOW)
    agenda.note(key("never"), Stepped("lab"), NOW)
    agenda.note(key("gone"), None, NOW)
    assert agenda.take(NOW, AT_ONCE) == []
    assert agenda.seconds_left(NOW) == 5
    assert agenda.take(NOW + timedelta(seconds=5), AT_ONCE) == [key("soon")]
    # Looked at in between, it has another time now.
    agenda.note(key("later"), Stepped("lab", NOW + timedelta(seconds=80)), NOW)
    assert agenda.take(NOW + timedelta(seconds=60), AT_ONCE) == []
    assert agenda.take(NOW + timedelta(seconds=80), AT_ONCE) == [key("later")]


async def test_looking_again_and_again_before_a_deadline_leaves_one_entry() -> None:
    agenda = Agenda()
    for seconds in range(100):
        agenda.note(key("long"), Stepped("lab", NOW + timedelta(days=1)), NOW + timedelta(seconds=seconds))
    assert len(agenda._heap) == 1
    assert agenda.take(NOW + timedelta(days=1), AT_ONCE) == [key("long")]


async def test_a_job_without_capacity_waits_for_its_tenant_or_for_half_a_minute() -> None:
    agenda = Agenda()
    agenda.note(key("a"), Stepped("lab", blocked=True), NOW)
    agenda.freed("other")
    assert agenda.take(NOW, AT_ONCE) == []
    agenda.freed("lab")
    assert agenda.take(NOW, AT_ONCE) == [key("a")]
    agenda.note(key("a"), Stepped("lab", blocked=True), NOW)
    assert agenda.take(NOW + timedelta(seconds=BLOCKED_SECONDS), AT_ONCE) == [key("a")]


async def test_what_was_freed_during_a_look_is_tried_at_once() -> None:
    agenda = Agenda()
    agenda.freed("lab")
    look = agenda.begin()
    agenda.note(key("a"), Stepped("lab", blocked=True), NOW, look)
    assert agenda.take(NOW, AT_ONCE) == [], "it was refused after that"
    look = agenda.begin()
    agenda.freed("lab")
    agenda.take(NOW, AT_ONCE)
    agenda.note(key("a"), Stepped("lab", blocked=True), NOW, look)
    assert agenda.take(NOW, AT_ONCE) == [key("a")]
