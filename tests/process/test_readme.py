"""The steps of README's "Try it", typed in their order into one shell; each prints what README shows."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from support.process.server import data_directory, free_port, started

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 60.0
DONE = "exit code of this step:"
# It reads its lines from descriptor 9: the standard input is that of the commands.
SHELL = f'while IFS= read -r -u 9 line; do eval "$line"; echo "{DONE} $?"; done 9<&0 0</dev/null'
READS = ("bursar explain", "kubectl")  # of what the scheduler does meanwhile: typed again until it is as shown

pytestmark = pytest.mark.timeout(300)


class Step(NamedTuple):
    command: str
    shown: list[str]


def steps() -> list[Step]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## Try it") : text.index("## What works today")]
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], []))
            else:
                found[-1].shown.append(line)
    return found


class Shell:
    """One bash at a terminal, in which a command, its variables and its background jobs stay for the next."""

    def __init__(self, cwd: Path, environment: dict[str, str]) -> None:
        self._screen, terminal = pty.openpty()
        self._bash = subprocess.Popen(
            ["bash", "-c", SHELL], stdin=subprocess.PIPE, stdout=terminal, stderr=terminal, text=True,
            cwd=cwd, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)

    def types(self, step: Step) -> None:
        """Type a command until its last shown line; a command that only reads is typed again where it differs."""
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            said = self._run(step.command)
            if step.command.endswith("&"):
                while not shows(said, step.shown) and time.monotonic() < deadline:
                    said += self._read(deadline)
            if shows(said, step.shown):
                return
            again = step.command.startswith(READS) and time.monotonic() < deadline
            assert again, f"$ {step.command}\n{said}\nREADME shows:\n" + "\n".join(step.shown)

    def _run(self, command: str) -> str:
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{command}\n")
        self._bash.stdin.flush()
        deadline, said = time.monotonic() + SECONDS_MAX, ""
        while not (done := re.search(rf"{DONE} (\d+)", said)):
            assert time.monotonic() < deadline, f"$ {command}\n{said}"
            said += self._read(deadline)
        assert done[1] == "0", f"$ {command}\n{said}"
        return said

    def _read(self, deadline: float) -> str:
        ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
        return os.read(self._screen, 65536).decode(errors="replace").replace("\r", "") if ready else ""

    def close(self) -> None:
        """End it with what it started, which is of its session: nobody waits for the time of simulated work."""
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.communicate(timeout=SECONDS_MAX)
        os.close(self._screen)


def shows(said: str, shown: list[str]) -> bool:
    """Whether the lines came in this order; `…` stands for anything. How far a short command was seen may differ."""
    lines = [line for line in shown if not line.startswith("bursar: train ")]
    anything = (re.escape(line).replace("…", ".*") for line in lines)
    return re.search(r"(?s:.*)".join(re.sub(r"(\\ )+", r"\\s+", line) for line in anything), said) is not None


@contextmanager
def shell(data: Path, port: int) -> Iterator[Shell]:
    """In a directory that looks like a clone after `make serve`, with an empty HOME."""
    clone = data.parent / "clone"
    home = clone / "home"
    home.mkdir(parents=True)
    for name, there in ((".data", data), (".venv", Path(sys.executable).parents[1]), ("examples", ROOT / "examples")):
        (clone / name).symlink_to(there)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    opened = Shell(clone, {**kept, "HOME": str(home), "BURSAR_URL": f"http://127.0.0.1:{port}"})
    try:
        yield opened
    finally:
        opened.close()


def test_the_steps_of_the_readme_work_one_after_the_other() -> None:
    typed = steps()
    names = [step.command for step in typed]
    plain, secure = names.index("make serve"), names.index("make serve TLS=1")
    assert names[:plain] == [names[0]], "make demo has a test of its own, and comes first"
    recipe = (ROOT / "Makefile").read_text()
    assert "serve --data .data --grpc 127.0.0.1:8081" in recipe
    assert "--admin-token-file .data/admin-token" in recipe
    port, grpc_port = free_port(), free_port()

    def ours(step: Step) -> Step:
        return Step(step.command.replace(":8080", f":{port}"), [one.replace(":8080", f":{port}") for one in step.shown])

    with data_directory() as data, shell(data, port) as terminal:
        with started(data, port, grpc_port=grpc_port):
            for step in typed[plain + 1 : secure]:
                terminal.types(ours(step))
        with started(data, port, grpc_port=grpc_port, tls=True):
            terminal.types(Step("unset BURSAR_URL", []))
            for step in typed[secure + 1 :]:
                if shutil.which("kubectl") or not step.command.startswith("kubectl"):
                    terminal.types(ours(step))
