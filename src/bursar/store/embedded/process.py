"""Starting child processes of PostgreSQL, and ending orphans of an earlier supervisor."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from bursar.store.embedded.account import DatabaseUser

# Runs in a fresh interpreter that then becomes the command, so that no Python code runs between fork and exec of the
# supervisor, whose threads could hold any lock. The death signal is set last, because changing the uid clears it; it is
# sent when the *thread* that started the child ends, here the event loop's. Comparing the parent's pid detects a parent
# that died before the signal was set.
LAUNCHER = """
import ctypes, os, signal, sys
parent, uid, gid, groups, *command = sys.argv[1:]
if uid:
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setgid(int(gid))
    os.setuid(int(uid))
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0)
if os.getppid() != int(parent):
    sys.exit("the supervisor is gone")
os.umask(0o077)
os.execv(command[0], command)
"""
INHERITED = ("PATH", "LD_LIBRARY_PATH")  # only these: the environment may hold secrets, and PG* variables mislead


async def spawn(
    command: Sequence[str], account: DatabaseUser, *, alive_fd: int, output: IO[bytes] | int
) -> asyncio.subprocess.Process:
    """Start a child that runs `command` as the account, keeps `alive_fd` open for life and dies with this process."""
    switch = (
        (str(account.uid), str(account.gid), ",".join(map(str, account.groups))) if account.switch else ("", "", "")
    )
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *switch, *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(alive_fd,),
        cwd="/",
        env=environment | {"LC_ALL": "C"},
        start_new_session=True,  # Ctrl-C reaches only this process, which stops the child in order
    )


def living(directories: Sequence[Path]) -> list[int]:
    """List the PostgreSQL processes whose working directory is one of these; a zombie has none."""
    return [pid for pid in _pids() if _works_in(pid, directories)]


def kill_living(directories: Sequence[Path]) -> None:
    """Send SIGKILL to each of them: without their postmaster they only block a restart, and the WAL makes killing
    safe."""
    for pid in living(directories):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                # Checked again through the pidfd: the pid may have been reused in between.
                if _works_in(pid, directories):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _pids() -> Iterator[int]:
    try:
        names = os.listdir("/proc")  # noqa: PTH208
    except FileNotFoundError:  # not Linux: PostgreSQL's own checks must suffice
        return
    yield from (int(name) for name in names if name.isdigit())


def _works_in(pid: int, directories: Sequence[Path]) -> bool:
    try:
        workplace = Path(f"/proc/{pid}/cwd").readlink()
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # gone, a zombie, or not readable
        return False
    return workplace in directories and program.startswith("postgres")
