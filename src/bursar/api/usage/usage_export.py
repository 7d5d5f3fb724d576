"""Handler of the usage export: a CSV table by day, month or user, for chargeback."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from bursar.api.credit.credit import instant_of
from bursar.api.http.route import BrokenOff, Call, Outcome, Param, Route, Stream
from bursar.commands.objects.object import not_found
from bursar.core.credit.cost import bill, fraction, nano_of
from bursar.core.objects.object import Key
from bursar.core.quota.tenant_tree import subtree
from bursar.core.usage.report import plain_units, unit_hours, unit_of
from bursar.core.usage.usage_levels import DAY, NOBODY
from bursar.core.values.access import reach
from bursar.core.values.money import MICROS, credits_of
from bursar.core.values.refusal import Refusal, field_fault, invalid
from bursar.ops.runtime.clock import now
from bursar.store.db.database import AWAY, snapshot
from bursar.store.usage import usage_report
from bursar.store.usage.usage_levels import SeriesRow, Tariffs, load_created, load_tariffs, load_user_window
from bursar.wire.kinds.tenant import TENANT
from bursar.wire.reports.tenant_usage import COLUMNS, USER_COLUMNS, table_lines

CSV: Final = "text/csv"
DAYS_MAX: Final = 3660
# Formats of the names of periods.
PERIODS: Final = {"day": "%Y-%m-%d", "month": "%Y-%m", "user": ""}


def export_routes(root: str) -> Iterator[Route]:
    yield Route(
        "GET", f"{root}/usage/export", export, "Export usage by day, month or user, tenant and resource, as CSV.",
        "get", "usage", answer_media=(CSV,), refusals=(404,),
        params=(
            Param("tenant", "A tenant with its descendants; default: all visible tenants."),
            Param("from", "First day; default: the first of this month."),
            Param("to", "The day after the last one; default: up to now."),
            Param("by", "day, month, or user for the whole period; default: day."),
            Param("format", "csv."),
        ),
    )  # fmt: skip


Cells = tuple[str, ...]


class ExportOptions(Struct, frozen=True):
    begin: datetime
    end: datetime
    period: str  # its name; empty for reports by user


async def export(call: Call) -> Outcome:
    """Stream the table, tenant by tenant. Each tenant is read in one snapshot."""
    order = _order(call)
    if isinstance(order, Refusal):
        return order
    tenants = await _tenants(call)
    if isinstance(tenants, Refusal):
        return tenants
    first = f"{order.begin:%Y-%m-%d}"
    headers = {"Content-Disposition": f'attachment; filename="usage-{first}.csv"'}
    return Stream(_lines(call, tenants, order), f"{CSV}; charset=utf-8", headers, breaks=True)


def _order(call: Call) -> ExportOptions | Refusal:
    by, form = call.query.get("by") or "day", call.query.get("format") or "csv"
    if by not in PERIODS:
        return invalid("by must be day, month or user", field_fault("by", "must be day, month or user"))
    if form != "csv":
        return invalid("format must be csv", field_fault("format", "must be csv"))
    begin, end = _day(call, "from"), _day(call, "to")
    if isinstance(begin, Refusal):
        return begin
    if isinstance(end, Refusal):
        return end
    at = now()
    begin = begin or at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end = min(end or at, at)
    if not begin < end <= begin + timedelta(days=DAYS_MAX):
        return invalid(
            f"the period must begin before it ends, and before now, and have at most {DAYS_MAX} days",
            field_fault("from", "must be before to, and before now"),
        )
    return ExportOptions(begin, end, PERIODS[by])


def _day(call: Call, name: str) -> datetime | Refusal | None:
    found = instant_of(call, name)
    if found is None or isinstance(found, Refusal):
        return found
    if found % (DAY * MICROS):
        return invalid(
            f"{name} must be a day: usage is stored by days, which begin at midnight UTC",
            field_fault(name, "must be a day, as in 2026-11-01"),
        )
    return datetime.fromtimestamp(found // MICROS, UTC)


async def _tenants(call: Call) -> list[str] | Refusal:
    """The requested tenants; those that the caller may not see are answered as not found."""
    name, seen = call.query.get("tenant", ""), await call.context.visible_tenants(call.identity)
    if seen is None:
        async with call.context.database.reader() as db:
            seen = tuple(await usage_report.load_tenants(db))
    if not name:
        return sorted(seen)
    tree = await call.context.tree()
    if name not in seen and not (name in tree.tenants and reach(call.identity).everything):
        return not_found(Key(TENANT.name, "", name))
    return sorted(subtree(tree, name) & {*seen})


async def _lines(call: Call, tenants: list[str], order: ExportOptions) -> AsyncGenerator[bytes, None]:
    yield table_lines([COLUMNS if order.period else USER_COLUMNS])
    value = (await call.context.tree()).credits.credit_value
    lines = _lines_by_period if order.period else _lines_by_user
    try:
        async with call.context.database.reader() as db:
            tariffs = await load_tariffs(db)
        for tenant in tenants:
            if cells := await lines(call, tenant, order, tariffs, value):
                yield table_lines(cells)
    except AWAY as error:
        raise BrokenOff("the database is away") from error


async def _lines_by_period(call: Call, tenant: str, order: ExportOptions, tariffs: Tariffs, value: str) -> list[Cells]:
    rows = await _rows(call, tenant, order, tariffs)
    return [_cells(tenant, row, order, value) for row in _by_period(rows, order)]


async def _lines_by_user(call: Call, tenant: str, order: ExportOptions, tariffs: Tariffs, value: str) -> list[Cells]:
    """The usage of each user. Their sum is all usage of the tenant since it was created, also without a submitter."""
    async with snapshot(call.context.database) as db:
        users = await load_user_window(db, None, [tenant], order.begin, order.end, tariffs=tariffs)
    return [
        (tenant, "" if user == NOBODY else user, *_figures(resource, klass, used.total, used.cost, value))
        for (_, user), uses in sorted(users.items())
        for (resource, klass), used in sorted(uses.items())
        if used.total or used.cost
    ]


async def _rows(call: Call, tenant: str, order: ExportOptions, tariffs: Tariffs) -> list[SeriesRow]:
    """The usage of a tenant, since it was created. The table of all tenants also has deleted ones, even if a tenant has
    the same name now."""
    everything = reach(call.identity).everything
    async with snapshot(call.context.database) as db:
        since = (await load_created(db, [tenant])).get(tenant)
        if since is None and not everything:
            return []
        if everything and not call.query.get("tenant"):
            since = None
        return await usage_report.load_own_series(db, tenant, order.begin, order.end, since=since, tariffs=tariffs)


def _by_period(rows: list[SeriesRow], order: ExportOptions) -> list[SeriesRow]:
    """The days of a period as one, in order."""
    sums: dict[tuple[str, str, str], SeriesRow] = {}
    for row in rows:
        key = (row.at.strftime(order.period), row.resource, row.klass)
        known = sums.get(key)
        sums[key] = row if known is None else _added(known, row)
    return [sums[key] for key in sorted(sums)]


def _added(one: SeriesRow, other: SeriesRow) -> SeriesRow:
    peak = max(one.peak, other.peak)
    return SeriesRow(one.at, one.resource, one.klass, one.total + other.total, one.cost + other.cost, peak)


def _cells(tenant: str, row: SeriesRow, order: ExportOptions, credit_value: str) -> Cells:
    figures = _figures(row.resource, row.klass, row.total, row.cost, credit_value)
    return row.at.strftime(order.period), tenant, *figures, plain_units(row.resource, row.peak)


def _figures(resource: str, klass: str, total: int, cost: int, credit_value: str) -> Cells:
    exact = fraction(resource, cost)
    cents, _ = bill({resource: exact}, credit_value)
    return (
        resource,
        klass,
        f"{unit_of(resource)}-hours",
        f"{unit_hours(resource, total):.6f}",
        credits_of(nano_of(exact)),
        f"{cents // 100}.{cents % 100:02}",
    )
