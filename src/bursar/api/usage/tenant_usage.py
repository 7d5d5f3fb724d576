"""Handlers of usage reports: usage of tenants and users, in relation to quotas and budgets, and its cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final

from msgspec import UNSET, Struct

from bursar.api.http.route import Answer, Call, Outcome, Param, Route
from bursar.api.objects.object import find, key_of, origin_of
from bursar.api.usage.usage_export import export_routes
from bursar.commands.objects.object import submitter
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row, Tree, subtree, tenant_scope
from bursar.core.usage.budget import BudgetHours
from bursar.core.usage.external_budget import Remaining
from bursar.core.usage.report import (
    Uses,
    add_up,
    average,
    bound_below,
    is_metered,
    peaks_together,
    quotas_below,
    together,
)
from bursar.core.usage.usage_levels import EVERYBODY, Used
from bursar.core.values.access import reach
from bursar.core.values.duration import DurationError, parse_seconds
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Code, Refusal, field_fault, invalid
from bursar.ops.runtime.clock import now
from bursar.ops.usage.usage_rollup import BudgetUse, believed, load_budget_days
from bursar.store.db.database import Connection, snapshot
from bursar.store.quota import quota as quota_store
from bursar.store.usage import budget as budget_store
from bursar.store.usage import usage_levels as store
from bursar.store.usage import usage_report
from bursar.wire.kinds.tenant import TENANT
from bursar.wire.reports.tenant_usage import (
    DayUse,
    PeriodCost,
    PeriodFigures,
    PeriodUsage,
    TenantUsage,
    UserUsage,
    cost_of,
    days_of,
    resources_of,
    tenants_of,
    users_of,
)
from bursar.wire.shared.document import encode
from bursar.wire.to_scheduler.ask import tenant_share_of

DAYS_MAX: Final = 3650
USERS_MAX: Final = 1000
USERS_SHOWN: Final = 20
NAMESAKES_SHOWN: Final = 5
NAME_CHARS_MAX: Final = 253
PERIOD: Final = "24h"
PERIOD_SECONDS_MIN: Final = 3600
PERIOD_SECONDS_MAX: Final = 400 * 86_400
# Peaks are hourly up to this length, and daily above it.
HOURLY_SECONDS_MAX: Final = 8 * 86_400

DAYS = Param("days", "Number of days up to now; default: the period of budgets.", "integer")
BY = Param("by", "day: daily figures as well.")
USERS = Param("users", f"Number of users listed, up to {USERS_MAX}; default: {USERS_SHOWN}.", "integer")


def usage_routes(root: str) -> Iterator[Route]:
    yield Route(
        "GET", f"{root}/tenants/{{name}}/usage", tenant_usage, "Get the usage of a tenant's budgets, by user.",
        "get", TENANT.plural, "usage", kind=TENANT, params=(DAYS, BY, USERS), answer=TenantUsage,
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/usage", user_usage, "Get the usage of a user (default: the caller).", "get", "usage",
        params=(Param("user", "A name within the caller's tenant, or tenant/name."), DAYS, BY), answer=UserUsage,
        refusals=(404,),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/metrics/tenants/{{name}}/usage", period_usage,
        "Get a tenant's usage and its cost, now and in a period, against its quota.", "get", "metrics",
        params=(Param("period", f"From 1h to 400d; default: {PERIOD}."),), answer=PeriodUsage,
        refusals=(404,),
    )  # fmt: skip
    yield from export_routes(root)


class ReportRequest(Struct, frozen=True):
    """The query of a report."""

    days: int
    of_budgets: bool  # whether the window is that of budgets
    begin: datetime
    end: datetime
    by_day: bool
    users: int  # number of users listed


# A tenant.


async def tenant_usage(call: Call) -> Outcome:
    """Report the hours of a tenant's subtree. Single users and tenants are listed for callers who may see them."""
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    asked = await _asked(call)
    if isinstance(asked, Refusal):
        return asked
    name, tree = found.key.name, await call.context.tree()
    below = subtree(tree, name)
    seen = below if _sees_below(call) else {name}
    async with snapshot(call.context.database) as db:
        tariffs = await store.load_tariffs(db)
        used = await store.load_window(db, below, asked.begin, now=asked.end, tariffs=tariffs)
        users = await store.load_user_window(db, None, seen, asked.begin, now=asked.end, tariffs=tariffs)
        remaining = (await budget_store.load_remaining(db, [name])).get(name) if asked.of_budgets else None
        daily = await _daily(db, below, asked, tariffs) if asked.by_day else UNSET
    whole = together(used.values())
    by_user = _by_user(users)
    budget = _budget(found, whole, remaining, asked.days)
    answer = TenantUsage(
        tenant=name,
        days=asked.days,
        begin=timestamp(asked.begin),
        end=timestamp(asked.end),
        node_hours_used=budget.node_hours,
        gpu_hours_used=budget.gpu_hours,
        node_hours_budget=budget.node_budget,
        gpu_hours_budget=budget.gpu_budget,
        utilization=round(budget.fraction, 4) if budget.has_budget else None,
        source=budget.source,
        cost=cost_of(whole, tree.credits.credit_value),
        resources=resources_of(whole),
        users=users_of(by_user)[: asked.users],
        user_count=len(by_user),
        tenants=tenants_of({one: used[one] for one in seen if used[one]}),
        daily=daily,
    )
    return Answer(200, encode(answer))


