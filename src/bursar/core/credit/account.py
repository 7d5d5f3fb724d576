"""Accounts: what is there, what of it is held for leases, and the limits that the owner must keep.

All of it is one row: one lock, one decision. Times are microseconds since 1970 by the database's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from msgspec import Struct

from bursar.core.values.money import MICROS, cost, credits_of
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import counted

# The system's own accounts. Their balances are summed up when somebody asks: no row of theirs is ever a hot one.
TOPUPS, REVENUE, WRITE_OFF, ADJUSTMENTS = 1, 2, 3, 4
SYSTEM_ACCOUNTS = {TOPUPS: "system/topups", REVENUE: "system/revenue", WRITE_OFF: "system/write-off",
                   ADJUSTMENTS: "system/adjustments"}  # fmt: skip
FIRST_ACCOUNT = 100
QUARTER = 15 * 60 * MICROS
FILED = "@"  # no name of a tenant has it


class AccountStatus(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"  # nothing new is leased, and nothing is extended
    CLOSED = "closed"


class Account(Struct):
    """A tenant's pool (`user` is empty), or a user's account within a tenant."""

    id: int
    tenant: str
    user: str = ""
    status: AccountStatus = AccountStatus.ACTIVE
    posted: int = 0  # the sum of its entries
    held: int = 0  # of that, what open leases may still use
    credit_limit: int = 0
    gpus: int = 0  # thousandths that are leased
    gpus_max: int | None = None
    spend_rate_max: int | None = None  # nanocredits a second that may be leased in the long run
    spend_burst: int = 0  # what may be leased at once
    tokens: int = 0
    tokens_at: int = 0
    daily_cap: int | None = None
    stop_at_cap: bool = False  # whether running work is stopped at the cap as well
    time_zone: str = "UTC"
    day: int = 0  # the day of `day_posted`, in that time zone
    day_posted: int = 0
    low_balance: int | None = None  # below this its owner is told
    version: int = 0
    tenant_uid: str = ""  # names are given anew; an account is one tenant's for ever

    @property
    def name(self) -> str:
        return account_name(self.tenant, self.user)

    @property
    def available(self) -> int:
        return self.posted - self.held + self.credit_limit

    @property
    def is_low(self) -> bool:
        """Whether its owner is to know that little is left."""
        return self.low_balance is not None and self.available < self.low_balance


class Owner(NamedTuple):
    """Whose account it is: a user's within a tenant, or the tenant's pool."""

    tenant: str
    user: str = ""


def filed_name(tenant: str, uid: str) -> str:
    """The name under which everything of a deleted tenant is filed: no living tenant can have it."""
    return f"{tenant}{FILED}{uid}"


def is_filed(tenant: str) -> bool:
    """Whether this is the name of a deleted tenant's books, NAME@UID."""
    return FILED in tenant


def books_closed(owner: Owner) -> Refusal:
    return Refusal(
        Code.IMMUTABLE,
        f"tenant {owner.tenant} was deleted: its accounts can be read, and not changed",
    )


def account_name(tenant: str, user: str = "") -> str:
    return f"{tenant}/{user}" if user else tenant


def no_account(owner: Owner) -> Refusal:
    """There is none of that name; or none that whoever asks may see, which is said alike."""
    name = account_name(*owner)
    return Refusal(
        Code.NOT_FOUND,
        f'accounts "{name}" not found',
        f"A billing admin opens it: bursar credit open {name}"
        if owner.user
        else f"It begins with its first top-up, by a billing admin: bursar credit topup AMOUNT --account {name}",
    )


def spends_anothers(account: Account, own: Account | None) -> Refusal | None:
    """Why somebody who has an account of their own cannot spend from this one: users do not choose who pays."""
    if own is None or own.id == account.id:
        return None
    return Refusal(Code.FORBIDDEN, f"account {own.name} pays for you, and not {account.name}")


def left_behind(tenant: str, accounts: Iterable[Account]) -> Refusal | None:
    """Why a tenant cannot be deleted: nobody could use its credit any more."""
    left = [one for one in accounts if one.posted or one.held or one.gpus]
    if not left:
        return None
    told = ", ".join(f"{one.name} ({credits_of(one.posted)}, {credits_of(one.held)} held)" for one in left[:5])
    return Refusal(
        Code.IN_USE,
        f'tenants "{tenant}" still has credit: {told}',
        "Close its leases, and take out what is left by adjustments.",
    )


# Limits. Each is asked before anything is changed.


def closed(account: Account) -> Refusal | None:
    if account.status is AccountStatus.ACTIVE:
        return None
    return Refusal(
        Code.ACCOUNT_INACTIVE,
        f"account {account.name} is {account.status}",
        "A billing admin can activate it again." if account.status is AccountStatus.SUSPENDED else "It stays closed.",
    )


