"""`kubectl drain`, unmodified: work is evicted, waits again, and the node is empty when the command says so."""

import subprocess
import uuid
from collections.abc import Iterator

import pytest

from bursar.client import Client
from bursar.core.nodes.eviction import DO_NOT_EVICT
from support.api.kubectl_cluster import Kubectl
from support.nodes.placed_work import phase_of, place, report, until
from support.process.server import Server


@pytest.fixture
def client(cluster: Server) -> Iterator[Client]:
    with Client(cluster.url, cluster.token, ca_file=str(cluster.data / "tls" / "ca.crt")) as one:
        yield one


@pytest.fixture
def node() -> str:
    return f"node-{uuid.uuid4().hex[:8]}"


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def test_drain_evicts_and_waits_for_the_end(
    kubectl: Kubectl, cluster: Server, client: Client, team: str, node: str
) -> None:
    place(cluster, client, team, node, "one", "two")
    listed = kubectl("get", "pods", "-n", team, "--field-selector", f"spec.nodeName={node}", "-o", "name")
    assert listed.split() == ["pod/one", "pod/two"]
    draining = kubectl.start("drain", node, "--grace-period=40", "--timeout=50s")
    for name in ("one", "two"):
        until(lambda name=name: phase_of(client, team, name) == "Terminating")  # type: ignore[misc]
    evicted = client.allocations(team).get("one")["status"]["eviction"]
    assert (evicted["reason"], evicted["gracePeriodSeconds"]) == ("Evicted", 40)
    assert "SchedulingDisabled" in kubectl("get", "node", node)
    assert draining.poll() is None, "it waits for what it evicted"
    report(client, team, "one", "Cancelled")
    report(client, team, "two", "Succeeded")
    output = finished(draining)
    assert f"node/{node} drained" in output
    assert {"pod/one evicted", "pod/two evicted"} <= {line.strip() for line in output.splitlines()}
    assert (phase_of(client, team, "one"), phase_of(client, team, "two")) == ("Pending", "Succeeded")
    assert kubectl("get", "pod", "one", "-n", team, "-o", "jsonpath={.status.phase}") == "Pending"
    assert "uncordoned" in kubectl("uncordon", node)


def test_drain_of_protected_work_asks_for_force(
    kubectl: Kubectl, cluster: Server, client: Client, team: str, node: str
) -> None:
    place(cluster, client, team, node, "kept", **{DO_NOT_EVICT: "true"})
    refused = kubectl.run("drain", node, "--timeout=20s", status=1)
    assert "--force" in refused.stderr
    assert phase_of(client, team, "kept") in ("Scheduled", "Running")
    draining = kubectl.start("drain", node, "--force", "--timeout=50s")
    until(lambda: phase_of(client, team, "kept") == "Terminating")
    report(client, team, "kept", "Failed")
    assert f"node/{node} drained" in finished(draining)


def test_drain_of_an_empty_node_and_of_what_ended_by_itself(
    kubectl: Kubectl, cluster: Server, client: Client, team: str, node: str
) -> None:
    place(cluster, client, team, node, "done")
    report(client, team, "done", "Succeeded")
    assert f"node/{node} drained" in kubectl("drain", node, "--timeout=20s")
    kubectl("delete", "node", node)
