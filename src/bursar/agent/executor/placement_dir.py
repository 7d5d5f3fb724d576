"""The agent's view of a placement's directory; `shim.py` describes its files."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bursar.agent.host.cgroup import Cgroup
from bursar.agent.host.environment import MARK, User
from bursar.agent.shim import shim
from bursar.agent.shim.deadline import LEASE_EXPIRED, Deadline, format_deadline, parse_deadline

VOID = b"void\n"  # a claim that keeps a late shim from starting an abandoned command
STDIN = "stdin"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROC = Path("/proc")
LOADER = ("LD_LIBRARY_PATH",)  # some Python interpreters need it to find their own library
# Imported instead of run as a script, so that the compiled module is cached.
BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from bursar.agent.shim.shim import main; sys.exit(main(sys.argv[2]))"
)


class Exit(msgspec.Struct, frozen=True, rename="camel"):
    """The `status` file of a shim."""

    exit_code: int
    reason: str = ""
    message: str = ""
    stopped: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class ShimClaim:
    """The shim that claimed a placement. The start time guards against a reused pid."""

    pid: int
    start_ticks: int
    boot: str

    def process(self) -> int | None:
        """A pidfd of the shim, if it is alive."""
        if self.boot != boot_id():
            return None
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # Compared after the pidfd was opened: from then on a reused pid cannot go unnoticed.
        if start_ticks(self.pid) == self.start_ticks:
            return fd
        os.close(fd)
        return None


@dataclass(frozen=True, slots=True)
class PlacementDir:
    path: Path

    # For the shim.

    def prepare(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._read("claim") == VOID:
            (self.path / "claim").unlink()
        if not (self.path / "control").exists():
            os.mkfifo(self.path / "control", 0o600)

    def write_spec(
        self,
        command: Iterable[str],
        env: Mapping[str, str],
        *,
        cwd: str,
        owner: User,
        group: Cgroup | None,
        options: Mapping[str, object],
        sandbox: Iterable[str] = (),
    ) -> None:
        """Write the start parameters. Raises ValueError if a field contains a NUL."""
        fields = [("arg", one) for one in command]
        fields += [("env", f"{name}={value}") for name, value in env.items()]
        fields += [("cwd", cwd), *((key, str(value)) for key, value in options.items())]
        fields += [("sandbox", one) for one in sandbox]
        if owner.changed:
            fields += [("uid", str(owner.uid)), ("gid", str(owner.gid))]
            fields += [("group", str(one)) for one in owner.groups]
        if group is not None:
            fields += [("procs", str(path)) for path in group.procs]
            fields += [("members", str(group.members)), ("kill", str(group.kill_file or ""))]
            fields += [("freeze", str(group.freeze_file or ""))]
        if any("\0" in value for _, value in fields):
            raise ValueError("the command, its environment or its working directory contains a NUL")
        data = b"".join(f"{key}={value}\0".encode("utf-8", "surrogateescape") for key, value in fields)
        self._replace("spec", data)
        self._replace("group", msgspec.json.encode(None if group is None else _group_paths(group)))

    def write_stdin(self, data: bytes) -> None:
        """Write the standard input; the shim removes the file once the command has opened it."""
        self._replace(STDIN, data)

    def write_deadline(
        self, at: float, grace_seconds: float | None = None, freeze_until: float = 0.0, reason: str = LEASE_EXPIRED
    ) -> None:
        """Write the deadline in place, into preallocated space, so that it moves on a full disk as well."""
        data = format_deadline(at, grace_seconds, freeze_until, reason)
        try:
            fd = os.open(self.path / "deadline", os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._set_aside("deadline", data)
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)

    def spawn(self) -> tuple[int, int]:
        """Start the shim: its pid, and a pipe on which it reports that the command has started."""
        read_end, write_end = os.pipe()
        errors = os.open(self.path / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        ours = str(Path(shim.__file__).parents[3])
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", "-c", BOOTSTRAP, ours, str(self.path)],
                {name: os.environ[name] for name in LOADER if name in os.environ},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, write_end, 1),
                    (os.POSIX_SPAWN_DUP2, errors, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGTERM, signal.SIGCHLD],
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
            os.close(errors)
        return pid, read_end

    def ask_to_stop(self, grace_seconds: float, reason: str) -> bool:
        """Ask the shim to stop the command; whether a shim is listening."""
        plain = reason.replace("\n", " ").encode()[:256]
        return self._say(b"stop %.3f %b\n" % (max(0.0, grace_seconds), plain))

    def ask_to_fail(self, reason: str, message: str) -> bool:
        """Ask the shim to end the command at once, as failed."""
        return self._say(f"fail {reason} {message}".replace("\n", " ").encode()[:1024] + b"\n")

    def ask_to_look(self) -> bool:
        """Ask the shim to read the deadline again, before it has come."""
        return self._say(b"look\n")

    def _say(self, line: bytes) -> bool:
        try:
            fd = os.open(self.path / "control", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.write(fd, line)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def void(self) -> None:
        """Block claims from now on, until `prepare` is called again."""
        if not self.path.exists():
            return
        self._replace("void", VOID)
        with suppress(FileExistsError):
            os.link(self.path / "void", self.path / "claim")

    # From the shim.

    def claim(self) -> ShimClaim | None:
        data = self._read("claim")
        if data is None or data == VOID:
            return None
        pid, ticks, boot = data.decode().split()
        return ShimClaim(int(pid), int(ticks), boot)

    def exit(self) -> Exit | None:
        data = self._read("status")
        return None if data is None else msgspec.json.decode(data, type=Exit)

    def started_at(self) -> float | None:
        """When the command started, in `boot_seconds`."""
        data = self._read("started")
        return None if data is None else float(data.split()[2])

    def deadline(self) -> float | None:
        terms = self.terms()
        return None if terms is None else terms[0]

    def terms(self) -> Deadline | None:
        data = self._read("deadline")
        return None if data is None else parse_deadline(data)

    def frozen_seconds(self, now: float) -> float:
        """How long the command has been frozen in total."""
        total, since = (float(word) for word in (self._read("frozen") or b"0 0").split())
        return total + (now - since if since else 0.0)

    def errors(self) -> str:
        """The last line of the shim's standard error."""
        lines = (self._read("errors") or b"").decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def group(self) -> Cgroup | None:
        """The control group as it was created, wherever the agent would create it today."""
        paths = msgspec.json.decode(self._read("group") or b"null", type=_GroupPaths | None)
        if paths is None:
            return None
        folders = tuple(map(Path, paths.folders))
        return Cgroup(folders, _path(paths.unified), _path(paths.memory), _path(paths.cpu_usage))

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def _set_aside(self, name: str, data: bytes) -> None:
        fd = os.open(self.path / f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, len(data))
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)
        (self.path / f"{name}.tmp").replace(self.path / name)

    def _replace(self, name: str, data: bytes) -> None:
        new = self.path / f"{name}.tmp"
        new.write_bytes(data)
        new.replace(self.path / name)


def sweep(mark: str, group: Cgroup | None) -> None:
    """Kill all remaining processes of a placement whose shim is gone; returns when none is left."""
    pause = shim.SETTLE_SECONDS_MIN
    while pids := _left(mark, group):
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, shim.SETTLE_SECONDS_MAX)


def _left(mark: str, group: Cgroup | None) -> set[int]:
    found: set[int] = set()
    if group is not None:
        with suppress(OSError):
            found |= {int(pid) for pid in group.members.read_text().split()}
    wanted = f"{MARK}={mark}".encode()
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it does not exist or is a zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()


class _GroupPaths(msgspec.Struct, frozen=True):
    folders: list[str]
    unified: str | None
    memory: str | None
    cpu_usage: str | None


def _group_paths(group: Cgroup) -> _GroupPaths:
    rest = (group.unified, group.memory, group.cpu_usage)
    return _GroupPaths([str(one) for one in group.folders], *(None if one is None else str(one) for one in rest))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
