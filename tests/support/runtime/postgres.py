"""PostgreSQL for the tests: one server per run, or per worker without `--share`, and a database for each test."""

import asyncio
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import asyncpg
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from bursar.ops.lifecycle.bootstrap import prepare
from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import migrate
from bursar.store.embedded import start
from support.runtime.shared import shared, temporary_directory

TEMPLATE = "bursar_template"
BLANK_TEMPLATE = f"{TEMPLATE}_blank"
MEMORY = Path("/dev/shm")
MEMORY_FREE_BYTES_MIN = 2_000_000_000
# As in production, apart from what costs time at each start, and at each of thousands of copies: nobody recovers this
# server after a crash, so it need not write through to the disk. Tests of durability have servers of their own.
SETTINGS = {"shared_buffers": "64MB", "max_wal_size": "256MB", "autovacuum_naptime": "60s", "wal_compression": "off"}
SETTINGS |= {"fsync": "off", "full_page_writes": "off"}
SETTINGS["max_connections"] = "600"


class AdminSession:
    """One connection of the superuser for the whole run, on the supervising loop: each test's own loop ends with it."""

    def __init__(self, portal: BlockingPortal, url: str) -> None:
        self.portal = portal
        self._url = url
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None

    async def execute(self, statement: str) -> None:
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await asyncpg.connect(self._url)
            await self._connection.execute(statement)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.terminate()


_SESSIONS: dict[str, AdminSession] = {}


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A PostgreSQL server: database and role `bursar`, no superuser, as in production; and the same as superuser."""

    url: str
    admin_url: str


@contextmanager
def running() -> Iterator[PostgresServer]:
    """A server with both templates, supervised by an event loop in a thread of its own."""
    with temporary_directory(_directory(), "bursar-tests-") as data_dir, start_blocking_portal() as portal:
        embedded = portal.call(lambda: start(data_dir, settings=SETTINGS))
        try:
            server = PostgresServer(embedded.url, embedded.admin_url)
            portal.call(make_templates, server)
            yield server
        finally:
            portal.call(embedded.stop)


@contextmanager
def shared_postgres() -> Iterator[dict[str, str]]:
    with running() as server:
        yield asdict(server)


async def make_templates(server: PostgresServer) -> None:
    """Two databases to clone: migrated without a single object, and with the objects of every new installation.
    PostgreSQL demands that nobody is connected to them."""
    admin = await asyncpg.connect(server.admin_url)
    await admin.execute(f"CREATE DATABASE {BLANK_TEMPLATE} OWNER bursar")
    connection = await asyncpg.connect(_url(server, BLANK_TEMPLATE))
    await migrate(connection)
    await connection.close()
    await admin.execute(f"CREATE DATABASE {TEMPLATE} TEMPLATE {BLANK_TEMPLATE} OWNER bursar")
    await prepare(_url(server, TEMPLATE))
    await admin.close()


@pytest.fixture(scope="session")
def embedded_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """The server of this run, or of this worker."""
    with ExitStack() as opened:
        facts = shared(request.config, "postgres")
        server = PostgresServer(**facts) if facts is not None else opened.enter_context(running())
        portal = opened.enter_context(start_blocking_portal())
        session = _SESSIONS[server.admin_url] = AdminSession(portal, server.admin_url)
        try:
            yield server
        finally:
            portal.call(session.close)


@pytest.fixture(scope="session")
def postgres_server(embedded_postgres: PostgresServer) -> str:
    return embedded_postgres.url


@pytest.fixture(scope="session")
def postgres_admin(embedded_postgres: PostgresServer) -> str:
    """The same server as its superuser."""
    return embedded_postgres.admin_url


@pytest.fixture(scope="session")
def blank_template(embedded_postgres: PostgresServer) -> str:
    return BLANK_TEMPLATE


@pytest.fixture(scope="session")
def database_template(embedded_postgres: PostgresServer) -> str:
    return TEMPLATE


@pytest.fixture
async def database_url(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[str]:
    """A fresh migrated database for one test."""
    name = await clone_database(embedded_postgres, database_template)
    yield _url(embedded_postgres, name)
    await drop_database(embedded_postgres, name)


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Connection]:
    """A connection that may leave a transaction open for as long as it likes."""
    one = await connect(database_url)
    await one.execute("SET idle_in_transaction_session_timeout = 0")
    yield one
    await one.close()


async def clone_database(server: PostgresServer, template: str) -> str:
    name = f"test_{uuid.uuid4().hex}"
    # Copying files takes half the work of writing every block of the template to the log.
    await _as_admin(server, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY OWNER bursar")
    return name


async def drop_database(server: PostgresServer, name: str) -> None:
    await _as_admin(server, f"DROP DATABASE {name} WITH (FORCE)")


async def _as_admin(server: PostgresServer, statement: str) -> None:
    session = _SESSIONS[server.admin_url]
    await asyncio.wrap_future(session.portal.start_task_soon(session.execute, statement))


def _url(server: PostgresServer, database: str) -> str:
    return server.url.replace("@/bursar?", f"@/{database}?")


def _directory() -> Path | None:
    """Memory where there is plenty: creating a database is mostly creating files, and some disks are slow at it."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_FREE_BYTES_MIN:
        return MEMORY
    return None
