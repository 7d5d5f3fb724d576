"""A machine and a shell together, as an agent has them, with real processes; and a look for those that were left.

Run as a program it is an agent's life that can be killed: `python shells.py FOLDER RUNS LEASE_SECONDS`, with the runs
in JSON. It says `running` when all of them do, and then stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bursar.agent.executor.executor import Executor, ExecutorSettings
from bursar.agent.host.cgroup import Cgroups
from bursar.agent.machine.events import Event, hear
from bursar.agent.machine.state import Machine
from bursar.agent.machine.types import ENDED, Place, PlacementState, PlacementStatus, Run, Stop
from bursar.agent.shim.clock import boot_seconds

PATIENCE_SECONDS = 60.0
NODE = "node-1"
NO_CGROUPS = Cgroups("none", "as the test wants it")
T = TypeVar("T")


SLEEP = ("sleep", "300")


class Bench:
    """One life of an agent in a folder."""

    def __init__(
        self, folder: Path, *, cgroups: Cgroups = NO_CGROUPS, settings: ExecutorSettings | None = None
    ) -> None:
        self.machine = Machine()
        self.shell = Executor(folder, NODE, self._heard, cgroups=cgroups, settings=settings)
        self.events: list[Event] = []

    async def __aenter__(self) -> Bench:
        self.shell.execute(await self.shell.open(self.machine))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shell.close()

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        self.shell.execute(hear(self.machine, event))

    def want(self, *runs: Run) -> None:
        self.shell.execute(self.machine.tell(runs, boot_seconds()))

    def grant(self, seconds: float) -> None:
        self.shell.execute(self.machine.granted(seconds, boot_seconds()))

    def stop(self, place: Place, grace_seconds: int = 30, reason: str = "Preempted") -> None:
        self.shell.execute(self.machine.tell([Stop(*place, grace_seconds, reason)], boot_seconds()))

    def acknowledge(self, *places: Place) -> None:
        self.shell.execute(self.machine.acknowledged(places))

    def status(self, place: Place) -> PlacementStatus | None:
        return next((one for one in self.machine.inventory() if one.place == place), None)

    async def until(self, place: Place, *states: PlacementState) -> PlacementStatus:
        def found() -> PlacementStatus | None:
            status = self.status(place)
            return status if status is not None and status.state in states else None

        return await until(found)

    async def end(self, place: Place) -> PlacementStatus:
        return await self.until(place, *ENDED)

    async def run(self, run: Run) -> PlacementStatus:
        """How it ended."""
        self.want(run)
        return await self.end(run.place)

    def folder(self, place: Place) -> Path:
        folder = self.shell.log(*place)
        assert folder is not None
        return folder

    def text(self, place: Place) -> str:
        files = sorted(self.folder(place).glob("output.*"), key=lambda path: int(path.suffix[1:]))
        return b"".join(path.read_bytes() for path in files).decode()


async def until(look: Callable[[], T | None]) -> T:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := look()) is None:  # noqa: ASYNC110 - other processes have no events for us
            await asyncio.sleep(0.01)
        return found


def run(uid: str, *command: str, **more: Any) -> Run:
    return Run(uid, more.pop("epoch", 1), "lab", "train", tenant="physics", command=command, **more)


def script(uid: str, text: str, **more: Any) -> Run:
    return run(uid, "sh", "-c", text, **more)


async def sleeper(bench: Bench, place: Place) -> int:
    """A pid that the command has written."""
    return int(await until(lambda: (bench.shell.log(*place) and bench.text(place).strip()) or None))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_of(*words: str) -> list[int]:
    """Those that are alive and have one of the words in their environment or their command line, but for us."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if any(word.encode() in said for word in words):
                    found.append(int(entry.name))
    return found


def bury() -> None:
    """Shims whose agent has let go of them are still our children."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def live(folder: Path, runs: list[Run], lease_seconds: float) -> None:
    async with Bench(folder) as bench:
        if lease_seconds:
            bench.grant(lease_seconds)
        bench.want(*runs)
        for run in runs:
            await bench.until(run.place, PlacementState.RUNNING)
        sys.stdout.write("running\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[2], type=list[Run])
    asyncio.run(live(Path(sys.argv[1]), given, float(sys.argv[3])))
