"""How trouble is told, and with which exit code."""

import subprocess
import sys

import pytest

from bursar.cli.shell.problem import Problem, exit_code, rendered, report
from bursar.client import errors
from bursar.core.values.refusal import Cause


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Invalid("x"), 1),
        (errors.Gone("x"), 1),
        (errors.ApiError("x", status=500), 1),
        (errors.ConfigError("x"), 1),
        (errors.NotFound("x"), 3),
        (errors.Unauthorized("x"), 4),
        (errors.Forbidden("x"), 4),
        (errors.Conflict("x"), 5),
        (errors.QuotaExceeded("x", status=403), 6),
        (errors.QuotaExceeded("x", status=409), 6),
        (errors.RateLimited("x"), 7),
        (errors.Unavailable("x"), 7),
        (errors.ConnectionFailed("x"), 7),
    ],
)
def test_exit_codes(error: errors.BursarError, code: int) -> None:
    assert exit_code(error) == code


def test_the_message_then_the_hint_then_the_causes() -> None:
    causes = (
        Cause("FieldValueInvalid", "must be a quantity", field="spec.resources.requests[cpu]"),
        Cause("FieldValueInvalid", "spec.ttl must be a duration", field="spec.ttl"),
        Cause("QuotaExceeded", "the message", field="cpu"),
        Cause("FieldValueNotFound", "unknown field", field="spec.a"),
        Cause("FieldValueNotFound", "unknown field", field="spec.b"),
        Cause("QuotaExceeded", ""),
    )
    assert rendered("the message", "try less", causes) == (
        "Error: the message\n"
        "  hint: try less\n"
        "  - spec.resources.requests[cpu]: must be a quantity\n"
        "  - spec.ttl must be a duration\n"
        "  - spec.a: unknown field\n"
        "  - spec.b: unknown field"
    )


def test_a_cause_of_several_lines_stands_below_its_first() -> None:
    causes = (Cause("x", "rejected: max_nodes\n  Current usage: 3 nodes\n  New limit: 1 nodes"),)
    assert rendered("rejected: something else", "", causes) == (
        "Error: rejected: something else\n"
        "  - rejected: max_nodes\n"
        "      Current usage: 3 nodes\n"
        "      New limit: 1 nodes"
    )


def test_causes_that_the_message_names_are_not_named_again() -> None:
    causes = (Cause("x", "unknown field", field="spec.a"), Cause("x", "unknown field", field="spec.b"))
    message = "invalid: spec.a: unknown field; spec.b: unknown field"
    assert rendered(message, "", causes) == f"Error: {message}"


def test_a_hint_that_the_message_already_gives_is_not_given_twice() -> None:
    message = "rejected\n  Hint: Wait for running allocations to complete."
    assert rendered(message, "Wait for running allocations to complete.") == f"Error: {message}"


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (errors.Unauthorized("expired"), "bursar login"),
        (errors.RateLimited("slow down", retry_after=30), "  hint: try again in 30 s\n"),
        (errors.RateLimited("slow down", hint="Ask.", retry_after=30), "  hint: Ask; try again in 30 s\n"),
        (errors.ApiError("internal error", status=500, request_id="abc"), "request id abc"),
        (errors.Unauthorized("expired", hint="ask alice"), "ask alice"),
    ],
)
def test_the_next_step_is_told(error: errors.BursarError, step: str, capsys: pytest.CaptureFixture[str]) -> None:
    report(error)
    assert step in capsys.readouterr().err


def test_our_own_problems_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(Problem("no such file", "look again", 3)) == 3
    assert capsys.readouterr().err == "Error: no such file\n  hint: look again\n"


def test_a_reader_that_left_is_no_error() -> None:
    """`bursar COMMAND | head -1`: quiet, with the exit code of a program that SIGPIPE ended."""
    command = [sys.executable, "-m", "bursar.cli", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
