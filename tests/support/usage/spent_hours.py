"""Hours that a tenant has used some time ago, as if it had run something then."""

from datetime import UTC, datetime, timedelta
from itertools import count

from bursar.core.usage.usage_levels import HOUR, UsageBegan, UsageEnded
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import roll
from bursar.store.usage import usage_levels as usage_store

GPU = "nvidia.com/gpu"
_numbers = count()


async def spend(
    runtime: Runtime, tenant: str, *, gpu_hours: float = 0.0, node_hours: float = 0.0, days_ago: float = 1.0
) -> None:
    """It ran for an hour, so and so many days ago, on as much as makes up these hours."""
    await make_old(runtime, tenant)
    at = int((datetime.now(UTC) - timedelta(days=days_ago)).timestamp())
    uid, amounts = f"spent-{next(_numbers)}", {GPU: round(gpu_hours * 1000), "nodes": round(node_hours * 1000)}
    began = UsageBegan(uid, "n0", 1, tenant, f"{tenant}/ann", "old", uid, amounts, "", at, 0)
    async with runtime.database.reader() as db, db.transaction():
        await usage_store.save(db, (), (), [(began, UsageEnded(uid, "n0", at + HOUR, "Succeeded", ""))])
    while await roll(runtime.database):
        pass


async def make_old(runtime: Runtime, tenant: str, at: str = "2020-01-01T00:00:00Z") -> None:
    """Nobody has used anything before being created."""
    made = f'"creationTimestamp":"{at}"'
    async with runtime.database.reader() as db:
        await db.execute(
            'UPDATE object SET doc = regexp_replace(doc::text, \'"creationTimestamp":"[^"]*"\', $2)::json'
            " WHERE kind = 'Tenant' AND name = $1",
            tenant,
            made,
        )
