"""Scratch space of a placement: HOME, /tmp and /var/tmp, created when it starts and removed when it ends.

Its size is limited by the filesystem where that has quotas (`disk_quota.py`), elsewhere by the disk guard
(`diskguard.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from bursar.agent.host.disk_quota import DiskQuota, find_disk_quota

PASSWD = Path("/etc/passwd")


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
    """All scratch spaces of an agent, in a folder on a filesystem that may enforce their sizes."""

    folder: Path
    quota: DiskQuota

    def of(self, mark: str) -> Scratch:
        return Scratch(self.folder / mark)

    def make(self, mark: str, uid: int, name: str, bytes_max: int | None) -> Scratch:
        """Create an empty scratch space; an existing one is removed first."""
        self.remove(mark)
        scratch = self.of(mark)
        self.quota.make(scratch.path, bytes_max)
        scratch.fill(uid, name)
        return scratch

    def remove(self, mark: str) -> None:
        """Raises OSError if something stays."""
        path = self.of(mark).path
        if path.exists():
            self.quota.remove(path)

    def remove_all_but(self, live: Collection[str] = ()) -> None:
        """Remove all scratch spaces but `live`. Raises OSError if something stays."""
        for path in list(self.folder.iterdir()):
            if path.name not in live:
                self.remove(path.name)


def find_scratches(folder: Path) -> Scratches:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Scratches(folder, find_disk_quota(folder))
