"""The operating system user that runs PostgreSQL: under root a system user of its own, because PostgreSQL refuses
root."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bursar.osuser import DATABASE, OsUserError, find_user, name_of, system_user
from bursar.store.embedded.error import EmbeddedError


@dataclass(frozen=True, slots=True)
class DatabaseUser:
    """The user that the server runs as; `switch` if that is not the current user."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    switch: bool


def choose_account(root: Path) -> DatabaseUser:
    """Choose the current user; under root choose `bursar-db`, unless an ordinary user owns the data directory: then
    that user."""
    pgdata = root / "postgres"
    uid, owner = os.geteuid(), owner_of(pgdata)
    if uid != 0:
        account = _account(uid, switch=False)
        if owner not in (None, uid):
            raise EmbeddedError(
                f"{pgdata} belongs to {_account(owner or 0, switch=False).name}, and this process is {account.name}.",
                f"Start Bursar as that user, or give it the directory: sudo chown -R {account.name} {root}",
            )
        return account
    if owner == 0:
        raise EmbeddedError(
            f"{pgdata} belongs to root, and PostgreSQL refuses to run as root.",
            f"Give it to the user that will run it: chown -R {_system_account().name} {pgdata}",
        )
    if owner is not None and root.stat().st_uid == owner:
        return _account(owner, switch=True)
    return _system_account()


def owner_of(pgdata: Path) -> int | None:
    try:
        return (pgdata / "PG_VERSION").stat().st_uid
    except FileNotFoundError:
        return None


def hand_over_cluster(pgdata: Path, account: DatabaseUser) -> bool:
    """Give the account a cluster that root ran as another user before; return whether anything changed hands.

    Only files of that other user are changed: a link that it made to somebody else's file is left alone. The file that
    shows the owner is changed last, so that an interrupted hand-over is repeated.
    """
    former = owner_of(pgdata)
    if not account.switch or former in (None, account.uid):
        return False
    for _, directories, files, folder in os.fwalk(pgdata, follow_symlinks=False):
        for name in (*directories, *files):
            if name != "PG_VERSION" or os.fstat(folder).st_ino != pgdata.stat().st_ino:
                _give(name, former, account, folder)
    _give(str(pgdata), former, account, None)
    _give(str(pgdata / "PG_VERSION"), former, account, None)
    return True


def _give(name: str, former: int | None, account: DatabaseUser, folder: int | None) -> None:
    if os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid == former:
        os.chown(name, account.uid, account.gid, dir_fd=folder, follow_symlinks=False)


def _system_account() -> DatabaseUser:
    try:
        user = system_user(DATABASE)
    except OsUserError as error:
        raise EmbeddedError(
            f"PostgreSQL refuses to run as root, and {error}", "Or give Bursar a database with BURSAR_DATABASE_URL."
        ) from error
    return DatabaseUser(user.name, user.uid, user.gid, user.groups, switch=True)


def _account(uid: int, *, switch: bool) -> DatabaseUser:
    name = name_of(uid)
    user = find_user(name) if name is not None else None
    if user is None:  # a container's uid may be missing in the passwd file
        return DatabaseUser(str(uid), uid, uid if switch else os.getegid(), (), switch)
    return DatabaseUser(user.name, uid, user.gid, user.groups, switch)


def blocking_directory(path: Path, account: DatabaseUser) -> Path | None:
    """Return the first directory on the way to `path` that the account may not enter, tested by the kernel, so that
    ACLs count."""
    if not account.switch or _may_pass(path, account):
        return None
    return next((step for step in reversed(path.parents) if not _may_pass(step, account)), path)


def _may_pass(path: Path, account: DatabaseUser) -> bool:
    try:
        test = subprocess.run(  # noqa: S603
            ["/usr/bin/env", "test", "-x", path],
            user=account.uid,
            group=account.gid,
            extra_groups=account.groups,
            cwd="/",
            check=False,
        )
    except OSError as error:
        raise EmbeddedError(
            f"This process is root but may not become the user {account.name} ({error}).",
            "Start Bursar as an ordinary user, allow CAP_SETUID and CAP_SETGID, or give it BURSAR_DATABASE_URL.",
        ) from error
    return test.returncode == 0
