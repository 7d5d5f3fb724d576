"""Fair share: what tenants hold, what they should hold, and what runs beyond it."""

import math
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.scheduling.state.fair_share import (
    RunningAmounts,
    Seat,
    ShareOf,
    Shares,
    burst_marks,
    effective_share,
    share_deficit,
    sound,
    standing,
)

GPUS = {"gpu": 100}


def tenants(*found: ShareOf) -> dict[str, ShareOf]:
    return {tenant.name: tenant for tenant in found}


def shares(*found: ShareOf, used: Mapping[str, int] | None = None, wanting: Collection[str] | None = None) -> Shares:
    """Of a cluster of 100 GPUs, where everybody wants something unless told otherwise."""
    names = [tenant.name for tenant in found]
    held = {name: {"gpu": amount} for name, amount in (used or {}).items()}
    return Shares(tenants(*found), GPUS, held, names if wanting is None else wanting)


def targets(found: Shares, *names: str) -> list[float]:
    return [round(found.target(name), 9) for name in names]


# What is held.


def test_the_dominant_share_is_the_largest_over_resources() -> None:
    found = Shares({}, {"gpu": 10, "cpu": 100}, {"a": {"gpu": 3, "cpu": 20}, "b": {"gpu": 1, "cpu": 40}}, [])
    assert (found.actual("a"), found.actual("b")) == (0.3, 0.4)


def test_what_nobody_offers_is_no_share() -> None:
    found = Shares({}, {"gpu": 10, "tpu": 0}, {"a": {"gpu": 1, "tpu": 5, "fpga": 5}}, [])
    found.add("a", [("tpu", 1), ("fpga", 1), ("gpu", 1)])
    assert found.actual("a") == 0.2


def test_a_cluster_without_anything_has_no_shares() -> None:
    found = Shares({}, {}, {"a": {"gpu": 1}}, ["a"])
    found.add("a", [("gpu", 1)])
    assert (found.actual("a"), found.utilisation, found.deficit("a")) == (0.0, 0.0, 1.0)


def test_placing_raises_the_tenant_and_all_above_it_at_once() -> None:
    found = shares(ShareOf("top"), ShareOf("mid", "top"), ShareOf("low", "mid"), ShareOf("else"), used={"low": 5})
    found.add("low", [("gpu", 10)])
    assert [found.actual(name) for name in ("low", "mid", "top", "else")] == [0.15, 0.15, 0.15, 0.0]


def test_a_parent_s_own_work_is_its_own_and_not_its_children_s() -> None:
    found = shares(ShareOf("top"), ShareOf("low", "top"), used={"top": 5, "low": 10})
    found.add("top", [("gpu", 1)])
    assert (found.actual("top"), found.actual("low")) == (0.16, 0.1)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["gpu", "cpu"]), st.integers(0, 10**15))))
def test_taking_back_returns_every_share_to_where_it_was(moves: list[tuple[str, str, int]]) -> None:
    tree = tenants(ShareOf("a"), ShareOf("b", "a"), ShareOf("c", "b"))
    found = Shares(tree, {"gpu": 7 * 10**15, "cpu": 3}, {"c": {"gpu": 1}, "d": {"cpu": 1}}, "abcd")
    before = [found.actual(name) for name in "abcd"]
    for tenant, resource, amount in moves:
        found.add(tenant, [(resource, amount)])
    for tenant, resource, amount in moves:
        found.add(tenant, [(resource, amount)], -1)
    assert [found.actual(name) for name in "abcd"] == before


# What should be held.


def test_weights_divide_the_system() -> None:
    found = shares(ShareOf("a", weight=5), ShareOf("b", weight=3), ShareOf("c", weight=2))
    assert targets(found, "a", "b", "c") == [0.5, 0.3, 0.2]


def test_only_those_that_want_something_divide() -> None:
    found = shares(ShareOf("a", weight=5), ShareOf("b", weight=3), ShareOf("c", weight=2), wanting=["b", "c"])
    assert targets(found, "b", "c") == [0.6, 0.4]


