"""A tenant in a database without a runtime, so that tokens can be created for it."""

from bursar.store.db.database import Connection
from bursar.store.objects.change import ensure_partitions

ML, ML_UID = "ml", "tenant-1"


async def put_tenant(db: Connection, name: str = ML, uid: str = ML_UID) -> None:
    """Partitions for the lines of the audit log too: every token writes one."""
    await ensure_partitions(db)
    await db.execute(
        "INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc)"
        " VALUES ('Tenant', '', $1, $2, $1, 0, '{}', '{}', '{}')",
        name, uid,
    )  # fmt: skip
