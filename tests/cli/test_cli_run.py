"""`bursar run` and `bursar logs` where nothing can run yet: what is submitted, told and released."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from bursar.cli.shell.interrupt import Interrupted, InterruptTrap
from bursar.cli.workloads import run_output
from bursar.cli.workloads.log_follow import LineSink
from bursar.cli.workloads.run import spec_of
from bursar.cli.workloads.run_flags import in_flags, with_flags
from bursar.cli.workloads.run_output import JsonOutput, QuietOutput, TerminalOutput, status_line
from bursar.client import NotFound, Resource
from bursar.client.errors import Invalid
from bursar.core.values.refusal import field_fault
from support.process.server import Server

SECONDS_MAX = 30


@pytest.fixture
def namespace(empty_server: Server) -> str:
    name = f"r-{uuid.uuid4().hex[:12]}"
    with empty_server.client() as admin:
        admin.tenants.create({"metadata": {"name": name}, "spec": {}})
        admin.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    return name


@pytest.fixture
def allocations(empty_server: Server, namespace: str) -> Iterator[Resource]:
    with empty_server.client() as admin:
        yield admin.allocations(namespace)


def bursar(server: Server, *words: str, code: int = 0) -> Result:
    environment = {name: value for name, value in server.environment.items() if name.startswith("BURSAR_")}
    result = CliRunner(env=environment).invoke(cli, list(words))
    assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


@contextmanager
def running(server: Server, *words: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bursar.cli", *words]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    with subprocess.Popen(command, text=True, env=server.environment, **given) as process:
        try:
            yield process
        finally:
            process.kill()


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


# What is submitted.


def test_what_is_given_is_submitted(empty_server: Server, namespace: str, allocations: Resource) -> None:
    words = (
        "--gpus 2 --cpus 4 --mem 16Gi --nodes 2 --name train --env A=1 --env B=x=y --workdir /data --ttl 2h --detach"
    )
    shown = bursar(empty_server, "run", "-n", namespace, *words.split(), "--", "python", "train.py", "--gpus", "9")
    assert shown.stdout == "allocation/train\n"
    spec = allocations.get("train")["spec"]
    assert spec["resources"]["requests"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"}
    assert spec["resources"]["limits"] == {"memory": "16Gi"}
    assert spec["command"] == ["python", "train.py", "--gpus", "9"]
    assert spec["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "x=y"}]
    assert (spec["nodes"], spec["workingDir"], spec["ttl"]) == (2, "/data", "2h")


def test_little_is_asked_for_where_nothing_is_said() -> None:
    nothing: dict[str, Any] = {"gpus": None, "cpus": "1", "mem": "", "nodes": None, "env": {}, "workdir": ""}
    spec = spec_of(["true"], **nothing, priority_class="", queue="", ttl="")
    assert spec == {"resources": {"requests": {"cpu": "1"}}, "command": ["true"]}


def test_a_name_is_made_up_after_the_program(empty_server: Server, namespace: str) -> None:
    made = []
    for program in ("/opt/My Tool.sh", "***", "***"):
        shown = bursar(empty_server, "run", "-n", namespace, "--detach", "--", program)
        made.append(shown.stdout.strip().removeprefix("allocation/"))
    assert [name.rpartition("-")[0] for name in made] == ["my-tool", "run", "run"]
    assert len({*made}) == 3


def test_the_command_needs_no_dashes_before_it(empty_server: Server, namespace: str, allocations: Resource) -> None:
    bursar(empty_server, "run", "-n", namespace, "--detach", "--name", "a", "sh", "-c", "exit 3", "--name", "b")
    assert allocations.get("a")["spec"]["command"] == ["sh", "-c", "exit 3", "--name", "b"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--env", "A", "--", "true"], 2, "must be NAME=VALUE"),
        ([], 2, "Missing argument"),
        (["--workdir", "here", "--", "true"], 1, "Error: --workdir: must be an absolute path"),
        (["--env", "1A=x", "--", "true"], 1, "not the name of a variable"),
        (
            ["--mem", "lots", "--", "true"],
            2,
            "lots is not a size; use a number with a unit, such as 500Mi",
        ),
        (["--mem", "20GB", "--", "true"], 2, "'--mem': 20GB is not a size; use 20G or 20Gi"),
        (["--cpus", "many", "--", "true"], 1, 'Error: --cpus: quantity "many" must'),
        (["--ttl", "soon", "--", "true"], 1, 'Error: --ttl: duration "soon" must'),
        (["--mem", "20", "--", "true"], 2, "20 is 20 bytes, too little for any command; did you mean 20Gi?"),
        (["--name", "A_b", "--", "true"], 1, "name"),
    ],
)
def test_what_cannot_be_meant_is_said(
    empty_server: Server, namespace: str, words: list[str], code: int, says: str
) -> None:
    shown = bursar(empty_server, "run", "-n", namespace, *words, code=code)
    assert says in shown.stderr


def test_a_name_that_is_taken_is_left_alone(empty_server: Server, namespace: str, allocations: Resource) -> None:
    bursar(empty_server, "run", "-n", namespace, "--detach", "--name", "a", "--", "true")
    before = allocations.get("a")["metadata"]["uid"]
    assert "already exists" in bursar(empty_server, "run", "-n", namespace, "--name", "a", "--", "x", code=5).stderr
    assert allocations.get("a")["metadata"]["uid"] == before


# While it waits.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_it_releases_it(
    empty_server: Server, namespace: str, allocations: Resource, number: signal.Signals
) -> None:
    with running(empty_server, "run", "-n", namespace, "--json", "--name", "a", "--", "true") as process:
        seen = events(process)
        assert next(seen)["event"] == "submitted"
        assert next(seen)["phase"] == "Pending"
        process.send_signal(number)
        rest = list(seen)
        assert process.wait(SECONDS_MAX) == 128 + number
    assert any("releasing a" in one.get("message", "") for one in rest)
    assert (rest[-1]["event"], rest[-1]["phase"], rest[-1]["exitCode"]) == ("ended", "Cancelled", 128 + number)
    with pytest.raises(NotFound):
        allocations.get("a")


def test_what_is_kept_goes_on(empty_server: Server, namespace: str, allocations: Resource) -> None:
    with running(empty_server, "run", "-n", namespace, "--json", "--keep", "--name", "a", "--", "true") as process:
        seen = events(process)
        assert next(seen)["event"] == "submitted"
        assert next(seen)["phase"] == "Pending"
        process.send_signal(signal.SIGINT)
        assert "a continues" in list(seen)[-1]["message"]
        assert process.wait(SECONDS_MAX) == 130
    assert allocations.get("a")["status"]["phase"] == "Pending"


def test_what_another_deletes_has_ended(empty_server: Server, namespace: str, allocations: Resource) -> None:
    with running(empty_server, "run", "-n", namespace, "--name", "a", "--", "true") as process:
        end = time.monotonic() + SECONDS_MAX
        while not list(allocations.list()):
            assert time.monotonic() < end
        allocations.delete("a")
        said, complained = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, said) == (1, "")
    assert complained.startswith("bursar: a cancelled: ")


def test_a_terminal_is_told_why_it_waits(empty_server: Server, namespace: str, allocations: Resource) -> None:
    here, there = pty.openpty()
    try:
        words = ("run", "-n", namespace, "--name", "a", "--gpus", "1", "--", "true")
        with running(empty_server, *words, stderr=there) as process, os.fdopen(os.dup(here)) as terminal:
            assert terminal.readline().strip() == f"bursar: {namespace}/a submitted"
            assert terminal.readline().startswith("bursar: a pending: ")
            allocations.delete("a")
            assert process.wait(SECONDS_MAX) == 1
    finally:
        os.close(here)
        os.close(there)


def test_logs_of_what_waits_say_why(empty_server: Server, namespace: str) -> None:
    bursar(empty_server, "run", "-n", namespace, "--detach", "--name", "a", "--", "true")
    for words in (["a"], ["-f", "allocation/a"]):
        shown = bursar(empty_server, "logs", "-n", namespace, *words, code=5)
        assert "a waits, and has written nothing yet: " in shown.stderr
    assert "not found" in bursar(empty_server, "logs", "-n", namespace, "nothing", code=3).stderr
    assert "needs --node" in bursar(empty_server, "logs", "-n", namespace, "--epoch", "1", "a", code=2).stderr


# How it is told.


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "pending: the scheduler has not tried it yet"),
        (
            {"message": "no room", "queuePosition": 3, "estimatedStartTime": "2024-01-15T10:30:00Z"},
            "pending: no room; queue position 3; starts now",
        ),
        (
            {
                "reason": "awaiting_approval",
                "message": "awaiting approval at gate quota",
                "conditions": [
                    {"type": "Scheduled", "status": "False", "reason": "Unscheduled", "message": "Waiting"},
                ],
            },
            "awaiting approval at gate quota",
        ),
        ({"phase": "Scheduled", "nodes": [{"name": "n1"}, {"name": "n2"}]}, "starts on n1, n2"),
        ({"phase": "Running", "nodes": [{"name": "n1"}]}, "runs on n1"),
        ({"phase": "Terminating", "eviction": {"message": "made way"}}, "is being stopped: made way"),
        ({"phase": "Terminating"}, "is being stopped"),
        ({"phase": "Cancelled"}, "cancelled"),
    ],
)
def test_how_it_stands_in_one_line(status: dict[str, Any], said: str) -> None:
    assert status_line(status) == said


def test_an_estimate_that_only_comes_nearer_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, status = TerminalOutput(), {"message": "no room", "estimatedStartTime": "2024-01-15T10:30:00Z"}
    for minutes in (10, 9):
        monkeypatch.setattr(run_output, "due", f"in about {minutes} min {{}}".format)
        words.update("a", status)
    assert capsys.readouterr().err == "bursar: a pending: no room; starts in about 10 min 2024-01-15T10:30:00Z\n"
    words.update("a", {**status, "estimatedStartTime": "2024-01-15T10:40:00Z"})
    assert "10:40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("spec.resources.requests[nvidia.com/gpu]", "--gpus"),
        ("spec.resources.limits[memory]", "--mem"),
        ("spec.env[0].name", "--env"),
        ("spec.nodes", "--nodes"),
        ("spec.nodeSelector", "spec.nodeSelector"),
        ("metadata.name", "--name"),
    ],
)
def test_fields_are_told_as_the_options_that_wrote_them(field: str, flag: str) -> None:
    assert in_flags(f"{field}: is wrong ({field})") == f"{flag}: is wrong ({flag})"


def test_a_fault_that_two_fields_share_is_told_once() -> None:
    paths = [f"spec.resources.{part}[memory]" for part in ("requests", "limits")]
    causes = tuple(field_fault(path, "is too large") for path in paths)
    error = Invalid("a is invalid: " + "; ".join(paths), code="invalid", hint="See spec.nodes.", causes=causes)
    told = with_flags(error)
    assert (told.message, told.hint, told.causes) == ("--mem: is too large", "See --nodes.", ())
    large = with_flags(Invalid("16 requested", code="unsatisfiable", hint="Over several nodes (spec.nodes)."))
    assert (large.message, large.hint) == ("16 requested", "Over several nodes (--nodes).")


def test_lines_of_several_nodes_are_kept_apart() -> None:
    out = io.BytesIO()
    lines = LineSink(named=True, out=out)
    lines("n1", b"one\nha")
    lines("n2", b"other\n\n")
    lines("n1", b"lf\nrest")
    lines.finish()
    assert out.getvalue() == b"[n1] one\n[n2] other\n[n2] \n[n1] half\n[n1] rest\n"
    plain = LineSink(named=False, out=(out := io.BytesIO()))
    plain("n1", b"no end \xff")
    plain.finish()
    assert out.getvalue() == b"no end \xff"


def test_events_keep_characters_whole(capsys: pytest.CaptureFixture[str]) -> None:
    told = JsonOutput()
    sink = told.sink(named=False)
    sink("n1", "ü".encode()[:1])
    sink("n2", b"x")
    sink("n1", "ü".encode()[1:] + b"\xff\xe2")
    told.finish()
    texts = [(one["node"], one["text"]) for one in map(json.loads, capsys.readouterr().out.splitlines())]
    assert texts == [("n2", "x"), ("n1", "ü\N{REPLACEMENT CHARACTER}"), ("n1", "\N{REPLACEMENT CHARACTER}")]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"phase": "Succeeded", "exitCode": 0, "message": "fine"}, ""),
        ({"phase": "Failed", "exitCode": 3}, ""),
        ({"phase": "Failed", "exitCode": 3, "nodes": [{"name": "n1"}], "message": "exit code 3 on n1"}, ""),
        (
            {"phase": "Failed", "exitCode": 0, "nodes": [{"name": "n1"}], "message": "b failed: exit code 5 on n2"},
            "bursar: a failed: b failed: exit code 5 on n2\n",
        ),
        ({"phase": "Failed", "reason": "NodeLost"}, "bursar: a failed: NodeLost\n"),
        ({"phase": "Failed", "exitCode": 143, "message": "made way"}, "bursar: a failed: made way\n"),
    ],
)
def test_only_what_explains_is_said(status: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    QuietOutput().ended("a", status, 1)
    assert capsys.readouterr().err == said


def test_a_signal_waits_until_it_can_be_heeded() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with InterruptTrap() as trap:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as heard:
            trap.release()
        assert heard.value.number == signal.SIGTERM
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    with InterruptTrap():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
