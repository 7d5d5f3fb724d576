"""Real processes, killed, paused and starved: what was acknowledged stays, and service comes back by itself."""

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bursar.ops.open_runtime import open_runtime
from bursar.store.db.database import Database
from support.api.site import allocation
from support.process.server import AS_WE_ARE, BURSAR, OwnServer, data_directory, free_port, migrated_directory, started
from support.runtime.runtime import assert_counters_equal_charges

pytestmark = pytest.mark.timeout(120)


# What processes there are.


def children_of(pid: int) -> dict[int, str]:
    """The living descendants of a process, with their command lines."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                commands[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    queue = [pid]
    while queue:
        current = queue.pop()
        for child, parent in parents.items():
            if parent == current and child not in found:
                found[child] = commands[child]
                queue.append(child)
    return found


def part(server: OwnServer, word: str) -> int:
    """The pid of the child whose command line has this word."""
    return next(pid for pid, command in sorted(children_of(server.process.pid).items()) if word in command)


def users_of(data: Path) -> list[int]:
    """Every living process that names the data directory, or works in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                named = str(data).encode() in (entry / "cmdline").read_bytes()
                inside = str((entry / "cwd").readlink()).startswith(str(data))
            except OSError:
                continue
            if state != "Z" and (named or inside):
                found.append(int(entry.name))
    return found


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


def ready(server: OwnServer) -> int:
    """The status of /readyz, 0 where nobody answers."""
    try:
        return httpx2.get(f"{server.url}/readyz", timeout=5, trust_env=False).status_code
    except httpx2.TransportError:
        return 0


# Load.


