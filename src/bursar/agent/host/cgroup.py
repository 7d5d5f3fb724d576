"""Control groups: limits, usage, and killing or freezing all processes of a placement at once.

cgroup v2 is used if it has the controllers. With cgroup v1 controllers, a v2 hierarchy that is mounted beside them is
used for killing and freezing. If neither can be written, placements run without limits, and the agent reports that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bursar.core.values.quantity import QuantityError, amount

PERIOD_MICROSECONDS = 100_000
QUOTA_MICROSECONDS_MIN = 1_000
WEIGHT_MAX = 10_000
SHARES_PER_CORE = 1024
SHARES_MIN, SHARES_MAX = 2, 262_144
DISK = "ephemeral-storage"
MOUNTS, OWN = Path("/proc/self/mounts"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """CPU in thousandths of a core, memory in bytes; None is no limit."""

    cpu_request_milli: int = 0
    cpu_limit_milli: int | None = None
    memory_limit_bytes: int | None = None
    pids_max: int | None = None


def limits_of(requests: Mapping[str, str], limits: Mapping[str, str], pids_max: int | None = None) -> CgroupLimits:
    """The limits of a placement. Without a memory limit the request is the limit, which protects other placements."""
    memory = _amount(limits, "memory") or _amount(requests, "memory") or None
    return CgroupLimits(_amount(requests, "cpu") or 0, _amount(limits, "cpu"), memory, pids_max)


def disk_bytes_max(requests: Mapping[str, str], limits: Mapping[str, str]) -> int | None:
    """The disk limit of a placement; None is no limit."""
    return _amount(limits, DISK) or _amount(requests, DISK) or None


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The groups of one placement, one directory in each hierarchy in use."""

    folders: tuple[Path, ...]
    unified: Path | None = None
    memory: Path | None = None
    cpu_usage: Path | None = None

    @property
    def procs(self) -> list[Path]:
        """The files that a process writes itself into to join."""
        return [folder / "cgroup.procs" for folder in self.folders]

    @property
    def members(self) -> Path:
        return (self.unified or self.folders[0]) / "cgroup.procs"

    @property
    def kill_file(self) -> Path | None:
        path = self.unified / "cgroup.kill" if self.unified else None
        return path if path is not None and path.exists() else None

    @property
    def freeze_file(self) -> Path | None:
        path = self.unified / "cgroup.freeze" if self.unified else None
        return path if path is not None and path.exists() else None

    def cpu_seconds(self) -> float | None:
        if self.cpu_usage is None:
            return None
        if self.cpu_usage.name == "cpu.stat":
            microseconds = _flat(self.cpu_usage).get("usage_usec")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = _number(self.cpu_usage)
        return None if nanoseconds is None else nanoseconds / 1e9

    def memory_bytes(self) -> tuple[int, int] | None:
        """Current and peak memory."""
        if self.memory is None:
            return None
        now = _first(self.memory, "memory.current", "memory.usage_in_bytes")
        most = _first(self.memory, "memory.peak", "memory.max_usage_in_bytes")
        return None if now is None else (now, now if most is None else most)

    def oom_kills(self) -> int:
        """How many processes of the group the OOM killer has killed."""
        if self.memory is None:
            return 0
        return max(_flat(self.memory / name).get("oom_kill", 0) for name in ("memory.events", "memory.oom_control"))

    def remove(self) -> bool:
        """Remove the group; whether it is gone. A group with processes stays."""
        for folder in self.folders:
            with suppress(OSError):
                for below in sorted(folder.glob("**/"), reverse=True):
                    below.rmdir()
        return not any(folder.exists() for folder in self.folders)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The parent groups, by controller; `version` is v2, v1 or none, and `message` says why."""

    version: str
    message: str = ""
    parents: Mapping[str, Path] = field(default_factory=dict)  # "" is the v2 hierarchy
    cores: int = 1

    def make(self, name: str, limits: CgroupLimits) -> Cgroup | None:
        """Create a group with these limits. A limit that cannot be set is an error: its absence would go unnoticed."""
        group = self.group(name)
        if group is None:
            return None
        for parent in self.parents.values():
            if not parent.exists():  # removed while nothing ran
                _open(parent, giving=self.version == "v2")
        for folder in group.folders:
            folder.mkdir(exist_ok=True)
        if self.version == "v2":
            self._limit_v2(group.folders[0], limits)
        else:
            self._limit_v1(name, limits)
        return group

    def group(self, name: str) -> Cgroup | None:
        if not self.parents:
            return None
        folders = {controller: parent / name for controller, parent in self.parents.items()}
        unified = folders.get("")
        if self.version == "v2":
            assert unified is not None
            return Cgroup((unified,), unified, unified, unified / "cpu.stat")
        cpu_usage = folders["cpuacct"] / "cpuacct.usage" if "cpuacct" in folders else None
        return Cgroup(tuple(dict.fromkeys(folders.values())), unified, folders.get("memory"), cpu_usage)

    def tidy(self, live: Collection[str] = ()) -> None:
        """Remove empty groups of the previous agent process."""
        for parent in self.parents.values():
            with suppress(OSError):
                for path in parent.iterdir():
                    if path.is_dir() and path.name not in live:
                        Cgroup((path,)).remove()

    def remove(self, live: Collection[str] = ()) -> None:
        """Remove all empty groups, and the parents; they are created again when needed."""
        self.tidy(live)
        for parent in self.parents.values():
            with suppress(OSError):
                parent.rmdir()

    def _limit_v2(self, folder: Path, limits: CgroupLimits) -> None:
        if limits.memory_limit_bytes is not None:
            _set(folder / "memory.max", limits.memory_limit_bytes)
            for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
                if (folder / name).exists():
                    _set(folder / name, value)
        if limits.pids_max is not None and (folder / "pids.max").exists():
            _set(folder / "pids.max", limits.pids_max)
        if limits.cpu_request_milli and (folder / "cpu.weight").exists():
            _set(folder / "cpu.weight", weight(limits.cpu_request_milli, self.cores))
        if limits.cpu_limit_milli is not None:
            _set(folder / "cpu.max", f"{_quota(limits.cpu_limit_milli)} {PERIOD_MICROSECONDS}")

    def _limit_v1(self, name: str, limits: CgroupLimits) -> None:
        if limits.memory_limit_bytes is not None and "memory" in self.parents:
            folder = self.parents["memory"] / name
            _set(folder / "memory.limit_in_bytes", limits.memory_limit_bytes)
            if (folder / "memory.memsw.limit_in_bytes").exists():
                _set(folder / "memory.memsw.limit_in_bytes", limits.memory_limit_bytes)
        if limits.pids_max is not None and "pids" in self.parents:
            _set(self.parents["pids"] / name / "pids.max", limits.pids_max)
        if "cpu" not in self.parents:
            return
        folder = self.parents["cpu"] / name
        if limits.cpu_request_milli:
            shares = limits.cpu_request_milli * SHARES_PER_CORE // 1000
            _set(folder / "cpu.shares", min(SHARES_MAX, max(SHARES_MIN, shares)))
        if limits.cpu_limit_milli is not None:
            _set(folder / "cpu.cfs_period_us", PERIOD_MICROSECONDS)
            _set(folder / "cpu.cfs_quota_us", _quota(limits.cpu_limit_milli))


def weight(cpu_request_milli: int, cores: int) -> int:
    """The cpu.weight of a request, proportional to the whole machine, so that weights compare like requests."""
    return min(WEIGHT_MAX, max(1, round(WEIGHT_MAX * cpu_request_milli / (1000 * cores))))


def find(name: str, *, mounts: Path = MOUNTS, own: Path = OWN, cores: int | None = None) -> Cgroups:
    """Find where groups can be created on this machine, below a group called `name`."""
    cores = cores or os.cpu_count() or 1
    unified, mount, controllers = _hierarchies(mounts, own)
    why: list[str] = []
    for version, look in (
        ("v2", lambda: _second(name, unified, mount)),
        ("v1", lambda: _first_generation(name, unified, controllers)),
    ):
        parents, message = _tried(look)
        if parents:
            return Cgroups(version, message, parents, cores)
        why.append(f"{version}: {message}")
    return Cgroups("none", "placements run without limits; " + "; ".join(why), {}, cores)


def leave_earlier(cgroups: Cgroups, name: str, note: Path) -> None:
    """Remove empty groups that this agent had elsewhere, as when it was killed and another service starts it. The file
    `note` records their paths: other groups of the same name may belong to another agent. The next start retries groups
    that are not empty."""
    now = set(cgroups.parents.values())
    there = {path for line in _text(note).splitlines() if (path := Path(line)).name == name} - now
    for parent in there:
        Cgroups(cgroups.version, parents={"": parent}).remove()
        with suppress(OSError):
            parent.with_name(_own_name(name)).rmdir()
    kept = sorted(str(path) for path in now | {path for path in there if path.exists()})
    scratch = note.with_name(f"{note.name}.new")
    with suppress(OSError):  # the note is a convenience
        scratch.write_text("".join(f"{path}\n" for path in kept), encoding="utf-8")
        scratch.replace(note)


Parents = tuple[dict[str, Path], str]


def _tried(look: Callable[[], Parents]) -> Parents:
    try:
        return look()
    except OSError as error:
        return {}, f"{error.strerror or error}: {error.filename}"


def _second(name: str, own: Path | None, mount: Path | None) -> Parents:
    """A cgroup v2 parent whose children have the controllers."""
    if own is None or mount is None:
        return {}, "is not mounted"
    missing = {"cpu", "memory"} - set(_text(own / "cgroup.controllers").split())
    if missing:
        return {}, f"has no controller for {' and '.join(sorted(missing))}"
    above = _above(name, own, mount)
    _give(above)
    _open(above / name, giving=True)
    return {"": above / name}, ""


def _above(name: str, own: Path, mount: Path) -> Path:
    """The group to create ours in. cgroup v2 allows no processes in a group that delegates controllers, except in the
    root group. The agent leaves its own group if it is alone there or in a container; else it uses the root group."""
    inside = _text(own / "cgroup.procs").split()
    if (own / "cgroup.type").exists() and (own == mount or inside in ([], [str(os.getpid())])):
        _move_out(own, own / _own_name(name))
        return own
    return mount


def _own_name(name: str) -> str:
    """The name of the group of the agent itself, beside that of its placements."""
    return f"{name}-agent"


def _open(group: Path, *, giving: bool = False) -> None:
    """Create a parent group; with `giving` its children have the controllers."""
    group.mkdir(exist_ok=True)
    if giving:
        _give(group)


def _give(group: Path) -> None:
    """Delegate controllers to the groups below: cpu, memory and, if available, pids."""
    there = _text(group / "cgroup.controllers").split()
    names = ["cpu", "memory", *(["pids"] if "pids" in there else [])]
    _set(group / "cgroup.subtree_control", " ".join(f"+{name}" for name in names))


def _move_out(group: Path, into: Path) -> None:
    into.mkdir(exist_ok=True)
    for pid in _text(group / "cgroup.procs").split():
        with suppress(ProcessLookupError):
            _set(into / "cgroup.procs", pid)


def _first_generation(name: str, unified: Path | None, controllers: Mapping[str, Path]) -> Parents:
    parents: dict[str, Path] = {}
    missing: list[str] = []
    for controller in ("memory", "cpu", "cpuacct", "pids"):
        group = controllers.get(controller)
        if group is None:
            missing.append(controller)
            continue
        _open(group / name)
        parents[controller] = group / name
    if "memory" not in parents:
        return {}, "has no controller for memory"
    if unified is not None:
        with suppress(OSError):
            _open(unified / name)
            parents[""] = unified / name
    return parents, f"without {', '.join(missing)}" if missing else ""


def _hierarchies(mounts: Path, own: Path) -> tuple[Path | None, Path | None, dict[str, Path]]:
    """The agent's own group in each hierarchy, and the mount point of cgroup v2."""
    paths: dict[str, str] = {}
    for line in _text(own).splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    unified = mount = None
    controllers: dict[str, Path] = {}
    for line in _text(mounts).splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup2":
            mount = Path(point)
            unified = _below(mount, paths.get("", "/"))
        elif kind == "cgroup":
            for option in options.split(","):
                if option in paths:
                    controllers[option] = _below(Path(point), paths[option])
    return unified, mount, controllers


def _below(mount: Path, path: str) -> Path:
    """The group's directory. In a container the path is often the host's, while the mount is the group itself."""
    inside = mount / path.lstrip("/")
    return inside if inside.is_dir() else mount


def _quota(milli: int) -> int:
    return max(QUOTA_MICROSECONDS_MIN, milli * PERIOD_MICROSECONDS // 1000)


def _amount(amounts: Mapping[str, str], dimension: str) -> int | None:
    try:
        return amount(dimension, amounts[dimension]) if dimension in amounts else None
    except QuantityError:
        return None


def _set(path: Path, value: object) -> None:
    # Never create the file: a limit in a missing file would not be enforced.
    with path.open("r+", encoding="ascii") as file:
        file.write(str(value))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _first(folder: Path, *names: str) -> int | None:
    return next((number for name in names if (number := _number(folder / name)) is not None), None)


def _flat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
