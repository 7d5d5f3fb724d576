"""The users of this machine that run what root starts: `bursar` serves, `bursar-db` runs the embedded PostgreSQL.

Root hands over by exec: a launcher in a fresh interpreter gives up root and becomes the command. Where Python or a file
that the command needs is in a directory that is closed to the user (`/root`, usually), the launcher first makes a mount
namespace of its own, in which that directory shows those paths and nothing else.
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
CREATE_SECONDS_MAX = 30.0  # others may be writing /etc/passwd
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
# Prints those of its arguments that whoever runs it may not enter (directories) or read (files).
REFUSED = """for p; do if test -d "$p"; then test -x "$p"; else test -r "$p"; fi || printf '%s\\n' "$p"; done"""


class OsUserError(Exception):
    """A user of this machine that cannot be had, or cannot do its work; the message says what to do."""


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
    """None in containers that run under a uid which no passwd file knows."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def system_user(name: str) -> OsUser:
    """The system user of this name, made where the machine has none. It has no home, no password and no shell."""
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
        # Another Bursar may have made it, or holds the lock of /etc/passwd for a moment.
        if (found := find_user(name)) is not None:
            return found
        if "lock" not in why or time.monotonic() > deadline:
            raise OsUserError(
                f"this machine has no user {name}, and none could be made ({why})\n"
                f"Create it (useradd --system --user-group {name}), or start Bursar as an ordinary user."
            )
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class HandOver:
    """How root starts a command as another user, who sees `shown` although it is in directories that are `closed`."""

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
        """Those of the paths that the user, started in this way, may not enter or read."""
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
    """How root starts our own program as this user. Refused where the user could not read what it needs."""
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
            f"Bursar is to run as the user {user.name}, to whom {where} is closed; {error}\n"
            f"Let that user pass (chmod o+x {where}), or install Python and Bursar elsewhere, or give --user root."
        ) from error
    for path in refused:
        raise OsUserError(
            f"Bursar is to run as the user {user.name}, who cannot read {path}\n"
            f"Give it to that user (chown {user.name} {path}), or choose another user with --user NAME."
        )
    return opened


def _program() -> list[Path]:
    """Where the interpreter and all that it imports are."""
    places = [Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.prefix), Path(__file__).parents[1]]
    places += [*_links(Path(sys.executable)), *(Path(one) for one in sys.path if one)]
    return [place for place in places if place.exists()]


def _links(path: Path) -> list[Path]:
    """A path, and each that is read on the way to its file: a virtual environment's Python is a chain of links."""
    steps = [path]
    while steps[-1].is_symlink():
        steps.append(steps[-1].parent / steps[-1].readlink())
    return [*steps, path.resolve()]
