"""`bursar serve` with several workers: each serves agents, and a node is told what it should by whichever has it."""

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import psutil
import pytest

from bursar.client import Client
from bursar.wire.scheduler.v1 import node_agent_pb2_grpc as pb_grpc
from support.nodes.agent_streams import RUN, Agent
from support.process.agents import until
from support.process.server import BURSAR, OwnServer, data_directory, free_port, migrated_directory, started

STREAMS_MAX = 64


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def crowd(grpc_port: int) -> Iterator[OwnServer]:
    with (
        migrated_directory() as data,
        started(data, grpc_port=grpc_port, options=("--workers", "2", "--grpc-insecure")) as server,
    ):
        yield server


def workers(server: OwnServer) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(server.process.pid).children():
        with suppress(psutil.Error):
            found += [one] if "api" in one.cmdline() else []
    return found


def connections(worker: psutil.Process, port: int, status: str) -> int:
    """How many of this kind the worker has at that port."""
    with suppress(psutil.Error):
        there = worker.net_connections("tcp")
        return sum(one.status == status and one.laddr.port == port for one in there)
    return 0


@asynccontextmanager
async def streaming(server: OwnServer, client: Client, port: int) -> AsyncIterator[dict[str, Agent]]:
    """Nodes that are connected: so many that both workers have some."""
    agents: dict[str, Agent] = {}
    channels: list[grpc.aio.Channel] = []
    mark = uuid.uuid4().hex[:8]
    try:
        while not all(connections(worker, port, psutil.CONN_ESTABLISHED) for worker in workers(server)):
            assert len(agents) < STREAMS_MAX, "one worker has them all"
            name = f"{mark}-{len(agents)}"
            await asyncio.to_thread(client.nodes.create, node(name))
            # A channel that shares nothing: each is one connection.
            options = (("grpc.use_local_subchannel_pool", 1),)
            channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options))
            agents[name] = Agent(pb_grpc.NodeAgentStub(channels[-1]), name)
            await agents[name].heartbeat(inventory=True)
        yield agents
    finally:
        await asyncio.gather(*(one.close() for one in channels))


def node(name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"only": name}},
        "spec": {"capacity": {"cpu": "4", "memory": "8Gi"}},
    }


def work(name: str, on: str) -> dict[str, object]:
    spec = {"resources": {"requests": {"cpu": "1"}}, "nodeSelector": {"only": on}, "command": ["true"]}
    return {"kind": "Allocation", "metadata": {"name": name}, "spec": spec}


async def test_the_streams_of_both_workers_get_their_directives(crowd: OwnServer, grpc_port: int) -> None:
    with crowd.client() as client:
        async with streaming(crowd, client, grpc_port) as agents:
            assert len(workers(crowd)) == 2
            for name in agents:
                await asyncio.to_thread(client.allocations("default").create, work(f"on-{name}", name))
            told = {name: await agent.directive() for name, agent in agents.items()}
    assert {name: (one.type, one.name) for name, one in told.items()} == {name: (RUN, f"on-{name}") for name in agents}


def test_a_worker_that_dies_comes_back_to_the_address_it_shares(crowd: OwnServer, grpc_port: int) -> None:
    first = workers(crowd)[0]
    first.kill()

    def serving() -> bool:
        those = [one for one in workers(crowd) if one.pid != first.pid]
        return len(those) == 2 and all(connections(one, grpc_port, psutil.CONN_LISTEN) for one in those)

    until(serving, "two workers that serve agents")


def test_a_second_server_is_told_that_the_address_is_taken(crowd: OwnServer, grpc_port: int) -> None:
    with data_directory() as data:
        command = [str(BURSAR), "serve", "--data", str(data), "--http", f"127.0.0.1:{free_port()}", "--workers", "2"]
        done = subprocess.run(
            [*command, "--grpc", f"127.0.0.1:{grpc_port}"], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{grpc_port} for gRPC" in done.stderr
    assert crowd.process.poll() is None
