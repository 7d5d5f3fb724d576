"""How PostgreSQL's processes are started, and how those whose parent is gone are ended."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from bursar.store.embedded.account import DatabaseUser

# Runs in a fresh interpreter that then becomes the command: no Python code runs between fork and exec of the server,
# whose threads could hold any lock at that moment. The death signal comes last because changing the uid clears it; it
# signals the child when the *thread* that started it ends, here the event loop's. A parent that died before
# the signal was set is noticed by comparing its pid.
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
INHERITED = ("PATH", "LD_LIBRARY_PATH")  # and nothing else: our environment may hold secrets, and PG* variables mislead


async def spawn(
    command: Sequence[str], account: DatabaseUser, *, alive_fd: int, output: IO[bytes] | int
) -> asyncio.subprocess.Process:
    """A child running `command` as the account, that keeps `alive_fd` open for life and dies with this process."""
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
        start_new_session=True,  # a Ctrl-C in the terminal is for us, who then stop it in order
    )


def living(directories: Sequence[Path]) -> list[int]:
    """The PostgreSQL processes at work in these directories. A zombie works nowhere, so it is never among them."""
    return [pid for pid in _pids() if _works_in(pid, directories)]


def kill_living(directories: Sequence[Path]) -> None:
    """SIGKILL to each of them: once their postmaster is dead they can only be in the way, and the WAL makes it safe."""
    for pid in living(directories):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                # Looked at again under the handle: in between the pid could have become another process's.
                if _works_in(pid, directories):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _pids() -> Iterator[int]:
    try:
        names = os.listdir("/proc")  # noqa: PTH208
    except FileNotFoundError:  # not Linux: PostgreSQL's own judgement has to do
        return
    yield from (int(name) for name in names if name.isdigit())


def _works_in(pid: int, directories: Sequence[Path]) -> bool:
    try:
        workplace = Path(f"/proc/{pid}/cwd").readlink()
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # gone, a zombie, or not ours to look at
        return False
    return workplace in directories and program.startswith("postgres")
