"""Starting, watching, restarting and stopping the embedded PostgreSQL."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import asyncpg
import structlog

from bursar.osuser import OsUser
from bursar.store.embedded.account import DatabaseUser, choose_account, hand_over_cluster
from bursar.store.embedded.binaries import Binaries
from bursar.store.embedded.cluster import ROLE, SETTINGS, SUPERUSER, choose_binaries, initialise, write_access
from bursar.store.embedded.directory import (
    PORT,
    Directory,
    check_reachable,
    claim,
    forget_socket_dir,
    lock_supervisor,
    open_directory,
    open_log,
    prepare_socket_dir,
    remove_stale_lock_files,
)
from bursar.store.embedded.error import EmbeddedError
from bursar.store.embedded.process import spawn

READY_SECONDS_MAX = 300.0  # replaying the WAL after a crash takes long; a server that exits is noticed at once
ORPHAN_GRACE_SECONDS = 0.1  # after the supervised postmaster died
EARLIER_RUN_GRACE_SECONDS = 2.0  # after an earlier supervisor died: its postmaster is quitting
BACKOFF_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
STEADY_SECONDS = 10.0  # a server that lived this long did not fail at its start
STOP_STEPS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 3.0), (signal.SIGKILL, 5.0))  # fast, immediate, kill


async def start(
    data_dir: Path,
    *,
    log: Any = None,
    settings: Mapping[str, str] | None = None,
    client: OsUser | None = None,
    ready_seconds_max: float = READY_SECONDS_MAX,
) -> "Embedded":
    """Start PostgreSQL on this data directory; it accepts connections now and is supervised until `stop`.

    Root, which runs it as another user, may name a client: the local user that may connect besides.
    """
    log = log or structlog.get_logger("bursar.store.embedded")
    prepared = await asyncio.to_thread(_prepare, data_dir, client)
    embedded = Embedded(*prepared, client, dict(SETTINGS) | dict(settings or {}), ready_seconds_max, log)
    try:
        await embedded._begin()  # noqa: SLF001
    except BaseException:
        with contextlib.suppress(EmbeddedError):  # the first error is the one to report
            await embedded.stop()
        raise
    return embedded


def _prepare(data_dir: Path, client: OsUser | None) -> tuple[Directory, DatabaseUser, Binaries, Path, int]:
    """Check everything that can be refused before a process is started."""
    directory = open_directory(data_dir)
    supervisor_lock = lock_supervisor(directory)
    try:
        account = choose_account(directory.root)
        check_reachable(directory, account)
        socket_dir = prepare_socket_dir(directory, account, client.gid if client else None)
        return directory, account, choose_binaries(directory, account, socket_dir), socket_dir, supervisor_lock
    except BaseException:
        os.close(supervisor_lock)
        raise


class Embedded:
    """A supervised PostgreSQL. Invariant: while the supervisor's lock is held, at most one generation of it lives."""

    def __init__(
        self,
        directory: Directory,
        account: DatabaseUser,
        binaries: Binaries,
        socket_dir: Path,
        supervisor_lock: int,
        client: OsUser | None,
        settings: dict[str, str],
        ready_seconds_max: float,
        log: Any,
    ) -> None:
        self.restarts = 0
        self.directory = directory
        self.binaries = binaries
        self._account = account
        self._socket_dir = socket_dir
        self._supervisor_lock: int | None = supervisor_lock
        self._client = client
        self._settings = settings
        self._ready_seconds_max = ready_seconds_max
        self._log = log
        self._log_offset = 0
        self._launched_at = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the database `bursar` for the role `bursar`, which owns it and is no superuser."""
        return self._url(ROLE, ROLE)

    @property
    def admin_url(self) -> str:
        """URL of the server for its superuser: for maintenance and tests, not for serving."""
        return self._url(SUPERUSER, "postgres")

    @property
    def pid(self) -> int | None:
        """The postmaster's pid; None while it is not running."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop the server and leave no process of it behind. A second call does nothing."""
        if self._supervisor_lock is None:
            return
        try:
            if self._supervision:
                self._supervision.cancel()
                await asyncio.gather(self._supervision, return_exceptions=True)
            await self._end_postmaster()
            os.close(await claim(self.directory, ORPHAN_GRACE_SECONDS))
            forget_socket_dir(self.directory, self._socket_dir)
        finally:
            os.close(self._supervisor_lock)
            self._supervisor_lock = None

    async def _begin(self) -> None:
        await self._launch(EARLIER_RUN_GRACE_SECONDS)
        await self._create_database()
        self._supervision = asyncio.create_task(self._supervise(), name="embedded-postgres")
        self._log.info(
            "postgres_ready",
            message="PostgreSQL accepts connections",
            pid=self.pid,
            version=self.binaries.major,
            data=str(self.directory.root),
        )

    async def _supervise(self) -> None:
        """Restart the server whenever it ends: at once, or after a pause if it keeps failing early."""
        loop = asyncio.get_running_loop()
        early_deaths = 0
        while True:
            assert self._process is not None
            status = await self._process.wait()
            early_deaths = early_deaths + 1 if loop.time() - self._launched_at < STEADY_SECONDS else 0
            pause = BACKOFF_SECONDS[min(max(early_deaths - 1, 0), len(BACKOFF_SECONDS) - 1)]
            self._log.warning(
                "postgres_died", message="PostgreSQL ended by itself", status=status, restart_in_seconds=pause
            )
            await asyncio.sleep(pause)
            try:
                await self._launch(ORPHAN_GRACE_SECONDS)
            except (EmbeddedError, OSError) as error:
                self._launched_at = loop.time()  # a failure to start counts as an early death
                self._log.error(
                    "postgres_restart_failed", message="PostgreSQL could not be restarted", error=str(error)
                )
            else:
                self.restarts += 1
                self._log.info(
                    "postgres_restarted", message="PostgreSQL runs again", pid=self.pid, restarts=self.restarts
                )

    async def _launch(self, grace_seconds: float) -> None:
        """Start a new generation and wait until it accepts a connection."""
        alive_fd = await claim(self.directory, grace_seconds)
        try:
            if self.directory.version() is None:
                await initialise(self.directory, self.binaries, self._account, alive_fd)
            elif await asyncio.to_thread(hand_over_cluster, self.directory.pgdata, self._account):
                self._log.info(
                    "postgres_handed_over",
                    message="the cluster has another owner",
                    user=self._account.name,
                    data=str(self.directory.root),
                )
            write_access(self.directory, self._account, self._client.name if self._client else None)
            remove_stale_lock_files(self.directory, self._socket_dir)
            with open_log(self.directory) as output:
                self._log_offset = output.seek(0, os.SEEK_END)
                self._process = await spawn(self._command(), self._account, alive_fd=alive_fd, output=output)
        finally:
            os.close(alive_fd)  # from now on only the server's processes hold it
        self._launched_at = asyncio.get_running_loop().time()
        await self._wait_ready(self._process)

    def _command(self) -> list[str]:
        settings = self._settings | {"unix_socket_directories": f'"{self._socket_dir}"'}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self.binaries.bin_dir / "postgres"), "-D", str(self.directory.pgdata), *options]

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                connection = await asyncpg.connect(self.admin_url, timeout=5)
            except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError) as error:
                refused = error
            else:
                try:
                    await connection.fetchval("SELECT 1")
                finally:
                    await connection.close()
                return
            if process.returncode is not None:
                raise self._start_failure(f"ended with status {process.returncode} while starting")
            waited = loop.time() - began
            if waited > self._ready_seconds_max:
                raise self._start_failure(f"accepts no connection after {waited:.0f} s ({refused})")
            with contextlib.suppress(TimeoutError):
                # Each refused connection during a long recovery is a line in the log, so polling slows down.
                async with asyncio.timeout(0.01 if waited < 1 else 0.1):
                    await process.wait()

    def _start_failure(self, what: str) -> EmbeddedError:
        with self.directory.log.open("rb") as written:
            written.seek(max(self._log_offset, self.directory.log.stat().st_size - 2000))
            tail = written.read().decode(errors="replace").strip()
        return EmbeddedError(
            f"PostgreSQL {what}. The end of its log:\n{tail}",
            f"Mend what the log names and start again; the whole log is {self.directory.log}",
        )

    async def _create_database(self) -> None:
        connection = await asyncpg.connect(self.admin_url)
        try:
            if not await connection.fetchval("SELECT true FROM pg_roles WHERE rolname = $1", ROLE):
                await connection.execute(f"CREATE ROLE {ROLE} LOGIN")
            if not await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", ROLE):
                await connection.execute(f"CREATE DATABASE {ROLE} OWNER {ROLE}")
        finally:
            await connection.close()

    async def _end_postmaster(self) -> None:
        for step, seconds_max in STOP_STEPS:
            if self._process is None or self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(step)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_max):
                    await self._process.wait()

    def _url(self, role: str, database: str) -> str:
        return f"postgresql://{role}@/{database}?host={quote(str(self._socket_dir), safe='/')}&port={PORT}"
