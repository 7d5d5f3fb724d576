"""Preemption by shares: burst work is evicted for tenants within their targets, and budgets bind."""

import pytest

from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from support.scheduling.cluster_states import (
    LONG_AGO,
    NOW,
    ask,
    cluster_of,
    cycle,
    end,
    evicted,
    machine,
    run,
    submit,
    victims_for,
)


def two(first: float, second: float, *, gpus: int = 4) -> ClusterState:
    return cluster_of(machine("a", gpus=gpus), tenants=[ShareOf("t", target=first), ShareOf("u", target=second)])


def crowd(cluster: ClusterState, tenant: str, count: int, priority: int = 0) -> None:
    for number in range(count):
        one = ask(f"{tenant}{number}", gpus=1, tenant=tenant, namespace=tenant, priority=priority)
        run(cluster, one, "a", since=LONG_AGO + number)


def test_burst_work_goes_for_another_tenant_within_its_target_whatever_the_priority() -> None:
    cluster = two(0.5, 0.5)
    crowd(cluster, "u", 4, priority=1000)
    assert victims_for(cluster, priority=-5) == {"u3": "Burst"}, "the newest is what is beyond the target"


def test_work_within_its_target_does_not_go_for_equal_priority() -> None:
    cluster = two(0.5, 0.5)
    crowd(cluster, "u", 2)
    crowd(cluster, "t", 2)
    assert victims_for(cluster) == {}


def test_who_would_be_burst_evicts_no_work_of_others_that_is_not() -> None:
    cluster = two(0.5, 0.5)
    crowd(cluster, "t", 2)
    crowd(cluster, "u", 2)
    assert victims_for(cluster, priority=1000) == {"t1": "LowerPriority"}, "only its own tenant's"


def test_who_would_be_burst_may_evict_burst_of_lower_priority() -> None:
    cluster = cluster_of(machine("a", gpus=4), tenants=[ShareOf("t", target=0.0), ShareOf("u", target=0.5)])
    crowd(cluster, "u", 4)
    assert victims_for(cluster, priority=0, crosses=True) == {}
    end(cluster, "asker")
    assert victims_for(cluster, priority=1) == {}, "between tenants priority alone is no reason"
    end(cluster, "asker")
    assert victims_for(cluster, priority=1, crosses=True) == {"u3": "LowerPriority"}


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
    cluster = cluster_of(machine("a", gpus=4), tenants=tenants)
    crowd(cluster, "u", 4)
    assert victims_for(cluster, priority=-5) == expected


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
    cluster = cluster_of(machine("a", gpus=4), tenants=tenants)
    crowd(cluster, "u", 2)
    urgent = ask("u2", gpus=1, tenant="u", namespace="u", priority=10)
    run(cluster, urgent, "a", since=LONG_AGO + 2)
    run(cluster, ask("own", gpus=1, priority=0 if expected == {"own"} else 20), "a", since=LONG_AGO)
    assert set(victims_for(cluster, priority=priority, crosses=True)) == expected


def test_a_parents_budget_holds_for_those_below_it() -> None:
    family = [ShareOf("p", target=0.5, penalty=0.05), ShareOf("t", "p"), ShareOf("u", target=0.5)]
    cluster = cluster_of(machine("a", gpus=4), tenants=family)
    crowd(cluster, "u", 4)
    assert victims_for(cluster, priority=-5) == {}


def test_burst_is_not_used_inside_a_tenant() -> None:
    cluster = two(0.5, 0.5)
    crowd(cluster, "t", 4)
    assert victims_for(cluster) == {}


def test_of_several_evicted_for_being_burst_none_may_come_back_alone() -> None:
    """Together they are over the target, and one alone is not: it could evict its evictor."""
    tenants = [ShareOf("t", target=0.0), ShareOf("u", target=0.375)]
    cluster = cluster_of(machine("a", gpus=4), tenants=tenants)
    run(cluster, ask("u-old", gpus=2, tenant="u", namespace="u"), "a", since=LONG_AGO)
    run(cluster, ask("u-new", gpus=1, tenant="u", namespace="u"), "a", since=LONG_AGO + 1)
    run(cluster, ask("rock", gpus=1, priority=10_000), "a")
    assert victims_for(cluster, gpus=3, priority=100, crosses=True) == {}
    end(cluster, "asker")
    assert victims_for(cluster, gpus=2, priority=100, crosses=True) == {"u-old": "LowerPriority"}


def test_capacity_that_is_being_cleared_counts_as_held_by_whom_it_is_cleared_for() -> None:
    cluster = two(0.25, 0.25)
    crowd(cluster, "u", 4)
    assert victims_for(cluster) == {"u3": "Burst"}
    submit(cluster, ask("again", gpus=1))
    assert evicted(cycle(cluster, NOW + 5)) == {}, "its tenant would be beyond its target"


def test_what_a_parent_may_hold_beyond_its_target_lets_none_of_its_children_evict() -> None:
    """Most of the cluster is idle, so the parent may go far beyond its target; a moment later it may not any more."""
    family = [ShareOf("p", target=0.8, burst=3.0), ShareOf("t", "p", weight=1), ShareOf("u", "p", weight=3)]
    cluster = cluster_of(machine("a", gpus=6), machine("idle", gpus=10, cordoned=True), tenants=family)
    crowd(cluster, "u", 6)
    assert victims_for(cluster, gpus=4, priority=10, crosses=True) == {}
    end(cluster, "asker")
    assert len(victims_for(cluster, gpus=3, priority=10, crosses=True)) == 3


def test_whole_nodes_count_as_the_largest_that_they_may_be() -> None:
    cluster = cluster_of(
        machine("a", gpus=1), machine("b", gpus=4), tenants=[ShareOf("t", target=0.25), ShareOf("u", target=0.75)]
    )
    run(cluster, ask("small", gpus=1, tenant="t", priority=9), "a")
    run(cluster, ask("u0", gpus=4, tenant="u", namespace="u"), "b")
    assert victims_for(cluster, gpus=1, exclusive=True) == {}
