"""Calls about what was used, by whom, and what it costs. Each is a flow."""

from __future__ import annotations

from bursar.client.calls import ROOT, segment
from bursar.client.flow import Document, Flow, HttpRequest, Retries, document_of, json_of

EXPORT_SECONDS_MAX = 300.0


def tenant_usage(retries: Retries, name: str, days: int | None = None, *, by: str = "") -> Flow[Document]:
    """What a tenant, with those below it, has used in so many days, by default those that budgets are for:
    `node_hours_used`, `gpu_hours_used`, what of the budgets that is, and who used it. With `by="day"`, also `daily`."""
    return _get(retries, f"tenants/{segment(name)}/usage", days=_number(days), by=by)


def user_usage(retries: Retries, user: str | None = None, days: int | None = None, *, by: str = "") -> Flow[Document]:
    """What a user has used; without one, the caller. A name alone is of the caller's tenant, else `tenant/name`."""
    return _get(retries, "usage", user=user or "", days=_number(days), by=by)


def period_usage(retries: Retries, tenant: str, period: str = "24h") -> Flow[Document]:
    """For each resource of a tenant: its quota, what is in use, the peak and the average of a period; and the cost."""
    return _get(retries, f"metrics/tenants/{segment(tenant)}/usage", period=period)


def export_usage(retries: Retries, tenant: str = "", *, begin: str = "", end: str = "", by: str = "day") -> Flow[str]:
    """What was used, as a table for spreadsheets: by day or month, tenant, resource and class; or by user, for the
    whole time at once. Without a tenant, of all that the caller may see; without a beginning, from this month's on."""
    query = _given(tenant=tenant, by=by, format="csv", **{"from": begin, "to": end})
    request = HttpRequest(
        "GET", f"{ROOT}/usage/export", query, {"accept": "text/csv"}, silence_seconds_max=EXPORT_SECONDS_MAX
    )
    text = yield from json_of(request, retries)
    return str(text or "")


def _get(retries: Retries, path: str, **query: str) -> Flow[Document]:
    return document_of(HttpRequest("GET", f"{ROOT}/{path}", _given(**query)), retries)


def _given(**query: str) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}


def _number(days: int | None) -> str:
    return "" if days is None else str(days)
