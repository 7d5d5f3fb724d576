"""How the server's parts come and go: nobody is left behind, and an address that is taken is said."""

import asyncio
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bursar.api.serve import opened_context
from bursar.child import ChildProcess
from bursar.rpc import serve
from bursar.rpc.serve import opened_grpc
from bursar.serve import _all_ready
from support.process.server import AS_WE_ARE, BURSAR, free_port


@contextmanager
def taken_address() -> Iterator[str]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield f"127.0.0.1:{holder.getsockname()[1]}"


async def test_a_child_that_is_told_to_stop_while_it_is_started_again_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    create, starting, go_on = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def slow(*_: Any, **options: Any) -> Any:
        starting.set()
        await go_on.wait()
        return await create(sys.executable, "-c", "import time; time.sleep(600)", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    child = ChildProcess("api-0", [], dict(os.environ))
    informer = asyncio.create_task(child.keep_alive())
    async with asyncio.timeout(20):
        await starting.wait()
        await child.stop()
        go_on.set()
        await informer
    assert child.process is not None
    assert child.process.returncode is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    return subprocess.run([str(BURSAR), *arguments], env=environment, capture_output=True, text=True, timeout=60)


async def test_stopping_before_everything_is_up_complains_of_nothing() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    stopping = asyncio.Event()
    stopping.set()
    assert not await _all_ready([ChildProcess("late", [], {})], stopping)
    await asyncio.sleep(0.05)
    gc.collect()
    assert complaints == []


def test_serve_says_that_the_grpc_address_is_taken(tmp_path: Path) -> None:
    with taken_address() as address:
        done = run("serve", "--data", str(tmp_path / "data"), "--http", f"127.0.0.1:{free_port()}", "--grpc", address)
    assert done.returncode == 1
    assert f"cannot listen on {address} for gRPC" in done.stderr
    assert "choose another address with --grpc HOST:PORT" in done.stderr


async def test_api_says_that_the_grpc_address_is_taken(database_url: str) -> None:
    http = f"127.0.0.1:{free_port()}"
    with taken_address() as address:
        database = ["--database-url", database_url, *AS_WE_ARE]
        done = await asyncio.to_thread(run, "api", "--http", http, "--grpc", address, *database)
    assert done.returncode == 1
    assert f"cannot listen on {address} for gRPC" in done.stderr
    assert "ready" not in done.stdout


def test_api_serves_grpc_without_certificates_on_loopback_only() -> None:
    done = run(
        "api", "--http", "127.0.0.1:0", "--grpc", "0.0.0.0:50051", "--grpc-insecure",
        "--database-url", "postgresql://nobody@127.0.0.1:1/x",
    )  # fmt: skip
    assert done.returncode == 1
    assert "--grpc 0.0.0.0:50051 is not on loopback" in done.stderr


async def test_grpc_tells_the_databases_health(database_url: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with (
        asyncio.timeout(20),
        opened_context(database_url) as context,
        opened_grpc(context.runtime, context.feed, address, insecure=True),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        while (await stub.Check(health_pb2.HealthCheckRequest())).status != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("insecure", [True, False])
async def test_grpc_keeps_no_connection_that_says_nothing(
    database_url: str, insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "HANDSHAKE_MS", 500)
    monkeypatch.setattr(serve, "CONNECTIONS_MAX", 2)
    async with (
        asyncio.timeout(20),
        opened_context(database_url) as context,
        opened_grpc(context.runtime, context.feed, "127.0.0.1:0", insecure=insecure) as port,
    ):
        began = asyncio.get_running_loop().time()
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        ends = [at - began for at in await asyncio.gather(*(ended(reader) for reader, _ in silent))]
        for _, writer in silent:
            writer.close()
    assert ends[2] < 0.4, "there are too many"
    assert 0.4 < ends[0] < 10


async def ended(reader: asyncio.StreamReader) -> float:
    """When the server closed the connection."""
    with suppress(ConnectionResetError):
        await reader.read()
    return asyncio.get_running_loop().time()
