"""Connections to PostgreSQL, and the classification of its errors: which are worth a retry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from operator import itemgetter
from traceback import walk_tb
from typing import Any, TypeAlias

import asyncpg

# asyncpg ships no types; the alias keeps signatures readable.
Connection: TypeAlias = Any

# A paused process must not block the others: the server ends its transaction after this time. The lock timeout is
# longer, so that waiters outlive the transaction they wait for.
SESSION_SETTINGS = {
    "application_name": "bursar",
    "timezone": "UTC",
    "idle_in_transaction_session_timeout": "2000",
    "lock_timeout": "5000",
    "statement_timeout": "30000",
    "client_connection_check_interval": "2000",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "default_transaction_isolation": "read committed",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

KEPT_NAME = "bursar-lane"  # the application name of sessions that take locks

# For kept connections, all of whose statements find rows by key. A cached plan that was made while tables are empty
# would scan them whole until the next ANALYZE. A plan made for a batch of hundreds would use a hash join with the whole
# table, and would slow larger batches down.
KEPT_SETTINGS = {
    **SESSION_SETTINGS,
    "application_name": KEPT_NAME,
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}

# For background work that takes longer the more data there is, and that no request waits for.
PATIENT_SETTINGS = {**SESSION_SETTINGS, "statement_timeout": "600000"}

CONNECT_TIMEOUT_SECONDS = 5.0
COMMAND_TIMEOUT_SECONDS = 15.0
PATIENT_SECONDS = 600.0
TURN_SECONDS_MAX = 10.0
SNAPSHOT_IDLE_SECONDS_MAX = 30


def affected(tag: str) -> int:
    """Parse the number of rows from the tag of a finished statement, such as `DELETE 3`."""
    return int(tag.rpartition(" ")[2])


class Unavailable(Exception):
    """The database is unreachable or does not accept work now."""


class TooSlow(Unavailable):
    """A statement exceeded its time limit although the database is reachable; waiting alone does not help."""


class Stale(Exception):
    """A guard failed at the time of writing: the decision must be repeated on fresh rows."""


class MissingPartition(Exception):
    """The feed has no partition for the next revision, or the ledger none for the next entry."""


def is_missing_partition(error: BaseException) -> bool:
    return isinstance(error, asyncpg.CheckViolationError) and "no partition" in str(error)


# Lost races: the server rolled the whole transaction back, and a retry may succeed.
RACES: tuple[type[Exception], ...] = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    Stale,
)

# A lock timed out: its holder exceeds every time limit of this program.
BLOCKED: tuple[type[Exception], ...] = (asyncpg.LockNotAvailableError,)

# The connection or the server was lost; whether a COMMIT in flight took effect is unknown.
LOSSES: tuple[type[Exception], ...] = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended the session between two statements
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TooManyConnectionsError,
    asyncpg.QueryCanceledError,
    asyncpg.ReadOnlySQLTransactionError,
    ConnectionError,
    OSError,
    TimeoutError,
    asyncio.IncompleteReadError,
)


AWAY: tuple[type[Exception], ...] = (*LOSSES, Unavailable)

# A statement was cancelled, by the server or by our time limit.
SLOW: tuple[type[Exception], ...] = (asyncpg.QueryCanceledError, TimeoutError)


async def connect(
    url: str, settings: Mapping[str, str] = SESSION_SETTINGS, command_seconds: float = COMMAND_TIMEOUT_SECONDS
) -> Connection:
    try:
        db = await asyncpg.connect(
            url,
            server_settings=dict(settings),
            timeout=CONNECT_TIMEOUT_SECONDS,
            command_timeout=command_seconds,
        )
        await set_codecs(db)
        return db
    except LOSSES as error:
        raise Unavailable(f"cannot connect to the database: {error}") from error


async def set_codecs(db: Connection) -> None:
    """Register codecs that pass JSON as bytes both ways: documents are encoded and decoded elsewhere, once."""
    await db.set_type_codec("json", schema="pg_catalog", format="binary", encoder=bytes, decoder=bytes)
    # The binary format of jsonb is its text after one version byte.
    await db.set_type_codec(
        "jsonb", schema="pg_catalog", format="binary", encoder=b"\x01".__add__, decoder=itemgetter(slice(1, None))
    )


async def _leave(_: Connection) -> None:
    """Skip asyncpg's reset between readers: there is no session state, and the round trip would cost more than most
    reads."""


class Database:
    """A pool for readers, and dedicated connections for lanes and the feed."""

    def __init__(self, url: str, pool: Any, readers: int) -> None:
        self.url = url
        self._pool = pool
        # asyncpg's pool lets newcomers overtake waiters; the semaphore is fair.
        self._turns = asyncio.Semaphore(readers)
        self._interrupted: set[int] = set()  # server processes whose reader was cancelled

    @classmethod
    async def open(cls, url: str, *, readers: int = 4) -> Database:
        pool = await asyncpg.create_pool(
            url,
            min_size=0,
            max_size=readers,
            server_settings=SESSION_SETTINGS,
            timeout=CONNECT_TIMEOUT_SECONDS,
            command_timeout=COMMAND_TIMEOUT_SECONDS,
            init=set_codecs,
            reset=_leave,
        )
        return cls(url, pool, readers)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(5):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[Connection]:
        """Acquire a pooled connection for single statements. A lost connection becomes Unavailable."""
        await self._take_turn()
        try:
            async with self._pool.acquire(timeout=CONNECT_TIMEOUT_SECONDS) as db:
                session = db.get_server_pid()
                try:
                    with _telling_what_is_slow():
                        if session in self._interrupted:
                            await self._end_transaction(db, session)
                        yield db
                except (asyncio.CancelledError, TooSlow):
                    self._interrupted.add(session)
                    raise
        except LOSSES as error:
            raise Unavailable(f"the database is away: {error}") from error
        finally:
            self._turns.release()

    async def _end_transaction(self, db: Connection, session: int) -> None:
        """End the implicit transaction that a cancelled reader may have left: asyncpg sends no Sync between preparing a
        statement and executing it, and a `BEGIN` with an isolation level would fail. Not when the reader is cancelled:
        the server may be frozen then."""
        await db.execute("ROLLBACK")
        self._interrupted.discard(session)

    async def _take_turn(self) -> None:
        if not self._turns.locked():
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout(TURN_SECONDS_MAX):
                await self._turns.acquire()
        except TimeoutError as error:
            raise Unavailable(f"no connection came free within {TURN_SECONDS_MAX:g} s") from error

    async def connect(self) -> Connection:
        return await connect(self.url, KEPT_SETTINGS)

    @asynccontextmanager
    async def patient(self) -> AsyncIterator[Connection]:
        """Open a dedicated connection for statements that may take minutes."""
        db = await connect(self.url, PATIENT_SETTINGS, PATIENT_SECONDS)
        try:
            with _telling_what_is_slow():
                yield db
        except LOSSES as error:
            raise Unavailable(f"the database is away: {error}") from error
        finally:
            # Finished work is committed or rolled back; the server rolls the rest back.
            db.terminate()


@contextmanager
def _telling_what_is_slow() -> Iterator[None]:
    try:
        yield
    except SLOW as error:
        raise TooSlow(f"{_asked_by(error)} took too long: {error!r}") from error


def _asked_by(error: BaseException) -> str:
    """Find the origin of a statement: the innermost function of the store in the traceback."""
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__) if _is_store(frame.f_globals)]
    return names[-1] if names else "a statement"


def _is_store(names: Mapping[str, Any]) -> bool:
    module = str(names.get("__name__"))
    return module.startswith("bursar.store.") and module != __name__


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[Connection]:
    """Open a repeatable-read transaction for reading. It locks no row that others want, so a longer pause between two
    statements is allowed."""
    async with database.reader() as db, db.transaction(isolation="repeatable_read", readonly=True):
        await db.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{SNAPSHOT_IDLE_SECONDS_MAX}s'")
        yield db
