"""What a deleted tenant leaves behind: filed under NAME@UID, where administrators find it and no namesake does."""

from __future__ import annotations

from bursar.core.credit.account import filed_name
from bursar.store.access.token import TokenRecord, token_record
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/departure")


async def file_away(db: Connection, tenant: str, uid: str) -> list[TokenRecord]:
    """File accounts, tokens, webhooks and notices that are not addressed yet; the tokens that were revoked by it.
    What is left of its external budget is forgotten.

    Whoever calls holds the tree alone, and the tenant's accounts.
    """
    return [token_record(row) for row in await db.fetch(SQL.file, tenant, filed_name(tenant, uid))]
