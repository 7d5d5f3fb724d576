"""The data directory: its paths, its two locks, and where the socket can be."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bursar.store.embedded.account import DatabaseUser, blocking_directory
from bursar.store.embedded.error import EmbeddedError
from bursar.store.embedded.process import kill_living, living

PORT = 5432
SOCKET_PATH_BYTES_MAX = 103  # macOS; Linux allows 107
LOG_BYTES_MAX = 10_000_000
GONE_SECONDS_MAX = 15.0
STRANGER_SECONDS_MAX = 0.5
DYING_SECONDS_MAX = 0.5  # a killed process holds its locks until the kernel has removed it


@dataclass(frozen=True, slots=True)
class Directory:
    root: Path

    @property
    def pgdata(self) -> Path:
        return self.root / "postgres"

    @property
    def unfinished(self) -> Path:
        return self.root / "postgres.new"

    @property
    def log(self) -> Path:
        return self.root / "postgres.log"

    @property
    def socket_record(self) -> Path:
        return self.root / "socket-dir"

    @property
    def workplaces(self) -> tuple[Path, Path]:
        return (self.pgdata, self.unfinished)

    def version(self) -> int | None:
        """Read the major version that wrote the cluster; None if there is no cluster yet."""
        try:
            return int((self.pgdata / "PG_VERSION").read_text())
        except FileNotFoundError:
            pass
        if self.pgdata.exists() and any(self.pgdata.iterdir()):
            raise EmbeddedError(
                f"{self.pgdata} holds files but is no PostgreSQL cluster: it has no PG_VERSION.",
                f"Move it away (mv {self.pgdata} {self.pgdata}.old) or choose another data directory, and start again.",
            )
        return None


def open_directory(path: Path) -> Directory:
    """Open or create the data directory; only a directory created here gets its mode changed."""
    root = Path(os.path.realpath(path))
    try:
        if not root.exists():
            root.mkdir(parents=True)
            # The database's user must pass through, and nobody needs to list it.
            root.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise EmbeddedError(
            f"The data directory {root} cannot be created: {error.strerror}.",
            "Choose another one, or create it and give it to this user.",
        ) from error
    return Directory(root)


def check_reachable(directory: Directory, account: DatabaseUser) -> None:
    """Refuse a directory that the account cannot reach. Directories above the data directory are not changed."""
    blocked = blocking_directory(directory.root, account)
    if blocked is not None:
        raise EmbeddedError(
            f"PostgreSQL runs as the user {account.name}, who cannot reach {directory.root}: {blocked} is in the way.",
            f"Let that user pass (chmod o+x {blocked}), or choose another data directory, such as /var/lib/bursar.",
        )


def lock_supervisor(directory: Directory) -> int:
    """Take the lock that makes this process the only supervisor of the directory, until it is closed or the process
    ends."""
    path = directory.root / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EmbeddedError(
            f"{path} cannot be opened: {error.strerror}.",
            "Start Bursar as the user who owns the data directory, or choose another one.",
        ) from error
    deadline = time.monotonic() + DYING_SECONDS_MAX
    while not (locked := _try_lock(fd)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not locked:
        holder = os.read(fd, 32).decode().strip()
        os.close(fd)
        raise EmbeddedError(
            f"The data directory {directory.root} is in use by {f'process {holder}' if holder else 'another process'}.",
            "Stop that one first, or choose another data directory.",
        )
    os.truncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


async def claim(directory: Directory, grace_seconds: float) -> int:
    """Claim the lock that the next generation of PostgreSQL processes inherits, once no process of the last one is
    left.

    The last generation ends by itself when its supervisor or its postmaster dies, except for a backend in a long
    computation; it is killed after the grace period. Neither pids nor postmaster.pid are consulted: a lock that every
    process inherits cannot be stale, and a zombie does not hold it.
    """
    fd = os.open(directory.root / "postgres.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _wait_until_gone(directory, fd, grace_seconds)
        await _refuse_strangers(directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


async def _wait_until_gone(directory: Directory, fd: int, grace_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not _try_lock(fd):
        waited = loop.time() - began
        if waited > GONE_SECONDS_MAX:
            pids = ", ".join(map(str, living(directory.workplaces))) or "see postmaster.pid there"
            raise EmbeddedError(
                f"The PostgreSQL of an earlier run still works in {directory.pgdata} and does not end (pid {pids}).",
                "End it (kill -QUIT, then kill -KILL) and start again.",
            )
        if waited > grace_seconds:
            kill_living(directory.workplaces)
        await asyncio.sleep(0.01)


async def _refuse_strangers(directory: Directory) -> None:
    """Refuse a PostgreSQL that does not hold our lock: it was started by hand, and must not be ended here."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STRANGER_SECONDS_MAX
    while pids := living(directory.workplaces):
        if loop.time() > deadline:
            raise EmbeddedError(
                f"A PostgreSQL that Bursar did not start works in {directory.pgdata} (pid {min(pids)}).",
                f"Stop it (pg_ctl stop -D {directory.pgdata}) and start again.",
            )
        await asyncio.sleep(0.01)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_stale_lock_files(directory: Directory, socket_dir: Path) -> None:
    """Remove stale lock files, only after `claim`: PostgreSQL would trust them while their pid is a zombie's or was
    reused."""
    if Path("/proc/self").exists():
        (directory.pgdata / "postmaster.pid").unlink(missing_ok=True)
        (socket_dir / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)


