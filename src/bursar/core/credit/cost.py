"""Cost of usage in credits and in money, exact until it is displayed.

Usage is amount times seconds in a resource's own unit (thousandths, or bytes); its cost is in nanocredits of the same
unit. Sums use a common denominator and are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bursar.core.credit.price import GIB
from bursar.core.values.money import NANO, nanocredits
from bursar.core.values.quantity import is_bytes, is_device

# The parts of a bill; all other resources are `other`.
PARTS: Final = ("cpu", "memory", "gpu", "storage")
OTHER: Final = "other"
CENTS: Final = 100

_WHOLE: Final = 1000 * GIB  # one nanocredit over the common denominator


def is_gpu(resource: str) -> bool:
    return is_device(resource) and "gpu" in resource


def part_of(resource: str) -> str:
    """The part of a bill that a resource belongs to."""
    if is_gpu(resource):
        return "gpu"
    if resource == "memory" or resource.startswith("hugepages-"):
        return "memory"
    if resource.endswith("storage"):
        return "storage"
    return resource if resource == "cpu" else OTHER


def fraction(resource: str, cost: int) -> int:
    """Convert a cost to the common denominator."""
    return cost * (1000 if is_bytes(resource) else GIB)


def nano_of(fractions: int) -> int:
    """Convert from the common denominator to whole nanocredits, rounded to the nearest."""
    return (2 * fractions + _WHOLE) // (2 * _WHOLE)


def breakdown(costs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums by part of a bill, over the common denominator; all parts but `other` are always present."""
    parts = dict.fromkeys(PARTS, 0)
    for resource, cost in costs:
        if cost:
            part = part_of(resource)
            parts[part] = parts.get(part, 0) + fraction(resource, cost)
    return parts


def bill(parts: Mapping[str, int], credit_value: str) -> tuple[int, dict[str, int]]:
    """The total in cents and its parts, rounded by the largest-remainder method so that they add up to the total."""
    value = nanocredits(credit_value)
    cent = _WHOLE * NANO * NANO // CENTS  # one cent, in fractions times the value of a credit
    exact = {name: amount * value for name, amount in parts.items()}
    whole = (2 * sum(exact.values()) + cent) // (2 * cent)
    cents = {name: amount // cent for name, amount in exact.items()}
    nearest = sorted(exact, key=lambda name: -(exact[name] % cent))
    for name in nearest[: max(0, whole - sum(cents.values()))]:
        cents[name] += 1
    return whole, cents


def money(cents: int) -> str:
    """Format cents as $12,450.00."""
    sign = "-" if cents < 0 else ""
    return f"{sign}${abs(cents) // CENTS:,}.{abs(cents) % CENTS:02}"
