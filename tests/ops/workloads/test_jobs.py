"""Jobs on a real database: made whole or not at all, and stepped once however many try."""

import asyncio
from datetime import datetime, timedelta

import msgspec
import pytest

from bursar.api.objects.event import event_of
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.ops.workloads import job_controller
from bursar.ops.workloads.job_controller import Stepped, step
from bursar.store.objects import change as change_store
from support.runtime.runtime import (
    GPU,
    TEST,
    allocation,
    assert_counters_equal_charges,
    change,
    claim,
    code,
    counters,
    create,
    delete,
    document,
    get,
    namespace,
    opened,
    refusal,
)
from support.scheduling.jobs import cancel, eight_gpus, finish, job, key, phases, run, status, stored


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    return await eight_gpus(runtime)


# Making.


async def test_a_job_and_its_first_allocations_are_made_together(lab: Runtime) -> None:
    made = document(await job(lab, parallelism=2, completions=4, queue="gpu-training", priority=200))
    assert made["metadata"]["uid"].startswith("job-")
    assert made["status"]["phase"] == "Queued"
    (condition,) = made["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Queued", "True", "WaitingForResources")
    assert await phases(lab) == {"train-0": "Pending", "train-1": "Pending"}
    found = await object_ops.get(lab, Key("Allocation", "lab", "train-1"))
    assert isinstance(found, Stored)
    one = msgspec.json.decode(found.doc)
    assert one["metadata"]["name"] == "train-1"
    assert one["metadata"]["uid"] == found.uid
    assert one["metadata"]["labels"] == {"bursar.io/job": "train"} == found.labels
    assert one["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Job", "name": "train", "uid": made["metadata"]["uid"], "controller": True}
    ]
    assert (one["spec"]["queue"], one["spec"]["priority"]) == ("gpu-training", 200)
    assert (await counters(lab))["tenant:lab", GPU].accepted == 2000
    await assert_counters_equal_charges(lab)


async def test_the_template_has_the_last_word_and_its_labels_come_along(lab: Runtime) -> None:
    spec = {"resources": {"requests": {"cpu": "1"}}, "priority": 7, "queue": "default"}
    template = {"metadata": {"labels": {"app": "x"}, "annotations": {"note": "y"}}, "spec": spec}
    of_job = {"template": template, "priority": 200, "queue": "gpu-training", "priorityClass": "batch-high"}
    body = {"metadata": {"name": "train", "namespace": "lab"}, "spec": of_job}
    assert code(await create(lab, "Job", body)) == "ok"
    found = await object_ops.get(lab, Key("Allocation", "lab", "train-0"))
    assert isinstance(found, Stored)
    one = msgspec.json.decode(found.doc)
    assert one["metadata"]["labels"] == {"app": "x", "bursar.io/job": "train"}
    assert one["metadata"]["annotations"] == {"note": "y", "bursar.io/job-index": "0"}
    assert (one["spec"]["priority"], one["spec"]["queue"], one["spec"]["priorityClass"]) == (7, "default", "batch-high")
    assert found.charge.facts.priority_class == "batch-high"


async def test_of_many_jobs_at_once_as_many_are_made_as_there_is_capacity_for(lab: Runtime, database_url: str) -> None:
    async with opened(database_url) as other:
        replies = await asyncio.gather(
            *(job(one, f"j-{number}-{which}", parallelism=3)
              for number in range(6) for which, one in enumerate((lab, other)))
        )  # fmt: skip
    assert sorted(map(code, replies)) == ["ok"] * 2 + ["quota_exceeded"] * 10
    assert len(await phases(lab)) == 6
    await assert_counters_equal_charges(lab)


async def test_a_name_that_is_taken_is_told(lab: Runtime) -> None:
    await allocation(lab, "lab", "train-1", gpu=1)
    assert refusal(await job(lab, parallelism=2)).message == 'allocations "train-1" already exists'
    assert code(await job(lab, "other", parallelism=2)) == "ok"
    assert refusal(await job(lab, "other", parallelism=2)).message == 'jobs "other" already exists'
    assert sorted(await phases(lab)) == ["other-0", "other-1", "train-1"]


