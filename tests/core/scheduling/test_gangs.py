"""Gangs, and allocations of several nodes: all at once or not at all, and close together."""

from dataclasses import replace

import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.state.cluster_state import ClusterState, Nomination
from support.scheduling.cluster_states import (
    GPU,
    HOST,
    NOW,
    RACK,
    ZONE,
    apart,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    machine,
    members,
    near,
    place,
    put,
    run,
    running,
    spread,
    stop_victims,
    submit,
    why,
)


def nodes_of(cluster: ClusterState, *asks: Ask, **policy: bool) -> list[str]:
    placed = place(cluster, *asks, **policy)
    return sorted(node for nodes in placed.values() for node in nodes)


# All or none.


def test_a_gang_is_placed_all_at_once_in_one_binding() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    submit(cluster, *members("g", 4, gpus=1))
    plan = cycle(cluster)
    assert len(plan.bindings) == 1
    assert sorted(bound(cluster, plan).values()) == [("a",), ("a",), ("b",), ("b",)]


def test_a_gang_that_does_not_fit_leaves_nothing_behind_and_others_may_run() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=1))
    free = cluster.fleet.now.free.copy()
    submit(cluster, *members("g", 4, gpus=1))
    plan = cycle(cluster)
    assert not plan.bindings
    assert (cluster.fleet.now.free == free).all()
    reason = why(cluster, plan, "g-0")
    assert reason.code == f"no_capacity_{GPU}"
    assert dict(reason.excluded)["together"] == 2
    assert len(place(cluster, *(ask(f"x{n}", gpus=1) for n in range(3)))) == 3


def test_an_incomplete_gang_says_how_many_are_missing_and_until_when_it_waits() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    submit(cluster, *members("g", 2, least=3, timeout=90, gpus=1, at=NOW - 60))
    reason = why(cluster, cycle(cluster), "g-1")
    assert (reason.why, reason.members, reason.members_min) == (ReasonCode.GANG_INCOMPLETE, 2, 3)
    assert reason.until == NOW + 30


def test_the_timeout_runs_from_the_first_and_fails_all_that_are_there() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    first, second = members("g", 2, least=3, timeout=60, gpus=1)
    submit(cluster, replace(first, submitted_at=NOW - 59), replace(second, submitted_at=NOW))
    assert cycle(cluster).failed == []
    failed = cycle(cluster, NOW + 1).failed
    assert sorted(one.uid for one, _ in failed) == ["g-0", "g-1"]
    assert failed[0][1].why is ReasonCode.GANG_INCOMPLETE


def test_without_a_timeout_a_gang_waits_for_ever() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    submit(cluster, *members("g", 2, least=3, gpus=1))
    assert cycle(cluster, NOW + 1e9).failed == []


def test_a_complete_gang_is_never_given_up_for_want_of_capacity() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    submit(cluster, *members("g", 2, timeout=60, gpus=1))
    assert cycle(cluster, NOW + 1e6).failed == []


def test_the_last_member_completes_the_gang() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    first, second, third = members("g", 3, gpus=1)
    assert place(cluster, first, second) == {}
    assert len(place(cluster, third)) == 3


def test_members_beyond_those_that_are_needed_follow_one_by_one_in_the_same_cycle() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    submit(cluster, *members("g", 6, least=3, gpus=1))
    plan = cycle(cluster)
    assert [len(binding.members) for binding in plan.bindings] == [3, 1]
    assert len(cluster.waiting) == 2


def test_a_late_member_of_a_gang_that_runs_is_placed_alone() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    first, second, late = members("g", 3, least=2, gpus=1)
    place(cluster, first, second)
    assert place(cluster, late) == {"g-2": ("a",)}


def test_a_member_that_comes_back_to_its_running_gang_is_placed_alone() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    first, second = members("g", 2, gpus=1)
    place(cluster, first, second)
    cluster.wait(first)
    assert set(bound(cluster, cycle(cluster))) == {"g-0"}


def test_a_gang_that_is_being_stopped_begins_again_only_when_all_of_it_has_stopped() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    gang = members("g", 2, gpus=2, timeout=10, at=NOW - 5000)
    run(cluster, gang[0], "a", ending=True)
    run(cluster, gang[1], "b", ending=True)
    cluster.wait(gang[0])
    plan = cycle(cluster)
    assert not plan.bindings, "half a gang must not begin"
    assert not plan.failed, "and its time is not up: it was complete"
    assert why(cluster, plan, "g-0").why is ReasonCode.GANG_INCOMPLETE
    cluster.wait(gang[1])
    assert set(bound(cluster, cycle(cluster))) == {"g-0", "g-1"}


