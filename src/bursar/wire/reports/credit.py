"""Types of the credit API: accounts, top-ups, leases, limits and prices.

Amounts are credits: decimal strings with at most nine decimals. They are accepted as exact JSON numbers too. Times are
RFC 3339, in UTC.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeAlias
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from bursar.core.credit.account import Account, AccountStatus, day_of, posted_on
from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.credit.drift import Drift
from bursar.core.credit.lease import Lease, LeaseState
from bursar.core.credit.price import Price
from bursar.core.values.money import MICROS, MoneyError, credits_of, nanocredits
from bursar.core.values.quantity import QuantityError, amount, format_amount
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.instant import time_text
from bursar.wire.shared.limits import quantity_text

GPU: Final = "nvidia.com/gpu"
JOB_CHARS_MAX: Final = 253

Credits: TypeAlias = Annotated[
    str | int | float, Meta(description='Credits: a decimal string such as "12.5", or an exact number.')
]
Devices: TypeAlias = Annotated[str | int | float, Meta(description="A quantity, as in 4 or 500m.")]


class Order(Struct, forbid_unknown_fields=True):
    """A request that moves credit; repeated with the same `request_id`, it has one effect and one answer."""

    request_id: str = ""


# Requests.


class NewTopup(Order, kw_only=True):
    amount: Credits
    account: str = ""
    reason: str = ""


class NewRefund(Order, kw_only=True):
    amount: Credits
    reason: str
    account: str = ""
    lease_id: str = ""


class NewAdjustment(Order, kw_only=True):
    """A positive amount raises the balance, a negative one lowers it."""

    amount: Credits
    reason: str
    account: str = ""
    lease_id: str = ""


class NewLease(Order, kw_only=True):
    job_id: str
    gpu_type: str = ""
    gpu_count: Devices = 0
    resources: dict[str, Devices] = {}
    window_seconds: int | None = None
    account: str = ""


class ExtendLease(Order, kw_only=True):
    delta_seconds: int


class CloseLease(Order):
    pass


class NewAccount(Order, kw_only=True):
    tenant: str
    user: str = ""
    credit_limit: Credits = 0
    low_balance: Credits | None = None


class AccountChange(Order, kw_only=True):
    status: str | UnsetType = UNSET
    credit_limit: Credits | UnsetType = UNSET
    low_balance: Credits | UnsetType | None = UNSET


class NewLimits(Order, kw_only=True):
    """All limits of an account; a limit that is left out is removed."""

    concurrency: Devices | None = None
    spend_rate: Credits | None = None
    spend_burst: Credits | None = None
    daily_cap: Credits | None = None
    stop_at_cap: bool = False
    time_zone: str = "UTC"


class NewPrice(Order, kw_only=True):
    """A new price. `gpu_type` and `price_per_sec` are other names of `class` and `per_second`; a `gpu_type` without a
    resource is a class of nvidia.com/gpu."""

    resource: str = ""
    per_second: Credits | None = None
    klass: str = msgspec.field(name="class", default="")
    effective_from: str = ""
    gpu_type: str = ""
    price_per_sec: Credits | None = None


# Responses.


class Balance(Struct):
    account: str
    available: str
    holds: str
    posted: str
    credit_limit: str
    status: str


class Moved(Struct):
    """A movement of credit, with the balance after it and its time."""

    account: str
    amount: str
    new_balance: str
    available: str
    at: str


class SegmentView(Struct):
    """Paid time that is not used yet, in seconds, with the rate at which it was paid."""

    rate_per_sec: str
    seconds: float


class LeaseView(Struct, omit_defaults=True):
    """A lease. `rate_per_sec` is the current cost; `segments` are present if time ahead was paid at another rate.
    `work` is namespace/name of the allocation that it pays for, and `uid` its uid; or the node whose claim it pays for.
    For work of another scheduler, only the job's name is known."""

    lease_id: str
    account: str
    job_id: str
    state: str
    gpu_type: str
    gpu_count: str
    resources: dict[str, str]
    rate_per_sec: str
    window_seconds: int
    mode: str
    opened_at: str
    started_at: str | None
    expires_at: str
    cost: str
    held: str
    node: str = ""
    work: str = ""
    uid: str = ""
    epoch: int = 0
    final: bool = False
    reason: str = ""
    closed_at: str | None = None
    refunded: str = "0"
    segments: list[SegmentView] = []


