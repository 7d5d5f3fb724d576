"""Budgets: what is used of them, and what that does to a score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.budget import penalty, used_fraction


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
