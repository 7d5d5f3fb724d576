"""Paid time keeps its rate: leases against a plain model that writes down the rate of every second that is held."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.credit.account import Account
from bursar.core.credit.lease import AHEAD_MAX, Grant, Lease, LeaseState
from bursar.core.credit.ledger import Ledger, Type
from bursar.core.credit.price import Price, PriceList
from bursar.core.values.money import MICROS, NANO, cost

START = 1_700_000_000 * MICROS
GPU = "nvidia.com/gpu"
WINDOW = 15
LATEST = 600


def opened(price: int, *, window: int = WINDOW * MICROS) -> tuple[Ledger, Lease]:
    account = Account(100, "physics", posted=10**6 * NANO)
    ledger = Ledger(START, PriceList.of([Price(GPU, "", price, 0)]), {100: account}, numbers=iter((1,)))
    lease = Lease(0, 100, "train", window=window, amounts={GPU: 1000}, gpus=1000)
    assert ledger.open(lease, started=True) is None
    return ledger, lease


def set_price(ledger: Ledger, price: int) -> None:
    ledger.prices = PriceList.of([Price(GPU, "", price, 0)])


def extended(ledger: Ledger, lease: Lease, micros: int) -> None:
    assert isinstance(ledger.extend(lease, micros, ledger.now + LATEST * MICROS), Grant)


def assert_consistent(ledger: Ledger, lease: Lease) -> None:
    account = ledger.accounts[100]
    assert account.held == lease.held == lease.between(lease.posted_until, lease.paid_until) >= 0
    assert lease.posted == lease.cost_of(lease.posted_micros)
    assert sum(micros for _, micros in lease.open_segments) == lease.paid_until - lease.posted_until
    assert len(lease.open_segments) <= 1 + AHEAD_MAX
    assert account.posted == 10**6 * NANO - sum(entry.amount for entry in ledger.entries if entry.type is Type.DEBIT)


@dataclass
class Seconds:
    """The rates of the seconds that are held, one by one, and of those that have passed."""

    now: int = 0
    posted_to: int = 0
    held: deque[int] = field(default_factory=deque)
    passed: list[int] = field(default_factory=list)

    def post(self) -> None:
        while self.held and self.posted_to < self.now:
            self.passed.append(self.held.popleft())
            self.posted_to += 1

    def extend(self, until: int, rate: int) -> None:
        self.post()
        self.posted_to = max(self.posted_to, self.now)
        self.held.extend([rate] * max(0, until - self.posted_to - len(self.held)))


STEPS = st.one_of(
    st.tuples(st.just("pass"), st.integers(0, 40)),
    st.tuples(st.just("price"), st.integers(0, 3)),
    st.tuples(st.just("beat"), st.just(0)),
    st.tuples(st.just("extend"), st.integers(1, 60)),
)


@given(
    first=st.integers(0, 3),
    steps=st.lists(STEPS, max_size=60),
    end=st.sampled_from(["close", "lapse", "measured"]),
    used=st.integers(0, 400),
)
def test_every_second_is_paid_at_the_price_of_the_moment_in_which_it_was_paid(
    first: int, steps: list[tuple[str, int]], end: str, used: int
) -> None:
    ledger, lease = opened(first)
    model, rate = Seconds(held=deque([first] * WINDOW)), first
    for seq, (what, number) in enumerate(steps, 1):
        if what == "pass":
            ledger.now += number * MICROS
            model.now += number
        elif what == "price":
            rate = number
            set_price(ledger, rate)
        elif what == "beat":
            assert isinstance(ledger.heartbeat(lease, seq), Grant)
            model.post()
            model.extend(max(model.now, model.posted_to) + WINDOW, rate)
        else:
            extended(ledger, lease, number * MICROS)
            paid_to = max(model.now, model.posted_to + len(model.held))
            model.extend(min(paid_to + number, max(model.now + LATEST, paid_to)), rate)
        assert (lease.held, lease.posted) == (sum(model.held), sum(model.passed))
        assert_consistent(ledger, lease)
    if end == "lapse":
        ledger.now = max(ledger.now, lease.paid_until)
        model.now = max(model.now, model.posted_to + len(model.held))
        ledger.lapse(lease)
        model.post()
        assert lease.posted == sum(model.passed)
    elif end == "close":
        ledger.close(lease)
        model.post()
        assert lease.posted == sum(model.passed)
    else:
        paid = [*model.passed, *model.held]
        ledger.close(lease, measured=used * MICROS)
        assert lease.posted == sum(paid[:used]) + max(0, used - len(paid)) * lease.last_rate
    assert lease.state is not LeaseState.OPEN
    assert ledger.accounts[100].held == 0
    assert 10**6 * NANO - ledger.accounts[100].posted == lease.posted


@given(
    prices=st.lists(st.integers(0, 10**12), min_size=1, max_size=30),
    lengths=st.lists(st.tuples(st.integers(0, 40 * MICROS), st.integers(1, 40 * MICROS)), min_size=1, max_size=30),
)
def test_fractions_never_make_a_segment_cost_more_than_its_time(
    prices: list[int], lengths: list[tuple[int, int]]
) -> None:
    ledger, lease = opened(prices[0], window=MICROS)
    for number, (waited, added) in enumerate(lengths):
        set_price(ledger, prices[number % len(prices)])
        ledger.now += waited
        extended(ledger, lease, added)
        assert_consistent(ledger, lease)
    ledger.now = lease.paid_until
    ledger.lapse(lease)
    assert (
        lease.posted
        == lease.cost_of(lease.posted_micros)
        == sum(cost(rate, micros) for rate, micros in (*lease.past, (lease.rate, lease.posted_until - lease.since)))
    )
    assert all(entry.amount <= cost(entry.rate, entry.end - entry.begin) + 1 for entry in ledger.entries)


@pytest.mark.parametrize("rising", [True, False])
def test_when_there_are_too_many_segments_the_last_takes_the_rest_at_the_lower_rate(rising: bool) -> None:
    ledger, lease = opened(1000)
    prices = [1000 + number if rising else 1000 - number for number in range(1, 2 * AHEAD_MAX)]
    for price in prices:
        set_price(ledger, price)
        before = ledger.accounts[100].held
        extended(ledger, lease, MICROS)
        assert_consistent(ledger, lease)
        assert ledger.accounts[100].held - before <= price, "nobody pays more than the price of the moment"
    assert len(lease.open_segments) == 1 + AHEAD_MAX
    rate, micros = lease.ahead[-1]
    assert rate == (prices[AHEAD_MAX - 1] if rising else prices[-1])
    assert micros == AHEAD_MAX * MICROS
    held = lease.held
    ledger.now = lease.paid_until
    ledger.lapse(lease)
    assert lease.posted == held


def test_equal_rates_beside_each_other_are_one_segment() -> None:
    ledger, lease = opened(7)
    extended(ledger, lease, 5 * MICROS)
    assert list(lease.open_segments) == [(7, 20 * MICROS)]
    set_price(ledger, 9)
    extended(ledger, lease, 5 * MICROS)
    extended(ledger, lease, 5 * MICROS)
    assert list(lease.open_segments) == [(7, 20 * MICROS), (9, 10 * MICROS)]
    assert [lease.rate_at(START + at * MICROS) for at in (0, 19, 20, 29, 99)] == [7, 7, 9, 9, 9]


def test_a_clock_that_goes_back_leaves_every_segment_its_rate() -> None:
    ledger, lease = opened(7)
    set_price(ledger, 9)
    extended(ledger, lease, 10 * MICROS)
    ledger.now += 3600 * MICROS
    ledger.heartbeat(lease, 1)
    set_price(ledger, 11)
    extended(ledger, lease, 10 * MICROS)
    assert lease.open_segments == ((9, 15 * MICROS), (11, 10 * MICROS))
    ledger.now -= 3600 * MICROS
    ledger.heartbeat(lease, 2)
    assert lease.open_segments == ((9, 15 * MICROS), (11, 10 * MICROS))
    assert lease.paid_until == ledger.now + 25 * MICROS
    assert_consistent(ledger, lease)
