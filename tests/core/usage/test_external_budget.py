"""What is said to be left of a budget, and how that becomes hours used."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.usage.budget import penalty, used_fraction
from bursar.core.usage.external_budget import INTERNAL, Remaining, hours_used, source_of

HOURS = st.floats(0, 1e9)


@pytest.mark.parametrize(
    ("counted", "budget", "left", "used"),
    [
        (10.0, 100.0, None, 10.0),  # nothing is said
        (10.0, 100.0, 25.0, 75.0),
        (10.0, 100.0, 0.0, 100.0),
        (10.0, 100.0, -20.0, 120.0),  # more was used than was agreed
        (10.0, 100.0, 400.0, 0.0),  # more is left than this budget: it was raised there and not yet here
        (10.0, None, 25.0, 10.0),  # without a budget here there is nothing to use up
        (10.0, 0.0, 0.0, 0.0),
        (10.0, 100.0, math.nan, 10.0),
        (10.0, 100.0, math.inf, 10.0),
    ],
)
def test_what_is_left_counts_before_what_was_counted_here(
    counted: float, budget: float | None, left: float | None, used: float
) -> None:
    assert hours_used(counted, budget, left) == used


def test_nothing_left_is_used_up_whatever_the_budget() -> None:
    for budget in (0.0, 1.0, 1e6):
        used = hours_used(0.0, budget, 0.0)
        assert used_fraction(used, budget, 0.0, None) == 1.0
        assert penalty(used_fraction(used, budget, 0.0, None)) == pytest.approx(0.05)


@given(budget=HOURS, more=HOURS, less=HOURS)
def test_the_less_is_left_the_more_is_used(budget: float, more: float, less: float) -> None:
    less, more = sorted((less, more))
    assert hours_used(0.0, budget, less) >= hours_used(0.0, budget, more) >= 0.0


def test_the_source_is_whose_figure_counts() -> None:
    both = Remaining(5.0, 7.0, "waldur")
    assert source_of(None, 1.0, 1.0) == INTERNAL
    assert source_of(both, 1.0, None) == source_of(both, None, 1.0) == "waldur"
    assert source_of(both, None, None) == INTERNAL
    assert source_of(Remaining(None, 7.0, "waldur"), 1.0, None) == INTERNAL
    assert source_of(Remaining(math.nan, None, "waldur"), 1.0, 1.0) == INTERNAL
