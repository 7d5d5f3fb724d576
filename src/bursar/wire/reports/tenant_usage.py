"""Usage reports: by tenant, by user, in a period against quota, and as a table for chargeback."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bursar.core.credit.cost import OTHER, bill, breakdown, fraction, money, nano_of
from bursar.core.usage.report import ReportSum, Uses, add_up, unit_hours
from bursar.core.values.money import credits_of


class Cost(Struct):
    """A cost. `credits` is exact; `total` and its parts are money, at the value of a credit, and add up."""

    credits: str
    total: str
    breakdown: dict[str, str]


class ResourceUse(Struct):
    """The use of a resource; `hours` are hours of one unit: a GPU, a core, a node, a GiB."""

    resource: str
    klass: str = msgspec.field(name="class")
    hours: float
    credits: str


class UserUse(Struct):
    user: str
    node_hours_used: float
    gpu_hours_used: float
    credits: str


class TenantUse(Struct):
    tenant: str
    node_hours_used: float
    gpu_hours_used: float
    credits: str


class DayUse(Struct):
    """A day in UTC; the first and the last one count whole, as far as they have come."""

    day: str
    node_hours_used: float
    gpu_hours_used: float
    credits: str


class TenantUsage(Struct, kw_only=True):
    """Usage of a tenant and its descendants. `utilization` is the higher of the used fractions of its budgets (null: no
    budget), and `source` says where that figure comes from. `users` lists the heaviest users first; `user_count` counts
    them all."""

    tenant: str
    days: int
    begin: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    node_hours_used: float
    gpu_hours_used: float
    node_hours_budget: float | None
    gpu_hours_budget: float | None
    utilization: float | None
    source: str
    cost: Cost
    resources: list[ResourceUse]
    users: list[UserUse]
    user_count: int
    tenants: list[TenantUse]
    daily: list[DayUse] | UnsetType = UNSET


class UserUsage(Struct, kw_only=True):
    """The usage of a user, over all namespaces."""

    user: str
    days: int
    begin: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    node_hours_used: float
    gpu_hours_used: float
    cost: Cost
    resources: list[ResourceUse]
    tenants: list[TenantUse]
    daily: list[DayUse] | UnsetType = UNSET


class PeriodFigures(Struct, rename="camel"):
    """Figures of a period; null is unlimited."""

    quota: str | None
    current_usage: str
    peak_usage: str
    avg_usage: str
    utilization_of_quota: float | None


class PeriodCost(Struct):
    period: str
    total: str
    breakdown: dict[str, str]


class PeriodUsage(Struct):
    tenant: str
    period: str
    resources: dict[str, PeriodFigures]
    cost: PeriodCost


# Conversion of values to responses.


def cost_of(uses: Uses, credit_value: str) -> Cost:
    parts = breakdown((resource, used.cost) for (resource, _), used in uses.items())
    whole, cents = bill(parts, credit_value)
    shown = {name: money(amount) for name, amount in cents.items() if amount or name != OTHER}
    return Cost(credits_of(nano_of(sum(parts.values()))), money(whole), shown)


def resources_of(uses: Uses) -> list[ResourceUse]:
    return [
        ResourceUse(
            resource=resource,
            klass=klass,
            hours=unit_hours(resource, used.total),
            credits=credits_of(nano_of(fraction(resource, used.cost))),
        )
        for (resource, klass), used in uses.items()
    ]


def users_of(uses: Mapping[str, Uses]) -> list[UserUse]:
    """Users in order of their usage, the highest first."""
    return [UserUse(name, *_figures(one)) for name, one in _most_first(uses)]


def tenants_of(uses: Mapping[str, Uses]) -> list[TenantUse]:
    return [TenantUse(name, *_figures(one)) for name, one in _most_first(uses)]


def days_of(uses: Mapping[str, Uses]) -> list[DayUse]:
    return [DayUse(day, *_figures(add_up(one.items()))) for day, one in sorted(uses.items())]


def _most_first(uses: Mapping[str, Uses]) -> list[tuple[str, ReportSum]]:
    sums = ((name, add_up(one.items())) for name, one in uses.items())
    return sorted(sums, key=lambda one: (-one[1].gpu_hours, -one[1].node_hours, -one[1].nano, one[0]))


def _figures(one: ReportSum) -> tuple[float, float, str]:
    return one.node_hours, one.gpu_hours, credits_of(one.nano)


# CSV.

COLUMNS: Final = ("period", "tenant", "resource", "class", "unit", "hours", "credits", "cost", "peak")
USER_COLUMNS: Final = ("tenant", "user", "resource", "class", "unit", "hours", "credits", "cost")
_FORMULA: Final = tuple("=+-@\t\r")


def table_lines(rows: Iterable[Iterable[str]]) -> bytes:
    """Write lines of CSV, with user text escaped, so that spreadsheets do not read it as a formula."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\r\n")
    for row in rows:
        table.writerow([f"'{cell}" if cell.startswith(_FORMULA) else cell for cell in row])
    return text.getvalue().encode()
