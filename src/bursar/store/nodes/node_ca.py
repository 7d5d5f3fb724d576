"""The node CA's certificate and key, and the valid generation of each node's certificates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/node_ca")


@dataclass(frozen=True, slots=True)
class AuthorityRecord:
    """Both as PEM."""

    certificate: str
    key: str = field(repr=False)


async def load(db: Connection) -> AuthorityRecord | None:
    row = await db.fetchrow(SQL.read)
    return None if row is None else AuthorityRecord(row["certificate"], row["key"])


async def lock(db: Connection) -> None:
    """Until the transaction ends, nobody else makes one."""
    await db.execute(SQL.lock_against_writers)


async def save(db: Connection, record: AuthorityRecord) -> None:
    await db.execute(SQL.insert, record.certificate, record.key)


async def enrol(db: Connection, node: str, token_id: str, key: bytes) -> int | None:
    """Begin the node's next generation, which ends the one before; with the token that the present one was begun with,
    that one. None when there is no such node, or the token is no longer this key's."""
    generation: int | None = await db.fetchval(SQL.enrol, node, token_id, key)
    return generation


async def ensure_generation(db: Connection, node: str) -> int | None:
    """The node's generation, begun where there was none; None when there is no such node."""
    generation: int | None = await db.fetchval(SQL.ensure, node)
    return generation


async def end_generations(db: Connection, nodes: Collection[str]) -> None:
    """The certificates that these nodes have count no more; in the caller's transaction."""
    await db.execute(SQL.end, sorted(nodes))


async def load_generations(db: Connection, nodes: Collection[str]) -> dict[str, int]:
    """By name, of those nodes that exist; 0 where none was ever enrolled."""
    return {row["name"]: row["generation"] for row in await db.fetch(SQL.generations, sorted(nodes))}
