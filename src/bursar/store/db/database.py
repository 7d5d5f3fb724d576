"""Connections to PostgreSQL, and the one place that knows which of its errors are worth another try."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from operator import itemgetter
from traceback import walk_tb
from typing import Any, TypeAlias

import asyncpg

# asyncpg ships no types; the alias keeps the word in signatures.
Connection: TypeAlias = Any

# A paused process must not freeze the others: the server ends its transaction, and waiters continue.
# The lock timeout is longer than that, so that a waiter outlives the culprit.
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

KEPT_NAME = "bursar-lane"  # separates sessions that lock from sessions that only read

# For kept connections: all their statements find their rows by key. A plan that is made while the tables
# are still empty would read them whole, and be kept until somebody analyses them. So would one that is made for a batch
# of some hundreds: it would join them with a hash of the whole table, and larger batches would be slower, not faster.
KEPT_SETTINGS = {
    **SESSION_SETTINGS,
    "application_name": KEPT_NAME,
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}

# For background work, whose time grows with its amount and which nobody waits for.
PATIENT_SETTINGS = {**SESSION_SETTINGS, "statement_timeout": "600000"}

CONNECT_TIMEOUT_SECONDS = 5.0
COMMAND_TIMEOUT_SECONDS = 15.0
PATIENT_SECONDS = 600.0
TURN_SECONDS_MAX = 10.0
SNAPSHOT_IDLE_SECONDS_MAX = 30


def affected(tag: str) -> int:
    """The number of rows in the tag of a finished statement, such as `DELETE 3`."""
    return int(tag.rpartition(" ")[2])


class Unavailable(Exception):
    """The database cannot be reached, or is not accepting work, now."""


class TooSlow(Unavailable):
    """The database is there, and a statement took longer than it may: waiting alone will not mend that."""


class Stale(Exception):
    """A guard did not hold at the moment of writing: what was decided must be decided again."""


class MissingPartition(Exception):
    """The feed has no partition for the next revision yet, or the ledger none for the next entry."""


def is_missing_partition(error: BaseException) -> bool:
    return isinstance(error, asyncpg.CheckViolationError) and "no partition" in str(error)


# Lost races: the server undid the whole transaction, and the same work may succeed on the next try.
RACES: tuple[type[Exception], ...] = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    Stale,
)

# A lock was waited for in vain: somebody holds it for longer than anything of ours takes.
BLOCKED: tuple[type[Exception], ...] = (asyncpg.LockNotAvailableError,)

# The connection or the server went away; whether a COMMIT under way took effect is not known.
LOSSES: tuple[type[Exception], ...] = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # asyncpg lost its place: the server ended the session between two statements
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

# The server gave a statement up, or we did.
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
    """JSON travels as bytes both ways: documents are encoded and decoded once, elsewhere."""
    await db.set_type_codec("json", schema="pg_catalog", format="binary", encoder=bytes, decoder=bytes)
    # jsonb's binary form is its text behind one byte of version.
    await db.set_type_codec(
        "jsonb", schema="pg_catalog", format="binary", encoder=b"\x01".__add__, decoder=itemgetter(slice(1, None))
    )


async def _leave(_: Connection) -> None:
    """Between readers there is nothing to reset, and asking the server to would cost more than most reads."""


class Database:
    """A pool for reads, and separate connections for lanes and the feed."""

    def __init__(self, url: str, pool: Any, readers: int) -> None:
        self.url = url
        self._pool = pool
        # The pool lets newcomers overtake waiters; here waiters queue.
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
        """A connection for statements that stand alone. A lost one becomes Unavailable."""
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
        """A connection of its own for statements that may take minutes."""
        db = await connect(self.url, PATIENT_SETTINGS, PATIENT_SECONDS)
        try:
            with _telling_what_is_slow():
                yield db
        except LOSSES as error:
            raise Unavailable(f"the database is away: {error}") from error
        finally:
            # What is over is committed or undone; what is not, the server undoes.
            db.terminate()


@contextmanager
def _telling_what_is_slow() -> Iterator[None]:
    try:
        yield
    except SLOW as error:
        raise TooSlow(f"{_asked_by(error)} took too long: {error!r}") from error


def _asked_by(error: BaseException) -> str:
    """The origin of a statement: the innermost function of the store."""
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__) if _is_store(frame.f_globals)]
    return names[-1] if names else "a statement"


def _is_store(names: Mapping[str, Any]) -> bool:
    module = str(names.get("__name__"))
    return module.startswith("bursar.store.") and module != __name__


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[Connection]:
    """Everything as it was at one moment, whatever is committed meanwhile. It locks no row that others want, so it
    outlives a pause between two statements."""
    async with database.reader() as db, db.transaction(isolation="repeatable_read", readonly=True):
        await db.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{SNAPSHOT_IDLE_SECONDS_MAX}s'")
        yield db
