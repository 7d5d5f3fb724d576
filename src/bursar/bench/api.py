"""`bursar bench api`: throughput of the API, beside a bare answer of the same server."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx2

from bursar.bench.load import ANSWER_SECONDS_MAX, Result, request_bytes, run_load
from bursar.bench.server import BenchServer, running_server

TEAMS = 8
CONNECTIONS = 256

# A typical request of a training job.
SPEC: dict[str, Any] = {
    "resources": {
        "requests": {"cpu": "8000m", "memory": "32Gi", "nvidia.com/gpu": "4"},
        "limits": {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "4"},
    },
    "priority": 100,
    "priorityClass": "high-priority",
    "preemptionPolicy": "PreemptLowerPriority",
    "scheduling": {
        "nodeSelector": {"gpu-type": "nvidia-a100", "zone": "us-east-1a"},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringScheduling": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "gpu-memory", "operator": "Gte", "values": ["80"]}]}
                    ]
                }
            }
        },
        "tolerations": [{"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "ttl": "7200s",
}


async def run(*, seconds: float, watchers: int, log: Callable[[str], None]) -> dict[str, Any]:
    async with running_server() as server, server.client() as client:
        await _set_up(client)
        figures: dict[str, Any] = {"connections": CONNECTIONS, "scopes_checked": 3}
        hello = await _measure(server, itertools.repeat(request_bytes("GET", "/hello", server.token)), 200, seconds)
        figures["hello_per_s"] = round(hello.per_second)
        log(f"hello    {hello.per_second:9.0f}/s")
        submit = await _measure(server, _submissions(server.token), 201, seconds)
        figures |= {"submit_per_s": round(submit.per_second), "submit_p50_ms": round(submit.percentile_ms(0.5), 2)}
        figures |= {"submit_p99_ms": round(submit.percentile_ms(0.99), 2)}
        figures["submit_vs_hello"] = round(submit.per_second / hello.per_second, 3)
        log(f"submit   {submit.per_second:9.0f}/s  p99 {submit.percentile_ms(0.99):.1f} ms, durable and quota-checked")
        get = await _measure(server, _gets(server.token, submit.count), 200, seconds)
        figures["get_per_s"] = round(get.per_second)
        log(f"get      {get.per_second:9.0f}/s")
        page = request_bytes("GET", "/api/v1/namespaces/team-0/allocations?limit=100", server.token)
        listed = await _measure(server, itertools.repeat(page), 200, seconds)
        figures["list100_per_s"] = round(listed.per_second)
        log(f"list 100 {listed.per_second:9.0f}/s")
        patched = await _measure(server, _patches(server.token, submit.count), 200, seconds)
        figures["patch_per_s"] = round(patched.per_second)
        log(f"patch    {patched.per_second:9.0f}/s")
        fanout = await _fan_out(server, client, watchers)
        figures |= {"watchers": watchers, **fanout}
        log(f"watch    {fanout['watch_fanout_p99_ms']:9.1f} ms p99 to {watchers} watchers")
        return figures


async def _set_up(client: httpx2.AsyncClient) -> None:
    """One organisation with a limit, teams below it with limits of their own, and a quota in each namespace."""
    plenty = {"nvidia.com/gpu": "100M", "cpu": "200M", "memory": "4Ei", "allocations": "10M"}

    async def post(path: str, body: dict[str, Any]) -> None:
        (await client.post(path, json=body)).raise_for_status()

    await post("/api/v1/tenants", {"metadata": {"name": "org"}, "spec": {"limits": plenty}})
    for index in range(TEAMS):
        name = f"team-{index}"
        await post("/api/v1/tenants", {"metadata": {"name": name}, "spec": {"parent": "org", "limits": plenty}})
        await post("/api/v1/namespaces", {"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
        hard = {"nvidia.com/gpu": "100M", "cpu": "200M", "memory": "4Ei"}
        await post(f"/api/v1/namespaces/{name}/resourcequotas", {"metadata": {"name": "all"}, "spec": {"hard": hard}})


async def _measure(server: BenchServer, requests: Iterator[bytes], wanted: int, seconds: float) -> Result:
    return await run_load(server.url, lambda: next(requests), wanted=wanted, connections=CONNECTIONS, seconds=seconds)


def _submissions(token: str) -> Iterator[bytes]:
    spec = json.dumps(SPEC)
    for number in itertools.count():
        labels = '{"app":"model-training","team":"ml-platform","cost-center":"CC-1234"}'
        body = f'{{"metadata":{{"name":"job-{number}","labels":{labels}}},"spec":{spec}}}'.encode()
        yield request_bytes("POST", f"/api/v1/namespaces/team-{number % TEAMS}/allocations", token, body)


def _gets(token: str, count: int) -> Iterator[bytes]:
    for path in _paths(count):
        yield request_bytes("GET", path, token)


def _patches(token: str, count: int) -> Iterator[bytes]:
    for number, path in enumerate(_paths(count)):
        body = b'{"metadata":{"labels":{"round":"r%d"}}}' % number
        yield request_bytes("PATCH", path, token, body, "application/merge-patch+json")


def _paths(count: int) -> Iterator[str]:
    """Submitted allocations, over and over, no two neighbours one after the other."""
    for number in itertools.count():
        index = number * 7919 % max(1, count - CONNECTIONS)
        yield f"/api/v1/namespaces/team-{index % TEAMS}/allocations/job-{index}"


# Watchers.


class _Watcher(asyncio.Protocol):
    """A watcher that records the arrival times of named objects."""

    def __init__(self, request: bytes, arrivals: list[tuple[bytes, float]]) -> None:
        self._request = request
        self._arrivals = arrivals
        self._tail = b""
        self.joined = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.joined.done():
            self.joined.set_exception(error or ConnectionError("the server closed a watch before its first event"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.joined.done():
            self.joined.set_result(None)
        text = self._tail + data
        at = text.find(b'"name":"fan-')
        while at >= 0:
            end = text.find(b'"', at + 8)
            if end < 0:
                break
            self._arrivals.append((text[at + 8 : end], now))
            at = text.find(b'"name":"fan-', end)
        self._tail = text[-64:] if at < 0 else text[at:]


async def _fan_out(server: BenchServer, client: httpx2.AsyncClient, watchers: int, rounds: int = 20) -> dict[str, Any]:
    """The times from an object's submission until each of many watchers has seen it."""
    await client.post("/api/v1/namespaces", json={"metadata": {"name": "fan", "labels": {"bursar.io/tenant": "org"}}})
    listed = await client.get("/api/v1/namespaces/fan/allocations")
    revision = listed.json()["metadata"]["resourceVersion"]
    arrivals: list[tuple[bytes, float]] = []
    path = f"/api/v1/namespaces/fan/allocations?watch=true&resourceVersion={revision}"
    request = request_bytes("GET", path, server.token)
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(watchers):
        transport, protocol = await loop.create_connection(
            lambda: _Watcher(request, arrivals), client.base_url.host, client.base_url.port or 80
        )
        transports.append(transport)
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            await protocol.joined
    sent: dict[bytes, float] = {}
    for number in range(rounds):
        name = f"fan-{number}"
        sent[name.encode()] = time.perf_counter()
        body = {"metadata": {"name": name}, "spec": SPEC}
        (await client.post("/api/v1/namespaces/fan/allocations", json=body)).raise_for_status()
        deadline = time.perf_counter() + 20
        while sum(one == name.encode() for one, _ in arrivals[-watchers:]) < watchers:
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{name} did not reach all watchers")
            await asyncio.sleep(0.005)
    for transport in transports:
        transport.close()
    delays = sorted(at - sent[name] for name, at in arrivals)
    return {
        "watch_fanout_p50_ms": round(1000 * delays[len(delays) // 2], 1),
        "watch_fanout_p99_ms": round(1000 * delays[int(len(delays) * 0.99)], 1),
        "watch_events": len(delays),
    }
