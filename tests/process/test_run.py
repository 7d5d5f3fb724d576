"""`bursar run` and `bursar logs` with real agents: as if the command ran here, whichever process is killed
meanwhile."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from bursar.client import Client, Invalid
from bursar.config import Address, ServerSettings
from bursar.serve import _warn_of_agents
from bursar.store.db.database import connect
from bursar.store.nodes.heartbeat import load_agents
from support.api.site import eventually
from support.process.agents import Agent, await_phase, joined_agent, living, part, status_of, until
from support.process.server import BURSAR, OwnServer, migrated_directory, started

pytestmark = pytest.mark.timeout(240)

SECONDS_MAX = 60
ROOT = Path(__file__).resolve().parents[2]
APART = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "line"}}, "topologyKey": "kubernetes.io/hostname"}
    ]
}


@pytest.fixture(scope="module")
def context() -> Iterator[OwnServer]:
    """A server of its own, with two nodes and nothing else: parts of it are killed here."""
    with migrated_directory() as data, started(data) as running:
        yield running


@pytest.fixture(scope="module")
def client(context: OwnServer) -> Iterator[Client]:
    with context.client() as one:
        yield one


@pytest.fixture(scope="module")
def agents(context: OwnServer, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Agent]]:
    home = tmp_path_factory.mktemp("agents")
    with (
        joined_agent(context, client, "n1", home, "--fake-gpus", "2") as first,
        joined_agent(context, client, "n2", home, "--fake-gpus", "0") as second,
    ):
        for one in (first, second):
            until(lambda one=one: client.nodes.get(one.name)["status"].get("phase") == "Ready", "the nodes")  # type: ignore[misc]
        yield [first, second]


@pytest.fixture
def name() -> str:
    return f"r-{uuid.uuid4().hex[:8]}"


def bursar(server: OwnServer, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(BURSAR), *words]
    return subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=SECONDS_MAX)


@contextmanager
def running(server: OwnServer, *words: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([str(BURSAR), *words], env=server.environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(process.stdout.readline())


@pytest.mark.usefixtures("agents")
class TestOne:
    """Nodes that stay."""

    def test_it_is_as_if_it_ran_here(self, context: OwnServer, tmp_path: Path) -> None:
        script = "echo out; echo err >&2; echo $GREETING $PWD $CUDA_VISIBLE_DEVICES; printf 'no end'; exit 3"
        words = ["--gpus", "1", "--env", "GREETING=hello there", "--workdir", str(tmp_path)]
        done = bursar(context, "run", *words, "--", "sh", "-c", script)
        assert (done.returncode, done.stderr) == (3, "")
        first, second, third, last = done.stdout.splitlines()
        assert {first, second} == {"out", "err"}
        assert third.split()[:3] == ["hello", "there", str(tmp_path)]
        assert third.split()[3] in ("0", "1")
        assert last == "no end"

    def test_death_by_a_signal_is_told_as_a_shell_tells_it(self, context: OwnServer) -> None:
        done = bursar(context, "run", "--", "sh", "-c", "kill -KILL $$")
        assert done.returncode == 137

    def test_what_never_ran_says_why(self, context: OwnServer) -> None:
        done = bursar(context, "run", "--", "/nowhere/train")
        assert done.returncode == 127
        assert "was not found" in done.stderr

    def test_much_output_arrives_whole(self, context: OwnServer) -> None:
        done = bursar(context, "run", "--", "seq", "200000")
        assert done.returncode == 0
        assert done.stdout == "".join(f"{number}\n" for number in range(1, 200_001))

    def test_what_the_node_had_dropped_before_it_was_read_is_said(
        self, context: OwnServer, client: Client, name: str
    ) -> None:
        bytes_written = 50_000_000
        write = ["sh", "-c", f"head -c {bytes_written} /dev/zero"]
        assert bursar(context, "run", "--name", name, "--detach", "--", *write).returncode == 0
        node = await_phase(client, name, "Succeeded")["nodeName"]
        read = bursar(context, "logs", name)
        missing = bytes_written - len(read.stdout)
        assert missing > 0
        assert read.stderr == f"bursar: {node} no longer has {missing} bytes of the log\n"
        assert bursar(context, "logs", "--tail", "1", name).stderr == ""

    def test_programs_are_told_as_events(self, context: OwnServer, name: str) -> None:
        done = bursar(context, "run", "--json", "--name", name, "--", "sh", "-c", "echo one; exit 4")
        told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 4
        assert (told[0]["event"], told[0]["name"]) == ("submitted", name)
        phases = [one["phase"] for one in told if one["event"] == "status"]
        assert phases == sorted(phases, key=["Pending", "Scheduled", "Running", "Failed"].index)
        assert "".join(one["text"] for one in told if one["event"] == "log") == "one\n"
        assert {**told[-1], "message": ""} == {
            "event": "ended", "name": name, "phase": "Failed", "message": "", "exitCode": 4
        }  # fmt: skip
        assert told[-1]["message"].startswith("exit code 4 on ")

    def test_ctrl_c_stops_it_and_shows_its_last_words(self, context: OwnServer, client: Client, name: str) -> None:
        script = "trap 'echo bye; exit 0' TERM; echo ready; sleep 600 & wait"
        with running(context, "run", "--name", name, "--", "sh", "-c", script) as process:
            assert said(process) == "ready\n"
            process.send_signal(signal.SIGINT)
            rest, complained = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 130
        assert rest == "bye\n"
        assert f"releasing {name}" in complained
        assert not status_of(client, name)

    def test_a_second_ctrl_c_leaves_at_once(self, context: OwnServer, client: Client, name: str) -> None:
        with running(
            context, "run", "--name", name, "--", "sh", "-c", "trap '' TERM; echo ready; sleep 600"
        ) as process:
            assert said(process) == "ready\n"
            process.send_signal(signal.SIGINT)
            await_phase(client, name, "Terminating")
            process.send_signal(signal.SIGINT)
            _, complained = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 130
        assert "is still stopping" in complained
        assert status_of(client, name)["phase"] == "Terminating"
        client.allocations("default").delete(name, grace_period_seconds=0)
        until(lambda: not status_of(client, name), "it being gone")

    def test_what_has_to_wait_again_is_seen_through(
        self, context: OwnServer, client: Client, name: str, tmp_path: Path
    ) -> None:
        script = f"echo epoch $BURSAR_EPOCH; [ -e {tmp_path}/again ] && exit 5; sleep 600"
        with running(context, "run", "--name", name, "--gpus", "1", "--", "sh", "-c", script) as process:
            assert said(process) == "epoch 1\n"
            (tmp_path / "again").touch()
            client.preempt("default", name, reason="a test", grace_period_seconds=1)
            rest, _ = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, rest) == (5, "epoch 2\n")
        assert bursar(context, "logs", name).stdout == "epoch 2\n"
        assert bursar(context, "logs", "--node", "n1", "--epoch", "1", name).stdout == "epoch 1\n"

    def test_what_runs_on_two_nodes_says_which(self, context: OwnServer, name: str) -> None:
        script = "echo rank $BURSAR_NODE_RANK of $BURSAR_NODE_COUNT"
        done = bursar(context, "run", "--nodes", "2", "--name", name, "--", "sh", "-c", script)
        assert done.returncode == 0
        lines = sorted(done.stdout.splitlines())
        assert {line.partition(" ")[0] for line in lines} == {"[n1]", "[n2]"}
        assert sorted(line.partition(" ")[2] for line in lines) == ["rank 0 of 2", "rank 1 of 2"]
        assert sorted(bursar(context, "logs", name).stdout.splitlines()) == lines
        assert bursar(context, "logs", "--node", "n2", name).stdout.startswith("rank ")

    def test_logs_of_what_was_left_alone(self, context: OwnServer, client: Client, name: str, tmp_path: Path) -> None:
        script = f"echo one; echo two; while [ ! -e {tmp_path}/on ]; do sleep 0.1; done; echo three"
        assert bursar(context, "run", "--detach", "--name", name, "--", "sh", "-c", script).returncode == 0
        await_phase(client, name, "Running")
        until(lambda: bursar(context, "logs", name).stdout == "one\ntwo\n", "its words")
        with running(context, "logs", "-f", "--tail", "1", name) as process:
            assert said(process) == "two\n"
            (tmp_path / "on").touch()
            rest, _ = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, rest) == (0, "three\n")
        await_phase(client, name, "Succeeded")
        assert bursar(context, "logs", name).stdout == "one\ntwo\nthree\n"


def test_whoever_is_killed_every_line_comes_once(
    context: OwnServer, client: Client, agents: list[Agent], name: str, tmp_path: Path
) -> None:
    """First the agent that keeps the log, then the API through which it is read."""
    wait = f"while [ ! -e {tmp_path}/$1 ]; do sleep 0.1; done"
    script = f"on() {{ {wait}; echo $1; }}; echo begun; on one; on two; on three; exit 6"
    command = ["run", "--gpus", "1", "--name", name, "--", "sh", "-c", script]
    with running(context, *command) as process:
        assert said(process) == "begun\n"
        agents[0].kill()
        (tmp_path / "one").touch()
        agents[0].start()
        assert said(process) == "one\n"
        os.kill(part(context, "api"), signal.SIGKILL)
        (tmp_path / "two").touch()
        assert said(process) == "two\n"
        (tmp_path / "three").touch()
        rest, complained = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, rest, complained) == (6, "three\n", "")


def test_work_that_is_interrupted_leaves_nothing_behind(
    context: OwnServer, client: Client, agents: list[Agent], name: str
) -> None:
    assert agents
    seconds = f"{4000 + uuid.uuid4().int % 10**6}.5"
    with running(context, "run", "--name", name, "--", "sh", "-c", f"sleep {seconds} & sleep {seconds}") as process:
        until(lambda: len(living(seconds)) == 2, "its processes")
        process.terminate()
        assert process.wait(SECONDS_MAX) == 143
    assert not living(seconds)
    assert not status_of(client, name)


def test_no_log_holds_the_value_of_a_variable(context: OwnServer, client: Client, agents: list[Agent]) -> None:
    """Whether the command runs, is not found, is killed, or is refused because a variable is faulty."""
    secret = f"hunter-{uuid.uuid4().hex}"
    words = ["run", "--cpus", "100m", "--env", f"PASSWORD={secret}", "--"]
    shown = bursar(context, *words, "sh", "-c", "echo $PASSWORD")
    assert shown.stdout == f"{secret}\n", "the command has it"
    assert bursar(context, *words, "/nowhere/train").returncode == 127
    assert bursar(context, *words, "sh", "-c", "kill -KILL $$").returncode == 137
    with pytest.raises(Invalid):
        client.allocations("default").create({"metadata": {"name": "x"}, "spec": {"env": {"A": f"{secret}\0"}}})
    logs = [
        context.data.with_name(f"{context.data.name}.log"),
        context.data / "postgres.log",
        *(one.log for one in agents),
    ]
    for log in logs:
        text = log.read_bytes()
        assert text, log
        assert secret.encode() not in text, log


# What it reads.


def test_what_is_piped_in_reaches_the_command(context: OwnServer, agents: list[Agent]) -> None:
    command = [str(BURSAR), "run", "--cpus", "100m", "--", "python3", "-"]
    told = subprocess.run(
        command, input="print(6*7)", env=context.environment, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert (told.stdout, told.returncode) == ("42\n", 0), told.stderr


# Together.


def test_members_of_a_gang_find_each_other_and_train(context: OwnServer, client: Client, agents: list[Agent]) -> None:
    [document] = yaml.safe_load_all((ROOT / "examples" / "distributed.yaml").read_text())
    spec = document["spec"]["template"]["spec"]
    spec["scheduling"] = {"affinity": {"podAntiAffinity": APART}}
    document["spec"]["template"]["metadata"] = {"labels": {"app": "line"}}
    client.jobs("default").create(document)
    ended = until(
        lambda: (now := client.jobs("default").get("line")["status"]).get("completionTime") and now, "the training"
    )
    assert ended["phase"] == "Succeeded", ended
    members = [client.allocations("default").get(f"line-{index}") for index in range(2)]
    assert {one["status"]["nodeName"] for one in members} == {"n1", "n2"}
    assert [(one["status"]["rank"], one["status"]["size"]) for one in members] == [(0, 2), (1, 2)]
    for index in range(2):
        shown = bursar(context, "logs", f"line-{index}")
        assert shown.stdout == f"rank {index} of 2: y = 3.00x -2.00\n", shown.stderr
    whole = bursar(context, "logs", "-f", "job/line")
    assert sorted(whole.stdout.splitlines()) == [f"[line-{at}] rank {at} of 2: y = 3.00x -2.00" for at in range(2)]
    missing = bursar(context, "logs", "line")
    assert missing.returncode != 0
    assert "line is a job: bursar logs job/line" in missing.stderr


def test_members_learn_their_index_and_everybody_learns_which_of_them_failed(
    context: OwnServer, client: Client, agents: list[Agent], name: str
) -> None:
    script = (
        "echo $BURSAR_JOB $BURSAR_JOB_INDEX $JOB_COMPLETION_INDEX; test $BURSAR_JOB_INDEX = 0 && exec sleep 600; exit 5"
    )
    template = {
        "resources": {"requests": {"cpu": "100m"}}, "gangScheduling": {}, "command": ["sh", "-c", script],
    }  # fmt: skip
    spec = {"parallelism": 2, "backoffLimit": 0, "template": {"spec": template}}
    client.jobs("default").create({"metadata": {"name": name}, "spec": spec})
    ended = until(
        lambda: (now := client.jobs("default").get(name)["status"]).get("completionTime") and now, "the job's end"
    )
    stopped = await_phase(client, f"{name}-0", "Failed", "Succeeded")
    failed = await_phase(client, f"{name}-1", "Failed", "Succeeded")
    message = f"exit code 5 on {failed['nodeName']}"
    assert (failed["exitCode"], failed["message"], failed["nodes"][0]["exitCode"]) == (5, message, 5)
    assert (stopped["reason"], stopped["message"]) == ("MemberFailed", f"{name}-1 failed: {message}")
    assert stopped["failure"] == {"allocation": f"{name}-1", "node": failed["nodeName"], "exitCode": 5}
    assert ended["message"].endswith(f"{name}-1: {message}")
    assert f"{name}-1: {message}" in bursar(context, "status", f"job/{name}").stdout
    assert f"{name}-1 failed: {message}" in bursar(context, "status", f"{name}-0").stdout
    said = bursar(context, "logs", "-f", f"job/{name}").stdout.splitlines()
    assert sorted(said) == [f"[{name}-{index}] {name} {index} {index}" for index in range(2)]


def test_the_exit_code_is_that_of_the_first_node_that_failed(
    context: OwnServer, agents: list[Agent], name: str
) -> None:
    script = "if [ $BURSAR_RANK = 0 ]; then exec sleep 600; fi; exit 5"
    ran = bursar(context, "run", "--name", name, "--nodes", "2", "--cpus", "100m", "--", "sh", "-c", script)
    assert ran.returncode == 5, ran.stderr
    assert "exit code 5 on n" in ran.stderr


def test_on_a_simulated_node_nothing_looks_as_if_it_had_run(
    context: OwnServer, client: Client, agents: list[Agent]
) -> None:
    assert agents
    command = [str(BURSAR), "sim", "nodes", "--count", "1", "--prefix", "acting", "--run-seconds", "0"]
    with subprocess.Popen(command, env=context.environment, stdout=subprocess.PIPE, text=True) as nodes:
        try:
            assert nodes.stdout is not None
            assert "ready" in nodes.stdout.readline()
            until(lambda: client.nodes.get("acting-0001")["status"].get("phase") == "Ready", "the simulated node")
            done = bursar(context, "run", "--simulated", "--gpus", "8", "--", "echo", "hello")
            assert (done.returncode, done.stdout) == (0, "")
            assert done.stderr == "bursar: acting-0001 is simulated: nothing was really run\n"
            # Without the flag it is no node for a command, however well it would fit.
            off = bursar(context, "run", "--detach", "--name", "real", "--gpus", "8", "--", "echo", "hello")
            told = off.stderr if off.returncode else bursar(context, "explain", "real").stdout
            assert "of 2 matching nodes" in told, told
        finally:
            nodes.send_signal(signal.SIGINT)
            bursar(context, "delete", "allocation", "real")


async def test_a_server_without_grpc_says_whom_it_leaves_alone(context: OwnServer, agents: list[Agent]) -> None:
    url = f"postgresql://bursar@/bursar?host={context.data / 'run'}&port=5432"
    db = await connect(url)
    try:

        async def both_were_heard() -> bool:
            return await load_agents(db) == len(agents)

        await eventually(both_were_heard)  # an agent is ready before its first heartbeat is stored
    finally:
        await db.close()
    with capture_logs() as said:
        await _warn_of_agents(ServerSettings(http=Address("127.0.0.1", 0), database_url=url))
        await _warn_of_agents(
            ServerSettings(http=Address("127.0.0.1", 0), grpc=Address("127.0.0.1", 1), database_url=url)
        )
    assert len(agents) == 2
    [warning] = said
    assert (warning["event"], warning["nodes"]) == ("grpc_not_served", 2)
