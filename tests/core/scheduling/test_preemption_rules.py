"""Preemption by priority: which victims are allowed, which are chosen, and that no cascade follows."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.objects.allocation import Gang
from bursar.core.scheduling.cycle.plan import Plan
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from support.scheduling.cluster_states import (
    GPU,
    HOST,
    LONG_AGO,
    NOW,
    ZONE,
    apart,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    evicted,
    full_of,
    machine,
    members,
    run,
    running,
    stop_victims,
    submit,
    victims_for,
)

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
    cluster = full_of(old={"priority": old})
    assert victims_for(cluster, priority=new) == ({"old": "LowerPriority"} if expected else {})


def test_who_never_preempts_waits() -> None:
    cluster = full_of(old={})
    assert victims_for(cluster, priority=10, preempts=False) == {}


def test_without_preemption_nobody_is_evicted() -> None:
    cluster = full_of(old={})
    submit(cluster, ask("asker", gpus=1, priority=10))
    assert cycle(cluster, preemption=False).preemptions == []


@pytest.mark.parametrize(("ran", "expected"), [(299, False), (300, True)])
def test_nothing_is_evicted_within_its_minimum_runtime(ran: float, expected: bool) -> None:
    cluster = full_of(old={"since": NOW - ran})
    assert bool(victims_for(cluster, priority=10)) is expected


def test_who_comes_of_age_is_evicted_without_anything_else_changing() -> None:
    cluster = full_of(old={"since": NOW - 290})
    assert victims_for(cluster, priority=10) == {}
    assert evicted(cycle(cluster, NOW + 10)) == {"old": "LowerPriority"}


def test_what_is_placed_by_a_plan_is_not_evicted_by_the_same_plan() -> None:
    tenants = [ShareOf("t", target=0.5), ShareOf("u", target=0.5, penalty=0.1)]
    cluster = cluster_of(machine("a", gpus=1), tenants=tenants)
    cluster.capacity[GPU] = 4000
    submit(cluster, ask("first", gpus=1), ask("asker", gpus=1, tenant="u", namespace="m", priority=100, crosses=True))
    plan = cycle(cluster, min_runtime_seconds=0)
    assert bound(cluster, plan) == {"first": ("a",)}
    assert plan.preemptions == []
    assert set(evicted(cycle(cluster, NOW + 6, min_runtime_seconds=0))) == {"first"}, "but by the next one it may be"


def test_what_is_told_to_stop_already_is_nobody_s_victim() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    run(cluster, ask("old", gpus=1), "a", ending=True, ends_in=20)
    assert victims_for(cluster, priority=10) == {}


def test_a_boost_decides_for_the_asker_and_for_the_victim() -> None:
    cluster = full_of(old={"priority": 5, "job": "j"})
    cluster.boosts["n", "j"] = ActiveBoost(50, NOW + 60)
    assert victims_for(cluster, priority=10) == {}
    cluster.boosts["n", "j"] = ActiveBoost(1, NOW + 60)
    end(cluster, "asker")
    assert victims_for(cluster, priority=3) == {"old": "LowerPriority"}, "a boost may lower as well"


def test_a_boosted_job_evicts_what_it_otherwise_could_not() -> None:
    cluster = full_of(old={"priority": 5})
    cluster.boosts["n", "j"] = ActiveBoost(50, NOW + 60)
    assert victims_for(cluster, job="j") == {"old": "LowerPriority"}


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        pytest.param("job-1", {"old": "LowerPriority"}, id="what the job made"),
        pytest.param("", {}, id="what merely has its label"),
        pytest.param("job-0", {}, id="what an earlier job of that name made"),
    ],
)
def test_a_boost_is_for_what_the_job_made(owner: str, expected: dict[str, str]) -> None:
    cluster = full_of(old={"priority": 5})
    cluster.boosts["n", "j"] = ActiveBoost(50, NOW + 60, "job-1")
    assert victims_for(cluster, job="j", owner=owner) == expected


# Between tenants.


@pytest.mark.parametrize(
    ("tenant", "crosses", "expected"),
    [
        pytest.param("t", False, {"old": "LowerPriority"}, id="of one tenant priority decides"),
        pytest.param("u", False, {}, id="another tenant's work stays, however urgent the asker is"),
        pytest.param("u", True, {"old": "LowerPriority"}, id="unless its class crosses tenants"),
    ],
)
def test_between_tenants_priority_alone_evicts_nobody(tenant: str, crosses: bool, expected: dict[str, str]) -> None:
    cluster = full_of(old={})
    cluster.capacity[GPU] = 4000
    cluster.tenants |= {name: ShareOf(name, target=0.5) for name in ("t", "u")}
    assert victims_for(cluster, tenant=tenant, namespace=tenant, priority=1000, crosses=crosses) == expected


def test_other_tenants_work_that_must_stay_does_not_hide_where_there_is_capacity_to_be_made() -> None:
    """More nodes are full of others' less urgent work than are tried before looking further is given up."""
    cluster = cluster_of(*(machine(f"a{number:02}", gpus=1) for number in range(40)))
    for number in range(39):
        run(cluster, ask(f"other-{number}", gpus=1, tenant="u", namespace="u", priority=-10), f"a{number:02}")
    run(cluster, ask("own", gpus=1, priority=0), "a39")
    cluster.tenants["u"] = ShareOf("u", target=1.0)
    assert victims_for(cluster, priority=10) == {"own": "LowerPriority"}


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
    cluster = cluster_of(machine("a", gpus=5))
    run(cluster, ask("small", gpus=1), "a", since=NOW - 301)
    run(cluster, ask("large", gpus=4), "a")
    assert set(victims_for(cluster, gpus=4, priority=10)) == {"large"}


