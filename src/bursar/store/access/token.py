"""Bearer tokens: identity, expiry and the hash of the secret. The secret itself is never stored."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bursar.core.values.access import Role
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("access/token")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    id: str
    hash: bytes = field(repr=False)
    role: Role
    tenant: str
    user: str
    node: str
    single_use: bool
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    used_at: datetime | None = None
    used_key: bytes | None = field(default=None, repr=False)  # fingerprint of the key that it was used for
    revoked_at: datetime | None = None
    tenant_uid: str = ""
    tenants: tuple[str, ...] = ()  # of an approver, as NAME@UID, or `*`
    gates: tuple[str, ...] = ()
    lives: bool = True  # whether the tenant of the token still exists
    member_role: Role | None = None  # of the user as a member of the tenant; the token gives no more than that


async def save_token(db: Connection, token: TokenRecord) -> None:
    await db.execute(
        SQL.insert,
        token.id,
        token.hash,
        str(token.role),
        token.tenant,
        token.tenant_uid,
        token.user,
        token.node,
        token.single_use,
        token.created_at,
        token.created_by,
        token.expires_at,
        list(token.tenants),
        list(token.gates),
    )


async def load_tokens(db: Connection, token_ids: Collection[str]) -> dict[str, TokenRecord]:
    """Load tokens by id; unknown ids are absent from the result."""
    return {row["id"]: token_record(row) for row in await db.fetch(SQL.find, list(token_ids))}


async def list_tokens(db: Connection, tenants: Collection[str] | None) -> list[TokenRecord]:
    """List the tokens of these tenants (None: of all), oldest first."""
    rows = await (db.fetch(SQL.list_all) if tenants is None else db.fetch(SQL.list_of_tenants, sorted(tenants)))
    return [token_record(row) for row in rows]


async def save_revoked(db: Connection, token_id: str, now: datetime, by: str) -> TokenRecord | None:
    """Revoke a token; return None if it was revoked before."""
    row = await db.fetchrow(SQL.revoke, token_id, now, by)
    return None if row is None else token_record(row)


async def save_used(db: Connection, token_id: str, now: datetime, key: bytes | None) -> bool:
    """Consume a single-use token in the caller's transaction; return False if it was used, revoked or has expired."""
    return await db.fetchval(SQL.consume, token_id, now, key) is not None


async def load_used_for(db: Connection, token_id: str, now: datetime, key: bytes) -> bool:
    """Return whether a single-use token was used for this key and is neither revoked nor expired."""
    return bool(await db.fetchval(SQL.reuse, token_id, now, key))


async def revoke_of_nodes(db: Connection, nodes: Collection[str]) -> list[TokenRecord]:
    """Revoke the tokens of deleted nodes; return those that were valid until now."""
    return [token_record(row) for row in await db.fetch(SQL.revoke_of_nodes, sorted(nodes))]


async def revoke_of_users(db: Connection, users: Collection[tuple[str, str]], by: str) -> list[TokenRecord]:
    """Revoke the tokens of users of a tenant, as (tenant, user); return those that were valid until now."""
    tenants, names = zip(*sorted(users), strict=True)
    return [token_record(row) for row in await db.fetch(SQL.revoke_of_users, list(tenants), list(names), by)]


async def save_unused(db: Connection, token_id: str) -> None:
    await db.execute(SQL.restore, token_id)


async def lock_tokens(db: Connection) -> None:
    await db.execute(SQL.lock_against_writers)


async def load_role_exists(db: Connection, role: Role) -> bool:
    """Return whether a token of this role was ever created, revoked and expired ones included."""
    return bool(await db.fetchval(SQL.exists_of_role, str(role)))


def token_record(row: Any) -> TokenRecord:
    columns = dict(row)
    columns["tenants"], columns["gates"] = tuple(columns["tenants"]), tuple(columns["gates"])
    if columns.get("member_role") is not None:
        columns["member_role"] = Role(columns["member_role"])
    return TokenRecord(role=Role(columns.pop("role")), user=columns.pop("username"), **columns)
