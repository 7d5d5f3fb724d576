"""Credit leases: the prepaid right to run until a time. The cost of the rest of that time is held on the account.

The time of a lease consists of segments. Each keeps the rate at which it was held, also when the price changes:

    past                      present                                        ahead
    (rate, micros) … │ since ── posted_until ────── turns_at │ (rate, micros) … (rate, micros) │ paid_until
    posted           │ posted             held, at `rate`    │ held                            │

The cost of a segment is computed from its beginning, so that extensions neither lose nor gain fractions of a
nanocredit. Times are microseconds since 1970 by the database's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct

from bursar.core.values.money import cost
from bursar.core.values.refusal import Code, Refusal

Segment: TypeAlias = tuple[int, int]  # a rate, and for how many microseconds

AHEAD_MAX: Final = 64  # segments after the present one: prices do not change so often within the time paid ahead
FROZEN = "SpendRateExceeded"  # the reason of frozen work, whose account spends above its spend rate


class Mode(StrEnum):
    """How a lease is extended."""

    STRICT = "strict"  # each heartbeat posts the time that has passed and pays the next window
    RESERVE = "reserve"  # a larger window, renewed when half of it is used: fewer writes


class LeaseState(StrEnum):
    """The state of a credit lease."""

    OPEN = "open"  # it pays for work, and can be extended
    CLOSED = "closed"  # its work has ended, and it is settled
    LAPSED = "lapsed"  # its time ran out unextended: its hold was posted, until it is reconciled


class Lease(Struct):
    """A credit lease: of one placement, or of a job named by the client that opened it (`job`)."""

    id: int
    account: int
    job: str
    rate: int = 0
    window: int = 0  # how far each heartbeat pays ahead
    amounts: Mapping[str, int] = {}  # of the priced resources
    klass: str = ""
    gpus: int = 0  # thousandths
    discount: int = 0
    mode: Mode = Mode.STRICT
    uid: str = ""  # of the allocation whose placement on `node` in `epoch` this pays for
    epoch: int = 0
    node: str = ""
    opened_at: int = 0
    started_at: int = 0  # 0 until the work runs: then paid time begins
    since: int = 0  # the beginning of the present segment, shifted by unpaid gaps
    past: tuple[Segment, ...] = ()  # posted segments
    ahead: tuple[Segment, ...] = ()  # held segments after the present one
    posted_until: int = 0
    paid_until: int = 0
    posted: int = 0
    held: int = 0
    seq: int = 0  # of the last heartbeat
    final: str = ""  # the code with which its extension was refused
    work: str = ""  # namespace/name of that allocation, for statements after its deletion
    refunded: int = 0  # refunds by hand, which `posted` does not include
    state: LeaseState = LeaseState.OPEN
    closed_at: int = 0
    written_off: int = 0  # the part of `posted` that the account could not pay
    measured: int | None = None  # the run time reported at its end, by which it was settled
    opened_by: str = ""  # the actor who opened it by name; loaded only where it matters

    @property
    def name(self) -> str:
        return lease_name(self.id)

    @property
    def turns_at(self) -> int:
        """The end of the present segment."""
        return self.paid_until - sum(micros for _, micros in self.ahead) if self.ahead else self.paid_until

    @property
    def open_segments(self) -> tuple[Segment, ...]:
        """The segments that are paid and not posted yet."""
        rest = self.turns_at - self.posted_until
        return ((self.rate, rest), *self.ahead) if rest > 0 else self.ahead

    @property
    def last_rate(self) -> int:
        """The rate of the last segment."""
        return self.ahead[-1][0] if self.ahead else self.rate

    def rate_at(self, now: int) -> int:
        """The rate of the segment at a moment; before and after all segments, that of the nearest."""
        if not self.ahead:
            return self.rate
        begin, rate = self.turns_at, self.rate
        for following, micros in self.ahead:
            if now < begin:
                break
            begin, rate = begin + micros, following
        return rate

    def between(self, begin: int, end: int) -> int:
        """The cost of the time between two moments, neither of which is before the present segment."""
        if not self.ahead:
            return cost(self.rate, end - self.since) - cost(self.rate, begin - self.since)
        segments = ((self.rate, self.turns_at - self.since), *self.ahead)
        return _cost_of(segments, end - self.since) - _cost_of(segments, begin - self.since)

    def cost_of_more(self, rate: int, micros: int) -> int:
        """The growth of the hold when `lengthen` adds this time at a rate."""
        if not self.ahead:
            if rate != self.rate:
                return cost(rate, micros)
            length = self.paid_until - self.since
            return cost(rate, length + micros) - cost(rate, length)
        last, length = self.ahead[-1]
        if rate != last and len(self.ahead) < AHEAD_MAX:
            return cost(rate, micros)
        return cost(min(rate, last), length + micros) - cost(last, length)

    def lengthen(self, rate: int, micros: int) -> None:
        """Add time at the end, at a rate. Beyond the maximum of segments the last one grows, at the lower of the two
        rates: the account pays neither more than was held nor more than the price."""
        if self.ahead:
            last, length = self.ahead[-1]
            if rate == last or len(self.ahead) >= AHEAD_MAX:
                self.ahead = (*self.ahead[:-1], (min(rate, last), length + micros))
            else:
                self.ahead = (*self.ahead, (rate, micros))
        elif rate != self.rate:
            self.ahead = ((rate, micros),)
        self.paid_until += micros
        if self.ahead and self.turns_at <= self.posted_until:
            self.turn()

    def turn(self) -> None:
        """End the present segment and begin the next one."""
        turned, (following, *rest) = self.turns_at, self.ahead
        if length := turned - self.since:
            self.past = (*self.past, (self.rate, length))
        self.since, self.rate, self.ahead = turned, following[0], tuple(rest)

    def shift(self, micros: int) -> None:
        """Skip an unpaid gap: the present segment continues after it, so that late extensions add no past segments."""
        self.since += micros
        self.posted_until += micros
        self.paid_until += micros

    @property
    def paid(self) -> int:
        """The amount that its account paid for it."""
        return self.posted - self.written_off

    @property
    def posted_micros(self) -> int:
        """The posted time."""
        return sum(micros for _, micros in self.past) + max(0, self.posted_until - self.since)

    def longest(self, now: int) -> int:
        """The longest time that it can have run by now, and at least the posted time if the clock has gone back."""
        return max(0, now - self.opened_at, self.posted_micros if self.started_at else 0)

    def cost_of(self, micros: int) -> int:
        """The cost of this run time, at the rates of the segments in order; beyond them, at the last rate."""
        return _cost_of((*self.past, (self.rate, self.turns_at - self.since), *self.ahead), micros)


def _cost_of(segments: Sequence[Segment], micros: int) -> int:
    """The cost of the first `micros` of these segments; the last one has no end."""
    total = 0
    for rate, length in segments[:-1]:
        some = min(micros, length)
        total += cost(rate, some)
        micros -= some
    return total + cost(segments[-1][0], micros)


class Grant(Struct, frozen=True):
    """The answer to an extension: the time until which the lease is paid, and whether and why it is final."""

    lease: int
    paid_until: int
    micros: int
    final: bool = False
    reason: str = ""
    rate: int = 0  # now


def lease_name(number: int) -> str:
    return f"lease-{number}"


def lease_number(name: str) -> int | None:
    prefix, _, digits = name.partition("-")
    return int(digits) if prefix == "lease" and digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def fenced(lease: str) -> Refusal:
    """Refuse an extension of a lease that is not open."""
    return Refusal(Code.FENCED, f"{lease} is closed", "Its work must have ended; open a new lease to run again.")
