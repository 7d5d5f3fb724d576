"""Lines of the audit log as Kubernetes events."""

from dataclasses import replace

import pytest

from bursar.core.objects.event_text import Standing, Told, step_why, tell
from bursar.core.objects.job import JobPhase, Progress


@pytest.mark.parametrize(
    ("verb", "after", "told"),
    [
        ("bind", Standing("Scheduled", ("n1",)), Told("Scheduled", False, "placed on n1")),
        ("bind", Standing("Scheduled", ("n3", "n4")), Told("Scheduled", False, "placed on 2 nodes: n3, n4")),
        (
            "note",
            Standing("Pending", message="Node n2 is being drained", waits_for="no GPU is free"),
            Told("FailedScheduling", True, "no GPU is free"),
        ),
        ("note", Standing("Pending", message="no GPU is free"), Told("FailedScheduling", True, "no GPU is free")),
        ("report", Standing("Running", ("n1",)), Told("Started", False, "started on n1")),
        ("refuse", Standing("Running", ("n1",), "out of credit"), Told("OutOfCredit", True, "out of credit")),
        ("grant", Standing("Running", ("n1",)), Told("CreditRestored", False, "its time is paid for again")),
        ("report", Standing("Succeeded", ("n1",), exit_code=0), Told("Succeeded", False, "succeeded on n1")),
        ("report", Standing("Failed", ("n1",), exit_code=2), Told("Failed", True, "exit code 2")),
        ("report", Standing("Failed", ("n1",), "out of memory", 137), Told("Failed", True, "out of memory")),
        ("end", Standing("Cancelled"), Told("Cancelled", False, "cancelled")),
        ("report", Standing("Pending", message="Preempted"), Told("Requeued", False, "pending again: Preempted")),
        ("preempt", Standing("Terminating", ("n1",), "Preempted by a/b"), Told("Preempted", True, "Preempted by a/b")),
        ("drain", Standing("Terminating", ("n1",), "Node n1 is drained"), Told("Drained", True, "Node n1 is drained")),
        ("update", Standing("Pending"), Told("Changed", False, "update by user:ann: typo")),
        ("step", Standing("Terminating", ("n1",)), Told("Stopping", False, "is being stopped by its job")),
        ("step", None, Told("Changed", False, "step by user:ann: typo")),
    ],
)
def test_changes_have_the_words_of_kubernetes(verb: str, after: Standing | None, told: Told) -> None:
    assert tell("MODIFIED", verb, "user:ann", "typo", after) == told


@pytest.mark.parametrize(("type_", "reason"), [("ADDED", "Created"), ("DELETED", "Deleted")])
def test_what_came_and_went_says_who_did_it(type_: str, reason: str) -> None:
    assert tell(type_, "create", "user:ann", "", Standing("Pending")) == Told(reason, False, "create by user:ann")


BEGUN = Progress(JobPhase.RUNNING, started=4, active=4)
ENDED_BADLY = replace(BEGUN, phase=JobPhase.FAILED, reason="BackoffLimitExceeded", message="1 allocation failed")


@pytest.mark.parametrize(
    ("after", "made", "blocked", "told"),
    [
        (BEGUN, ["t-0"], "", Told("SuccessfulCreate", False, "created allocation t-0")),
        (BEGUN, ["t-0", "t-1"], "", Told("SuccessfulCreate", False, "created 2 allocations: t-0, t-1")),
        (BEGUN, ["t-0"], "over\nquota", Told("FailedCreate", True, "over quota")),
        (replace(BEGUN, phase=JobPhase.SUCCEEDED), [], "", Told("Completed", False, "job completed")),
        (ENDED_BADLY, [], "", Told("BackoffLimitExceeded", True, "1 allocation failed")),
        (
            replace(ENDED_BADLY, reason="DeadlineExceeded", message="ran too long"),
            [],
            "",
            Told("DeadlineExceeded", True, "ran too long"),
        ),
        (replace(BEGUN, phase=JobPhase.CANCELLED), [], "", Told("Cancelled", False, "job cancelled")),
        (
            replace(BEGUN, failures={1: 1}, message="t-1: exit code 5 on n1"),
            [],
            "",
            Told("AllocationFailed", True, "t-1: exit code 5 on n1"),
        ),
        (
            replace(BEGUN, completed=frozenset({0}), active=3),
            [],
            "",
            Told("Progressed", False, "1 succeeded, 3 active"),
        ),
        (BEGUN, [], "", Told("Changed", False, "step by system:jobs")),
    ],
)
def test_a_step_of_a_job_has_the_words_of_kubernetes(
    after: Progress, made: list[str], blocked: str, told: Told
) -> None:
    assert tell("MODIFIED", "step", "system:jobs", step_why(BEGUN, after, made, blocked)) == told


def test_a_job_starts_with_its_first_allocation() -> None:
    why = step_why(Progress(started=4, active=4), BEGUN, [])
    assert tell("MODIFIED", "step", "system:jobs", why) == Told("Started", False, "the first allocation runs")
