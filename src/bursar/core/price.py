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

from bursar.core.quantity import is_bytes

GIB = 1 << 30
FULL = 10_000  # a discount's hundredths of a percent


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
    _versions: dict[tuple[str, str], list[Price]] = field(default_factory=dict)

    @classmethod
    def of(cls, prices: Iterable[Price]) -> PriceList:
        listed = cls()
        for one in sorted(prices, key=lambda price: price.effective_from):
            listed._versions.setdefault((one.resource, one.klass), []).append(one)
        return listed

    def at(self, resource: str, klass: str, when: int) -> Price | None:
        """The price in force then: that of the class, else that of the resource."""
        return self._at(resource, klass, when) or (self._at(resource, "", when) if klass else None)

    def classes(self, resource: str, when: int) -> tuple[str, ...]:
        return tuple(
            sorted(klass for name, klass in self._versions if name == resource and self._at(name, klass, when))
        )

    def rate(self, amounts: Mapping[str, int], klass: str, when: int, discount: int = 0) -> int | Unpriced:
        """Nanocredits a second for these amounts (thousandths, or bytes), rounded up once; discounted by so many
        hundredths of a percent."""
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
