"""A real server for the tests: `bursar serve` as a process, started once per run (per xdist worker)."""

import atexit
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from bursar.client import Client
from bursar.ops.lifecycle.bootstrap import prepare
from bursar.store.embedded import start
from support.runtime.shared import shared

BURSAR = Path(sys.executable).with_name("bursar")
MEMORY = Path("/dev/shm")
MEMORY_FREE_BYTES_MIN = 2_000_000_000
READY_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 30.0
# Where we are root, a command that would drop root keeps it: it may read what a test keeps to itself.
AS_WE_ARE = ("--user", "root") if os.geteuid() == 0 else ()

_SERVER = pytest.StashKey["Server"]()
_EMPTY_SERVER = pytest.StashKey["Server"]()


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    token: str
    data: Path

    def client(self, token: str = "") -> Client:
        return Client(self.url, token or self.token)

    @property
    def environment(self) -> dict[str, str]:
        """For a command that should speak to this server, and know nothing of this machine's user."""
        settings = {"BURSAR_URL": self.url, "BURSAR_TOKEN": self.token, "BURSAR_CONFIG": str(self.data / "config.yaml")}
        return {**os.environ, **settings}


@dataclass(frozen=True, slots=True)
class OwnServer(Server):
    """A server that its test may kill."""

    process: subprocess.Popen[str]


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server:
    """The one server of this run, with an embedded database. Tests share it: give each its own namespace."""
    return _of_the_run(request.config, "server", _SERVER)


@pytest.fixture(scope="session")
def empty_server(request: pytest.FixtureRequest) -> Server:
    """A server like `server`, where no test leaves a node: work waits, is gone once deleted, and is never too large."""
    return _of_the_run(request.config, "empty-server", _EMPTY_SERVER)


@pytest.fixture(scope="session")
def admin(server: Server) -> Iterator[Client]:
    """A client with the administrator's token."""
    with server.client() as client:
        yield client


@contextmanager
def started(
    data: Path,
    port: int = 0,
    *,
    grpc_port: int = 0,
    tls: bool = False,
    database_url: str = "",
    options: Sequence[str] = (),
    user: str = "root",
) -> Iterator[OwnServer]:
    """`bursar serve` on this directory, or on another database, from when it is ready until the end of the block.

    Where we are root its parts stay root, unless another user is named ("" is the default of `bursar serve`): they may
    read what a test keeps to itself.
    """
    address = f"127.0.0.1:{port or free_port()}"
    token_file = data / "admin-token"
    log = data.with_name(f"{data.name}.log").open("a")
    addresses = ["--http", address, "--grpc", f"127.0.0.1:{grpc_port or free_port()}"]
    database = ["--database-url", database_url] if database_url else ["--data", str(data)]
    files = [*database, "--admin-token-file", str(token_file)]
    files += ["--user", user] if user and os.geteuid() == 0 else []
    command = [str(BURSAR), "serve", *addresses, *files, *(["--tls", "auto"] if tls else []), *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        _await_ready(process, Path(log.name))
        yield OwnServer(f"{'https' if tls else 'http'}://{address}", token_file.read_text().strip(), data, process)
    finally:
        _stop(process)
        log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def data_directory() -> Iterator[Path]:
    """A directory that an unprivileged database may enter; in memory where there is plenty."""
    home = _home()
    data = home / "data"
    data.mkdir()
    try:
        yield data
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def migrated_directory() -> Iterator[Path]:
    """A data directory with a migrated database, copied: to initialise and migrate one costs a second of CPU time."""
    with data_directory() as data:
        subprocess.run(["cp", "-a", str(_migrated() / "postgres"), str(data)], check=True)
        yield data


@cache
def _migrated() -> Path:
    """The data directory of a stopped server with the default objects, made once per run (per xdist worker)."""
    home = _home()
    atexit.register(shutil.rmtree, home, ignore_errors=True)

    async def make() -> None:
        async with await start(home) as embedded:
            await prepare(embedded.url)

    with start_blocking_portal() as portal:
        portal.call(make)
    return home


def _home() -> Path:
    parent = MEMORY if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_FREE_BYTES_MIN else None
    home = Path(tempfile.mkdtemp(prefix="bursar-server-", dir=parent))
    home.chmod(0o711)
    return home


def _of_the_run(config: pytest.Config, name: str, key: pytest.StashKey[Server]) -> Server:
    """The run's shared server; without `--share` one that is started at the first use and kept until the end."""
    if key not in config.stash:
        if facts := shared(config, name):
            config.stash[key] = Server(facts["url"], facts["token"], Path(facts["data"]))
        else:
            running = ExitStack()
            config.stash[key] = running.enter_context(_temporary())
            config.add_cleanup(running.close)
    return config.stash[key]


@contextmanager
def shared_server() -> Iterator[dict[str, str]]:
    with _temporary() as one:
        yield {"url": one.url, "token": one.token, "data": str(one.data)}


@contextmanager
def _temporary() -> Iterator[Server]:
    with data_directory() as data, started(data, user="") as running:
        yield running


def _await_ready(process: subprocess.Popen[str], log: Path) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS_MAX)
    line = process.stdout.readline() if readable else ""
    if not line:
        process.kill()
        raise RuntimeError(f"bursar serve did not become ready (exit {process.wait()}):\n{log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