@dataclass(slots=True)
class Load:
    """Several connections that create allocations as fast as they are answered, and remember what they were told."""

    server: OwnServer
    name: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    acknowledged: list[str] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)  # what was not a 201: status and Retry-After
    broken: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, connections: int = 4) -> Iterator["Load"]:
        threads = [threading.Thread(target=self._create, args=(index,)) for index in range(connections)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.stopping.set()
            for thread in threads:
                thread.join(60)

    def _create(self, worker: int) -> None:
        headers = {"authorization": f"Bearer {self.server.token}"}
        path = f"{self.server.url}/api/v1/namespaces/default/allocations"
        index = 0
        with httpx2.Client(timeout=30, headers=headers, trust_env=False) as http:
            while not self.stopping.is_set():
                name, index = f"{self.name}-{worker}-{index}", index + 1
                try:
                    answer = http.post(path, json=allocation(name, cpu=1))
                except httpx2.TransportError:
                    self.broken += 1
                    time.sleep(0.05)
                    continue
                if answer.status_code == 201:
                    self.acknowledged.append(name)
                else:
                    self.answers.append((answer.status_code, answer.headers.get("retry-after", "")))
                    time.sleep(0.02)

    def more(self, count: int = 30, seconds: float = 30) -> None:
        goal = len(self.acknowledged) + count
        until(lambda: len(self.acknowledged) >= goal, seconds, f"{count} more acknowledged creations")


def stored(server: OwnServer) -> set[str]:
    headers = {"authorization": f"Bearer {server.token}"}
    answer = httpx2.get(f"{server.url}/api/v1/allocations", headers=headers, timeout=30, trust_env=False)
    return {one["metadata"]["name"] for one in answer.raise_for_status().json()["items"]}


def assert_nothing_lost(server: OwnServer, load: Load) -> None:
    assert len(load.acknowledged) == len(set(load.acknowledged))
    assert set(load.acknowledged) - stored(server) == set()
    asyncio.run(_assert_counters(server))


async def _assert_counters(server: OwnServer) -> None:
    database = await Database.open(database_url(server))
    runtime = await open_runtime(database)
    try:
        await assert_counters_equal_charges(runtime)
    finally:
        await runtime.close()
        await database.close()


def database_url(server: OwnServer) -> str:
    environment = Path(f"/proc/{part(server, 'bursar.main api')}/environ").read_bytes().split(b"\0")
    (url,) = [one.partition(b"=")[2].decode() for one in environment if one.startswith(b"BURSAR_DATABASE_URL=")]
    return url


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    """A server of this module's own: its parts get killed."""
    with migrated_directory() as data, started(data) as running:
        yield running


# The database.


def test_a_killed_database_comes_back_and_nothing_acknowledged_is_lost(server: OwnServer) -> None:
    with Load(server).running() as load:
        load.more()
        os.kill(part(server, "/postgres -D"), signal.SIGKILL)
        load.more(60)
    assert ready(server) == 200
    for status, retry_after in load.answers:
        assert status == 503
        assert int(retry_after) >= 1
    assert_nothing_lost(server, load)


def test_a_paused_database_turns_readiness_red_and_then_green(server: OwnServer) -> None:
    postgres = part(server, "/postgres -D")
    with Load(server).running() as load:
        load.more()
        os.kill(postgres, signal.SIGSTOP)  # from now on it has no more children
        family = [postgres, *children_of(postgres)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: ready(server) == 503, 15, "readiness turns red")
            answer = httpx2.get(f"{server.url}/readyz", timeout=10, trust_env=False)
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1")
            alive = httpx2.get(f"{server.url}/healthz", timeout=5, trust_env=False)
            assert alive.status_code == 200, "the process itself lives"
            until(lambda: load.answers, 30, "a creation is told to come again")
        finally:
            for pid in family:
                os.kill(pid, signal.SIGCONT)
        until(lambda: ready(server) == 200, 20, "readiness turns green")
        load.more()
    for status, retry_after in load.answers:
        assert status == 503
        assert int(retry_after) >= 1
    assert_nothing_lost(server, load)


# The API worker.


def test_a_killed_api_worker_is_replaced_and_nothing_acknowledged_is_lost(server: OwnServer) -> None:
    with Load(server).running() as load:
        for _ in range(3):
            load.more()
            before = part(server, "bursar.main api")
            os.kill(before, signal.SIGKILL)
            until(partial(_replaced, server, "bursar.main api", before), 20, "another worker")
        load.more()
    assert {status for status, _ in load.answers} <= {503}
    assert_nothing_lost(server, load)


def _replaced(server: OwnServer, word: str, old: int) -> bool:
    pids = [pid for pid, command in children_of(server.process.pid).items() if word in command]
    return bool(pids) and old not in pids


def test_a_killed_controller_is_replaced(server: OwnServer) -> None:
    before = part(server, "bursar.main controller")
    os.kill(before, signal.SIGKILL)
    until(lambda: _replaced(server, "bursar.main controller", before), 20, "another controller")
    assert ready(server) == 200


def test_a_paused_api_process_does_not_stop_another_on_the_same_database(server: OwnServer) -> None:
    """It is paused under load, so very likely in the middle of a transaction that holds the counters' locks."""
    with other_api(server) as other:
        paused = part(server, "bursar.main api")
        first, second = Load(server), Load(other)
        with first.running(), second.running():
            first.more()
            second.more()
            os.kill(paused, signal.SIGSTOP)
            try:
                began = time.monotonic()
                second.more(100, seconds=20)
                assert time.monotonic() - began < 12, "it goes on within a few seconds"
            finally:
                os.kill(paused, signal.SIGCONT)
            first.more(5)
    assert_nothing_lost(server, first)
    assert_nothing_lost(server, second)


@contextmanager
def other_api(server: OwnServer) -> Iterator[OwnServer]:
    port = free_port()
    command = [str(BURSAR), "api", "--http", f"127.0.0.1:{port}", "--database-url", database_url(server), *AS_WE_ARE]
    log = server.data.with_name("other.log")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, text=True
        ) as process,
    ):
        other = OwnServer(f"http://127.0.0.1:{port}", server.token, server.data, process)
        try:
            until(lambda: ready(other) == 200 or process.poll() is not None, 30, "the other API process")
            assert process.poll() is None, log.read_text()[-2000:]
            yield other
        finally:
            process.terminate()
            process.wait(20)


# The whole server.


