"""Who may be evicted for whom, who is chosen, and that it ends there."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.allocation import Gang
from bursar.core.plan import Plan
from bursar.core.reason import Why
from bursar.core.share import ShareOf
from bursar.core.world import Boost, Nomination, World
from core.worlds import (
    GPU,
    HOST,
    LONG_AGO,
    NOW,
    ZONE,
    apart,
    ask,
    bound,
    cycle,
    end,
    evicted,
    machine,
    members,
    place,
    put,
    run,
    running,
    stop_victims,
    submit,
    why,
    world_of,
)


def full_of(**residents: dict[str, Any]) -> World:
    """One node with as many GPUs as there are residents, who have one each."""
    world = world_of(machine("a", gpus=len(residents)))
    for name, what in residents.items():
        since = what.pop("since", LONG_AGO)
        run(world, ask(name, gpus=1, **what), "a", since=since)
    return world


def victims_for(world: World, now: float = NOW, gpus: float = 1, **what: Any) -> dict[str, str]:
    submit(world, ask("asker", gpus=gpus, **what))
    return evicted(cycle(world, now))


# Priority.


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param(0, 1, True, id="lower"),
        pytest.param(1, 1, False, id="equal"),
        pytest.param(2, 1, False, id="higher"),
        pytest.param(-5, -4, True, id="lower and both below zero"),
    ],
)
def test_only_strictly_lower_priority_is_evicted(old: int, new: int, expected: bool) -> None:
    world = full_of(old={"priority": old})
    assert victims_for(world, priority=new) == ({"old": "LowerPriority"} if expected else {})


def test_who_never_preempts_waits() -> None:
    world = full_of(old={})
    assert victims_for(world, priority=10, preempts=False) == {}


def test_without_preemption_nobody_is_evicted() -> None:
    world = full_of(old={})
    submit(world, ask("asker", gpus=1, priority=10))
    assert cycle(world, preemption=False).preemptions == []


@pytest.mark.parametrize(("ran", "expected"), [(299, False), (300, True)])
def test_nothing_is_evicted_within_its_minimum_runtime(ran: float, expected: bool) -> None:
    world = full_of(old={"since": NOW - ran})
    assert bool(victims_for(world, priority=10)) is expected


def test_who_comes_of_age_is_evicted_without_anything_else_changing() -> None:
    world = full_of(old={"since": NOW - 290})
    assert victims_for(world, priority=10) == {}
    assert evicted(cycle(world, NOW + 10)) == {"old": "LowerPriority"}


def test_what_is_placed_by_a_plan_is_not_evicted_by_the_same_plan() -> None:
    tenants = [ShareOf("t", target=0.5), ShareOf("u", target=0.5, penalty=0.1)]
    world = world_of(machine("a", gpus=1), tenants=tenants)
    world.capacity[GPU] = 4000
    submit(world, ask("first", gpus=1), ask("asker", gpus=1, tenant="u", namespace="m", priority=100))
    plan = cycle(world, min_runtime_seconds=0)
    assert bound(world, plan) == {"first": ("a",)}
    assert plan.preemptions == []
    assert set(evicted(cycle(world, NOW + 6, min_runtime_seconds=0))) == {"first"}, "but by the next one it may be"


def test_what_is_told_to_stop_already_is_nobody_s_victim() -> None:
    world = world_of(machine("a", gpus=1))
    run(world, ask("old", gpus=1), "a", ending=True, ends_in=20)
    assert victims_for(world, priority=10) == {}


def test_a_boost_decides_for_the_asker_and_for_the_victim() -> None:
    world = full_of(old={"priority": 5, "job": "j"})
    world.boosts["n", "j"] = Boost(50, NOW + 60)
    assert victims_for(world, priority=10) == {}
    world.boosts["n", "j"] = Boost(1, NOW + 60)
    end(world, "asker")
    assert victims_for(world, priority=3) == {"old": "LowerPriority"}, "a boost may lower as well"


def test_a_boosted_job_evicts_what_it_otherwise_could_not() -> None:
    world = full_of(old={"priority": 5})
    world.boosts["n", "j"] = Boost(50, NOW + 60)
    assert victims_for(world, job="j") == {"old": "LowerPriority"}


# Who is chosen.


@pytest.mark.parametrize(
    ("residents", "gpus", "expected"),
    [
        pytest.param({"x": {"priority": 1}, "y": {"priority": 0}}, 1, {"y"}, id="the least urgent"),
        pytest.param({"x": {"since": NOW - 5000}, "y": {"since": NOW - 500}}, 1, {"y"}, id="the least work lost"),
        pytest.param({"x": {"checkpoint": 60}, "y": {"since": NOW - 500}}, 1, {"x"}, id="who has saved its work"),
        pytest.param({"x": {}, "y": {}, "z": {}}, 2, {"x", "y"}, id="as many as needed"),
    ],
)
def test_the_cheapest_go(residents: dict[str, dict[str, Any]], gpus: int, expected: set[str]) -> None:
    assert set(victims_for(full_of(**residents), gpus=gpus, priority=10)) == expected


def test_nobody_goes_who_need_not() -> None:
    """The cheap one is too small to help, and stays when the large one has to go."""
    world = world_of(machine("a", gpus=5))
    run(world, ask("small", gpus=1), "a", since=NOW - 301)
    run(world, ask("large", gpus=4), "a")
    assert set(victims_for(world, gpus=4, priority=10)) == {"large"}


def test_the_node_where_the_least_is_lost() -> None:
    world = world_of(machine("a", gpus=1), machine("b", gpus=1), machine("c", gpus=1))
    run(world, ask("x", gpus=1), "a", since=NOW - 9000)
    run(world, ask("y", gpus=1), "b", since=NOW - 400)
    run(world, ask("z", gpus=1, priority=3), "c", since=NOW - 301)
    assert set(victims_for(world, priority=10)) == {"y"}


def test_who_is_nearly_done_is_spared() -> None:
    world = world_of(machine("a", gpus=2))
    run(world, ask("soon", gpus=1), "a", since=NOW - 1000, ends_in=10)
    run(world, ask("later", gpus=1), "a", since=NOW - 1000, ends_in=100_000)
    assert set(victims_for(world, priority=10)) == {"later"}


def test_a_gang_goes_as_a_whole() -> None:
    world = world_of(machine("a", gpus=1), machine("b", gpus=1))
    first, second = members("g", 2, gpus=1)
    run(world, first, "a")
    run(world, second, "b")
    assert set(victims_for(world, priority=10)) == {"g-0", "g-1"}


def test_a_gang_of_which_one_may_not_go_stays() -> None:
    world = world_of(machine("a", gpus=1), machine("b", gpus=1))
    gang = Gang("g", 2)
    run(world, ask("x", gpus=1, gang=gang), "a")
    run(world, ask("y", gpus=1, gang=gang, priority=99), "b")
    assert victims_for(world, priority=10) == {}


def test_gang_members_on_one_node_are_counted_once() -> None:
    world = world_of(machine("a", gpus=2), machine("b", gpus=2))
    for one in members("g", 2, gpus=1):
        run(world, one, "a", since=NOW - 1000)
    run(world, ask("single", gpus=2), "b", since=NOW - 1500)
    assert set(victims_for(world, gpus=2, priority=10)) == {"g-0", "g-1"}


def test_only_nodes_that_are_right_are_cleared() -> None:
    world = world_of(machine("a", gpus=1), machine("b", gpus=1, cordoned=True), machine("c", gpus=1))
    for name in "abc":
        run(world, ask(f"on-{name}", gpus=1, labels={"app": name}), name)
    where = apart(HOST, app="unknown")
    submit(world, ask("asker", gpus=1, priority=10, where=where))
    assert set(evicted(cycle(world))) <= {"on-a", "on-c"}


def test_room_that_company_denies_is_made_by_sending_the_company_away() -> None:
    world = world_of(machine("a", gpus=4))
    run(world, ask("x", gpus=1, labels={"app": "x"}), "a")
    run(world, ask("y", gpus=1), "a")
    assert set(victims_for(world, priority=10, where=apart(HOST, app="x"))) == {"x"}


def test_room_cleared_for_one_of_a_gang_keeps_the_others_apart_from_it() -> None:
    world = world_of(machine("a", gpus=1, zone="z1"), machine("b", gpus=1, zone="z1"), machine("c", gpus=1, zone="z2"))
    for name, ran in (("a", 400), ("b", 500), ("c", 9000)):
        run(world, ask(f"on-{name}", gpus=1), name, since=NOW - ran)
    submit(world, *members("g", 2, gpus=1, priority=10, where=apart(ZONE, app="g"), labels={"app": "g"}))
    assert set(evicted(cycle(world))) == {"on-a", "on-c"}


def test_a_whole_node_is_cleared_of_everybody() -> None:
    world = world_of(machine("a", gpus=2))
    run(world, ask("x", gpus=1), "a")
    run(world, ask("y", gpus=0.1), "a")
    assert set(victims_for(world, priority=10, exclusive=True)) == {"x", "y"}


def test_a_node_beyond_the_first_few_is_found() -> None:
    """Many nodes seem to have victims enough and have not: there the gang cannot go."""
    world = world_of(*(machine(f"n{number:02}", gpus=1) for number in range(20)))
    gang = Gang("g", 2)
    for number in range(19):
        run(world, ask(f"x{number:02}", gpus=1, priority=-9, gang=gang), f"n{number:02}", since=NOW - 4000)
    world.place(ask("held", gpus=0, gang=gang, priority=99), (), since=LONG_AGO)
    run(world, ask("lonely", gpus=1), "n19")
    assert set(victims_for(world, priority=10)) == {"lonely"}


# Shares.


def two(first: float, second: float, *, gpus: int = 4) -> World:
    return world_of(machine("a", gpus=gpus), tenants=[ShareOf("t", target=first), ShareOf("u", target=second)])


def crowd(world: World, tenant: str, count: int, priority: int = 0) -> None:
    for number in range(count):
        one = ask(f"{tenant}{number}", gpus=1, tenant=tenant, namespace=tenant, priority=priority)
        run(world, one, "a", since=LONG_AGO + number)


def test_burst_work_goes_for_another_tenant_within_its_target_whatever_the_priority() -> None:
    world = two(0.5, 0.5)
    crowd(world, "u", 4, priority=1000)
    assert victims_for(world, priority=-5) == {"u3": "Burst"}, "the newest is what is beyond the target"


def test_work_within_its_target_does_not_go_for_equal_priority() -> None:
    world = two(0.5, 0.5)
    crowd(world, "u", 2)
    crowd(world, "t", 2)
    assert victims_for(world) == {}


def test_who_would_be_burst_evicts_no_work_of_others_that_is_not() -> None:
    world = two(0.5, 0.5)
    crowd(world, "t", 2)
    crowd(world, "u", 2)
    assert victims_for(world, priority=1000) == {"t1": "LowerPriority"}, "only its own tenant's"


def test_who_would_be_burst_may_evict_burst_of_lower_priority() -> None:
    world = world_of(machine("a", gpus=4), tenants=[ShareOf("t", target=0.0), ShareOf("u", target=0.5)])
    crowd(world, "u", 4)
    assert victims_for(world, priority=0) == {}
    end(world, "asker")
    assert victims_for(world, priority=1) == {"u3": "LowerPriority"}


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        pytest.param(1.0, {"u3": "Burst"}, id="within its budget it takes what is beyond the others' share"),
        pytest.param(0.06, {"u3": "Burst"}, id="also with little of it left"),
        pytest.param(0.05, {}, id="with none left it waits until nobody else wants the room"),
    ],
)
def test_who_has_used_up_its_budget_evicts_nobody_for_being_burst(penalty: float, expected: dict[str, str]) -> None:
    tenants = [ShareOf("t", target=0.5, penalty=penalty), ShareOf("u", target=0.5)]
    world = world_of(machine("a", gpus=4), tenants=tenants)
    crowd(world, "u", 4)
    assert victims_for(world, priority=-5) == expected


@pytest.mark.parametrize(
    ("penalty", "priority", "expected"),
    [
        pytest.param(1.0, 5, {"u1"}, id="within its budget it takes from who is less urgent"),
        pytest.param(0.05, 5, set[str](), id="with none left only from who is also beyond the share"),
        pytest.param(0.05, 15, {"u2"}, id="as this one is"),
        pytest.param(0.05, 15, {"own"}, id="and from its own tenant as ever"),
    ],
)
def test_who_has_used_up_its_budget_evicts_others_only_where_they_are_burst_and_less_urgent(
    penalty: float, priority: int, expected: set[str]
) -> None:
    tenants = [ShareOf("t", target=0.5, penalty=penalty), ShareOf("u", target=0.5)]
    world = world_of(machine("a", gpus=4), tenants=tenants)
    crowd(world, "u", 2)
    urgent = ask("u2", gpus=1, tenant="u", namespace="u", priority=10)
    run(world, urgent, "a", since=LONG_AGO + 2)
    run(world, ask("own", gpus=1, priority=0 if expected == {"own"} else 20), "a", since=LONG_AGO)
    assert set(victims_for(world, priority=priority)) == expected


def test_a_parents_budget_holds_for_those_below_it() -> None:
    family = [ShareOf("p", target=0.5, penalty=0.05), ShareOf("t", "p"), ShareOf("u", target=0.5)]
    world = world_of(machine("a", gpus=4), tenants=family)
    crowd(world, "u", 4)
    assert victims_for(world, priority=-5) == {}


def test_burst_is_not_used_inside_a_tenant() -> None:
    world = two(0.5, 0.5)
    crowd(world, "t", 4)
    assert victims_for(world) == {}


def test_of_several_evicted_for_being_burst_none_may_come_back_alone() -> None:
    """Together they are over the target, and one alone is not: it could evict its evictor."""
    tenants = [ShareOf("t", target=0.0), ShareOf("u", target=0.375)]
    world = world_of(machine("a", gpus=4), tenants=tenants)
    run(world, ask("u-old", gpus=2, tenant="u", namespace="u"), "a", since=LONG_AGO)
    run(world, ask("u-new", gpus=1, tenant="u", namespace="u"), "a", since=LONG_AGO + 1)
    run(world, ask("rock", gpus=1, priority=10_000), "a")
    assert victims_for(world, gpus=3, priority=100) == {}
    end(world, "asker")
    assert victims_for(world, gpus=2, priority=100) == {"u-old": "LowerPriority"}


def test_room_that_is_being_cleared_counts_as_held_by_whom_it_is_cleared_for() -> None:
    world = two(0.25, 0.25)
    crowd(world, "u", 4)
    assert victims_for(world) == {"u3": "Burst"}
    submit(world, ask("again", gpus=1))
    assert evicted(cycle(world, NOW + 5)) == {}, "its tenant would be beyond its target"


def test_what_a_parent_may_hold_beyond_its_target_lets_none_of_its_children_evict() -> None:
    """Most of the cluster is idle, so the parent may go far beyond its target; a moment later it may not any more."""
    family = [ShareOf("p", target=0.8, burst=3.0), ShareOf("t", "p", weight=1), ShareOf("u", "p", weight=3)]
    world = world_of(machine("a", gpus=6), machine("idle", gpus=10, cordoned=True), tenants=family)
    crowd(world, "u", 6)
    assert victims_for(world, gpus=4, priority=10) == {}
    end(world, "asker")
    assert len(victims_for(world, gpus=3, priority=10)) == 3


def test_whole_nodes_count_as_the_largest_that_they_may_be() -> None:
    world = world_of(
        machine("a", gpus=1), machine("b", gpus=4), tenants=[ShareOf("t", target=0.25), ShareOf("u", target=0.75)]
    )
    run(world, ask("small", gpus=1, tenant="t", priority=9), "a")
    run(world, ask("u0", gpus=4, tenant="u", namespace="u"), "b")
    assert victims_for(world, gpus=1, exclusive=True) == {}


# What follows.


def test_room_is_held_for_whom_it_was_cleared_and_given_to_it() -> None:
    world = full_of(old={})
    submit(world, ask("asker", gpus=1, priority=10))
    plan = cycle(world)
    assert evicted(plan) == {"old": "LowerPriority"}
    assert plan.preemptions[0].deadline == NOW + 30
    assert world.nominated["asker"] == Nomination(("a",), NOW + 90)
    assert why(world, plan, "asker").why is Why.MAKING_ROOM
    end(world, "old")
    submit(world, ask("rival", gpus=1, priority=5, at=NOW - 5000))
    assert bound(world, cycle(world, NOW + 20)) == {"asker": ("a",)}


def test_nothing_is_evicted_twice_while_the_victims_stop() -> None:
    world = full_of(x={}, y={}, z={})
    submit(world, ask("asker", gpus=1, priority=10))
    assert len(evicted(cycle(world))) == 1
    for second in range(1, 30):
        plan = cycle(world, NOW + second)
        assert plan.preemptions == []
        assert plan.bindings == []


def test_a_victim_that_does_not_stop_in_time_is_waited_for_and_nobody_slips_in() -> None:
    world = full_of(x={}, y={})
    end(world, "y")
    submit(world, ask("asker", gpus=2, priority=10))
    assert set(evicted(cycle(world))) == {"x"}
    assert place(world, ask("long", gpus=1), now=NOW + 40) == {}
    assert place(world, ask("short", gpus=1, ttl=5), now=NOW + 10) == {"short": ("a",)}, (
        "it ends before the victim does"
    )


def test_a_nomination_expires_and_the_room_is_free_again() -> None:
    world = world_of(machine("a", gpus=2))
    run(world, ask("stuck", gpus=1), "a")
    world.wait(ask("asker", gpus=2, preempts=False), Nomination(("a",), NOW + 60))
    submit(world, ask("rival", gpus=1))
    assert bound(world, cycle(world, NOW + 60)) == {}
    assert bound(world, cycle(world, NOW + 61)) == {"rival": ("a",)}
    assert not world.nominated


def test_a_nomination_on_a_node_that_is_gone_is_given_up_at_once() -> None:
    world = world_of(machine("a", gpus=1), machine("b", gpus=1))
    world.wait(ask("asker", gpus=1), Nomination(("a",), NOW + 60))
    world.remove_node("a")
    assert bound(world, cycle(world)) == {"asker": ("b",)}


def test_a_nominee_is_placed_on_the_room_that_was_cleared_and_not_elsewhere() -> None:
    world = world_of(machine("a", gpus=1), machine("b", gpus=1))
    run(world, ask("old", gpus=1), "a", ending=True, ends_in=10)
    world.wait(ask("asker", gpus=1), Nomination(("a",), NOW + 60))
    assert bound(world, cycle(world)) == {}
    end(world, "old")
    assert bound(world, cycle(world)) == {"asker": ("a",)}


def test_others_of_the_same_kind_are_not_nominated_with_it() -> None:
    world = full_of(x={}, y={"priority": 50})
    submit(world, ask("a1", gpus=1, priority=10), ask("a2", gpus=1, priority=10))
    plan = cycle(world)
    assert evicted(plan) == {"x": "LowerPriority"}
    assert set(world.nominated) == {"a1"}
    assert cycle(world, NOW + 6).preemptions == []


def test_two_askers_get_two_victims() -> None:
    world = full_of(x={}, y={})
    submit(world, ask("a1", gpus=1, priority=10), ask("a2", gpus=1, priority=10))
    plan = cycle(world)
    assert len(plan.preemptions) == 2
    assert set(evicted(plan)) == {"x", "y"}


def test_a_node_that_grows_gives_its_room_to_the_nominee_first() -> None:
    world = full_of(old={})
    submit(world, ask("asker", gpus=1, priority=10), ask("other", gpus=1, priority=0))
    cycle(world)
    put(world, machine("a", gpus=2))
    assert bound(world, cycle(world, NOW + 1)) == {"asker": ("a",)}


# Whoever is evicted cannot evict its evictor.


@st.composite
def rivals(draw: st.DrawFn) -> Callable[[], World]:
    """Two tenants, perhaps below others, who fill a node or two; and one that asks."""
    below = draw(st.booleans())
    burst = draw(st.sampled_from([1.0, 1.0, 2.0]))
    targets = [draw(st.sampled_from([None, 0.0, 0.25, 0.4, 0.5, 0.75])) for _ in range(2)]
    weights = [draw(st.sampled_from([1.0, 3.0])) for _ in range(2)]
    shares = [
        ShareOf(name, "p" if below else "", weight, target, burst, draw(st.sampled_from([1.0, 1.0, 0.5, 0.05])))
        for name, weight, target in zip("tu", weights, targets, strict=True)
    ]
    if below:
        shares += [ShareOf("p", target=draw(st.sampled_from([None, 0.3, 0.6])), burst=burst), ShareOf("q")]
    nodes = [machine(name, gpus=draw(st.integers(1, 4))) for name in "ab"[: draw(st.integers(1, 2))]]
    idle = draw(st.sampled_from([0, 0, 2, 6]))
    residents: list[tuple[str, str, int, str, int, Gang | None, float]] = []
    for one in nodes:
        left = one.offers[GPU] // 1000
        while left > 0:
            gpus = draw(st.integers(1, left))
            left -= gpus
            tenant = draw(st.sampled_from("tu"))
            gang = Gang("g", 2) if draw(st.integers(0, 5)) == 0 else None
            since = LONG_AGO + draw(st.integers(0, 5))
            residents.append((f"r{len(residents)}", one.name, gpus, tenant, draw(st.integers(-1, 2)), gang, since))
    asker = ask(
        "asker",
        tenant=draw(st.sampled_from("tu")),
        namespace="asking",
        gpus=draw(st.integers(1, 4)),
        priority=draw(st.integers(-1, 2)),
        exclusive=draw(st.integers(0, 5)) == 0,
    )

    def build() -> World:
        # What is idle elsewhere lets tenants go beyond their targets.
        world = world_of(*nodes, machine("idle", gpus=idle, cordoned=True), tenants=shares)
        for uid, node, gpus, tenant, priority, gang, since in residents:
            one = ask(uid, gpus=gpus, tenant=tenant, namespace=tenant, priority=priority, gang=gang)
            run(world, one, node, since=since)
        submit(world, asker)
        return world

    return build


def victims_of_the(world: World, plan: Plan) -> set[str]:
    assert set(evicted(plan)) <= set(world.placed)
    return set(evicted(plan))


@settings(max_examples=400)
@given(rivals())
def test_whoever_is_evicted_cannot_evict_its_evictor(build: Callable[[], World]) -> None:
    world = build()
    plan = cycle(world)
    gone = victims_of_the(world, plan)
    if not gone:
        return
    stop_victims(world, plan)
    for uid in gone:
        assert uid in world.waiting
    assert "asker" in bound(world, cycle(world, NOW + 31, preemption=False))
    # All of them are of age by then, and nothing else has changed.
    for hour in range(1, 4):
        plan = cycle(world, NOW + 3600 * hour)
        for preempting in plan.preemptions:
            askers = {one.uid for one in preempting.asks}
            chosen = {victim.uid for victim in preempting.victims}
            assert not (askers & gone and "asker" in chosen), f"{askers} evict their evictor"
        if "asker" not in running(world):
            break
        stop_victims(world, plan)
