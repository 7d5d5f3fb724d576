"""Paid time in the journal: until when each placement is paid, by which token, and how much of it was used.

It is synced to disk before anything runs on it. An agent that was killed therefore knows the grants of its predecessor:
no placement runs longer than that, and usage is reported even if nobody saw the end.

Times are CLOCK_BOOTTIME (see `clock.py`), which restarts at a reboot. The length of the outage is then unknown: paid
time is over, and the last measured usage counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from bursar.agent.machine.lease_token import SignedLease
from bursar.agent.machine.types import LeaseGrant, Place
from bursar.agent.shim.deadline import CREDIT_EXHAUSTED, LEASE_EXPIRED, Deadline


class Paid(msgspec.Struct, frozen=True):
    """The paid time of one placement. `until` is in `boot_seconds` of one boot."""

    uid: str
    epoch: int
    lease: str
    until: float
    used_seconds: float = 0.0
    final: str = ""  # why no more is granted

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


class WindowLine(msgspec.Struct, frozen=True, tag="paid"):
    """The grants of one answer, as a line of the journal, with the token that signs them."""

    boot: str
    token: str
    paid: tuple[Paid, ...]


class PaidWindow(NamedTuple):
    """The newest paid time of a placement."""

    boot: str
    token: str
    paid: Paid


def window(
    boot: str,
    token: str,
    sent_at: float,
    grants: Mapping[Place, LeaseGrant],
    signed: Mapping[Place, SignedLease],
    used_seconds: Mapping[Place, float],
) -> WindowLine:
    """The valid grants of an answer, counted from when the answered heartbeat was sent."""
    paid = tuple(
        Paid(*place, signed[place].id, sent_at + grant.seconds, used_seconds.get(place, 0.0), grant.final)
        for place, grant in grants.items()
        if place in signed
    )
    return WindowLine(boot, token, paid)


def terms_of(paid_window: PaidWindow | None, boot: str, now: float) -> tuple[Deadline, float | None]:
    """The deadline of a placement after a restart of the agent, and its used seconds if its paid time is over. Without
    a record nothing was paid."""
    if paid_window is None:
        return (now, None, 0.0, LEASE_EXPIRED), 0.0
    reason = CREDIT_EXHAUSTED if paid_window.paid.final else LEASE_EXPIRED
    if paid_window.boot != boot:
        return (now, None, 0.0, reason), paid_window.paid.used_seconds
    return (paid_window.paid.until, None, 0.0, reason), None


def windows(paid_windows: Iterable[PaidWindow]) -> list[WindowLine]:
    """The windows as the fewest lines: one per token."""
    together: dict[tuple[str, str], list[Paid]] = {}
    for boot, token, paid in paid_windows:
        together.setdefault((boot, token), []).append(paid)
    return [WindowLine(boot, token, tuple(paid)) for (boot, token), paid in together.items()]
