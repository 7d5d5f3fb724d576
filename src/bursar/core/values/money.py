"""Credit amounts as fixed-point numbers: integer nanocredits inside, decimal strings with nine decimals outside."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

NANO: Final = 10**9  # nanocredits in a credit
AMOUNT_MAX: Final = 4 * 10**18  # of one amount, balance or limit: a sum of two of them fits a bigint
MICROS: Final = 10**6  # microseconds in a second

_SHAPE: Final = re.compile(r"(-?)([0-9]{1,10})(?:\.([0-9]{1,9}))?")


class MoneyError(ValueError):
    """A value that is not an amount of credits, or is too large to count."""


def nanocredits(value: object) -> int:
    """Parse a JSON value as an exact amount: a string, an integer, or a number whose digits were kept."""
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise MoneyError('must be a decimal string such as "12.5", or an exact number')
    text = value if isinstance(value, str) else format(value, "f") if isinstance(value, Decimal) else str(value)
    match = _SHAPE.fullmatch(text) if text.isascii() and len(text) <= 32 else None
    if match is None:
        raise MoneyError("must be a decimal number of credits with at most 10 digits before and 9 after the point")
    sign, whole, part = match.groups()
    amount = int(whole) * NANO + int((part or "").ljust(9, "0"))
    if amount > AMOUNT_MAX:
        raise MoneyError(f"is more than the {AMOUNT_MAX // NANO} credits that can be counted")
    return -amount if sign else amount


def credits_of(amount: int) -> str:
    """Format an amount as a decimal number without trailing zeros."""
    whole, part = divmod(abs(amount), NANO)
    text = f"{whole}.{part:09}".rstrip("0").rstrip(".") if part else str(whole)
    return f"-{text}" if amount < 0 else text


def cost(rate: int, micros: int) -> int:
    """Cost of a time at a rate in nanocredits a second, rounded down to whole nanocredits."""
    return rate * micros // MICROS
