"""Refusals: expected errors as return values, with a stable code, the numbers that explain them, and a hint.

The HTTP API, the gRPC services and the command line each map `Code` to their own status in one table; no code parses
the message. The codes are in order of precedence: if several apply, the caller receives the first.

Refusals quote the request, which may be as long as a body. Each one bounds its texts when it is made, so that its
copies (answers, remembered answers, logs) stay short.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Code(StrEnum):
    """The stable code of a refusal."""

    # Permanent: the request must change.
    INVALID = "invalid"  # the request is malformed or has invalid fields
    TOO_LARGE = "too_large"  # the body is larger than the limit
    URL_TOO_LONG = "url_too_long"  # the URL is longer than the limit
    HEADERS_TOO_LARGE = "headers_too_large"  # the headers are too large or too many
    UNSUPPORTED_MEDIA = "unsupported_media"  # the body has a media type that the path does not accept
    METHOD_NOT_ALLOWED = "method_not_allowed"  # the path does not support the method
    NOT_ACCEPTABLE = "not_acceptable"  # the server has no media type that the client accepts
    UNAUTHENTICATED = "unauthenticated"  # the request has no valid credentials
    FORBIDDEN = "forbidden"  # the caller's role or tenant does not permit it
    NOT_FOUND = "not_found"  # the object does not exist, or the caller may not see it
    REQUEST_REUSED = "request_id_reused"  # the idempotency key was used before with another body
    IMMUTABLE = "immutable"  # the field or object cannot be changed
    UNPROCESSABLE = "unprocessable"  # the request is well-formed but contradicts what it refers to
    UNSATISFIABLE = "unsatisfiable"  # no node of the cluster could ever run it
    UNPRICED = "unpriced"  # a resource of prepaid work has no price in force
    # Depends on the current state: it may succeed later.
    ALREADY_EXISTS = "already_exists"  # an object of this name exists
    CONFLICT = "conflict"  # the object has changed, or is in a state that excludes the request
    TERMINATING = "terminating"  # the namespace or object is being deleted
    IN_USE = "in_use"  # other objects still depend on it
    DECIDED = "already_decided"  # the request was approved, denied or expired before
    ENDED = "ended"  # the object has already ended
    GONE = "gone"  # the requested revision, page or log is no longer kept
    QUOTA_EXCEEDED = "quota_exceeded"  # a hard limit of a quota has no headroom
    NO_CAPACITY = "no_capacity"  # the node has too little free of a resource
    STALE = "stale"  # the decision was made on state that has changed (optimistic concurrency)
    FENCED = "fenced"  # the lease is closed, so its work must have ended
    ACCOUNT_INACTIVE = "account_inactive"  # the paying account is suspended or closed
    INSUFFICIENT_CREDIT = "insufficient_credit"  # the paying account has too little available credit
    CONCURRENCY_EXCEEDED = "concurrency_exceeded"  # the paying account would use more GPUs at once than allowed
    DAILY_CAP_EXCEEDED = "daily_cap_exceeded"  # the paying account would spend more today than allowed
    SPEND_RATE_EXCEEDED = "spend_rate_exceeded"  # the paying account would spend faster than its rate limit
    # Transient: retry.
    TIMEOUT = "timeout"  # the request took longer than its time limit
    RATE_LIMITED = "rate_limited"  # the caller sent more requests than its rate limit
    OVERLOADED = "overloaded"  # a queue of the server is full
    UNAVAILABLE = "unavailable"  # a part of the system, such as the database, cannot be reached


# Refusals that depend only on the request or on a transient state are not remembered under its request_id.
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


WORD_CHARS_MAX: Final = 120
MESSAGE_CHARS_MAX: Final = 4096
CAUSE_CHARS_MAX: Final = 512
_WORD: Final = re.compile(r"\S++")
_CLOSING: Final = "\"'`:;,.)]}"


def shortened(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """Shorten a text: first its long words, so that the sentence around a long value remains, then the text itself."""
    if len(text) <= WORD_CHARS_MAX:
        return text
    text = _WORD.sub(_short_word, text)
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"


def _short_word(found: re.Match[str]) -> str:
    word = found[0]
    if len(word) <= WORD_CHARS_MAX:
        return word
    value = word.rstrip(_CLOSING)
    closing = word[len(value) :][:4]
    return f"{value[: WORD_CHARS_MAX - 1 - len(closing)]}…{closing}"


@dataclass(frozen=True, slots=True)
class Cause:
    """One of the causes of a refusal: an invalid field, or an exceeded limit, with its numbers."""

    reason: str
    message: str
    field: str = ""
    dimension: str = ""
    scope: str = ""
    limit: str = ""
    current_usage: str = ""
    requested_delta: str = ""

    def __post_init__(self) -> None:
        if len(self.message) > WORD_CHARS_MAX:
            object.__setattr__(self, "message", shortened(self.message, CAUSE_CHARS_MAX))
        for name in ("field", "dimension", "scope"):
            if len(text := getattr(self, name)) > CAUSE_CHARS_MAX:
                object.__setattr__(self, name, f"{text[: CAUSE_CHARS_MAX - 1]}…")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An expected error, returned as a value: its code, message, hint and causes."""

    code: Code
    message: str
    hint: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int = 0
    seconds_left: float | None = None  # paid time left on a lease whose extension was refused

    def __post_init__(self) -> None:
        for name in ("message", "hint"):
            if len(text := getattr(self, name)) > WORD_CHARS_MAX:
                object.__setattr__(self, name, shortened(text))

    @property
    def remembered(self) -> bool:
        return self.code not in FORGETTABLE


def invalid(message: str, *causes: Cause, hint: str = "") -> Refusal:
    return Refusal(Code.INVALID, message, hint, causes)


def field_fault(field: str, message: str) -> Cause:
    return Cause(reason="FieldValueInvalid", message=message, field=field)
