"""The shim supervises one command: it outlives the agent, and no process of the command outlives it.

It runs in the placement's directory, in its own session, and needs no agent: it enforces the deadline, the ttl and the
grace period by CLOCK_BOOTTIME (see `clock.py`). The directory contains:

    spec      from the agent: fields `key=value`, each terminated by a NUL
    control   a FIFO for requests of the agent, one line each: `stop SECONDS REASON`; `fail REASON MESSAGE` ends the
              command at once; `look` reads the deadline again
    deadline  from the agent: when to stop the command, and the grace; for prepaid work also until when to freeze it
              instead (0: do not freeze) and the reason of its end. The content is doubled, so that a torn write is
              detected, and written in place, so that it moves on a full disk. It only moves forward: the shim reads it
              again only when the known deadline has come, or on `look`
    frozen    total seconds frozen, and since when (0: not frozen now)
    claim     pid, start time and boot of the shim that took the placement. There is one claim, so one command, ever
    started   the pid of the command, and its start time
    output.N  the command's output from byte N on; only the newest two files are kept
    status    how it ended (JSON), written when no process of it is left

It imports few modules, and C modules instead of their Python wrappers: there is one shim per command, and each must
start fast.
"""

from __future__ import annotations

import errno
import os
import select
import time
from _json import encode_basestring_ascii
from _signal import SIG_IGN, set_wakeup_fd, signal  # type: ignore[import-not-found]

from bursar.agent.shim.clock import boot_seconds
from bursar.agent.shim.deadline import CREDIT_EXHAUSTED, LEASE_EXPIRED, parse_deadline
from bursar.agent.shim.launch import CHLD, HUP, INT, KILL, QUIT, TERM, SpecFields, become, explain, one
from bursar.agent.shim.namespaces import Namespaces
from bursar.agent.shim.output import OutputFile
from bursar.agent.shim.proc import (
    PR_SET_CHILD_SUBREAPER,
    descendants,
    prctl,
    read,
    save,
    start_ticks,
    sync_folder,
    write,
)

CONT, STOP = 18, 19
CHUNK_BYTES = 65536
SETTLE_SECONDS_MIN, SETTLE_SECONDS_MAX = 0.005, 1.0
STATUS_BYTES = 4096  # preallocated, so that the status can be written on a full disk
OUTPUT_BYTES_MAX = 16 << 20  # of each of the two files
GRACE_SECONDS = 30.0
LOOK_SECONDS = 2.0  # timers stop while the machine sleeps: deadlines are noticed this long after waking
DEADLINE_READS = 100
FREEZE_WALKS = 20  # passes until SIGSTOP has reached all processes: each may have forked meanwhile
_INFINITE = float("inf")


class CommandStartError(Exception):
    """The command cannot be started: the stage that failed, and the errno."""


def main(folder: str) -> int:
    os.umask(0o077)
    os.closerange(3, 65536)
    os.chdir(folder)
    fields = _read_spec()
    if not _claim():
        return 3
    _set_aside()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    shim = Shim(fields)
    try:
        shim.start()
    except CommandStartError as error:
        stage, number = error.args
        shim.finish(*explain(stage, number, fields))
        return 0
    shim.announce()
    shim.run()
    return 0


