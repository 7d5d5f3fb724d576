"""Work that is placed on a node of a real server: bound through its database, unless its scheduler was faster."""

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from bursar.client import Client
from support.process.server import Server
from support.runtime.runtime import bind, opened

WAIT_SECONDS_MAX = 30.0


def place(server: Server, client: Client, namespace: str, node: str, *names: str, **annotations: str) -> None:
    """A new node that carries allocations of these names, which fit no other node."""
    client.nodes.create({"metadata": {"name": node}, "spec": {"capacity": {"cpu": "8", "nvidia.com/gpu": "8"}}})
    for name in names:
        metadata = {"name": name, "annotations": annotations}
        resources = {"requests": {"cpu": "1", "nvidia.com/gpu": "1"}}
        spec = {"resources": resources, "nodeSelector": {"kubernetes.io/hostname": node}}
        client.allocations(namespace).create({"metadata": metadata, "spec": spec})
    asyncio.run(_bind(server, namespace, node, *names))
    for name in names:
        until(lambda name=name: _status(client, namespace, name).get("nodeName") == node)  # type: ignore[misc]


async def _bind(server: Server, namespace: str, node: str, *names: str) -> None:
    socket = server.data / "run"
    if (elsewhere := server.data / "socket-dir").exists():
        socket = type(socket)(elsewhere.read_text().strip())
    async with opened(f"postgresql:///bursar?user=bursar&host={quote(str(socket), safe='')}") as runtime:
        for name in names:
            await bind(runtime, namespace, name, node)


def report(client: Client, namespace: str, name: str, phase: str) -> None:
    """What the node would say of it."""
    client.allocations(namespace).patch(name, {"status": {"phase": phase}}, subresource="status")


def phase_of(client: Client, namespace: str, name: str) -> str:
    return str(_status(client, namespace, name)["phase"])


def _status(client: Client, namespace: str, name: str) -> dict[str, Any]:
    status: dict[str, Any] = client.allocations(namespace).get(name)["status"]
    return status


def until(holds: Callable[[], bool]) -> None:
    """Ask again and again until it holds, where there is nothing to be woken by."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while not holds():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.05)
