"""Drift of an account: which sum needs an alert, and over which hours it is taken."""

import pytest

from bursar.core.credit.account import Account
from bursar.core.credit.drift import HOUR_MICROS, Drift, crosses, first_hour, hour_of
from bursar.core.credit.ledger import Ledger, LedgerEvent, News
from bursar.core.credit.price import PriceList
from bursar.core.values.money import nanocredits


@pytest.mark.parametrize(
    ("amount", "alerted", "more", "due"),
    [
        (0, False, 10, False),  # at the limit is not above it
        (0, False, 11, True),
        (9, False, 1, False),
        (9, False, 2, True),
        (11, True, 5, False),  # one alert for as long as it stays above
        (11, False, 1, True),  # above it without an alert: the limit was lowered, or the last alert has left the period
        (11, False, 0, False),  # nothing came to it
        (9, True, 2, True),  # it had fallen below, and rises above again
    ],
)
def test_an_alert_is_due_when_the_sum_rises_above_the_limit(amount: int, alerted: bool, more: int, due: bool) -> None:
    assert crosses(Drift(amount, alerted), more, limit=10) is due


def test_a_period_is_the_present_hour_and_so_many_before_it() -> None:
    now = 1_000 * HOUR_MICROS + 1
    assert hour_of(now) == 1_000
    assert first_hour(now, 24) == 976
    assert first_hour(now - 2, 24) == 975


def test_the_alert_has_the_sum_the_limit_and_the_period() -> None:
    ledger = Ledger(0, PriceList())
    account = Account(id=7, tenant="physics")
    before = Drift(nanocredits("9.75"))
    assert not ledger.drift(account, before, nanocredits("0.25"), limit=nanocredits("10"), hours=24)
    assert ledger.drift(account, before, nanocredits("0.5"), limit=nanocredits("10"), hours=24)
    assert ledger.events == [
        LedgerEvent(News.ACCOUNT_DRIFT, 7, nanocredits("10.25"), reason="more than 10 credits in 24 h"),
    ]
