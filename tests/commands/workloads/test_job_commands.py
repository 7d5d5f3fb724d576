"""Jobs: made whole or not at all, cancelled with their allocations, and stepped from the version that was read."""

from typing import Any

import msgspec
import pytest

from bursar.commands.command import Result, Written
from bursar.commands.workloads.job import BoostJobCommand, CancelJobCommand, group_of
from bursar.commands.workloads.job_status import member, member_key, progress_in, spec_in
from bursar.commands.workloads.job_step import StepJob
from bursar.core.objects.allocation import Phase
from bursar.core.objects.job import JobStep, next_step, open_turns, turn_name
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Code
from bursar.core.values.replace import replace
from bursar.ops.workloads.job import member_drafts
from bursar.wire.kinds.job import plan_of
from support.commands.records import GPU, TEST, Records, code, key_of, refusal, written

JOB = Key("Job", "lab", "train")


def lab(**job: Any) -> tuple[Records, Result]:
    """A tenant with eight GPUs, and a job that is created there."""
    records = Records()
    records.tenant("lab", limits={GPU: 8})
    records.namespace("lab", "lab")
    records.node("n1", gpu=8)
    gpus = job.pop("gpus", 1)
    template = {"spec": {"resources": {"requests": {GPU: str(gpus)}}}}
    body = {"metadata": {"name": "train", "namespace": "lab"}, "spec": {"template": template, **job}}
    return records, records.create("Job", body)


def step(records: Records) -> StepJob:
    """The next step of the controller."""
    job = records.objects[JOB]
    plan, progress = plan_of(spec_in(job.doc)), progress_in(job)
    names = {turn_name("train", turn): turn for turn in open_turns(progress)}
    there = [(one, turn) for name, turn in names.items() if (one := records.objects.get(key_of(name, "lab")))]
    members = [member(one.key.name, turn, one.fields["status.phase"], one.doc, one.status) for one, turn in there]
    coming = next_step(plan, progress, members, records.now)
    drafts, gang = member_drafts(job.key, job.uid, spec_in(job.doc), coming.create, joined=None)
    return StepJob(
        key=JOB, origin=TEST, expected=job.revision, step=coming, drafts=drafts, drafts_gang=gang, gang=group_of(job),
        members=tuple(member_key(JOB, turn) for turn in coming.release),
    )  # fmt: skip


def cancel(records: Records, **more: Any) -> CancelJobCommand:
    job = records.objects[JOB]
    members = tuple(member_key(JOB, turn) for turn in open_turns(progress_in(job)))
    return CancelJobCommand(
        key=JOB, origin=TEST, expected=job.revision, members=members, gang=group_of(job), tenant="lab", **more
    )


def test_a_job_and_its_first_allocations_are_made_together() -> None:
    records, reply = lab(parallelism=2, completions=4)
    assert written(reply).key == JOB
    assert {one.name for one in records.objects if one.kind == "Allocation"} == {"train-0", "train-1"}
    assert records.used("tenant:lab") == (2, 0)


def test_without_capacity_for_all_of_them_nothing_is_made() -> None:
    records, reply = lab(gpus=3, parallelism=3, completions=9)
    assert refusal(reply).code == Code.QUOTA_EXCEEDED
    assert refusal(reply).message == (
        'job rejected: tenant "lab" would exceed nvidia.com/gpu quota (current: 0, requested: 9, limit: 8)'
    )
    assert not [one for one in records.objects if one.kind in ("Job", "Allocation")]
    assert records.used("tenant:lab") == (0, 0)


def test_what_ended_is_counted_and_the_next_is_made() -> None:
    records, _ = lab(parallelism=1, completions=2)
    records.bind({"train-0": ["n1"]}, "lab")
    records.report("train-0", Phase.SUCCEEDED, "lab")
    assert code(records.decide(step(records))) == "ok"
    status = records.status_of(JOB)
    assert (status["succeeded"], status["active"], status["startedIndexes"]) == (1, 1, 2)
    assert key_of("train-1", "lab") in records.objects
    records.bind({"train-1": ["n1"]}, "lab")
    records.report("train-1", Phase.SUCCEEDED, "lab")
    records.decide(step(records))
    assert records.status_of(JOB)["phase"] == "Succeeded"


