"""Budgets: what is used of them, what that does to a score, and what people are told."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.usage.budget import (
    SLACK,
    BudgetHours,
    BudgetNews,
    BudgetState,
    budget_message,
    news,
    next_state,
    penalty,
    used_fraction,
)


@pytest.mark.parametrize(
    ("used", "left"),
    [
        pytest.param(-1.0, 1.0, id="less than nothing used"),
        pytest.param(0.0, 1.0, id="nothing used"),
        pytest.param(0.8, 1.0, id="nothing changes up to 80 %"),
        pytest.param(0.85, 0.05 + 0.95 * (1 + math.sqrt(0.5)) / 2, id="gently at first"),
        pytest.param(0.9, 0.525, id="half of the fall at 90 %"),
        pytest.param(0.95, 0.05 + 0.95 * (1 - math.sqrt(0.5)) / 2, id="gently at the end"),
        pytest.param(1.0, 0.05, id="the floor at 100 %"),
        pytest.param(7.0, 0.05, id="the floor beyond"),
        pytest.param(math.inf, 0.05, id="without bound"),
        pytest.param(math.nan, 1.0, id="a missing figure punishes nobody"),
    ],
)
def test_the_penalty_follows_the_use_of_the_budget(used: float, left: float) -> None:
    assert penalty(used) == pytest.approx(left)


@given(st.floats(0, 2), st.floats(0, 2))
def test_who_has_used_more_is_never_better_off(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0.05 <= penalty(more) <= penalty(less) <= 1.0


@pytest.mark.parametrize(
    ("gpu_hours", "gpu_budget", "node_hours", "node_budget", "fraction"),
    [
        pytest.param(50, 100, 30, 40, 0.75, id="nodes are the worse"),
        pytest.param(90, 100, 10, 40, 0.9, id="GPUs are the worse"),
        pytest.param(90, None, 10, 40, 0.25, id="only what has a budget counts"),
        pytest.param(90, None, 10, None, 0.0, id="no budget is never used up"),
        pytest.param(150, 100, 0, None, 1.5, id="more than all of it"),
        pytest.param(0, 0, 0, None, 1.0, id="a budget of zero is used up from the start"),
        pytest.param(-5, 100, 0, None, 0.0, id="hours below zero are none"),
        pytest.param(math.nan, 100, 10, 40, 0.25, id="hours that are no number are none"),
        pytest.param(10, math.nan, 10, 40, 0.25, id="a budget that is no number is none"),
    ],
)
def test_the_worse_of_two_budgets_drives(
    gpu_hours: float, gpu_budget: float | None, node_hours: float, node_budget: float | None, fraction: float
) -> None:
    assert used_fraction(gpu_hours, gpu_budget, node_hours, node_budget) == pytest.approx(fraction)


# How a tenant stands with its budget.

STATES = (BudgetState.WITHIN, BudgetState.WARNING, BudgetState.EXHAUSTED)


@pytest.mark.parametrize(
    ("used", "before", "after"),
    [
        pytest.param(0.79, "Within", "Within", id="nothing is told below 80 %"),
        pytest.param(0.8, "Within", "Warning", id="warned of at 80 %"),
        pytest.param(0.79, "Warning", "Warning", id="a little less takes nothing back"),
        pytest.param(0.78, "Warning", "Within", id="two points less does"),
        pytest.param(0.9999, "Warning", "Warning", id="not used up yet"),
        pytest.param(1.0, "Within", "Exhausted", id="used up at once"),
        pytest.param(0.99, "Exhausted", "Exhausted", id="a little room is none"),
        pytest.param(0.98, "Exhausted", "Warning", id="room again, and still nearly used"),
        pytest.param(0.1, "Exhausted", "Within", id="much room again"),
        pytest.param(math.inf, "Within", "Exhausted", id="without bound"),
        pytest.param(math.nan, "Exhausted", "Within", id="a missing figure warns nobody"),
    ],
)
def test_a_tenant_stands_as_its_use_says_and_a_little_less_changes_nothing(
    used: float, before: str, after: str
) -> None:
    assert next_state(used, BudgetState(before)) is BudgetState(after)


@given(st.floats(0, 2), st.sampled_from(STATES))
def test_who_looks_again_at_the_same_use_finds_nothing_new(used: float, before: BudgetState) -> None:
    after = next_state(used, before)
    assert next_state(used, after) is after
    assert news(after, next_state(used, after)) is None


@given(st.floats(0, 2), st.floats(0, 2), st.sampled_from(STATES))
def test_who_has_used_more_never_stands_better(one: float, other: float, before: BudgetState) -> None:
    less, more = sorted((one, other))
    assert STATES.index(next_state(less, before)) <= STATES.index(next_state(more, before))


@given(st.lists(st.floats(0, 1.5), max_size=60))
def test_a_mark_is_told_again_only_after_use_fell_well_below_it(history: list[float]) -> None:
    """Between two warnings of the same kind use was more than two points below the mark."""
    state, lowest = BudgetState.WITHIN, {BudgetNews.WARNING: -1.0, BudgetNews.EXHAUSTED: -1.0}
    for used in history:
        lowest = {what: min(least, used) for what, least in lowest.items()}
        after = next_state(used, state)
        what, state = news(state, after), after
        if what in (BudgetNews.WARNING, BudgetNews.EXHAUSTED):
            mark = 0.8 if what is BudgetNews.WARNING else 1.0
            assert used >= mark
            assert lowest[what] <= mark - SLACK
            lowest[what] = used


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("Within", "Warning", "budget.warning"),
        ("Within", "Exhausted", "budget.exhausted"),
        ("Warning", "Exhausted", "budget.exhausted"),
        ("Exhausted", "Warning", None),
        ("Exhausted", "Within", "budget.restored"),
        ("Warning", "Within", "budget.restored"),
        ("Warning", "Warning", None),
    ],
)
def test_people_are_told_what_is_news_to_them(before: str, after: str, what: str | None) -> None:
    assert news(BudgetState(before), BudgetState(after)) == what


@pytest.mark.parametrize(
    ("hours", "state", "words"),
    [
        pytest.param(
            BudgetHours(87_500, 100_000, 10, None, 90),
            BudgetState.WARNING,
            "87 % of the budget is used: 87,500.0 of 100,000 GPU-hours in the last 90 days",
            id="of GPU-hours",
        ),
        pytest.param(
            BudgetHours(10, 1000, 480.25, 500, 30),
            BudgetState.WARNING,
            "96 % of the budget is used: 480.2 of 500 node-hours in the last 30 days",
            id="the worse of the two",
        ),
        pytest.param(
            BudgetHours(12.5, 12.5, 0, None, 90),
            BudgetState.EXHAUSTED,
            "the budget is used up: 12.5 of 12.5 GPU-hours in the last 90 days. Running work continues; new work runs "
            "on capacity nobody else wants",
            id="used up",
        ),
        pytest.param(
            BudgetHours(95, 100, 0, None, 90, "waldur"),
            BudgetState.WARNING,
            "95 % of the budget is used: 95.0 of 100 GPU-hours according to waldur",
            id="somebody else's figures",
        ),
        pytest.param(
            BudgetHours(5, None, 5, None, 90),
            BudgetState.WITHIN,
            "the tenant no longer has a budget of hours",
            id="none",
        ),
    ],
)
def test_how_it_stands_in_words(hours: BudgetHours, state: BudgetState, words: str) -> None:
    assert budget_message(hours, state) == words