class OpenedLease(Struct):
    lease_id: str
    account: str
    job_id: str
    rate_per_sec: str
    expires_at: str
    held: str


class ExtendedLease(Struct):
    lease_id: str
    rate_per_sec: str
    expires_at: str


class ClosedLease(Struct):
    lease_id: str
    finalized: bool
    cost: str
    closed_at: str


class Limits(Struct):
    """Limits of an account; null is unlimited."""

    account: str
    concurrency: str | None
    spend_rate: str | None
    spend_burst: str | None
    daily_cap: str | None
    stop_at_cap: bool
    time_zone: str
    gpus_in_use: str
    spent_today: str


class DriftView(Struct):
    """The drift of an account: the sum of the absolute amounts by which reconciliation changed the cost of its leases
    in the last `hours`. Its owner gets an alert when it exceeds `limit`."""

    credits: str
    limit: str
    hours: int
    exceeded: bool


class AccountView(Struct):
    """An account. Responses to writes leave `drift` out."""

    account: str
    tenant: str
    user: str
    status: str
    available: str
    holds: str
    posted: str
    credit_limit: str
    low_balance: str | None
    limits: Limits
    drift: DriftView | UnsetType = UNSET


class PriceView(Struct):
    resource: str
    klass: str = msgspec.field(name="class")
    per_second: str
    effective_from: str


class AccountList(Struct):
    items: list[AccountView]
    following: str = msgspec.field(name="continue", default="")


class LeaseList(Struct):
    items: list[LeaseView]
    following: str = msgspec.field(name="continue", default="")


class PriceList(Struct):
    items: list[PriceView]


# Conversion of values to responses.


def balance_of(account: Account) -> Balance:
    return Balance(
        account.name,
        credits_of(account.available),
        credits_of(account.held),
        credits_of(account.posted),
        credits_of(account.credit_limit),
        account.status,
    )


def account_view(account: Account, now: int, drift: DriftView | UnsetType = UNSET) -> AccountView:
    return AccountView(
        account.name,
        account.tenant,
        account.user,
        account.status,
        credits_of(account.available),
        credits_of(account.held),
        credits_of(account.posted),
        credits_of(account.credit_limit),
        _or_none(account.low_balance),
        limits_of(account, now),
        drift,
    )


def drift_view(drift: Drift, policy: CreditPolicy) -> DriftView:
    limit = policy.drift_account_credits
    return DriftView(credits_of(drift.amount), credits_of(limit), policy.drift_account_hours, drift.amount > limit)


def limits_of(account: Account, now: int) -> Limits:
    limited = account.spend_rate_max is not None
    return Limits(
        account.name,
        None if account.gpus_max is None else format_amount(GPU, account.gpus_max),
        _or_none(account.spend_rate_max),
        credits_of(account.spend_burst) if limited else None,
        _or_none(account.daily_cap),
        account.stop_at_cap,
        account.time_zone,
        format_amount(GPU, account.gpus),
        credits_of(posted_on(account, day_of(now, account.time_zone)) + account.held),
    )


