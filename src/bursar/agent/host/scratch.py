"""A placement's own place on the disk: its HOME, /tmp and /var/tmp, fresh when it starts and removed with it.

On btrfs with quotas each is a subvolume of its own, which the kernel keeps within its size. Elsewhere the disk guard
looks how large they are (`diskguard.py`).
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
        """The machine's users, and the one that the command runs as: programs ask for its name and its home."""
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
    """All of an agent's. `limits` says whether the filesystem itself keeps them within a size."""

    folder: Path
    limits: bool = False

    def of(self, mark: str) -> Scratch:
        return Scratch(self.folder / mark)

    def make(self, mark: str, uid: int, name: str, bytes_max: int | None) -> Scratch:
        """A new one, whatever was there."""
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
        """OSError where something of it stays."""
        path = self.of(mark).path
        if not path.exists():
            return
        if self.limits:
            with suppress(OSError):
                _run("btrfs", "subvolume", "delete", str(path))
                return
        # Not by a walk of ours: it may be as deep as somebody likes.
        _run("rm", "-rf", "--one-file-system", "--", str(path))

    def remove_all_but(self, live: Collection[str] = ()) -> None:
        """OSError where something stays."""
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
    """The kind of the one that a path is on."""
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
    """Bytes and files; what goes away meanwhile is passed over."""
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
