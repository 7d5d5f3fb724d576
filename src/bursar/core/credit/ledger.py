"""The book of a batch: accounts and leases that were read under locks, and what has been decided on them so far.

Every movement of money is an entry that names the account that is debited and the one that is credited, so the sum over
all accounts is zero. Holding and releasing move nothing: they only say what of a balance is spoken for. A rule checks
everything first and only then writes: what is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import Struct

from bursar.core.credit.account import (
    ADJUSTMENTS,
    REVENUE,
    TOPUPS,
    WRITE_OFF,
    Account,
    AccountStatus,
    beyond_the_day,
    closed,
    day_of,
    posted_on,
    short_of_credit,
    tokens_at,
    too_fast,
    too_many_gpus,
    too_much_to_take,
)
from bursar.core.credit.account_change import amend
from bursar.core.credit.drift import Drift, crosses
from bursar.core.credit.lease import Grant, Lease, LeaseState, Mode, fenced
from bursar.core.credit.price import PriceList, Unpriced
from bursar.core.values.money import AMOUNT_MAX, cost, credits_of
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import counted

RECONCILER = "system:reconciliation"  # who takes again what came back twice


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
    ACCOUNT_DRIFT = "credit.account-drift"


class LedgerEvent(Struct, frozen=True):
    """Something that the owner of an account is told, once it is committed."""

    news: News
    account: int
    amount: int = 0
    lease: int = 0
    reason: str = ""


@dataclass(slots=True)
class Ledger:
    now: int
    prices: PriceList
    accounts: dict[int, Account] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(()))  # for new leases
    # What is to be saved.
    entries: list[Entry] = field(default_factory=list)
    events: list[LedgerEvent] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  # accounts
    opened: set[int] = field(default_factory=set)  # leases
    moved: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    refunded: set[int] = field(default_factory=set)  # leases of which something was given back by hand

    # Money that comes and goes.

    def top_up(
        self, account: Account, amount: int, *, request: str = "", actor: str = "", reason: str = ""
    ) -> Refusal | None:
        if amount <= 0:
            return Refusal(Code.INVALID, "a top-up must be more than nothing")
        if account.status is AccountStatus.CLOSED:
            return closed(account)
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        self._give(account, TOPUPS, Entry(Type.TOPUP, 0, 0, amount, request=request, actor=actor, reason=reason))
        self.events.append(LedgerEvent(News.TOPPED_UP, account.id, amount))
        return None

    def refund(
        self,
        account: Account,
        amount: int,
        *,
        lease: Lease | None = None,
        request: str = "",
        actor: str = "",
        reason: str = "",
    ) -> Refusal | None:
        """Give back what was spent; of a lease, never more than it cost."""
        if amount <= 0:
            return Refusal(Code.INVALID, "a refund must be more than nothing")
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        if lease is not None and (refusal := beyond_the_cost(lease, amount)):
            return refusal
        number = lease.id if lease is not None else 0
        entry = Entry(Type.REFUND, 0, 0, amount, number, request=request, actor=actor, reason=reason)
        self._give(account, REVENUE, entry)
        if lease is not None:
            self._repay(lease, amount)
        return None

    def _repay(self, lease: Lease, amount: int) -> None:
        lease.refunded += amount
        (self.refunded if lease.state is LeaseState.OPEN else self.moved).add(lease.id)

    def adjust(
        self, account: Account, amount: int, *, lease: int = 0, request: str = "", actor: str = "", reason: str = ""
    ) -> Refusal | None:
        """Raise a balance, or lower it; never below what is held and what may be owed."""
        if amount == 0:
            return Refusal(Code.INVALID, "an adjustment must not be nothing")
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        if amount < 0 and (refusal := too_much_to_take(account, -amount)):
            return refusal
        entry = Entry(Type.ADJUSTMENT, 0, 0, abs(amount), lease, request=request, actor=actor, reason=reason)
        if amount > 0:
            self._give(account, ADJUSTMENTS, entry)
        else:
            self._take(account, ADJUSTMENTS, entry)
            self._tell_if_low(account, -amount)
        return None

    def amend(self, account: Account, changes: Mapping[str, Any]) -> Refusal | None:
        """Change its standing and limits. Whose balance is low from then on is told so, as if it had fallen."""
        was_low = account.is_low
        if refusal := amend(account, changes, self.now):
            return refusal
        self.changed.add(account.id)
        if account.is_low and not was_low:
            self.events.append(LedgerEvent(News.LOW, account.id, account.available))
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

    def lacking(self, leases: Iterable[Lease]) -> Refusal | None:
        """Why these cannot be opened all together. Nothing is changed: afterwards each of them can be, or none is."""
        needs: dict[int, int] = {}
        gpus: dict[int, int] = {}
        for lease in leases:
            rate = self.prices.rate(lease.amounts, lease.klass, self.now, lease.discount)
            if isinstance(rate, Unpriced):
                return unpriced(rate)
            needs[lease.account] = needs.get(lease.account, 0) + cost(rate, lease.window)
            gpus[lease.account] = gpus.get(lease.account, 0) + lease.gpus
        for account, need in needs.items():
            if refusal := self._admission(self.accounts[account], gpus[account], need):
                return refusal
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
        lease.shift(self.now - lease.posted_until)
        lease.started_at = self.now
        self.moved.add(lease.id)

    def heartbeat(self, lease: Lease, seq: int, *, running: bool = True) -> Grant | Refusal:
        """Post what has passed, and pay what is missing of the next window, at the price of now. What is paid already
        keeps its rate. A beat that came before is answered as it was."""
        if lease.state is not LeaseState.OPEN:
            return fenced(lease.name)
        if seq < lease.seq:
            return Refusal(Code.STALE, f"{lease.name}: beat {seq} came after beat {lease.seq}")
        self._set_back(lease)
        if seq == lease.seq:
            return self._grant(lease)
        if not running and not lease.started_at:
            return Grant(lease.id, self.now + lease.window, lease.window, rate=lease.rate)
        self.start(lease)
        if lease.mode is Mode.RESERVE and lease.paid_until - self.now > lease.window // 2 and not lease.final:
            return self._grant(lease)
        lease.seq = seq
        self._extend(lease, max(self.now, lease.posted_until) + lease.window)
        return self._grant(lease)

    def extend(self, lease: Lease, delta: int, latest: int) -> Grant | Refusal:
        """Pay so much more time, up to `latest`, at the price of now. What is refused leaves the lease as it is paid:
        somebody asked for too much, and may ask for less."""
        if lease.state is not LeaseState.OPEN:
            return fenced(lease.name)
        self._set_back(lease)
        until = min(max(self.now, lease.paid_until) + delta, max(latest, lease.paid_until))
        final, told = lease.final, len(self.events)
        refusal = self._extend(lease, until)
        if refusal is not None:
            lease.final = final
            del self.events[told:]
            return refusal
        return self._grant(lease)

    def _set_back(self, lease: Lease) -> None:
        """Our clock has gone back by more than a window, as when it was wrong before: what is paid and not posted
        counts from now on. Else it would run for nothing until the clock is there again."""
        if not lease.started_at or lease.posted_until - self.now <= lease.window:
            return
        if paid := lease.posted_until - lease.since:
            lease.past = (*lease.past, (lease.rate, paid))
        lease.since = lease.posted_until
        lease.shift(self.now - lease.posted_until)
        held = lease.between(
            lease.posted_until, lease.paid_until
        )  # never more than before, and a fraction less at most
        self._hold(self.accounts[lease.account], held - lease.held)
        lease.held = held
        self.moved.add(lease.id)

    def _extend(self, lease: Lease, until: int) -> Refusal | None:
        account = self.accounts[lease.account]
        self._post(lease, account, self.now)
        self.moved.add(lease.id)
        rate = self.prices.rate(lease.amounts, lease.klass, self.now, lease.discount)
        if isinstance(rate, Unpriced):
            return self._refuse(lease, unpriced(rate))
        gap = max(0, self.now - lease.posted_until)  # that nobody paid for
        added = max(0, until - lease.paid_until - gap)
        more = lease.cost_of_more(rate, added)
        refusal = (
            closed(account)
            or (beyond_the_day(account, more, self.now) if account.stop_at_cap else None)
            or too_fast(account, more, self.now)
            or (short_of_credit(account, more) if more > 0 else None)
        )
        if refusal is not None:
            return self._refuse(lease, refusal)
        lease.shift(gap)
        if added:
            lease.lengthen(rate, added)
        lease.held, lease.final = lease.held + more, ""
        self._hold(account, more)
        return None

    def _refuse(self, lease: Lease, refusal: Refusal) -> Refusal:
        """It may use what is paid. Should there be credit again before that is over, it goes on."""
        if not lease.final:
            self.events.append(LedgerEvent(News.EXHAUSTED, lease.account, lease.held, lease.id, str(refusal.code)))
        lease.final = str(refusal.code)
        return refusal

    def _grant(self, lease: Lease) -> Grant:
        micros = max(0, lease.paid_until - self.now)
        return Grant(lease.id, lease.paid_until, micros, bool(lease.final), lease.final, lease.rate_at(self.now))

    def close(self, lease: Lease, measured: int | None = None, state: LeaseState = LeaseState.CLOSED) -> int:
        """Settle it: by what was measured, else by our own clock; the rest of what is held is free again. What could
        not be taken is returned: it is written off."""
        account = self.accounts[lease.account]
        missing = 0
        if lease.started_at:
            if measured is None:
                self._post(lease, account, self.now)
            else:
                used = max(0, measured)
                if (unposted := used - lease.posted_micros) > 0:
                    self._post(lease, account, lease.posted_until + unposted, reason="measured")
                missing = self._settle(lease, account, used)
        self._hold(account, -lease.held)
        account.gpus -= lease.gpus
        lease.held, lease.state, lease.closed_at, lease.measured = 0, state, self.now, measured
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
        used = max(0, measured)
        difference = lease.cost_of(used) - lease.posted
        if difference:
            self._settle(lease, account, used, Type.ADJUSTMENT)
            self.moved.add(lease.id)
        if abs(difference) > drift:
            self.events.append(LedgerEvent(News.DRIFT, account.id, difference, lease.id))
        return difference

    def drift(self, account: Account, before: Drift, more: int, *, limit: int, hours: int) -> bool:
        """Alert the owner of an account whose adjustments, `more` on top of `before`, come to more than `limit` in so
        many hours; return whether an alert was due."""
        if not crosses(before, more, limit):
            return False
        reason = f"more than {counted(credits_of(limit), 'credit')} in {hours} h"
        self.events.append(LedgerEvent(News.ACCOUNT_DRIFT, account.id, before.amount + more, reason=reason))
        return True

    def _settle(self, lease: Lease, account: Account, used: int, type_: Type = Type.DEBIT) -> int:
        """Bring what was posted to what so long a run really cost; what nobody can pay is written off."""
        actual = lease.cost_of(used)
        if actual < lease.posted:
            self._give_back(lease, account, lease.posted - actual)
            return 0
        due = actual - lease.posted
        payable = min(due, max(0, account.available))
        if payable:
            end = lease.posted_until + max(0, used - lease.posted_micros)
            entry = Entry(
                type_, 0, 0, payable, lease.id, lease.seq, lease.rate, lease.posted_until, end, reason="measured"
            )
            self._take(account, REVENUE, entry)
        if missing := due - payable:
            entry = Entry(Type.ADJUSTMENT, WRITE_OFF, REVENUE, missing, lease.id, rate=lease.rate, reason="not payable")
            self.entries.append(entry)
            lease.written_off += missing
            # Whoever ran out of credit has a grace to end in, which nobody pays for: that is no surprise.
            if not lease.final:
                self.events.append(LedgerEvent(News.DRIFT, account.id, missing, lease.id, "written off"))
        lease.posted = actual
        return due - payable

    def _give_back(self, lease: Lease, account: Account, amount: int) -> None:
        """What was written off is not written off any more; only what the account paid itself comes back to it, and
        nothing that somebody refunded before."""
        lease.posted -= amount
        if never_paid := min(amount, lease.written_off):
            entry = Entry(Type.ADJUSTMENT, REVENUE, WRITE_OFF, never_paid, lease.id, rate=lease.rate, reason="measured")
            self.entries.append(entry)
            lease.written_off -= never_paid
        if paid := amount - never_paid:
            entry = Entry(Type.REFUND, 0, 0, paid, lease.id, rate=lease.rate, reason="measured")
            self._give(account, REVENUE, entry)
        self._take_again(lease, account, paid)

    def _take_again(self, lease: Lease, account: Account, came: int) -> None:
        """Of what just came back, what somebody had given back by hand already."""
        amount = min(came, lease.refunded - lease.paid)
        if amount > 0:
            entry = Entry(Type.ADJUSTMENT, 0, 0, amount, lease.id, actor=RECONCILER, reason="refunded before")
            self._take(account, REVENUE, entry)
            self._repay(lease, -amount)

    # How money moves.

    def _post(self, lease: Lease, account: Account, until: int, reason: str = "") -> None:
        """What has passed of the paid time is spent, segment by segment: each entry has one rate."""
        end = min(until, lease.paid_until)
        if end <= lease.posted_until or not lease.started_at:
            return
        while lease.ahead and lease.turns_at <= end:
            self._spend(lease, account, lease.turns_at, reason)
            lease.turn()
        if end > lease.posted_until:
            self._spend(lease, account, end, reason)
        self.moved.add(lease.id)

    def _spend(self, lease: Lease, account: Account, end: int, reason: str) -> None:
        """Of the present segment."""
        amount = cost(lease.rate, end - lease.since) - cost(lease.rate, lease.posted_until - lease.since)
        if amount:
            self._hold(account, -amount)
            entry = Entry(
                Type.DEBIT, 0, 0, amount, lease.id, lease.seq, lease.rate, lease.posted_until, end, reason=reason
            )
            self._take(account, REVENUE, entry)
        lease.held -= amount
        lease.posted += amount
        lease.posted_until = end

    def _hold(self, account: Account, more: int) -> None:
        """Speak for so much more of the balance, which is spent from the spend rate as well."""
        account.held += more
        if account.spend_rate_max is not None and more > 0:
            account.tokens = tokens_at(account, self.now) - more
            account.tokens_at = max(account.tokens_at, self.now)
        self.changed.add(account.id)
        self._tell_if_low(account, more)

    def _tell_if_low(self, account: Account, less: int) -> None:
        low = account.low_balance
        if low is not None and account.available < low <= account.available + less:
            self.events.append(LedgerEvent(News.LOW, account.id, account.available))

    def _take(self, account: Account, to: int, entry: Entry) -> None:
        entry.debit, entry.credit = account.id, to
        account.posted -= entry.amount
        if entry.type is Type.DEBIT:
            day = day_of(self.now, account.time_zone)
            account.day_posted, account.day = min(posted_on(account, day) + entry.amount, 2 * AMOUNT_MAX), day
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
    command = f"bursar price set {what.resource} CREDITS" + (f" --class {what.klass}" if what.klass else "")
    return Refusal(Code.UNPRICED, f"there is no price for {name}", f"{known}A billing admin sets one: {command}")


def beyond_the_cost(lease: Lease, amount: int) -> Refusal | None:
    """Whether so much is more than is left of what a lease cost."""
    left = lease.paid - lease.refunded
    if amount <= left:
        return None
    cause = Cause(
        "LimitExceeded", f"refunds of {lease.name}", "amount", "refund", lease.name, credits_of(lease.paid),
        credits_of(lease.refunded), credits_of(amount),
    )  # fmt: skip
    return Refusal(
        Code.UNPROCESSABLE,
        f"{lease.name} cost {counted(credits_of(lease.paid), 'credit')}, of which {credits_of(lease.refunded)}"
        f" are refunded: {credits_of(amount)} cannot be",
        f"Refund {counted(credits_of(left), 'credit')} or less; for goodwill, leave the lease out." if left > 0
        else "For goodwill, leave the lease out.",
        (cause,),
    )  # fmt: skip


def too_much(account: Account) -> Refusal:
    return Refusal(Code.INVALID, f"account {account.name} cannot hold more than {credits_of(AMOUNT_MAX)} credits")
