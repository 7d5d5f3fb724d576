"""Which lease an event is of, what it may say, and what all of them come to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.credit.account import Account
from bursar.core.credit.lease import Lease
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import Price, PriceList
from bursar.core.credit.usage_events import (
    PayingLease,
    UsageEvent,
    amount,
    certain,
    check,
    lease_of_event,
    measured,
    micros_of,
)
from bursar.core.values.money import MICROS, NANO
from bursar.core.values.refusal import Refusal

GPU = "nvidia.com/gpu"
START = 1_700_000_000 * MICROS


def event(**more: Any) -> UsageEvent:
    given_: dict[str, Any] = {"job": "train", "seq": 1, "begin": START, "end": START + 5 * MICROS, "micros": 5 * MICROS}
    return UsageEvent(**(given_ | more))


def payer(number: int = 1, **more: Any) -> PayingLease:
    given_: dict[str, Any] = {
        "account": 100, "tenant": "physics", "job": "train", "klass": "h100", "gpus": 4000, "node": "",
        "begin": START, "end": 0,
    }  # fmt: skip
    return PayingLease(number, **(given_ | more))


def found(one: UsageEvent, *payers: PayingLease, **who: Any) -> int | str:
    answer = lease_of_event(one, payers, **who)
    return str(answer.code) if isinstance(answer, Refusal) else answer.id


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"job": ""}, "job_id"), ({"job": "a\0b"}, "job_id"), ({"seq": -1}, "seq"), ({"end": START - 1}, "end_ts"),
        ({"begin": -1}, "start_ts"), ({"micros": -1}, "seconds"), ({"micros": 10**15}, "seconds"),
        ({"gpus": -1}, "gpu_count"), ({"utilization": 1.01}, "measured_utilization"),
        ({"utilization": float("nan")}, "measured_utilization"), ({"monotonic": -1}, "monotonic"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], named: str) -> None:
    refusal = check(event(**fields))
    assert refusal is not None
    assert [cause.field for cause in refusal.causes] == [named]


def test_everything_that_is_wrong_is_told_at_once() -> None:
    refusal = check(event(seq=-1, micros=-1, gpus=-1))
    assert refusal is not None
    assert len(refusal.causes) == 3


def test_a_clock_that_jumped_between_begin_and_end_does_not_change_how_long_it_ran() -> None:
    assert check(event(end=START + 10**12)) is None


@pytest.mark.parametrize(
    ("one", "payers", "who", "answer"),
    [
        (event(), [payer()], {}, 1),
        (event(), [], {}, "not_found"),
        (event(), [payer()], {"tenants": ("chemistry",)}, "not_found"),
        (event(), [payer(node="n1")], {"node": "n1"}, 1),
        (event(), [payer(node="n1")], {"node": "n2"}, "not_found"),
        (event(), [payer(), payer(2, account=101)], {}, "unprocessable"),
        (event(lease=2), [payer(), payer(2, account=101)], {}, 2),
        (event(account=101), [payer(), payer(2, account=101)], {}, 2),
        (event(klass="a100"), [payer()], {}, "unprocessable"),
        (event(klass="h100"), [payer()], {}, 1),
        (event(gpus=4000), [payer()], {}, 1),
        (event(gpus=4001), [payer()], {}, "unprocessable"),
        (event(node="n2"), [payer(node="n1"), payer(2, node="n2")], {}, 2),
        # One after another: where most of it lies.
        (event(), [payer(end=START + 2 * MICROS), payer(2, begin=START + 2 * MICROS)], {}, 2),
        (event(), [payer(end=START + 3 * MICROS), payer(2, begin=START + 3 * MICROS)], {}, 1),
        # Clocks that agree with neither: the nearest.
        (event(begin=1, end=2), [payer(end=START + MICROS), payer(2, begin=START + MICROS)], {}, 1),
    ],
)
def test_whose_an_event_is(one: UsageEvent, payers: list[PayingLease], who: dict[str, Any], answer: int | str) -> None:
    assert found(one, *payers, **who) == answer


def test_time_is_weighted_by_the_gpus_in_use() -> None:
    lease = Lease(1, 100, "train", gpus=4000, opened_at=START, closed_at=START + 100 * MICROS)
    total = amount(event(gpus=1000), payer()) + amount(event(), payer()) + amount(event(gpus=0), payer())
    assert micros_of(total, lease) == 6_250_000
    bare = Lease(1, 100, "train")
    assert micros_of(amount(event(), payer(gpus=0)), bare) == 5 * MICROS


def test_the_nodes_word_is_taken_before_events_and_neither_beyond_the_leases_time() -> None:
    lease = Lease(1, 100, "train", opened_at=START, closed_at=START + 10 * MICROS)
    assert measured(lease, None, None) is None
    assert measured(lease, 3 * MICROS, 4 * MICROS) == 3 * MICROS
    assert measured(lease, None, 4 * MICROS) == 4 * MICROS
    assert measured(lease, None, 11 * MICROS) == 10 * MICROS
    assert measured(lease, 0, 4 * MICROS) == 0


def test_a_clock_of_ours_that_went_back_takes_nothing_from_the_time_that_was_posted() -> None:
    lease = Lease(1, 100, "train", opened_at=START, started_at=START, since=START)
    lease.posted_until, lease.closed_at = START + 10 * MICROS, START - 60 * MICROS
    assert measured(lease, None, 8 * MICROS) == 8 * MICROS
    assert measured(lease, None, 11 * MICROS) == 10 * MICROS


def test_a_node_that_was_lost_ran_at_its_last_heartbeat_whatever_it_had_written_down() -> None:
    prices = PriceList.of([Price(GPU, "", 10**7, 0), Price(GPU, "", 2 * 10**7, START + 12 * MICROS)])
    ledger = Ledger(START, prices, {100: Account(100, "physics", posted=100 * NANO)}, numbers=iter((1,)))
    lease = Lease(0, 100, "train", window=15 * MICROS, amounts={GPU: 1000}, gpus=1000, uid="a", epoch=1, node="n1")
    assert ledger.open(lease, started=False) is None
    assert certain(lease) == 0
    for seq in range(1, 6):
        ledger.now += 5 * MICROS
        ledger.heartbeat(lease, seq)
    ledger.now += 60 * MICROS
    ledger.lapse(lease)
    assert certain(lease) == 20 * MICROS, "from the first beat, which began it, to the last"
    assert measured(lease, 7 * MICROS, None) == 20 * MICROS
    assert measured(lease, 26 * MICROS, None) == 26 * MICROS
    assert measured(lease, 26 * MICROS, None, told=19 * MICROS) == 19 * MICROS, "what it says when it is back"
    assert measured(lease, None, None) is None
    ledger.reconcile(lease, 22 * MICROS, drift=0)
    assert lease.posted == 20 * 10**7 + 2 * 2 * 10**7, "what was paid before the price rose, and after"


steps = st.lists(
    st.tuples(st.integers(1, 40 * MICROS), st.sampled_from(("beat", "beat", "price", "top up"))), max_size=12
)


@given(
    balance=st.integers(1, 20 * NANO),
    gpus=st.integers(1, 8),
    window=st.integers(1, 60),
    history=steps,
    lapses=st.booleans(),
    reports=st.lists(st.integers(0, 400 * MICROS), min_size=1, max_size=5),
)
def test_after_any_history_what_was_posted_ends_at_the_true_cost(
    balance: int, gpus: int, window: int, history: list[tuple[int, str]], lapses: bool, reports: list[int]
) -> None:
    """However often it is reconciled on the way. The owner has paid all of it but for what is written off, and nothing
    is ever below zero."""
    prices = [Price(GPU, "", 10**7, 0)]
    account = Account(100, "physics", posted=balance)
    ledger = Ledger(START, PriceList.of(prices), {100: account}, numbers=iter(range(1, 9)))
    lease = Lease(0, 100, "train", window=window * MICROS, amounts={GPU: gpus * 1000}, gpus=gpus * 1000)
    if ledger.open(lease, started=True) is not None:
        return
    for seq, (micros, what) in enumerate(history, 1):
        ledger.now += micros
        if what == "price":
            prices.append(Price(GPU, "", 1 + micros, ledger.now))
            ledger.prices = PriceList.of(prices)
        elif what == "top up":
            ledger.top_up(account, micros)
        else:
            ledger.heartbeat(lease, seq)
    ledger.now = max(ledger.now, lease.paid_until) if lapses else ledger.now
    if lapses:
        ledger.lapse(lease)
    else:
        ledger.close(lease)
    for report in reports:
        used = measured(lease, None, report)
        assert used is not None
        ledger.reconcile(lease, used, drift=0)
        assert lease.posted == lease.cost_of(min(report, lease.closed_at - lease.opened_at))
        assert account.available >= 0
        assert account.held == 0
    paid = dict.fromkeys((1, 2, 3, 4, 100), 0)
    for entry in ledger.entries:
        paid[entry.debit] -= entry.amount
        paid[entry.credit] += entry.amount
    assert sum(paid.values()) == 0
    assert account.posted == balance + paid[100]
    assert paid[2] == lease.posted, "earned is what it cost"
