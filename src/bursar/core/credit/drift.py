"""Drift of an account: by how much reconciliation changed the cost of its leases over a rolling period.

Adjustments are added up without their signs: an account that is overcharged for one job and undercharged for another is
metered wrongly twice, however small the sum of the two. The period is counted in hours of the clock: the present one,
and as many full ones before it as the settings say.

The owner gets an alert each time the sum rises above the limit. An account that stays above it gets another one when
the last alert has left the period, so that drift without an end is not forgotten.
"""

from __future__ import annotations

from msgspec import Struct

from bursar.core.values.money import MICROS

HOUR_MICROS = 3600 * MICROS


class Drift(Struct, frozen=True):
    """The drift of one account over the period."""

    amount: int = 0  # nanocredits
    alerted: bool = False  # whether its owner got an alert in the period


NO_DRIFT = Drift()


def hour_of(now: int) -> int:
    return now // HOUR_MICROS


def first_hour(now: int, hours: int) -> int:
    """The first hour of a period of so many full hours before the present one."""
    return hour_of(now) - hours


def crosses(before: Drift, more: int, limit: int) -> bool:
    """Whether so much more drift needs an alert: it takes the sum above the limit, or finds it there without an alert
    in the period."""
    return more > 0 and before.amount + more > limit and (before.amount <= limit or not before.alerted)
