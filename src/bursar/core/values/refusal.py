"""Refusals: every expected "no", as values.

A refusal carries the numbers that explain it and what would help. Doors translate `Code` in one table each (HTTP
status, gRPC status, exit code); nothing else looks at the message. The codes stand in order of precedence: when several
apply, the first one is what the caller is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    # What no retry will cure, unless the request changes.
    INVALID = "invalid"
    TOO_LARGE = "too_large"
    URL_TOO_LONG = "url_too_long"
    HEADERS_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NOT_ACCEPTABLE = "not_acceptable"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    REQUEST_REUSED = "request_id_reused"
    IMMUTABLE = "immutable"
    UNPROCESSABLE = "unprocessable"
    UNSATISFIABLE = "unsatisfiable"
    UNPRICED = "unpriced"
    # What depends on the state of things, and may succeed later.
    ALREADY_EXISTS = "already_exists"
    CONFLICT = "conflict"
    TERMINATING = "terminating"
    IN_USE = "in_use"
    ENDED = "ended"
    GONE = "gone"
    QUOTA_EXCEEDED = "quota_exceeded"
    NO_CAPACITY = "no_capacity"
    STALE = "stale"
    FENCED = "fenced"
    ACCOUNT_INACTIVE = "account_inactive"
    INSUFFICIENT_CREDIT = "insufficient_credit"
    CONCURRENCY_EXCEEDED = "concurrency_exceeded"
    DAILY_CAP_EXCEEDED = "daily_cap_exceeded"
    SPEND_RATE_EXCEEDED = "spend_rate_exceeded"
    # What passes by itself: try again.
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"


# Decisions that depend on nothing but the request or on a passing condition are not remembered under its request_id.
FORGETTABLE = frozenset(
    {
        Code.INVALID,
        Code.UNAUTHENTICATED,
        Code.UNSATISFIABLE,
        Code.CONFLICT,
        Code.STALE,
        Code.TIMEOUT,
        Code.RATE_LIMITED,
        Code.SPEND_RATE_EXCEEDED,
        Code.OVERLOADED,
        Code.UNAVAILABLE,
    }
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason among several: a field that is wrong, or a limit that has no room."""

    reason: str
    message: str
    field: str = ""
    dimension: str = ""
    scope: str = ""
    limit: str = ""
    current_usage: str = ""
    requested_delta: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    code: Code
    message: str
    hint: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int = 0
    seconds_left: float | None = None  # that a lease which was not extended is still paid for

    @property
    def remembered(self) -> bool:
        return self.code not in FORGETTABLE


def invalid(message: str, *causes: Cause, hint: str = "") -> Refusal:
    return Refusal(Code.INVALID, message, hint, causes)


def field_fault(field: str, message: str) -> Cause:
    return Cause(reason="FieldValueInvalid", message=message, field=field)
