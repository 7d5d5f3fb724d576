"""Jobs on a real database: made whole or not at all, stepped once however many try, deleted with what they made."""

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from bursar.core.allocation import Phase
from bursar.core.object import Key, Origin, Stored
from bursar.core.refusal import Refusal
from bursar.core.value import replace
from bursar.loops.upkeep import finish_namespaces
from bursar.ops import allocation as allocation_ops
from bursar.ops import job as job_ops
from bursar.ops import jobstep
from bursar.ops import object as object_ops
from bursar.ops.command import Reply, Written
from bursar.ops.dispatch import delete_command
from bursar.ops.jobstep import Stepped, step
from bursar.ops.object import Preconditions
from bursar.ops.office import Office, now
from bursar.store.listing import Query, load_page
from bursar.store.request import Claim
from bursar.wire.kinds import BY_NAME
from offices import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind_unit,
    change,
    claim,
    code,
    counters,
    create,
    delete,
    document,
    end,
    namespace,
    node,
    opened,
    quota,
    refusal,
    tenant,
)

GPU = "nvidia.com/gpu"


async def job(
    office: Office,
    name: str = "train",
    *,
    gpu: int = 1,
    template: dict[str, Any] | None = None,
    claimed: Claim | None = None,
    where: str = "lab",
    **spec: Any,
) -> Reply:
    body = {"resources": {"requests": {GPU: str(gpu)}}, **(template or {})}
    whole = {"metadata": {"name": name, "namespace": where}, "spec": {"template": {"spec": body}, **spec}}
    return await create(office, "Job", whole, claimed=claimed)


def key(name: str = "train") -> Key:
    return Key("Job", "lab", name)


async def stored(office: Office, name: str = "train") -> Stored:
    found = await object_ops.get(office, key(name))
    assert isinstance(found, Stored), found
    return found


async def status(office: Office, name: str = "train") -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored(office, name)).status)
    return found


async def phases(office: Office) -> dict[str, str]:
    async with office.database.reader() as db:
        page = await load_page(db, Query("Allocation", "lab"))
    return {one.name: msgspec.json.decode(one.status)["phase"] for one in page.items}


async def run(office: Office, *names: str) -> None:
    assert code(await bind_unit(office, "lab", dict.fromkeys(names, ("n1",)))) == "ok"
    for name in names:
        assert code(await end(office, "lab", name, Phase.RUNNING)) == "ok"


async def finish(office: Office, *names: str, phase: Phase = Phase.SUCCEEDED) -> None:
    for name in names:
        assert code(await end(office, "lab", name, phase)) == "ok"


def is_deleted(reply: Reply) -> bool:
    return isinstance(reply, Written) and reply.deleted


async def cancel(office: Office, name: str = "train", grace: int = 60) -> Reply:
    origin = Origin("user:lab/ann", "cancel", "superseded")
    return await job_ops.cancel(office, await stored(office, name), origin, grace_seconds=grace)


@pytest.fixture
async def lab(office: Office) -> Office:
    """A tenant with room for eight GPUs, and a node that has them."""
    await tenant(office, "lab", limits={GPU: 8})
    await namespace(office, "lab", "lab")
    await node(office, "n1", gpu=8, cpu=64)
    return office


# Making.


async def test_a_job_and_its_first_allocations_are_made_together(lab: Office) -> None:
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


async def test_the_template_has_the_last_word_and_its_labels_come_along(lab: Office) -> None:
    spec = {"resources": {"requests": {"cpu": "1"}}, "priority": 7, "queue": "default"}
    template = {"metadata": {"labels": {"app": "x"}, "annotations": {"note": "y"}}, "spec": spec}
    of_job = {"template": template, "priority": 200, "queue": "gpu-training", "priorityClass": "batch-high"}
    body = {"metadata": {"name": "train", "namespace": "lab"}, "spec": of_job}
    assert code(await create(lab, "Job", body)) == "ok"
    found = await object_ops.get(lab, Key("Allocation", "lab", "train-0"))
    assert isinstance(found, Stored)
    one = msgspec.json.decode(found.doc)
    assert one["metadata"]["labels"] == {"app": "x", "bursar.io/job": "train"}
    assert one["metadata"]["annotations"] == {"note": "y"}
    assert (one["spec"]["priority"], one["spec"]["queue"], one["spec"]["priorityClass"]) == (7, "default", "batch-high")
    assert found.charge.facts.priority_class == "batch-high"


