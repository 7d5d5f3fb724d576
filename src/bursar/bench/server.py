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

from bursar.ops.lifecycle.bootstrap import prepare
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Database
from bursar.store.embedded import start as start_embedded

READY_SECONDS_MAX = 60.0
AS_WE_ARE = ("--user", "root") if os.geteuid() == 0 else ()  # nothing is measured of how users change


@dataclass(frozen=True, slots=True)
class BenchServer:
    url: str
    token: str
    pid: int


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
    """An office on a database of its own, and the URL of that for others who are to work on it."""
    async with running_database() as url:
        database = await Database.open(url)
        runtime = await open_runtime(database)
        try:
            yield runtime, url
        finally:
            await runtime.close()
            await database.close()