async def test_an_unknown_class_or_queue_is_named_where_it_stands(lab: Runtime) -> None:
    refused = refusal(await job(lab, priorityClass="none-such", template={"queue": "nowhere"}))
    assert [one.field for one in refused.causes] == ["spec.priorityClass", "spec.template.spec.queue"]
    assert await phases(lab) == {}


async def test_a_repeated_request_makes_one_job(lab: Runtime) -> None:
    first = await job(lab, parallelism=2, claimed=claim("r", "body"))
    assert await job(lab, parallelism=2, claimed=claim("r", "body")) == first
    assert code(await job(lab, "two", claimed=claim("r", "else"))) == "request_id_reused"
    assert sorted(await phases(lab)) == ["train-0", "train-1"]
    refused = await job(lab, "big", parallelism=9, claimed=claim("s", "body"))
    assert code(refused) == "quota_exceeded"
    assert await job(lab, "big", parallelism=9, claimed=claim("s", "body")) == refused


async def test_thousands_are_made_and_cancelled_in_one_go(runtime: Runtime) -> None:
    await namespace(runtime, "lab")
    assert code(await job(runtime, parallelism=3000)) == "ok"
    found = await phases(runtime)
    assert len(found) == 3000
    await assert_counters_equal_charges(runtime)
    assert document(await cancel(runtime))["status"]["phase"] == "Cancelled"
    assert await phases(runtime) == {}
    await assert_counters_equal_charges(runtime)


# Gangs.


async def test_the_allocations_of_a_gang_job_are_one_gang(lab: Runtime) -> None:
    template = {"scheduling": {"gangScheduling": {"timeout": "600s"}}}
    assert code(await job(lab, parallelism=4, template=template)) == "ok"
    found = await object_ops.get(lab, Key("Allocation", "lab", "train-3"))
    assert isinstance(found, Stored)
    gang = msgspec.json.decode(found.doc)["spec"]["scheduling"]["gangScheduling"]
    assert gang == {"groupId": "train", "minMembers": 4, "timeout": "600s"}
    assert found.gang == "train"
    assert not found.charge.due
    assert (await counters(lab))["tenant:lab", GPU].accepted == 4000
    echoed = msgspec.json.decode((await stored(lab)).doc)["spec"]["template"]["spec"]["scheduling"]
    assert echoed == {"gangScheduling": {"timeout": "600s"}}


async def test_a_failed_member_is_replaced_in_its_gang_and_the_last_ones_form_a_smaller_one(lab: Runtime) -> None:
    template = {"gangScheduling": {"minMembers": 3}}
    await job(lab, parallelism=3, backoffLimit=5, template=template, onMemberFailure="wait")
    await run(lab, "train-0", "train-1", "train-2")
    await finish(lab, "train-0", phase=Phase.FAILED)
    await step(lab, key())
    assert (await phases(lab))["train-0-1"] == "Pending"
    await run(lab, "train-0-1")
    await finish(lab, "train-2")
    await finish(lab, "train-0-1", "train-1", phase=Phase.FAILED)
    await step(lab, key())
    waiting = await object_ops.get(lab, Key("Allocation", "lab", "train-1-1"))
    assert isinstance(waiting, Stored)
    assert msgspec.json.decode(waiting.doc)["spec"]["gangScheduling"] == {"groupId": "train", "minMembers": 2}
    assert not waiting.charge.due
    await run(lab, "train-0-2", "train-1-1")
    await finish(lab, "train-0-2", "train-1-1")
    await step(lab, key())
    assert (await status(lab))["phase"] == "Succeeded"
    await assert_counters_equal_charges(lab)


