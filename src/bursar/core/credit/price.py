"""Prices per resource and class, in versions: the one in force at a time is the youngest that had begun by then.

A price is for one second of one unit: a GPU, a core, a GiB. What a class has no price for costs what the resource costs
without a class. Devices are never given away because nobody wrote a price: without one they cannot be leased. Cores and
memory without a price are free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from bursar.core.values.quantity import is_bytes

GIB = 1 << 30
FULL = 10_000  # a discount's hundredths of a percent
RATES_MAX = 10_000  # that are kept
AMOUNTS_MAX = 8  # of what is kept: what names more is made up, and large


class Price(Struct, frozen=True):
    """`per_second` in nanocredits for one unit, from `effective_from` (microseconds since 1970) on."""

    resource: str
    klass: str
    per_second: int
    effective_from: int


@dataclass(frozen=True, slots=True)
class Unpriced:
    """What somebody asks for has no price at that time."""

    resource: str
    klass: str
    known: tuple[str, ...]  # the classes of this resource that have one


@dataclass(slots=True)
class PriceList:
    """Never changed once it is made, so what was worked out for it is kept until another price begins."""

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
        """With one more; this list stays as it is."""
        return PriceList.of([*(one for versions in self._versions.values() for one in versions), price])

    def without(self, price: Price) -> PriceList:
        """With one fewer; this list stays as it is."""
        return PriceList.of(one for versions in self._versions.values() for one in versions if one != price)

    def version(self, resource: str, klass: str, begin: int) -> Price | None:
        """The one that begins just then."""
        versions = self._versions.get((resource, klass), ())
        return next((one for one in versions if one.effective_from == begin), None)

    def at(self, resource: str, klass: str, when: int) -> Price | None:
        """The price in force then: that of the class, else that of the resource."""
        return self._at(resource, klass, when) or (self._at(resource, "", when) if klass else None)

    def all_begins(self) -> tuple[int, ...]:
        """In whole seconds, rounded up, each once."""
        return tuple(sorted({-(-at // 1_000_000) for at in self._begins}))

    def begins(self, resource: str, klass: str) -> set[int]:
        """When any price begins that may be in force for this class."""
        versions = [*self._versions.get((resource, klass), ()), *self._versions.get((resource, ""), ())]
        return {one.effective_from for one in versions}

    def classes(self, resource: str, when: int) -> tuple[str, ...]:
        return tuple(
            sorted(klass for name, klass in self._versions if name == resource and self._at(name, klass, when))
        )

    def rate(self, amounts: Mapping[str, int], klass: str, when: int, discount: int = 0) -> int | Unpriced:
        """Nanocredits a second for these amounts (thousandths, or bytes), rounded up once; discounted by so many
        hundredths of a percent."""
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


# What says of which class a node's devices are; the first that a node has.
CLASS_LABELS = ("bursar.io/gpu-class", "gpu-type", "nvidia.com/gpu.product")


def class_of(labels: Mapping[str, str]) -> str:
    return next((labels[name] for name in CLASS_LABELS if labels.get(name)), "")


def is_device(resource: str) -> bool:
    """Whether it is a kind of device, like nvidia.com/gpu: these have classes, and must have a price."""
    return "/" in resource
