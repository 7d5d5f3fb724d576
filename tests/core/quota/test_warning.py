"""Warnings about limits: the marks, and when each is reached and withdrawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.quota.tenant_tree import Tenant, Tier, Tree
from bursar.core.quota.units import QuotaPolicy
from bursar.core.quota.warning import marks_of, reached, warning_message
from bursar.core.values.quantity import UNLIMITED

MARKS = (80, 95)


@pytest.mark.parametrize(
    ("used", "limit", "before", "mark"),
    [
        (79, 100, 0, 0),
        (80, 100, 0, 80),
        (94, 100, 80, 80),
        (95, 100, 0, 95),
        (150, 100, 95, 95),
        (94, 100, 95, 95),
        (93, 100, 95, 80),
        (79, 100, 80, 80),
        (78, 100, 80, 0),
        (79, 100, 95, 80),
        (0, 0, 0, 0),
        (1, 0, 0, 95),
        (10**18, UNLIMITED, 95, 0),
    ],
)
def test_a_mark_is_reached_at_once_and_withdrawn_well_below(used: int, limit: int, before: int, mark: int) -> None:
    assert reached(used, limit, MARKS, before) == mark


def test_without_marks_nothing_is_reached() -> None:
    assert reached(100, 100, (), 95) == 0


@given(st.integers(0, 300), st.integers(1, 200), st.sampled_from([0, 80, 95]))
def test_the_mark_is_stable(used: int, limit: int, before: int) -> None:
    mark = reached(used, limit, MARKS, before)
    assert reached(used, limit, MARKS, mark) == mark, "looking again changes nothing"
    assert mark >= reached(used, limit, MARKS), "a report is never withdrawn early"


def test_the_nearest_word_about_a_dimension_holds() -> None:
    tree = Tree(
        tenants={
            "own": Tenant("own", tier="std", warn_at={"cpu": (50,)}),
            "none": Tenant("none", tier="std", warn_at={"*": ()}),
            "tier": Tenant("tier", tier="std"),
            "plain": Tenant("plain"),
        },
        tiers={"std": Tier("std", warn_at={"memory": (60,)})},
        quota_policy=QuotaPolicy(warn_at={"*": (80, 95), "nodes": (100,)}),
    )
    said = {name: [marks_of(tree, name, one) for one in ("cpu", "memory", "nodes")] for name in tree.tenants}
    assert said == {
        "own": [(50,), (60,), (100,)],
        "none": [(), (), ()],
        "tier": [MARKS, (60,), (100,)],
        "plain": [MARKS, MARKS, (100,)],
    }


def test_the_message_has_the_numbers() -> None:
    assert warning_message("nvidia.com/gpu", 9000, 10_000) == "90 % of the limit on nvidia.com/gpu is used: 9 of 10"
    assert warning_message("nodes", 1000, 0) == "more than the limit on max_nodes is used: 1 of 0"