def short_of_credit(account: Account, more: int) -> Refusal | None:
    """Whether so much more cannot be held."""
    if more <= account.available:
        return None
    missing = more - account.available
    return Refusal(
        Code.INSUFFICIENT_CREDIT,
        f"account {account.name} has {counted(credits_of(account.available), 'credit')} available,"
        f" {credits_of(more)} are needed",
        f"Top up {counted(credits_of(missing), 'credit')} or more.",
        (_cause("credits", account, account.posted + account.credit_limit, account.held, more),),
    )


def too_much_to_take(account: Account, amount: int) -> Refusal | None:
    """Whether somebody would take out more than is neither held nor spent."""
    if amount <= account.available:
        return None
    left = credits_of(max(0, account.available))
    return Refusal(
        Code.INSUFFICIENT_CREDIT,
        f"account {account.name} has {counted(left, 'credit')} available, {credits_of(amount)} are to be taken",
        f"At most {left} can be taken." if account.available > 0 else "Nothing can be taken.",
        (_cause("credits", account, account.posted + account.credit_limit, account.held, amount),),
    )


def too_many_gpus(account: Account, gpus: int) -> Refusal | None:
    if account.gpus_max is None or account.gpus + gpus <= account.gpus_max or not gpus:
        return None
    return Refusal(
        Code.CONCURRENCY_EXCEEDED,
        f"account {account.name} may use {counted(_thousandths(account.gpus_max), 'GPU')} at once:"
        f" {_thousandths(account.gpus)} are in use, {_thousandths(gpus)} more are asked for",
        "Wait until others have ended, ask for fewer, or have the limit raised.",
        (_cause("gpus", account, account.gpus_max, account.gpus, gpus, _thousandths),),
    )


def tokens_at(account: Account, now: int) -> int:
    """What of the spend rate has come together by now."""
    if account.spend_rate_max is None:
        return 0
    grown = cost(account.spend_rate_max, max(0, now - account.tokens_at))
    return min(account.spend_burst, account.tokens + grown)


def too_fast(account: Account, more: int, now: int) -> Refusal | None:
    """Whether so much more would be spent faster than allowed; what would help is to wait."""
    if account.spend_rate_max is None or more <= 0:
        return None
    tokens = tokens_at(account, now)
    if more <= tokens:
        return None
    seconds = -(-(more - tokens) // account.spend_rate_max) if account.spend_rate_max else 0
    reachable = more <= account.spend_burst and account.spend_rate_max > 0
    return Refusal(
        Code.SPEND_RATE_EXCEEDED,
        f"account {account.name} may spend {counted(credits_of(account.spend_rate_max), 'credit')} a second:"
        f" {credits_of(tokens)} are free now, {credits_of(more)} are needed",
        f"Try again in {seconds} s." if reachable else "It is more than may be spent at once: lease a shorter window.",
        (_cause("spend_rate", account, account.spend_burst, account.spend_burst - tokens, more),),
        retry_after_seconds=max(1, seconds) if reachable else 0,
    )


def beyond_the_day(account: Account, more: int, now: int) -> Refusal | None:
    """Whether the day's cap, which counts what is posted and what is held, has no room for so much more."""
    if account.daily_cap is None or more <= 0:
        return None
    spent = posted_on(account, day_of(now, account.time_zone)) + account.held
    if spent + more <= account.daily_cap:
        return None
    return Refusal(
        Code.DAILY_CAP_EXCEEDED,
        f"account {account.name} may spend {counted(credits_of(account.daily_cap), 'credit')} a day"
        f" ({account.time_zone}): {credits_of(spent)} are spent or held, {credits_of(more)} more are needed",
        "Wait until tomorrow, or have the cap raised.",
        (_cause("daily_cap", account, account.daily_cap, spent, more),),
    )


def posted_on(account: Account, day: int) -> int:
    return account.day_posted if account.day == day else 0


def day_of(now: int, zone: str) -> int:
    """The number of the day in a time zone. Every zone's midnight is on a quarter of an hour."""
    return _day(now // QUARTER, zone)


@lru_cache(4096)
def _day(quarter: int, zone: str) -> int:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=quarter * QUARTER)
    return at.astimezone(ZoneInfo(zone)).date().toordinal()


def _thousandths(amount: int) -> str:
    return f"{amount / 1000:g}"


def _cause(
    dimension: str, account: Account, limit: int, used: int, more: int, show: Callable[[int], str] = credits_of
) -> Cause:
    return Cause(
        "LimitExceeded", f"{dimension} of account {account.name}", dimension=dimension, scope=f"account:{account.name}",
        limit=show(limit), current_usage=show(used), requested_delta=show(more),
    )  # fmt: skip
