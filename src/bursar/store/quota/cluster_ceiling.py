"""Changed node documents, from which the cached sizes of all nodes are kept up to date."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("quota/cluster_ceiling")


@dataclass(frozen=True, slots=True)
class Edition:
    """The number of nodes, and the revision of the last change of a node."""

    nodes: int = 0
    revision: int = 0


async def load_edition(db: Connection) -> Edition:
    row = await db.fetchrow(SQL.edition)
    return Edition(row["nodes"], row["revision"])


async def load_nodes(db: Connection, since: int = 0) -> list[tuple[str, bytes, bytes]]:
    """Load (name, document, status) of the nodes that changed after a revision."""
    return [(row["name"], row["doc"], row["status"] or b"{}") for row in await db.fetch(SQL.nodes_since, since)]
