"""Account statements with opening and closing balance, and forecasts of how long the credit lasts.

A period includes its beginning and excludes its end. All figures are exact: the closing balance is the opening balance
plus all listed amounts. Credits to the account are positive. Times are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from bursar.core.credit.account import Account
from bursar.core.credit.lease import Lease
from bursar.core.values.money import MICROS


class LeaseLine(Struct, frozen=True):
    """The line of one lease in a statement: its sums within the period."""

    lease: int
    amount: int  # the total; payments are negative
    debited: int  # for leased time
    refunded: int
    adjusted: int
    micros: int  # the paid time
    begin: int  # the first and the last moment of that
    until: int
    entries: int
    job: str = ""
    work: str = ""  # namespace/name of the allocation, if Bursar placed it
    node: str = ""
    klass: str = ""
    gpus: int = 0  # thousandths
    state: str = ""  # empty if the lease is no longer stored


class Item(Struct, frozen=True):
    """The line of one entry without a lease: a top-up, a refund or an adjustment."""

    number: int
    at: int
    type: str
    amount: int
    request: str = ""
    actor: str = ""
    reason: str = ""


class PageEnd(Struct, frozen=True):
    """The continuation token of a statement: the place where a page ends, and the sums for the next ones.

    All pages cover the same entries, those after `since` up to and including `through`, whatever is written meanwhile.
    Clients get it signed, because it carries sums.
    """

    lease: int  # the last one shown, and the last one of the statement
    last_lease: int
    item: int
    since: int
    through: int
    begin: int
    end: int
    opening: int
    closing: int
    totals: Mapping[str, int]


class Statement(Struct, frozen=True):
    """The statement of one account. `totals` (by type) cover the whole period, however many lines a page shows."""

    account: int
    name: str
    begin: int
    end: int
    opening: int
    closing: int
    totals: Mapping[str, int]
    items: tuple[Item, ...] = ()
    lines: tuple[LeaseLine, ...] = ()
    through: int = 0  # the last entry that it covers
    following: PageEnd | None = None  # the continuation of lines and items; None on the last page


class TenantStatement(Struct, frozen=True):
    """The statement of a tenant: the sums of each of its accounts, without lines."""

    tenant: str
    begin: int
    end: int
    opening: int
    closing: int
    totals: Mapping[str, int]
    accounts: tuple[Statement, ...]
    through: int = 0


class BalanceAt(Struct, frozen=True):
    """The posted balance of an account at a time; `through` is the last ledger entry before it."""

    account: int
    at: int
    posted: int
    through: int


class Forecast(Struct, frozen=True):
    """How long the credit of an account lasts at its present rate. `micros` is None if nothing runs."""

    account: int
    now: int
    available: int  # neither spent nor held
    left: int  # not spent yet, with the holds for future time
    rate: int  # nanocredits a second
    micros: int | None
    runs_out_at: int | None
    leases: int  # running


def forecast(account: Account, leases: Iterable[Lease], now: int) -> Forecast:
    """Forecast an account: the balance and credit limit, minus time that has passed and is not posted yet."""
    running = [one for one in leases if one.started_at and one.paid_until > now]
    passed = sum(one.between(one.posted_until, max(one.posted_until, now)) for one in running)
    left = max(0, account.posted + account.credit_limit - passed)
    rate = sum(one.rate_at(now) for one in running)
    micros = left * MICROS // rate if rate else None
    runs_out_at = now + micros if micros is not None else None
    return Forecast(account.id, now, account.available, left, rate, micros, runs_out_at, len(running))


def total(statements: Iterable[Statement]) -> dict[str, int]:
    """Totals by type over several accounts."""
    sums: dict[str, int] = {}
    for one in statements:
        for type_, amount in one.totals.items():
            sums[type_] = sums.get(type_, 0) + amount
    return sums