def _sees_below(call: Call) -> bool:
    whose = reach(call.identity)
    return whose.everything or whose.subtree


def _by_user(users: store.UserWindows) -> dict[str, Uses]:
    """Sum the usage of a user, which may be spread over several tenants."""
    several: dict[str, list[Uses]] = defaultdict(list)
    for (_, user), uses in users.items():
        several[user].append(uses)
    return {user: together(uses) for user, uses in several.items()}


def _budget(found: Stored, whole: Uses, remaining: Remaining | None, days: int) -> BudgetHours:
    """The used hours of the budgets, as the scheduler counts them."""
    share, counted = tenant_share_of(found.doc), add_up(whole.items())
    use = believed(BudgetUse(counted.gpu_hours, counted.node_hours), share, remaining)
    return BudgetHours(use.gpu_hours, share.gpu_hours_budget, use.node_hours, share.node_hours_budget, days, use.source)


async def _daily(
    db: Connection, tenants: Iterable[str], asked: ReportRequest, tariffs: store.Tariffs, user: str = EVERYBODY
) -> list[DayUse]:
    created = await store.load_created(db, tenants)
    days: dict[str, list[Uses]] = defaultdict(list)
    since = {tenant: created.get(tenant) for tenant in tenants}
    for row in await usage_report.load_several_own_series(
        db, since, asked.begin, asked.end, user=user, tariffs=tariffs
    ):
        days[f"{row.at:%Y-%m-%d}"].append({(row.resource, row.klass): Used(row.total, row.cost)})
    return days_of({day: together(uses) for day, uses in days.items()})


# A user.


async def user_usage(call: Call) -> Outcome:
    """Report the usage of a user in the namespaces of the tenants that the caller may see."""
    asked, user = await _asked(call), await _whose(call)
    if isinstance(asked, Refusal):
        return asked
    if isinstance(user, Refusal):
        return user
    tenants = await call.context.visible_tenants(call.identity)
    tree = await call.context.tree()
    async with snapshot(call.context.database) as db:
        tariffs = await store.load_tariffs(db)
        used = await store.load_user_window(db, user, tenants, asked.begin, now=asked.end, tariffs=tariffs)
        where = sorted(tenant for tenant, _ in used)
        daily = await _daily(db, where, asked, tariffs, user) if asked.by_day else UNSET
    whole = together(used.values())
    sums = add_up(whole.items())
    answer = UserUsage(
        user=user,
        days=asked.days,
        begin=timestamp(asked.begin),
        end=timestamp(asked.end),
        node_hours_used=sums.node_hours,
        gpu_hours_used=sums.gpu_hours,
        cost=cost_of(whole, tree.credits.credit_value),
        resources=resources_of(whole),
        tenants=tenants_of({tenant: uses for (tenant, _), uses in used.items()}),
        daily=daily,
    )
    return Answer(200, encode(answer))


async def _whose(call: Call) -> str | Refusal:
    """The requested user as `tenant/name`. Users of other tenants are answered as not found."""
    given, identity = call.query.get("user", ""), call.identity
    if not given:
        return submitter(origin_of(call))
    tenant, slash, name = given.partition("/")
    if len(given) > 2 * NAME_CHARS_MAX + 1 or not given.isprintable() or (slash and not (tenant and name)):
        return invalid("user must be a name, or tenant/name", field_fault("user", "must be a name, or tenant/name"))
    if slash:
        return given if await call.context.sees(identity, tenant) else _no_user(given)
    if identity.tenant:
        return f"{identity.tenant}/{given}"
    return await _only_one(call, given)


async def _only_one(call: Call, name: str) -> str | Refusal:
    """Resolve a name for callers without a tenant: the user of this name, if it is unique."""
    async with call.context.database.reader() as db:
        found = await usage_report.load_namesakes(db, name)
    if len(found) <= 1:
        return found[0] if found else name
    listed = ", ".join(found[:NAMESAKES_SHOWN])
    return invalid(
        f"there are {len(found)} users named {name}: {listed}",
        field_fault("user", "is the name of several users"),
        hint="Name one as tenant/name.",
    )


def _no_user(name: str) -> Refusal:
    return Refusal(Code.NOT_FOUND, f'users "{name}" not found', "Ask about yourself, or about users of your tenant.")


# A tenant against its quota.