async def test_without_room_for_all_of_them_nothing_is_made(lab: Office) -> None:
    await allocation(lab, "lab", "other", gpu=3)
    before = await counters(lab)
    refused = refusal(await job(lab, gpu=2, parallelism=3, completions=9))
    assert refused.code == "quota_exceeded"
    assert refused.message == (
        'job rejected: tenant "lab" would exceed nvidia.com/gpu quota (current: 3, requested: 6, limit: 8)'
    )
    (cause,) = refused.causes
    assert (cause.requested_delta, cause.current_usage, cause.limit) == ("6", "3", "8")
    assert code(await object_ops.get(lab, key())) == "not_found"
    assert await phases(lab) == {"other": "Pending"}
    assert await counters(lab) == before


async def test_of_many_jobs_at_once_as_many_are_made_as_there_is_room_for(lab: Office, database_url: str) -> None:
    async with opened(database_url) as other:
        replies = await asyncio.gather(
            *(job(one, f"j-{number}-{which}", parallelism=3)
              for number in range(6) for which, one in enumerate((lab, other)))
        )  # fmt: skip
    assert sorted(map(code, replies)) == ["ok"] * 2 + ["quota_exceeded"] * 10
    assert len(await phases(lab)) == 6
    await assert_counters_equal_charges(lab)


async def test_a_name_that_is_taken_is_told(lab: Office) -> None:
    await allocation(lab, "lab", "train-1", gpu=1)
    assert refusal(await job(lab, parallelism=2)).message == 'allocations "train-1" already exists'
    assert code(await job(lab, "other", parallelism=2)) == "ok"
    assert refusal(await job(lab, "other", parallelism=2)).message == 'jobs "other" already exists'
    assert sorted(await phases(lab)) == ["other-0", "other-1", "train-1"]


async def test_an_unknown_class_or_queue_is_named_where_it_stands(lab: Office) -> None:
    refused = refusal(await job(lab, priorityClass="none-such", template={"queue": "nowhere"}))
    assert [one.field for one in refused.causes] == ["spec.priorityClass", "spec.template.spec.queue"]
    assert await phases(lab) == {}


async def test_a_repeated_request_makes_one_job(lab: Office) -> None:
    first = await job(lab, parallelism=2, claimed=claim("r", "body"))
    assert await job(lab, parallelism=2, claimed=claim("r", "body")) == first
    assert code(await job(lab, "two", claimed=claim("r", "else"))) == "request_id_reused"
    assert sorted(await phases(lab)) == ["train-0", "train-1"]
    refused = await job(lab, "big", parallelism=9, claimed=claim("s", "body"))
    assert code(refused) == "quota_exceeded"
    assert await job(lab, "big", parallelism=9, claimed=claim("s", "body")) == refused


async def test_thousands_are_made_and_cancelled_in_one_go(office: Office) -> None:
    await namespace(office, "lab")
    assert code(await job(office, parallelism=3000)) == "ok"
    found = await phases(office)
    assert len(found) == 3000
    await assert_counters_equal_charges(office)
    assert document(await cancel(office))["status"]["phase"] == "Cancelled"
    assert await phases(office) == {}
    await assert_counters_equal_charges(office)


# Gangs.


async def test_the_allocations_of_a_gang_job_are_one_gang(lab: Office) -> None:
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


