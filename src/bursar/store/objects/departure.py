"""Records of a deleted tenant: filed under NAME@UID, visible to administrators and to no later tenant of its name."""

from __future__ import annotations

from bursar.core.credit.account import filed_name
from bursar.store.access.token import TokenRecord, token_record
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/departure")


async def file_away(db: Connection, tenant: str, uid: str) -> list[TokenRecord]:
    """File accounts, tokens, webhooks and notices that are not addressed yet; the tokens that were revoked by it.
    Its external budget is deleted.

    The caller holds the tree exclusively, and the tenant's accounts.
    """
    return [token_record(row) for row in await db.fetch(SQL.file, tenant, filed_name(tenant, uid))]
