"""One placement that was begun and has not ended: what of it is on this machine, and how it came to its end.

Everything here may wait for the disk or for the kernel, and so belongs in a thread.
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
    ours: bool = False  # the shim is our child, to be buried by us
    process: int = -1  # its pidfd
    announcement: int = -1  # a pipe on which it says that the command has started
    kill_at: float | None = None
    stop_reason: str = ""
    stdin: bytes | None = None  # what the command reads
    forced: bool = False  # its processes are being killed without its shim
    lost: bool = False  # its shim is gone, and what it leaves behind may not be dead yet
    usage: Usage = field(default_factory=Usage)
    ran_seconds: float | None = None  # where it is over, and only an earlier life of the agent has seen how long it ran
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
        """Where that fails, it may have come any distance: `abandon` it."""
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
        """Moved meanwhile, it is written again. One at a time: it may be moved while the shim is being started."""
        with self._writing:
            while self.deadline is not None and self.deadline != self.deadline_written and self.folder.path.exists():
                deadline, before = self.deadline, self.deadline_written
                self.folder.write_deadline(*deadline)
                self.deadline_written = deadline
                # What it does not wait for is not read by itself: that it freezes, or goes on, or must end for another
                # reason. It looks in any case when the one that it knows has come.
                if before is not None and before[2:] != deadline[2:]:
                    self.folder.ask_to_look()

    def abandon(self) -> None:
        """As if it had never been started; nothing of it runs when this returns."""
        if self.shim and self.ours:
            with suppress(OSError):
                os.kill(self.shim, signal.SIGKILL)
                os.waitpid(self.shim, 0)
            sweep(self.mark, self.group)
        self.remove_group()
        self.remove_scratch()

    def conclude(self, claim: ShimClaim | None) -> PlacementEnded:
        """How it ended, when its shim is gone. Nothing of it runs when this returns."""
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
        reason, message = SHIM_LOST, "the process that watched over it was killed"
        if claim is None:
            why = self.folder.errors() or "its shim ended before it began"
            reason, message = START_FAILED, f"it could not be started: {why}"
        elif claim.boot != boot_id():
            reason, message = NODE_RESTARTED, "the node was restarted while it ran"
        return PlacementEnded(self.run.place, now, None, reason, message, usage=usage)

    def remove_group(self) -> None:
        if self.group is not None and not self.group.remove():
            log.warning("a control group could not be removed", uid=self.run.uid)

    def remove_scratch(self) -> None:
        """What stays is tried again by the next life of the agent."""
        try:
            self.scratches.remove(self.mark)
        except OSError as error:
            log.warning("the home of a placement could not be removed", uid=self.run.uid, error=str(error))

    def used(self, now: float, below: tuple[float, int] = (0.0, 0)) -> Usage:
        return meter.usage(self.run, self._ran_seconds(now), self.group, below, self.usage)

    def _ran_seconds(self, now: float) -> float:
        """What is paid for may have been frozen: nobody pays for that time. Nor for what comes after the end of paid
        time, where nothing runs that would have to be ended."""
        if self.ran_seconds is not None:
            return self.ran_seconds
        if self.run.paid and not self.run.command and self.deadline is not None:
            now = min(now, self.deadline[0])
        frozen_seconds = self.folder.frozen_seconds(now) if self.run.paid and self.run.command else 0.0
        return max(0.0, now - self.started_at - frozen_seconds)


def measure(children: Iterable[RunningPlacement], now: float) -> dict[Place, Usage]:
    """One walk over all processes, and only where something has no group to ask."""
    children = list(children)
    found = meter.processes() if any(child.group is None and child.shim for child in children) else {}
    by_parent = meter.children(found)
    return {
        child.run.place: child.used(now, meter.use_below(child.shim, found, by_parent) if child.shim else (0.0, 0))
        for child in children
    }
