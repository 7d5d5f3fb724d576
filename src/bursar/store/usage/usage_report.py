"""Queries of usage reports: users, and hours and days without those of a deleted tenant of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from bursar.core.usage.usage_levels import DAY, EVERYBODY, HOUR
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements
from bursar.store.usage.usage_levels import Grain, SeriesRow, Tariffs, load_series, load_user_window, load_window

SQL = statements("usage/usage_report")


async def load_tenants(db: Connection) -> list[str]:
    """List all tenants or users with any usage, deleted ones included."""
    return [row["tenant"] for row in await db.fetch(SQL.tenants)]


async def load_namesakes(db: Connection, name: str) -> list[str]:
    """List the users of this name with any usage, as `tenant/name`."""
    return [row["username"] for row in await db.fetch(SQL.namesakes, name)]


async def load_own_series(
    db: Connection,
    tenant: str,
    begin: datetime,
    end: datetime,
    grain: Grain = "day",
    *,
    since: datetime | None = None,
    user: str = EVERYBODY,
    tariffs: Tariffs | None = None,
) -> list[SeriesRow]:
    """Load usage by day or by hour. Only usage after `since` counts: earlier usage of the name belongs to a deleted
    tenant. Call it in a snapshot."""
    size = DAY if grain == "day" else HOUR
    if since is None or since <= _start(begin, size):
        return (await load_series(db, [tenant], begin, end, grain, user=user, tariffs=tariffs))[tenant]
    following = _start(since, size) + timedelta(seconds=size)
    rows: list[SeriesRow] = []
    if since < end:
        rows = await _first(db, tenant, user, since, min(following, end), grain, tariffs)
    if following < end:
        rows += (await load_series(db, [tenant], following, end, grain, user=user, tariffs=tariffs))[tenant]
    return rows


async def load_several_own_series(
    db: Connection,
    tenants: Mapping[str, datetime | None],
    begin: datetime,
    end: datetime,
    grain: Grain = "day",
    *,
    user: str = EVERYBODY,
    tariffs: Tariffs | None = None,
) -> list[SeriesRow]:
    """Load usage of several tenants, given their creation times: all that existed before the period in one query, and
    the few that were created since one by one."""
    start = _start(begin, DAY if grain == "day" else HOUR)
    old = [tenant for tenant, since in tenants.items() if since is None or since <= start]
    several = await load_series(db, old, begin, end, grain, user=user, tariffs=tariffs) if old else {}
    rows = [row for some in several.values() for row in some]
    for tenant in tenants.keys() - several.keys():
        rows += await load_own_series(db, tenant, begin, end, grain, since=tenants[tenant], user=user, tariffs=tariffs)
    return rows


async def _first(
    db: Connection, tenant: str, user: str, since: datetime, end: datetime, grain: Grain, tariffs: Tariffs | None
) -> list[SeriesRow]:
    """Compute the rest of an hour or day. Its peak may lie before `since`, and the window's peak, if it has one yet,
    after the end: the lower one is returned."""
    whole = (await load_series(db, [tenant], since, end, grain, user=user, tariffs=tariffs))[tenant]
    if user == EVERYBODY:
        used = (await load_window(db, [tenant], since, end, tariffs=tariffs))[tenant]
    else:
        used = (await load_user_window(db, user, [tenant], since, end, tariffs=tariffs)).get((tenant, user), {})
    own = ((row, used.get((row.resource, row.klass))) for row in whole)
    return [
        SeriesRow(row.at, row.resource, row.klass, one.total, one.cost, min(row.peak, one.peak or row.peak))
        for row, one in own
        if one is not None and (one.total or one.cost)
    ]


def _start(at: datetime, size: int) -> datetime:
    """The beginning of the hour or day of a time."""
    return datetime.fromtimestamp(int(at.timestamp()) // size * size, UTC)
