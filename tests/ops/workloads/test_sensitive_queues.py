"""A queue for sensitive work stays one while it contains unfinished work, even under concurrent submissions."""

import asyncio
from typing import Any

import pytest

from bursar.commands.command import Reply
from bursar.commands.lifecycle.dispatch import delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.core.nodes.queue import InQueue, bares_its_work, still_sensitive
from bursar.core.objects.allocation import Phase
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import connect
from bursar.store.scheduling.queue import count_in
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    TEST,
    allocation,
    bind,
    change,
    code,
    create,
    delete,
    end,
    get,
    node,
    opened,
    refusal,
)
from support.scheduling.schedulers import edit

QUEUE = BY_NAME["Queue"]
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
async def context(runtime: Runtime) -> Runtime:
    """With a queue for sensitive work."""
    await create(runtime, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "sensitive"}})
    return runtime


async def submit(runtime: Runtime, name: str, queue: str = "secrets") -> Reply:
    return await allocation(runtime, "default", name, spec={"queue": queue}, cpu=1)


def job(name: str, spec: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    inner = {"resources": {"requests": {"cpu": "1"}}, **template}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"template": {"spec": inner}, **spec}}


async def there(runtime: Runtime, queue: str = "secrets") -> InQueue:
    async with runtime.database.reader() as db:
        return await count_in(db, queue)


@pytest.mark.parametrize(
    ("before", "after", "bares"),
    [
        ("sensitive", None, True),
        ("sensitive", "ml", True),
        ("sensitive", "sensitive", False),
        ("ml", None, False),
        ("ml", "sensitive", False),
    ],
)
def test_only_losing_the_profile_makes_work_plain(before: str, after: str | None, bares: bool) -> None:
    assert bares_its_work(before, after) is bares


def test_the_refusal_tells_how_much_is_there_and_what_to_do() -> None:
    refused = still_sensitive("secrets", InQueue(waiting=3, placed=1, jobs=2), deleted=True)
    assert refused is not None
    assert refused.message == (
        'queues "secrets" cannot be deleted: its work would no longer be sensitive '
        "(3 pending allocations, 1 placed allocation, 2 unfinished jobs)"
    )
    assert "bursar get allocations,jobs -A --field-selector spec.queue=secrets" in refused.hint
    assert [one.current_usage for one in refused.causes] == ["6"]
    assert still_sensitive("secrets", InQueue(), deleted=True) is None


async def test_it_is_neither_deleted_nor_changed_while_work_waits_or_runs_in_it(context: Runtime) -> None:
    await node(context, "n1", cpu=4, memory="8Gi")
    await submit(context, "a")
    await submit(context, "b")
    for reply in (
        await delete(context, "Queue", "", "secrets"),
        await change(context, "Queue", "", "secrets", profile="ml"),
        await edit(context, "Queue", "", "secrets", lambda document: document.pop("spec")),
    ):
        refused = refusal(reply)
        assert (refused.code, "(2 pending allocations)" in refused.message) == ("in_use", True)
    # What makes nothing plain is not refused.
    assert code(await change(context, "Queue", "", "secrets", description="of studies")) == "ok"
    await bind(context, "default", "a", "n1")
    assert await there(context) == InQueue(waiting=1, placed=1)
    await delete(context, "Allocation", "default", "b")
    assert "(1 placed allocation)" in refusal(await delete(context, "Queue", "", "secrets")).message
    await end(context, "default", "a", Phase.FAILED)
    assert code(await change(context, "Queue", "", "secrets", profile="ml")) == "ok"
    # It is no longer one for sensitive work: it goes as any other does.
    await submit(context, "c")
    assert code(await delete(context, "Queue", "", "secrets")) == "ok"