def test_a_gang_that_lost_a_member_while_capacity_was_made_for_it_does_not_begin() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    first, second = members("g", 2, gpus=1)
    cluster.wait(first, Nomination(("a",), NOW + 60))
    cluster.wait(second, Nomination(("b",), NOW + 60))
    end(cluster, "g-1")
    plan = cycle(cluster)
    assert not plan.bindings
    assert why(cluster, plan, "g-0").why is ReasonCode.GANG_INCOMPLETE
    assert not cluster.nominated


# Shapes.


def test_members_of_different_shapes_are_placed_together() -> None:
    cluster = cluster_of(machine("a", gpus=4, cpu=8), machine("b", cpu=16))
    gang = Gang("g", 3)
    workers = [ask(f"w{n}", gpus=2, cpu=2, gang=gang) for n in range(2)]
    assert place(cluster, ask("head", cpu=16, gang=gang), *workers) == {"w0": ("a",), "w1": ("a",), "head": ("b",)}


def test_the_first_try_is_not_the_last_one() -> None:
    """The larger one fits on either node, and the smaller one only on one of them."""
    cluster = cluster_of(machine("a", gpus=2, disk="ssd"), machine("b", gpus=2))
    run(cluster, ask("old", gpus=0.5), "a", devices=(0,))
    gang = Gang("g", 3)
    here = cluster_of(machine("a", cpu=3, memory=1), machine("b", cpu=3, memory=4))
    asks = (ask("big", cpu=3, gang=gang), ask("small", cpu=1, memory=4, gang=gang), ask("least", cpu=2, gang=gang))
    assert sorted(place(here, *asks)) == ["big", "least", "small"]


def test_parts_of_devices_of_a_gang_are_distributed_until_they_fit() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("o1", gpus=0.3), "a", devices=(0,))
    gang = Gang("g", 4)
    parts = [0.6, 0.5, 0.4, 0.1]
    asks = [ask(f"x{number}", gpus=part, gang=gang) for number, part in enumerate(parts)]
    assert len(place(cluster, *asks)) == 4


def test_several_allocations_of_several_nodes_each_may_share_nodes_with_one_another() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=1), machine("c", gpus=1))
    placed = place(cluster, *members("g", 2, gpus=1, nodes=2))
    assert sorted(tuple(sorted(nodes)) for nodes in placed.values()) == [("a", "b"), ("a", "c")]


def test_many_allocations_of_several_nodes_are_placed_whatever_the_order() -> None:
    """Six that want three different nodes each fill 18 places of which no node may have been used up too early."""
    sizes = {"a": 6, "b": 6, "c": 2, "d": 2, "e": 1, "f": 1}
    cluster = cluster_of(*(machine(name, gpus=count) for name, count in sizes.items()))
    placed = place(cluster, *members("g", 6, gpus=1, nodes=3))
    assert len(placed) == 6
    assert all(len(set(nodes)) == 3 for nodes in placed.values())


def test_several_whole_nodes() -> None:
    cluster = cluster_of(*(machine(name, cpu=4) for name in "abc"))
    run(cluster, ask("old", cpu=1), "b")
    assert nodes_of(cluster, ask("x", nodes=2, exclusive=True)) == ["a", "c"]


# Pod affinity inside a gang.


def test_members_that_want_to_be_apart_are() -> None:
    cluster = cluster_of(*(machine(name, gpus=8, rack=f"r{name}") for name in "abc"))
    where = apart(RACK, app="web")
    gang = members("g", 3, gpus=1, where=where, labels={"app": "web"})
    assert nodes_of(cluster, *gang) == ["a", "b", "c"]
    assert place(cluster, *members("h", 2, gpus=1, where=where, labels={"app": "web"})) == {}


def test_members_that_want_to_be_near_each_other_are() -> None:
    cluster = cluster_of(machine("a", gpus=1, rack="r1"), *(machine(name, gpus=1, rack="r2") for name in "bcd"))
    where = near(RACK, app="web")
    assert nodes_of(cluster, *members("g", 3, gpus=1, where=where, labels={"app": "web"})) == ["b", "c", "d"]


def test_who_is_wanted_near_may_come_first_whatever_its_size() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    gang = Gang("g", 2)
    large = ask("large", gpus=1, gang=gang, where=near(HOST, app="db"))
    small = ask("small", gpus=0.1, gang=gang, labels={"app": "db"})
    placed = place(cluster, large, small)
    assert placed["large"] == placed["small"]


