"""Real agents, a real server, real processes: placed work runs, and its end is recorded, whichever process is
killed."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bursar.agent.control import identity
from bursar.agent.control.certificates import NodeCertificates
from bursar.agent.control.codec import HeartbeatAnswer, OutgoingHeartbeat
from bursar.agent.control.identity import IdentityError
from bursar.agent.control.stream import ControlStream
from bursar.client import Client
from support.nodes.played_control_plane import Control, serving
from support.process.agents import (
    AGENT,
    ENVIRONMENT,
    Agent,
    await_phase,
    joined_agent,
    living,
    part,
    status_of,
    submit,
    until,
    users_of,
    write_token,
)
from support.process.server import OwnServer, free_port, migrated_directory, started

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def context() -> Iterator[OwnServer]:
    """A server of its own: parts of it are killed here."""
    with migrated_directory() as data, started(data) as running:
        yield running


@pytest.fixture
def client(context: OwnServer) -> Iterator[Client]:
    with context.client() as one:
        yield one


@pytest.fixture
def name() -> str:
    return f"n-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def agent(context: OwnServer, client: Client, name: str, tmp_path: Path) -> Iterator[Agent]:
    with joined_agent(context, client, name, tmp_path, "--fake-gpus", "2") as one:
        yield one


def mark() -> str:
    """A number of seconds that nobody else sleeps for."""
    return f"{3000 + uuid.uuid4().int % 10**6}.{uuid.uuid4().int % 10**6:06}"


def run_agent(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*AGENT, *options]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


# What an agent is for.


def test_a_node_joins_and_shows_what_it_has(client: Client, agent: Agent) -> None:
    node = until(
        lambda: (one := client.nodes.get(agent.name))["status"].get("phase") == "Ready" and one, "the node being ready"
    )
    assert node["status"]["capacity"]["nvidia.com/gpu"] == "2"
    assert node["metadata"]["labels"]["only"] == agent.name
    assert stat.S_IMODE((agent.data / "key.pem").stat().st_mode) == 0o600
    assert {path.name for path in agent.data.iterdir()} >= {"cert.pem", "ca.pem", "server.json"}


def test_a_command_runs_where_it_was_placed_and_its_end_is_known(client: Client, agent: Agent, tmp_path: Path) -> None:
    script = f"echo $CUDA_VISIBLE_DEVICES $BURSAR_NODE $GREETING > {tmp_path}/said; exit 7"
    gpu = {"resources": {"requests": {"cpu": "100m", "nvidia.com/gpu": 1}}, "env": {"GREETING": "hello"}}
    submit(client, agent.name, agent.name, "sh", "-c", script, **gpu)
    status = await_phase(client, agent.name, "Succeeded", "Failed")
    assert (status["phase"], status["exitCode"]) == ("Failed", 7)
    assert (tmp_path / "said").read_text().split() == ["0", agent.name, "hello"]
    submit(client, f"{agent.name}-2", agent.name, "true")
    assert await_phase(client, f"{agent.name}-2", "Succeeded", "Failed")["exitCode"] == 0


def test_work_without_a_command_is_a_reservation_until_it_is_deleted(client: Client, agent: Agent) -> None:
    submit(client, agent.name, agent.name)
    await_phase(client, agent.name, "Running")
    client.allocations("default").delete(agent.name)
    until(lambda: not status_of(client, agent.name), "the reservation being gone")


def test_what_is_deleted_is_stopped_with_all_its_children(client: Client, agent: Agent) -> None:
    seconds = mark()
    # The children are of another session, and do not heed SIGTERM.
    script = f"trap '' TERM; setsid sleep {seconds} & sleep {seconds} & wait; wait"
    submit(client, agent.name, agent.name, "sh", "-c", script)
    await_phase(client, agent.name, "Running")
    until(lambda: len(living(seconds)) == 2, "the children running")
    client.allocations("default").delete(agent.name, grace_period_seconds=1)
    until(lambda: not status_of(client, agent.name), "the allocation being gone")
    assert not living(seconds)


# Agents come and go.


def test_a_restarted_agent_takes_up_what_runs(client: Client, agent: Agent, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    seconds = mark()
    script = f"sleep {seconds} & while [ ! -e {go_on} ]; do sleep 0.1; done; kill $!; exit 4"
    submit(client, agent.name, agent.name, "sh", "-c", script)
    await_phase(client, agent.name, "Running")
    (before,) = until(lambda: living(seconds), "the command running")
    (tmp_path / f"{agent.name}.token").unlink()  # it is known by its certificate now
    assert agent.stop() == 0
    assert living(seconds) == [before], "an agent that stops leaves its work running"
    agent.start()
    until(lambda: agent.said.count("connected to the control plane") == 2, "the agent being back")
    assert living(seconds) == [before], "nothing is started twice"
    assert status_of(client, agent.name)["phase"] == "Running"
    go_on.touch()
    assert await_phase(client, agent.name, "Succeeded", "Failed")["exitCode"] == 4


def test_what_ended_while_its_agent_was_dead_is_told_by_the_next_one(
    client: Client, agent: Agent, tmp_path: Path
) -> None:
    go_on, over = tmp_path / "go-on", tmp_path / "over"
    script = f"while [ ! -e {go_on} ]; do sleep 0.05; done; touch {over}; exit 5"
    submit(client, agent.name, agent.name, "sh", "-c", script)
    await_phase(client, agent.name, "Running")
    agent.stop(signal.SIGKILL)
    go_on.touch()
    until(over.exists, "the command coming to its end")
    until(lambda: not users_of(agent.data), "its shim leaving")
    assert status_of(client, agent.name)["phase"] == "Running"
    agent.start()
    assert await_phase(client, agent.name, "Succeeded", "Failed")["exitCode"] == 5


def test_what_was_deleted_while_its_agent_was_dead_is_stopped_by_the_next_one(client: Client, agent: Agent) -> None:
    seconds = mark()
    submit(client, agent.name, agent.name, "sleep", seconds)
    await_phase(client, agent.name, "Running")
    agent.stop(signal.SIGKILL)
    client.allocations("default").delete(agent.name)
    assert living(seconds)
    agent.start()
    until(lambda: not status_of(client, agent.name), "the allocation being gone")
    assert not living(seconds)


def test_an_agent_that_is_told_so_stops_its_work_with_itself(
    context: OwnServer, client: Client, name: str, tmp_path: Path
) -> None:
    seconds = mark()
    with joined_agent(context, client, name, tmp_path, "--drain-on-stop") as agent:
        submit(client, name, name, "sleep", seconds)
        await_phase(client, name, "Running")
        assert agent.stop() == 0
        assert not living(seconds)
        assert status_of(client, name)["phase"] == "Failed", "and has said so before it left"


# The control plane comes and goes.


@pytest.mark.parametrize("victim", ["api", "controller", "postgres"])
def test_work_goes_on_and_its_end_arrives_whatever_part_of_the_server_is_killed(
    context: OwnServer, client: Client, agent: Agent, tmp_path: Path, victim: str
) -> None:
    go_on = tmp_path / "go-on"
    script = f"while [ ! -e {go_on} ]; do sleep 0.05; done; exit 6"
    submit(client, agent.name, agent.name, "sh", "-c", script)
    await_phase(client, agent.name, "Running")
    os.kill(part(context, victim), signal.SIGKILL)
    go_on.touch()
    assert await_phase(client, agent.name, "Succeeded", "Failed")["exitCode"] == 6
    submit(client, f"{agent.name}-2", agent.name, "true")
    assert await_phase(client, f"{agent.name}-2", "Succeeded", "Failed")["exitCode"] == 0


def test_a_node_that_was_deleted_is_told_and_joins_again_with_a_new_token(
    client: Client, agent: Agent, tmp_path: Path
) -> None:
    until(lambda: "connected to the control plane" in agent.said, "the agent being there")
    client.nodes.delete(agent.name)
    until(lambda: f"bursar node token --name {agent.name}" in agent.said, "the agent saying what to do")
    write_token(client, agent.name, tmp_path / f"{agent.name}.token")
    until(lambda: agent.said.count("connected to the control plane") == 2, "the agent being back")
    submit(client, agent.name, agent.name, "true")
    await_phase(client, agent.name, "Succeeded")


# What keeps an agent from starting is said with the next step.


def test_a_node_that_never_joined_needs_a_token(tmp_path: Path) -> None:
    done = run_agent("--server", "http://127.0.0.1:1", "--name", "n", "--data", str(tmp_path / "n"))
    assert done.returncode == 1
    assert "bursar node token --name n" in done.stderr


def test_a_token_that_was_used_is_refused(client: Client, context: OwnServer, agent: Agent, tmp_path: Path) -> None:
    token = tmp_path / f"{agent.name}.token"
    options = ["--server", context.url, "--name", agent.name, "--token-file", str(token), "--data", str(tmp_path / "x")]
    done = run_agent(*options)
    assert done.returncode == 1
    assert "used up" in done.stderr
    assert "bursar login" not in done.stderr
    assert f"bursar node token --name {agent.name}" in done.stderr


def test_another_nodes_directory_is_refused(agent: Agent) -> None:
    agent.stop()
    done = run_agent("--server", "http://127.0.0.1:1", "--name", "other", "--data", str(agent.data))
    assert done.returncode == 1
    assert f"--name {agent.name}" in done.stderr


def test_one_directory_has_one_agent(agent: Agent) -> None:
    done = run_agent("--server", "http://127.0.0.1:1", "--name", agent.name, "--data", str(agent.data))
    assert done.returncode == 1
    assert "another agent uses" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--server URL"),
        (("--server", "bursar:8080"), "http or https URL"),
        (("--insecure",), "--insecure needs --grpc"),
        (("--insecure", "--grpc", "10.0.0.1:50051"), "on this machine only"),
        (("--insecure", "--grpc", "127.0.0.1:50051", "--listen", "0.0.0.0:0"), "on this machine only"),
        (("--server", "https://a", "--grpc", "nonsense"), "HOST:PORT"),
        (("--server", "https://a", "--label", "x"), "KEY=VALUE"),
        (("--server", "https://a", "--taint", "x:Never"), "NoSchedule"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = run_agent(*options, "--data", str(tmp_path))
    assert done.returncode == 2
    assert said in done.stderr


def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("bsr_a_b")
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path / "log"
    options = ["--server", url, "--name", "n", "--token-file", str(tmp_path / "token"), "--data", str(tmp_path / "n")]
    with log.open("w") as stderr:
        waiting = subprocess.Popen([*AGENT, *options], env=ENVIRONMENT, stderr=stderr)
    try:
        until(lambda: '"join_failed"' in log.read_text(), "the agent saying that it waits")
        told = json.loads(next(line for line in log.read_text().splitlines() if '"join_failed"' in line))
        assert told["error"] == f"could not reach {url}: the connection was refused"
        assert "the agent tries again in 0." in told["next"]
        assert "--server" in told["next"]
        assert "login" not in told["next"]
        assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(30) == 0
    finally:
        waiting.kill()
        waiting.wait()


# Without certificates, on one machine.


@contextmanager
def insecure_agent(name: str, home: Path, address: str) -> Iterator[Agent]:
    options = ["--insecure", "--grpc", address, "--name", name, "--data", str(home / name)]
    agent = Agent(name, home / name, [*AGENT, *options])
    try:
        agent.start()
        yield agent
    finally:
        agent.kill()


async def test_an_insecure_agent_speaks_to_its_own_machine(tmp_path: Path) -> None:
    async with serving(Control()) as control:
        with insecure_agent("n", tmp_path, control.address):
            heartbeat = await control.until(lambda its: its.heartbeats and its.heartbeats[0])
    assert (heartbeat.node_id, heartbeat.inventory) == ("n", True)
    assert heartbeat.address.startswith("127.0.0.1:")
    assert heartbeat.capacity["cpu"]


# Papers, with a real server.


def papers_of(context: OwnServer, name: str, home: Path, **options: Any) -> NodeCertificates:
    (home / name).mkdir(exist_ok=True)
    return NodeCertificates(
        home / name,
        name,
        urls=[f"http://127.0.0.1:{free_port()}", context.url],
        token_file=home / f"{name}.token",
        document=lambda: {"spec": {"capacity": {"cpu": "1"}}},
        **options,
    )


async def test_whose_certificate_has_expired_joins_again_with_a_new_token(
    context: OwnServer, client: Client, name: str, tmp_path: Path
) -> None:
    used = write_token(client, name, tmp_path / f"{name}.token").read_text()
    first = papers_of(context, name, tmp_path)
    await first.ensure()
    old = first.identity
    assert old is not None
    client.request("DELETE", f"/api/v1/tokens/{used.split('_')[1]}")  # Its time was over long before the certificate's.
    later = papers_of(context, name, tmp_path, now=lambda: old.expires)
    with pytest.raises(IdentityError, match="refused"):
        await later.ensure()
    with pytest.raises(IdentityError, match="needs a new token"):
        await later.ensure()
    write_token(client, name, tmp_path / f"{name}.token")
    await later.ensure()
    assert later.identity is not None
    assert later.identity.certificate != old.certificate
    assert later.identity.key == old.key


class Quiet:
    """A node with nothing to say."""

    def __init__(self) -> None:
        self.first = 0

    def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
        self.first += first
        return OutgoingHeartbeat(inventory=first)

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        del answer, sent_at


async def test_a_certificate_is_renewed_on_the_stream(
    context: OwnServer, client: Client, name: str, tmp_path: Path
) -> None:
    write_token(client, name, tmp_path / f"{name}.token")
    credentials = papers_of(context, name, tmp_path, now=lambda: datetime.now(UTC) + timedelta(hours=17))
    await credentials.ensure()
    old, quiet = credentials.identity, Quiet()
    stream = ControlStream(name, credentials, quiet)
    task = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(60):
            while quiet.first < 2 or not stream.connected.is_set():  # noqa: ASYNC110 - two things at once
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    kept = identity.load(tmp_path / name, name)
    assert kept is not None
    assert kept == credentials.identity != old