def open_log(directory: Directory) -> IO[bytes]:
    with contextlib.suppress(FileNotFoundError):
        if directory.log.stat().st_size > LOG_BYTES_MAX:
            directory.log.replace(directory.log.with_name("postgres.log.1"))
    return os.fdopen(os.open(directory.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")


def make_private(path: Path, account: DatabaseUser, guests_gid: int | None = None) -> None:
    """Create a directory that only the account may use, and that a group may pass through if one is given."""
    path.mkdir(mode=0o700, exist_ok=True)
    if account.switch:
        os.chown(path, account.uid, account.gid if guests_gid is None else guests_gid, follow_symlinks=False)
    path.chmod(0o700 if guests_gid is None else 0o710)


def prepare_socket_dir(directory: Directory, account: DatabaseUser, guests_gid: int | None) -> Path:
    """Create the socket's directory: `run` in the data directory, or, if that path is too long for a socket, a recorded
    private directory elsewhere."""
    inside = directory.root / "run"
    if _fits(inside):
        make_private(inside, account, guests_gid)
        return inside
    with contextlib.suppress(FileNotFoundError):
        recorded = Path(directory.socket_record.read_text().strip())
        if _is_private(recorded, account) and _fits(recorded):
            make_private(recorded, account, guests_gid)
            return recorded
    outside = _make_outside(account, guests_gid)
    directory.socket_record.write_text(f"{outside}\n")
    return outside


def _make_outside(account: DatabaseUser, guests_gid: int | None) -> Path:
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108
        if not parent or not os.access(parent, os.W_OK) or blocking_directory(Path(parent), account) is not None:
            continue
        outside = Path(tempfile.mkdtemp(prefix="bursar-", dir=parent))
        if _fits(outside):
            make_private(outside, account, guests_gid)
            return outside
        outside.rmdir()
    raise EmbeddedError(
        "The data directory's path is too long to hold a socket, and no temporary directory could.",
        "Set XDG_RUNTIME_DIR to a short directory the database user can reach, or use a shorter data directory.",
    )


def forget_socket_dir(directory: Directory, socket_dir: Path) -> None:
    """Remove what `prepare_socket_dir` created outside the data directory, once the server is stopped."""
    if socket_dir.parent != directory.root:
        shutil.rmtree(socket_dir, ignore_errors=True)
        directory.socket_record.unlink(missing_ok=True)


def _fits(socket_dir: Path) -> bool:
    return len(os.fsencode(socket_dir / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_BYTES_MAX


def _is_private(path: Path, account: DatabaseUser) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == account.uid and not status.st_mode & 0o067
