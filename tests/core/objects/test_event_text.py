"""Lines of the audit log as Kubernetes events."""

from dataclasses import replace

import pytest

from bursar.core.objects.event_text import EventText, ObjectState, RequestEvent, request_why, step_why, tell
from bursar.core.objects.job import JobPhase, JobProgress


@pytest.mark.parametrize(
    ("verb", "after", "told"),
    [
        ("bind", ObjectState("Scheduled", ("n1",)), EventText("Scheduled", False, "placed on n1")),
        ("bind", ObjectState("Scheduled", ("n3", "n4")), EventText("Scheduled", False, "placed on 2 nodes: n3, n4")),
        (
            "note",
            ObjectState("Pending", message="Node n2 is being drained", waits_for="no GPU is free"),
            EventText("FailedScheduling", True, "no GPU is free"),
        ),
        ("note", ObjectState("Pending"), EventText("FailedScheduling", True, "cannot be placed now")),
        (
            "note",
            ObjectState("Pending", message="no GPU is free"),
            EventText("FailedScheduling", True, "no GPU is free"),
        ),
        ("report", ObjectState("Running", ("n1",)), EventText("Started", False, "started on n1")),
        ("refuse", ObjectState("Running", ("n1",), "out of credit"), EventText("OutOfCredit", True, "out of credit")),
        ("grant", ObjectState("Running", ("n1",)), EventText("CreditRestored", False, "its lease is extended again")),
        ("report", ObjectState("Succeeded", ("n1",), exit_code=0), EventText("Succeeded", False, "succeeded on n1")),
        ("report", ObjectState("Failed", ("n1",), exit_code=2), EventText("Failed", True, "exit code 2")),
        ("report", ObjectState("Failed", ("n1",), "out of memory", 137), EventText("Failed", True, "out of memory")),
        ("end", ObjectState("Cancelled"), EventText("Cancelled", False, "cancelled")),
        (
            "report",
            ObjectState("Pending", message="Preempted"),
            EventText("Requeued", False, "pending again: Preempted"),
        ),
        (
            "preempt",
            ObjectState("Terminating", ("n1",), "Preempted by a/b"),
            EventText("Preempted", True, "Preempted by a/b"),
        ),
        (
            "drain",
            ObjectState("Terminating", ("n1",), "Node n1 is drained"),
            EventText("Drained", True, "Node n1 is drained"),
        ),
        ("update", ObjectState("Pending"), EventText("Changed", False, "update by user:ann: typo")),
        ("step", ObjectState("Terminating", ("n1",)), EventText("Stopping", False, "is being stopped by its job")),
        ("step", None, EventText("Changed", False, "step by user:ann: typo")),
    ],
)
def test_changes_have_the_words_of_kubernetes(verb: str, after: ObjectState | None, told: EventText) -> None:
    assert tell("MODIFIED", verb, "user:ann", "typo", after) == told


@pytest.mark.parametrize(("type_", "reason"), [("ADDED", "Created"), ("DELETED", "Deleted")])
def test_what_came_and_went_says_who_did_it(type_: str, reason: str) -> None:
    assert tell(type_, "create", "user:ann", "", ObjectState("Pending")) == EventText(
        reason, False, "create by user:ann"
    )


BEGUN = JobProgress(JobPhase.RUNNING, started=4, active=4)
ENDED_BADLY = replace(BEGUN, phase=JobPhase.FAILED, reason="BackoffLimitExceeded", message="1 allocation failed")


@pytest.mark.parametrize(
    ("after", "made", "blocked", "told"),
    [
        (BEGUN, ["t-0"], "", EventText("SuccessfulCreate", False, "created allocation t-0")),
        (BEGUN, ["t-0", "t-1"], "", EventText("SuccessfulCreate", False, "created 2 allocations: t-0, t-1")),
        (BEGUN, ["t-0"], "over\nquota", EventText("FailedCreate", True, "over quota")),
        (replace(BEGUN, phase=JobPhase.SUCCEEDED), [], "", EventText("Completed", False, "job completed")),
        (ENDED_BADLY, [], "", EventText("BackoffLimitExceeded", True, "1 allocation failed")),
        (
            replace(ENDED_BADLY, reason="DeadlineExceeded", message="ran too long"),
            [],
            "",
            EventText("DeadlineExceeded", True, "ran too long"),
        ),
        (replace(BEGUN, phase=JobPhase.CANCELLED), [], "", EventText("Cancelled", False, "job cancelled")),
        (
            replace(BEGUN, failures={1: 1}, message="t-1: exit code 5 on n1"),
            [],
            "",
            EventText("AllocationFailed", True, "t-1: exit code 5 on n1"),
        ),
        (
            replace(BEGUN, completed=frozenset({0}), active=3),
            [],
            "",
            EventText("Progressed", False, "1 succeeded, 3 active"),
        ),
        (BEGUN, [], "", EventText("Changed", False, "step by system:jobs")),
    ],
)
def test_a_step_of_a_job_has_the_words_of_kubernetes(
    after: JobProgress, made: list[str], blocked: str, told: EventText
) -> None:
    assert tell("MODIFIED", "step", "system:jobs", step_why(BEGUN, after, made, blocked)) == told


def test_a_job_starts_with_its_first_allocation() -> None:
    why = step_why(JobProgress(started=4, active=4), BEGUN, [])
    assert tell("MODIFIED", "step", "system:jobs", why) == EventText("Started", False, "the first allocation runs")


@pytest.mark.parametrize(
    ("type_", "verb", "why", "told"),
    [
        (
            "ADDED",
            "create",
            "AwaitingApproval: awaiting approval at gate quota",
            EventText("AwaitingApproval", False, "awaiting approval at gate quota"),
        ),
        ("MODIFIED", "approve", "Approved: by ann", EventText("Approved", False, "by ann")),
        ("MODIFIED", "note", "ApprovalNoted: by ann", EventText("ApprovalNoted", False, "by ann")),
        ("MODIFIED", "deny", "Denied: by ann", EventText("Denied", True, "by ann")),
        ("MODIFIED", "expire", "ApprovalExpired: undecided", EventText("ApprovalExpired", True, "undecided")),
        ("MODIFIED", "expire", "ApprovalEnding: soon", EventText("ApprovalEnding", False, "soon")),
        ("DELETED", "expire", "ApprovalEnded: over", EventText("ApprovalEnded", True, "over")),
        # A user's own words name no event.
        ("MODIFIED", "cancel", "Approved: by ann", EventText("Changed", False, "cancel by user:ben: Approved: by ann")),
    ],
)
def test_what_became_of_a_request_has_reasons_of_its_own(type_: str, verb: str, why: str, told: EventText) -> None:
    assert tell(type_, verb, "user:ben", why, ObjectState("Pending")) == told


def test_the_reason_of_a_decision_is_one_line() -> None:
    assert request_why(RequestEvent.DENIED, "by ann:\ntoo  much") == "Denied: by ann: too much"
