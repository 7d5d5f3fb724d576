"""Nominations: capacity that was cleared is reserved for the unit that it was cleared for, until it is free or
withdrawn."""

from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.state.cluster_state import Nomination
from support.scheduling.cluster_states import (
    NOW,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    evicted,
    full_of,
    machine,
    place,
    put,
    run,
    submit,
    why,
)


def test_capacity_is_held_for_whom_it_was_cleared_and_given_to_it() -> None:
    cluster = full_of(old={})
    submit(cluster, ask("asker", gpus=1, priority=10))
    plan = cycle(cluster)
    assert evicted(plan) == {"old": "LowerPriority"}
    assert plan.preemptions[0].deadline == NOW + 30
    assert cluster.nominated["asker"] == Nomination(("a",), NOW + 90)
    assert why(cluster, plan, "asker").why is ReasonCode.PREEMPTING
    end(cluster, "old")
    submit(cluster, ask("rival", gpus=1, priority=5, at=NOW - 5000))
    assert bound(cluster, cycle(cluster, NOW + 20)) == {"asker": ("a",)}


def test_nothing_is_evicted_twice_while_the_victims_stop() -> None:
    cluster = full_of(x={}, y={}, z={})
    submit(cluster, ask("asker", gpus=1, priority=10))
    assert len(evicted(cycle(cluster))) == 1
    for second in range(1, 30):
        plan = cycle(cluster, NOW + second)
        assert plan.preemptions == []
        assert plan.bindings == []


def test_a_victim_that_does_not_stop_in_time_is_waited_for_and_nobody_slips_in() -> None:
    cluster = full_of(x={}, y={})
    end(cluster, "y")
    submit(cluster, ask("asker", gpus=2, priority=10))
    assert set(evicted(cycle(cluster))) == {"x"}
    assert place(cluster, ask("long", gpus=1), now=NOW + 40) == {}
    assert place(cluster, ask("short", gpus=1, ttl=5), now=NOW + 10) == {"short": ("a",)}, (
        "it ends before the victim does"
    )


def test_a_nomination_expires_and_the_capacity_is_free_again() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("stuck", gpus=1), "a")
    cluster.wait(ask("asker", gpus=2, preempts=False), Nomination(("a",), NOW + 60))
    submit(cluster, ask("rival", gpus=1))
    assert bound(cluster, cycle(cluster, NOW + 60)) == {}
    assert bound(cluster, cycle(cluster, NOW + 61)) == {"rival": ("a",)}
    assert not cluster.nominated


def test_a_nomination_on_a_node_that_is_gone_is_given_up_at_once() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    cluster.wait(ask("asker", gpus=1), Nomination(("a",), NOW + 60))
    cluster.remove_node("a")
    assert bound(cluster, cycle(cluster)) == {"asker": ("b",)}


def test_a_nominee_is_placed_on_the_capacity_that_was_cleared_and_not_elsewhere() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    run(cluster, ask("old", gpus=1), "a", ending=True, ends_in=10)
    cluster.wait(ask("asker", gpus=1), Nomination(("a",), NOW + 60))
    assert bound(cluster, cycle(cluster)) == {}
    end(cluster, "old")
    assert bound(cluster, cycle(cluster)) == {"asker": ("a",)}


def test_others_of_the_same_kind_are_not_nominated_with_it() -> None:
    cluster = full_of(x={}, y={"priority": 50})
    submit(cluster, ask("a1", gpus=1, priority=10), ask("a2", gpus=1, priority=10))
    plan = cycle(cluster)
    assert evicted(plan) == {"x": "LowerPriority"}
    assert set(cluster.nominated) == {"a1"}
    assert cycle(cluster, NOW + 6).preemptions == []


def test_two_askers_get_two_victims() -> None:
    cluster = full_of(x={}, y={})
    submit(cluster, ask("a1", gpus=1, priority=10), ask("a2", gpus=1, priority=10))
    plan = cycle(cluster)
    assert len(plan.preemptions) == 2
    assert set(evicted(plan)) == {"x", "y"}


def test_a_node_that_grows_gives_its_capacity_to_the_nominee_first() -> None:
    cluster = full_of(old={})
    submit(cluster, ask("asker", gpus=1, priority=10), ask("other", gpus=1, priority=0))
    cycle(cluster)
    put(cluster, machine("a", gpus=2))
    assert bound(cluster, cycle(cluster, NOW + 1)) == {"asker": ("a",)}
