"""What would happen if it were submitted: asked of small worlds, which stay as they are."""

from dataclasses import fields

import numpy as np

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import InterPodTerm, Where
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import simulate
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.state_copy import copy_of
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


def test_a_copy_decides_as_its_world_does() -> None:
    cluster = cluster_of(8, 4, 2, labels={"rack": "r"})
    placed(cluster, ask("r", 2, labels={"app": "x"}), "n0", (0, 1), ends_in=300)
    apart = Where(apart=(InterPodTerm("kubernetes.io/hostname", parse("app=x")),))
    waiting(cluster, *(ask(f"a{index}", 1 + index % 4, submitted_at=NOW - index) for index in range(30)))
    waiting(cluster, ask("lonely", where=apart), *(ask(f"g{index}", gang=Gang("g", 3)) for index in range(3)))
    trial = copy_of(cluster)
    theirs, ours = decide(trial, POLICY, NOW), decide(cluster, POLICY, NOW)
    assert theirs.bindings == ours.bindings
    assert theirs.reasons == ours.reasons
    assert snapshot(trial) == snapshot(cluster)
    assert np.array_equal(trial.fleet.now.whole, cluster.fleet.now.whole)


def test_a_copy_has_all_that_its_world_has() -> None:
    cluster = limited(cluster_of(4, 2), hard=100, bound=1)
    cluster.tenants, cluster.profiles = {"physics": ShareOf("physics")}, {"default": "ml"}
    cluster.boosts["team", "train"] = ActiveBoost(5, NOW + 60)
    cluster.probes.refused(ask("broke"))
    placed(cluster, ask("r", 3, priority=50), "n0", (0, 1, 2), ends_in=600)
    placed(cluster, ask("low", 2), "n1", (0, 1))
    waiting(cluster, ask("large", 4, preempts=False), ask("g", gang=Gang("g", 2)), ask("high", 2, priority=9))
    decide(cluster, POLICY, NOW)
    trial = copy_of(cluster)
    compared = {one.name for one in fields(ClusterState) if one.init} - {"fleet", "running", "limits", "nominations"}
    assert {name for name in compared if getattr(trial, name) != getattr(cluster, name)} == set()
    untouched = ClusterState()
    assert {name for name in compared if getattr(cluster, name) == getattr(untouched, name)} <= {"habits"}, (
        "what is not used here is not compared"
    )
