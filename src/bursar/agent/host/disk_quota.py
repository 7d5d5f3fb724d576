"""Disk quotas of scratch directories, enforced by the filesystem: qgroups of btrfs, project quotas of XFS.

On other filesystems, and where quotas are off, the disk guard measures instead (`diskguard.py`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
PROJECT_OPTIONS = frozenset({"prjquota", "pquota"})
PROJECT_MIN = 0x40000000  # administrators number their projects from 1
_FS_IOC_FSGETXATTR = 0x801C581F
_FSXATTR = struct.Struct("=IIIII8x")  # flags, extent size, extents, project, copy-on-write extent size


@dataclass(frozen=True, slots=True)
class Mount:
    point: str = ""
    kind: str = ""
    options: frozenset[str] = frozenset()


class DiskQuota:
    """Directories without an enforced limit."""

    def make(self, path: Path, bytes_max: int | None) -> None:
        """Create an empty directory of mode 0700 with a limit."""
        path.mkdir(mode=0o700)
        if bytes_max is not None:
            self.limit(path, bytes_max)

    def limit(self, path: Path, bytes_max: int) -> None:
        """Limit an empty directory."""

    def remove(self, path: Path) -> None:
        # Not by recursion in Python: a tenant may nest directories arbitrarily deep.
        _run("rm", "-rf", "--one-file-system", "--", str(path))


class BtrfsQuota(DiskQuota):
    """Each directory is a subvolume with a qgroup limit."""

    def make(self, path: Path, bytes_max: int | None) -> None:
        _run("btrfs", "subvolume", "create", str(path))
        path.chmod(0o700)
        if bytes_max is not None:
            self.limit(path, bytes_max)

    def limit(self, path: Path, bytes_max: int) -> None:
        _run("btrfs", "qgroup", "limit", str(bytes_max), str(path))

    def remove(self, path: Path) -> None:
        with suppress(OSError):
            _run("btrfs", "subvolume", "delete", str(path))
            return
        super().remove(path)


class XfsQuota(DiskQuota):
    """Each limited directory is a project of its own. The owner of a file could move it to another project by ioctl:
    the seccomp filter of the sandbox refuses that (`shim/namespaces.py`)."""

    def __init__(self, mount_point: str) -> None:
        self._mount_point = mount_point

    def limit(self, path: Path, bytes_max: int) -> None:
        project = max([PROJECT_MIN, *map(project_of, path.parent.iterdir())]) + 1
        self._xfs_quota(f"limit -p bhard={bytes_max} {project}", f"project -s -p {path} {project}")

    def remove(self, path: Path) -> None:
        project = project_of(path)
        super().remove(path)
        if project >= PROJECT_MIN:
            self._xfs_quota(f"limit -p bhard=0 {project}")

    def _xfs_quota(self, *commands: str) -> None:
        # Without the administrator's lists of projects, which name other directories.
        lists = ("-D", os.devnull, "-P", os.devnull)
        _run("xfs_quota", "-x", *lists, *(word for one in commands for word in ("-c", one)), self._mount_point)


def find_disk_quota(folder: Path) -> DiskQuota:
    """The quotas that the filesystem of a directory enforces."""
    mount = find_mount(folder)
    if mount.kind == "btrfs" and shutil.which("btrfs"):
        with suppress(OSError):
            _run("btrfs", "qgroup", "show", str(folder))  # fails where quotas are not enabled
            return BtrfsQuota()
    if mount.kind == "xfs" and mount.options & PROJECT_OPTIONS and shutil.which("xfs_quota"):
        return XfsQuota(mount.point)
    return DiskQuota()


def find_mount(path: Path, mounts: Path = MOUNTS) -> Mount:
    """The mount that holds a path."""
    best = Mount()
    resolved = str(path.resolve())
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, options = line.split()[:4]
        point = point.encode().decode("unicode_escape")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(point, kind, frozenset(options.split(",")))
    return best


def project_of(path: Path) -> int:
    """The project of a directory; 0 if it has none."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        described = fcntl.ioctl(opened, _FS_IOC_FSGETXATTR, bytes(_FSXATTR.size))
    finally:
        os.close(opened)
    return int(_FSXATTR.unpack(described)[3])


def disk_use(path: Path) -> tuple[int, int]:
    """Bytes and files below a path; files that disappear meanwhile are skipped."""
    found = []
    for how in ("--block-size=1", "--inodes"):
        done = subprocess.run(["du", "-sx", how, "--", str(path)], capture_output=True, check=False)
        words = done.stdout.split()
        found.append(int(words[0]) if words and words[0].isdigit() else 0)
    return found[0], found[1]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(f"{command[0]}: {said[-1][:200] if said else f'exit code {done.returncode}'}")
