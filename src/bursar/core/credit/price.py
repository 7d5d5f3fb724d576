"""Price list: versioned prices per resource and class. The price in force is the latest that has begun.

A price is for one second of one unit: a GPU, a core, a GiB. A class without a price of its own has the price of the
resource without a class. Devices without a price cannot be leased. Cores and memory without a price are free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from bursar.core.values.quantity import is_bytes, is_device

GIB = 1 << 30
FULL = 10_000  # a discount's hundredths of a percent
RATES_MAX = 10_000  # entries of the cache
AMOUNTS_MAX = 8  # resources of a cached request: requests with more are rare and large


class Price(Struct, frozen=True):
    """One version of a price: nanocredits per second for one unit, from `effective_from` (microseconds since 1970)."""

    resource: str
    klass: str
    per_second: int
    effective_from: int


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A requested device that has no price at that time."""

    resource: str
    klass: str
    known: tuple[str, ...]  # the classes of this resource with a price


@dataclass(slots=True)
class PriceList:
    """All versions of all prices. It is immutable, so rates are cached until another price begins."""

    _versions: dict[tuple[str, str], list[Price]] = field(default_factory=dict)
    _begins: list[int] = field(default_factory=list)  # of all prices, in order
    _rates: dict[tuple[object, ...], tuple[int, int | Unpriced]] = field(default_factory=dict)

    @classmethod
    def of(cls, prices: Iterable[Price]) -> PriceList:
        listed = cls()
        for one in sorted(prices, key=lambda price: price.effective_from):
            listed._versions.setdefault((one.resource, one.klass), []).append(one)
            listed._begins.append(one.effective_from)
        return listed

    def having(self, price: Price) -> PriceList:
        """A new list with one more price."""
        return PriceList.of([*(one for versions in self._versions.values() for one in versions), price])

    def without(self, price: Price) -> PriceList:
        """A new list without this price."""
        return PriceList.of(one for versions in self._versions.values() for one in versions if one != price)

    def version(self, resource: str, klass: str, begin: int) -> Price | None:
        """The version that begins at exactly this time."""
        versions = self._versions.get((resource, klass), ())
        return next((one for one in versions if one.effective_from == begin), None)

    def at(self, resource: str, klass: str, when: int) -> Price | None:
        """The price in force at a time: of the class, else of the resource."""
        return self._at(resource, klass, when) or (self._at(resource, "", when) if klass else None)

    def all_begins(self) -> tuple[int, ...]:
        """The distinct beginnings of all prices in whole seconds, rounded up."""
        return tuple(sorted({-(-at // 1_000_000) for at in self._begins}))

    def begins(self, resource: str, klass: str) -> set[int]:
        """The beginnings of all prices that can be in force for this class."""
        versions = [*self._versions.get((resource, klass), ()), *self._versions.get((resource, ""), ())]
        return {one.effective_from for one in versions}

    def classes(self, resource: str, when: int) -> tuple[str, ...]:
        return tuple(
            sorted(klass for name, klass in self._versions if name == resource and self._at(name, klass, when))
        )

    def rate(self, amounts: Mapping[str, int], klass: str, when: int, discount: int = 0) -> int | Unpriced:
        """The rate in nanocredits per second for these amounts (thousandths, or bytes), rounded up once. `discount` is
        in hundredths of a percent."""
        if len(amounts) > AMOUNTS_MAX:
            return self._rate(amounts, klass, when, discount)
        asked = (klass, discount, *amounts.items())
        known = self._rates.get(asked)
        period = bisect_right(self._begins, when)  # within one, no price changes
        if known is not None and known[0] == period:
            return known[1]
        rate = self._rate(amounts, klass, when, discount)
        if len(self._rates) >= RATES_MAX:
            self._rates.clear()
        self._rates[asked] = (period, rate)
        return rate

    def _rate(self, amounts: Mapping[str, int], klass: str, when: int, discount: int) -> int | Unpriced:
        numerator = 0
        for resource, amount in amounts.items():
            price = self.at(resource, klass if is_device(resource) else "", when)
            if price is None:
                if is_device(resource) and amount:
                    return Unpriced(resource, klass, self.classes(resource, when))
                continue
            # Over a common denominator, so that nothing is rounded twice.
            numerator += amount * price.per_second * (1000 if is_bytes(resource) else GIB)
        return -(-numerator * (FULL - discount) // (1000 * GIB * FULL))

    def _at(self, resource: str, klass: str, when: int) -> Price | None:
        versions = self._versions.get((resource, klass), [])
        place = bisect_right(versions, when, key=lambda price: price.effective_from)
        return versions[place - 1] if place else None


# The labels with the class of a node's devices; the first that a node has counts.
CLASS_LABELS = ("bursar.io/gpu-class", "gpu-type", "nvidia.com/gpu.product")


def class_of(labels: Mapping[str, str]) -> str:
    """The class of a node's devices; empty if no label has it."""
    return next((labels[name] for name in CLASS_LABELS if labels.get(name)), "")
