"""Refusals: every expected "no", as values.

A refusal carries the numbers that explain it and what would help. Doors translate `Code` in one table each (HTTP
status, gRPC status, exit code); nothing else looks at the message. The codes stand in order of precedence: when several
apply, the first one is what the caller is told.

Refusals quote what was asked for, which may be as long as a body. Each bounds its own texts when it is made, so that
none of its copies (answers, remembered answers, logs) grows with its cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


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


WORD_CHARS_MAX: Final = 120
MESSAGE_CHARS_MAX: Final = 4096
CAUSE_CHARS_MAX: Final = 512
_WORD: Final = re.compile(r"\S++")
_CLOSING: Final = "\"'`:;,.)]}"


def shortened(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """A text whose words are cut, so that the sentence around a long value stays, and then the text itself."""
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
    """One reason among several: a field that is wrong, or a limit that has no room."""

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
    code: Code
    message: str
    hint: str = ""
    causes: tuple[Cause, ...] = ()
    retry_after_seconds: int = 0
    seconds_left: float | None = None  # that a lease which was not extended is still paid for

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