async def test_a_try_is_refused_as_well_and_changes_nothing(context: Runtime) -> None:
    await submit(context, "a")
    queue = await get(context, "Queue", "", "secrets")
    command = delete_command(QUEUE, queue, TEST, preconditions=DeletePreconditions())
    assert code(await object_ops.submit(context, command, tenant="test", dry_run=True)) == "in_use"
    await delete(context, "Allocation", "default", "a")
    assert code(await object_ops.submit(context, command, tenant="test", dry_run=True)) == "ok"
    assert (await get(context, "Queue", "", "secrets")).revision == queue.revision


@pytest.mark.parametrize(
    ("spec", "template", "stays"),
    [
        pytest.param({"queue": "secrets"}, {}, True, id="the job says it"),
        pytest.param({}, {"queue": "secrets"}, True, id="the template says it"),
        pytest.param({"queue": "secrets"}, {"queue": "default"}, False, id="the template says otherwise"),
    ],
)
async def test_a_job_between_two_allocations_keeps_its_queue(
    context: Runtime, spec: dict[str, Any], template: dict[str, Any], stays: bool
) -> None:
    """What it makes next goes there."""
    assert code(await create(context, "Job", job("train", {"completions": 2, **spec}, template))) == "ok"
    queue = "secrets" if stays else "default"
    assert await there(context, queue) == InQueue(waiting=1, jobs=1)
    await delete(context, "Allocation", "default", "train-0")
    assert await there(context, queue) == InQueue(jobs=1)
    assert code(await delete(context, "Queue", "", "secrets")) == ("in_use" if stays else "ok")


# Races.


async def test_who_submits_while_it_is_deleted_is_waited_for(context: Runtime, database_url: str) -> None:
    """A submission has seen the queue and is held up before it commits: the deletion must count it."""
    await submit(context, "first", "default")
    async with opened(database_url) as other:
        rival = await connect(database_url)
        try:
            async with rival.transaction():
                # A submission waits here, after it read its queue.
                await rival.execute("SELECT 1 FROM quota FOR UPDATE")
                submitting = asyncio.create_task(submit(context, "late"))
                await blocked(other, 1)
                deleting = asyncio.create_task(delete(other, "Queue", "", "secrets"))
                await blocked(other, 2)
            async with asyncio.timeout(20):
                assert code(await submitting) == "ok"
                assert "(1 pending allocation)" in refusal(await deleting).message
        finally:
            await rival.close()


async def test_who_knew_the_queue_a_moment_ago_looks_again(context: Runtime, database_url: str) -> None:
    """That it was there is remembered for a second, and not beyond its deletion by another process."""
    await submit(context, "a")
    await delete(context, "Allocation", "default", "a")
    async with opened(database_url) as other:
        assert code(await delete(other, "Queue", "", "secrets")) == "ok"
    refused = refusal(await submit(context, "b"))
    assert (refused.code, refused.message) == ("invalid", "Queue 'secrets' does not exist")


async def test_of_many_who_submit_and_delete_nobody_is_made_plain(context: Runtime, database_url: str) -> None:
    """Either there is the queue, or nothing in it."""
    outcomes = set()
    async with opened(database_url) as other:
        for turn in range(12):
            names = [f"a-{turn}-{index}" for index in range(4)]

            async def remove() -> Reply:
                return await delete(other, "Queue", "", "secrets")

            *submitted, deleted = await asyncio.gather(*(submit(context, name) for name in names), remove())
            accepted = [name for name, reply in zip(names, submitted, strict=True) if code(reply) == "ok"]
            outcomes.add(code(deleted))
            assert await there(context) == InQueue(waiting=len(accepted))
            assert code(deleted) == ("in_use" if accepted else "ok")
            for name in accepted:
                await delete(context, "Allocation", "default", name)
            if code(deleted) == "ok":
                await create(context, "Queue", {"metadata": {"name": "secrets"}, "spec": {"profile": "sensitive"}})
    assert outcomes <= {"ok", "in_use"}


async def blocked(runtime: Runtime, count: int) -> None:
    """Until so many wait for a lock."""
    async with asyncio.timeout(20), runtime.database.reader() as db:
        while await db.fetchval(BLOCKED) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