async def test_a_failed_member_is_replaced_in_its_gang_and_the_last_ones_form_a_smaller_one(lab: Office) -> None:
    template = {"gangScheduling": {"minMembers": 3}}
    await job(lab, parallelism=3, backoffLimit=5, template=template)
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


async def test_what_fails_in_a_gang_that_became_smaller_joins_it_again(lab: Office) -> None:
    first = [f"train-{index}" for index in range(4)]
    await job(lab, parallelism=4, completions=6, backoffLimit=5, template={"gangScheduling": {"minMembers": 4}})
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


# Going on.


async def test_a_job_goes_on_until_enough_have_succeeded(lab: Office) -> None:
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


async def test_the_rest_is_released_when_enough_have_succeeded(lab: Office) -> None:
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


async def test_what_fails_is_tried_again_under_another_name_until_the_limit(lab: Office) -> None:
    await job(lab, backoffLimit=1)
    await run(lab, "train-0")
    command = allocation_ops.Report(
        key=Key("Allocation", "lab", "train-0"), origin=TEST, phase=Phase.FAILED, reason="OOMKilled"
    )
    await allocation_ops.report(lab, command)
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


async def test_work_that_is_put_back_is_no_failure(lab: Office) -> None:
    await job(lab, backoffLimit=0)
    await run(lab, "train-0")
    await step(lab, key())
    await finish(lab, "train-0", phase=Phase.PENDING)
    await step(lab, key())
    assert await phases(lab) == {"train-0": "Pending"}
    assert (await status(lab))["failed"] == 0