def test_who_wants_nothing_is_told_what_it_would_get() -> None:
    found = shares(ShareOf("a", weight=5), ShareOf("b", weight=3), ShareOf("c", weight=2), wanting=["b", "c"])
    assert targets(found, "a") == [0.5]


def test_who_runs_something_wants_it() -> None:
    found = shares(ShareOf("a"), ShareOf("b"), used={"a": 1}, wanting=["b"])
    assert targets(found, "a", "b") == [0.5, 0.5]


def test_who_has_work_far_below_wants_something() -> None:
    found = shares(ShareOf("a"), ShareOf("m", "a"), ShareOf("low", "m"), ShareOf("b"), wanting=["low", "b"])
    assert targets(found, "a", "b", "m", "low") == [0.5, 0.5, 0.5, 0.5]


def test_explicit_targets_are_taken_out_before_weights_divide() -> None:
    found = shares(ShareOf("a", target=0.4), ShareOf("b", weight=2), ShareOf("c", weight=1))
    assert targets(found, "a", "b", "c") == [0.4, 0.4, 0.2]


def test_an_explicit_target_that_nobody_uses_is_not_kept_from_the_others() -> None:
    found = shares(ShareOf("a", target=0.4), ShareOf("b", weight=2), ShareOf("c", weight=1), wanting=["b", "c"])
    assert targets(found, "a", "b", "c") == [0.4, 0.666666667, 0.333333333]


def test_explicit_targets_stay_what_they_are_when_they_leave_capacity() -> None:
    found = shares(ShareOf("a", target=0.2), ShareOf("b", target=0.3))
    assert targets(found, "a", "b") == [0.2, 0.3]


def test_explicit_targets_above_the_whole_are_scaled() -> None:
    found = shares(ShareOf("a", target=0.9), ShareOf("b", target=0.6), ShareOf("c"))
    assert targets(found, "a", "b", "c") == [0.6, 0.4, 0.0]
    assert found.deficit("c") == 0.0


def test_an_idle_tenant_s_explicit_target_is_told_as_it_would_be_scaled() -> None:
    found = shares(ShareOf("a", target=0.9), ShareOf("b", target=0.6), wanting=["a"])
    assert targets(found, "a", "b") == [0.9, 0.4]


def test_explicit_targets_above_the_parent_s_are_scaled_to_it() -> None:
    found = shares(ShareOf("top", target=0.5), ShareOf("a", "top", target=0.6), ShareOf("b", "top", target=0.4))
    assert targets(found, "a", "b") == [0.3, 0.2]


def test_children_divide_what_their_parent_is_worth() -> None:
    found = shares(
        ShareOf("x"),
        ShareOf("y"),
        ShareOf("x1", "x", weight=7),
        ShareOf("x2", "x", weight=3),
        wanting=["x1", "x2", "y"],
    )
    assert targets(found, "x", "y", "x1", "x2") == [0.5, 0.5, 0.35, 0.15]


def test_a_parent_s_own_work_divides_with_its_children_as_one_of_weight_one() -> None:
    found = shares(ShareOf("top"), ShareOf("a", "top", weight=2), ShareOf("b", "top"))
    assert targets(found, "top", "a", "b") == [1.0, 0.5, 0.25]
    assert round(found.seat("top").target, 9) == 0.25


def test_a_stranger_is_a_top_tenant_of_weight_one() -> None:
    found = shares(ShareOf("a", weight=3), wanting=["a", "stranger"])
    assert targets(found, "a", "stranger") == [0.75, 0.25]


def test_a_stranger_that_comes_late_is_told_what_it_would_get() -> None:
    found = shares(ShareOf("a", weight=3))
    found.add("late", [("gpu", 10)])
    assert (found.actual("late"), found.target("late"), found.target("a")) == (0.1, 0.25, 1.0)


def test_an_unknown_parent_is_a_top_tenant() -> None:
    found = shares(ShareOf("a", "gone"), ShareOf("b"), used={"a": 10})
    assert (found.actual("gone"), found.target("gone")) == (0.1, 0.5)


