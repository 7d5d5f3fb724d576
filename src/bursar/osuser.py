"""Privilege drop: root starts the server as the system user `bursar`, and the embedded PostgreSQL as `bursar-db`.

A launcher in a fresh interpreter drops root and execs the command. If Python or a file that the command needs is in a
directory that is closed to the user, usually `/root`, the launcher first creates a mount namespace in which that
directory shows those paths and nothing else.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SERVER = "bursar"
DATABASE = "bursar-db"
CREATE_SECONDS_MAX = 30.0  # another process may hold the lock of /etc/passwd
SHELLS = ("/usr/sbin/nologin", "/sbin/nologin", "/bin/false")

# argv: a JSON plan, then the command. The namespace comes first because it needs root; no_new_privs comes last.
LAUNCHER = """
import ctypes, json, os, sys
plan, command = json.loads(sys.argv[1]), sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags, data=None):
    if libc.mount(source.encode(), target.encode(), kind, flags, data):
        error = ctypes.get_errno()
        sys.exit(f"cannot mount on {target}: {os.strerror(error)}")
CLONE_NEWNS, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 0x20000, 2, 4, 4096, 16384, 1 << 19
if plan["closed"]:
    if libc.unshare(CLONE_NEWNS):
        sys.exit(f"cannot make a mount namespace: {os.strerror(ctypes.get_errno())}")
    mount("none", "/", None, MS_REC | MS_SLAVE)
    shown = [(path, os.path.isdir(path), os.open(path, os.O_PATH)) for path in plan["shown"]]
    for path in plan["closed"]:
        mount("tmpfs", path, b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755,size=1m")
    os.umask(0o022)
    for path, is_directory, fd in shown:
        os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)
        if not is_directory:
            open(path, "a").close()
        mount(f"/proc/self/fd/{fd}", path, None, MS_BIND | MS_REC)
        os.close(fd)
os.setgroups(plan["groups"])
os.setgid(plan["gid"])
os.setuid(plan["uid"])
PR_SET_NO_NEW_PRIVS = 38
libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
os.umask(0o077)
os.execv(command[0], command)
"""
# Prints those of its arguments that its user may not enter (directories) or read (files).
REFUSED = """for p; do if test -d "$p"; then test -x "$p"; else test -r "$p"; fi || printf '%s\\n' "$p"; done"""


class OsUserError(Exception):
    """A system user cannot be created, or cannot run the command; the message says what to do."""


@dataclass(frozen=True, slots=True)
class OsUser:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def find_user(name: str) -> OsUser | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return OsUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def name_of(uid: int) -> str | None:
    """The user's name; None for a uid without an entry in passwd, as in some containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def system_user(name: str) -> OsUser:
    """The system user of this name, created if missing, without home directory, password or shell."""
    found = find_user(name) or _create(name)
    if found.uid == 0:
        raise OsUserError(f"the user {name} is root under another name; choose a user without privileges")
    return found


def _create(name: str) -> OsUser:
    shell = next((one for one in SHELLS if Path(one).exists()), SHELLS[-1])
    options = ("--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", shell)
    deadline = time.monotonic() + CREATE_SECONDS_MAX
    while True:
        try:
            made = subprocess.run(["useradd", *options, name], capture_output=True, text=True, check=False)  # noqa: S603, S607
            why = made.stderr.strip() or f"useradd ended with status {made.returncode}"
        except OSError as error:
            why = f"useradd: {error.strerror}"
        # Another Bursar process may have created it, or may hold the lock of /etc/passwd.
        if (found := find_user(name)) is not None:
            return found
        if "lock" not in why or time.monotonic() > deadline:
            raise OsUserError(
                f"this machine has no user {name}, and it could not be created ({why})\n"
                f"Create it (useradd --system --user-group {name}), or start Bursar as an ordinary user."
            )
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class HandOver:
    """How root starts a command as another user, who sees the paths `shown` inside directories `closed` to it."""

    user: OsUser
    closed: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def command(self, command: Sequence[str]) -> list[str]:
        plan = {
            "uid": self.user.uid,
            "gid": self.user.gid,
            "groups": self.user.groups,
            "closed": self.closed,
            "shown": self.shown,
        }
        return [sys.executable, "-I", "-S", "-c", LAUNCHER, json.dumps(plan), *command]

    def refused(self, paths: Iterable[Path]) -> list[Path]:
        """The paths that the user, started in this way, may not enter or read."""
        asked = [str(path) for path in paths]
        try:
            done = subprocess.run(  # noqa: S603
                self.command(["/bin/sh", "-c", REFUSED, "sh", *asked]),
                capture_output=True,
                text=True,
                check=False,
                cwd="/",
            )
        except OSError as error:
            raise OsUserError(f"cannot start {sys.executable}: {error.strerror}") from error
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise OsUserError(
                f"this process is root but cannot start anything as the user {self.user.name}: {why}\n"
                "Start Bursar as an ordinary user, or with --user root if this container has no other."
            )
        return [Path(line) for line in done.stdout.splitlines()]


def hand_over(user: OsUser, files: Sequence[Path]) -> HandOver:
    """How root starts Bursar as this user. Raises OsUserError if the user cannot read a file it needs."""
    needed = list(dict.fromkeys((*_program(), *(path.absolute() for path in files))))
    plain = HandOver(user)
    blocked = plain.refused(dict.fromkeys(step for path in needed for step in (*reversed(path.parents), path)))
    closed = [path for path in blocked if path.is_dir() and not any(above in blocked for above in path.parents)]
    if not blocked:
        return plain
    inside = [path for path in needed if any(above in closed for above in (path, *path.parents))]
    shown = [path for path in inside if not any(above in inside for above in path.parents)]
    opened = HandOver(user, tuple(map(str, closed)), tuple(map(str, shown)))
    try:
        refused = opened.refused(needed)
    except OsUserError as error:
        where = ", ".join(map(str, closed))
        raise OsUserError(
            f"Bursar must run as the user {user.name}, who may not enter {where}; {error}\n"
            f"Let that user enter it (chmod o+x {where}), or install Python and Bursar elsewhere, or give --user root."
        ) from error
    for path in refused:
        raise OsUserError(
            f"Bursar must run as the user {user.name}, who cannot read {path}\n"
            f"Give it to that user (chown {user.name} {path}), or choose another user with --user NAME."
        )
    return opened


def _program() -> list[Path]:
    """The paths of the interpreter and of everything it imports."""
    places = [Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.prefix), Path(__file__).parents[1]]
    places += [*_links(Path(sys.executable)), *(Path(one) for one in sys.path if one)]
    return [place for place in places if place.exists()]


def _links(path: Path) -> list[Path]:
    """A path and all links up to its file: the Python of a virtual environment is a chain of links."""
    steps = [path]
    while steps[-1].is_symlink():
        steps.append(steps[-1].parent / steps[-1].readlink())
    return [*steps, path.resolve()]
