"""A running placement: its directory, control group, scratch space, shim and deadline, and how it ended.

Most of it may block on the disk or the kernel, and is called in a thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from bursar.agent.executor import meter
from bursar.agent.executor.placement_dir import STDIN, Exit, PlacementDir, ShimClaim, boot_id, sweep
from bursar.agent.host import cgroup
from bursar.agent.host.cgroup import Cgroup, Cgroups
from bursar.agent.host.environment import User, mark
from bursar.agent.host.scratch import Scratches
from bursar.agent.machine.events import PlacementEnded
from bursar.agent.machine.state import ThrottlePlacement
from bursar.agent.machine.types import Place, Run, Usage
from bursar.agent.shim.clock import boot_seconds
from bursar.agent.shim.deadline import Deadline

log = structlog.get_logger()

OOM_KILLED = "OOMKilled"
START_FAILED = "StartFailed"
SHIM_LOST = "ShimLost"
NODE_RESTARTED = "NodeRestarted"


@dataclass(slots=True, eq=False)
class RunningPlacement:
    run: Run
    folder: PlacementDir
    scratches: Scratches
    group: Cgroup | None = None
    started_at: float = field(default_factory=boot_seconds)
    deadline: Deadline | None = None
    deadline_written: Deadline | None = None
    shim: int = 0
    ours: bool = False  # the shim is a child of this process, to be reaped here
    process: int = -1  # the pidfd of the shim
    announcement: int = -1  # a pipe on which the shim reports that the command has started
    kill_at: float | None = None
    stop_reason: str = ""
    stdin: bytes | None = None
    forced: bool = False  # its processes are being killed without its shim
    lost: bool = False  # its shim is gone, and processes of it may still live
    usage: Usage = field(default_factory=Usage)
    ran_seconds: float | None = None  # known only from the journal of the previous agent process
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def mark(self) -> str:
        return mark(self.run.place)

    @property
    def limit(self) -> ThrottlePlacement | None:
        if self.deadline is None:
            return None
        at, _, freeze_until, reason = self.deadline
        return ThrottlePlacement(at, freeze_until, reason)

    def spawn(
        self,
        env: Mapping[str, str],
        owner: User,
        cgroups: Cgroups,
        options: Mapping[str, object],
        *,
        sandbox: Sequence[str] = (),
        pids_max: int | None = None,
    ) -> None:
        """Start the shim. If this fails, call `abandon`: any part may exist."""
        self.folder.prepare()
        if self.stdin is not None:
            self.folder.write_stdin(self.stdin)
            self.stdin, options = None, {**options, "stdin": STDIN}
        self.write_deadline()
        self.group = cgroups.make(self.mark, cgroup.limits_of(self.run.requests, self.run.limits, pids_max))
        cwd = self.run.working_dir or owner.home
        self.folder.write_spec(
            self.run.command, env, cwd=cwd, owner=owner, group=self.group, options=options, sandbox=sandbox
        )
        self.shim, self.announcement = self.folder.spawn()
        self.ours = True
        self.process = os.pidfd_open(self.shim)

    def write_deadline(self) -> None:
        """Write the deadline until the file is current. Locked: the deadline may move while the shim starts."""
        with self._writing:
            while self.deadline is not None and self.deadline != self.deadline_written and self.folder.path.exists():
                deadline, before = self.deadline, self.deadline_written
                self.folder.write_deadline(*deadline)
                self.deadline_written = deadline
                # The shim reads the file by itself only when the time it knows has come. Wake it for other changes:
                # freezing, thawing, another reason.
                if before is not None and before[2:] != deadline[2:]:
                    self.folder.ask_to_look()

    def abandon(self) -> None:
        """Undo a start that failed; no process of it runs when this returns."""
        if self.shim and self.ours:
            with suppress(OSError):
                os.kill(self.shim, signal.SIGKILL)
                os.waitpid(self.shim, 0)
            sweep(self.mark, self.group)
        self.remove_group()
        self.remove_scratch()

    def conclude(self, claim: ShimClaim | None) -> PlacementEnded:
        """Report how the placement ended, once its shim is gone. No process of it runs when this returns."""
        end = self.folder.exit()
        if end is None:
            sweep(self.mark, self.group)
        now = boot_seconds()
        out_of_memory = self.group is not None and self.group.oom_kills() > 0
        usage = meter.final_usage(self.run, end or Exit(0, seconds=self._ran_seconds(now)), self.group, self.usage)
        self.remove_group()
        self.remove_scratch()
        if end is None:
            return self._lost(claim, now, usage)
        reason, message = end.reason, end.message
        if out_of_memory and end.exit_code != 0 and not reason:
            limit = self.run.limits.get("memory") or self.run.requests.get("memory", "")
            reason, message = OOM_KILLED, f"it used more memory than its limit of {limit}"
        return PlacementEnded(self.run.place, now, end.exit_code, reason, message, end.stopped, usage)

    def _lost(self, claim: ShimClaim | None, now: float, usage: Usage) -> PlacementEnded:
        reason, message = SHIM_LOST, "the shim that supervised it was killed"
        if claim is None:
            why = self.folder.errors() or "its shim ended before the command started"
            reason, message = START_FAILED, f"it could not be started: {why}"
        elif claim.boot != boot_id():
            reason, message = NODE_RESTARTED, "the node was restarted while it ran"
        return PlacementEnded(self.run.place, now, None, reason, message, usage=usage)

    def remove_group(self) -> None:
        if self.group is not None and not self.group.remove():
            log.warning("cgroup_removal_failed", message="a control group could not be removed", uid=self.run.uid)

    def remove_scratch(self) -> None:
        """Remove HOME and scratch space. The next start of the agent retries what could not be removed."""
        try:
            self.scratches.remove(self.mark)
        except OSError as error:
            log.warning(
                "scratch_removal_failed", message="the home directory of a placement could not be removed",
                uid=self.run.uid, error=str(error),
            )  # fmt: skip

    def used(self, now: float, below: tuple[float, int] = (0.0, 0)) -> Usage:
        return meter.usage(self.run, self._ran_seconds(now), self.group, below, self.usage)

    def _ran_seconds(self, now: float) -> float:
        """Seconds to pay for: without frozen time and, for a reservation without a command, without the time after its
        deadline."""
        if self.ran_seconds is not None:
            return self.ran_seconds
        if self.run.paid and not self.run.command and self.deadline is not None:
            now = min(now, self.deadline[0])
        frozen_seconds = self.folder.frozen_seconds(now) if self.run.paid and self.run.command else 0.0
        return max(0.0, now - self.started_at - frozen_seconds)


def measure(children: Iterable[RunningPlacement], now: float) -> dict[Place, Usage]:
    """Measure the usage of all children. It reads /proc once, and only if a child has no control group."""
    children = list(children)
    found = meter.processes() if any(child.group is None and child.shim for child in children) else {}
    by_parent = meter.children(found)
    return {
        child.run.place: child.used(now, meter.use_below(child.shim, found, by_parent) if child.shim else (0.0, 0))
        for child in children
    }
