"""Changes of an account's status and limits by a billing admin. Its balance only changes by ledger entries.

All values are checked before any is changed. Limits may be set below the present use and then refuse increases. Only
the credit limit may not, because the account would owe more than allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from zoneinfo import ZoneInfo

from bursar.core.credit.account import Account, AccountStatus, tokens_at
from bursar.core.values.money import AMOUNT_MAX, credits_of
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.core.values.wording import counted

GPUS_MAX: Final = 10**12  # thousandths


def _amount(value: Any) -> str:
    return (
        "" if _is_number(value) and 0 <= value <= AMOUNT_MAX else f"must be from 0 to {credits_of(AMOUNT_MAX)} credits"
    )


def _gpus(value: Any) -> str:
    return "" if _is_number(value) and 0 <= value <= GPUS_MAX else f"must be from 0 to {GPUS_MAX // 1000} GPUs"


def _truth(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _zone(value: Any) -> str:
    try:
        ZoneInfo(value)
    except (KeyError, ValueError, TypeError, OSError):
        return "must be the name of a time zone, such as Europe/Vienna"
    return ""


def _status(value: Any) -> str:
    known = ", ".join(AccountStatus)
    return "" if value in {str(one) for one in AccountStatus} else f"must be one of {known}"


def _or_none(check: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else check(value)


# The fields that may be changed, each with the check of its value; None removes a limit.
_CHECKS: Final[Mapping[str, Callable[[Any], str]]] = {
    "status": _status,
    "credit_limit": _amount,
    "gpus_max": _or_none(_gpus),
    "spend_rate_max": _or_none(_amount),
    "spend_burst": _amount,
    "daily_cap": _or_none(_amount),
    "stop_at_cap": _truth,
    "time_zone": _zone,
    "low_balance": _or_none(_amount),
}


def amend(account: Account, changes: Mapping[str, Any], now: int) -> Refusal | None:
    """Change fields of an account by name. A new spend rate begins with a full bucket."""
    if refusal := _wrong(changes) or _closing(account, changes) or _owing(account, changes):
        return refusal
    limited = account.spend_rate_max is not None
    tokens = tokens_at(account, now)
    for name, value in changes.items():
        setattr(account, name, AccountStatus(value) if name == "status" else value)
    if account.spend_rate_max is not None:
        account.tokens = min(tokens, account.spend_burst) if limited else account.spend_burst
        account.tokens_at = now
    return None


def _wrong(changes: Mapping[str, Any]) -> Refusal | None:
    faults = [
        field_fault(name, _CHECKS[name](value) if name in _CHECKS else "cannot be set")
        for name, value in sorted(changes.items())
        if name not in _CHECKS or _CHECKS[name](value)
    ]
    return invalid(f"{faults[0].field} {faults[0].message}", *faults) if faults else None


def _closing(account: Account, changes: Mapping[str, Any]) -> Refusal | None:
    wanted = changes.get("status", account.status)
    if account.status is AccountStatus.CLOSED and wanted != AccountStatus.CLOSED:
        return Refusal(Code.ENDED, f"account {account.name} is closed", "It stays closed.")
    if wanted != AccountStatus.CLOSED or account.status is AccountStatus.CLOSED:
        return None
    return _has_leases(account) or _not_empty(account)


def _has_leases(account: Account) -> Refusal | None:
    if not (account.held or account.gpus):
        return None
    return Refusal(
        Code.IN_USE,
        f"account {account.name} has open leases: {credits_of(account.held)} credits are held",
        "Suspend it, wait until its leases have ended, then close it.",
        (_left("holds", account, account.held),),
    )


def _not_empty(account: Account) -> Refusal | None:
    """Refuse to close an account with a balance: closing is permanent, so nobody could use or pay it."""
    if not account.posted:
        return None
    what = (
        f"has {counted(credits_of(account.posted), 'credit')} left"
        if account.posted > 0
        else f"owes {counted(credits_of(-account.posted), 'credit')}"
    )
    return Refusal(
        Code.IN_USE,
        f"account {account.name} {what}: only an empty account can be closed",
        f"First refund or adjust: bursar credit adjust {credits_of(-account.posted)} --account {account.name}"
        " --reason WHY",
        (_left("posted", account, account.posted),),
    )


def _left(what: str, account: Account, amount: int) -> Cause:
    return Cause(
        "AccountInUse", f"{what} of account {account.name}", "status", what, f"account:{account.name}", "0",
        credits_of(amount),
    )  # fmt: skip


def _owing(account: Account, changes: Mapping[str, Any]) -> Refusal | None:
    limit = changes.get("credit_limit", account.credit_limit)
    owed = account.held - account.posted
    if limit >= owed:
        return None
    return Refusal(
        Code.INSUFFICIENT_CREDIT,
        f"account {account.name} owes or holds {counted(credits_of(owed), 'credit')} beyond its balance:"
        f" its credit limit cannot be {credits_of(limit)}",
        f"Top up {counted(credits_of(owed - limit), 'credit')}, or set a limit of {credits_of(owed)} or more.",
        (
            Cause(
                "LimitExceeded", f"credit_limit of account {account.name}", "credit_limit", "credit_limit",
                f"account:{account.name}", credits_of(limit), credits_of(owed),
            ),
        ),
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