async def period_usage(call: Call) -> Outcome:
    """Report the present, peak and average usage of a tenant's subtree in a period, beside its quotas."""
    found = await find(call, Key(TENANT.name, "", call.parameters["name"]))
    if isinstance(found, Refusal):
        return found
    seconds = _period_seconds(call)
    if isinstance(seconds, Refusal):
        return seconds
    name, period, tree = found.key.name, call.query.get("period") or PERIOD, await call.context.tree()
    below, end = subtree(tree, name), now().replace(microsecond=0)
    begin = end - timedelta(seconds=seconds)
    async with snapshot(call.context.database) as db:
        tariffs = await store.load_tariffs(db)
        used = await store.load_window(db, below, begin, now=end, tariffs=tariffs)
        peaks = await _peaks(db, used, begin, end, seconds, tariffs)
        counters = await quota_store.load_scopes(db, [tenant_scope(one) for one in below])
    whole = together(used.values())
    cost = cost_of(whole, tree.credits.credit_value)
    resources = _figures(tree, name, whole, peaks, counters, seconds)
    answer = PeriodUsage(name, period, resources, PeriodCost(period, cost.total, cost.breakdown))
    return Answer(200, encode(answer))


async def _peaks(
    db: Connection, used: store.Windows, begin: datetime, end: datetime, seconds: int, tariffs: store.Tariffs
) -> dict[str, int]:
    """The peak usage. If several tenants or classes used a resource, the highest sum of their peaks in one hour or
    day."""
    single: dict[str, list[int]] = defaultdict(list)
    for uses in used.values():
        for (resource, _), one in uses.items():
            single[resource].append(one.peak)
    peaks = {resource: amounts[0] for resource, amounts in single.items() if len(amounts) == 1}
    grain: store.Grain = "hour" if seconds <= HOURLY_SECONDS_MAX else "day"
    created = await store.load_created(db, used)
    since = {
        tenant: created.get(tenant)
        for tenant, uses in used.items()
        if any(resource not in peaks for resource, _ in uses)
    }
    rows = await usage_report.load_several_own_series(db, since, begin, end, grain, tariffs=tariffs)
    found = [(int(row.at.timestamp()), row.resource, row.peak) for row in rows]
    return {**peaks_together(found), **peaks}


def _figures(
    tree: Tree, name: str, whole: Uses, peaks: dict[str, int], counters: dict[Row, Counter], seconds: int
) -> dict[str, PeriodFigures]:
    limits = quotas_below(tree, name)
    totals: dict[str, int] = defaultdict(int)
    for (resource, _), one in whole.items():
        totals[resource] += one.total
    named = {*limits, *totals, *(dimension for (_, dimension), one in counters.items() if one.bound)}
    bound = bound_below(tree, counters, name, sorted(one for one in named if is_metered(one)))
    figures: dict[str, PeriodFigures] = {}
    for resource, current in bound.items():
        quota = limits.get(resource)
        figures[resource] = PeriodFigures(
            quota=None if quota is None else format_amount(resource, quota),
            current_usage=format_amount(resource, current),
            # Placed work that has not started counts as in use, but is not metered yet.
            peak_usage=format_amount(resource, max(current, peaks.get(resource, 0))),
            avg_usage=format_amount(resource, average(resource, totals[resource], seconds)),
            utilization_of_quota=round(current / quota, 4) if quota else None,
        )
    return figures


# Queries.


async def _asked(call: Call) -> ReportRequest | Refusal:
    async with call.context.database.reader() as db:
        period = await load_budget_days(db)
    days = _number(call, "days", period, 1, DAYS_MAX)
    if isinstance(days, Refusal):
        return days
    users = _number(call, "users", USERS_SHOWN, 0, USERS_MAX)
    if isinstance(users, Refusal):
        return users
    by = call.query.get("by", "")
    if by not in ("", "day"):
        return invalid("by must be day", field_fault("by", "must be day, or be left out"))
    end = now().replace(microsecond=0)
    return ReportRequest(days, days == period, end - timedelta(days=days), end, by == "day", users)


def _number(call: Call, name: str, default: int, least: int, most: int) -> int | Refusal:
    text = call.query.get(name, "")
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most:
        return int(text)
    return invalid(
        f"{name} must be a number from {least} to {most}", field_fault(name, f"must be a number from {least} to {most}")
    )


def _period_seconds(call: Call) -> int | Refusal:
    text = call.query.get("period") or PERIOD
    try:
        seconds = parse_seconds(text)
    except DurationError as error:
        return invalid(f"period: {error}", field_fault("period", str(error)), hint="Such as 24h or 30d.")
    if PERIOD_SECONDS_MIN <= seconds <= PERIOD_SECONDS_MAX:
        return seconds
    wrong = f"must be from 1h to 400d, got {text}"
    return invalid(f"period {wrong}", field_fault("period", wrong), hint="Such as 24h or 30d.")
