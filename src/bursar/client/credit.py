"""Calls about credit: balances, top-ups, leases, limits, prices and statements. Each is a flow.

Amounts are strings, integers or Decimals. A float is refused: it has lost digits before it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from bursar.client.calls import ROOT, segment
from bursar.client.flow import (
    IDEMPOTENCY_KEY,
    JSON,
    Document,
    Feed,
    Flow,
    Give,
    HttpRequest,
    Retries,
    decoded,
    document_of,
    encoded,
    exchange,
    json_of,
    not_ours,
)

Amount: TypeAlias = str | int | Decimal

REPLAYED = "idempotent-replayed"


def balance(retries: Retries, account: str = "", *, at: str = "") -> Flow[Document]:
    """What is `available`, what of the balance is held for leases (`holds`), and what was `posted`; or what the balance
    was at a time. Without an account: the one that pays for the caller."""
    return _get(retries, "balance", account=account, at=at)


def forecast(retries: Retries, account: str = "") -> Flow[Document]:
    """For how long the balance lasts at the present rate."""
    return _get(retries, "forecast", account=account)


def statement(
    retries: Retries, account: str = "", *, tenant: str = "", begin: str = "", end: str = ""
) -> Flow[Document]:
    """What an account held at the beginning of a period, what came and went, and what it held at the end; or the sums
    of all accounts of a tenant."""
    return _get(retries, "statements", account=account, tenant=tenant, **{"from": begin, "to": end})


def statement_csv(retries: Retries, account: str = "", *, begin: str = "", end: str = "") -> Flow[str]:
    """The same, as a table for spreadsheets."""
    query = _given(account=account, **{"from": begin, "to": end})
    text = yield from json_of(HttpRequest("GET", f"{ROOT}/statements", query, {"accept": "text/csv"}), retries)
    return str(text or "")


def top_up(
    retries: Retries, amount: Amount, *, account: str = "", reason: str = "", request_id: str = ""
) -> Flow[Document]:
    """Puts credit into an account: the `new_balance`, and when it was done (`at`). Where the same request id was used
    before, the answer is that of then, and `replayed` is true."""
    return _movement(retries, "topups", _moving(amount, account, reason), request_id)


def refund(
    retries: Retries, amount: Amount, *, account: str = "", reason: str, lease_id: str = "", request_id: str = ""
) -> Flow[Document]:
    """Gives back what was spent."""
    return _movement(retries, "refunds", _moving(amount, account, reason, lease_id), request_id)


def adjust(
    retries: Retries, amount: Amount, *, account: str = "", reason: str, lease_id: str = "", request_id: str = ""
) -> Flow[Document]:
    """Raises a balance, or lowers it where the amount is negative."""
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
    """Pays for the first window of a job: `lease_id`, `rate_per_sec` and `expires_at`."""
    body: Document = {"job_id": job_id, "gpu_type": gpu_type, "gpu_count": gpu_count, "account": account}
    if resources:
        body["resources"] = dict(resources)
    if window_seconds is not None:
        body["window_seconds"] = window_seconds
    return _order(retries, "leases", body, request_id)


def extend_lease(retries: Retries, lease_id: str, delta_seconds: int, *, request_id: str = "") -> Flow[Document]:
    """Pays for more time: `expires_at`."""
    return _order(retries, f"leases/{segment(lease_id)}/extend", {"delta_seconds": delta_seconds}, request_id)


def close_lease(retries: Retries, lease_id: str, *, request_id: str = "") -> Flow[Document]:
    """Settles a lease: what it cost; the rest of what was held is free again."""
    return _order(retries, f"leases/{segment(lease_id)}/close", {}, request_id)


def lease(retries: Retries, lease_id: str) -> Flow[Document]:
    """How a lease stands."""
    return _get(retries, f"leases/{segment(lease_id)}")


def leases(retries: Retries, account: str = "", *, state: str = "", job_id: str = "") -> Feed[Document]:
    """The leases of an account, or all that the caller may see: those that are open, or `state` `ended`."""
    return _pages(retries, "leases", account=account, state=state, job_id=job_id)


def report_usage(retries: Retries, events: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> Flow[Document]:
    """What was measured: one event, or many. Each counts once by its `job_id` and `seq`, however often it is sent."""
    body = dict(events) if isinstance(events, Mapping) else {"events": [dict(one) for one in events]}
    return _order(retries, "usage", body, "")


# --- Accounts, limits and prices


def accounts(retries: Retries) -> Feed[Document]:
    """The accounts that the caller may see."""
    return _pages(retries, "accounts")


def open_account(
    retries: Retries, tenant: str, user: str = "", *, credit_limit: Amount = 0, request_id: str = ""
) -> Flow[Document]:
    """Opens a tenant's account, or a user's within it, which pays for that user from then on."""
    body = {"tenant": tenant, "user": user, "credit_limit": _amount(credit_limit)}
    return _order(retries, "accounts", body, request_id)


def change_account(retries: Retries, account: str, changes: Mapping[str, Any]) -> Flow[Document]:
    """Sets `status` (active, suspended, closed), `credit_limit` or `low_balance`."""
    body = {name: _amount(value) for name, value in changes.items()}
    return _order(retries, "accounts", body, "", method="PATCH", account=account)


def limits(retries: Retries, account: str = "") -> Flow[Document]:
    """What an account may spend: `concurrency`, `spend_rate`, `daily_cap`; null is unlimited."""
    return _get(retries, "limits", account=account)


def set_limits(retries: Retries, account: str, wanted: Mapping[str, Any]) -> Flow[Document]:
    """Replaces all limits of an account; what is not given is not limited."""
    body = {name: _amount(value) for name, value in wanted.items()}
    return _order(retries, "limits", body, "", method="PUT", account=account)


def prices(retries: Retries, *, resource: str = "", at: str = "", history: bool = False) -> Flow[Document]:
    """The prices in force, or all versions there are."""
    return _get(retries, "prices", resource=resource, at=at, history="true" if history else "")


def set_price(
    retries: Retries,
    resource: str,
    per_second: Amount,
    *,
    gpu_type: str = "",
    effective_from: str = "",
    request_id: str = "",
) -> Flow[Document]:
    """A new price for one second of one unit, from a time on; else from now on."""
    body = {"resource": resource, "class": gpu_type, "per_second": _amount(per_second)}
    if effective_from:
        body["effective_from"] = effective_from
    return _order(retries, "prices", body, request_id)


def delete_price(
    retries: Retries, resource: str, effective_from: str, *, gpu_type: str = "", request_id: str = ""
) -> Flow[Document]:
    """Takes back a price that has not begun."""
    query = {"resource": resource, "effective_from": effective_from, **_given(**{"class": gpu_type})}
    headers = {"accept": JSON, **({IDEMPOTENCY_KEY: request_id} if request_id else {})}
    return document_of(HttpRequest("DELETE", f"{ROOT}/prices", query, headers), retries)


def verify_ledger(retries: Retries, *, after: int = 0, anchor: str = "") -> Flow[Document]:
    """Whether the ledger is whole: its chain, its sums, its holds; what is wrong is named in `findings`. `anchor` is
    the `head` of an earlier answer, which must still be part of the chain."""
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
    """How far the ledger is sealed and verified, and what the system's own accounts stand at."""
    return _get(retries, "ledger")


