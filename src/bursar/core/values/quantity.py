"""Kubernetes quantities (`500m`, `40Gi`, `1e3`): a strict, exact parser and the canonical form.

Quotas are sums of amounts, so an amount is an integer in its dimension's unit: whole bytes for sizes, thousandths for
everything else. Both fit PostgreSQL's bigint; larger amounts are refused here, before they can overflow elsewhere.

The parser accepts the forms that people write and refuses the rest of the Kubernetes grammar: `.5` is a quantity, `1.`,
`+1` and negative numbers are not. JSON integers are quantities; JSON numbers with a fraction are not, because they have
already lost digits.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from bursar.core.values.names import quoted

UNLIMITED: Final = 2**63 - 1
AMOUNT_MAX: Final = UNLIMITED - 1
TEXT_CHARS_MAX: Final = 64
EXPONENT_MAX: Final = 30

_SHAPE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i))?")
_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_FRACTION: Final = {"m": 10**3, "u": 10**6, "n": 10**9}
_MULTIPLIER: Final = {**_BINARY, **_DECIMAL}

_BYTES_NAMES: Final = frozenset({"memory", "requests.memory", "limits.memory"})
_BYTES_ENDINGS: Final = ("_bytes", "storage")
_BYTES_BEGINNINGS: Final = ("hugepages-", "requests.hugepages-", "limits.hugepages-")


class QuantityError(ValueError):
    """A text that is not a quantity, or is too large to count; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """The exact value of a quantity as a fraction, not necessarily in lowest terms."""

    numerator: int
    denominator: int = 1


def amount(dimension: str, text: object) -> int:
    """Parse an amount in the dimension's unit, rounded up as in Kubernetes, so that no request counts as zero."""
    per_unit = 1 if is_bytes(dimension) else 1000
    if isinstance(text, str):
        return _text_amount(text, per_unit)
    return _bounded(parse(text), per_unit, text)


def parse(text: object) -> Quantity:
    """Parse a JSON value as an exact quantity. It takes any value, because bodies are not checked before."""
    if isinstance(text, str):
        return _parse_text(text)
    if isinstance(text, bool) or not isinstance(text, int):
        raise QuantityError(f"quantity must be a string or an integer, not {_kind(text)}")
    if text < 0:
        raise QuantityError(f"quantity {_shown(text)} must not be negative")
    return Quantity(text)


def format_amount(dimension: str, amount: int) -> str:
    """Format an amount canonically: bytes with the largest exact binary suffix, others whole or else in `m`."""
    if amount == UNLIMITED:
        return "unlimited"
    if not is_bytes(dimension):
        return f"{amount}m" if amount % 1000 else str(amount // 1000)
    for suffix, size in reversed(_BINARY.items()):
        if amount and amount % size == 0:
            return f"{amount // size}{suffix}"
    return str(amount)


def format_granted(dimension: str, amount: int) -> str:
    """Format an amount that was allocated, freed or measured: cpu in millicores, everything else canonically."""
    return f"{amount}m" if dimension == "cpu" else format_amount(dimension, amount)


def readable(dimension: str, amount: int) -> str:
    """Format an amount for people: bytes in the largest unit, rounded to a tenth (`3.0Ti`); everything else exactly."""
    if not is_bytes(dimension):
        return format_amount(dimension, amount)
    for suffix, size in reversed(_BINARY.items()):
        # An amount that rounds to 1024 of a unit is shown as 1 of the next.
        if amount * 20 >= size * 20 - size // 1024:
            return f"{amount / size:.1f}{suffix}"
    return str(amount)


def is_bytes(dimension: str) -> bool:
    """Whether the dimension is counted in bytes. The name decides, so that a new resource needs no code."""
    return dimension in _BYTES_NAMES or dimension.endswith(_BYTES_ENDINGS) or dimension.startswith(_BYTES_BEGINNINGS)


def is_device(resource: str) -> bool:
    """Whether the resource is an extended one such as nvidia.com/gpu: counted by devices, with classes and prices."""
    return "/" in resource


def percent(used: int, hard: int) -> str:
    """Usage as a percentage of the limit, rounded down, so that `100%` always means that the limit is reached."""
    if hard == 0:
        return "100%" if used else "0%"
    return f"{used * 100 // hard}%"


# Submissions repeat a few texts. The cache key leaves the dimension out, so that invented names, which may be long, are
# not kept; nor are refusals, which are exceptions.
@lru_cache(maxsize=4096)
def _text_amount(text: str, per_unit: int) -> int:
    return _bounded(_parse_text(text), per_unit, text)


def _bounded(quantity: Quantity, per_unit: int, written: object) -> int:
    units = -(-quantity.numerator * per_unit // quantity.denominator)
    if units > AMOUNT_MAX:
        raise QuantityError(f"quantity {_shown(written)} is too large: at most {AMOUNT_MAX // per_unit} can be counted")
    return units


def _parse_text(text: str) -> Quantity:
    # Check the length first: it bounds the work of everything after it.
    shape = _SHAPE.fullmatch(text) if len(text) <= TEXT_CHARS_MAX else None
    if shape is None:
        raise QuantityError(f"quantity {quoted(text)} {_fault(text)}")
    digits, exponent, suffix = shape.groups()
    whole, _, fraction = digits.partition(".")
    times, over = _power_of_ten(text, int(exponent)) if exponent else _scale(suffix)
    return Quantity(int(whole + fraction) * times, 10 ** len(fraction) * over)


def _scale(suffix: str | None) -> tuple[int, int]:
    if suffix is None:
        return 1, 1
    return _MULTIPLIER.get(suffix, 1), _FRACTION.get(suffix, 1)


def _power_of_ten(text: str, exponent: int) -> tuple[int, int]:
    if abs(exponent) > EXPONENT_MAX:
        raise QuantityError(f"quantity {quoted(text)} has an exponent outside -{EXPONENT_MAX}..{EXPONENT_MAX}")
    return 10 ** max(exponent, 0), 10 ** max(-exponent, 0)


def _fault(text: str) -> str:
    if not text:
        return "is empty"
    if len(text) > TEXT_CHARS_MAX:
        return f"is longer than {TEXT_CHARS_MAX} characters"
    if not text.isascii():
        return "contains characters outside ASCII"
    if text[0] == "-" and _SHAPE.fullmatch(text[1:]):
        return "must not be negative"
    if any(character.isspace() for character in text):
        return "contains whitespace"
    return "must be a number with an optional suffix: n u m k M G T P E, Ki Mi Gi Ti Pi Ei, or an exponent such as e3"


def _shown(written: object) -> str:
    # Python refuses to print integers of thousands of digits.
    if isinstance(written, int) and written.bit_length() > 128:
        return "of more than 128 bits"
    return quoted(str(written))


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, float):
        return "a number with a fraction (write it as a string)"
    return "an array" if isinstance(value, list) else "an object"