def test_a_spread_without_selector_spreads_the_gang() -> None:
    cluster = cluster_of(machine("a", gpus=8, zone="z1"), machine("b", gpus=8, zone="z2"))
    run(cluster, ask("other", gpus=1, where=spread(ZONE), gang=Gang("h", 1)), "a")
    assert nodes_of(cluster, *members("g", 4, gpus=1, where=spread(ZONE))) == ["a", "a", "b", "b"]
    put(cluster, machine("c", cpu=1, zone="z3"))
    submit(cluster, *members("k", 4, gpus=1, where=spread(ZONE)))
    assert not bound(cluster, cycle(cluster)), "nothing of it can be in the third zone"


# Close together.


def racks(free: dict[str, int]) -> ClusterState:
    """Four nodes in each of two racks of each of two zones, with so many GPUs; `r00` names rack 0 of zone 0."""
    return cluster_of(
        *(
            machine(f"{rack}n{number}", gpus=gpus, rack=rack, zone=f"z{rack[1]}")
            for rack, gpus in free.items()
            for number in range(2)
        )
    )


@pytest.mark.parametrize(
    ("free", "together"),
    [
        pytest.param({"r00": 1, "r01": 2, "r10": 4, "r11": 4}, {"r01"}, id="one rack has just enough"),
        pytest.param({"r00": 1, "r01": 1, "r10": 1, "r11": 2}, {"r11"}, id="only one rack has enough"),
        pytest.param({"r00": 1, "r01": 1}, {"r00", "r01"}, id="no rack has enough, the zone does"),
        pytest.param({"r00": 1, "r11": 1}, {"r00", "r11"}, id="no zone has enough, all together have"),
    ],
)
def test_a_gang_is_placed_in_one_rack_if_it_fits_else_in_one_zone_else_anywhere(
    free: dict[str, int], together: set[str]
) -> None:
    assert {node[:3] for node in nodes_of(racks(free), *members("g", 4, gpus=1))} == together


def test_a_zone_that_has_enough_is_taken_before_parts_of_two() -> None:
    cluster = racks({"r00": 1, "r10": 1, "r11": 1})
    assert {node[:2] for node in nodes_of(cluster, *members("g", 4, gpus=1))} == {"r1"}


def test_nodes_of_one_allocation_are_close_together_as_well() -> None:
    cluster = racks({"r00": 1, "r11": 4})
    assert {node[:3] for node in nodes_of(cluster, ask("x", gpus=1, nodes=2))} == {"r00"}
    assert {node[:3] for node in nodes_of(cluster, ask("y", gpus=1, nodes=2))} == {"r11"}


# Preempting.


def test_a_gang_may_have_capacity_cleared_for_all_of_it() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    for number, name in enumerate("aabb"):
        run(cluster, ask(f"old{number}", gpus=1), name)
    gang = members("g", 3, gpus=1, priority=10)
    submit(cluster, *gang)
    plan = cycle(cluster)
    assert len({victim.uid for victim in plan.preemptions[0].victims}) == 3, "each slot needs a victim of its own"
    assert set(cluster.nominated) == {"g-0", "g-1", "g-2"}
    stop_victims(cluster, plan)
    assert set(bound(cluster, cycle(cluster, NOW + 31))) >= {"g-0", "g-1", "g-2"}
    assert len(running(cluster)) == 4


def test_a_gang_for_which_not_enough_can_be_cleared_evicts_nobody() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    run(cluster, ask("low", gpus=2), "a")
    run(cluster, ask("high", gpus=2, priority=100), "b")
    submit(cluster, *members("g", 3, gpus=1, priority=10))
    assert cycle(cluster).preemptions == []


def test_several_nodes_are_cleared_of_one_that_runs_on_several() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    run(cluster, ask("wide", gpus=2, nodes=2), "a", "b")
    submit(cluster, ask("x", gpus=2, nodes=2, priority=10))
    plan = cycle(cluster)
    assert [victim.uid for victim in plan.preemptions[0].victims] == ["wide"]
    assert sorted(plan.preemptions[0].nominations[0].nodes) == ["a", "b"]


def test_the_urgency_of_a_gang_is_that_of_its_least_urgent_member() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("old", gpus=2, priority=5), "a")
    gang = Gang("g", 2)
    submit(cluster, ask("x", gpus=1, priority=10, gang=gang), ask("y", gpus=1, priority=1, gang=gang))
    assert cycle(cluster).preemptions == []
