"""`bursar drain` and `bursar preempt` against a real server, whose controller goes on with what they began."""

import re
import threading
import uuid
from collections.abc import Sequence

import pytest

from bursar.client import Client
from bursar.core.nodes.eviction import DO_NOT_EVICT
from support.nodes.placed_work import phase_of, place, report, until
from support.process.commands import bursar
from support.process.server import Server


@pytest.fixture
def node() -> str:
    return f"node-{uuid.uuid4().hex[:12]}"


def stopper(client: Client, team: str, names: Sequence[str]) -> threading.Thread:
    """A node that ends its work when it is told to."""

    def obey() -> None:
        for name in names:
            until(lambda name=name: phase_of(client, team, name) == "Terminating")  # type: ignore[misc]
            report(client, team, name, "Cancelled")

    thread = threading.Thread(target=obey)
    thread.start()
    return thread


def test_drain_waits_and_shows_how_far_it_is(server: Server, admin: Client, team: str, node: str) -> None:
    place(server, admin, team, node, "one", "two")
    tried = bursar(server, "drain", node, "--dry-run")
    assert tried.stdout == f"node/{node} draining: 0 of 2 evicted, 2 pending, 0 failed (dry run)\n"
    with server.client() as other:
        obeying = stopper(other, team, ["one", "two"])
        done = bursar(server, "drain", node, "--grace", "1m", "--reason", "new disks", "--wait")
        obeying.join()
    lines = done.stdout.splitlines()
    assert lines[0] == f"node/{node} draining: 0 of 2 evicted, 2 pending, 0 failed"
    assert lines[-1] == f"node/{node} drained: 2 of 2 evicted, 0 pending, 0 failed"
    assert admin.drain_status(node)["status"] == "Drained"
    assert "new disks" in admin.allocations(team).get("one")["status"]["message"]
    bursar(server, "uncordon", node)
    assert bursar(server, "get", "node", node, "-o", "yaml").stdout.count("drain:") == 0


def test_drain_says_what_is_left_and_how_to_make_it_go(server: Server, admin: Client, team: str, node: str) -> None:
    place(server, admin, team, node, "kept", **{DO_NOT_EVICT: "true"})
    left = bursar(server, "drain", node, "--wait", code=1)
    assert f"{team}/kept" in left.stderr
    assert "--force" in left.stderr
    assert phase_of(admin, team, "kept") in ("Scheduled", "Running")
    assert "1 pending, 0 failed" in bursar(server, "drain", node, "--force").stdout
    assert phase_of(admin, team, "kept") == "Terminating"
    bursar(server, "drain", "no-such-node", code=3)
    bursar(server, "drain", node, "--grace", "soon", code=2)


def test_preempt_tells_until_when_and_what_it_frees(server: Server, admin: Client, team: str, node: str) -> None:
    place(server, admin, team, node, "low")
    done = bursar(server, "preempt", "low", "-n", team, "--reason", "incident", "--grace", "45s")
    assert re.match(r"allocation/low preempted, ends by \d\d:\d\d UTC \(in about 4[0-5] s\)\n", done.stdout)
    assert "frees: cpu=1000m,nvidia.com/gpu=1" in done.stdout
    status = admin.allocations(team).get("low")["status"]
    assert (status["phase"], status["eviction"]["gracePeriodSeconds"]) == ("Terminating", 45)
    assert "incident" in status["message"]
    bursar(server, "preempt", "nobody", "-n", team, "--reason", "x", code=3)
    bursar(server, "preempt", "low", "-n", team, code=2)