def test_a_loop_of_parents_is_cut() -> None:
    found = shares(ShareOf("a", "b"), ShareOf("b", "a"), ShareOf("self", "self"), used={"a": 10, "b": 20, "self": 5})
    assert (found.actual("a"), found.actual("b"), found.actual("self")) == (0.1, 0.3, 0.05)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(ShareOf("a", weight=0), ShareOf("a", weight=1e-6), id="no weight is next to nothing"),
        pytest.param(ShareOf("a", weight=-3), ShareOf("a", weight=1e-6), id="nor less than that"),
        pytest.param(ShareOf("a", weight=math.inf), ShareOf("a", weight=1e6), id="no weight is without bound"),
        pytest.param(ShareOf("a", weight=math.nan), ShareOf("a"), id="a weight that is no number is 1"),
        pytest.param(ShareOf("a", target=-0.1), ShareOf("a", target=0.0), id="no target below nothing"),
        pytest.param(ShareOf("a", target=1.1), ShareOf("a", target=1.0), id="no target above everything"),
        pytest.param(ShareOf("a", target=math.nan), ShareOf("a"), id="a target that is no number is none"),
        pytest.param(ShareOf("a", burst=0.5), ShareOf("a"), id="burst takes nothing away"),
        pytest.param(ShareOf("a", burst=math.inf), ShareOf("a", burst=1000.0), id="burst has a bound"),
        pytest.param(ShareOf("a", burst=math.nan), ShareOf("a"), id="burst that is no number is none"),
        pytest.param(ShareOf("a", penalty=2.0), ShareOf("a"), id="a penalty is no reward"),
        pytest.param(ShareOf("a", penalty=-1.0), ShareOf("a", penalty=0.0), id="nor below nothing"),
        pytest.param(ShareOf("a", penalty=math.nan), ShareOf("a"), id="a penalty that is no number is none"),
    ],
)
def test_numbers_are_held_to_what_can_be_reckoned_with(given: ShareOf, kept: ShareOf) -> None:
    assert sound(given) == kept


def test_those_without_weight_divide_equally_when_they_are_alone() -> None:
    assert targets(shares(ShareOf("a", weight=0), ShareOf("b", weight=-1)), "a", "b") == [0.5, 0.5]


SOUND = st.builds(
    ShareOf,
    st.just(""),
    st.sampled_from(["", "t0", "t1", "t2", "unknown"]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.none() | st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 3),
)


@given(st.lists(SOUND, max_size=8), st.data())
def test_children_that_want_something_are_never_given_more_than_their_parent_has(
    drawn: list[ShareOf], data: st.DataObject
) -> None:
    tree = {f"t{number}": tenant for number, tenant in enumerate(drawn)}
    found = Shares(tree, GPUS, {}, data.draw(st.sets(st.sampled_from(sorted(tree)))) if tree else [])
    levels: list[Seat] = [found.root]
    for above in levels:
        given_away = sum(child.target for child in above.children if child.wants)
        assert given_away <= above.effective * (1 + 1e-9)
        levels.extend(above.children)


# Burst, and how far behind one is.


@pytest.mark.parametrize(
    ("burst", "utilisation", "effective"),
    [
        pytest.param(1.5, 0.0, 0.3, id="150 % when all is idle"),
        pytest.param(1.5, 0.4, 0.25, id="half of it when half way"),
        pytest.param(1.5, 0.8, 0.2, id="nothing more from 80 % on"),
        pytest.param(1.5, 1.0, 0.2, id="nor when all is full"),
        pytest.param(1.0, 0.0, 0.2, id="no allowance, no burst"),
    ],
)
def test_burst_fades_as_the_cluster_fills(burst: float, utilisation: float, effective: float) -> None:
    assert effective_share(0.2, burst, utilisation) == pytest.approx(effective)


def test_utilisation_is_that_of_the_start_of_the_cycle() -> None:
    found = shares(ShareOf("a", target=0.4, burst=1.5), used={"a": 20, "b": 20})
    found.add("a", [("gpu", 30)])
    assert found.utilisation == 0.4
    assert found.effective("a") == pytest.approx(0.5)


