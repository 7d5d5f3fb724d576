"""Credits as exact numbers: whole nanocredits inside, decimal strings with at most nine decimals outside."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

NANO: Final = 10**9  # nanocredits in a credit
AMOUNT_MAX: Final = 4 * 10**18  # of one amount, balance or limit: a sum of two of them fits a bigint
MICROS: Final = 10**6  # microseconds in a second

_SHAPE: Final = re.compile(r"(-?)([0-9]{1,10})(?:\.([0-9]{1,9}))?")


class MoneyError(ValueError):
    """Not an amount of credits, or one too large to count; the message says which."""


def nanocredits(value: object) -> int:
    """The exact amount that a JSON value writes: a string, an integer, or a number whose digits were kept."""
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
    """As people write it: no zeros at the end, and no point without decimals."""
    whole, part = divmod(abs(amount), NANO)
    text = f"{whole}.{part:09}".rstrip("0").rstrip(".") if part else str(whole)
    return f"-{text}" if amount < 0 else text


def cost(rate: int, micros: int) -> int:
    """What so long costs at so many nanocredits a second; what is less than a nanocredit is never counted."""
    return rate * micros // MICROS
