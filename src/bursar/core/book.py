"""The book of a batch: accounts and leases that were read under locks, and what has been decided on them so far.

Every movement of money is an entry that names the account that is debited and the one that is credited, so the sum over
all accounts is zero. Holding and releasing move nothing: they only say what of a balance is spoken for. A rule checks
everything first and only then writes: what is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from bursar.core.account import (
    ADJUSTMENTS,
    REVENUE,
    TOPUPS,
    WRITE_OFF,
    Account,
    Status,
    beyond_the_day,
    closed,
    day_of,
    posted_on,
    short_of_credit,
    tokens_at,
    too_fast,
    too_many_gpus,
)
from bursar.core.lease import Grant, Lease, LeaseState, Mode, fenced
from bursar.core.money import AMOUNT_MAX, cost, credits_of
from bursar.core.price import PriceList, Unpriced
from bursar.core.refusal import Code, Refusal


class Type(StrEnum):
    TOPUP = "topup"
    DEBIT = "debit"
    REFUND = "refund"
    ADJUSTMENT = "adjustment"


class Entry(Struct):
    """One immutable line: `amount` leaves `debit` and comes to `credit`."""

    type: Type
    debit: int
    credit: int
    amount: int
    lease: int = 0
    seq: int = 0
    rate: int = 0
    begin: int = 0  # the time that it pays for
    end: int = 0
    request: str = ""
    actor: str = ""
    reason: str = ""


class News(StrEnum):
    TOPPED_UP = "credit.topped-up"
    LOW = "credit.low"
    EXHAUSTED = "credit.exhausted"
    DRIFT = "credit.drift"


class Event(Struct, frozen=True):
    """Something that the owner of an account is told, once it is committed."""

    news: News
    account: int
    amount: int = 0
    lease: int = 0
    reason: str = ""


@dataclass(slots=True)
class Book:
    now: int
    prices: PriceList
    accounts: dict[int, Account] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(()))  # for new leases
    # What is to be saved.
    entries: list[Entry] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  # accounts
    opened: set[int] = field(default_factory=set)  # leases
    moved: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    # Money that comes and goes.

    def top_up(
        self, account: Account, amount: int, *, request: str = "", actor: str = "", reason: str = ""
    ) -> Refusal | None:
        if amount <= 0:
            return Refusal(Code.INVALID, "a top-up must be more than nothing")
        if account.status is Status.CLOSED:
            return closed(account)
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        self._give(account, TOPUPS, Entry(Type.TOPUP, 0, 0, amount, request=request, actor=actor, reason=reason))
        self.events.append(Event(News.TOPPED_UP, account.id, amount))
        return None

    def refund(
        self, account: Account, amount: int, *, lease: int = 0, request: str = "", actor: str = "", reason: str = ""
    ) -> Refusal | None:
        if amount <= 0:
            return Refusal(Code.INVALID, "a refund must be more than nothing")
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        entry = Entry(Type.REFUND, 0, 0, amount, lease, request=request, actor=actor, reason=reason)
        self._give(account, REVENUE, entry)
        return None

    def adjust(
        self, account: Account, amount: int, *, lease: int = 0, request: str = "", actor: str = "", reason: str = ""
    ) -> Refusal | None:
        """Raise a balance, or lower it; never below what is held and what may be owed."""
        if amount == 0:
            return Refusal(Code.INVALID, "an adjustment must not be nothing")
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        if amount < 0 and (refusal := short_of_credit(account, -amount)):
            return refusal
        entry = Entry(Type.ADJUSTMENT, 0, 0, abs(amount), lease, request=request, actor=actor, reason=reason)
        if amount > 0:
            self._give(account, ADJUSTMENTS, entry)
        else:
            self._take(account, ADJUSTMENTS, entry)
        return None

    # Leases.

    def open(self, lease: Lease, *, started: bool) -> Refusal | None:
        """Hold the first window, if every limit has room. `lease` has no number yet, and all that is asked for."""
        account = self.accounts[lease.account]
        rate = self.prices.rate(lease.amounts, lease.klass, self.now, lease.discount)
        if isinstance(rate, Unpriced):
            return unpriced(rate)
        need = cost(rate, lease.window)
        if refusal := self._admission(account, lease.gpus, need):
            return refusal
        lease.id, lease.rate, lease.held, lease.opened_at = next(self.numbers), rate, need, self.now
        lease.since = lease.posted_until = self.now
        lease.started_at = self.now if started else 0
        lease.paid_until = self.now + lease.window
        account.gpus += lease.gpus
        self._hold(account, need)
        self.leases[lease.id] = lease
        self.opened.add(lease.id)
        return None

    def _admission(self, account: Account, gpus: int, need: int) -> Refusal | None:
        return (
            closed(account)
            or too_many_gpus(account, gpus)
            or beyond_the_day(account, need, self.now)
            or too_fast(account, need, self.now)
            or short_of_credit(account, need)
        )

    def start(self, lease: Lease) -> None:
        """It runs from now on: its first window begins here."""
        if lease.started_at or lease.state is not LeaseState.OPEN:
            return
        lease.started_at = lease.since = lease.posted_until = self.now
        lease.paid_until = self.now + lease.window
        self.moved.add(lease.id)

    def beat(self, lease: Lease, seq: int, *, running: bool = True) -> Grant | Refusal:
        """Post what has passed, and pay the next window from now on. A beat that came before is answered as it was."""
        if lease.state is not LeaseState.OPEN:
            return fenced(lease.name)
        if seq < lease.seq:
            return Refusal(Code.STALE, f"{lease.name}: beat {seq} came after beat {lease.seq}")
        if seq == lease.seq:
            return self._grant(lease)
        if not running and not lease.started_at:
            return Grant(lease.id, self.now + lease.window, lease.window)
        self.start(lease)
        if lease.mode is Mode.RESERVE and lease.paid_until - self.now > lease.window // 2 and not lease.final:
            return self._grant(lease)
        lease.seq = seq
        self._extend(lease, max(self.now, lease.posted_until) + lease.window)
        return self._grant(lease)

    def extend(self, lease: Lease, delta: int, latest: int) -> Grant | Refusal:
        """Pay so much more time, up to `latest`; what is refused leaves the lease as it is paid."""
        if lease.state is not LeaseState.OPEN:
            return fenced(lease.name)
        until = min(max(self.now, lease.paid_until) + delta, max(latest, lease.paid_until))
        refusal = self._extend(lease, until)
        return refusal if refusal is not None else self._grant(lease)

    def _extend(self, lease: Lease, until: int) -> Refusal | None:
        account = self.accounts[lease.account]
        self._post(lease, account, self.now)
        self.moved.add(lease.id)
        rate = self.prices.rate(lease.amounts, lease.klass, self.now, lease.discount)
        if isinstance(rate, Unpriced):
            return self._refuse(lease, unpriced(rate))
        same = rate == lease.rate and lease.posted_until >= self.now
        begin = lease.posted_until if same else self.now
        held = lease.between(begin, until) if same else cost(rate, until - begin)
        more = held - lease.held
        # The bucket pays for time that was not paid before, and not for a dearer price of what was.
        new_time = cost(rate, max(0, until - max(lease.paid_until, self.now)))
        refusal = (
            closed(account)
            or (beyond_the_day(account, more, self.now) if account.stop_at_cap else None)
            or too_fast(account, new_time, self.now)
            or (short_of_credit(account, more) if more > 0 else None)
        )
        if refusal is not None:
            return self._refuse(lease, refusal)
        if not same:
            if paid := lease.posted_until - lease.since:
                lease.past = (*lease.past, (lease.rate, paid))
            lease.rate, lease.since, lease.posted_until = rate, begin, begin
        lease.paid_until, lease.held, lease.final = until, held, ""
        self._hold(account, more, new_time)
        return None

    def _refuse(self, lease: Lease, refusal: Refusal) -> Refusal:
        """It may use what is paid. Should there be credit again before that is over, it goes on."""
        if not lease.final:
            self.events.append(Event(News.EXHAUSTED, lease.account, lease.held, lease.id, str(refusal.code)))
        lease.final = str(refusal.code)
        return refusal

    def _grant(self, lease: Lease) -> Grant:
        micros = max(0, lease.paid_until - self.now)
        return Grant(lease.id, lease.paid_until, micros, bool(lease.final), lease.final)

    def close(self, lease: Lease, measured: int | None = None, state: LeaseState = LeaseState.CLOSED) -> int:
        """Settle it: by what was measured, else by our own clock; the rest of what is held is free again. What could
        not be taken is returned: it is written off."""
        account = self.accounts[lease.account]
        missing = 0
        if lease.started_at:
            if measured is None:
                self._post(lease, account, self.now)
            else:
                missing = self._settle(lease, account, lease.cost_of(max(0, measured)))
        self._hold(account, -lease.held)
        account.gpus -= lease.gpus
        lease.held, lease.state, lease.closed_at = 0, state, self.now
        self.ended.add(lease.id)
        return missing

    def lapse(self, lease: Lease) -> None:
        """Its time is over and nobody extended it: all of it is posted, until somebody knows what was used."""
        account = self.accounts[lease.account]
        if lease.started_at:
            self._post(lease, account, lease.paid_until)
        self.close(lease, state=LeaseState.LAPSED)

    def reconcile(self, lease: Lease, measured: int, *, drift: int) -> int:
        """Put right what was posted for a lease that has ended, by what was measured; by how much. What cannot be
        taken is written off, and more than `drift` is told."""
        account = self.accounts[lease.account]
        actual = lease.cost_of(max(0, measured))
        difference = actual - lease.posted
        if difference:
            self._settle(lease, account, actual, Type.ADJUSTMENT if difference > 0 else Type.REFUND)
            self.moved.add(lease.id)
        if abs(difference) > drift:
            self.events.append(Event(News.DRIFT, account.id, difference, lease.id))
        return difference

    def _settle(self, lease: Lease, account: Account, actual: int, type_: Type = Type.DEBIT) -> int:
        """Bring what was posted to what it really cost; what nobody can pay is written off."""
        if actual < lease.posted:
            entry = Entry(Type.REFUND, 0, 0, lease.posted - actual, lease.id, rate=lease.rate, reason="measured")
            self._give(account, REVENUE, entry)
            lease.posted = actual
            return 0
        due = actual - lease.posted
        from_hold = min(due, lease.held)
        payable = min(due, from_hold + max(0, account.available))
        if payable:
            self._hold(account, -from_hold)
            lease.held -= from_hold
            entry = Entry(
                type_, 0, 0, payable, lease.id, lease.seq, lease.rate, lease.posted_until, self.now, reason="measured"
            )
            self._take(account, REVENUE, entry)
        if missing := due - payable:
            entry = Entry(Type.ADJUSTMENT, WRITE_OFF, REVENUE, missing, lease.id, rate=lease.rate, reason="not payable")
            self.entries.append(entry)
            self.events.append(Event(News.DRIFT, account.id, missing, lease.id, "written off"))
        lease.posted = actual
        return due - payable

    # How money moves.

    def _post(self, lease: Lease, account: Account, until: int) -> None:
        """What has passed of the paid time is spent."""
        end = min(until, lease.paid_until)
        if end <= lease.posted_until or not lease.started_at:
            return
        amount = lease.between(lease.posted_until, end)
        if amount:
            self._hold(account, -amount)
            entry = Entry(Type.DEBIT, 0, 0, amount, lease.id, lease.seq, lease.rate, lease.posted_until, end)
            self._take(account, REVENUE, entry)
        lease.held -= amount
        lease.posted += amount
        lease.posted_until = end
        self.moved.add(lease.id)

    def _hold(self, account: Account, more: int, spent: int | None = None) -> None:
        """Speak for so much more of the balance; `spent` of the spend rate goes with it."""
        before = account.available
        account.held += more
        if account.spend_rate_max is not None and (cost_now := more if spent is None else spent) > 0:
            account.tokens, account.tokens_at = tokens_at(account, self.now) - cost_now, self.now
        self.changed.add(account.id)
        low = account.low_balance
        if low is not None and account.available < low <= before:
            self.events.append(Event(News.LOW, account.id, account.available))

    def _take(self, account: Account, to: int, entry: Entry) -> None:
        entry.debit, entry.credit = account.id, to
        account.posted -= entry.amount
        day = day_of(self.now, account.time_zone)
        account.day_posted, account.day = posted_on(account, day) + entry.amount, day
        self.changed.add(account.id)
        self.entries.append(entry)

    def _give(self, account: Account, by: int, entry: Entry) -> None:
        entry.debit, entry.credit = by, account.id
        account.posted += entry.amount
        self.changed.add(account.id)
        self.entries.append(entry)


def unpriced(what: Unpriced) -> Refusal:
    name = f"{what.resource} of class {what.klass!r}" if what.klass else what.resource
    known = f"There are prices for {', '.join(one or 'any class' for one in what.known)}. " if what.known else ""
    return Refusal(
        Code.UNPRICED, f"there is no price for {name}", f"{known}A billing admin sets one: POST /api/v1/prices"
    )


def too_much(account: Account) -> Refusal:
    return Refusal(Code.INVALID, f"account {account.name} cannot hold more than {credits_of(AMOUNT_MAX)} credits")
