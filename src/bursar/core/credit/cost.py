"""What use costs: from amounts of time to credits and to money, exactly until it is shown.

Use is amount times seconds, in a resource's own unit (thousandths, or bytes); its cost is in nanocredits of the same
unit. Sums are made over a common denominator and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bursar.core.credit.price import GIB, is_device
from bursar.core.values.money import NANO, nanocredits
from bursar.core.values.quantity import is_bytes

# The parts that a bill is broken down into; what is none of them is `other`.
PARTS: Final = ("cpu", "memory", "gpu", "storage")
OTHER: Final = "other"
CENTS: Final = 100

_WHOLE: Final = 1000 * GIB  # what a nanocredit is in the common denominator


def is_gpu(resource: str) -> bool:
    return is_device(resource) and "gpu" in resource


def part_of(resource: str) -> str:
    """Which part of a bill a resource belongs to."""
    if is_gpu(resource):
        return "gpu"
    if resource == "memory" or resource.startswith("hugepages-"):
        return "memory"
    if resource.endswith("storage"):
        return "storage"
    return resource if resource == "cpu" else OTHER


def fraction(resource: str, cost: int) -> int:
    """A cost over the common denominator."""
    return cost * (1000 if is_bytes(resource) else GIB)


def nano_of(fractions: int) -> int:
    """In whole nanocredits, to the nearest."""
    return (2 * fractions + _WHOLE) // (2 * _WHOLE)


def breakdown(costs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """What each part of a bill comes to, over the common denominator; all but `other` are always named."""
    parts = dict.fromkeys(PARTS, 0)
    for resource, cost in costs:
        if cost:
            part = part_of(resource)
            parts[part] = parts.get(part, 0) + fraction(resource, cost)
    return parts


def bill(parts: Mapping[str, int], credit_value: str) -> tuple[int, dict[str, int]]:
    """The whole in cents, and its parts. Each is rounded to a neighbouring cent so that they add up to the whole."""
    value = nanocredits(credit_value)
    cent = _WHOLE * NANO * NANO // CENTS  # what a cent is, of these fractions times the value
    exact = {name: amount * value for name, amount in parts.items()}
    whole = (2 * sum(exact.values()) + cent) // (2 * cent)
    cents = {name: amount // cent for name, amount in exact.items()}
    nearest = sorted(exact, key=lambda name: -(exact[name] % cent))
    for name in nearest[: max(0, whole - sum(cents.values()))]:
        cents[name] += 1
    return whole, cents


def money(cents: int) -> str:
    """As in $12,450.00."""
    sign = "-" if cents < 0 else ""
    return f"{sign}${abs(cents) // CENTS:,}.{abs(cents) % CENTS:02}"
