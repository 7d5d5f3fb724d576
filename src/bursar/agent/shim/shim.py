"""The process between an agent and one command: it outlives the agent, and nothing of the command outlives it.

It lives in the placement's folder, alone and in a session of its own, and needs nobody: the deadline, the longest
runtime and the grace are kept on the node's clock (see `clock.py`) whether the agent is there or not. In the folder:

    spec      from the agent: fields `key=value`, each ended by a NUL
    control   a FIFO, through which the agent asks for an end, `stop SECONDS REASON`, ends what has failed, `fail REASON
              MESSAGE`, or says that the deadline is to be read again, `look`; one line each
    deadline  from the agent: the moment at which it must end, and within how many seconds; and, of what is paid for,
              until when it may be frozen instead (0: not at all), and why it ends. It is said twice, so that one that
              is half written is noticed, and written in place, so that a full disk cannot keep it from moving. It only
              ever moves forward, so it is read again only when the one that was read has come, or when told to look
    frozen    how many seconds it was frozen in all, and since when it is (0: it is not)
    claim     who has taken the placement: pid, start time, boot. There is one claim ever, so there is one command ever
    started   the command's pid, and when it began
    output.N  what it wrote, from byte N on; only the newest two of them are kept
    status    how it ended (JSON), written when nothing of it runs any more

Few modules are imported, of C and from behind the public ones: each shim, one per command, must start in no time.
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
STATUS_BYTES = 4096  # set aside from the start, so that a full disk cannot keep us from saying how it ended
OUTPUT_BYTES_MAX = 16 << 20  # of each of the two files
GRACE_SECONDS = 30.0
LOOK_SECONDS = 2.0  # timers stand still while the machine sleeps: so long after it wakes up, what is over is known
DEADLINE_READS = 100
FREEZE_WALKS = 20  # until all that is stopped one by one has stopped: each may have started others meanwhile
_INFINITE = float("inf")


class CommandStartError(Exception):
    """The command cannot be started: the stage that failed, and the number of the error."""


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
        self.walls: Namespaces | None = None
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
        """The command runs when this returns: its exec has happened. Whose lease is over may run elsewhere by now."""
        if boot_seconds() >= self.deadline:
            raise CommandStartError("lease", 0)
        if arguments := self.fields.get(b"sandbox"):
            try:
                self.walls = Namespaces(arguments)
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
            become(self.fields, self.walls, write_end, report_end)
        for fd in (write_end, report_end):
            os.close(fd)
        if fault := os.read(report, 256):
            os.waitpid(self.pid, 0)
            stage, _, number = fault.decode().partition(" ")
            self._drop_walls()
            raise CommandStartError(stage, int(number))
        self.began = boot_seconds()
        ttl_seconds = float(one(self.fields, b"ttl") or 0)
        self.expires_at = self.began + ttl_seconds if ttl_seconds else _INFINITE

    def announce(self) -> None:
        """On disk for an agent to come, and through our output for the one that waits."""
        try:
            save("started", f"{self.pid} {start_ticks(self.pid)} {self.began!r}\n".encode())
            os.write(1, b"started\n")
        except OSError:
            pass  # the disk is full, or nobody waits any more; the command runs all the same
        os.dup2(2, 1)

    # The life.

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
        over = "its paid time is over, and no more was granted" if self.reason == CREDIT_EXHAUSTED else self.message
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
        """It may not run any longer; what is being stopped with a longer grace may not either. Who comes late has no
        time left to ask, but for what was frozen meanwhile."""
        if now < self.freeze_until and not self.stopping:
            self._freeze(now)
            return
        over_at = (self.freeze_until or now) if self.frozen_at else self.deadline
        self._stop(over_at + self.lease_grace_seconds - now, self.end_reason, stopped=True)
        self.deadline = _INFINITE

    def _freeze(self, now: float) -> None:
        self._set_frozen(True)  # Again and again: others of the same user may try to wake it.
        if self.frozen_at:
            return
        self.frozen_at = now
        self._note_frozen()
        seconds = round(self.freeze_until - now)
        self.output.note(f"frozen: its account spends too fast. It goes on when it may, and ends after {seconds} s")

    def _thaw(self) -> None:
        self.frozen_seconds += boot_seconds() - self.frozen_at
        self.frozen_at = 0.0
        self._set_frozen(False)
        self._note_frozen()
        self.output.note("it goes on" if not self.stopping else "it is asked to end")

    def _set_frozen(self, frozen: bool) -> None:
        """By its control group, all at once; else one by one, until nobody has started another."""
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
            pass  # the disk is full; at the end it is told all the same

    def _look(self) -> None:
        """The agent has heard something about paid time: who is about to lose it is told while there is some left."""
        before = self.end_reason, self.freeze_until > 0
        if self.deadline == _INFINITE:
            return
        self._read_deadline()
        if before == (self.end_reason, self.freeze_until > 0) or self.stopping or self.frozen_at:
            return
        seconds = round(max(0.0, self.deadline - boot_seconds()))
        if self.freeze_until:
            self.output.note(f"its account spends too fast: it is frozen in {seconds} s, unless that changes")
        elif self.end_reason == CREDIT_EXHAUSTED:
            self.output.note(f"no more time is paid for: it is asked to end in {seconds} s, unless there is credit")
        else:
            self.output.note("its time is paid for again")

    def _read_deadline(self) -> float:
        """The one that was known stays where there is none to read; who never had one needs none."""
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
        """The first reason stays; asked again, it may only become sooner."""
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
        """Somebody has died, or we are asked to: then we take the command with us."""
        if TERM in os.read(self.wake, 4096):
            self._stop(self.grace_seconds, "Terminated", stopped=True)
        self._reap()

    def _reap(self) -> bool:
        """Whether anything is left. We inherit whatever forks away, so no child means that nothing is left."""
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
        """What the command wrote; whether there may be more."""
        try:
            data = os.read(self.pipe, CHUNK_BYTES)
        except BlockingIOError:
            return self.exit_code is None
        self.output.write(data)
        return bool(data)

    # The end.

    def _kill_the_rest(self) -> None:
        """What the command leaves behind ends with it."""
        pause = SETTLE_SECONDS_MIN
        self._drop_walls()
        while self._reap() or self._members():
            self._signal_all(KILL)
            self._copy()
            time.sleep(pause)
            pause = min(2 * pause, SETTLE_SECONDS_MAX)

    def _drop_walls(self) -> None:
        """From then on what holds the sandbox is one of what must end."""
        if self.walls is not None:
            self.walls.drop()
            self.walls = None

    def _signal_all(self, number: int) -> None:
        """To everything in its control group and everything that descends from us."""
        if number == KILL and self.kill_file:
            try:
                write(self.kill_file, b"1")
            except OSError:
                pass  # the walk below does it
        self._signal({*self._members(), *descendants()}, number)

    def _signal(self, pids: set[int], number: int) -> None:
        """The command itself first, then the others by age: whoever waits for a child must hear of the end before the
        child is gone, or it would take that for the end of its work and never say its last words."""
        own = self.walls.own if self.walls is not None else set()  # not the command's
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
            return []  # it was removed, which it can only be when it is empty

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
        """Without the time that it was frozen, which nobody pays for."""
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
    """A link is made or it is not; whoever comes second finds it made."""
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
    """Room for the status, while there is room."""
    try:
        save("status.new", b" " * STATUS_BYTES)
    except OSError:
        os.unlink("claim")  # nothing was started
        raise


def _json(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else encode_basestring_ascii(str(value))
