"""Records of a deleted tenant: renamed to NAME@UID, visible to administrators and to no later tenant of the same
name."""

from __future__ import annotations

from bursar.core.credit.account import filed_name
from bursar.store.access.token import TokenRecord, token_record
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/departure")


async def file_away(db: Connection, tenant: str, uid: str) -> list[TokenRecord]:
    """Rename accounts, tokens, webhooks and unaddressed notices; delete the external budget; return the tokens that
    this revoked.

    The caller holds the exclusive lock of the tree and the locks of the tenant's accounts.
    """
    return [token_record(row) for row in await db.fetch(SQL.file, tenant, filed_name(tenant, uid))]
