"""Members of tenants: who belongs to a tenant, with which role, for identities that name no tenant themselves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from bursar.core.values.access import Role
from bursar.core.values.names import member_part
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/member")


@dataclass(frozen=True, slots=True)
class Membership:
    """A user's role in a tenant, and the uid that the tenant had when the membership was read."""

    tenant: str
    tenant_uid: str
    role: Role


async def load_memberships(db: Connection, users: Collection[str]) -> dict[str, tuple[Membership, ...]]:
    """Load the memberships of users, by user and in order of tenants; users without any are left out."""
    found: dict[str, tuple[Membership, ...]] = {}
    for row in await db.fetch(SQL.find, list(users), [member_part(one) for one in users]):
        one = Membership(row["tenant"], row["tenant_uid"], Role(row["role"]))
        found[row["username"]] = (*found.get(row["username"], ()), one)
    return found
