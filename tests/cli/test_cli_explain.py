"""`bursar explain`, `bursar simulate` and `bursar top` against a real server and its scheduler."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from bursar.cli.workloads.simulate import lines
from bursar.client import Client
from support.nodes.placed_work import until
from support.process.commands import bursar
from support.process.server import Server

GPU = "nvidia.com/gpu"


@pytest.fixture
def node(admin: Client) -> str:
    name = f"node-{uuid.uuid4().hex[:12]}"
    capacity = {"cpu": "8", "memory": "64Gi", GPU: "4"}
    admin.nodes.create({"metadata": {"name": name, "labels": {"only": name}}, "spec": {"capacity": capacity}})
    return name


def wanted(name: str, node: str, gpus: int, **spec: Any) -> dict[str, Any]:
    requests = {"resources": {"requests": {GPU: str(gpus)}}, "nodeSelector": {"only": node}}
    return {"kind": "Allocation", "metadata": {"name": name}, "spec": {**requests, **spec}}


def test_a_simulation_says_how_long_the_credit_lasts() -> None:
    cost = {"account": "physics", "perSecond": "0.04", "perHour": "144", "firstWindow": "0.4", "windowSeconds": 10}
    one = {"name": "s", "message": "it would run now, on n1", "wouldRun": True}
    told = list(lines({**one, "cost": {**cost, "available": "1.42"}}))
    assert told[-1] == "  lasts    35s on the available credit, if nothing else runs"
    assert not [line for line in lines({**one, "cost": {**cost, "available": "0.1"}}) if "lasts" in line]
    free = {**cost, "perSecond": "0", "firstWindow": "0", "available": "1"}
    assert not [line for line in lines({**one, "cost": free}) if "lasts" in line]


def test_explain_tells_why_and_simulate_what_if(
    server: Server, admin: Client, team: str, node: str, tmp_path: Path
) -> None:
    admin.allocations(team).create(wanted("runs", node, 3, ttl="1h"))
    until(lambda: admin.allocations(team).get("runs")["status"]["phase"] == "Scheduled")
    placed = bursar(server, "explain", "runs", "-n", team).stdout
    assert placed.startswith(f"{team}/runs is Scheduled\n  Scheduled on {node}")
    admin.allocations(team).create(wanted("waits", node, 2))
    until(lambda: admin.allocations(team).explain("waits")["reason"]["code"] == f"no_capacity_{GPU}")
    told = bursar(server, "explain", "waits", "-n", team).stdout
    assert told.startswith(
        f"{team}/waits is Pending\n  why      needs 2 {GPU} on one node; the most free is 1, on 1 of 1 matching node"
    )
    assert re.search(r"\n  queue    position \d+ in default", told)
    assert "\n  start    in about 60 min (" in told
    answer = json.loads(bursar(server, "explain", "allocation/waits", "-n", team, "--json").stdout)
    assert answer["reason"]["short"][0]["shortBy"] == "1"
    shown = admin.allocations(team).get("waits")["status"]
    assert shown["queuePosition"] >= 1
    bursar(server, "explain", "nobody", "-n", team, code=3)

    file = tmp_path / "wanted.yaml"
    file.write_text(
        json.dumps({"kind": "List", "items": [wanted("small", node, 1, ttl="60s"), wanted("large", node, 4)]})
    )
    simulated = bursar(server, "simulate", "-f", str(file), "-n", team).stdout.splitlines()
    assert simulated[0] == f"allocation/small: it would run now, on {node}"
    assert simulated[1].startswith("allocation/large: it would wait: ")
    assert [one["metadata"]["name"] for one in admin.allocations(team).list()] == ["runs", "waits"]

    template = {"spec": wanted("x", node, 1, ttl="60s")["spec"]}
    job = {"kind": "Job", "metadata": {"name": "train"}, "spec": {"parallelism": 2, "template": template}}
    file.write_text(json.dumps(job))
    simulated = bursar(server, "simulate", "-f", str(file), "-n", team).stdout.splitlines()
    assert simulated[0] == f"allocation/train-0: it would run now, on {node}"
    assert simulated[1].startswith("allocation/train-1: it would wait: ")
    assert not list(admin.jobs(team).list())


def test_a_job_is_explained_too(server: Server, admin: Client, team: str, node: str) -> None:
    spec = {"parallelism": 1, "completions": 1, "template": {"spec": wanted("x", "no-such-node", 1)["spec"]}}
    admin.jobs(team).create({"metadata": {"name": "train"}, "spec": spec})
    until(lambda: admin.jobs(team).explain("train")["reason"]["code"] == "no_matching_nodes")
    told = bursar(server, "explain", "job/train", "-n", team).stdout
    assert "nodeSelector only=no-such-node" in told
    bare = bursar(server, "explain", "train", "-n", team, code=3).stderr
    assert "hint: a job has this name: bursar explain job/train" in bare
    assert "hint" not in bursar(server, "explain", "nobody", "-n", team, code=3).stderr


def test_top_shows_the_cluster_and_its_queues(server: Server, admin: Client, node: str) -> None:
    until(lambda: "scheduling" in admin.cluster_utilization())
    told = bursar(server, "top").stdout
    assert re.match(r"\d+ nodes?: ", told)
    assert told.index("RESOURCE") < told.index("QUEUE")
    assert re.search(r"^cpu +\d+ +\d+ +\d+m? \(\d+%\) ", told, re.MULTILINE), told
    both = json.loads(bursar(server, "top", "--json").stdout)
    assert {one["name"] for one in both["queues"]} >= {"default"}
    assert both["cluster"]["gpu"]["capacity"] >= 4


def test_what_cannot_be_simulated_is_said(server: Server, team: str, tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(json.dumps({"kind": "Tenant", "metadata": {"name": "x"}, "spec": {}}))
    done = bursar(server, "simulate", "-f", str(file), "-n", team, code=1)
    assert "only allocations and jobs can be simulated" in done.stderr
    bursar(server, "simulate", "-n", team, code=2)
    bursar(server, "explain", "a", "b", "c", code=2)