async def test_what_fails_in_a_gang_that_became_smaller_joins_it_again(lab: Runtime) -> None:
    first = [f"train-{index}" for index in range(4)]
    template = {"gangScheduling": {"minMembers": 4}, "onMemberFailure": "wait"}
    await job(lab, parallelism=4, completions=6, backoffLimit=5, template=template)
    await run(lab, *first)
    await finish(lab, *first)
    await step(lab, key())
    await run(lab, "train-4", "train-5")
    await finish(lab, "train-4", phase=Phase.FAILED)
    stepped = await step(lab, key())
    assert stepped is not None
    assert not stepped.blocked, await status(lab)
    again = await object_ops.get(lab, Key("Allocation", "lab", "train-4-1"))
    assert isinstance(again, Stored)
    assert msgspec.json.decode(again.doc)["spec"]["gangScheduling"] == {"groupId": "train", "minMembers": 2}
    await run(lab, "train-4-1")
    await finish(lab, "train-4-1", "train-5")
    await step(lab, key())
    assert (await status(lab))["phase"] == "Succeeded"
    await assert_counters_equal_charges(lab)


async def test_a_gang_whose_member_failed_is_tried_again_as_a_set(lab: Runtime) -> None:
    await job(lab, parallelism=3, backoffLimit=1, template={"gangScheduling": {}})
    await run(lab, "train-0", "train-1", "train-2")
    await finish(lab, "train-0")
    failing = Report(
        key=Key("Allocation", "lab", "train-1"), origin=TEST, phase=Phase.FAILED, exit_code=5, gang="train", node="n1"
    )
    await placement_ops.report(lab, failing)
    await step(lab, key())
    assert await phases(lab) == {"train-0": "Succeeded", "train-1": "Failed", "train-2": "Terminating"}
    stopped = msgspec.json.decode((await get(lab, "Allocation", "lab", "train-2")).status)
    assert (stopped["reason"], stopped["message"]) == ("MemberFailed", "train-1 failed: exit code 5 on n1")
    await finish(lab, "train-2", phase=Phase.FAILED)
    await step(lab, key())
    again = {name: phase for name, phase in (await phases(lab)).items() if phase == "Pending"}
    assert sorted(again) == ["train-0-1", "train-1-1", "train-2-1"]
    now = await status(lab)
    assert (now["failed"], now["succeeded"], now["message"]) == (1, 0, "train-1: exit code 5 on n1")
    await run(lab, *again)
    await finish(lab, *again)
    await step(lab, key())
    ended = await status(lab)
    assert (ended["phase"], ended["succeeded"], ended["failed"]) == ("Succeeded", 3, 1)
    await assert_counters_equal_charges(lab)
    async with lab.database.reader() as db:
        lines = await change_store.load_happenings_of(db, "lab", "train", "Job", 100)
    events = [(one["reason"], one["message"]) for one in map(event_of, reversed(lines))]
    assert events[1:3] == [
        ("AllocationFailed", "train-1: exit code 5 on n1"),
        ("SuccessfulCreate", "created 3 allocations: train-0-1, train-1-1, train-2-1"),
    ]
    assert events[-1] == ("Completed", "job completed")


async def test_between_two_tries_there_is_a_pause(lab: Runtime) -> None:
    await job(lab, backoffLimit=2, backoffSeconds=300)
    await run(lab, "train-0")
    await finish(lab, "train-0", phase=Phase.FAILED)
    stepped = await step(lab, key())
    assert await phases(lab) == {"train-0": "Failed"}
    retry_at = datetime.fromisoformat((await status(lab))["nextRetryTime"])
    assert stepped is not None
    assert stepped.look_at == retry_at
    await step(lab, key(), retry_at)
    assert await phases(lab) == {"train-0": "Failed", "train-0-1": "Pending"}
    assert "nextRetryTime" not in await status(lab)


async def test_a_job_that_is_cancelled_between_two_tries_tries_no_more(lab: Runtime) -> None:
    await job(lab, backoffLimit=2, backoffSeconds=300)
    await run(lab, "train-0")
    await finish(lab, "train-0", phase=Phase.FAILED)
    await step(lab, key())
    await cancel(lab)
    ended = await status(lab)
    assert (ended["phase"], ended.get("nextRetryTime")) == ("Cancelled", None)
    assert await step(lab, key()) is None