def test_of_two_controllers_the_second_is_refused() -> None:
    records, _ = lab(parallelism=1, completions=2)
    records.bind({"train-0": ["n1"]}, "lab")
    records.report("train-0", Phase.SUCCEEDED, "lab")
    first, second = step(records), step(records)
    assert code(records.decide(first)) == "ok"
    assert refusal(records.decide(second)).code == Code.CONFLICT


def test_an_allocation_that_finds_no_capacity_is_noted_on_the_job_and_made_later() -> None:
    records, _ = lab(gpus=4, parallelism=1, completions=2)
    records.bind({"train-0": ["n1"]}, "lab")
    records.report("train-0", Phase.SUCCEEDED, "lab")
    records.allocation("other", "lab", gpu=6)
    assert code(records.decide(step(records))) == "ok"
    assert key_of("train-1", "lab") not in records.objects
    (blocked,) = (one for one in records.status_of(JOB)["conditions"] if one["type"] == "Blocked")
    assert (blocked["status"], blocked["reason"]) == ("True", "QuotaExceeded")
    records.delete(key_of("other", "lab"))
    records.decide(step(records))
    assert key_of("train-1", "lab") in records.objects
    (blocked,) = (one for one in records.status_of(JOB)["conditions"] if one["type"] == "Blocked")
    assert blocked["status"] == "False"


def test_a_job_that_is_done_with_stays_when_a_step_says_nothing() -> None:
    records, _ = lab(parallelism=1)
    job = records.objects[JOB]
    nothing = StepJob(key=JOB, origin=TEST, expected=job.revision, step=JobStep(progress_in(job)))
    assert isinstance(records.decide(nothing), Written)


def test_cancelling_what_is_pending_ends_it_at_once() -> None:
    records, _ = lab(parallelism=2)
    assert code(records.decide(cancel(records, reason="enough"))) == "ok"
    status = records.status_of(JOB)
    assert (status["phase"], status["cancellationReason"], status["active"]) == ("Cancelled", "enough", 0)
    assert isinstance(records.decide(cancel(records)), Written), "again is no change"
    assert not [one for one in records.objects if one.kind == "Allocation"]
    assert records.used("tenant:lab") == (0, 0)


def test_cancelling_what_runs_waits_for_its_end() -> None:
    records, _ = lab(parallelism=2)
    records.bind({"train-0": ["n1"]}, "lab")
    records.decide(cancel(records))
    assert (records.status_of(JOB)["phase"], records.status_of(JOB)["active"]) == ("Cancelling", 1)
    assert records.status("train-0", "lab")["phase"] == "Terminating"
    records.report("train-0", Phase.CANCELLED, "lab")
    records.decide(step(records))
    assert records.status_of(JOB)["phase"] == "Cancelled"


@pytest.mark.parametrize(
    ("change", "expected"), [({"expected": 1}, Code.CONFLICT), ({"tenant": "other"}, Code.NOT_FOUND)]
)
def test_what_refuses_to_cancel_a_job(change: dict[str, Any], expected: Code) -> None:
    records, _ = lab(parallelism=2)
    assert refusal(records.decide(replace(cancel(records), **change))).code == expected
    assert records.status_of(JOB)["phase"] == "Queued"


def test_what_has_ended_is_neither_cancelled_nor_boosted() -> None:
    records, _ = lab(parallelism=1)
    records.bind({"train-0": ["n1"]}, "lab")
    records.report("train-0", Phase.SUCCEEDED, "lab")
    records.decide(step(records))
    assert refusal(records.decide(cancel(records))).code == Code.ENDED
    assert records.status_of(JOB)["phase"] == "Succeeded"
    boost = BoostJobCommand(
        key=JOB, origin=TEST, expected=records.objects[JOB].revision, tenant="lab", boost={"priority": 9}
    )
    assert refusal(records.decide(boost)).code == Code.ENDED


def test_an_allocation_of_the_same_name_that_is_not_the_jobs_is_left_alone() -> None:
    records, _ = lab(parallelism=1)
    records.delete(key_of("train-0", "lab"))
    records.allocation("train-0", "lab", gpu=1)
    before = records.objects[key_of("train-0", "lab")]
    records.decide(cancel(records))
    assert records.objects[key_of("train-0", "lab")] == before
    assert msgspec.json.decode(before.doc)["metadata"].get("ownerReferences") is None