def test_the_node_where_the_least_is_lost() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1), machine("c", gpus=1))
    run(cluster, ask("x", gpus=1), "a", since=NOW - 9000)
    run(cluster, ask("y", gpus=1), "b", since=NOW - 400)
    run(cluster, ask("z", gpus=1, priority=3), "c", since=NOW - 301)
    assert set(victims_for(cluster, priority=10)) == {"y"}


def test_who_is_nearly_done_is_spared() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("soon", gpus=1), "a", since=NOW - 1000, ends_in=10)
    run(cluster, ask("later", gpus=1), "a", since=NOW - 1000, ends_in=100_000)
    assert set(victims_for(cluster, priority=10)) == {"later"}


def test_a_gang_goes_as_a_whole() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    first, second = members("g", 2, gpus=1)
    run(cluster, first, "a")
    run(cluster, second, "b")
    assert set(victims_for(cluster, priority=10)) == {"g-0", "g-1"}


def test_a_gang_of_which_one_may_not_go_stays() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    gang = Gang("g", 2)
    run(cluster, ask("x", gpus=1, gang=gang), "a")
    run(cluster, ask("y", gpus=1, gang=gang, priority=99), "b")
    assert victims_for(cluster, priority=10) == {}


def test_gang_members_on_one_node_are_counted_once() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    for one in members("g", 2, gpus=1):
        run(cluster, one, "a", since=NOW - 1000)
    run(cluster, ask("single", gpus=2), "b", since=NOW - 1500)
    assert set(victims_for(cluster, gpus=2, priority=10)) == {"g-0", "g-1"}


def test_only_nodes_that_are_right_are_cleared() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1, cordoned=True), machine("c", gpus=1))
    for name in "abc":
        run(cluster, ask(f"on-{name}", gpus=1, labels={"app": name}), name)
    where = apart(HOST, app="unknown")
    submit(cluster, ask("asker", gpus=1, priority=10, where=where))
    assert set(evicted(cycle(cluster))) <= {"on-a", "on-c"}


def test_capacity_that_pod_anti_affinity_denies_is_made_by_evicting_the_pods() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    run(cluster, ask("x", gpus=1, labels={"app": "x"}), "a")
    run(cluster, ask("y", gpus=1), "a")
    assert set(victims_for(cluster, priority=10, where=apart(HOST, app="x"))) == {"x"}


def test_capacity_cleared_for_one_of_a_gang_keeps_the_others_apart_from_it() -> None:
    cluster = cluster_of(
        machine("a", gpus=1, zone="z1"), machine("b", gpus=1, zone="z1"), machine("c", gpus=1, zone="z2")
    )
    for name, ran in (("a", 400), ("b", 500), ("c", 9000)):
        run(cluster, ask(f"on-{name}", gpus=1), name, since=NOW - ran)
    submit(cluster, *members("g", 2, gpus=1, priority=10, where=apart(ZONE, app="g"), labels={"app": "g"}))
    assert set(evicted(cycle(cluster))) == {"on-a", "on-c"}


def test_a_whole_node_is_cleared_of_everybody() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("x", gpus=1), "a")
    run(cluster, ask("y", gpus=0.1), "a")
    assert set(victims_for(cluster, priority=10, exclusive=True)) == {"x", "y"}


def test_a_node_beyond_the_first_few_is_found() -> None:
    """Many nodes seem to have victims enough and have not: there the gang cannot go."""
    cluster = cluster_of(*(machine(f"n{number:02}", gpus=1) for number in range(20)))
    gang = Gang("g", 2)
    for number in range(19):
        run(cluster, ask(f"x{number:02}", gpus=1, priority=-9, gang=gang), f"n{number:02}", since=NOW - 4000)
    cluster.place(ask("held", gpus=0, gang=gang, priority=99), (), since=LONG_AGO)
    run(cluster, ask("lonely", gpus=1), "n19")
    assert set(victims_for(cluster, priority=10)) == {"lonely"}


# Evicted work cannot evict its evictor.


@st.composite
def rivals(draw: st.DrawFn) -> Callable[[], ClusterState]:
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

    def build() -> ClusterState:
        # What is idle elsewhere lets tenants go beyond their targets.
        cluster = cluster_of(*nodes, machine("idle", gpus=idle, cordoned=True), tenants=shares)
        for uid, node, gpus, tenant, priority, gang, since in residents:
            one = ask(uid, gpus=gpus, tenant=tenant, namespace=tenant, priority=priority, gang=gang)
            run(cluster, one, node, since=since)
        submit(cluster, asker)
        return cluster

    return build


def victims_of_the(cluster: ClusterState, plan: Plan) -> set[str]:
    assert set(evicted(plan)) <= set(cluster.placed)
    return set(evicted(plan))


@settings(max_examples=400)
@given(rivals())
def test_whoever_is_evicted_cannot_evict_its_evictor(build: Callable[[], ClusterState]) -> None:
    cluster = build()
    plan = cycle(cluster)
    gone = victims_of_the(cluster, plan)
    if not gone:
        return
    stop_victims(cluster, plan)
    for uid in gone:
        assert uid in cluster.waiting
    assert "asker" in bound(cluster, cycle(cluster, NOW + 31, preemption=False))
    # All of them are of age by then, and nothing else has changed.
    for hour in range(1, 4):
        plan = cycle(cluster, NOW + 3600 * hour)
        for preempting in plan.preemptions:
            askers = {one.uid for one in preempting.asks}
            chosen = {victim.uid for victim in preempting.victims}
            assert not (askers & gone and "asker" in chosen), f"{askers} evict their evictor"
        if "asker" not in running(cluster):
            break
        stop_victims(cluster, plan)
