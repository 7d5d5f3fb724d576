"""A lease: the paid right to run until a time. What it may still cost is held on its account.

    held = rate × (paid_until − posted_until), and all that was posted is rate × (posted_until − since)

Both are counted from where the present price began (`since`), so that fractions of a nanocredit are neither lost nor
gained however often it is extended. Times are microseconds since 1970, by the database's clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from bursar.core.money import MICROS, cost
from bursar.core.refusal import Code, Refusal

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
    since: int = 0  # from when on the present rate counts, without time that nobody paid for
    past: tuple[tuple[int, int], ...] = ()  # earlier rates, each with how long it was paid
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

    @property
    def name(self) -> str:
        return lease_name(self.id)

    def between(self, begin: int, end: int) -> int:
        """What this part of the time of the present rate costs."""
        return self.rate * (end - self.since) // MICROS - self.rate * (begin - self.since) // MICROS

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
        """What so long a run costs, at the rates at which it was paid, one after another."""
        total = 0
        for rate, length in self.past:
            some = min(micros, length)
            total += cost(rate, some)
            micros -= some
        return total + cost(self.rate, micros)


class Grant(Struct, frozen=True):
    """Until when a lease is paid, and how long that is from now; whether it is the last, and why."""

    lease: int
    paid_until: int
    micros: int
    final: bool = False
    reason: str = ""


def lease_name(number: int) -> str:
    return f"lease-{number}"


def lease_number(name: str) -> int | None:
    prefix, _, digits = name.partition("-")
    return int(digits) if prefix == "lease" and digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def fenced(lease: str) -> Refusal:
    return Refusal(
        Code.FENCED, f"{lease} is closed", "What it paid for must have ended; open a new lease to run again."
    )
