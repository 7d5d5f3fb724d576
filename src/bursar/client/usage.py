"""Calls about usage and its cost. Each is a flow."""

from __future__ import annotations

from bursar.client.calls import ROOT, given, read, segment
from bursar.client.flow import Document, Flow, HttpRequest, Retries, json_of

EXPORT_SECONDS_MAX = 300.0


def tenant_usage(retries: Retries, name: str, days: int | None = None, *, by: str = "") -> Flow[Document]:
    """Read the usage of a tenant and the tenants below it in the last `days`, by default the budget window:
    `node_hours_used`, `gpu_hours_used`, budgets and users. With `by="day"`, also `daily`."""
    return read(retries, f"tenants/{segment(name)}/usage", days=_number(days), by=by)


def user_usage(retries: Retries, user: str | None = None, days: int | None = None, *, by: str = "") -> Flow[Document]:
    """Read the usage of a user, by default the caller: a name in the caller's tenant, or `tenant/name`."""
    return read(retries, "usage", user=user or "", days=_number(days), by=by)


def period_usage(retries: Retries, tenant: str, period: str = "24h") -> Flow[Document]:
    """Read quota, current use, peak and average of each resource of a tenant in a period, and the cost."""
    return read(retries, f"metrics/tenants/{segment(tenant)}/usage", period=period)


def export_usage(retries: Retries, tenant: str = "", *, begin: str = "", end: str = "", by: str = "day") -> Flow[str]:
    """Export usage as CSV: by day or month, tenant, resource and class; or by user for the whole time. The defaults
    are all visible tenants, and the time from the begin of this month."""
    query = given(tenant=tenant, by=by, format="csv", **{"from": begin, "to": end})
    request = HttpRequest(
        "GET", f"{ROOT}/usage/export", query, {"accept": "text/csv"}, silence_seconds_max=EXPORT_SECONDS_MAX
    )
    text = yield from json_of(request, retries)
    return str(text or "")


def _number(days: int | None) -> str:
    return "" if days is None else str(days)
