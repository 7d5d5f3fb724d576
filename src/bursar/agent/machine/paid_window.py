"""What is paid ahead lies on the node: until when each placement is paid, by which token, and what it has used of it.

It is synced to the disk before anything may run on it. So an agent that is killed and comes back knows what its earlier
life was granted: nothing that it finds runs longer than that, and what was used is told though nobody has seen its end.

Times are the node's clock, which neither jumps nor stands still (see `clock.py`), and it begins anew with the machine.
After that nobody on the node knows how long it was off: what was paid is over, and counts as used up to where it was
last measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from bursar.agent.machine.lease_token import SignedLease
from bursar.agent.machine.types import LeaseGrant, Place
from bursar.agent.shim.deadline import CREDIT_EXHAUSTED, LEASE_EXPIRED, Deadline


class Paid(msgspec.Struct, frozen=True):
    """One placement's part. `until` is on the clock of this start of the machine."""

    uid: str
    epoch: int
    lease: str
    until: float
    used_seconds: float = 0.0
    final: str = ""  # why it is the last

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


class WindowLine(msgspec.Struct, frozen=True, tag="paid"):
    """What one answer has granted, as a line of the journal; the token proves it to whoever has the keys."""

    boot: str
    token: str
    paid: tuple[Paid, ...]


class PaidWindow(NamedTuple):
    """The newest that is known of a placement."""

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
    """What is believed of an answer, counted from when the beat that it answers was sent."""
    paid = tuple(
        Paid(*place, signed[place].id, sent_at + grant.seconds, used_seconds.get(place, 0.0), grant.final)
        for place, grant in grants.items()
        if place in signed
    )
    return WindowLine(boot, token, paid)


def terms_of(paid_window: PaidWindow | None, boot: str, now: float) -> tuple[Deadline, float | None]:
    """For an agent that comes back: until when it may last; and how long it has, where that is over for certain. What
    was never granted was never paid."""
    if paid_window is None:
        return (now, None, 0.0, LEASE_EXPIRED), 0.0
    reason = CREDIT_EXHAUSTED if paid_window.paid.final else LEASE_EXPIRED
    if paid_window.boot != boot:
        return (now, None, 0.0, reason), paid_window.paid.used_seconds
    return (paid_window.paid.until, None, 0.0, reason), None


def windows(escrows: Iterable[PaidWindow]) -> list[WindowLine]:
    """As few lines as say the same."""
    together: dict[tuple[str, str], list[Paid]] = {}
    for boot, token, paid in escrows:
        together.setdefault((boot, token), []).append(paid)
    return [WindowLine(boot, token, tuple(paid)) for (boot, token), paid in together.items()]
