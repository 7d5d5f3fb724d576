"""`bursar bench approvals`: requests that one quota service decides per second, over HTTP.

A real server, without its own quota service, gets requests of many tenants at the gate `quota`. Then one service starts
and decides them; its start and its first list are part of the time. Afterwards every tenant has some requests beyond
its limit, and the limit of one tenant after another is raised: `raise_ms` is the time from that change until the oldest
requests that fit are approved, as a client sees them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from bursar.bench.crowd import percentile_ms
from bursar.bench.server import BenchServer, running_server

DIMENSION = "clusters"
BEYOND = 4  # requests of each tenant beyond its limit, of which a raise lets half in
CREATE_AT_ONCE = 64
POLL_SECONDS = 0.005
SECONDS_MAX = 600.0

Log = Callable[[str], None]


async def run(*, requests: int, tenants: int, raises: int, log: Log) -> dict[str, Any]:
    each = max(1, requests // tenants)
    names = [f"bench-{number:04}" for number in range(tenants)]
    figures: dict[str, Any] = {"bench": "approvals", "requests": each * tenants, "tenants": tenants, "raises": raises}
    async with running_server("--no-quota-service") as server, server.client() as client:
        for name in names:
            await _tenant(client, name, each)
        figures["submitted_per_s"] = await _submit(client, names, range(each))
        log(f"pending  {each * tenants:9}    submitted at {figures['submitted_per_s']:.0f}/s")
        began = time.perf_counter()
        async with _service(server, await _token(client)):
            await _until(lambda: _open(client), 0)
            seconds = time.perf_counter() - began
            figures |= {"decided_per_s": round(each * tenants / seconds), "seconds": round(seconds, 2)}
            log(f"decided  {figures['decided_per_s']:9.0f}/s  {seconds:.1f} s with the start of the service")
            await _submit(client, names, range(each, each + BEYOND))
            await _until(lambda: _unnoted(client), 0)
            waits = [await _raise(client, name) for name in (names * raises)[:raises]]
        await _check(client, names)
    waits.sort()
    figures |= {"raise_ms": percentile_ms(waits, 0.5), "raise_p99_ms": percentile_ms(waits, 0.99)}
    log(
        f"raised   {figures['raise_ms']:9.0f} ms p50, {figures['raise_p99_ms']:.0f} ms p99, until the right ones are in"
    )
    return figures


async def _tenant(client: httpx2.AsyncClient, name: str, limit: int) -> None:
    spec = {"approval": {"gates": ["quota"]}, "limits": {DIMENSION: limit, "pending_requests": 10**6}}
    await _post(client, "tenants", {"metadata": {"name": name}, "spec": spec})
    await _post(client, "namespaces", {"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})


async def _submit(client: httpx2.AsyncClient, names: Sequence[str], numbers: range) -> float:
    """Submit these requests of every tenant; returns how many were taken per second."""
    began = time.perf_counter()
    pairs = iter([(name, number) for number in numbers for name in names])

    async def some() -> None:
        for name, number in pairs:
            spec = {"type": "cluster", "resources": {DIMENSION: 1}}
            document = {"metadata": {"name": f"c{number:06}"}, "spec": spec}
            await _post(client, f"namespaces/{name}/resourceclaims", document)

    await asyncio.gather(*(some() for _ in range(CREATE_AT_ONCE)))
    return round(len(numbers) * len(names) / (time.perf_counter() - began), 1)


async def _raise(client: httpx2.AsyncClient, name: str) -> float:
    """Raise a tenant's limit for half of its waiting requests; returns the seconds until the oldest are in."""
    used = int((await _get(client, f"tenants/{name}/quotas"))["quotas"][DIMENSION]["accepted"])
    waiting = [one["name"] for one in (await _get(client, f"approvals?tenant={name}"))["items"]]
    if not waiting:
        raise RuntimeError(f"no request of {name} waits: fewer tenants than raises need")
    limit = used + max(1, len(waiting) // 2)
    began = time.perf_counter()
    patch = {"content-type": "application/merge-patch+json"}
    answer = await client.patch(f"/api/v1/tenants/{name}", json={"spec": {"limits": {DIMENSION: limit}}}, headers=patch)
    answer.raise_for_status()

    async def left() -> int:
        return len(waiting) - (limit - used) - len((await _get(client, f"approvals?tenant={name}"))["items"])

    await _until(left, 0)
    seconds = time.perf_counter() - began
    still = [one["name"] for one in (await _get(client, f"approvals?tenant={name}"))["items"]]
    if still != waiting[limit - used :]:
        raise RuntimeError(f"other requests than the oldest of {name} were approved: {still} are left of {waiting}")
    return seconds


async def _check(client: httpx2.AsyncClient, names: Sequence[str]) -> None:
    """Check that no tenant uses more than its limit, and none less while requests wait."""
    for name in names:
        figure = (await _get(client, f"tenants/{name}/quotas"))["quotas"][DIMENSION]
        if figure["accepted"] != figure["limit"]:
            raise RuntimeError(f"{name} uses {figure['accepted']} of {figure['limit']}")


async def _open(client: httpx2.AsyncClient) -> int:
    return len((await _get(client, "approvals?limit=1"))["items"])


async def _unnoted(client: httpx2.AsyncClient) -> int:
    """The undecided requests without a reason yet."""
    items = (await _get(client, "approvals"))["items"]
    return sum("reason" not in one["object"]["status"]["approval"] for one in items)


async def _until(count: Callable[[], Any], wanted: int) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while await count() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


async def _token(client: httpx2.AsyncClient) -> str:
    wanted = {"role": "approver", "user": "quota-service", "tenants": ["*"], "gates": ["quota"]}
    return str((await _post(client, "tokens", wanted))["status"]["token"])


async def _post(client: httpx2.AsyncClient, path: str, body: Any) -> Any:
    answer = await client.post(f"/api/v1/{path}", json=body)
    answer.raise_for_status()
    return answer.json()


async def _get(client: httpx2.AsyncClient, path: str) -> Any:
    answer = await client.get(f"/api/v1/{path}")
    answer.raise_for_status()
    return answer.json()


@asynccontextmanager
async def _service(server: BenchServer, token: str) -> AsyncIterator[None]:
    """One quota service as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bursar.main", "quota-service", "--url", server.url,
        env={**os.environ, "BURSAR_TOKEN": token}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
