"""Schema migrations: plain SQL files, applied once each, in order, under a lock; their checksums are stored.

A file that was edited after it was applied is refused, so that the files always show how a database was built.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from bursar.store.db.database import Connection

if TYPE_CHECKING:
    from collections.abc import Sequence

# Migrations, and waits for another process's migration, have no time limit. asyncpg ends commands after its default
# timeout, and takes None for that default, so a large number is given.
SECONDS_MAX = 7 * 86_400.0

_CREATE = """
CREATE TABLE IF NOT EXISTS migration (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)
"""


class MigrationError(Exception):
    """The schema cannot be migrated to this version; the message contains the remedy."""


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> list[Migration]:
    folder = resources.files("bursar.store").joinpath("sql/migrations")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return [Migration(int(file.name[:4]), file.name.removesuffix(".sql"), file.read_text()) for file in files]


async def migrate(db: Connection, wanted: Sequence[Migration] | None = None) -> list[str]:
    """Apply the missing migrations in one transaction; return their names."""
    wanted = migrations() if wanted is None else wanted
    # If two processes start together, the second waits here and then finds nothing to do.
    async with db.transaction():
        await db.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
        await db.execute("SELECT pg_advisory_xact_lock(4207)", timeout=SECONDS_MAX)
        await db.execute(_CREATE, timeout=SECONDS_MAX)
        await db.execute("LOCK TABLE migration IN EXCLUSIVE MODE", timeout=SECONDS_MAX)
        applied = {row["version"]: row for row in await db.fetch("SELECT version, name, checksum FROM migration")}
        missing = [migration for migration in wanted if not _is_applied(migration, applied.get(migration.version))]
        newest = max((migration.version for migration in wanted), default=0)
        if ahead := [row["name"] for version, row in applied.items() if version > newest]:
            raise MigrationError(
                f"the database was migrated by a newer Bursar ({', '.join(ahead)}); "
                "upgrade this one, or restore a backup"
            )
        for migration in missing:
            await db.execute(migration.sql, timeout=SECONDS_MAX)
            await db.execute(
                "INSERT INTO migration (version, name, checksum) VALUES ($1, $2, $3)",
                migration.version,
                migration.name,
                migration.checksum,
            )
    return [migration.name for migration in missing]


def _is_applied(migration: Migration, row: object) -> bool:
    if row is None:
        return False
    if row["checksum"] != migration.checksum:  # type: ignore[index]
        raise MigrationError(
            f"migration {migration.name} was edited after it was applied to this database; "
            "restore the file and put the change into a new migration"
        )
    return True
