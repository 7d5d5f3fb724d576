"""The double-entry ledger: decides all credit commands of one batch on accounts and leases read under locks.

Every movement of credit is an entry with a debited and a credited account, so the sum over all accounts is zero. Holds
move no credit; they reserve a part of a balance. Every command checks all limits before it changes anything, so a
refused command has no effect.
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

RECONCILER = "system:reconciliation"  # the actor of corrections of double refunds


class Type(StrEnum):
    """The type of a ledger entry."""

    TOPUP = "topup"  # credit added by a payment or a billing admin
    DEBIT = "debit"  # the cost of leased time
    REFUND = "refund"  # credit returned for leased time
    ADJUSTMENT = "adjustment"  # a correction by hand or by reconciliation


class Entry(Struct):
    """One immutable entry of the ledger: `amount` moves from account `debit` to account `credit`."""

    type: Type
    debit: int
    credit: int
    amount: int
    lease: int = 0
    seq: int = 0
    rate: int = 0
    begin: int = 0  # the leased time that it pays for
    end: int = 0
    request: str = ""
    actor: str = ""
    reason: str = ""


class News(StrEnum):
    """The type of a notification about an account."""

    TOPPED_UP = "credit.topped-up"  # the account was topped up
    LOW = "credit.low"  # the available credit fell below the low-balance threshold
    EXHAUSTED = "credit.exhausted"  # the extension of a lease was refused
    DRIFT = "credit.drift"  # reconciliation changed the cost of a lease by more than the limit
    ACCOUNT_DRIFT = "credit.account-drift"  # the adjustments of the account exceed the limit of the period


class LedgerEvent(Struct, frozen=True):
    """A notification for the owner of an account, sent after the commit."""

    news: News
    account: int
    amount: int = 0
    lease: int = 0
    reason: str = ""


@dataclass(slots=True)
class Ledger:
    """The accounts and leases of one batch, and the entries and events of the commands decided so far."""

    now: int
    prices: PriceList
    accounts: dict[int, Account] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(()))  # for new leases
    # To be saved.
    entries: list[Entry] = field(default_factory=list)
    events: list[LedgerEvent] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  # accounts
    opened: set[int] = field(default_factory=set)  # leases
    moved: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    refunded: set[int] = field(default_factory=set)  # leases with a refund by hand

    # Top-ups, refunds and adjustments.

    def top_up(
        self, account: Account, amount: int, *, request: str = "", actor: str = "", reason: str = ""
    ) -> Refusal | None:
        if amount <= 0:
            return Refusal(Code.INVALID, "a top-up must be more than 0")
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
        """Return spent credit; for a lease, at most its cost."""
        if amount <= 0:
            return Refusal(Code.INVALID, "a refund must be more than 0")
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
        """Raise or lower a balance; never below the holds and the credit limit."""
        if amount == 0:
            return Refusal(Code.INVALID, "an adjustment must not be 0")
        if account.posted + amount > AMOUNT_MAX:
            return too_much(account)
        if amount < 0 and (refusal := too_much_to_take(account, -amount)):
            return refusal
        entry = Entry(Type.ADJUSTMENT, 0, 0, abs(amount), lease, request=request, actor=actor, reason=reason)
        if amount > 0:
            self._give(account, ADJUSTMENTS, entry)
        else:
            self._take(account, ADJUSTMENTS, entry)
            self._notify_if_low(account, -amount)
        return None

    def amend(self, account: Account, changes: Mapping[str, Any]) -> Refusal | None:
        """Change an account's status and limits. A low balance by a new threshold notifies the owner, too."""
        was_low = account.is_low
        if refusal := amend(account, changes, self.now):
            return refusal
        self.changed.add(account.id)
        if account.is_low and not was_low:
            self.events.append(LedgerEvent(News.LOW, account.id, account.available))
        return None

    # Leases.

    def open(self, lease: Lease, *, started: bool) -> Refusal | None:
        """Open a lease and hold its first window, if no limit would be exceeded. `lease` has no number yet."""
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
        """Refuse leases that cannot be opened all together; nothing is changed. If None, each of them can be opened."""
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
        """Begin the paid time of a lease: its work runs from now on."""
        if lease.started_at or lease.state is not LeaseState.OPEN:
            return
        lease.shift(self.now - lease.posted_until)
        lease.started_at = self.now
        self.moved.add(lease.id)

    def heartbeat(self, lease: Lease, seq: int, *, running: bool = True) -> Grant | Refusal:
        """Post the time that has passed, and pay the rest of the next window at the present price. Paid time keeps its
        rate. A repeated heartbeat gets the same answer."""
        if lease.state is not LeaseState.OPEN:
            return fenced(lease.name)
        if seq < lease.seq:
            return Refusal(Code.STALE, f"{lease.name}: heartbeat {seq} came after heartbeat {lease.seq}")
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
        """Pay more time on request, up to `latest`, at the present price. A refusal leaves the lease extendable: the
        caller may ask for less."""
        if lease.state is not LeaseState.OPEN:
            return fenced(lease.name)
        self._set_back(lease)
        until = min(max(self.now, lease.paid_until) + delta, max(latest, lease.paid_until))
        final, events = lease.final, len(self.events)
        refusal = self._extend(lease, until)
        if refusal is not None:
            lease.final = final
            del self.events[events:]
            return refusal
        return self._grant(lease)

    def _set_back(self, lease: Lease) -> None:
        """After the clock has gone back by more than a window, count the paid time from now on. Otherwise the work
        would run for free until the clock catches up."""
        if not lease.started_at or lease.posted_until - self.now <= lease.window:
            return
        if paid := lease.posted_until - lease.since:
            lease.past = (*lease.past, (lease.rate, paid))
        lease.since = lease.posted_until
        lease.shift(self.now - lease.posted_until)
        held = lease.between(lease.posted_until, lease.paid_until)  # at most a fraction less than before
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
        gap = max(0, self.now - lease.posted_until)  # unpaid
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
        """Mark a lease as final: its work may use the paid time. An extension within that time revokes it."""
        if not lease.final:
            self.events.append(LedgerEvent(News.EXHAUSTED, lease.account, lease.held, lease.id, str(refusal.code)))
        lease.final = str(refusal.code)
        return refusal

    def _grant(self, lease: Lease) -> Grant:
        micros = max(0, lease.paid_until - self.now)
        return Grant(lease.id, lease.paid_until, micros, bool(lease.final), lease.final, lease.rate_at(self.now))

    def close(self, lease: Lease, measured: int | None = None, state: LeaseState = LeaseState.CLOSED) -> int:
        """Settle a lease by its measured time, else by the clock, and release the rest of its hold. Return the amount
        that the account could not pay, which is written off."""
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
        """End a lease that was not extended: post all its time. Reconciliation corrects it by measured usage."""
        account = self.accounts[lease.account]
        if lease.started_at:
            self._post(lease, account, lease.paid_until)
        self.close(lease, state=LeaseState.LAPSED)

    def reconcile(self, lease: Lease, measured: int, *, drift: int) -> int:
        """Correct the cost of an ended lease by its measured time, and return the difference. An amount that the
        account cannot pay is written off; a difference above `drift` notifies the owner."""
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
        """Alert the owner of an account whose adjustments, `before` and `more`, exceed `limit` in the period; return
        whether an alert was due."""
        if not crosses(before, more, limit):
            return False
        reason = f"more than {counted(credits_of(limit), 'credit')} in {hours} h"
        self.events.append(LedgerEvent(News.ACCOUNT_DRIFT, account.id, before.amount + more, reason=reason))
        return True

    def _settle(self, lease: Lease, account: Account, used: int, type_: Type = Type.DEBIT) -> int:
        """Bring the posted amount to the cost of the used time; write off what the account cannot pay."""
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
            # After running out of credit, work has a grace period to end in, which is expected to stay unpaid.
            if not lease.final:
                self.events.append(LedgerEvent(News.DRIFT, account.id, missing, lease.id, "written off"))
        lease.posted = actual
        return due - payable

    def _give_back(self, lease: Lease, account: Account, amount: int) -> None:
        """Reverse write-offs first; the account gets back only what it paid itself, minus earlier refunds by hand."""
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
        """Take back the part of a refund that had been refunded by hand before."""
        amount = min(came, lease.refunded - lease.paid)
        if amount > 0:
            entry = Entry(Type.ADJUSTMENT, 0, 0, amount, lease.id, actor=RECONCILER, reason="refunded before")
            self._take(account, REVENUE, entry)
            self._repay(lease, -amount)

    # Postings and holds.

    def _post(self, lease: Lease, account: Account, until: int, reason: str = "") -> None:
        """Post the paid time that has passed, one entry per segment."""
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
        """Post time of the present segment."""
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
        """Hold more of the balance, and take it from the spend-rate bucket as well."""
        account.held += more
        if account.spend_rate_max is not None and more > 0:
            account.tokens = tokens_at(account, self.now) - more
            account.tokens_at = max(account.tokens_at, self.now)
        self.changed.add(account.id)
        self._notify_if_low(account, more)

    def _notify_if_low(self, account: Account, less: int) -> None:
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
    """Refuse a lease of a device without a price in force."""
    name = f"{what.resource} of class {what.klass!r}" if what.klass else what.resource
    known = f"Prices exist for {', '.join(one or 'any class' for one in what.known)}. " if what.known else ""
    command = f"bursar price set {what.resource} CREDITS" + (f" --class {what.klass}" if what.klass else "")
    return Refusal(Code.UNPRICED, f"there is no price for {name}", f"{known}A billing admin sets one: {command}")


def beyond_the_cost(lease: Lease, amount: int) -> Refusal | None:
    """Refuse a refund beyond the cost of a lease minus its earlier refunds."""
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
        f" are refunded: {credits_of(amount)} more cannot be refunded",
        f"Refund {counted(credits_of(left), 'credit')} or less; for goodwill, leave the lease out." if left > 0
        else "For goodwill, leave the lease out.",
        (cause,),
    )  # fmt: skip


def too_much(account: Account) -> Refusal:
    """Refuse a balance beyond the largest amount that is stored."""
    return Refusal(Code.INVALID, f"account {account.name} cannot hold more than {credits_of(AMOUNT_MAX)} credits")