def lease_view(lease: Lease, account: str) -> LeaseView:
    segments = lease.open_segments if lease.state is LeaseState.OPEN else ()
    return LeaseView(
        lease.name,
        account,
        lease.job,
        lease.state,
        lease.klass,
        format_amount(GPU, lease.gpus),
        {name: format_amount(name, value) for name, value in lease.amounts.items()},
        credits_of(lease.rate),
        lease.window // MICROS,
        lease.mode,
        time_text(lease.opened_at),
        time_text(lease.started_at) if lease.started_at else None,
        time_text(lease.paid_until),
        credits_of(lease.posted),
        credits_of(lease.held),
        lease.node,
        lease.work,
        lease.uid,
        lease.epoch,
        bool(lease.final),
        lease.final,
        time_text(lease.closed_at) if lease.closed_at else None,
        credits_of(lease.refunded),
        [SegmentView(credits_of(rate), micros / MICROS) for rate, micros in segments] if len(segments) > 1 else [],
    )


def price_view(price: Price) -> PriceView:
    return PriceView(
        resource=price.resource,
        klass=price.klass,
        per_second=credits_of(price.per_second),
        effective_from=time_text(price.effective_from),
    )


def _or_none(amount: int | None) -> str | None:
    return None if amount is None else credits_of(amount)


# Faults.


def credit_faults(field: str, given: Any, *, least: int = 0) -> list[Cause]:
    """Check an amount of credit; `least` is its minimum in nanocredits."""
    try:
        value = nanocredits(given)
    except MoneyError as error:
        return [field_fault(field, str(error))]
    if value >= least:
        return []
    wrong = "must be more than 0" if least else "must not be negative"
    return [field_fault(field, f"{wrong}, got {given}")]


def adjustment_faults(field: str, given: Any) -> list[Cause]:
    """Check an adjustment, which may be negative but not 0."""
    try:
        return [] if nanocredits(given) else [field_fault(field, "may be negative; must not be 0")]
    except MoneyError as error:
        return [field_fault(field, str(error))]


def device_faults(field: str, given: Any) -> list[Cause]:
    try:
        amount(GPU, quantity_text(given))
    except QuantityError as error:
        return [field_fault(field, str(error))]
    return []


def seconds_faults(field: str, given: int | None, most: int) -> list[Cause]:
    if given is None or 1 <= given <= most:
        return []
    return [field_fault(field, f"must be between 1 and {most} seconds, got {given}")]


def price_faults(order: NewPrice) -> list[Cause]:
    """The faults of a price: fields that are missing, or set twice."""
    faults = []
    if not (order.resource or order.gpu_type):
        faults.append(field_fault("resource", "is required, or a gpu_type"))
    if order.per_second is None and order.price_per_sec is None:
        faults.append(field_fault("per_second", "is required"))
    if order.per_second is not None and order.price_per_sec is not None:
        faults.append(field_fault("price_per_sec", "is another name of per_second: give one of them"))
    if order.gpu_type and order.klass:
        faults.append(field_fault("gpu_type", "is another name of class: give one of them"))
    return faults


def one_name_each(order: NewPrice) -> NewPrice:
    """Replace alternative names of a price's fields. Call it only on an order without `price_faults`."""
    return msgspec.structs.replace(
        order,
        resource=order.resource or GPU,
        klass=order.klass or order.gpu_type,
        per_second=order.price_per_sec if order.per_second is None else order.per_second,
        gpu_type="",
        price_per_sec=None,
    )


def name_faults(field: str, given: str, chars_max: int = JOB_CHARS_MAX) -> list[Cause]:
    if given and given.isprintable() and len(given) <= chars_max:
        return []
    return [field_fault(field, f"must have between 1 and {chars_max} printable characters")]


def status_faults(field: str, given: str) -> list[Cause]:
    known = tuple(AccountStatus)
    return [] if given in known else [field_fault(field, f"must be one of {', '.join(known)}")]


def zone_faults(field: str, given: str) -> list[Cause]:
    """Check the name of a time zone, which must not be a path."""
    try:
        if _ZONE.fullmatch(given):
            ZoneInfo(given)
            return []
    except (KeyError, OSError, ValueError):
        pass
    return [field_fault(field, "must be the name of a time zone, such as Europe/Zurich")]


_ZONE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+\-]{0,31}(?:/[A-Za-z0-9_+\-]{1,31}){0,2}")