def test_utilisation_is_that_of_the_fullest_resource() -> None:
    found = Shares({}, {"gpu": 10, "cpu": 100}, {"a": {"gpu": 3, "cpu": 50}, "b": {"gpu": 4, "cpu": 10}}, [])
    assert found.utilisation == 0.7


def test_children_divide_their_parent_s_burst_too() -> None:
    found = shares(ShareOf("top", target=0.4, burst=1.5), ShareOf("a", "top"), ShareOf("b", "top"), wanting=["a", "b"])
    assert targets(found, "top", "a", "b") == [0.4, 0.3, 0.3]


@pytest.mark.parametrize(
    ("effective", "actual", "deficit"),
    [
        pytest.param(0.5, 0.0, 1.0, id="who holds nothing is wholly behind"),
        pytest.param(0.5, 0.2, 0.6, id="who holds a part is behind by the rest"),
        pytest.param(0.5, 0.5, 0.0, id="who holds its share is not behind"),
        pytest.param(0.5, 0.9, 0.0, id="nor who holds more"),
        pytest.param(0.0, 0.0, 0.0, id="nor who has no share"),
    ],
)
def test_the_deficit_is_the_missing_part_of_the_share(effective: float, actual: float, deficit: float) -> None:
    assert share_deficit(effective, actual) == pytest.approx(deficit)


@pytest.mark.parametrize(
    ("held", "penalty", "expected"),
    [
        pytest.param(0, 1.0, 100, id="wholly behind"),
        pytest.param(34, 1.0, 66, id="an exact hundredth is not lost to rounding"),
        pytest.param(715, 1.0, 28, id="what is between is rounded down"),
        pytest.param(50, 0.5, 25, id="a budget that is used up weighs on it"),
        pytest.param(100, 1.0, 0, id="not behind"),
    ],
)
def test_standing_is_deficit_times_penalty_in_whole_hundredths(held: int, penalty: float, expected: int) -> None:
    whole = 1000 if held > 100 else 100
    found = Shares(tenants(ShareOf("a", penalty=penalty)), {"gpu": whole}, {"a": {"gpu": held}}, ["a"])
    assert standing(found.seat("a")) == expected


# Within target, and beyond it.


def test_reaching_the_target_exactly_is_within_it() -> None:
    found = shares(ShareOf("a", target=0.3), used={"a": 10})
    assert found.within_target_after("a", [("gpu", 20)])
    assert not found.within_target_after("a", [("gpu", 21)])
    assert found.actual("a") == 0.1


def test_a_target_is_not_missed_by_an_error_of_rounding() -> None:
    found = shares(ShareOf("x", target=0.3), ShareOf("a", weight=1), ShareOf("b", weight=9))
    assert found.target("a") < 0.07  # by the last bit
    assert found.within_target_after("a", [("gpu", 7)])
    assert fingerprints(found, {"a": works((1, "all of it", 7))}) == set()


def test_burst_does_not_count_as_target() -> None:
    found = shares(ShareOf("a", target=0.3, burst=2.0))
    assert found.effective("a") == 0.6
    assert not found.within_target_after("a", [("gpu", 31)])


def test_every_ancestor_must_be_within_its_target_too() -> None:
    found = shares(
        ShareOf("top", target=0.4), ShareOf("a", "top", target=0.3), ShareOf("b", "top"), used={"b": 20}, wanting=["a"]
    )
    assert found.within_target_after("a", [("gpu", 20)])
    assert not found.within_target_after("a", [("gpu", 21)])


def test_amounts_of_one_resource_add_up() -> None:
    found = shares(ShareOf("a", target=0.3))
    assert not found.within_target_after("a", [("gpu", 20), ("gpu", 20)])


def works(*found: tuple[float, str, int]) -> list[RunningAmounts]:
    return [(started_at, uid, (("gpu", amount),)) for started_at, uid, amount in found]


