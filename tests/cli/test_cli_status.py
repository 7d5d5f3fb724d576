"""`bursar status`: how work stands, in words."""

from typing import Any

import pytest
from click.testing import CliRunner

from bursar.cli.main import cli
from bursar.cli.workloads.status import details, words

HEADROOM = "waiting for quota headroom: tenant physics has 2 of 2 nodes bound, 1 asked"


def work(kind: str = "Allocation", spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    metadata = {"namespace": "lab", "name": "train", "creationTimestamp": "2024-01-15T10:00:00Z"}
    return {"kind": kind, "metadata": metadata, "spec": spec or {}, "status": status}


@pytest.mark.parametrize(
    ("document", "line"),
    [
        pytest.param(work(), "pending: the scheduler has not tried it yet", id="not tried"),
        pytest.param(work(phase="Pending", reason="quota_exceeded", message=HEADROOM), HEADROOM, id="quota"),
        pytest.param(work(phase="Pending", message="no node is free"), "pending: no node is free", id="waits"),
        pytest.param(
            work(
                phase="Pending",
                reason="Drained",
                message="Node n1 is being drained",
                conditions=[{"type": "Scheduled", "status": "False", "reason": "NoRoom", "message": "no GPU is free"}],
            ),
            "pending: no GPU is free; stopped earlier: Node n1 is being drained",
            id="the current reason comes first",
        ),
        pytest.param(work(phase="Running", nodes=[{"name": "n1"}, {"name": "n2"}]), "runs on n1, n2", id="runs"),
        pytest.param(
            work(phase="Running", nodes=[{"name": "n1"}], reason="SpendRateExceeded", message="it stands still"),
            "runs on n1; it stands still",
            id="runs, and there is something to say of it",
        ),
        pytest.param(
            work(
                phase="Running",
                nodes=[{"name": "n1"}],
                restarts=1,
                lastRestart={"reason": "Preempted", "time": "2024-01-15T12:53:07Z"},
            ),
            "runs on n1; restarts: 1 (preempted at 12:53)",
            id="runs again",
        ),
        pytest.param(
            work("Job", phase="Running", failed=1, nextRetryTime="2024-01-15T12:53:07Z"),
            "0 of 1 done, 0 active, 1 failed; retries now",
            id="a job that pauses",
        ),
        pytest.param(
            work(
                phase="Running",
                nodes=[
                    {"name": "n1", "unpaid": "daily_cap_exceeded", "paidUntil": "2024-01-15T12:53:07Z"},
                    {"name": "n2", "unpaid": "insufficient_credit", "paidUntil": "2024-01-15T12:53:06Z"},
                    {"name": "n3"},
                ],
                reason="OutOfCredit",
                message="out of credit: ends at 2024-01-15T12:53:06Z unless topped up",
            ),
            "runs on n1, n2, n3; out of credit: ends now unless topped up",
            id="runs without credit",
        ),
        pytest.param(work(phase="Scheduled", nodes=[{"name": "n1"}]), "starts on n1", id="starts"),
        pytest.param(
            work(phase="Terminating", eviction={"message": "Preempted by lab/urgent"}),
            "is being stopped: Preempted by lab/urgent",
            id="stops",
        ),
        pytest.param(work(phase="Succeeded"), "succeeded", id="succeeded"),
        pytest.param(work(phase="Failed", exitCode=3), "exit code 3", id="failed"),
        pytest.param(
            work(phase="Failed", exitCode=3, startTime="2024-01-15T10:00:00Z", endTime="2024-01-15T10:02:05Z"),
            "exit code 3; ran 2m5s",
            id="failed after a while",
        ),
        pytest.param(work("Job", phase="Queued", active=2), "0 of 1 done, 2 pending", id="a job that waits"),
        pytest.param(
            work("Job", {"completions": 2}, phase="Succeeded", succeeded=2, failed=1),
            "2 of 2 done, 1 failed",
            id="a job that is done",
        ),
        pytest.param(work(phase="Failed", message="several\n  lines"), "several lines", id="one line"),
        pytest.param(
            work("Job", {"completions": 8, "parallelism": 3}, phase="Running", active=3, succeeded=2, failed=1),
            "2 of 8 done, 3 active, 1 failed",
            id="a job",
        ),
        pytest.param(
            work(
                "Job",
                {"parallelism": 4},
                phase="Running",
                active=1,
                conditions=[{"type": "Blocked", "status": "True", "message": "allocation rejected: tenant…\n  more"}],
            ),
            "0 of 4 done, 1 active; allocation rejected: tenant… more",
            id="a job whose next allocations are refused",
        ),
    ],
)
def test_how_work_stands_in_one_line(document: dict[str, Any], line: str) -> None:
    assert words(document) == line


def test_one_piece_of_work_in_a_few_lines() -> None:
    lines = list(details(work(phase="Pending", reason="quota_exceeded", message=HEADROOM, user="physics/ann")))
    assert lines[:4] == [
        "lab/train is Pending",
        f"  detail   {HEADROOM}",
        "  reason   quota_exceeded",
        "  user     physics/ann",
    ]
    assert lines[-1] == "  more     bursar explain train -n lab"


def test_of_what_is_over_it_is_told_when_and_where_to_read_on() -> None:
    lines = list(details(work(phase="Succeeded", startTime="2024-01-15T10:00:01Z", endTime="2024-01-15T10:00:21Z")))
    assert lines[1] == "  detail   succeeded; ran 20s"
    assert [line.split()[0] for line in lines[2:5]] == ["created", "started", "ended"]
    assert lines[-1] == "  more     bursar logs train -n lab"
    waiting = list(details(work("Job", phase="Queued")))
    assert (waiting[0], waiting[-1]) == ("job lab/train is Queued", "  more     bursar explain job/train -n lab")


@pytest.mark.parametrize(
    "line", ["train --everybody", "train --user ann", "train --ended", "--user ann --everybody", "node/n1"]
)
def test_what_does_not_go_together_is_refused(line: str) -> None:
    environment = {"BURSAR_URL": "http://127.0.0.1:1", "BURSAR_TOKEN": "x", "BURSAR_CONFIG": "/nonexistent/c.yaml"}
    done = CliRunner(env=environment).invoke(cli, ["status", *line.split()])
    assert done.exit_code == 2, done.output
