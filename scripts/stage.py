"""What the demo stands on: a real server with simulated nodes, a watch in the background, and words on the terminal.

Server, nodes and directory are gone afterwards, however it ends.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bursar.client import ApiError, BursarError, Client

BURSAR = Path(sys.executable).with_name("bursar")
READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 25.0
SEEN_SECONDS_MAX = 30.0
WIDTH = 110
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A little time to read each part. None when nobody is looking.
PAUSE_SECONDS = 1.0 if sys.stdout.isatty() else 0.0
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ

Document = Mapping[str, Any]


class DemoError(Exception):
    """Something was not as the demo says; the message says what."""


# What is printed.

_printing = threading.Lock()


def paint(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


def show(text: str = "") -> None:
    with _printing:
        print(text, flush=True)


def heading(number: int, text: str) -> None:
    if number > 1:
        time.sleep(PAUSE_SECONDS)
    show()
    show(paint("1", f"{number}. {text}"))


def say(text: str) -> None:
    show(textwrap.fill(text, WIDTH, initial_indent="   ", subsequent_indent="   ", break_on_hyphens=False))


def quote(lines: Iterator[str]) -> None:
    """What the command line prints for the same question."""
    for line in lines:
        show(paint("33", textwrap.fill(line, WIDTH, initial_indent="     ", subsequent_indent=" " * 16)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for index, row in enumerate((head, *rows)):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        show("     " + (paint("2", line) if index == 0 else line))


def proven(text: str) -> None:
    show(f"   {paint('32', '✓')} {text}")


def expect(held: bool, what: str) -> None:
    if not held:
        raise DemoError(f"expected that {what}")


# The server and its nodes.


@contextmanager
def temporary_directory() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="bursar-demo-"))
    # As root the database runs as another user, who has to pass through here to its own directory.
    home.chmod(0o711)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def bare_environment(**more: str) -> dict[str, str]:
    """Ours, without what would point at another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    kept |= {name: os.environ[name] for name in ("BURSAR_POSTGRES_BIN",) if name in os.environ}
    return {**kept, **more}


@contextmanager
def running_server(home: Path) -> Iterator[Client]:
    """`bursar serve` as anybody would start it; stopped at the end of the block, and waited for."""
    address, token_file, log_file = f"127.0.0.1:{free_port()}", home / "admin-token", home / "server.log"
    command = [str(BURSAR), "serve", "--data", str(home / "data"), "--http", address]
    command += ["--grpc", f"127.0.0.1:{free_port()}", "--admin-token-file", str(token_file)]
    with started(command, bare_environment(), log_file) as process:
        await_line(process, "ready", log_file)
        try:
            with Client(f"http://{address}", token_file.read_text().strip()) as client:
                yield client
        except ApiError as error:
            if error.status < 500:
                raise
            raise DemoError(f"{error}\nThe end of the server's log:\n{end_of(log_file)}") from error


@contextmanager
def running_nodes(home: Path, admin: Client, *options: str) -> Iterator[None]:
    """`bursar sim nodes`: they act as if they ran what is bound to them."""
    where = bare_environment(BURSAR_URL=admin.context.url, BURSAR_CONFIG=str(home / "config"))
    where["BURSAR_TOKEN"] = (home / "admin-token").read_text().strip()
    log_file = home / "nodes.log"
    with started([str(BURSAR), "sim", "nodes", "--keep", *options], where, log_file) as process:
        await_line(process, "ready", log_file)
        yield


@contextmanager
def started(command: Sequence[str], environment: dict[str, str], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own: Ctrl-C is for us, and we stop it in order."""
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_line(process: subprocess.Popen[bytes], word: str, log_file: Path) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS_MAX)
    if not readable or word.encode() not in process.stdout.readline():
        raise DemoError(f"{' '.join(map(str, process.args[:3]))} did not start. It said:\n{end_of(log_file)}")  # type: ignore[index]


def end_of(log_file: Path) -> str:
    return log_file.read_text(errors="replace").strip()[-3000:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, and insist. The database ends with the server: it asked the kernel for that."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # A second Ctrl-C must not leave it half stopped.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


# The watch in the background.


@dataclass
class Watcher:
    """Prints what becomes of allocations as it happens, and lets the story wait until something has come about."""

    client: Client
    quiet: str = "racer-"  # those whose names begin so are too many to be told
    now: dict[str, Document] = field(default_factory=dict)  # by namespace/name
    told: dict[str, str] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)
    count: int = 0
    placed: int = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def until(self, what: str, holds: Callable[[Document], bool]) -> Document:
        """The status of an allocation as soon as this holds for it; nothing is known of one that is gone."""
        with self.news:
            if not self.news.wait_for(lambda: holds(self.status(what)), SEEN_SECONDS_MAX):
                raise DemoError(f"within {SEEN_SECONDS_MAX:.0f} s {what} only came to {dict(self.status(what))}")
            return self.status(what)

    def phase(self, what: str, *phases: str) -> Document:
        return self.until(what, lambda status: status.get("phase") in phases)

    def status(self, what: str) -> Document:
        found: Document = self.now.get(what, {}).get("status", {})
        return found

    def _run(self) -> None:
        try:
            for event in self.client.allocations.watch():
                metadata = event.object["metadata"]
                what = f"{metadata['namespace']}/{metadata['name']}"
                with self.news:
                    self.count += 1
                    if event.type == "DELETED":
                        self.now.pop(what, None)
                    else:
                        self.now[what] = event.object
                    if not metadata["name"].startswith(self.quiet):
                        self._tell(what, "gone" if event.type == "DELETED" else self._state(what))
                    self.news.notify_all()
        except (BursarError, RuntimeError, OSError):
            return  # The server is being stopped, or nobody reads on: nothing is left to watch.

    def _state(self, what: str) -> str:
        status = self.status(what)
        phase = str(status.get("phase", ""))
        if phase == "Scheduled":
            self.placed += 1
        if phase in ("Scheduled", "Running"):
            return f"{phase} on {', '.join(one['name'] for one in status.get('nodes', []))}"
        reason = str(status.get("reason") or (status.get("eviction") or {}).get("reason") or "")
        return f"{phase} ({reason})" if reason else phase

    def _tell(self, what: str, state: str) -> None:
        if self.told.get(what) != state:
            self.told[what] = state
            show(paint("36", f"     watch  {what:<20} {state}"))
