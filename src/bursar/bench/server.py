"""A real server for a benchmark: a process of its own, on a database of its own, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from bursar.core.objects.object import Origin
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.lifecycle.bootstrap import prepare
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as object_ops
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.runtime import Runtime
from bursar.sim.shape import NodeShape, documents
from bursar.store.db.database import Database
from bursar.store.embedded import start as start_embedded
from bursar.wire.kinds.registry import BY_NAME

READY_SECONDS_MAX = 60.0
AS_WE_ARE = ("--user", "root") if os.geteuid() == 0 else ()  # benchmarks do not change users


BENCH = Origin("system:bench", "create")
REGISTERS = Origin("system:sim", "register", "simulated")
REGISTER_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class BenchServer:
    url: str
    token: str
    pid: int

    def client(self) -> httpx2.AsyncClient:
        """A client with the administrator's token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)


def _data_directory() -> Path:
    data = Path(tempfile.mkdtemp(prefix="bursar-bench-"))
    data.chmod(0o711)  # The database's own user must pass.
    return data


@asynccontextmanager
async def running_server(*arguments: str, environment: dict[str, str] | None = None) -> AsyncIterator[BenchServer]:
    data = _data_directory()
    token_file = data / "token"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bursar.main", "serve", "--data", str(data), "--http", "127.0.0.1:0",
        "--admin-token-file", str(token_file), *AS_WE_ARE, *arguments, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_SECONDS_MAX):
            line = ""
            while "is ready on " not in line:
                raw = await process.stdout.readline()
                if not raw:
                    raise RuntimeError("the server did not start")
                line = raw.decode()
        url = line.partition("is ready on ")[2].split(",")[0].strip()
        yield BenchServer(url, token_file.read_text().strip(), process.pid)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()
        shutil.rmtree(data, ignore_errors=True)


@asynccontextmanager
async def running_database(settings: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """A PostgreSQL of its own with our schema and default objects; its URL."""
    data = _data_directory()
    embedded = await start_embedded(data, settings=settings)
    try:
        await prepare(embedded.url)
        yield embedded.url
    finally:
        await embedded.stop()
        shutil.rmtree(data, ignore_errors=True)


@asynccontextmanager
async def running_runtime() -> AsyncIterator[tuple[Runtime, str]]:
    """A runtime on a database of its own, and the database's URL for other processes."""
    async with running_database() as url:
        database = await Database.open(url)
        runtime = await open_runtime(database)
        try:
            yield runtime, url
        finally:
            await runtime.close()
            await database.close()


async def create(runtime: Runtime, kind: str, document: dict[str, Any]) -> None:
    one = msgspec.convert(document, BY_NAME[kind].type)
    reply = await object_ops.submit(runtime, create_command(BY_NAME[kind], one, BENCH), tenant="bench")
    if isinstance(reply, Refusal):
        raise RuntimeError(f"cannot create {kind} {document['metadata']['name']}: {reply.message}")


async def register(runtime: Runtime, shape: NodeShape) -> list[str]:
    """Create the nodes, REGISTER_AT_ONCE at a time, except those that exist; returns all names."""
    kind = BY_NAME["Node"]
    drafts = [msgspec.convert(one, kind.type) for one in documents(shape, tainted=False)]
    if faults := [fault for one in drafts[:1] for fault in kind.check(one)]:  # all are alike
        raise ValueError("; ".join(f"{fault.field}: {fault.message}" for fault in faults))
    for at in range(0, shape.count, REGISTER_AT_ONCE):
        some = (create_command(kind, one, REGISTERS) for one in drafts[at : at + REGISTER_AT_ONCE])
        replies = await asyncio.gather(*(object_ops.submit(runtime, command, tenant="") for command in some))
        for reply in replies:
            if isinstance(reply, Refusal) and reply.code is not Code.ALREADY_EXISTS:
                raise ValueError(f"{reply.message} {reply.hint}".strip())
    return shape.names
