"""Credit accounts: the posted balance, the holds of open leases, and limits on credit, GPUs, spend rate and day.

An account is one row, so that one lock covers a decision. Times are microseconds since 1970 by the database's clock.
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

# The system's own accounts. Their balances are summed on request, so that no transaction contends for their rows.
TOPUPS, REVENUE, WRITE_OFF, ADJUSTMENTS = 1, 2, 3, 4
SYSTEM_ACCOUNTS = {TOPUPS: "system/topups", REVENUE: "system/revenue", WRITE_OFF: "system/write-off",
                   ADJUSTMENTS: "system/adjustments"}  # fmt: skip
FIRST_ACCOUNT = 100
QUARTER = 15 * 60 * MICROS
FILED = "@"  # no tenant's name may contain it


class AccountStatus(StrEnum):
    """The status of an account."""

    ACTIVE = "active"  # it can be spent from
    SUSPENDED = "suspended"  # no lease is opened or extended
    CLOSED = "closed"  # it is empty and cannot be activated again


class Account(Struct):
    """A credit account: a tenant's pool (`user` is empty), or a user's account within a tenant."""

    id: int
    tenant: str
    user: str = ""
    status: AccountStatus = AccountStatus.ACTIVE
    posted: int = 0  # the sum of its entries
    held: int = 0  # the part of it that open leases may still use
    credit_limit: int = 0
    gpus: int = 0  # leased, in thousandths
    gpus_max: int | None = None
    spend_rate_max: int | None = None  # nanocredits a second: the fill rate of the token bucket
    spend_burst: int = 0  # the size of the token bucket
    tokens: int = 0
    tokens_at: int = 0
    daily_cap: int | None = None
    stop_at_cap: bool = False  # whether the cap also stops running work
    time_zone: str = "UTC"
    day: int = 0  # the day of `day_posted`, in that time zone
    day_posted: int = 0
    low_balance: int | None = None  # the threshold of the low-balance notification
    version: int = 0
    tenant_uid: str = ""  # distinguishes tenants of the same name: an account belongs to one tenant for ever

    @property
    def name(self) -> str:
        return account_name(self.tenant, self.user)

    @property
    def available(self) -> int:
        return self.posted - self.held + self.credit_limit

    @property
    def is_low(self) -> bool:
        """Whether the available credit is below the low-balance threshold."""
        return self.low_balance is not None and self.available < self.low_balance


class Owner(NamedTuple):
    """The owner of an account: a user within a tenant, or the tenant (its pool)."""

    tenant: str
    user: str = ""


def filed_name(tenant: str, uid: str) -> str:
    """The name of a deleted tenant's accounts, NAME@UID, which no present tenant can have."""
    return f"{tenant}{FILED}{uid}"


def is_filed(tenant: str) -> bool:
    """Whether the name is that of a deleted tenant's accounts, NAME@UID."""
    return FILED in tenant


def books_closed(owner: Owner) -> Refusal:
    """Refuse a change of a deleted tenant's account."""
    return Refusal(Code.IMMUTABLE, f"tenant {owner.tenant} was deleted: its accounts can be read, but not changed")


def account_name(tenant: str, user: str = "") -> str:
    return f"{tenant}/{user}" if user else tenant


def no_account(owner: Owner) -> Refusal:
    """Refuse an account that does not exist, or that the caller may not see, with the same message."""
    name = account_name(*owner)
    return Refusal(
        Code.NOT_FOUND,
        f'accounts "{name}" not found',
        f"A billing admin opens it: bursar credit open {name}"
        if owner.user
        else f"A billing admin opens it with the first top-up: bursar credit topup AMOUNT --account {name}",
    )


def spends_anothers(account: Account, own: Account | None) -> Refusal | None:
    """Refuse spending from an account other than the caller's own: users cannot choose the payer."""
    if own is None or own.id == account.id:
        return None
    return Refusal(Code.FORBIDDEN, f"account {own.name} pays for you, and not {account.name}")


def left_behind(tenant: str, accounts: Iterable[Account]) -> Refusal | None:
    """Refuse the deletion of a tenant whose accounts are not empty."""
    left = [one for one in accounts if one.posted or one.held or one.gpus]
    if not left:
        return None
    told = ", ".join(f"{one.name} ({credits_of(one.posted)}, {credits_of(one.held)} held)" for one in left[:5])
    return Refusal(
        Code.IN_USE,
        f'tenants "{tenant}" still has credit: {told}',
        "Close its leases, and take out the rest with adjustments: bursar credit adjust.",
    )


# Limits. All are checked before anything is changed.


def closed(account: Account) -> Refusal | None:
    """Refuse spending from an account that is not active."""
    if account.status is AccountStatus.ACTIVE:
        return None
    return Refusal(
        Code.ACCOUNT_INACTIVE,
        f"account {account.name} is {account.status}",
        "A billing admin can activate it again." if account.status is AccountStatus.SUSPENDED else "It stays closed.",
    )


def short_of_credit(account: Account, more: int) -> Refusal | None:
    """Refuse a hold beyond the available credit."""
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
    """Refuse a withdrawal beyond the available credit."""
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
    """Refuse a lease beyond the account's limit on concurrent GPUs."""
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
    """The tokens in the spend-rate bucket now."""
    if account.spend_rate_max is None:
        return 0
    grown = cost(account.spend_rate_max, max(0, now - account.tokens_at))
    return min(account.spend_burst, account.tokens + grown)


def too_fast(account: Account, more: int, now: int) -> Refusal | None:
    """Refuse spending faster than the spend rate (a token bucket); the hint says how long to wait."""
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
    """Refuse spending beyond the daily cap, which counts the day's posted and all held credit."""
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
    """The ordinal of the day in a time zone, cached by quarter hours: midnight of every zone falls on one."""
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
