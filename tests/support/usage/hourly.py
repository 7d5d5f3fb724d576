"""Short words for what tests ask about hours."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from bursar.core.usage.usage_levels import Used
from bursar.ops.runtime.runtime import Runtime
from bursar.store.usage import usage_levels as store
from support.runtime.runtime import one_moment

RUNNING = """
SELECT placement.uid, placement.node, placement.epoch
  FROM placement
  JOIN object ON object.uid = placement.uid AND object.kind = 'Allocation'
  JOIN node ON node.name = placement.node AND node.claim IS NULL
 WHERE object.status->>'startTime' IS NOT NULL
"""
OPEN = "SELECT uid, node, epoch FROM usage_open WHERE uid NOT LIKE 'claim-%'"
# By meter, what runs now: once by what is open, once by what is entered and waits to be.
OPEN_NOW = """
SELECT tenant, whose AS username, taken.key AS resource,
       CASE WHEN strpos(taken.key, '/') > 0 THEN class ELSE '' END AS class, sum(taken.value::bigint)::bigint AS amount
  FROM usage_open, json_each_text(amounts) AS taken, unnest(ARRAY[username, '']) AS whose
 GROUP BY 1, 2, 3, 4
"""
STEPPED_NOW = """
SELECT tenant, username, resource, class, sum(amount)::bigint AS amount
  FROM (SELECT tenant, username, resource, class, amount FROM usage_level
         UNION ALL
        SELECT tenant, username, resource, class, delta FROM usage_step) AS line
 GROUP BY 1, 2, 3, 4
HAVING sum(amount) <> 0
"""


async def assert_hours_agree(runtime: Runtime) -> None:
    """What counts as running is what runs, part by part; and levels are the sum of that."""
    async with one_moment(runtime) as db:
        runs = Counter(map(tuple, await db.fetch(RUNNING)))
        assert Counter(map(tuple, await db.fetch(OPEN))) == runs
        assert Counter(map(tuple, await db.fetch(STEPPED_NOW))) == Counter(map(tuple, await db.fetch(OPEN_NOW)))


async def opened_now(runtime: Runtime) -> list[dict[str, Any]]:
    return await _rows(runtime, "SELECT * FROM usage_open ORDER BY name, node")


async def records(runtime: Runtime) -> list[dict[str, Any]]:
    return await _rows(runtime, "SELECT * FROM usage_record ORDER BY name, node, epoch")


async def _rows(runtime: Runtime, statement: str) -> list[dict[str, Any]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch(statement)
    return [{**row, "amounts": msgspec.json.decode(row["amounts"])} for row in rows]


async def window(runtime: Runtime, tenant: str, begin: datetime, end: datetime | None = None) -> dict[Any, Used]:
    async with runtime.database.reader() as db:
        return (await store.load_window(db, [tenant], begin, end))[tenant]


async def backdate(runtime: Runtime, seconds: int) -> None:
    """As if everything had happened so much earlier, tenants included. Only before anything is entered."""
    async with runtime.database.reader() as db, db.transaction():
        for table, column in (
            ("usage_open", "started_at"),
            ("usage_record", "started_at"),
            ("usage_record", "ended_at"),
            ("usage_step", "at"),
        ):
            await db.execute(f"UPDATE {table} SET {column} = {column} - $1 * interval '1 second'", seconds)
        for row in await db.fetch("SELECT name, doc FROM object WHERE kind = 'Tenant'"):
            document = msgspec.json.decode(row["doc"])
            document["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
            await db.execute(
                "UPDATE object SET doc = $2 WHERE kind = 'Tenant' AND name = $1",
                row["name"],
                msgspec.json.encode(document),
            )


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
