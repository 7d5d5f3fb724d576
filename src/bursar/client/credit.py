"""Calls about credit: balances, top-ups, leases, limits, prices and statements. Each is a flow.

Amounts are strings, integers or Decimals. Floats are refused, because they are not exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from bursar.client.calls import ROOT, given, pages, read, segment
from bursar.client.flow import (
    IDEMPOTENCY_KEY,
    JSON,
    Document,
    Feed,
    Flow,
    HttpRequest,
    Retries,
    decoded,
    document_of,
    encoded,
    exchange,
    json_of,
    not_bursar,
)

Amount: TypeAlias = str | int | Decimal

REPLAYED = "idempotent-replayed"


def balance(retries: Retries, account: str = "", *, at: str = "") -> Flow[Document]:
    """Read a balance: `available`, held for leases (`holds`) and `posted`; or the balance at a time. The default is
    the account that pays for the caller."""
    return read(retries, "balance", account=account, at=at)


def forecast(retries: Retries, account: str = "") -> Flow[Document]:
    """Read how long the balance lasts at the current rate."""
    return read(retries, "forecast", account=account)


def statement(
    retries: Retries, account: str = "", *, tenant: str = "", begin: str = "", end: str = ""
) -> Flow[Document]:
    """Read an account's opening balance, bookings and closing balance of a period; or the sums of a tenant."""
    return read(retries, "statements", account=account, tenant=tenant, **{"from": begin, "to": end})


def statement_csv(retries: Retries, account: str = "", *, begin: str = "", end: str = "") -> Flow[str]:
    """Read the statement as CSV."""
    query = given(account=account, **{"from": begin, "to": end})
    text = yield from json_of(HttpRequest("GET", f"{ROOT}/statements", query, {"accept": "text/csv"}), retries)
    return str(text or "")


def top_up(
    retries: Retries, amount: Amount, *, account: str = "", reason: str = "", request_id: str = ""
) -> Flow[Document]:
    """Add credit to an account: the `new_balance`, and the time `at`. A request id that was used before returns its
    first answer with `replayed`."""
    return _movement(retries, "topups", _moving(amount, account, reason), request_id)


def refund(
    retries: Retries, amount: Amount, *, account: str = "", reason: str, lease_id: str = "", request_id: str = ""
) -> Flow[Document]:
    """Refund spent credit."""
    return _movement(retries, "refunds", _moving(amount, account, reason, lease_id), request_id)


def adjust(
    retries: Retries, amount: Amount, *, account: str = "", reason: str, lease_id: str = "", request_id: str = ""
) -> Flow[Document]:
    """Raise a balance, or lower it by a negative amount."""
    return _movement(retries, "adjustments", _moving(amount, account, reason, lease_id), request_id)


# --- Leases


def open_lease(
    retries: Retries,
    job_id: str,
    *,
    gpu_type: str = "",
    gpu_count: int | str = 0,
    resources: Mapping[str, Any] | None = None,
    window_seconds: int | None = None,
    account: str = "",
    request_id: str = "",
) -> Flow[Document]:
    """Open a lease, which pays for the first window of a job: `lease_id`, `rate_per_sec` and `expires_at`."""
    body: Document = {"job_id": job_id, "gpu_type": gpu_type, "gpu_count": gpu_count, "account": account}
    if resources:
        body["resources"] = dict(resources)
    if window_seconds is not None:
        body["window_seconds"] = window_seconds
    return _order(retries, "leases", body, request_id)


def extend_lease(retries: Retries, lease_id: str, delta_seconds: int, *, request_id: str = "") -> Flow[Document]:
    """Extend a lease by paying for more time: `expires_at`."""
    return _order(retries, f"leases/{segment(lease_id)}/extend", {"delta_seconds": delta_seconds}, request_id)


def close_lease(retries: Retries, lease_id: str, *, request_id: str = "") -> Flow[Document]:
    """Close a lease: pay its cost, and release the rest of the hold."""
    return _order(retries, f"leases/{segment(lease_id)}/close", {}, request_id)


def lease(retries: Retries, lease_id: str) -> Flow[Document]:
    """Read a lease."""
    return read(retries, f"leases/{segment(lease_id)}")


def leases(retries: Retries, account: str = "", *, state: str = "", job_id: str = "") -> Feed[Document]:
    """Iterate over the leases of an account, or over all visible ones: open leases, or with `state="ended"` others."""
    return pages(retries, "leases", account=account, state=state, job_id=job_id)


