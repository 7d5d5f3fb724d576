"""The order of the queue: factors, scores, and the traversal of the tenant tree."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.scheduling.cycle.fair_queue import (
    PROFILES,
    Factors,
    FairQueue,
    backlog_factor,
    checkpoint_factor,
    conformance_factor,
    data_factor,
    energy_factor,
    priority_factor,
    score,
    topology_factor,
    waiting_factor,
)
from bursar.core.scheduling.state.fair_share import ShareOf, Shares

# Profiles and scores.


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("hpc", ".15 .20 .20 .15 .10 .05 0 .05 .10"),
        ("ml", ".10 .10 .10 .25 .15 .05 .05 .10 .10"),
        ("service", ".15 .05 .10 .05 .10 .05 .10 .10 .30"),
        ("sensitive", ".90 0 0 0 0 0 0 0 .10"),
        ("interactive", ".10 .30 .10 0 .05 .15 0 0 .30"),
        ("default", ".20 .20 .20 .15 .10 .05 0 0 .10"),
    ],
)
def test_profiles_weigh_as_the_table_says(name: str, weights: str) -> None:
    assert PROFILES[name].weights == tuple(map(float, weights.split()))
    assert PROFILES[name].name == name


def test_there_are_no_other_profiles_and_each_adds_up_to_one() -> None:
    assert set(PROFILES) == {"hpc", "ml", "service", "sensitive", "interactive", "default"}
    assert [math.fsum(profile.weights) for profile in PROFILES.values()] == [pytest.approx(1.0)] * 6


@pytest.mark.parametrize("place", range(9))
def test_each_factor_counts_by_its_own_weight(place: int) -> None:
    alone = Factors(*(1.0 if each == place else 0.0 for each in range(9)))
    for profile in PROFILES.values():
        assert score(profile, alone) == profile.weights[place]


def test_the_budget_s_penalty_multiplies_the_sum() -> None:
    everything = Factors(*[1.0] * 9)
    assert score(PROFILES["hpc"], everything, 0.05) == pytest.approx(0.05)


# Factors.


@pytest.mark.parametrize(
    ("priority", "factor"),
    [(0, 0.5), (100, 0.5 + 100 / 2200), (500, 2 / 3), (1000, 0.75), (10**6, 0.9995), (-1000, 0.25), (10**9, 1.0)],
)
def test_priorities_are_squashed_between_zero_and_one(priority: int, factor: float) -> None:
    assert priority_factor(priority) == pytest.approx(factor, abs=1e-6)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_a_higher_priority_is_a_higher_factor(one: int, other: int) -> None:
    assert 0.0 < priority_factor(one) < 1.0
    assert (one < other) == (priority_factor(one) < priority_factor(other))


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [
        pytest.param(0, 0.0, id="no wait"),
        pytest.param(3600, math.log(2), id="an hour"),
        pytest.param(3600 * (math.e - 1), 1.0, id="one at e − 1 hours"),
        pytest.param(-60, 0.0, id="a clock that ran backwards"),
    ],
)
def test_waiting_counts_ever_more_slowly(seconds: float, factor: float) -> None:
    assert waiting_factor(seconds) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("nodes", "together", "factor"),
    [
        pytest.param(4, 4, 1.0, id="all in one domain"),
        pytest.param(4, 9, 1.0, id="with room to spare"),
        pytest.param(4, 1, 0.25, id="a quarter of them"),
        pytest.param(4, 0, 0.0, id="no domain has any"),
        pytest.param(4, None, 0.5, id="unknown"),
        pytest.param(0, 1, 1.0, id="nothing asked"),
    ],
)
def test_topology_fits_as_far_as_one_domain_holds_it(nodes: int, together: int | None, factor: float) -> None:
    assert topology_factor(nodes, together) == factor


@pytest.mark.parametrize(
    ("ready", "factor"), [(0.0, 0.0), (0.3, 0.3), (2.0, 1.0), (-1.0, 0.0), (None, 0.5), (math.nan, 0.5)]
)
def test_data_counts_as_far_as_it_is_ready(ready: float | None, factor: float) -> None:
    assert data_factor(ready) == factor


@pytest.mark.parametrize(("depth", "factor"), [(0, 0.0), (100, 0.5), (300, 0.75), (-1, 0.0)])
def test_a_full_queue_presses(depth: int, factor: float) -> None:
    assert backlog_factor(depth) == factor


@pytest.mark.parametrize(
    ("price", "factor"), [(0.0, 1.0), (0.25, 0.75), (3.0, 0.0), (-1.0, 1.0), (None, 0.5), (math.nan, 0.5)]
)
def test_cheap_energy_counts(price: float | None, factor: float) -> None:
    assert energy_factor(price) == factor


@pytest.mark.parametrize(
    ("every", "ttl", "factor"),
    [
        pytest.param(36, 3600, 0.99, id="often"),
        pytest.param(1800, 3600, 0.5, id="once on the way"),
        pytest.param(7200, 3600, 0.0, id="too late to help"),
        pytest.param(600, 0, 0.5, id="nobody knows how long it runs"),
        pytest.param(0, 3600, 0.0, id="never"),
        pytest.param(0, 0, 0.0, id="never, however long"),
    ],
)
def test_saving_often_counts(every: int, ttl: int, factor: float) -> None:
    assert checkpoint_factor(every, ttl) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("nodes", "alike", "factor"), [(8, 6, 0.75), (8, 8, 1.0), (8, 20, 1.0), (8, 0, 0.0), (0, 0, 0.0)]
)
def test_uniform_nodes_conform(nodes: int, alike: int, factor: float) -> None:
    assert conformance_factor(nodes, alike) == factor


# The traversal of the queue.


def line_of(shares: Shares, *waiting: tuple[str, float, str]) -> FairQueue[str]:
    line: FairQueue[str] = FairQueue(shares)
    for tenant, score_, tie in waiting:
        line.push(tenant, score_, tie, f"{tenant}/{tie}")
    return line


def taken(line: FairQueue[str]) -> list[str]:
    found: list[str] = []
    while (item := line.pop()) is not None:
        found.append(item)
    return found


def gpus(*tenants: ShareOf, wanting: Iterable[str], used: Mapping[str, int] | None = None) -> Shares:
    held = {name: {"gpu": amount} for name, amount in (used or {}).items()}
    return Shares({tenant.name: tenant for tenant in tenants}, {"gpu": 100}, held, list(wanting))


def test_an_empty_line_gives_nothing() -> None:
    line = line_of(gpus(wanting=[]))
    assert (line.pop(), len(line)) == (None, 0)


def test_inside_a_tenant_the_highest_score_comes_first_then_the_smaller_tie() -> None:
    line = line_of(gpus(wanting="a"), ("a", 1, "y"), ("a", 3, "z"), ("a", 1, "x"))
    assert len(line) == 3
    assert taken(line) == ["a/z", "a/x", "a/y"]
    assert len(line) == 0


def test_who_is_further_behind_comes_first_whatever_the_score() -> None:
    line = line_of(gpus(wanting="ab", used={"a": 30, "b": 20}), ("a", 9, "1"), ("b", 1, "1"))
    assert taken(line) == ["b/1", "a/1"]


def test_those_nearly_equally_behind_are_compared_by_score() -> None:
    shares = Shares({}, {"gpu": 1000}, {"a": {"gpu": 204}, "b": {"gpu": 201}}, "ab")
    assert taken(line_of(shares, ("a", 9, "1"), ("b", 1, "1"))) == ["a/1", "b/1"]


def test_equals_in_everything_go_by_name() -> None:
    assert taken(line_of(gpus(wanting="ab"), ("b", 1, "1"), ("a", 1, "2"))) == ["a/2", "b/1"]


def test_a_budget_that_is_used_up_weighs_more_than_a_deficit() -> None:
    shares = gpus(ShareOf("a", penalty=0.05), ShareOf("b"), wanting="ab", used={"b": 40})
    assert taken(line_of(shares, ("a", 1, "1"), ("b", 1, "1"))) == ["b/1", "a/1"]


def test_placing_something_lets_the_others_go_first() -> None:
    shares = gpus(wanting="ab")
    line = line_of(shares, ("a", 9, "1"), ("a", 8, "2"), ("b", 1, "1"))
    assert line.pop() == "a/1"
    shares.add("a", [("gpu", 10)])
    assert taken(line) == ["b/1", "a/2"]


def test_what_is_taken_back_moves_a_tenant_forward_again() -> None:
    shares = gpus(wanting="abc", used={"a": 10})
    line = line_of(shares, ("a", 1, "1"), ("b", 5, "1"), ("c", 4, "1"), ("c", 3, "2"))
    assert line.pop() == "b/1"
    shares.add("c", [("gpu", 20)])
    assert line.pop() == "a/1"
    shares.add("c", [("gpu", 20)], -1)
    line.push("a", 9, "1", "a/1")
    assert taken(line) == ["c/1", "c/2", "a/1"]


def test_what_was_taken_may_wait_again_with_another_score() -> None:
    line = line_of(gpus(wanting="a"), ("a", 5, "1"), ("a", 3, "2"))
    assert line.pop() == "a/1"
    line.push("a", 1, "1", "again")
    assert taken(line) == ["a/2", "again"]


def test_the_queue_is_ordered_level_by_level() -> None:
    # Between x and y it is x's turn, although y2 alone is the furthest behind of all.
    tree = [ShareOf("x"), ShareOf("y"), ShareOf("x1", "x"), ShareOf("y1", "y"), ShareOf("y2", "y")]
    shares = gpus(*tree, wanting=["x1", "y1", "y2"], used={"x1": 10, "y1": 40})
    assert taken(line_of(shares, ("y2", 9, "1"), ("x1", 1, "1"), ("y1", 5, "1"))) == ["x1/1", "y2/1", "y1/1"]


def test_a_tenant_that_has_children_competes_with_them_for_its_own_work() -> None:
    tree = [ShareOf("top"), ShareOf("low", "top")]
    shares = gpus(*tree, wanting=["top", "low"], used={"low": 10})
    line = line_of(shares, ("top", 1, "1"), ("top", 1, "2"), ("low", 9, "1"))
    assert line.pop() == "top/1"
    shares.add("top", [("gpu", 20)])
    assert taken(line) == ["low/1", "top/2"]


def test_a_burst_allowance_puts_a_tenant_before_others_while_the_cluster_is_idle() -> None:
    tenants = [ShareOf("a", target=0.2, burst=2.0), ShareOf("b", target=0.2)]
    shares = gpus(*tenants, wanting="ab", used={"a": 20, "b": 20})
    assert [shares.deficit("a"), shares.deficit("b")] == pytest.approx([1 / 3, 0.0])
    assert taken(line_of(shares, ("a", 1, "1"), ("b", 9, "1"))) == ["a/1", "b/1"]


def test_usage_of_one_who_does_not_wait_holds_back_its_siblings() -> None:
    tree = [ShareOf("x"), ShareOf("y"), ShareOf("x1", "x"), ShareOf("x2", "x")]
    shares = gpus(*tree, wanting=["x1", "y"])
    line = line_of(shares, ("x1", 9, "1"), ("y", 1, "1"))
    shares.add("x2", [("gpu", 10)])
    assert taken(line) == ["y/1", "x1/1"]


def test_two_lines_follow_the_same_shares() -> None:
    shares = gpus(wanting="ab")
    one, other = (line_of(shares, ("a", 9, "1"), ("b", 1, "1")) for _ in range(2))
    shares.add("a", [("gpu", 10)])
    assert taken(one) == taken(other) == ["b/1", "a/1"]


def test_a_score_that_is_no_number_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="not a number"):
        line_of(gpus(wanting="a"), ("a", math.nan, "1"))


# Against a slow one that works everything out anew for each item.

Group = tuple[str, bool]  # a tenant, and whether only its own work is meant
Waiting = tuple[str, float, str, int]  # (tenant, score, tie, number)


@dataclass
class Slow:
    """The rules once more, without memory: shares, targets and the traversal, computed from the facts alone."""

    tenants: Mapping[str, ShareOf]
    capacity: Mapping[str, int]
    used: dict[str, dict[str, int]]
    wanting: frozenset[str]
    start: dict[str, dict[str, int]] = field(init=False)
    waiting: list[Waiting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = {name: dict(amounts) for name, amounts in self.used.items()}

    def below(self, group: Group | None) -> list[Group]:
        parent = group[0] if group else ""
        children: list[Group] = [(name, False) for name, tenant in self.tenants.items() if tenant.parent == parent]
        return [(parent, True), *children] if group and children else children

    def covers(self, group: Group, tenant: str) -> bool:
        return group[0] == tenant or (
            not group[1] and self.tenants[tenant].parent != "" and self.covers(group, self.tenants[tenant].parent)
        )

    def holds(self, group: Group) -> float:
        return max(
            sum(amounts.get(resource, 0) for name, amounts in self.used.items() if self.covers(group, name)) / whole
            for resource, whole in self.capacity.items()
        )

    def wants(self, group: Group) -> bool:
        busy = self.wanting | {name for name, amounts in self.start.items() if any(amounts.values())}
        return any(self.covers(group, name) for name in busy)

    def worth(self, group: Group) -> float:
        above: Group | None = None
        if group[1]:
            above = (group[0], False)
        elif self.tenants[group[0]].parent:
            above = (self.tenants[group[0]].parent, False)
        pool = self.worth(above) if above else 1.0
        rivals = [self.wish(each) for each in self.below(above) if each == group or self.wants(each)]
        claimed = sum(target for _, target, _ in rivals if target is not None)
        weight, target, burst = self.wish(group)
        if target is not None:
            share = target * min(1.0, pool / claimed) if claimed else 0.0
        else:
            # An idle tenant has a target, but does not reduce those of others.
            share = max(0.0, pool - claimed) * weight / sum(weight for weight, target, _ in rivals if target is None)
        full = max(
            sum(amounts.get(resource, 0) for amounts in self.start.values()) / whole
            for resource, whole in self.capacity.items()
        )
        return share * (1 + (burst - 1) * max(0, (0.8 - full) / 0.8))

    def wish(self, group: Group) -> tuple[float, float | None, float]:
        tenant = ShareOf(group[0]) if group[1] else self.tenants[group[0]]
        return tenant.weight, tenant.target, tenant.burst

    def standing(self, group: Group) -> int:
        worth = self.worth(group)
        deficit = max(0.0, (worth - self.holds(group)) / worth) if worth > 0 else 0.0
        return math.floor(deficit * (1.0 if group[1] else self.tenants[group[0]].penalty) * 100 + 1e-9)

    def next_in(self, group: Group | None) -> Waiting | None:
        below = [] if group and group[1] else self.below(group)
        if group and not below:
            own = [one for one in self.waiting if one[0] == group[0]]
            return min(own, key=lambda one: (-one[1], one[2], one[3]), default=None)
        found = [(each, item) for each in below if (item := self.next_in(each)) is not None]
        best = min(found, key=lambda pair: (-self.standing(pair[0]), -pair[1][1], pair[0][0]), default=None)
        return best[1] if best else None

    def pop(self) -> Waiting | None:
        item = self.next_in(None)
        if item:
            self.waiting.remove(item)
        return item


@st.composite
def trees(draw: st.DrawFn) -> dict[str, ShareOf]:
    found: dict[str, ShareOf] = {}
    for number in range(draw(st.integers(1, 7))):
        found[f"t{number}"] = ShareOf(
            f"t{number}",
            draw(st.sampled_from(["", *found])),
            draw(st.sampled_from([1.0, 2.0, 0.5])),
            draw(st.sampled_from([None, None, 0.1, 0.5, 0.9])),
            draw(st.sampled_from([1.0, 1.5])),
            draw(st.sampled_from([1.0, 0.5, 0.05])),
        )
    return found


@settings(max_examples=200, deadline=None)
@given(trees(), st.data())
def test_the_queue_equals_one_that_is_worked_out_anew_each_time(
    tenants: dict[str, ShareOf], data: st.DataObject
) -> None:
    names = st.sampled_from(sorted(tenants))
    amounts = st.sampled_from([(("gpu", 1),), (("gpu", 2), ("cpu", 40)), (("cpu", 70),)])
    capacity = {"gpu": 20, "cpu": 1000}
    used = data.draw(st.dictionaries(names, st.fixed_dictionaries({"gpu": st.integers(0, 4), "cpu": st.just(10)})))
    wanting = data.draw(st.frozensets(names))
    slow = Slow(tenants, capacity, {name: dict(held) for name, held in used.items()}, wanting)
    shares = Shares(tenants, capacity, used, wanting)
    line: FairQueue[Waiting] = FairQueue(shares)
    done: list[tuple[str, tuple[tuple[str, int], ...]]] = []

    def move(tenant: str, moved: tuple[tuple[str, int], ...], sign: int) -> None:
        shares.add(tenant, moved, sign)
        held = slow.used.setdefault(tenant, {})
        for resource, amount in moved:
            held[resource] = held.get(resource, 0) + sign * amount

    def push(number: int) -> None:
        one = (data.draw(names), data.draw(st.sampled_from([0.0, 0.5, 1.0])), data.draw(st.sampled_from("xy")), number)
        slow.waiting.append(one)
        line.push(one[0], one[1], one[2], one)

    for number, step in enumerate(
        data.draw(st.lists(st.sampled_from(["push", "push", "pop", "add", "undo"]), max_size=30))
    ):
        if step == "push":
            push(number)
        elif step == "pop":
            item = line.pop()
            assert item == slow.pop()
            if item and data.draw(st.booleans()):
                done.append((item[0], data.draw(amounts)))
                move(*done[-1], 1)
        elif step == "add":
            done.append((data.draw(names), data.draw(amounts)))
            move(*done[-1], 1)
        elif done:
            move(*done.pop(data.draw(st.integers(0, len(done) - 1))), -1)
        assert len(line) == len(slow.waiting)
    while slow.waiting:
        assert line.pop() == slow.pop()
    assert line.pop() is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0]), st.uuids().map(str)), unique_by=lambda w: w[2]
    )
)
def test_the_order_does_not_depend_on_the_order_of_arrival(waiting: list[tuple[str, float, str]]) -> None:
    tree = [ShareOf("a"), ShareOf("b", "a", weight=2), ShareOf("c")]
    one, other = (line_of(gpus(*tree, wanting="abc"), *each) for each in (waiting, reversed(waiting)))
    assert taken(one) == taken(other)