def test_a_killed_server_leaves_no_process_behind_and_starts_again_on_the_same_data() -> None:
    with migrated_directory() as data:
        with started(data) as first, Load(first).running() as load:
            load.more()
            assert len(children_of(first.process.pid)) >= 3
            first.process.kill()
            first.process.wait()
            load.stopping.set()
            until(lambda: not users_of(data), 20, "every process of the killed server is gone")
        with started(data) as second:
            assert second.token == first.token, "the token in the file is still good"
            assert_nothing_lost(second, load)
            with Load(second).running() as more:
                more.more(10)


def test_sigterm_ends_everything_in_order_with_exit_status_zero() -> None:
    with migrated_directory() as data, started(data) as server:
        with httpx2.stream(
            "GET",
            f"{server.url}/api/v1/nodes?watch=true",
            headers={"authorization": f"Bearer {server.token}"},
            timeout=30,
            trust_env=False,
        ) as watch:
            assert watch.status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert watch.read() == b"", "a watcher is let go"
        assert server.process.wait(20) == 0
        until(lambda: not users_of(data), 5, "every process is gone")


def test_ctrl_c_ends_it_too() -> None:
    with migrated_directory() as data, started(data) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert not users_of(data)


def test_what_was_begun_is_answered_before_the_end() -> None:
    with migrated_directory() as data, started(data) as server, Load(server).running() as load:
        load.more()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        load.stopping.set()
        assert {status for status, _ in load.answers} <= {503}


def test_a_second_server_on_the_same_data_is_refused_and_the_first_goes_on(server: OwnServer) -> None:
    done = serve("--data", str(server.data), "--http", f"127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert str(server.data) in done.stderr
    assert "Traceback" not in done.stderr
    assert ready(server) == 200


def test_a_busy_port_is_refused_with_the_way_out() -> None:
    with data_directory() as data, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--data", str(data), "--http", f"127.0.0.1:{port}")
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        assert "--http HOST:PORT" in done.stderr
        assert "Traceback" not in done.stderr
        assert not users_of(data), "nothing was started for it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--http", "nowhere"], "--http must be HOST:PORT"),
        (["--http", "127.0.0.1:99999"], "--http must be HOST:PORT"),
        (["--http", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        (["--grpc", "0.0.0.0:5000", "--grpc-insecure"], "loopback"),
        (["--database-url", "postgresql://nobody@127.0.0.1:1/none", "--http", "127.0.0.1:0"], "database"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(arguments: list[str], said: str) -> None:
    with data_directory() as data:
        done = serve("--data", str(data), *arguments)
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert not users_of(data)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`bursar serve` that is expected to end by itself."""
    return subprocess.run([str(BURSAR), "serve", *arguments], capture_output=True, text=True, timeout=60)


def test_the_token_file_is_private_and_there_before_the_server_says_that_it_is_ready() -> None:
    with migrated_directory() as data:
        token_file = data / "token"
        command = [
            str(BURSAR),
            "serve",
            "--data",
            str(data),
            "--http",
            "127.0.0.1:0",
            "--admin-token-file",
            str(token_file),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                modes = set()
                while not select.select([process.stdout], [], [], 0.01)[0]:
                    if token_file.exists():
                        modes.add(stat.S_IMODE(token_file.stat().st_mode))
                line = process.stdout.readline()
                assert line.startswith("bursar is ready on http://127.0.0.1:")
                assert f"admin token in {token_file}" in line
                assert modes | {stat.S_IMODE(token_file.stat().st_mode)} == {0o600}
                token, url = token_file.read_text().strip(), line.split()[4].rstrip(",")
                assert token not in line
                who = httpx2.get(f"{url}/api/v1/whoami", headers={"authorization": f"Bearer {token}"}, trust_env=False)
                assert who.json()["role"] == "system-admin"
                assert httpx2.get(f"{url}/readyz", trust_env=False).status_code == 200
            finally:
                process.terminate()
                assert process.wait(20) == 0


def test_without_a_file_the_token_is_printed_once() -> None:
    with migrated_directory() as data:
        for expected in (True, False):
            command = [str(BURSAR), "serve", "--data", str(data), "--http", "127.0.0.1:0"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                try:
                    assert process.stdout is not None
                    line = process.stdout.readline()
                    assert line.startswith("admin token (shown once): bsr_") == expected
                finally:
                    process.terminate()
                    assert process.wait(20) == 0