# Going on.


async def test_a_job_goes_on_until_enough_have_succeeded(lab: Runtime) -> None:
    await job(lab, parallelism=2, completions=3)
    await run(lab, "train-0", "train-1")
    await step(lab, key())
    assert (await status(lab))["phase"] == "Running"
    assert (await status(lab))["startTime"]
    await finish(lab, "train-0")
    await step(lab, key())
    now_status = await status(lab)
    assert (now_status["active"], now_status["succeeded"], now_status["completedIndexes"]) == (2, 1, "0")
    assert await phases(lab) == {"train-0": "Succeeded", "train-1": "Running", "train-2": "Pending"}
    await run(lab, "train-2")
    await finish(lab, "train-1", "train-2")
    assert await step(lab, key()) is None
    done = await status(lab)
    assert (done["phase"], done["active"], done["succeeded"], done["failed"]) == ("Succeeded", 0, 3, 0)
    assert done["completionTime"]
    assert [one["type"] for one in done["conditions"] if one["status"] == "True"] == ["Complete"]
    assert (await counters(lab))["tenant:lab", GPU].accepted == 0
    revision = (await stored(lab)).revision
    assert await step(lab, key()) is None
    assert (await stored(lab)).revision == revision


async def test_the_rest_is_released_when_enough_have_succeeded(lab: Runtime) -> None:
    await job(lab, parallelism=3, completions=3, backoffLimit=0)
    await run(lab, "train-0", "train-1")
    await finish(lab, "train-0", phase=Phase.FAILED)
    await step(lab, key())
    ended = await status(lab)
    assert (ended["phase"], ended["reason"], ended["active"]) == ("Failed", "BackoffLimitExceeded", 1)
    # What waited is gone, what runs is told to stop.
    assert await phases(lab) == {"train-0": "Failed", "train-1": "Terminating"}
    await finish(lab, "train-1", phase=Phase.CANCELLED)
    await step(lab, key())
    assert (await status(lab))["active"] == 0
    assert await phases(lab) == {"train-0": "Failed"}
    await assert_counters_equal_charges(lab)


async def test_what_fails_is_tried_again_under_another_name_until_the_limit(lab: Runtime) -> None:
    await job(lab, backoffLimit=1)
    await run(lab, "train-0")
    command = Report(key=Key("Allocation", "lab", "train-0"), origin=TEST, phase=Phase.FAILED, reason="OOMKilled")
    await placement_ops.report(lab, command)
    await step(lab, key())
    assert await phases(lab) == {"train-0": "Failed", "train-0-1": "Pending"}
    assert (await status(lab))["failedTries"] == {"0": 1}
    await run(lab, "train-0-1")
    await finish(lab, "train-0-1", phase=Phase.FAILED)
    await step(lab, key())
    ended = await status(lab)
    assert (ended["phase"], ended["failed"], ended["reason"]) == ("Failed", 2, "BackoffLimitExceeded")
    assert ended["message"].startswith("2 allocations failed, backoffLimit is 1")
    assert sorted(await phases(lab)) == ["train-0", "train-0-1"]


async def test_work_that_is_put_back_is_no_failure(lab: Runtime) -> None:
    await job(lab, backoffLimit=0)
    await run(lab, "train-0")
    await step(lab, key())
    await finish(lab, "train-0", phase=Phase.PENDING)
    await step(lab, key())
    assert await phases(lab) == {"train-0": "Pending"}
    assert (await status(lab))["failed"] == 0


