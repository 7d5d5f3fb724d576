"""Turns a shim's forked child into the command: control group, sandbox, user, working directory, exec; and explains
failures.

As in `shim.py`, only C modules are imported.
"""

from __future__ import annotations

import errno
import os
from _signal import SIG_DFL, set_wakeup_fd, signal  # type: ignore[import-not-found]

from bursar.agent.shim.deadline import LEASE_EXPIRED
from bursar.agent.shim.namespaces import Namespaces, drop_capabilities, restrict
from bursar.agent.shim.proc import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl, write

HUP, INT, QUIT, KILL, PIPE, TERM, CHLD, XFSZ = 1, 2, 3, 9, 13, 15, 17, 25
NOT_FOUND, NOT_EXECUTABLE = 127, 126

SpecFields = dict[bytes, list[bytes]]


def one(fields: SpecFields, key: bytes) -> bytes:
    return fields.get(key, [b""])[-1]


def become(fields: SpecFields, namespaces: Namespaces | None, output: int, report: int) -> None:
    """In the child: exec the command, or report the stage that failed."""
    stage = "start"
    try:
        os.setsid()
        stage = "cgroup"
        for path in fields.get(b"procs", []):
            write(path, b"0")
        stage = "start"
        set_wakeup_fd(-1)
        for number in (HUP, INT, QUIT, PIPE, TERM, CHLD, XFSZ):
            signal(number, SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if stdin := one(fields, b"stdin"):
            os.dup2(os.open(stdin, os.O_RDONLY), 0)
            os.unlink(stdin)
        os.umask(int(one(fields, b"umask") or b"022", 8))
        if namespaces is not None:
            stage = "sandbox"
            namespaces.enter()
        stage = "user"
        _change_user(fields, namespaces is not None)
        prctl(PR_SET_PDEATHSIG, KILL)
        stage = "cwd"
        os.chdir(one(fields, b"cwd") or b"/")
        stage = "exec"
        _execute(fields[b"arg"], dict(one.split(b"=", 1) for one in fields.get(b"env", [])))
    except Exception as error:
        os.write(report, f"{stage} {getattr(error, 'errno', errno.EINVAL)}".encode())
    finally:
        os._exit(NOT_FOUND)


def _execute(command: list[bytes], env: dict[bytes, bytes]) -> None:
    """As `os.execvpe`, which imports modules that the command's user may not be able to read."""
    paths = [b""] if b"/" in command[0] else env.get(b"PATH", b"/usr/bin:/bin").split(b":")
    worst = OSError(errno.ENOENT, "")
    for path in paths:
        try:
            os.execve(os.path.join(path, command[0]), command, env)
        except OSError as error:
            worst = worst if error.errno in (errno.ENOENT, errno.ENOTDIR) else error
    raise worst


def _change_user(fields: SpecFields, sandboxed: bool) -> None:
    if uid := one(fields, b"uid"):
        if sandboxed:
            drop_capabilities()
        os.setgroups([int(group) for group in fields.get(b"group", [])])
        os.setgid(int(one(fields, b"gid")))
        os.setuid(int(uid))
        # No setuid program may regain root: root could read the agent's key.
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if sandboxed:
            restrict()


def explain(stage: str, number: int, fields: SpecFields) -> tuple[int, str, str]:
    command = fields[b"arg"][0].decode("utf-8", "replace")
    why = os.strerror(number)
    if stage == "lease":
        return NOT_EXECUTABLE, LEASE_EXPIRED, "its lease expired before it could start"
    if stage == "cwd":
        cwd = (one(fields, b"cwd") or b"/").decode("utf-8", "replace")
        return NOT_EXECUTABLE, "WorkingDirUnusable", f"the working directory {cwd!r} cannot be entered: {why}"
    if stage == "exec" and number in (errno.ENOENT, errno.ENOTDIR):
        return NOT_FOUND, "CommandNotFound", f"the command {command!r} was not found on this node"
    if stage == "exec":
        return NOT_EXECUTABLE, "CommandNotExecutable", f"the command {command!r} cannot be executed: {why}"
    return NOT_EXECUTABLE, "StartFailed", f"the command {command!r} could not be started ({stage}): {why}"
