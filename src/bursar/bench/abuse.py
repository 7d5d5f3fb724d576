"""`bursar bench abuse`: latency of one tenant's requests beside idle connections and slow readers.

The same requests are measured twice, alone and beside half-open connections and unread watches and lists. The
ratio shows how much other tenants can slow one down.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from bursar.bench.load import request_bytes, run_load
from bursar.bench.server import BenchServer, running_server

HALF_OPEN = 200
WATCHES = 4
LISTS = 8
CONNECTIONS = 8
OBJECT_BYTES = 240_000
RECEIVE_BYTES = 4096
RATIO_ASKED = 2.0
_UNLIMITED = {"BURSAR_REQUESTS_PER_MINUTE": "1000000000"}


async def run(*, seconds: float, list_mb: int, log: Callable[[str], None]) -> dict[str, Any]:
    async with running_server(environment=_UNLIMITED) as server:
        calm, rude = await _set_up(server, list_mb)
        path = "/api/v1/namespaces/rude/allocations"
        figures: dict[str, Any] = {
            "bench": "abuse", "half_open": HALF_OPEN, "unread_watches": WATCHES, "unread_lists": LISTS,
            "list_mb": list_mb, "connections": CONNECTIONS,
        }  # fmt: skip
        numbers = itertools.count()
        idle = await _measure(server, calm, numbers, seconds)
        log(f"idle     get p99 {idle['get']:8.2f} ms  submit p99 {idle['submit']:8.2f} ms")
        lists = [request_bytes("GET", path, rude)] * LISTS
        watches = [request_bytes("GET", f"{path}?watch=true", rude)] * WATCHES
        half = [b"", b"GET /hello HTTP/1.1\r\nHost: bench\r\n"] * (HALF_OPEN // 2)
        async with _unread(server, [*lists, *watches, *half]) as strangers:
            abused = await _measure(server, calm, numbers, seconds)
            figures["strangers_open"] = sum(not one.done() for one in strangers)
        log(f"abused   get p99 {abused['get']:8.2f} ms  submit p99 {abused['submit']:8.2f} ms")
        for name in ("get", "submit"):
            ratio = abused[name] / idle[name] if idle[name] else 0.0
            figures |= {
                f"{name}_p99_ms_idle": round(idle[name], 2),
                f"{name}_p99_ms_abused": round(abused[name], 2),
                f"{name}_p99_ratio": round(ratio, 2),
            }
            log(f"{name:<8} {ratio:9.2f} times as long as alone, {RATIO_ASKED:g} asked")
        return figures


async def _set_up(server: BenchServer, list_mb: int) -> tuple[str, str]:
    """Create two tenants, one with a long list; return a user's token of each."""
    async with server.client() as client:

        async def post(path: str, body: dict[str, Any]) -> Any:
            answer = await client.post(f"/api/v1/{path}", json=body)
            answer.raise_for_status()
            return answer.json()

        tokens = []
        for name in ("calm", "rude"):
            await post("tenants", {"metadata": {"name": name}, "spec": {}})
            await post("namespaces", {"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
            made = await post("tokens", {"role": "user", "tenant": name, "user": "bench"})
            tokens.append(str(made["status"]["token"]))
        await post("namespaces/calm/allocations", _allocation("first"))
        for index in range(max(1, list_mb * 1_000_000 // OBJECT_BYTES)):
            await post("namespaces/rude/allocations", _allocation(f"long-{index:04}", "x" * OBJECT_BYTES))
        return tokens[0], tokens[1]


def _allocation(name: str, text: str = "") -> dict[str, Any]:
    metadata = {"name": name, **({"annotations": {"text": text}} if text else {})}
    return {"metadata": metadata, "spec": {"resources": {"requests": {"cpu": "1"}}}}


async def _measure(server: BenchServer, token: str, numbers: Iterator[int], seconds: float) -> dict[str, float]:
    """The 99th percentile of reading one object, and of submitting one, in milliseconds."""
    path = "/api/v1/namespaces/calm/allocations"
    get = request_bytes("GET", f"{path}/first", token)

    def submission() -> bytes:
        body = b'{"metadata":{"name":"job-%d"},"spec":{"resources":{"requests":{"cpu":"1"}}}}' % next(numbers)
        return request_bytes("POST", path, token, body)

    reads = await run_load(server.url, lambda: get, wanted=200, connections=CONNECTIONS, seconds=seconds)
    writes = await run_load(server.url, submission, wanted=201, connections=CONNECTIONS, seconds=seconds)
    return {"get": reads.percentile_ms(0.99), "submit": writes.percentile_ms(0.99)}


@asynccontextmanager
async def _unread(server: BenchServer, requests: list[bytes]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Keep one connection open per request without reading; reopen closed ones."""
    parts = urlsplit(server.url)
    where = parts.hostname or "127.0.0.1", parts.port or 80
    tasks = [asyncio.create_task(_come_again(where, one)) for one in requests]
    try:
        await asyncio.sleep(1.0)  # until most of them are open
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _come_again(where: tuple[str, int], request: bytes) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            raw.setblocking(False)
            try:
                await loop.sock_connect(raw, where)
                await loop.sock_sendall(raw, request)
                while not _is_ended(raw):  # noqa: ASYNC110
                    await asyncio.sleep(1.0)
            except OSError:
                await asyncio.sleep(0.1)


def _is_ended(raw: socket.socket) -> bool:
    """Whether the server has closed it; unread data stays in the socket."""
    try:
        return raw.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
