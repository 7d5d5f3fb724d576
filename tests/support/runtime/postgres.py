"""PostgreSQL for the tests: one embedded server per run (per xdist worker), and a database of its own for each test."""

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from bursar.ops.lifecycle.bootstrap import prepare
from bursar.store.db.database import Connection, connect
from bursar.store.db.migrate import migrate
from bursar.store.embedded import Embedded, start

TEMPLATE = "bursar_template"
MEMORY = Path("/dev/shm")
MEMORY_FREE_BYTES_MIN = 2_000_000_000
# Durability stays on, so that timing and behaviour are those of production; only what costs start-up time is small.
SETTINGS = {"shared_buffers": "64MB", "max_wal_size": "256MB", "autovacuum_naptime": "60s", "wal_compression": "off"}


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


@pytest.fixture(scope="session")
def embedded_postgres() -> Iterator[Embedded]:
    """The server itself, supervised by an event loop in a thread of its own, so that it outlives each test's loop."""
    data_dir = Path(tempfile.mkdtemp(prefix="bursar-tests-", dir=_directory()))
    data_dir.chmod(0o711)
    try:
        with start_blocking_portal() as portal:
            embedded = portal.call(lambda: start(data_dir, settings=SETTINGS))
            session = _SESSIONS[embedded.admin_url] = AdminSession(portal, embedded.admin_url)
            try:
                yield embedded
            finally:
                portal.call(session.close)
                portal.call(embedded.stop)
    finally:
        shutil.rmtree(data_dir)


@pytest.fixture(scope="session")
def postgres_server(embedded_postgres: Embedded) -> str:
    """The server's URL: database and role `bursar`, no superuser, as in production."""
    return embedded_postgres.url


@pytest.fixture(scope="session")
def postgres_admin(embedded_postgres: Embedded) -> str:
    """The same server as its superuser."""
    return embedded_postgres.admin_url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def blank_template(embedded_postgres: Embedded) -> str:
    """A migrated database without a single object, to clone; PostgreSQL demands that nobody is connected to it."""
    name = f"{TEMPLATE}_blank"
    await _as_admin(embedded_postgres, f"CREATE DATABASE {name} OWNER bursar")
    connection = await asyncpg.connect(_url(embedded_postgres, name))
    try:
        await migrate(connection)
    finally:
        await connection.close()
    return name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def database_template(embedded_postgres: Embedded, blank_template: str) -> str:
    """A database to clone, with the objects that every new installation has."""
    await _as_admin(embedded_postgres, f"CREATE DATABASE {TEMPLATE} TEMPLATE {blank_template} OWNER bursar")
    await prepare(_url(embedded_postgres, TEMPLATE))
    return TEMPLATE


@pytest.fixture
async def database_url(embedded_postgres: Embedded, database_template: str) -> AsyncIterator[str]:
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


async def clone_database(embedded: Embedded, template: str) -> str:
    name = f"test_{uuid.uuid4().hex}"
    # Copying files takes half the work of writing every block of the template to the log.
    await _as_admin(embedded, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY OWNER bursar")
    return name


async def drop_database(embedded: Embedded, name: str) -> None:
    await _as_admin(embedded, f"DROP DATABASE {name} WITH (FORCE)")


async def _as_admin(embedded: Embedded, statement: str) -> None:
    session = _SESSIONS[embedded.admin_url]
    await asyncio.wrap_future(session.portal.start_task_soon(session.execute, statement))


def _url(embedded: Embedded, database: str) -> str:
    return embedded.url.replace("@/bursar?", f"@/{database}?")


def _directory() -> Path | None:
    """Memory where there is plenty: creating a database is mostly creating files, and some disks are slow at it."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_FREE_BYTES_MIN:
        return MEMORY
    return None