VERIFY_SECONDS_MAX = 600.0
FINDINGS_MAX = 100


def _moving(amount: Amount, account: str, reason: str, lease_id: str = "") -> Document:
    body: Document = {"amount": _amount(amount), "account": account, "reason": reason}
    return {**body, **({"lease_id": lease_id} if lease_id else {})}


def _amount(value: Any) -> Any:
    if isinstance(value, float):
        raise TypeError(f"{value} is a float, which is not exact: give a str, an int or a Decimal")
    return format(value, "f") if isinstance(value, Decimal) else value


def _given(**query: str) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}


def _get(retries: Retries, path: str, **query: str) -> Flow[Document]:
    return document_of(HttpRequest("GET", f"{ROOT}/{path}", _given(**query)), retries)


def _order(
    retries: Retries, path: str, body: object, request_id: str, *, method: str = "POST", account: str = ""
) -> Flow[Document]:
    return document_of(_ordering(path, body, request_id, method, account), retries)


def _ordering(path: str, body: object, request_id: str, method: str = "POST", account: str = "") -> HttpRequest:
    headers = {"content-type": JSON, "accept": JSON, **({IDEMPOTENCY_KEY: request_id} if request_id else {})}
    return HttpRequest(method, f"{ROOT}/{path}", _given(account=account), headers, encoded(body))


def _movement(retries: Retries, path: str, body: object, request_id: str) -> Flow[Document]:
    response = yield from exchange(_ordering(path, body, request_id), retries)
    found = decoded(response)
    if not isinstance(found, dict):
        raise not_ours("its answer is not an object")
    return {**found, "replayed": True} if response.headers.get(REPLAYED) == "true" else found


def _pages(retries: Retries, path: str, **query: str) -> Feed[Document]:
    following = ""
    while True:
        found = yield from _get(retries, path, **query, **{"continue": following})
        for item in found.get("items") or []:
            yield Give(item)
        following = str(found.get("continue") or "")
        if not following:
            return
