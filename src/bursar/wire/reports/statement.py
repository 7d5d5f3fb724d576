"""Statements and forecasts as responses and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from bursar.core.credit.lease import lease_name
from bursar.core.credit.statement import BalanceAt, Forecast, Item, LeaseLine, Statement, TenantStatement
from bursar.core.values.money import MICROS, credits_of
from bursar.core.values.quantity import format_amount
from bursar.wire.reports.credit import GPU
from bursar.wire.shared.instant import time_text


class PastBalance(Struct):
    account: str
    posted: str
    at: str
    through: int


class ForecastView(Struct):
    """A forecast; `runs_out_in_seconds` is null if nothing is being spent."""

    account: str
    available: str
    left: str
    rate_per_sec: str
    leases: int
    runs_out_in_seconds: int | None
    runs_out_at: str | None
    message: str


class StatementItem(Struct):
    number: int
    at: str
    type: str
    amount: str
    request_id: str
    actor: str
    reason: str


class StatementLease(Struct):
    """The total of a lease within the period; payments are negative."""

    lease_id: str
    job_id: str
    work: str
    amount: str
    debited: str
    refunded: str
    adjusted: str
    seconds: str
    begin: str | None = msgspec.field(name="from")
    until: str | None = msgspec.field(name="to")
    entries: int
    gpu_type: str
    gpu_count: str
    node: str
    state: str


class StatementView(Struct):
    """An account statement: `closing` is `opening` plus everything listed; `totals` are those of the whole period, by
    type of entry. `through` is the number of the last entry that is counted."""

    account: str
    begin: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    opening: str
    closing: str
    totals: dict[str, str]
    through: int
    items: list[StatementItem]
    leases: list[StatementLease]
    following: str = msgspec.field(name="continue", default="")


class AccountSums(Struct):
    account: str
    opening: str
    closing: str
    totals: dict[str, str]


class TenantStatementView(Struct):
    tenant: str
    begin: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    opening: str
    closing: str
    totals: dict[str, str]
    through: int
    accounts: list[AccountSums]


def past_balance(name: str, found: BalanceAt) -> PastBalance:
    return PastBalance(name, credits_of(found.posted), time_text(found.at), found.through)


def forecast_view(name: str, found: Forecast) -> ForecastView:
    seconds = None if found.micros is None else found.micros // MICROS
    return ForecastView(
        name,
        credits_of(found.available),
        credits_of(found.left),
        credits_of(found.rate),
        found.leases,
        seconds,
        None if found.runs_out_at is None or found.runs_out_at > _SHOWN_MAX else time_text(found.runs_out_at),
        "nothing is being spent" if seconds is None else f"runs out in {lasting(seconds)} at the present rate",
    )


_SHOWN_MAX: Final = 250_000_000_000 * MICROS  # some thousands of years from now: dates have an end
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def lasting(seconds: int) -> str:
    """Format a duration in its two largest units: 3 h 12 min."""
    for place, (unit, size) in enumerate(_UNITS):
        if seconds >= size:
            smaller = _UNITS[place + 1] if place + 1 < len(_UNITS) else None
            rest = seconds % size // smaller[1] if smaller else 0
            return f"{seconds // size} {unit}" + (f" {rest} {smaller[0]}" if smaller and rest else "")
    return "0 s"


def statement_view(found: Statement, following: str = "") -> StatementView:
    return StatementView(
        account=found.name,
        begin=time_text(found.begin),
        end=time_text(found.end),
        opening=credits_of(found.opening),
        closing=credits_of(found.closing),
        totals=_totals(found),
        through=found.through,
        items=[_item(one) for one in found.items],
        leases=[_lease(one) for one in found.lines],
        following=following,
    )


def tenant_statement_view(found: TenantStatement) -> TenantStatementView:
    return TenantStatementView(
        tenant=found.tenant,
        begin=time_text(found.begin),
        end=time_text(found.end),
        opening=credits_of(found.opening),
        closing=credits_of(found.closing),
        totals=_totals(found),
        through=found.through,
        accounts=[
            AccountSums(one.name, credits_of(one.opening), credits_of(one.closing), _totals(one))
            for one in found.accounts
        ],
    )


def _totals(found: Statement | TenantStatement) -> dict[str, str]:
    return {type_: credits_of(amount) for type_, amount in sorted(found.totals.items())}


def _item(one: Item) -> StatementItem:
    return StatementItem(
        one.number, time_text(one.at), one.type, credits_of(one.amount), one.request, one.actor, one.reason
    )


def _lease(one: LeaseLine) -> StatementLease:
    return StatementLease(
        lease_id=lease_name(one.lease),
        job_id=one.job,
        work=one.work,
        amount=credits_of(one.amount),
        debited=credits_of(one.debited),
        refunded=credits_of(one.refunded),
        adjusted=credits_of(one.adjusted),
        seconds=_seconds(one.micros),
        begin=time_text(one.begin) if one.begin else None,
        until=time_text(one.until) if one.until else None,
        entries=one.entries,
        gpu_type=one.klass,
        gpu_count=format_amount(GPU, one.gpus),
        node=one.node,
        state=one.state,
    )


def _seconds(micros: int) -> str:
    """Format microseconds as exact seconds, without trailing zeros."""
    whole, part = divmod(micros, MICROS)
    return f"{whole}.{part:06}".rstrip("0").rstrip(".") if part else str(whole)


# CSV: one line for the opening balance, one per entry, one for the closing balance.

COLUMNS: Final = (
    "type", "at", "amount", "lease_id", "job_id", "work", "gpu_type", "gpu_count", "node", "seconds", "from", "to",
    "number", "request_id", "actor", "reason", "debited", "refunded", "adjusted",
)  # fmt: skip


def statement_csv(view: StatementView) -> str:
    """Write a statement as CSV; the amounts between opening and closing add up to their difference."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\r\n")
    table.writerow(COLUMNS)
    for row in _rows(view):
        table.writerow([_cell(column, row.get(column, "")) for column in COLUMNS])
    return text.getvalue()


def _rows(view: StatementView) -> Iterator[dict[str, Any]]:
    yield {"type": "opening", "at": view.begin, "amount": view.opening}
    yield from map(_of_fields, view.items)
    yield from ({"type": "lease", "at": one.until, **_of_fields(one)} for one in view.leases)
    yield {"type": "closing", "at": view.end, "amount": view.closing}


def _of_fields(one: Struct) -> dict[str, Any]:
    shown: Iterable[Any] = msgspec.structs.fields(one)
    return {field.encode_name: getattr(one, field.name) for field in shown if field.encode_name in COLUMNS}


_WORDS: Final = frozenset({"job_id", "work", "gpu_type", "node", "request_id", "actor", "reason"})


def _cell(column: str, value: Any) -> str:
    """Escape user text, so that spreadsheets do not read it as a formula."""
    text = "" if value is None else str(value)
    return f"'{text}" if column in _WORDS and text[:1] in tuple("=+-@\t\r") else text
