"""The node CA's certificate and key, and the valid generation of each node's certificates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("nodes/node_ca")


@dataclass(frozen=True, slots=True)
class AuthorityRecord:
    """The certificate and the private key of the node CA, as PEM."""

    certificate: str
    key: str = field(repr=False)


async def load(db: Connection) -> AuthorityRecord | None:
    row = await db.fetchrow(SQL.read)
    return None if row is None else AuthorityRecord(row["certificate"], row["key"])


async def lock(db: Connection) -> None:
    """Prevent concurrent creation of a CA until the transaction ends."""
    await db.execute(SQL.lock_against_writers)


async def save(db: Connection, record: AuthorityRecord) -> None:
    await db.execute(SQL.insert, record.certificate, record.key)


async def enrol(db: Connection, node: str, token_id: str, key: bytes) -> int | None:
    """Begin a node's next certificate generation, which ends the previous one.

    A repeated request with the token that began the present generation returns that generation. None if there is no
    such node, or the token does not belong to this key.
    """
    generation: int | None = await db.fetchval(SQL.enrol, node, token_id, key)
    return generation


async def ensure_generation(db: Connection, node: str) -> int | None:
    """Return the node's generation; begin the first one if it has none. None if there is no such node."""
    generation: int | None = await db.fetchval(SQL.ensure, node)
    return generation


async def end_generations(db: Connection, nodes: Collection[str]) -> None:
    """Invalidate the certificates of these nodes, in the caller's transaction."""
    await db.execute(SQL.end, sorted(nodes))


async def load_generations(db: Connection, nodes: Collection[str]) -> dict[str, int]:
    """Load the generations of the existing nodes by name; 0 if a node was never enrolled."""
    return {row["name"]: row["generation"] for row in await db.fetch(SQL.generations, sorted(nodes))}
