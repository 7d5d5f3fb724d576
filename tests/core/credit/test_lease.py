"""Leases and the book: what is held, posted and given back, to the last digit."""

from itertools import count

import pytest

from bursar.core.credit.account import WRITE_OFF, Account
from bursar.core.credit.lease import Grant, Lease, LeaseState
from bursar.core.credit.ledger import Ledger, News, Type
from bursar.core.credit.price import Price, PriceList
from bursar.core.values.money import MICROS, NANO, credits_of, nanocredits
from bursar.core.values.refusal import Code, Refusal

START = 1_700_000_000 * MICROS
GPU = "nvidia.com/gpu"


def book_of(balance: str = "50", *prices: Price, **account: object) -> Ledger:
    listed = prices or (Price(GPU, "h100", nanocredits("0.01"), 0),)
    rows = {100: Account(100, "physics", posted=nanocredits(balance), **account)}  # type: ignore[arg-type]
    return Ledger(START, PriceList.of(listed), rows, numbers=count(1))


def lease_of(gpus: int = 4, window: int = 15) -> Lease:
    return Lease(0, 100, "train", window=window * MICROS, amounts={GPU: gpus * 1000}, klass="h100", gpus=gpus * 1000)


def opened(ledger: Ledger, lease: Lease | None = None) -> Lease:
    lease = lease or lease_of()
    assert ledger.open(lease, started=True) is None
    return lease


def after(ledger: Ledger, seconds: float) -> None:
    ledger.now += round(seconds * MICROS)


def available(ledger: Ledger) -> str:
    return credits_of(ledger.accounts[100].available)


def test_eight_minutes_of_four_gpus_cost_what_the_walkthrough_says() -> None:
    ledger = book_of()
    lease = opened(ledger)
    assert available(ledger) == "49.4"
    after(ledger, 5)
    assert isinstance(ledger.heartbeat(lease, 1), Grant)
    assert available(ledger) == "49.2"
    for seq in range(2, 96):
        after(ledger, 5)
        ledger.heartbeat(lease, seq)
    after(ledger, 5)
    ledger.close(lease)
    assert credits_of(lease.posted) == "19.2"
    assert available(ledger) == "30.8"
    assert ledger.accounts[100].held == 0
    debits = [entry.amount for entry in ledger.entries if entry.type is Type.DEBIT]
    assert debits == [nanocredits("0.2")] * 96


@pytest.mark.parametrize("gpus", [1, 3, 7])
def test_fractions_are_neither_lost_nor_gained_however_often_it_is_extended(gpus: int) -> None:
    odd = Price(GPU, "h100", 333_333_337, 0)
    ledger = book_of("1000000", odd)
    lease = opened(ledger, lease_of(gpus))
    for seq in range(1, 200):
        after(ledger, 0.123457)
        ledger.heartbeat(lease, seq)
    ledger.close(lease)
    assert lease.posted == gpus * 333_333_337 * (ledger.now - START) // MICROS


def test_rates_that_are_kept_take_little_memory_whatever_is_asked_for() -> None:
    prices = PriceList.of([Price(GPU, "", nanocredits("0.01"), 0)])
    for number in range(20):
        made_up = {f"{'a' * 60}-{number}-{index}": 1000 for index in range(63)}
        assert prices.rate({GPU: 1000, **made_up}, "", START) == nanocredits("0.01")
    assert not prices._rates
    assert prices.rate({GPU: 1000}, "", START) == nanocredits("0.01")
    assert len(prices._rates) == 1


@pytest.mark.parametrize("wrong", [10**9, 3600])
def test_a_clock_that_was_wrong_for_a_while_gives_nothing_away(wrong: int) -> None:
    """One heartbeat extends it far ahead; from the next one on, all running work is paid again, a little at a time."""
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 5)
    ledger.heartbeat(lease, 1)
    after(ledger, 5 + wrong)
    ledger.heartbeat(lease, 2)
    after(ledger, 5 - wrong)
    for seq in range(3, 13):
        granted = ledger.heartbeat(lease, seq)
        assert isinstance(granted, Grant)
        assert 0 < granted.micros <= 15 * MICROS
        assert lease.held == lease.between(lease.posted_until, lease.paid_until) == nanocredits("0.6")
        after(ledger, 5)
    ledger.close(lease)
    # 5 s, then what was paid when the clock jumped, and ten times 5 s since it is right again.
    assert credits_of(lease.posted) == "2.8"
    assert ledger.accounts[100].held == 0
    assert sum(entry.amount for entry in ledger.entries) == lease.posted == lease.cost_of(lease.posted_micros)


