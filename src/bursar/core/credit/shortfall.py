"""Shortfall: work that runs on the time it has paid for, because its lease could not be extended.

It ends when that time is over, unless more is granted before. Work that spends too fast is not meant: it is frozen
then, and goes on by itself.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from bursar.core.values.duration import format_age
from bursar.core.values.refusal import Code

OUT_OF_CREDIT: Final = "OutOfCredit"  # the reason and the condition of such work

_SECONDS_MAX: Final = 600  # of a time that is shown in seconds

# Why no more is granted, and what would help.
_WORDS: Final = {
    str(Code.INSUFFICIENT_CREDIT): ("out of credit", "topped up"),
    str(Code.DAILY_CAP_EXCEEDED): ("daily cap reached", "the cap is raised"),
    str(Code.ACCOUNT_INACTIVE): ("account not active", "it is activated again"),
    str(Code.UNPRICED): ("no price in force", "one is set"),
}


class Shortfall(NamedTuple):
    """Until when work is paid for, in seconds since 1970, and the code with which more was refused."""

    until: int
    code: str


def shortfall_of(paid_until_seconds: int, code: str) -> Shortfall | None:
    """The shortfall of a lease that was granted no more for this reason; None where it was, or will be frozen."""
    return Shortfall(paid_until_seconds, code) if code and code != Code.SPEND_RATE_EXCEEDED else None


def recorded_shortfall(code: str, paid_until: str) -> Shortfall | None:
    """The shortfall that a status has for a node, as `unpaid` and `paidUntil`."""
    return Shortfall(int(datetime.fromisoformat(paid_until).timestamp()), code) if code and paid_until else None


def end_words(code: str, when: str) -> str:
    """`out of credit: ends in 115 s unless topped up`."""
    why, cure = _WORDS.get(code, (f"no more time is granted ({code})", "that changes"))
    return f"{why}: ends {when} unless {cure}"


def time_left(seconds: float) -> str:
    """`in 115 s`."""
    whole = int(seconds)
    if whole <= 0:
        return "now"
    return f"in {whole} s" if whole < _SECONDS_MAX else f"in {format_age(whole)}"
