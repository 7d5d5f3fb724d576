"""A lease: the paid right to run until a time. What it may still cost is held on its account.

Its time comes in segments, each of which keeps the rate at which it was held, whatever becomes of the price:

    past                      the present one                                ahead
    (rate, micros) … │ since ── posted_until ────── turns_at │ (rate, micros) … (rate, micros) │ paid_until
    posted           │ posted             held, at `rate`    │ held                            │

The cost of a segment is counted from where it began, so that fractions of a nanocredit are neither lost nor gained
however often it is extended. Times are microseconds since 1970, by the database's clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct

from bursar.core.values.money import cost
from bursar.core.values.refusal import Code, Refusal

Segment: TypeAlias = tuple[int, int]  # a rate, and for how many microseconds

AHEAD_MAX: Final = 64  # segments that follow the present one: prices do not change so often within what is paid ahead
FROZEN = "SpendRateExceeded"  # that work stands still, because its account spends too fast


class Mode(StrEnum):
    STRICT = "strict"  # each beat posts what has passed and pays the next window
    RESERVE = "reserve"  # a larger window, renewed when half of it is used: fewer writes


class LeaseState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"  # it ended, and was settled
    LAPSED = "lapsed"  # its time ran out unextended: all that was held was posted, until somebody knows better


class Lease(Struct):
    """One per placement, or one that somebody asked for by name (`job`)."""

    id: int
    account: int
    job: str
    rate: int = 0
    window: int = 0  # how far each beat pays ahead
    amounts: Mapping[str, int] = {}  # what is priced
    klass: str = ""
    gpus: int = 0  # thousandths
    discount: int = 0
    mode: Mode = Mode.STRICT
    uid: str = ""  # of the allocation, whose placement on `node` in `epoch` this pays for
    epoch: int = 0
    node: str = ""
    opened_at: int = 0
    started_at: int = 0  # 0 until it runs: then paid time begins
    since: int = 0  # where the present segment began, without time that nobody paid for
    past: tuple[Segment, ...] = ()  # that are posted
    ahead: tuple[Segment, ...] = ()  # that are held, and follow the present one
    posted_until: int = 0
    paid_until: int = 0
    posted: int = 0
    held: int = 0
    seq: int = 0  # of the last beat
    final: str = ""  # why it will not be extended
    work: str = ""  # namespace/name of that allocation, to be told after it is gone
    refunded: int = 0  # what somebody gave back of what it cost; it is beside what is posted
    state: LeaseState = LeaseState.OPEN
    closed_at: int = 0
    written_off: int = 0  # of what was posted, what nobody could pay
    measured: int | None = None  # how long it ran, where whoever ended it said so: then it is settled
    opened_by: str = ""  # who asked for it by name; known while it is new, and then asked for where it matters

    @property
    def name(self) -> str:
        return lease_name(self.id)

    @property
    def turns_at(self) -> int:
        """Until when the present segment lasts."""
        return self.paid_until - sum(micros for _, micros in self.ahead) if self.ahead else self.paid_until

    @property
    def open_segments(self) -> tuple[Segment, ...]:
        """The time that is paid and not posted, each part with its rate."""
        rest = self.turns_at - self.posted_until
        return ((self.rate, rest), *self.ahead) if rest > 0 else self.ahead

    @property
    def last_rate(self) -> int:
        """At which the last of its time is held."""
        return self.ahead[-1][0] if self.ahead else self.rate

    def rate_at(self, now: int) -> int:
        """The rate of the segment that this moment falls in; before and after them all, that of the nearest."""
        if not self.ahead:
            return self.rate
        begin, rate = self.turns_at, self.rate
        for following, micros in self.ahead:
            if now < begin:
                break
            begin, rate = begin + micros, following
        return rate

    def between(self, begin: int, end: int) -> int:
        """What the time between two moments costs, neither of which lies before the present segment."""
        if not self.ahead:
            return cost(self.rate, end - self.since) - cost(self.rate, begin - self.since)
        segments = ((self.rate, self.turns_at - self.since), *self.ahead)
        return _cost_of(segments, end - self.since) - _cost_of(segments, begin - self.since)

    def cost_of_more(self, rate: int, micros: int) -> int:
        """By how much the hold grows when so long is added at a rate; see `lengthen`."""
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
        """Add so long at the end, at a rate. Where there are too many segments already, the last one takes it, and the
        lower rate of the two is that of both: nobody pays more than was held, nor more than the price."""
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
        """The present segment is over: the next one begins."""
        turned, (following, *rest) = self.turns_at, self.ahead
        if length := turned - self.since:
            self.past = (*self.past, (self.rate, length))
        self.since, self.rate, self.ahead = turned, following[0], tuple(rest)

    def shift(self, micros: int) -> None:
        """Pass over time that nobody paid for: what is paid counts from later on. The same rate goes on after it, so
        that a lease that is often extended late has no long past."""
        self.since += micros
        self.posted_until += micros
        self.paid_until += micros

    @property
    def paid(self) -> int:
        """What its account paid for it."""
        return self.posted - self.written_off

    @property
    def posted_micros(self) -> int:
        """How long was posted for."""
        return sum(micros for _, micros in self.past) + max(0, self.posted_until - self.since)

    def longest(self, now: int) -> int:
        """For how long it can have run by now. What was posted has passed, should our clock have gone back since."""
        return max(0, now - self.opened_at, self.posted_micros if self.started_at else 0)

    def cost_of(self, micros: int) -> int:
        """What so long a run costs, at the rates at which it was paid, one after another; beyond them, at the last."""
        return _cost_of((*self.past, (self.rate, self.turns_at - self.since), *self.ahead), micros)


def _cost_of(segments: Sequence[Segment], micros: int) -> int:
    """What the first `micros` of these segments cost; the last one has no end."""
    total = 0
    for rate, length in segments[:-1]:
        some = min(micros, length)
        total += cost(rate, some)
        micros -= some
    return total + cost(segments[-1][0], micros)


class Grant(Struct, frozen=True):
    """Until when a lease is paid, and how long that is from now; whether it is the last, and why."""

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
    return Refusal(
        Code.FENCED, f"{lease} is closed", "What it paid for must have ended; open a new lease to run again."
    )
