"""What would happen if it were submitted: asked of small worlds, which stay as they are."""

from collections import deque
from dataclasses import fields
from typing import Any

import numpy as np
from msgspec import structs

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import InterPodTerm, Where
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import simulate
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.fleet import Fleet
from bursar.core.scheduling.state.packing import PackingOutlook
from bursar.core.scheduling.state.placed_columns import Placed
from bursar.core.values.selector import parse
from support.scheduling.questions import GPU, NOW, POLICY, ask, charged, cluster_of, limited, placed, snapshot, waiting


def test_what_would_run_says_where_and_on_which_devices() -> None:
    cluster = cluster_of(2)
    placed(cluster, ask("r", 1), "n0", (0,))
    before = snapshot(cluster)
    (found,) = simulate(cluster, [ask("new", submitted_at=NOW)], POLICY, NOW)
    assert (found.runs_now, found.starts_at, found.waits) == (True, NOW, None)
    assert [(one.node, one.devices) for one in found.places] == [("n0", {GPU: (1,)})]
    assert snapshot(cluster) == before


def test_what_would_evict_others_says_whom_and_under_which_rule_and_evicts_nobody() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("low", 4), "n0", (0, 1, 2, 3))
    before = snapshot(cluster)
    (found,) = simulate(cluster, [ask("high", 4, priority=500, submitted_at=NOW)], POLICY, NOW)
    assert not found.runs_now
    assert [(one.namespace, one.name, one.rule) for one in found.victims] == [("team", "low", "LowerPriority")]
    assert ([one.node for one in found.places], found.starts_at) == (["n0"], NOW + POLICY.grace_seconds)
    assert snapshot(cluster) == before
    assert not cluster.placed["low"].ending


def test_what_would_wait_says_why_and_where_it_would_stand() -> None:
    cluster = waiting(limited(cluster_of(8), hard=2, bound=0), ask("waits", 8, submitted_at=NOW - 900))
    before = snapshot(cluster)
    (found,) = simulate(cluster, [charged("new", 4)], POLICY, NOW)
    assert found.waits is not None
    assert (found.runs_now, found.waits.reason.why, found.waits.position) == (False, ReasonCode.QUOTA_EXCEEDED, 1)
    assert snapshot(cluster) == before


def test_several_are_simulated_together() -> None:
    gang = Gang("g", 2)
    both = simulate(cluster_of(4, 4), [ask("g1", 4, gang=gang), ask("g2", 4, gang=gang)], POLICY, NOW)
    assert [one.runs_now for one in both] == [True, True]
    one, *_ = simulate(cluster_of(4, 4), [ask("g1", 4, gang=gang)], POLICY, NOW)
    assert one.waits is not None
    assert one.waits.reason.why is ReasonCode.GANG_INCOMPLETE


def test_a_copy_decides_as_its_cluster_state_does() -> None:
    cluster = cluster_of(8, 4, 2, labels={"rack": "r"})
    placed(cluster, ask("r", 2, labels={"app": "x"}), "n0", (0, 1), ends_in=300)
    apart = Where(apart=(InterPodTerm("kubernetes.io/hostname", parse("app=x")),))
    waiting(cluster, *(ask(f"a{index}", 1 + index % 4, submitted_at=NOW - index) for index in range(30)))
    waiting(cluster, ask("lonely", where=apart), *(ask(f"g{index}", gang=Gang("g", 3)) for index in range(3)))
    trial = cluster.copy()
    theirs, ours = decide(trial, POLICY, NOW), decide(cluster, POLICY, NOW)
    assert theirs.bindings == ours.bindings
    assert theirs.reasons == ours.reasons
    assert snapshot(trial) == snapshot(cluster)
    assert np.array_equal(trial.fleet.now.whole, cluster.fleet.now.whole)


def busy_cluster() -> ClusterState:
    """A cluster after a cycle that used every field of its state and of the scheduler's memory."""
    cluster = limited(cluster_of(4, 2), hard=100, bound=1)
    cluster.tenants, cluster.profiles = {"physics": ShareOf("physics", target=0.1)}, {"default": "ml"}
    cluster.boosts["team", "train"] = ActiveBoost(5, NOW + 60)
    cluster.memory.probes.refused(ask("broke"))
    placed(cluster, ask("r", 3, priority=50, labels={"app": "x"}), "n0", (0, 1, 2), ends_in=600)
    placed(cluster, ask("low", 2), "n1", (0, 1))
    apart = Where(apart=(InterPodTerm("kubernetes.io/hostname", parse("app=x")),))
    waiting(cluster, ask("large", 4, preempts=False), ask("g", gang=Gang("g", 2)), ask("high", 2, priority=9))
    waiting(cluster, ask("other", 2, tenant="biology", priority=9), ask("lonely", where=apart))
    decide(cluster, POLICY, NOW)
    return cluster


