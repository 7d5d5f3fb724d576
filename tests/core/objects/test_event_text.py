"""Lines of the audit log as Kubernetes events."""

import pytest

from bursar.core.objects.event_text import Standing, Told, tell


@pytest.mark.parametrize(
    ("verb", "after", "told"),
    [
        ("bind", Standing("Scheduled", "n1"), Told("Scheduled", False, "placed on n1")),
        ("note", Standing("Pending", message="no GPU is free"), Told("FailedScheduling", True, "no GPU is free")),
        ("report", Standing("Running", "n1"), Told("Started", False, "started on n1")),
        ("refuse", Standing("Running", "n1", "out of credit"), Told("OutOfCredit", True, "out of credit")),
        ("grant", Standing("Running", "n1"), Told("CreditRestored", False, "its time is paid for again")),
        ("report", Standing("Succeeded", "n1", exit_code=0), Told("Succeeded", False, "succeeded on n1")),
        ("report", Standing("Failed", "n1", exit_code=2), Told("Failed", True, "exit code 2")),
        ("report", Standing("Failed", "n1", "out of memory", 137), Told("Failed", True, "out of memory")),
        ("end", Standing("Cancelled"), Told("Cancelled", False, "cancelled")),
        ("report", Standing("Pending", message="Preempted"), Told("Requeued", False, "pending again: Preempted")),
        ("preempt", Standing("Terminating", "n1", "Preempted by a/b"), Told("Preempted", True, "Preempted by a/b")),
        ("drain", Standing("Terminating", "n1", "Node n1 is drained"), Told("Drained", True, "Node n1 is drained")),
        ("update", Standing("Pending"), Told("Changed", False, "update by user:ann: typo")),
        ("step", None, Told("Changed", False, "step by user:ann: typo")),
    ],
)
def test_changes_have_the_words_of_kubernetes(verb: str, after: Standing | None, told: Told) -> None:
    assert tell("MODIFIED", verb, "user:ann", "typo", after) == told


@pytest.mark.parametrize(("type_", "reason"), [("ADDED", "Created"), ("DELETED", "Deleted")])
def test_what_came_and_went_says_who_did_it(type_: str, reason: str) -> None:
    assert tell(type_, "create", "user:ann", "", Standing("Pending")) == Told(reason, False, "create by user:ann")
