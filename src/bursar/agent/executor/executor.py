"""The executor carries out the state machine's instructions. It runs each command under a shim that outlives the agent.

Write-ahead journal: a start is journaled before the command starts, and an end before it is reported. Instructions that
arrive during an fsync form the next batch: one fsync, however many starts.

The executor watches shims by pidfd, so idle shims cost nothing. When a shim is killed, the executor finds and kills the
processes it leaves behind before it reports the end of the placement.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog

from bursar.agent.control.prepare import Ask, NotGiven, prepare, unreachable
from bursar.agent.executor.child import START_FAILED, RunningPlacement, measure
from bursar.agent.executor.housing import PlacementHome, PlacementHomes
from bursar.agent.executor.journal import (
    Journal,
    JournalBegan,
    JournalGone,
    JournalOver,
    Line,
    Wiped,
    began,
    over,
    used_in,
)
from bursar.agent.executor.log_retention import remove_all, remove_old
from bursar.agent.executor.placement_dir import PlacementDir, ShimClaim, boot_id, sweep
from bursar.agent.host import cgroup
from bursar.agent.host.cgroup import Cgroups
from bursar.agent.host.environment import mark, user
from bursar.agent.host.sandbox import NO_SANDBOX, Sandbox
from bursar.agent.machine.events import Event, PlacementEnded, PlacementStarted, hear
from bursar.agent.machine.paid_window import WindowLine, terms_of
from bursar.agent.machine.state import Forget, Instruction, Machine, MoveDeadline, SignalStop, Start
from bursar.agent.machine.types import Place, Run, Usage
from bursar.agent.shim.clock import boot_seconds
from bursar.daemon_thread import apart
from bursar.rlimit import allow_open_files

log = structlog.get_logger()

LAUNCHES_MAX = 4  # at a time
ASK_AGAIN_SECONDS = 0.05
LONG_SECONDS = 10.0  # from SIGKILL to a warning that a process does not die
CLOSE_SECONDS = 5.0
TIDY_SECONDS = 60.0  # between two removals of old logs

__all__ = ["Event", "Executor", "ExecutorSettings", "PlacementEnded", "PlacementStarted", "hear"]


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """`run_as` is the user of commands; default: the agent's own. In a sandbox every tenant has its own user and
    group, and with `run_as_groups` the groups of `run_as` too. `keep_seconds` and `keep_bytes` limit old logs."""

    run_as: str | None = None
    run_as_groups: bool = False
    output_bytes: int = 16 << 20  # of each of the two files
    keep_seconds: float = 24 * 3600.0
    keep_bytes: int = 1 << 30
    sandbox: Sandbox = NO_SANDBOX
    pids_max: int | None = 4096  # of each placement
    disk_reserve_bytes: int | None = None  # free disk space to preserve; None: the default of `diskguard.py`


class Executor:
    """Runs placements in `folder`, the agent's own directory. `heard` is called in the event loop with each event.
    Times are `boot_seconds`."""

    def __init__(
        self,
        folder: Path,
        node: str,
        heard: Callable[[Event], None],
        *,
        cgroups: Cgroups | None = None,
        settings: ExecutorSettings | None = None,
    ) -> None:
        self._folder = folder / "placements"
        for one in (folder, self._folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._node = node
        self._heard = heard
        self._settings = settings or ExecutorSettings()
        self.cgroups = cgroups if cgroups is not None else cgroup.find(group_name(folder))
        self._journal = Journal(folder / "journal")
        self._housing = PlacementHomes(
            self._settings.sandbox,
            user(self._settings.run_as),
            folder / "homes",
            self._journal.known.users,
            self._append,
            groups=self._settings.run_as_groups,
            disk_reserve_bytes=self._settings.disk_reserve_bytes,
        )
        self._children: dict[Place, RunningPlacement] = {}
        self._queue: list[Instruction | PlacementEnded | WindowLine | Wiped] = []
        self._woken = asyncio.Event()
        self._launches = asyncio.Semaphore(LAUNCHES_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()  # may wait for the kernel for ever
        # For the journal and deadlines only: everything waits for them, so nothing slow may delay them.
        self._writer = ThreadPoolExecutor(1, "agent-writer")
        self._closed = False
        self._tidied_at = -math.inf
        self._tidying = threading.Lock()
        self._owed: list[Line] = []  # ends that could not be written yet
        self.ask: Ask = unreachable  # the call that prepares commands before they start

    # Life.

    async def open(self, machine: Machine) -> list[Instruction]:
        """Before anything else: the machine adopts the placements of the previous agent process."""
        allow_open_files()
        known = self._journal.known
        machine.remember(known.gone)
        done: list[Instruction] = []
        lines: list[Line] = []
        for line in list(known.began.values()):
            child, end = await asyncio.to_thread(self._find, line, known.over.get(line.place))
            now = boot_seconds()
            done += machine.adopt(
                line.run,
                now,
                started=child is not None or end is not None,
                started_at=None if child is None else child.started_at,
                limit=None if child is None else child.limit,
            )
            if end is not None:
                done += hear(machine, end)
                lines += [] if line.place in known.over else [over(end)]
            elif child is not None:
                self._children[line.place] = child
                if child.lost:
                    self._end(self._conclude(child, await asyncio.to_thread(child.folder.claim)))
                else:
                    self._watch(child)
            elif line.place not in {status.place for status in machine.inventory()}:
                lines.append(JournalGone(*line.place))
        machine.measured(await self.usages())
        await self._append(lines)
        await asyncio.to_thread(self._tidy)
        live = {child.mark for child in self._children.values()}
        await asyncio.to_thread(self.cgroups.tidy, live)
        with suppress(OSError):  # the next start tries again
            await asyncio.to_thread(self._housing.scratches.remove_all_but, live)
        home = self._folder.parent
        await asyncio.to_thread(cgroup.leave_earlier, self.cgroups, group_name(home), home / "cgroups")
        self._task(self._work())
        return done

    def keep(self, window: WindowLine) -> None:
        """Journal a window of paid time, before any instruction that follows."""
        self._queue.append(window)
        self._woken.set()

    def execute(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions, in order for each placement; returns at once."""
        self._queue += instructions
        if self._queue:
            self._woken.set()

    async def usages(self) -> dict[Place, Usage]:
        """The usage of all running placements, for `Machine.measured`."""
        measured = await asyncio.to_thread(measure, list(self._children.values()), boot_seconds())
        for place, usage in measured.items():
            if (child := self._children.get(place)) is not None:
                child.usage = usage
        return measured

    async def guard_disk(self) -> None:
        """Stop placements that fill the disk, until cancelled."""
        await self._housing.guard_disk(self._children)

    def log(self, uid: str, epoch: int = 0) -> Path | None:
        """The directory of a placement's output (see logs.py); epoch 0 means the newest."""
        if epoch:
            path = self._path((uid, epoch))
            return path if path.exists() else None
        found = (path for path in self._folder.glob(f"{quote(uid, safe='')}.*") if path.suffix[1:].isdigit())
        return max(found, key=lambda path: int(path.suffix[1:]), default=None)

    async def close(self) -> None:
        """Close all descriptors; running commands continue under their shims."""
        self._closed = True
        self._woken.set()
        if self._endings:
            await asyncio.wait(self._endings, timeout=CLOSE_SECONDS)
        for task in self._endings:
            task.cancel()  # the next start concludes it
        while self._tasks or self._endings:
            await asyncio.wait(self._tasks | self._endings)
        self._writer.shutdown()
        for child in self._children.values():
            self._let_go(child)
        self._journal.close()
        self.cgroups.remove({child.mark for child in self._children.values()})

    # Adoption after a restart of the agent.

    def _find(
        self, line: JournalBegan, ended: JournalOver | None
    ) -> tuple[RunningPlacement | None, PlacementEnded | None]:
        """The placement as found: running, ended, or (neither) never started."""
        now = boot_seconds()
        if ended is not None:
            usage = used_in(line.run, ended)
            return None, PlacementEnded(
                ended.place, now, ended.exit_code, ended.reason, ended.message, ended.stopped, usage
            )
        child = RunningPlacement(line.run, PlacementDir(self._path(line.place)), self._housing.scratches)
        paid_window = self._journal.known.paid_windows.get(line.place)
        if not line.run.command:
            child.started_at = line.begun_at(boot_id(), now)
            if line.run.paid:
                # It has no shim, so the agent keeps its deadline.
                child.deadline, child.ran_seconds = terms_of(paid_window, boot_id(), now)
            return child, None
        claim = child.folder.claim()
        if claim is None:
            # From now on a shim that is starting up gives up; it may have claimed the directory before.
            child.folder.void()
            claim = child.folder.claim()
        if claim is None:
            return None, None
        child.group = child.folder.group()
        if (process := claim.process()) is None:
            if child.folder.exit() is not None:
                return None, child.conclude(claim)
            child.lost = True
            child.ran_seconds = None if paid_window is None else paid_window.paid.used_seconds
            return child, None
        child.shim, child.process = claim.pid, process
        child.started_at = child.folder.started_at() or now
        child.deadline = child.deadline_written = child.folder.terms()
        return child, None

    # Carrying out.

    async def _work(self) -> None:
        while self._queue or not self._closed:
            await self._woken.wait()
            self._woken.clear()
            batch, self._queue = self._queue, []
            failed = await self._write(batch)
            for one in batch:
                if isinstance(one, WindowLine | Wiped):
                    continue
                try:
                    await self._carry_out(one, failed)
                except Exception:
                    # The instruction itself is not logged: its environment may hold secrets.
                    log.exception(
                        "instruction_failed",
                        message="an instruction failed",
                        instruction=type(one).__name__,
                        place=one.place,
                    )
                    if isinstance(one, Start):
                        self._never_began(one.place, "the agent failed, see its log")
            if boot_seconds() >= self._tidied_at + TIDY_SECONDS:
                await asyncio.to_thread(self._tidy)

    async def _write(self, batch: list[Instruction | PlacementEnded | WindowLine | Wiped]) -> str:
        """Write a batch to the journal with one fsync; returns the error, or an empty text."""
        lines = [*self._owed, *(line for one in batch if (line := _line(one)) is not None)]
        try:
            await self._append(lines)
        except OSError as error:
            # Ends are reported all the same, and journaled as soon as the disk can be written.
            self._owed = [line for line in lines if isinstance(line, JournalOver)]
            log.error("journal_write_failed", message="the journal cannot be written", error=str(error))
            return f"the agent's journal cannot be written: {error.strerror}"
        self._owed = []
        return ""

    async def _append(self, lines: list[Line]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.append, lines)

    async def _carry_out(self, one: Instruction | PlacementEnded, failed: str) -> None:
        if isinstance(one, Start):
            self._start(one, failed)
        elif isinstance(one, SignalStop):
            self._stop(one)
        elif isinstance(one, MoveDeadline):
            if (child := self._children.get(one.place)) is not None:
                child.deadline = (one.at, one.grace_seconds, one.freeze_until, one.reason)
                await asyncio.get_running_loop().run_in_executor(self._writer, child.write_deadline)
        elif isinstance(one, PlacementEnded):
            self._heard(one)

    def _start(self, start: Start, failed: str) -> None:
        """Start a placement, unless its journal entry failed: after a crash the command would be unknown. While the
        agent closes, nothing starts; the next start of the agent does."""
        if start.place in self._children or self._closed:
            return
        if failed:
            self._heard(PlacementEnded(start.place, boot_seconds(), None, START_FAILED, failed))
            return
        folder = PlacementDir(self._path(start.place))
        at = start.deadline
        deadline = None if at is None else (at, start.grace_seconds, start.freeze_until, start.reason)
        child = RunningPlacement(start.run, folder, self._housing.scratches, deadline=deadline)
        self._children[start.place] = child
        if start.run.command:
            self._task(self._launch(child))
        else:
            self._heard(PlacementStarted(start.place, child.started_at))

    async def _launch(self, child: RunningPlacement) -> None:
        try:
            needed = await prepare(self.ask, child.run, lambda: self._closed or child.kill_at is not None)
            if needed is None and child.kill_at is None:
                self._children.pop(child.run.place, None)
                return  # The next start of the agent starts it.
            if needed is None:
                raise NotGiven("it was stopped before it began")
            child.stdin = needed.stdin
            async with self._launches:
                if child.run.wipe:
                    await self._clear()
                capacity = await self._housing.home_of(child)
                env = await asyncio.to_thread(capacity.environment, child.run, self._node)
                env = needed.add_to(env, child.run.env)
                options, pids_max = self._options(child.run, capacity), self._settings.pids_max
                spawn = partial(child.spawn, sandbox=capacity.sandbox, pids_max=pids_max)
                await asyncio.to_thread(spawn, env, capacity.owner, self.cgroups, options)
            self._watch(child)
        except Exception as error:
            expected = isinstance(error, OSError | ValueError)
            log.warning(
                "command_start_failed", message="a command could not be started",
                uid=child.run.uid, error=str(error), exc_info=not expected,
            )  # fmt: skip
            self._let_go(child)
            self._end(self._abandon(child, str(error) if expected else f"{type(error).__name__}: {error}"))

    async def _clear(self) -> None:
        """Before a wipe: remove everything of ended placements except how they ended. The journal keeps that until it
        is acknowledged."""
        live = set(self._children)
        fingerprints = {mark(place) for place in live}
        await asyncio.to_thread(self._remove_all_but, fingerprints)
        await asyncio.to_thread(self._housing.scratches.remove_all_but, fingerprints)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.strip, live)

    async def _abandon(self, child: RunningPlacement, why: str) -> None:
        child.lost = True
        await apart(child.abandon)
        self._never_began(child.run.place, why)

    def _never_began(self, place: Place, why: str) -> None:
        self._children.pop(place, None)
        self._say(PlacementEnded(place, boot_seconds(), None, START_FAILED, f"it could not be started: {why}"))

    def _options(self, run: Run, capacity: PlacementHome) -> dict[str, object]:
        options = {"ttl": run.ttl_seconds, "grace": run.grace_seconds, "output_bytes": self._settings.output_bytes}
        return {**options, "umask": capacity.umask}

    def _stop(self, stop: SignalStop) -> None:
        child = self._children.get(stop.place)
        if child is None:
            return
        now = boot_seconds()
        if not child.run.command:
            self._over(child, PlacementEnded(stop.place, now, None, stop.reason, stopped=True, usage=child.used(now)))
            return
        if child.kill_at is not None and child.kill_at < now and not child.forced:
            child.forced = True
            self._end(self._force(child))
        kill_at = now + stop.grace_seconds
        child.kill_at = kill_at if child.kill_at is None else min(kill_at, child.kill_at)
        child.stop_reason = stop.reason
        self._ask(child)

    def _ask(self, child: RunningPlacement) -> None:
        """Ask the shim to stop; repeat while the shim is still starting up."""
        if self._closed or child.lost or child.kill_at is None or self._children.get(child.run.place) is not child:
            return
        if not child.folder.ask_to_stop(child.kill_at - boot_seconds(), child.stop_reason):
            asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self._ask, child)

    async def _force(self, child: RunningPlacement) -> None:
        """Kill the processes of a placement whose shim has not done so in time; the shim may be stopped (SIGSTOP). One
        attempt at a time: an unkillable process would otherwise occupy one thread after another."""
        with suppress(OSError):
            signal.pidfd_send_signal(child.process, signal.SIGCONT)
        await apart(lambda: sweep(child.mark, child.group))
        child.forced = False

    # Events of shims.

    def _watch(self, child: RunningPlacement) -> None:
        loop = asyncio.get_running_loop()
        if child.process >= 0:
            loop.add_reader(child.process, self._exited, child)
        if child.announcement >= 0:
            loop.add_reader(child.announcement, self._announced, child)
        if child.deadline != child.deadline_written:
            self._task(asyncio.to_thread(child.write_deadline))

    def _announced(self, child: RunningPlacement) -> None:
        data = os.read(child.announcement, 64)
        asyncio.get_running_loop().remove_reader(child.announcement)
        os.close(child.announcement)
        child.announcement = -1
        if data:
            child.started_at = boot_seconds()
            self._heard(PlacementStarted(child.run.place, child.started_at))

    def _exited(self, child: RunningPlacement) -> None:
        if child.announcement >= 0:
            self._announced(child)
        self._let_go(child)
        if child.ours:
            with suppress(ChildProcessError):
                os.waitpid(child.shim, os.WNOHANG)
        self._end(self._settle(child))

    async def _settle(self, child: RunningPlacement) -> None:
        claim = await asyncio.to_thread(child.folder.claim)
        if claim is not None and claim.pid != child.shim and (process := claim.process()) is not None:
            # A shim that the previous agent process started claimed the directory first.
            child.shim, child.process, child.ours = claim.pid, process, False
            self._watch(child)
            self._heard(PlacementStarted(child.run.place, child.folder.started_at() or boot_seconds()))
            return
        child.lost = True
        await self._conclude(child, claim)

    async def _conclude(self, child: RunningPlacement, claim: ShimClaim | None) -> None:
        """Report the end once no process is left: until then its devices are in use."""
        work = asyncio.ensure_future(apart(lambda: child.conclude(claim)))
        if not (await asyncio.wait({work}, timeout=LONG_SECONDS))[0]:
            log.warning(
                "process_unkillable", message="a process cannot be killed: its placement has not ended",
                uid=child.run.uid, shim=child.shim,
            )  # fmt: skip
        self._over(child, await work)

    def _over(self, child: RunningPlacement, end: PlacementEnded) -> None:
        if self._children.get(child.run.place) is child:
            del self._children[child.run.place]
        if child.run.wipe and end.exit_code == 0 and not end.reason:
            # Users are reassigned only after a wipe: no file of theirs is left that the next tenant would own.
            self._queue.append(self._housing.give_back(self._children.values()))
        self._say(end)

    def _say(self, end: PlacementEnded) -> None:
        """Report an end once it is journaled."""
        self._queue.append(end)
        self._woken.set()

    def _let_go(self, child: RunningPlacement) -> None:
        loop = asyncio.get_running_loop()
        for fd in (child.process, child.announcement):
            if fd >= 0:
                loop.remove_reader(fd)
                os.close(fd)
        child.process = child.announcement = -1

    # Housekeeping.

    def _remove_all_but(self, names: set[str]) -> None:
        with self._tidying:
            remove_all(self._folder, names)

    def _tidy(self) -> None:
        """Remove logs of ended placements beyond the limits of age and size."""
        self._tidied_at = boot_seconds()
        live = {mark(place) for place in list(self._journal.known.began)}
        with self._tidying, suppress(OSError):
            remove_old(self._folder, live, self._settings.keep_seconds, self._settings.keep_bytes)

    def _path(self, place: Place) -> Path:
        return self._folder / mark(place)

    def _task(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]] | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work)
        (self._tasks if tasks is None else tasks).add(task)
        task.add_done_callback(self._done)

    def _end(self, work: Coroutine[Any, Any, None]) -> None:
        self._task(work, self._endings)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("executor_task_failed", message="a task of the executor failed", exc_info=error)


def group_name(folder: Path) -> str:
    """The name of an agent's control group, unique per data directory: several agents may share a machine."""
    return f"bursar-{sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"


def _line(one: Instruction | PlacementEnded | WindowLine | Wiped) -> Line | None:
    if isinstance(one, WindowLine | Wiped):
        return one
    if isinstance(one, Start):
        return began(one.run)
    if isinstance(one, PlacementEnded):
        return over(one)
    return JournalGone(*one.place) if isinstance(one, Forget) else None