def report_usage(retries: Retries, events: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> Flow[Document]:
    """Report measured usage: one event, or many. Each counts once by its `job_id` and `seq`."""
    body = dict(events) if isinstance(events, Mapping) else {"events": [dict(one) for one in events]}
    return _order(retries, "usage", body, "")


# --- Accounts, limits and prices


def accounts(retries: Retries) -> Feed[Document]:
    """Iterate over the accounts that the caller may see."""
    return pages(retries, "accounts")


def open_account(
    retries: Retries, tenant: str, user: str = "", *, credit_limit: Amount = 0, request_id: str = ""
) -> Flow[Document]:
    """Open a tenant's account, or a user's, which then pays for that user."""
    body = {"tenant": tenant, "user": user, "credit_limit": _amount(credit_limit)}
    return _order(retries, "accounts", body, request_id)


def change_account(retries: Retries, account: str, changes: Mapping[str, Any]) -> Flow[Document]:
    """Set `status` (active, suspended, closed), `credit_limit` or `low_balance`."""
    body = {name: _amount(value) for name, value in changes.items()}
    return _order(retries, "accounts", body, "", method="PATCH", account=account)


def limits(retries: Retries, account: str = "") -> Flow[Document]:
    """Read the spending limits of an account: `concurrency`, `spend_rate`, `daily_cap`; null is unlimited."""
    return read(retries, "limits", account=account)


def set_limits(retries: Retries, account: str, wanted: Mapping[str, Any]) -> Flow[Document]:
    """Replace all limits of an account; limits that are not given become unlimited."""
    body = {name: _amount(value) for name, value in wanted.items()}
    return _order(retries, "limits", body, "", method="PUT", account=account)


def prices(retries: Retries, *, resource: str = "", at: str = "", history: bool = False) -> Flow[Document]:
    """Read the prices in force, or all versions."""
    return read(retries, "prices", resource=resource, at=at, history="true" if history else "")


def set_price(
    retries: Retries,
    resource: str,
    per_second: Amount,
    *,
    gpu_type: str = "",
    effective_from: str = "",
    request_id: str = "",
) -> Flow[Document]:
    """Set the price of one unit per second, from a time on; else from now on."""
    body = {"resource": resource, "class": gpu_type, "per_second": _amount(per_second)}
    if effective_from:
        body["effective_from"] = effective_from
    return _order(retries, "prices", body, request_id)


def delete_price(
    retries: Retries, resource: str, effective_from: str, *, gpu_type: str = "", request_id: str = ""
) -> Flow[Document]:
    """Delete a price that has not begun."""
    query = {"resource": resource, "effective_from": effective_from, **given(**{"class": gpu_type})}
    headers = {"accept": JSON, **({IDEMPOTENCY_KEY: request_id} if request_id else {})}
    return document_of(HttpRequest("DELETE", f"{ROOT}/prices", query, headers), retries)


def verify_ledger(retries: Retries, *, after: int = 0, anchor: str = "") -> Flow[Document]:
    """Verify the ledger's hash chain, sums and holds; `findings` lists faults. `anchor` is the `head` of an earlier
    answer, which must still be part of the chain."""
    findings: list[Document] = []
    blocks = entries = 0
    while True:
        query = {"after": str(after), **({"anchor": anchor} if anchor else {})}
        request = HttpRequest("GET", f"{ROOT}/ledger/verify", query, silence_seconds_max=VERIFY_SECONDS_MAX)
        found = yield from document_of(request, retries)
        findings += found["findings"]
        blocks, entries = blocks + found["blocks"], entries + found["entries"]
        if not found["more"] or len(findings) >= FINDINGS_MAX:
            return {**found, "sound": not findings, "findings": findings, "blocks": blocks, "entries": entries}
        after = found["through"]


def ledger(retries: Retries) -> Flow[Document]:
    """Read how much of the ledger is sealed and verified, and the balances of the system's accounts."""
    return read(retries, "ledger")


VERIFY_SECONDS_MAX = 600.0
FINDINGS_MAX = 100


def _moving(amount: Amount, account: str, reason: str, lease_id: str = "") -> Document:
    body: Document = {"amount": _amount(amount), "account": account, "reason": reason}
    return {**body, **({"lease_id": lease_id} if lease_id else {})}


def _amount(value: Any) -> Any:
    if isinstance(value, float):
        raise TypeError(f"{value} is a float, which is not exact: give a str, an int or a Decimal")
    return format(value, "f") if isinstance(value, Decimal) else value


def _order(
    retries: Retries, path: str, body: object, request_id: str, *, method: str = "POST", account: str = ""
) -> Flow[Document]:
    return document_of(_ordering(path, body, request_id, method, account), retries)


def _ordering(path: str, body: object, request_id: str, method: str = "POST", account: str = "") -> HttpRequest:
    headers = {"content-type": JSON, "accept": JSON, **({IDEMPOTENCY_KEY: request_id} if request_id else {})}
    return HttpRequest(method, f"{ROOT}/{path}", given(account=account), headers, encoded(body))


def _movement(retries: Retries, path: str, body: object, request_id: str) -> Flow[Document]:
    response = yield from exchange(_ordering(path, body, request_id), retries)
    found = decoded(response)
    if not isinstance(found, dict):
        raise not_bursar("its answer is not an object")
    return {**found, "replayed": True} if response.headers.get(REPLAYED) == "true" else found