def test_a_clock_that_was_wrong_leaves_extensions_that_are_asked_for_at_their_horizon() -> None:
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 10**9)
    assert isinstance(ledger.extend(lease, 5 * MICROS, ledger.now + 60 * MICROS), Grant)
    after(ledger, -(10**9))
    granted = ledger.extend(lease, 5 * MICROS, ledger.now + 60 * MICROS)
    assert isinstance(granted, Grant)
    assert granted.micros == 10 * MICROS


def test_a_measured_end_is_settled_exactly() -> None:
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 9)
    ledger.heartbeat(lease, 1)
    after(ledger, 3)
    ledger.close(lease, measured=10_500_000)
    assert credits_of(lease.posted) == "0.42"
    assert available(ledger) == "49.58"
    after(ledger, 5)
    shorter = opened(ledger)
    after(ledger, 9)
    ledger.heartbeat(shorter, 1)
    ledger.close(shorter, measured=4 * MICROS)
    assert credits_of(shorter.posted) == "0.16"
    assert ledger.entries[-1].type is Type.REFUND


def test_a_price_change_counts_for_what_is_paid_after_it() -> None:
    later = Price(GPU, "h100", nanocredits("0.02"), START + 7 * MICROS)
    ledger = book_of("50", Price(GPU, "h100", nanocredits("0.01"), 0), later)
    lease = opened(ledger)
    after(ledger, 5)
    ledger.heartbeat(lease, 1)
    after(ledger, 5)
    ledger.heartbeat(lease, 2)
    assert credits_of(lease.posted) == "0.4"
    assert credits_of(lease.held) == "0.8", "10 s that were paid before at the old price, and 5 s at the new one"
    assert lease.open_segments == ((nanocredits("0.04"), 10 * MICROS), (nanocredits("0.08"), 5 * MICROS))
    after(ledger, 12)
    ledger.close(lease)
    assert credits_of(lease.posted) == "0.96", "20 s at the old price, 2 s at the new one"
    assert lease.cost_of(22 * MICROS) == lease.posted
    assert [(entry.rate, entry.end - entry.begin) for entry in ledger.entries[2:]] == [
        (nanocredits("0.04"), 10 * MICROS),
        (nanocredits("0.08"), 2 * MICROS),
    ]


def test_who_cannot_pay_the_next_window_uses_what_is_paid_and_goes_on_when_topped_up() -> None:
    ledger = book_of("0.7")
    lease = opened(ledger)
    after(ledger, 5)
    grant = ledger.heartbeat(lease, 1)
    assert grant == Grant(
        lease.id, START + 15 * MICROS, 10 * MICROS, final=True, reason="insufficient_credit", rate=nanocredits("0.04")
    )
    assert ledger.top_up(ledger.accounts[100], NANO) is None
    grant = ledger.heartbeat(lease, 2)
    assert isinstance(grant, Grant)
    assert not grant.final


def test_who_is_brought_low_is_told_once_by_whatever_it_was() -> None:
    ledger = book_of("50", low_balance=nanocredits("20"))
    account = ledger.accounts[100]
    assert ledger.adjust(account, nanocredits("-30")) is None
    assert ledger.events == [], "20 are not below 20"
    assert ledger.adjust(account, nanocredits("-1")) is None
    assert ledger.adjust(account, nanocredits("-1")) is None
    opened(ledger)
    assert [(event.news, credits_of(event.amount)) for event in ledger.events] == [(News.LOW, "19")]


def test_a_heartbeat_that_is_repeated_changes_nothing_and_an_old_one_is_stale() -> None:
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 5)
    first = ledger.heartbeat(lease, 7)
    entries = len(ledger.entries)
    assert ledger.heartbeat(lease, 7) == first
    stale = ledger.heartbeat(lease, 6)
    assert isinstance(stale, Refusal)
    assert stale.code is Code.STALE
    assert len(ledger.entries) == entries


