"""The change feed in the database: read in order, partitioned by revision, dropped one partition at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from bursar.core.objects.object import Key
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/change")

PARTITION_SIZE = 1_000_000
# The TOAST target of rows: PostgreSQL's default of 2 kB would compress most rows, which costs more than all other work
# on them.
INLINE_BYTES_MAX = 4080
CHANNEL = "bursar_change"  # announces the number of the last change


@dataclass(frozen=True, slots=True)
class Change:
    revision: int
    key: Key
    uid: str
    tenant: str
    type: str
    labels: bytes
    fields: bytes
    before_labels: bytes | None
    before_fields: bytes | None
    before_tenant: str | None
    doc: bytes
    status: bytes
    at: datetime


class SeenChange(NamedTuple):
    """A change as the scheduler reads it; the document is left out if the scheduler knows the allocation already."""

    revision: int
    key: Key
    uid: str
    tenant: str
    type: str
    labels: bytes
    fields: bytes
    doc: bytes | None
    status: bytes
    bare: bool = False  # labels, fields and status were not read


class AuditLine(NamedTuple):
    """A line of the audit log."""

    revision: int
    key: Key
    uid: str
    tenant: str
    type: str
    actor: str
    verb: str
    reason: str
    at: datetime
    status: str | None = None  # for a changed allocation


class AuditNote(NamedTuple):
    """A line of the audit log about an action without an object. Its document contains no secret."""

    kind: str
    name: str
    tenant: str
    type: str
    doc: bytes
    actor: str
    verb: str
    reason: str = ""


class FeedPosition(NamedTuple):
    revision: int
    floor: int


def _change(row: Any) -> Change:
    revision, kind, namespace, name, *rest, status, at = row
    return Change(revision, Key(kind, namespace, name), *(*rest, status or b"{}", at))


async def load_since(db: Connection, revision: int, limit: int) -> list[Change]:
    return [_change(row) for row in await db.fetch(SQL.since, revision, limit)]


async def load_seen(db: Connection, revision: int, limit: int, binder: str) -> list[SeenChange]:
    """Load the changes since a revision; placements by `binder` come without details."""
    return [
        SeenChange(
            row[0], Key(row[1], row[2], row[3]), row[4], row[5], row[6], row[7].encode(), row[8].encode(), row[9],
            row[10] or b"{}", row[11],
        )
        for row in await db.fetch(SQL.for_scheduler, revision, limit, binder)
    ]  # fmt: skip


async def load_between(db: Connection, after: int, until: int, kind: str, namespace: str, limit: int) -> list[Change]:
    """Load changes of one kind in (after, until], oldest first."""
    return [_change(row) for row in await db.fetch(SQL.of_kind_between, after, until, kind, namespace, limit)]


async def load_with_field(db: Connection, after: int, until: int, field: str, limit: int) -> list[Change]:
    """Load the changes in (after, until], oldest first, of objects that have a selectable field or had it before."""
    return [_change(row) for row in await db.fetch(SQL.with_field_between, after, until, field, limit)]


async def list_tenants_between(db: Connection, after: int, until: int) -> list[str]:
    """List the tenants whose objects changed in (after, until]."""
    return [row["tenant"] for row in await db.fetch(SQL.tenants_between, after, until) if row["tenant"]]


async def load_position(db: Connection) -> FeedPosition:
    return FeedPosition(*await db.fetchrow(SQL.position))


def _happening(row: Any) -> AuditLine:
    revision, kind, namespace, name, *rest = row
    return AuditLine(revision, Key(kind, namespace, name), *rest)


async def was_placed(db: Connection, key: Key, uid: str, node: str, epoch: int) -> bool:
    """Return whether the feed still contains a placement of this allocation on a node."""
    return bool(await db.fetchval(SQL.was_placed, key.namespace, key.name, uid, node, epoch))


async def load_happenings_of(db: Connection, namespace: str, name: str, kind: str, limit: int) -> list[AuditLine]:
    return [_happening(row) for row in await db.fetch(SQL.events_of_object, name, namespace, kind, limit)]


async def load_happenings(
    db: Connection, since: int, namespace: str, tenants: Sequence[str] | None, limit: int
) -> list[AuditLine]:
    return [_happening(row) for row in await db.fetch(SQL.events, since, namespace, tenants, limit)]


async def save_notes(db: Connection, notes: Sequence[AuditNote]) -> None:
    """Write lines of the audit log. Call it last in a transaction: it locks the revision."""
    if notes:
        await db.execute(SQL.note, *([*column] for column in zip(*notes, strict=True)))


async def ensure_partitions(db: Connection) -> None:
    """Create the partitions for the next revisions in advance."""
    position = await load_position(db)
    first = position.revision // PARTITION_SIZE
    there = {row["name"] for row in await db.fetch(SQL.partitions)}
    for index in (first, first + 1):
        name = f"change_{index:09d}"
        if name not in there:
            try:
                await db.execute(
                    f"CREATE TABLE {name} PARTITION OF change "
                    f"FOR VALUES FROM ({index * PARTITION_SIZE}) TO ({(index + 1) * PARTITION_SIZE}) "
                    f"WITH (toast_tuple_target = {INLINE_BYTES_MAX})"
                )
            except (asyncpg.DuplicateTableError, asyncpg.UniqueViolationError):
                continue  # another process created it first


async def raise_floor(db: Connection, revision: int) -> None:
    """Raise the floor: a watch can no longer begin at or below this revision."""
    await db.execute(SQL.raise_floor, revision)


async def drop_before(db: Connection, revision: int) -> list[str]:
    """Drop the partitions wholly below a revision, after raising the feed's floor."""
    dropped: list[str] = []
    for row in await db.fetch(SQL.partitions):
        name: str = row["name"]
        end = (int(name.rpartition("_")[2]) + 1) * PARTITION_SIZE
        if end <= revision:
            await raise_floor(db, end)
            await db.execute(f"DROP TABLE IF EXISTS {name}")
            dropped.append(name)
    return dropped
