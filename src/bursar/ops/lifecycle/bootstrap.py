"""Bootstrap of a new installation: a default tenant and namespace, priority classes, queues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import structlog

from bursar.core.objects.object import Origin
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects.object import get, submit
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Database, connect
from bursar.store.db.migrate import migrate
from bursar.store.quota.tenant_tree import begin_era
from bursar.wire.kinds.namespace import DEFAULT_TENANT, TENANT_LABEL
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.kinds.settings import SETTINGS_KEY, SYSTEM

log = structlog.get_logger()

PRIORITIES = {"system-critical": 1_000_000, "high-priority": 1000, "batch-high": 500, "normal": 100, "low-priority": 0}
QUEUES = {"default": "default", "gpu-training": "ml", "hpc": "hpc", "interactive": "interactive", "service": "service"}


def first_objects() -> Iterator[dict[str, Any]]:
    yield {"kind": "Tenant", "metadata": {"name": DEFAULT_TENANT}, "spec": {}}
    labels = {TENANT_LABEL: DEFAULT_TENANT}
    yield {"kind": "Namespace", "metadata": {"name": "default", "labels": labels}}
    for name, value in PRIORITIES.items():
        # Work of this class goes before all other work, so only administrators may name it.
        reserved = {"adminOnly": True} if name == "system-critical" else {}
        yield {"kind": "PriorityClass", "metadata": {"name": name}, "value": value, **reserved}
    for name, profile in QUEUES.items():
        yield {"kind": "Queue", "metadata": {"name": name}, "spec": {"profile": profile}}
    yield {"kind": "Settings", "metadata": {"name": SYSTEM}, "spec": {}}


async def bootstrap(runtime: Runtime) -> int:
    """Create the default objects that do not exist; return the number created.

    The settings come last, so they exist only after a complete bootstrap: defaults that were deleted since then stay
    deleted.
    """
    if not isinstance(await get(runtime, SETTINGS_KEY), Refusal):
        return 0
    created = 0
    for document in first_objects():
        kind = BY_NAME[document["kind"]]
        one = msgspec.convert(document, kind.type)
        reply = await submit(runtime, create_command(kind, one, Origin("system:bootstrap", "create")), tenant="")
        if isinstance(reply, Refusal) and reply.code is not Code.ALREADY_EXISTS:
            raise RuntimeError(f"cannot create {kind.name} {document['metadata']['name']}: {reply.message}")
        created += not isinstance(reply, Refusal)
    return created


async def prepare(database_url: str, *, restored: bool = False) -> None:
    """Create schema and default objects, in a database that may be empty. `restored` says that it was restored from a
    backup: agents and clients that saw later changes must not confuse them with new ones."""
    db = await connect(database_url)
    try:
        if applied := await migrate(db):
            log.info("schema_migrated", message="migrations were applied", applied=len(applied), newest=applied[-1])
        if restored:
            await begin_era(db)
            log.info("era_begun", message="the database was restored, and a new era begins")
    finally:
        await db.close()
    database = await Database.open(database_url, readers=2)
    runtime = await open_runtime(database)
    try:
        await bootstrap(runtime)
    finally:
        await runtime.close()
        await database.close()