async def test_a_job_that_others_keep_changing_is_left_alone_for_a_moment(
    lab: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    await job(lab, completions=2)
    await run(lab, "train-0")
    monkeypatch.setattr(jobstep, "TRIES_MAX", 1)
    began = now()
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.look_at is not None
    assert stepped.look_at >= began + timedelta(seconds=jobstep.TROUBLE_SECONDS)


async def test_what_somebody_deletes_is_made_again(lab: Office) -> None:
    await job(lab, parallelism=2)
    await delete(lab, "Allocation", "lab", "train-0")
    await step(lab, key())
    assert await phases(lab) == {"train-0": "Pending", "train-1": "Pending"}
    await assert_counters_equal_charges(lab)


async def test_a_job_that_runs_too_long_fails(lab: Office) -> None:
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


async def test_a_refused_allocation_shows_on_the_job_with_its_numbers_and_is_made_later(lab: Office) -> None:
    await job(lab, parallelism=4, completions=8)
    await run(lab, *(f"train-{index}" for index in range(4)))
    await change(lab, "Tenant", "", "lab", limits={GPU: 3})
    await finish(lab, "train-0", "train-1")
    stepped = await step(lab, key())
    assert stepped is not None
    assert stepped.blocked
    # As many as there is room for were made.
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


async def test_a_name_that_was_taken_meanwhile_is_told_and_left_alone(lab: Office) -> None:
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


async def test_two_controllers_racing_make_everything_once(lab: Office, database_url: str) -> None:
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


# Cancelling.


async def test_cancelling_what_waits_ends_it_at_once(lab: Office) -> None:
    await job(lab, parallelism=3)
    cancelled = document(await cancel(lab))["status"]
    assert (cancelled["phase"], cancelled["message"]) == ("Cancelled", "Cancelled: superseded")
    assert cancelled["active"] == 0
    assert await phases(lab) == {}
    assert (await counters(lab))["tenant:lab", GPU].accepted == 0
    again = await cancel(lab)
    assert document(again)["status"] == cancelled
    assert await step(lab, key()) is None


async def test_cancelling_what_runs_waits_for_its_end(lab: Office) -> None:
    await job(lab, parallelism=3)
    await run(lab, "train-0", "train-1")
    cancelling = document(await cancel(lab))["status"]
    assert cancelling["phase"] == "Cancelling"
    assert cancelling["message"] == "Graceful cancellation initiated, 60s grace period: superseded"
    assert await phases(lab) == {"train-0": "Terminating", "train-1": "Terminating"}
    one = document(await allocation_ops.report(lab, _running("train-0")))
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


def _running(name: str) -> allocation_ops.Report:
    return allocation_ops.Report(key=Key("Allocation", "lab", name), origin=TEST, phase=Phase.TERMINATING)


async def test_what_has_ended_is_not_cancelled(lab: Office) -> None:
    await job(lab)
    await run(lab, "train-0")
    await finish(lab, "train-0")
    await step(lab, key())
    assert code(await cancel(lab)) == "ended"
    assert (await status(lab))["phase"] == "Succeeded"


async def test_cancelling_while_others_step_leaves_nothing_behind(lab: Office, database_url: str) -> None:
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


async def boost(office: Office, priority: int = 500, seconds: int = 3600) -> Reply:
    return await job_ops.boost(
        office,
        await stored(office),
        Origin("user:root", "boost", "incident"),
        priority=priority,
        seconds=seconds,
        reason="incident",
        approved_by="boss@example.com",
    )


async def test_a_boost_is_kept_until_it_expires(lab: Office) -> None:
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


async def test_the_priority_before_a_boost_may_be_that_of_the_class(lab: Office) -> None:
    await job(lab, priorityClass="high-priority")
    value = msgspec.json.decode((await _class("high-priority", lab)).doc)["value"]
    assert document(await boost(lab))["status"]["boost"]["previousPriority"] == value > 0


async def _class(name: str, office: Office) -> Stored:
    found = await object_ops.get(office, Key("PriorityClass", "", name))
    assert isinstance(found, Stored)
    return found


async def test_what_ends_is_not_boosted(lab: Office) -> None:
    await job(lab)
    await cancel(lab)
    assert code(await boost(lab)) == "ended"


# Deleting.


async def test_deleting_a_job_that_waits_deletes_its_allocations(lab: Office) -> None:
    await job(lab, parallelism=3)
    assert is_deleted(await delete(lab, "Job", "lab", "train"))
    assert await phases(lab) == {}
    assert (await counters(lab))["tenant:lab", GPU].accepted == 0
    assert code(await job(lab, parallelism=3)) == "ok"


async def test_a_deleted_job_stays_until_what_runs_has_stopped(lab: Office) -> None:
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


async def test_an_orphan_outlives_its_job(lab: Office) -> None:
    await job(lab)
    before = await stored(lab)
    command = delete_command(BY_NAME["Job"], before, TEST, preconditions=Preconditions(), orphan=True)
    assert is_deleted(await object_ops.submit(lab, command, tenant="lab"))
    assert await phases(lab) == {"train-0": "Pending"}


async def test_a_job_that_moved_on_is_marked_and_deleted_by_the_controller(lab: Office) -> None:
    await job(lab, completions=3)
    old = await stored(lab)
    await run(lab, "train-0")
    await finish(lab, "train-0")
    await step(lab, key())
    command = delete_command(BY_NAME["Job"], replace(old), TEST, preconditions=Preconditions())
    assert document(await object_ops.submit(lab, command, tenant="lab"))["metadata"]["deletionTimestamp"]
    assert await phases(lab) == {"train-1": "Pending"}
    assert await step(lab, key()) is None
    assert await phases(lab) == {}
    assert code(await object_ops.get(lab, key())) == "not_found"


async def test_an_allocation_of_the_same_name_that_is_not_the_job_s_is_left_alone(lab: Office) -> None:
    await job(lab)
    await delete(lab, "Allocation", "lab", "train-0")
    await allocation(lab, "lab", "train-0", gpu=1)
    assert is_deleted(await delete(lab, "Job", "lab", "train"))
    assert await phases(lab) == {"train-0": "Pending"}


async def test_a_namespace_that_ends_takes_its_jobs_along(lab: Office) -> None:
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
