"""Units of quotas: names that stand for amounts of several dimensions, such as `service-unit: {cpu: 1, memory: 4Gi}`.

Limits may be written in units and claims may ask for them. Only the amounts are counted: a limit in units is a limit on
each part, and a claim charges each part, so that everything that uses cpu shares one limit on cpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bursar.core.objects.charge import Amounts, Charge
from bursar.core.values.quantity import AMOUNT_MAX
from bursar.core.values.replace import replace

ONE: Final = 1000  # units are counted in thousandths
BAREMETAL_HOSTS: Final = "baremetal-hosts"
NODES: Final = "nodes"
EVERY_DIMENSION: Final = "*"
WARN_AT: Final[Mapping[str, tuple[int, ...]]] = {EVERY_DIMENSION: (80, 95)}

Units = Mapping[str, Amounts]  # unit → the amounts of one


@dataclass(frozen=True, slots=True)
class QuotaPolicy:
    """The system's settings of quotas."""

    zero: frozenset[str] = frozenset()  # dimensions of which a tenant without a limit may use nothing
    units: Units = field(default_factory=dict)
    counts_hosts: bool = False  # whether exclusive work charges its nodes as `baremetal-hosts`
    warn_at: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {**WARN_AT})  # percentages by dimension

    @property
    def converts(self) -> bool:
        """Whether any charge differs from the amounts that its object names."""
        return bool(self.units) or self.counts_hosts


def limits_in_parts(units: Units, written: Amounts) -> Amounts:
    """Limits with those in units as limits on their parts, rounded down. Several units add up; a limit that is written
    for a dimension itself takes precedence."""
    if units.keys().isdisjoint(written):
        return written
    own = {name: value for name, value in written.items() if name not in units}
    return {**_sums((units[name], value, 0) for name, value in written.items() if name in units), **own}


def in_parts(units: Units, amounts: Amounts) -> Amounts:
    """Amounts with units as their parts, rounded up. They are added to amounts of the same dimensions."""
    if units.keys().isdisjoint(amounts):
        return amounts
    parts = _sums((units[name], value, ONE - 1) for name, value in amounts.items() if name in units)
    own = {name: value for name, value in amounts.items() if name not in units}
    return {name: min(AMOUNT_MAX, own.get(name, 0) + parts.get(name, 0)) for name in (*own, *parts)}


def _sums(taken: Iterable[tuple[Amounts, int, int]]) -> dict[str, int]:
    """The parts of several amounts of units, given the amounts of one, the number in thousandths, and the rounding."""
    total: dict[str, int] = {}
    for parts, thousandths, rounding in taken:
        for name, each in parts.items():
            total[name] = min(AMOUNT_MAX, total.get(name, 0) + (each * thousandths + rounding) // ONE)
    return total


def units_in(parts: Amounts, amounts: Amounts) -> int:
    """The number of units, in thousandths and rounded up, of which the amounts use the scarcest part."""
    return max((-(-amounts.get(name, 0) * ONE // each) for name, each in parts.items() if each), default=0)


def charged(policy: QuotaPolicy, charge: Charge, *, placed: bool) -> Charge:
    """The charge of a new object under the settings. Stored charges stay as they are when the settings change."""
    if not policy.converts:
        return charge
    known: tuple[QuotaPolicy, Charge] | None = charge.known.get(QuotaPolicy)
    if known is None or known[0] is not policy:
        known = (policy, _charged(policy, charge, placed=placed))
        charge.known[QuotaPolicy] = known
    return known[1]


def _charged(policy: QuotaPolicy, charge: Charge, *, placed: bool) -> Charge:
    accepted = charge.accepted
    if placed:
        hosts = accepted.get(NODES, 0) if policy.counts_hosts else 0
        return replace(charge, accepted={**accepted, BAREMETAL_HOSTS: hosts}) if hosts else charge
    after = in_parts(policy.units, accepted)
    if after is accepted:
        return charge
    return replace(charge, accepted=after, bound=after if charge.bound else {})
