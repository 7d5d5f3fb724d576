"""Identities of registered users, by user."""

from __future__ import annotations

from collections.abc import Collection

from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("access/identity")


async def load_identities(db: Connection, uids: Collection[str]) -> dict[str, list[str]]:
    """Load the names of the identities that are mapped to users, by the user's uid."""
    found: dict[str, list[str]] = {}
    for row in await db.fetch(SQL.of_users, list(uids)):
        found.setdefault(row["user_uid"], []).append(row["name"])
    return found