def fingerprints(found: Shares, running: Mapping[str, list[RunningAmounts]]) -> set[str]:
    """What is burst, with the shares raised by what runs."""
    for tenant, running_of_it in running.items():
        for _, _, amounts in running_of_it:
            found.add(tenant, amounts)
    return set(burst_marks(found, running))


def test_nothing_is_burst_within_the_target() -> None:
    assert fingerprints(shares(ShareOf("a", target=0.3)), {"a": works((1, "x", 20), (2, "y", 10))}) == set()


def test_the_newest_beyond_the_target_are_burst() -> None:
    running = {"a": works((3, "third", 10), (1, "first", 10), (2, "second", 10), (4, "fourth", 10))}
    assert fingerprints(shares(ShareOf("a", target=0.2)), running) == {"third", "fourth"}


def test_of_two_that_began_together_the_later_name_is_burst() -> None:
    assert fingerprints(shares(ShareOf("a", target=0.1)), {"a": works((1, "y", 10), (1, "x", 10))}) == {"y"}


def test_a_large_one_is_burst_as_a_whole() -> None:
    assert fingerprints(shares(ShareOf("a", target=0.3)), {"a": works((1, "old", 10), (2, "new", 21))}) == {"new"}


def test_what_uses_nothing_that_is_over_is_passed_by() -> None:
    found = Shares(tenants(ShareOf("a", target=0.3)), {"gpu": 10, "cpu": 10}, {}, ["a"])
    running: list[RunningAmounts] = [(1, "gpu", [("gpu", 4)]), (2, "cpu", [("cpu", 3)])]
    assert fingerprints(found, {"a": running}) == {"gpu"}


def test_another_s_burst_is_no_business_of_ours() -> None:
    found = shares(ShareOf("a", target=0.2), ShareOf("b", target=0.5))
    assert fingerprints(found, {"a": works((1, "x", 30)), "b": works((2, "y", 30))}) == {"x"}


def test_what_the_parent_may_hold_beyond_its_target_makes_nothing_of_its_children_less_burst() -> None:
    """Its allowance comes and goes with the cluster's load, and what is burst may be evicted: that must not."""
    found = shares(
        ShareOf("top", target=0.3, burst=2.0),  # each child's target is scaled down to half of that
        ShareOf("a", "top", target=0.2),
        ShareOf("b", "top", target=0.2),
        wanting=["a", "b"],
    )
    running = {"a": works((1, "a1", 10), (4, "a2", 10)), "b": works((2, "b1", 10), (3, "b2", 10))}
    assert fingerprints(found, running) == {"a2", "b2"}


def test_burst_of_the_children_is_counted_before_the_parent_s() -> None:
    found = shares(ShareOf("top", target=0.3), ShareOf("a", "top", target=0.1), ShareOf("b", "top"), wanting=["a", "b"])
    running = {"a": works((1, "a1", 10), (2, "a2", 10)), "b": works((3, "b1", 20))}
    assert fingerprints(found, running) == {"a2"}


JOBS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "top", "else"]), st.integers(0, 5), st.integers(1, 30)), max_size=12
)


@given(JOBS, st.lists(st.sampled_from([None, 0.0, 0.1, 0.3, 0.7]), min_size=4, max_size=4))
def test_without_its_burst_everybody_is_back_at_its_target(
    jobs: list[tuple[str, int, int]], explicit: list[float | None]
) -> None:
    parents = {"a": "top", "b": "top", "top": "", "else": ""}
    tree = [ShareOf(name, parent, target=wish) for (name, parent), wish in zip(parents.items(), explicit, strict=True)]
    found = shares(*tree)
    running: dict[str, list[RunningAmounts]] = {}
    for number, (tenant, started_at, amount) in enumerate(jobs):
        running.setdefault(tenant, []).extend(works((started_at, f"u{number}", amount)))
    burst = fingerprints(found, running)
    for tenant, running_of_it in running.items():
        for _, uid, amounts in running_of_it:
            if uid in burst:
                found.add(tenant, amounts, -1)
    assert all(found.within_target_after(tenant, []) for tenant in running)