def test_what_lapses_is_posted_whole_and_what_was_not_used_comes_back() -> None:
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 60)
    ledger.lapse(lease)
    assert lease.state is LeaseState.LAPSED
    assert available(ledger) == "49.4"
    assert ledger.reconcile(lease, 5 * MICROS, drift=0) == -nanocredits("0.4")
    assert available(ledger) == "49.8"


def test_what_was_measured_beyond_what_is_there_is_written_off_and_told() -> None:
    ledger = book_of("0.6")
    lease = opened(ledger)
    after(ledger, 20)
    ledger.lapse(lease)
    ledger.reconcile(lease, 20 * MICROS, drift=0)
    assert available(ledger) == "0"
    assert credits_of(ledger.entries[-1].amount) == "0.2"
    assert [event.reason for event in ledger.events] == ["written off", ""]


def test_time_that_nobody_paid_for_is_not_posted_when_a_late_heartbeat_comes() -> None:
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 25)
    ledger.heartbeat(lease, 1)
    assert credits_of(lease.posted) == "0.6"
    assert lease.paid_until == ledger.now + 15 * MICROS
    after(ledger, 5)
    ledger.close(lease)
    assert credits_of(lease.posted) == "0.8"
    assert lease.posted_micros == 20 * MICROS


def test_who_is_often_late_has_no_long_past_and_pays_no_fraction_more_or_less() -> None:
    odd = Price(GPU, "h100", 333_333_337, 0)
    ledger = book_of("1000000", odd)
    lease = opened(ledger, lease_of(1, window=1))
    for _ in range(50):
        after(ledger, 1.123457)
        assert isinstance(ledger.extend(lease, MICROS, ledger.now + 60 * MICROS), Grant)
        assert lease.held == lease.between(lease.posted_until, lease.paid_until)
    after(ledger, 0.5)
    ledger.close(lease)
    assert lease.past == ()
    assert lease.posted_micros == 50_500_000
    assert lease.posted == lease.cost_of(50_500_000) == 333_333_337 * 50_500_000 // MICROS


def test_what_is_settled_says_for_how_long() -> None:
    ledger = book_of()
    lease = opened(ledger)
    after(ledger, 9)
    ledger.heartbeat(lease, 1)
    after(ledger, 8)
    ledger.close(lease, measured=10_500_000)
    settled = ledger.entries[-1]
    assert (settled.reason, settled.end - settled.begin) == ("measured", 1_500_000)


def test_what_was_written_off_never_comes_to_the_account() -> None:
    ledger = book_of("0.6")
    lease = opened(ledger)
    after(ledger, 20)
    ledger.lapse(lease)
    ledger.reconcile(lease, 20 * MICROS, drift=0)
    ledger.reconcile(lease, 10 * MICROS, drift=0)
    assert available(ledger) == "0.2", "0.6 were paid, and 0.4 is what it cost"
    written_off = [entry.amount for entry in ledger.entries if WRITE_OFF in (entry.debit, entry.credit)]
    assert written_off == [nanocredits("0.2"), nanocredits("0.2")]
    assert lease.written_off == 0


def test_the_grace_after_the_last_paid_second_is_written_off_without_alarm() -> None:
    ledger = book_of("0.6")
    lease = opened(ledger)
    after(ledger, 5)
    ledger.heartbeat(lease, 1)
    after(ledger, 12)
    ledger.close(lease, measured=17 * MICROS)
    assert credits_of(lease.written_off) == "0.08"
    assert [event.news for event in ledger.events] == [News.EXHAUSTED]


def test_who_asks_for_more_than_there_is_keeps_what_is_paid_and_nobody_is_alarmed() -> None:
    ledger = book_of("0.7")
    lease = opened(ledger)
    after(ledger, 5)
    refused = ledger.extend(lease, 60 * MICROS, ledger.now + 3600 * MICROS)
    assert isinstance(refused, Refusal)
    assert refused.code is Code.INSUFFICIENT_CREDIT
    assert (lease.paid_until, lease.final, ledger.events) == (START + 15 * MICROS, "", [])
    granted = ledger.extend(lease, 2 * MICROS, ledger.now + 3600 * MICROS)
    assert isinstance(granted, Grant)
    assert granted.paid_until == START + 17 * MICROS
