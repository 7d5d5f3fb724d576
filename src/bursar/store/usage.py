"""What tenants have used over time."""

from __future__ import annotations

from datetime import datetime, timedelta

from bursar.store.database import Connection
from bursar.store.statements import statements

SQL = statements("usage")

BUDGET_PERIOD = timedelta(days=90)


async def load_hours(db: Connection, now: datetime) -> dict[str, tuple[float, float]]:
    """(GPU-hours, node-hours) by tenant over the budget's window, each hour as it was last sampled."""
    rows = await db.fetch(SQL.hours, now - BUDGET_PERIOD)
    return {row["tenant"]: (float(row["gpu_hours"]), float(row["node_hours"])) for row in rows}
