"""`kubectl logs`, unmodified: what allocations write, from a node's real agent."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bursar.client import Client
from support.api.kubectl_cluster import Kubectl
from support.nodes.placed_work import phase_of, until
from support.process.agents import Agent, joined_agent
from support.process.agents import until as awaited
from support.process.server import Server


@pytest.fixture
def client(cluster: Server) -> Iterator[Client]:
    with Client(cluster.url, cluster.token, ca_file=str(cluster.data / "tls" / "ca.crt")) as one:
        yield one


@pytest.fixture
def agent(cluster: Server, client: Client, tmp_path: Path) -> Iterator[Agent]:
    """On a node that takes nobody else's work."""
    name = f"node-{uuid.uuid4().hex[:8]}"
    options = ("--ca-file", str(cluster.data / "tls" / "ca.crt"), "--taint", "logs:NoSchedule", "--fake-gpus", "0")
    with joined_agent(cluster, client, name, tmp_path, *options) as one:
        yield one


def submit(client: Client, team: str, agent: Agent, script: str) -> None:
    scheduling = {"tolerations": [{"key": "logs", "operator": "Exists"}]}
    requests = {"requests": {"cpu": "100m"}}
    spec = {"resources": requests, "nodeSelector": {"only": agent.name}, "scheduling": scheduling}
    spec |= {"command": ["sh", "-c", script]}
    client.allocations(team).create({"metadata": {"name": "train"}, "spec": spec})


def test_logs_are_read_and_followed(kubectl: Kubectl, client: Client, team: str, agent: Agent, tmp_path: Path) -> None:
    script = f"echo one; echo two; while [ ! -e {tmp_path}/on ]; do sleep 0.1; done; echo three"
    submit(client, team, agent, script)
    until(lambda: phase_of(client, team, "train") == "Running")
    awaited(lambda: kubectl("logs", "train", "-n", team) == "one\ntwo\n", "its words")
    assert kubectl("logs", "pod/train", "-n", team, "--tail=1") == "two\n"
    following = kubectl.start("logs", "-f", "train", "-n", team)
    (tmp_path / "on").touch()
    output, _ = following.communicate(timeout=60)
    assert (following.returncode, output) == (0, "one\ntwo\nthree\n")
    until(lambda: phase_of(client, team, "train") == "Succeeded")
    assert kubectl("logs", "train", "-n", team, "--limit-bytes=5") == "one\nt"


def test_what_cannot_be_read_is_said(kubectl: Kubectl, client: Client, team: str) -> None:
    spec = {"nodeSelector": {"only": "nowhere"}, "command": ["true"]}
    client.allocations(team).create({"metadata": {"name": "late"}, "spec": spec})
    assert "late waits" in kubectl.run("logs", "late", "-n", team, status=1).stderr
    assert "not offered" in kubectl.run("logs", "late", "-n", team, "--since=1h", status=1).stderr