class Shim:
    def __init__(self, fields: SpecFields) -> None:
        self.fields = fields
        self.kill_file = one(fields, b"kill")
        self.members_file = one(fields, b"members")
        self.freeze_file = one(fields, b"freeze")
        self.grace_seconds = float(one(fields, b"grace") or GRACE_SECONDS)
        self.output = OutputFile(int(one(fields, b"output_bytes") or OUTPUT_BYTES_MAX))
        self.wake, wake_in = os.pipe()
        os.set_blocking(wake_in, False)
        set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for number in (HUP, INT, QUIT, CHLD, TERM):
            signal(number, SIG_IGN if number in (HUP, INT, QUIT) else lambda *_: None)  # the pipe is written to
        self.control = os.open("control", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.asked, self.pid, self.pipe = b"", 0, -1
        self.namespaces: Namespaces | None = None
        self.began = boot_seconds()
        self.expires_at = _INFINITE
        self.lease_grace_seconds = self.grace_seconds
        self.deadline = 0.0
        self.freeze_until, self.end_reason = 0.0, LEASE_EXPIRED
        self.frozen_at, self.frozen_seconds = 0.0, 0.0
        self._read_deadline()
        self.kill_at = _INFINITE
        self.reason, self.message, self.stopped = "", "", False
        self.exit_code: int | None = None
        self.cpu_seconds, self.memory_kilobytes_max = 0.0, 0

    # The start.

    def start(self) -> None:
        """Start the command; its exec has succeeded when this returns. Without a valid lease it is not started, because
        the allocation may run elsewhere by now."""
        if boot_seconds() >= self.deadline:
            raise CommandStartError("lease", 0)
        if arguments := self.fields.get(b"sandbox"):
            try:
                self.namespaces = Namespaces(arguments)
            except OSError as error:
                raise CommandStartError("sandbox", error.errno) from error
        self.pipe, write_end = os.pipe()
        os.set_blocking(self.pipe, False)
        report, report_end = os.pipe()
        try:
            self.pid = os.fork()
        except OSError as error:
            raise CommandStartError("fork", error.errno) from error
        if self.pid == 0:
            become(self.fields, self.namespaces, write_end, report_end)
        for fd in (write_end, report_end):
            os.close(fd)
        if fault := os.read(report, 256):
            os.waitpid(self.pid, 0)
            stage, _, number = fault.decode().partition(" ")
            self._drop_namespaces()
            raise CommandStartError(stage, int(number))
        self.began = boot_seconds()
        ttl_seconds = float(one(self.fields, b"ttl") or 0)
        self.expires_at = self.began + ttl_seconds if ttl_seconds else _INFINITE

    def announce(self) -> None:
        """Report the start: on disk for a later agent, and on standard output for the current one."""
        try:
            save("started", f"{self.pid} {start_ticks(self.pid)} {self.began!r}\n".encode())
            os.write(1, b"started\n")
        except OSError:
            pass  # the disk is full, or the agent is gone; the command runs all the same
        os.dup2(2, 1)

    # Supervision.

    def run(self) -> None:
        poll = select.poll()
        for fd in (self.wake, self.control, self.pipe):
            poll.register(fd, select.POLLIN)
        while self.exit_code is None:
            for fd, _ in poll.poll(self._wait_milliseconds()):
                if fd == self.pipe:
                    if not self._copy():
                        poll.unregister(self.pipe)
                elif fd == self.control:
                    self._listen()
                else:
                    self._wake()
            self._keep_time()
        self._kill_the_rest()
        while self._copy():
            pass
        over = "stopped: its account ran out of credit" if self.reason == CREDIT_EXHAUSTED else self.message
        self.finish(self.exit_code, self.reason, over)

    def _wait_milliseconds(self) -> int:
        over_at = self.freeze_until if self.frozen_at else self.deadline
        at = min(self.kill_at if self.stopping else self.expires_at, over_at)
        longest = LOOK_SECONDS if at != _INFINITE else 3600.0
        return int(min(longest, max(0.0, at - boot_seconds())) * 1000) + 1

    @property
    def stopping(self) -> bool:
        return self.kill_at != _INFINITE

    def _keep_time(self) -> None:
        now = boot_seconds()
        if now >= self.deadline and now >= self._read_deadline():
            self._be_over(now)
        elif self.frozen_at and not self.stopping:
            self._thaw()
        if now >= self.expires_at and not self.stopping:
            self._stop(self.grace_seconds, "Expired", stopped=False)
        if now >= self.kill_at:
            self._signal_all(KILL)
            self.kill_at = now + SETTLE_SECONDS_MAX

    def _be_over(self, now: float) -> None:
        """The deadline has passed: freeze or stop the command, also if it is stopping with a longer grace. The grace
        counts from the deadline; for a frozen command it counts from the end of the freeze."""
        if now < self.freeze_until and not self.stopping:
            self._freeze(now)
            return
        over_at = (self.freeze_until or now) if self.frozen_at else self.deadline
        self._stop(over_at + self.lease_grace_seconds - now, self.end_reason, stopped=True)
        self.deadline = _INFINITE

    def _freeze(self, now: float) -> None:
        self._set_frozen(True)  # repeatedly: other processes of the user may send SIGCONT
        if self.frozen_at:
            return
        self.frozen_at = now
        self._note_frozen()
        seconds = round(self.freeze_until - now)
        self.output.note(f"frozen: over the spend rate limit; stopping in {seconds} s unless the rate drops")

    def _thaw(self) -> None:
        self.frozen_seconds += boot_seconds() - self.frozen_at
        self.frozen_at = 0.0
        self._set_frozen(False)
        self._note_frozen()
        self.output.note("resumed" if not self.stopping else "stopping")

    def _set_frozen(self, frozen: bool) -> None:
        """Freeze or thaw by the control group; without one by signals, until no new process appears."""
        try:
            write(self.freeze_file, b"1" if frozen else b"0")
        except OSError:
            self._set_frozen_one_byone(frozen)

    def _set_frozen_one_byone(self, frozen: bool) -> None:
        seen: set[int] = set()
        for _ in range(FREEZE_WALKS):
            found = {*self._members(), *descendants()}
            self._signal(found, STOP if frozen else CONT)
            if found <= seen:
                return
            seen |= found

    def _note_frozen(self) -> None:
        try:
            save("frozen", f"{self.frozen_seconds!r} {self.frozen_at!r}\n".encode())
        except OSError:
            pass  # the disk is full; the status has the total all the same

    def _look(self) -> None:
        """Read the deadline early, and warn in the log if the paid time is about to end."""
        before = self.end_reason, self.freeze_until > 0
        if self.deadline == _INFINITE:
            return
        self._read_deadline()
        if before == (self.end_reason, self.freeze_until > 0) or self.stopping or self.frozen_at:
            return
        seconds = round(max(0.0, self.deadline - boot_seconds()))
        if self.freeze_until:
            self.output.note(f"over the spend rate limit: freezing in {seconds} s unless the rate drops")
        elif self.end_reason == CREDIT_EXHAUSTED:
            self.output.note(f"out of credit: stopping in {seconds} s unless the account is topped up")
        else:
            self.output.note("paid again: it keeps running")

    def _read_deadline(self) -> float:
        """Read the deadline. If the file is missing, the known deadline stays; without any there is no limit."""
        for _ in range(DEADLINE_READS):
            try:
                said = parse_deadline(read("deadline"))
            except OSError:
                self.deadline = self.deadline or _INFINITE
                break
            if said is not None:
                at, grace_seconds, self.freeze_until, self.end_reason = said
                self.deadline = max(self.deadline, at)
                self.lease_grace_seconds = self.grace_seconds if grace_seconds is None else grace_seconds
                break
            time.sleep(SETTLE_SECONDS_MIN)
        return self.deadline

    def _stop(self, grace_seconds: float, reason: str, *, stopped: bool) -> None:
        """Stop the command. The first reason stays; a repeated request can only shorten the grace."""
        kill_at = boot_seconds() + max(0.0, grace_seconds)
        if not self.stopping:
            self.reason, self.stopped = reason, stopped
            self.kill_at = kill_at
            if self.frozen_at and grace_seconds > 0:
                self._thaw()
            if grace_seconds > 0:
                self._signal_all(TERM)
                self._signal_all(CONT)
        self.kill_at = min(self.kill_at, kill_at)

    def _listen(self) -> None:
        *lines, self.asked = (self.asked + os.read(self.control, 4096)).split(b"\n")
        for line in lines:
            verb, _, rest = line.partition(b" ")
            first, _, second = rest.partition(b" ")
            if verb == b"stop":
                self._stop(float(first), second.decode("utf-8", "replace"), stopped=True)
            elif verb == b"fail" and not self.stopping:
                self.message = second.decode("utf-8", "replace")
                self._stop(0.0, first.decode("utf-8", "replace"), stopped=False)
            elif verb == b"look":
                self._look()

    def _wake(self) -> None:
        """A signal arrived: reap children; on SIGTERM stop the command."""
        if TERM in os.read(self.wake, 4096):
            self._stop(self.grace_seconds, "Terminated", stopped=True)
        self._reap()

    def _reap(self) -> bool:
        """Reap children; whether any is left. The shim is a subreaper, so no child means that no process is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.cpu_seconds += usage.ru_utime + usage.ru_stime
            self.memory_kilobytes_max = max(self.memory_kilobytes_max, usage.ru_maxrss)
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code

    def _copy(self) -> bool:
        """Copy output from the pipe; whether there may be more."""
        try:
            data = os.read(self.pipe, CHUNK_BYTES)
        except BlockingIOError:
            return self.exit_code is None
        self.output.write(data)
        return bool(data)

    # The end.

    def _kill_the_rest(self) -> None:
        """Kill every process that the command left behind."""
        pause = SETTLE_SECONDS_MIN
        self._drop_namespaces()
        while self._reap() or self._members():
            self._signal_all(KILL)
            self._copy()
            time.sleep(pause)
            pause = min(2 * pause, SETTLE_SECONDS_MAX)

    def _drop_namespaces(self) -> None:
        """Release the sandbox; from then on its own processes must end too."""
        if self.namespaces is not None:
            self.namespaces.drop()
            self.namespaces = None

    def _signal_all(self, number: int) -> None:
        """Signal all processes of the control group and all descendants of the shim."""
        if number == KILL and self.kill_file:
            try:
                write(self.kill_file, b"1")
            except OSError:
                pass  # the signals below do it
        self._signal({*self._members(), *descendants()}, number)

    def _signal(self, pids: set[int], number: int) -> None:
        """Signal the command itself first, then the others by age. A parent that waits for a child must receive the
        signal before the child dies: otherwise it takes that for a normal end and skips its cleanup."""
        own = self.namespaces.own if self.namespaces is not None else set()
        for pid in sorted(pids - own, key=lambda pid: (pid != self.pid, pid)):
            try:
                os.kill(pid, number)
            except OSError:
                continue

    def _members(self) -> list[int]:
        if not self.members_file:
            return []
        try:
            return [int(line) for line in read(self.members_file).split()]
        except OSError:
            return []  # the group was removed, so it was empty

    def finish(self, exit_code: int, reason: str, message: str) -> None:
        said = {
            "exitCode": exit_code,
            "reason": reason[:256],
            "message": message[:1024],
            "stopped": self.stopped,
            "seconds": round(self._ran_seconds(), 6),
            "cpuSeconds": round(self.cpu_seconds, 6),
            "memoryBytesMax": self.memory_kilobytes_max * 1024,
        }
        text = "{" + ", ".join(f'"{name}": {_json(value)}' for name, value in said.items()) + "}"
        while True:
            try:
                save("status", text.encode().ljust(STATUS_BYTES - 1) + b"\n")
                return sync_folder()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                time.sleep(SETTLE_SECONDS_MAX)

    def _ran_seconds(self) -> float:
        """Run time without frozen time, which is not charged."""
        now = boot_seconds()
        return now - self.began - self.frozen_seconds - (now - self.frozen_at if self.frozen_at else 0.0)


# Files.


def _read_spec() -> SpecFields:
    fields: SpecFields = {}
    for field in read("spec").split(b"\0")[:-1]:
        key, _, value = field.partition(b"=")
        fields.setdefault(key, []).append(value)
    return fields


def _claim() -> bool:
    """Claim the placement by an atomic hard link; a second shim fails."""
    boot = read("/proc/sys/kernel/random/boot_id").decode().strip()
    pid = os.getpid()
    mine = f"claim.{pid}"
    save(mine, f"{pid} {start_ticks(pid)} {boot}\n".encode())
    try:
        os.link(mine, "claim")
    except FileExistsError:
        return False
    finally:
        os.unlink(mine)
    sync_folder()
    return True


def _set_aside() -> None:
    """Preallocate the status file."""
    try:
        save("status.new", b" " * STATUS_BYTES)
    except OSError:
        os.unlink("claim")  # nothing was started
        raise


def _json(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else encode_basestring_ascii(str(value))
