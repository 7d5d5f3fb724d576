"""Which user runs PostgreSQL. It refuses to run as root, so root hands it to an unprivileged user."""

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bursar.store.embedded.error import EmbeddedError

UNPRIVILEGED = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """The user the server runs as; `switch` when that is not the user we are."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    switch: bool


def choose_account(pgdata: Path) -> Account:
    """Ourselves, or as root an unprivileged user: the owner of the existing cluster, else the first of UNPRIVILEGED."""
    uid, owner = os.geteuid(), _owner(pgdata)
    if uid != 0:
        account = _account(uid, switch=False)
        if owner not in (None, uid):
            raise EmbeddedError(
                f"{pgdata} belongs to {_account(owner or 0, switch=False).name}, and this process is {account.name}.",
                f"Start Bursar as that user, or give it the directory: sudo chown -R {account.name} {pgdata.parent}",
            )
        return account
    if owner == 0:
        user = _unprivileged().name
        raise EmbeddedError(
            f"{pgdata} belongs to root, and PostgreSQL refuses to run as root.",
            f"Give it to the user who will run it: chown -R {user} {pgdata}",
        )
    return _unprivileged() if owner is None else _account(owner, switch=True)


def _owner(pgdata: Path) -> int | None:
    try:
        return (pgdata / "PG_VERSION").stat().st_uid
    except FileNotFoundError:
        return None


def _unprivileged() -> Account:
    for name in UNPRIVILEGED:
        try:
            return _account(pwd.getpwnam(name).pw_uid, switch=True)
        except KeyError:
            continue
    raise EmbeddedError(
        "PostgreSQL refuses to run as root, and this machine has neither a user postgres nor a user nobody.",
        "Create one (useradd --system postgres), start Bursar as an ordinary user, or give it BURSAR_DATABASE_URL.",
    )


def _account(uid: int, *, switch: bool) -> Account:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:  # containers run under uids that no passwd file knows
        return Account(str(uid), uid, uid if switch else os.getegid(), (), switch)
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, uid, entry.pw_gid, groups, switch)


def blocking_directory(path: Path, account: Account) -> Path | None:
    """The first step on the way to `path` that the account may not pass; the kernel judges, so ACLs count too."""
    if not account.switch or _may_pass(path, account):
        return None
    return next((step for step in reversed(path.parents) if not _may_pass(step, account)), path)


def _may_pass(path: Path, account: Account) -> bool:
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
