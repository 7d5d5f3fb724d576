"""Scratch space of a placement: HOME, /tmp and /var/tmp, created when it starts and removed when it ends.

On btrfs with quotas each scratch space is a subvolume with a qgroup limit, which the kernel enforces. On other
filesystems the disk guard measures its size (`diskguard.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
PASSWD = Path("/etc/passwd")
BTRFS = "btrfs"


@dataclass(frozen=True, slots=True)
class Scratch:
    path: Path

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    @property
    def var_tmp(self) -> Path:
        return self.path / "var-tmp"

    @property
    def passwd(self) -> Path:
        """A copy of /etc/passwd with the command's own user added: programs look up its name and home."""
        return self.path / "passwd"

    def fill(self, uid: int, name: str) -> None:
        for folder in (self.home, self.tmp, self.var_tmp):
            folder.mkdir(mode=0o700)
            os.chown(folder, uid, uid)
        users = PASSWD.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        self.passwd.write_text(f"{users}\n{name}:x:{uid}:{uid}::{self.home}:/bin/sh\n", encoding="utf-8")
        self.passwd.chmod(0o644)


@dataclass(frozen=True, slots=True)
class Scratches:
    """All scratch spaces of an agent. `limits` says whether the filesystem enforces sizes (btrfs qgroups)."""

    folder: Path
    limits: bool = False

    def of(self, mark: str) -> Scratch:
        return Scratch(self.folder / mark)

    def make(self, mark: str, uid: int, name: str, bytes_max: int | None) -> Scratch:
        """Create an empty scratch space; an existing one is removed first."""
        self.remove(mark)
        scratch = self.of(mark)
        if self.limits:
            _run("btrfs", "subvolume", "create", str(scratch.path))
            if bytes_max is not None:
                _run("btrfs", "qgroup", "limit", str(bytes_max), str(scratch.path))
            scratch.path.chmod(0o700)
        else:
            scratch.path.mkdir(mode=0o700)
        scratch.fill(uid, name)
        return scratch

    def remove(self, mark: str) -> None:
        """Raises OSError if something stays."""
        path = self.of(mark).path
        if not path.exists():
            return
        if self.limits:
            with suppress(OSError):
                _run("btrfs", "subvolume", "delete", str(path))
                return
        # Not by a walk in Python: a tenant may nest directories arbitrarily deep.
        _run("rm", "-rf", "--one-file-system", "--", str(path))

    def remove_all_but(self, live: Collection[str] = ()) -> None:
        """Remove all scratch spaces but `live`. Raises OSError if something stays."""
        for path in list(self.folder.iterdir()):
            if path.name not in live:
                self.remove(path.name)


def find_scratches(folder: Path) -> Scratches:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    limits = False
    if filesystem(folder) == BTRFS and shutil.which("btrfs"):
        with suppress(OSError):
            _run("btrfs", "qgroup", "show", str(folder))  # fails where quotas are not enabled
            limits = True
    return Scratches(folder, limits)


def filesystem(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the filesystem that holds a path."""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, found = line.split()[:3]
        point = point.encode().decode("unicode_escape")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


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
