"""A tenant in a database without an office, so that tokens can be made for it."""

from bursar.store.db.database import Connection
from bursar.store.objects.change import ensure_partitions

ML, ML_UID = "ml", "tenant-1"


async def put_tenant(db: Connection, name: str = ML, uid: str = ML_UID) -> None:
    """Room for lines of the audit as well: every token leaves one."""
    await ensure_partitions(db)
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc)"
        " VALUES ('Tenant', '', $1, $2, $1, 0, '{}', '{}', '{}')",
        name, uid,
    )  # fmt: skip