# Caches of what the memory can work out again from the copy.
EMPTY_IN_A_COPY = {"node_filters", "node_scores", "nominations"}
OBJECTS = {"fleet", "running", "limits", "topology_counts", "memory", "arrival_mix"}


def test_a_copy_has_all_that_its_cluster_has() -> None:
    cluster, untouched = busy_cluster(), ClusterState()
    trial = cluster.copy()
    for one, other, empty in ((cluster, trial, untouched), (cluster.memory, trial.memory, untouched.memory)):
        compared = {each.name for each in fields(one)} - OBJECTS - EMPTY_IN_A_COPY
        assert {name for name in compared if getattr(other, name) != getattr(one, name)} == set()
        assert {name for name in compared if getattr(one, name) == getattr(empty, name)} == set(), "not compared"
    assert trial.memory.arrival_mix.counts == cluster.memory.arrival_mix.counts != {}


# Parts of a copy that are the original's: descriptions of tenants, placed work, which is replaced and never
# changed, and figures of nodes that are computed from their descriptions alone.
SHARED = {"tenants", "profiles", "capacity", "Placed", "PackingOutlook"}


def test_a_copy_shares_nothing_that_a_decision_changes() -> None:
    cluster = busy_cluster()
    trial = cluster.copy()
    ours, theirs = parts_of(cluster), parts_of(trial)
    shared = {ours[one] for one in ours.keys() & theirs.keys()}
    of_nodes = {f"fleet.{one.name}" for one in fields(Fleet)} - {"fleet.now"}
    assert shared - of_nodes == SHARED


def test_a_decision_on_a_copy_leaves_its_cluster_as_it_was() -> None:
    cluster = busy_cluster()
    before, placed_before = snapshot(cluster), {uid: structs.asdict(one) for uid, one in cluster.placed.items()}
    trial = cluster.copy()
    for later in (0, 40, 400):
        trial.pretend(ask(f"new{later}", 2, priority=20, submitted_at=NOW + later))
        decide(trial, POLICY, NOW + later)
    assert snapshot(cluster) == before != snapshot(trial)
    assert {uid: structs.asdict(one) for uid, one in cluster.placed.items()} == placed_before


def parts_of(cluster: ClusterState) -> dict[int, str]:
    """Everything in a cluster state that can be changed in place, by its identity: which part of it that is."""
    found: dict[int, str] = {}
    todo: deque[tuple[Any, str]] = deque([(cluster, "")])
    while todo:
        one, path = todo.popleft()
        if isinstance(one, tuple):
            todo += [(each, path) for each in one]
            continue
        if id(one) in found or not is_mutable(one):
            continue
        leaf = isinstance(one, Placed | PackingOutlook)
        found[id(one)] = type(one).__name__ if leaf else path
        if isinstance(one, dict):
            todo += [(each, path) for each in one.values()]
        elif isinstance(one, list | set):
            todo += [(each, path) for each in one]
        elif not leaf and not isinstance(one, np.ndarray):
            deeper = path.count(".") < 1
            todo += [(value, f"{path}.{name}".lstrip(".") if deeper else path) for name, value in attributes(one)]
    return found


def attributes(one: Any) -> list[tuple[str, Any]]:
    names = {name for each in type(one).__mro__ for name in getattr(each, "__slots__", ())} | getattr(
        one, "__dict__", {}
    ).keys()
    return [(name, getattr(one, name)) for name in sorted(names) if hasattr(one, name)]


def is_mutable(one: Any) -> bool:
    """Frozen values count as immutable, whatever they cache."""
    if isinstance(one, str | bytes | int | float | frozenset | None):
        return False
    frozen = getattr(type(one), "__dataclass_params__", None) or getattr(type(one), "__struct_config__", None)
    return not (frozen is not None and frozen.frozen)
