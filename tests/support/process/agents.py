"""Real agents for the tests: `bursar agent` as a process, joined to a real server."""

import os
import pwd
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bursar.client import Client
from bursar.client.errors import BursarError, Conflict, NotFound
from support.process.server import BURSAR, OwnServer, Server

READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
AGENT = [str(BURSAR), "agent", "--run-as", pwd.getpwuid(os.geteuid()).pw_name]


@dataclass(slots=True)
class Agent:
    """One node's agent. It may be killed and started again: everything lies in `data`."""

    name: str
    data: Path
    command: list[str]
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns once it serves."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=ENVIRONMENT
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], READY_SECONDS_MAX)
        line = self.process.stdout.readline() if readable else ""
        if "ready" not in line:
            self.kill()
            raise RuntimeError(f"bursar agent did not become ready: {line}\n{self.said[-4000:]}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its end; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS_MAX)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None

    @property
    def log(self) -> Path:
        return self.data.with_name(f"{self.data.name}.log")

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}


def write_token(client: Client, name: str, path: Path) -> Path:
    made = client.request(
        "POST", "/api/v1/tokens", body={"role": "node", "node": name, "ttl": "10m", "single_use": True}
    )
    path.write_text(made["status"]["token"])
    return path


@contextmanager
def joined_agent(server: Server, client: Client, name: str, home: Path, *options: str) -> Iterator[Agent]:
    """An agent that has joined as this node, until the end of the block; whatever it ran is killed then."""
    token = write_token(client, name, home / f"{name}.token")
    data = home / name
    labels = ["--label", f"only={name}"]
    command = [*AGENT, "--server", server.url, "--name", name, "--token-file", str(token)]
    agent = Agent(name, data, [*command, "--data", str(data), *labels, *options])
    try:
        agent.start()
        yield agent
    finally:
        agent.kill()
        for pid in users_of(data):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def users_of(data: Path) -> list[int]:
    """Every living process that works below this directory or names it: an agent's shims do."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            named = any(str(data) in word for word in one.cmdline())
            if one.pid != os.getpid() and one.status() != psutil.STATUS_ZOMBIE:
                found += [one.pid] if named or Path(one.cwd()).is_relative_to(data) else []
    return found


def living(mark: str) -> list[int]:
    """The processes that have this word in their command line."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


def part(server: OwnServer, word: str) -> int:
    """The pid of the oldest child of the server whose command line has this word."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return min(one.pid for one in children if any(word in text for text in one.cmdline()))


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


def surely(create: Callable[[], object], name: str) -> None:
    """Submit again, for as long as nobody answers; a name that is taken was taken by us."""

    def submitted() -> bool:
        try:
            create()
        except Conflict:
            return True
        except BursarError:
            return False
        return True

    until(submitted, f"{name} being submitted")


# Work.


def submit(client: Client, name: str, node: str, *command: str, **spec: Any) -> None:
    client.allocations("default").create(
        {
            "metadata": {"name": name},
            "spec": {
                "resources": {"requests": {"cpu": "100m"}},
                "nodeSelector": {"only": node},
                "command": list(command),
                **spec,
            },
        }
    )


def status_of(client: Client, name: str) -> dict[str, Any]:
    """Empty where it is gone."""
    try:
        return dict(client.allocations("default").get(name)["status"])
    except NotFound:
        return {}


def await_phase(client: Client, name: str, *phases: str) -> dict[str, Any]:
    def arrived() -> dict[str, Any] | None:
        status = status_of(client, name)
        return status if status.get("phase") in phases else None

    found: dict[str, Any] = until(arrived, f"{name} becoming {' or '.join(phases)}")
    return found
