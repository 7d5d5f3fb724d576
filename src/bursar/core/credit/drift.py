"""Drift of an account: the sum of its reconciliation adjustments over a rolling period, and when it raises an alert.

Adjustments are summed by absolute value: an overcharge of one job does not cancel an undercharge of another. The period
consists of clock hours: the present one, and as many full ones before it as the settings say.

The owner gets an alert each time the sum rises above the limit. An account that stays above it gets another one when
the last alert has left the period.
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
    """The first hour of a period with this many full hours before the present one."""
    return hour_of(now) - hours


def crosses(before: Drift, more: int, limit: int) -> bool:
    """Whether more drift raises an alert: the sum rises above the limit, or is above it without an alert in the
    period."""
    return more > 0 and before.amount + more > limit and (before.amount <= limit or not before.alerted)
