"""Shortfall: which refusals end work, and how its end is put into words."""

import pytest

from bursar.core.credit.shortfall import Shortfall, end_words, recorded_shortfall, shortfall_of, time_left
from bursar.core.values.refusal import Code


def test_work_that_is_granted_time_or_will_be_frozen_has_no_shortfall() -> None:
    assert shortfall_of(7, "") is None
    assert shortfall_of(7, str(Code.SPEND_RATE_EXCEEDED)) is None
    assert shortfall_of(7, str(Code.INSUFFICIENT_CREDIT)) == Shortfall(7, "insufficient_credit")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (Code.INSUFFICIENT_CREDIT, "out of credit: ends in 115 s unless topped up"),
        (Code.DAILY_CAP_EXCEEDED, "daily cap reached: ends in 115 s unless the cap is raised"),
        (Code.ACCOUNT_INACTIVE, "account not active: ends in 115 s unless activated again"),
        (Code.UNPRICED, "no price in force: ends in 115 s unless one is set"),
        ("new_code", "its lease is not extended (new_code): ends in 115 s unless extended"),
    ],
)
def test_the_end_is_told_with_its_cause_and_its_cure(code: str, words: str) -> None:
    assert end_words(str(code), time_left(115.9)) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "now"), (0.9, "now"), (1, "in 1 s"), (599, "in 599 s"), (600, "in 10m"), (7200, "in 120m")],
)
def test_the_time_left_is_told_in_seconds_where_it_is_short(seconds: float, words: str) -> None:
    assert time_left(seconds) == words


def test_what_is_noted_in_a_status_is_read_back() -> None:
    assert recorded_shortfall("insufficient_credit", "2024-01-15T10:00:00Z") == Shortfall(
        1_705_312_800, "insufficient_credit"
    )
    assert recorded_shortfall("", "") is None
