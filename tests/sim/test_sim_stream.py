"""Simulated nodes that speak as agents do, with certificates, to a real server; and the command that starts them."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from bursar.client import AsyncClient, Client
from bursar.sim.fake_executor import FakeBehaviour
from bursar.sim.registry import NotSimulated
from bursar.sim.shape import NodeShape
from bursar.sim.stream import AgentNodes, find_address
from bursar.sim.work import EXIT, SECONDS
from support.api.site import opened_site
from support.nodes.simulated_nodes import at_work
from support.process.server import BURSAR, Server

SECONDS_MAX = 60.0


@asynccontextmanager
async def acting(
    server: Server, prefix: str, count: int = 2, manner: FakeBehaviour | None = None
) -> AsyncIterator[AgentNodes]:
    async with AsyncClient(server.url, server.token) as client:
        address = await find_address(client)
        assert address
        nodes = AgentNodes(client, NodeShape(count, prefix=prefix), address, manner or FakeBehaviour(), insecure=False)
        await nodes.open()
        try:
            async with at_work(nodes):
                yield nodes
        finally:
            await nodes.remove()


def submit(admin: Client, name: str, prefix: str, *, seconds: str = "", code: str = "", **spec: Any) -> None:
    notes = {key: value for key, value in ((SECONDS, seconds), (EXIT, code)) if value}
    body = {
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "scheduling": {"nodeSelector": {"pool": prefix}},
        **spec,
    }
    admin.allocations("default").create({"metadata": {"name": name, "annotations": notes}, "spec": body})


async def until(admin: Client, name: str, *phases: str) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            status = (await asyncio.to_thread(admin.allocations("default").get, name))["status"]
            if status["phase"] in phases:
                return dict(status)
            await asyncio.sleep(0.02)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_what_is_scheduled_to_them_runs_and_ends_as_it_is_annotated(server: Server, admin: Client) -> None:
    async with acting(server, "mesh") as nodes:
        label(admin, "mesh", 2)
        submit(admin, "mesh-quick", "mesh", seconds="0.05")
        submit(admin, "mesh-broken", "mesh", seconds="0", code="7")
        submit(admin, "mesh-endless", "mesh")
        assert (await until(admin, "mesh-quick", "Succeeded", "Failed"))["exitCode"] == 0
        broken = await until(admin, "mesh-broken", "Succeeded", "Failed")
        assert (broken["phase"], broken["exitCode"]) == ("Failed", 7)
        await until(admin, "mesh-endless", "Running")
        await eventually(lambda: (nodes.running, nodes.ended) == (1, 2))
        admin.allocations("default").delete("mesh-endless")
        await eventually(lambda: (nodes.running, nodes.ended) == (0, 3))
        await eventually(lambda: all("lastHeartbeatTime" in one["status"] for one in named(admin, "mesh")))


async def test_they_come_back_and_take_over_what_is_bound_to_them(server: Server, admin: Client) -> None:
    async with acting(server, "back", 1):
        label(admin, "back", 1)
        submit(admin, "back-endless", "back")
        await until(admin, "back-endless", "Running")
    async with acting(server, "back", 1) as nodes:
        await eventually(lambda: nodes.running == 1)
        admin.allocations("default").delete("back-endless")
        await eventually(lambda: (nodes.running, nodes.ended) == (0, 1))


async def test_a_machine_of_somebodys_is_not_spoken_for(server: Server, admin: Client) -> None:
    admin.nodes.create({"metadata": {"name": "theirs-0002"}, "spec": {"capacity": {"cpu": "1"}}})
    with pytest.raises(NotSimulated, match="theirs-0002"):
        async with acting(server, "theirs"):
            pass
    admin.nodes.delete("theirs-0002")


def named(admin: Client, prefix: str) -> list[Any]:
    return [one for one in admin.nodes.list() if one["metadata"]["name"].startswith(prefix)]


def label(admin: Client, prefix: str, count: int) -> None:
    """So that nothing of these tests is placed on others' nodes, which share the server."""
    for number in range(1, count + 1):
        admin.nodes.patch(f"{prefix}-{number:04}", {"metadata": {"labels": {"pool": prefix}}})


async def test_a_server_that_serves_no_agents_says_so(database_url: str) -> None:
    async with opened_site(database_url) as site, AsyncClient(site.url, site.admin) as client:
        assert await find_address(client) == ""


# The command.


def streams(server: Server) -> int:
    """How many streams of agents the server holds."""
    answer = httpx2.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {server.token}"}, trust_env=False)
    (line,) = [one for one in answer.text.splitlines() if one.startswith("bursar_agent_streams ")]
    return int(float(line.split()[1]))


@pytest.mark.parametrize("way", [[], ["--rest"]], ids=["agents", "rest"])
def test_the_command_speaks_grpc_unless_told_otherwise(server: Server, admin: Client, way: list[str]) -> None:
    prefix = f"way{len(way)}"
    process = subprocess.Popen(
        [str(BURSAR), "sim", "nodes", "--count", "2", "--prefix", prefix, *way],
        env=server.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "2 simulated nodes are ready" in process.stdout.readline()
        ends = time.monotonic() + SECONDS_MAX
        while not all("lastHeartbeatTime" in one["status"] for one in named(admin, prefix)):
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert streams(server) == (0 if way else 2)
    finally:
        process.terminate()
        out, err = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, out, err) == (0, "0 allocations ended\n", "")
    assert named(admin, prefix) == []


@pytest.mark.parametrize("arguments", [["--rest", "--insecure"], ["--insecure"]], ids=["both", "nowhere"])
def test_ways_that_do_not_go_together_are_refused(arguments: list[str]) -> None:
    ran = subprocess.run(
        [str(BURSAR), "sim", "nodes", "--count", "1", *arguments],
        env={**os.environ, "BURSAR_URL": "http://127.0.0.1:9", "BURSAR_TOKEN": "t"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "--insecure" in ran.stderr