async def test_a_job_that_others_keep_changing_is_left_alone_for_a_moment(
    lab: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await job(lab, completions=2)
    await run(lab, "train-0")
    monkeypatch.setattr(job_controller, "TRIES_MAX", 1)
    began = now()
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.look_at is not None
    assert stepped.look_at >= began + timedelta(seconds=job_controller.TROUBLE_SECONDS)


async def test_what_somebody_deletes_is_made_again(lab: Runtime) -> None:
    await job(lab, parallelism=2)
    await delete(lab, "Allocation", "lab", "train-0")
    await step(lab, key())
    assert await phases(lab) == {"train-0": "Pending", "train-1": "Pending"}
    await assert_counters_equal_charges(lab)


async def test_a_job_that_runs_too_long_fails(lab: Runtime) -> None:
    await job(lab, parallelism=2, activeDeadlineSeconds=600)
    # Waiting is not running.
    assert await step(lab, key(), now() + timedelta(hours=1)) == Stepped("lab")
    await run(lab, "train-0")
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.look_at is not None
    await step(lab, key(), stepped.look_at - timedelta(seconds=1))
    assert (await status(lab))["phase"] == "Running"
    await step(lab, key(), stepped.look_at)
    ended = await status(lab)
    assert (ended["phase"], ended["reason"]) == ("Failed", "DeadlineExceeded")
    assert await phases(lab) == {"train-0": "Terminating"}


async def test_a_refused_allocation_shows_on_the_job_with_its_numbers_and_is_made_later(lab: Runtime) -> None:
    await job(lab, parallelism=4, completions=8)
    await run(lab, *(f"train-{index}" for index in range(4)))
    await change(lab, "Tenant", "", "lab", limits={GPU: 3})
    await finish(lab, "train-0", "train-1")
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.blocked
    # As many as capacity allows were created.
    shown = await status(lab)
    assert (shown["active"], shown["startedIndexes"]) == (3, 5)
    (blocked,) = [one for one in shown["conditions"] if one["type"] == "Blocked"]
    assert (blocked["status"], blocked["reason"]) == ("True", "QuotaExceeded")
    assert "current: 3, requested: 1, limit: 3" in blocked["message"]
    revision = (await stored(lab)).revision
    assert (await step(lab, key())) == stepped
    assert (await stored(lab)).revision == revision, "nothing new was told"
    await change(lab, "Tenant", "", "lab", limits={GPU: 8})
    stepped = await step(lab, key())
    assert stepped is not None
    assert not stepped.blocked
    shown = await status(lab)
    assert (shown["active"], shown["startedIndexes"]) == (4, 6)
    assert [one["status"] for one in shown["conditions"] if one["type"] == "Blocked"] == ["False"]
    await assert_counters_equal_charges(lab)


async def test_a_name_that_was_taken_meanwhile_is_told_and_left_alone(lab: Runtime) -> None:
    await job(lab, completions=2)
    await allocation(lab, "lab", "train-1", gpu=1)
    await run(lab, "train-0")
    await finish(lab, "train-0")
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.blocked
    (blocked,) = [one for one in (await status(lab))["conditions"] if one["type"] == "Blocked"]
    assert blocked["message"] == 'allocations "train-1" already exists'
    assert document(await cancel(lab))["status"]["phase"] == "Cancelled"
    assert (await phases(lab))["train-1"] == "Pending"


async def test_two_controllers_racing_make_everything_once(lab: Runtime, database_url: str) -> None:
    async with opened(database_url) as other:
        await job(lab, parallelism=4, completions=12, backoffLimit=20)
        for round_ in range(6):
            waiting = [name for name, phase in (await phases(lab)).items() if phase == "Pending"]
            await run(lab, *waiting)
            for index, name in enumerate(waiting):
                await finish(lab, name, phase=Phase.FAILED if (index + round_) % 3 == 0 else Phase.SUCCEEDED)
            await asyncio.gather(*(step(one, key()) for one in (lab, other, lab, other)))
            shown, found = await status(lab), await phases(lab)
            ended = [phase for phase in found.values() if phase in ("Succeeded", "Failed")]
            assert shown["succeeded"] == ended.count("Succeeded")
            assert shown["failed"] == ended.count("Failed")
            assert shown["active"] == len(found) - len(ended) <= 4
            if shown["phase"] == "Succeeded":
                break
        assert shown["phase"] == "Succeeded"
        assert shown["completedIndexes"] == "0-11"
    await assert_counters_equal_charges(lab)
