"""Times in RFC 3339, and as the ledger counts them: whole microseconds since 1970."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from bursar.core.values.refusal import Cause, field_fault

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST: Final = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)


class InstantError(ValueError):
    """Not a time; the message shows a valid one."""


def micros_of(text: str) -> int:
    """Parse an RFC 3339 time to microseconds since 1970; a date means its midnight in UTC."""
    whole = f"{text}T00:00:00Z" if _DATE.fullmatch(text) else text
    try:
        if not _TIME.fullmatch(whole):
            raise ValueError
        micros = (datetime.fromisoformat(whole.upper()) - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        raise InstantError("must be a time such as 2026-11-16T07:00:00Z, or a date") from None
    if not 0 <= micros < _LAST:
        raise InstantError("must be a time between the years 1970 and 9998")
    return micros


def moment_of(given: str | float) -> int:
    """Parse a time that may also be a number of seconds since 1970."""
    if isinstance(given, str):
        return micros_of(given)
    if not 0 <= given < _LAST / 1_000_000:
        raise InstantError("must be a time between the years 1970 and 9998")
    return round(given * 1_000_000)


def time_text(micros: int) -> str:
    """Format a time, with microseconds if it is not a whole second."""
    at = (_EPOCH + timedelta(microseconds=micros)).replace(tzinfo=None)
    return f"{at.isoformat(timespec='microseconds' if at.microsecond else 'seconds')}Z"


def instant_faults(field: str, given: str | float) -> list[Cause]:
    try:
        moment_of(given)
    except InstantError as error:
        return [field_fault(field, str(error))]
    return []
