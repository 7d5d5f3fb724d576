"""`bursar node fence` and `bursar get nodes` against a real server, whose controller watches over its nodes."""

import uuid

import pytest

from bursar.client import Client
from support.nodes.placed_work import phase_of, place, until
from support.process.commands import bursar
from support.process.server import Server


@pytest.fixture
def node() -> str:
    return f"node-{uuid.uuid4().hex[:12]}"


def test_fencing_asks_first_and_says_what_became_of_the_work(
    server: Server, admin: Client, team: str, node: str
) -> None:
    place(server, admin, team, node, "one", "two")
    words = ("node", "fence", node, "--reason", "switched off")
    asked = bursar(server, *words, said="n\n", code=1)
    assert f"Confirm that nothing runs on {node}" in asked.stderr
    assert phase_of(admin, team, "one") == "Scheduled"
    tried = bursar(server, *words, "--dry-run")
    assert tried.stdout == f"node/{node} fenced (dry run): 2 requeued\n"
    done = bursar(server, *words, said="y\n")
    assert done.stdout == f"node/{node} fenced: 2 requeued\n"
    assert phase_of(admin, team, "one") == "Pending"
    shown = bursar(server, "get", "nodes", node)
    assert "Lost,Fenced" in shown.stdout
    assert bursar(server, *words, "--yes").stdout == f"node/{node} fenced: nothing was placed there\n"
    assert bursar(server, "node", "unfence", node).stdout == f"node/{node} unfenced: Ready\n"
    until(lambda: phase_of(admin, team, "one") == "Scheduled")
    assert bursar(server, "node", "unfence", node, code=5).stderr.startswith("Error: ")


def test_a_fence_needs_a_reason_and_a_node(server: Server, node: str) -> None:
    assert "--reason" in bursar(server, "node", "fence", node, "--yes", code=2).stderr
    gone = bursar(server, "node", "fence", node, "--yes", "--reason", "off", code=3)
    assert "not found" in gone.stderr


def test_a_node_that_speaks_by_its_status_falls_silent_and_comes_back(
    server: Server, admin: Client, team: str, node: str
) -> None:
    body = {"metadata": {"name": node}, "spec": {"capacity": {"cpu": "8", "nvidia.com/gpu": "8"}}}
    token = admin.nodes.create(body)["status"]["token"]
    short = {"heartbeatSeconds": 1, "notReadySeconds": 2, "lostSeconds": 3}
    admin.settings.patch("system", {"spec": {"nodes": short}})
    try:
        with Client(server.url, token=token) as itself:
            heard = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
            itself.nodes.patch(node, heard, subresource="status", type="strategic")
            until(lambda: " Lost " in bursar(server, "get", "nodes", node).stdout)
            spec = {"resources": {"requests": {"cpu": "1"}}, "nodeSelector": {"kubernetes.io/hostname": node}}
            admin.allocations(team).create({"metadata": {"name": "w"}, "spec": spec})
            until(lambda: admin.allocations(team).get("w")["status"].get("reason", "") != "")
            assert phase_of(admin, team, "w") == "Pending"
            admin.settings.patch("system", {"spec": {"nodes": None}})
            back = itself.nodes.patch(node, heard, subresource="status", type="strategic")
            assert back["status"]["phase"] == "Ready"
        until(lambda: phase_of(admin, team, "w") == "Scheduled")
    finally:
        admin.settings.patch("system", {"spec": {"nodes": None}})
