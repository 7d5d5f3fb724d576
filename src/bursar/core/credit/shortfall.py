"""Shortfall: work whose lease could not be extended runs until the end of its paid time, unless it is extended before.

Work above its spend rate is not concerned: it is frozen, and continues by itself.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from bursar.core.values.duration import format_age
from bursar.core.values.refusal import Code

OUT_OF_CREDIT: Final = "OutOfCredit"  # the reason and the condition of such work

_SECONDS_MAX: Final = 600  # longer times are not shown in seconds

# The cause by code, and its remedy.
_WORDS: Final = {
    str(Code.INSUFFICIENT_CREDIT): ("out of credit", "topped up"),
    str(Code.DAILY_CAP_EXCEEDED): ("daily cap reached", "the cap is raised"),
    str(Code.ACCOUNT_INACTIVE): ("account not active", "activated again"),
    str(Code.UNPRICED): ("no price in force", "one is set"),
}


class Shortfall(NamedTuple):
    """The end of paid time in seconds since 1970, and the code with which the extension was refused."""

    until: int
    code: str


def shortfall_of(paid_until_seconds: int, code: str) -> Shortfall | None:
    """The shortfall of a lease whose extension was refused; None if it was not, or if its work is frozen instead."""
    return Shortfall(paid_until_seconds, code) if code and code != Code.SPEND_RATE_EXCEEDED else None


def recorded_shortfall(code: str, paid_until: str) -> Shortfall | None:
    """The shortfall in a status, from `unpaid` and `paidUntil` of a node."""
    return Shortfall(int(datetime.fromisoformat(paid_until).timestamp()), code) if code and paid_until else None


def end_words(code: str, when: str) -> str:
    """Describe a shortfall: `out of credit: ends in 115 s unless topped up`."""
    why, cure = _WORDS.get(code, (f"its lease is not extended ({code})", "extended"))
    return f"{why}: ends {when} unless {cure}"


def time_left(seconds: float) -> str:
    """Format the time left: `in 115 s`."""
    whole = int(seconds)
    if whole <= 0:
        return "now"
    return f"in {whole} s" if whole < _SECONDS_MAX else f"in {format_age(whole)}"
