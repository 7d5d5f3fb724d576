"""Statements: what an account had, what came and went, and what it had then; and how long it will last.

A period goes from its beginning up to, and without, its end. Every figure is exact: the closing balance is the opening
one and everything listed. Amounts that came to the account are positive. Times are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from bursar.core.credit.account import Account
from bursar.core.credit.lease import Lease
from bursar.core.values.money import MICROS


class LeaseLine(Struct, frozen=True):
    """What one lease came to within the period."""

    lease: int
    amount: int  # all of it: what was paid is negative
    debited: int  # what was paid for time
    refunded: int
    adjusted: int
    micros: int  # how long was paid for
    begin: int  # the first and the last moment of that
    until: int
    entries: int
    job: str = ""
    work: str = ""  # namespace/name, where we placed it
    node: str = ""
    klass: str = ""
    gpus: int = 0  # thousandths
    state: str = ""  # empty for a lease that nobody knows any more


class Item(Struct, frozen=True):
    """One entry that is of no lease: a top-up, a refund, an adjustment."""

    number: int
    at: int
    type: str
    amount: int
    request: str = ""
    actor: str = ""
    reason: str = ""


class PageEnd(Struct, frozen=True):
    """Where a page of a statement ends, and all that the next one need not add up again. All pages are of the same
    entries: those after `since`, up to and with `through`, whatever is written meanwhile. It carries sums: whoever is
    given one gives it back signed."""

    lease: int  # the last one that was shown, and the last one there is
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
    """Of one account. `totals` (by type) are of the whole period, however many lines are shown."""

    account: int
    name: str
    begin: int
    end: int
    opening: int
    closing: int
    totals: Mapping[str, int]
    items: tuple[Item, ...] = ()
    lines: tuple[LeaseLine, ...] = ()
    through: int = 0  # the last entry that is counted
    following: PageEnd | None = None  # where lines and items go on; None: these are all


class TenantStatement(Struct, frozen=True):
    """Of all accounts of a tenant: each with its sums, without lines."""

    tenant: str
    begin: int
    end: int
    opening: int
    closing: int
    totals: Mapping[str, int]
    accounts: tuple[Statement, ...]
    through: int = 0


class BalanceAt(Struct, frozen=True):
    """What was posted to an account before a time; `through` is the last entry of all by then."""

    account: int
    at: int
    posted: int
    through: int


class Forecast(Struct, frozen=True):
    """How long an account lasts if everything that runs now goes on as it does. `micros` is None where nothing runs."""

    account: int
    now: int
    available: int  # what is neither spent nor spoken for
    left: int  # what is not spent yet: what is held for time to come is part of it
    rate: int  # nanocredits a second
    micros: int | None
    runs_out_at: int | None
    leases: int  # that run


def forecast(account: Account, leases: Iterable[Lease], now: int) -> Forecast:
    """What is left is the balance and what may be owed, without what has passed and is not posted yet."""
    running = [one for one in leases if one.started_at and one.paid_until > now]
    passed = sum(one.between(one.posted_until, max(one.posted_until, now)) for one in running)
    left = max(0, account.posted + account.credit_limit - passed)
    rate = sum(one.rate_at(now) for one in running)
    micros = left * MICROS // rate if rate else None
    runs_out_at = now + micros if micros is not None else None
    return Forecast(account.id, now, account.available, left, rate, micros, runs_out_at, len(running))


def total(statements: Iterable[Statement]) -> dict[str, int]:
    """Sums by type over several accounts."""
    sums: dict[str, int] = {}
    for one in statements:
        for type_, amount in one.totals.items():
            sums[type_] = sums.get(type_, 0) + amount
    return sums
