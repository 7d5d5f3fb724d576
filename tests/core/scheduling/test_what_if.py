"""What would happen if it were submitted: asked of small worlds, which stay as they are."""

from dataclasses import fields

import numpy as np

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Company, Where
from bursar.core.objects.pending_reason import Why
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import simulate
from bursar.core.scheduling.state.cluster_state import Boost, World
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.state_copy import twin_of
from bursar.core.values.selector import parse
from support.scheduling.questions import GPU, NOW, POLICY, ask, charged, limited, placed, snapshot, waiting, world_of


def test_what_would_run_says_where_and_on_which_devices() -> None:
    world = world_of(2)
    placed(world, ask("r", 1), "n0", (0,))
    before = snapshot(world)
    (found,) = simulate(world, [ask("new", submitted_at=NOW)], POLICY, NOW)
    assert (found.runs_now, found.starts_at, found.waits) == (True, NOW, None)
    assert [(one.node, one.devices) for one in found.places] == [("n0", {GPU: (1,)})]
    assert snapshot(world) == before


def test_what_would_evict_others_says_whom_and_under_which_rule_and_evicts_nobody() -> None:
    world = world_of(4)
    placed(world, ask("low", 4), "n0", (0, 1, 2, 3))
    before = snapshot(world)
    (found,) = simulate(world, [ask("high", 4, priority=500, submitted_at=NOW)], POLICY, NOW)
    assert not found.runs_now
    assert [(one.namespace, one.name, one.rule) for one in found.victims] == [("team", "low", "LowerPriority")]
    assert ([one.node for one in found.places], found.starts_at) == (["n0"], NOW + POLICY.grace_seconds)
    assert snapshot(world) == before
    assert not world.placed["low"].ending


def test_what_would_wait_says_why_and_where_it_would_stand() -> None:
    world = waiting(limited(world_of(8), hard=2, bound=0), ask("waits", 8, submitted_at=NOW - 900))
    before = snapshot(world)
    (found,) = simulate(world, [charged("new", 4)], POLICY, NOW)
    assert found.waits is not None
    assert (found.runs_now, found.waits.reason.why, found.waits.position) == (False, Why.QUOTA_EXCEEDED, 1)
    assert snapshot(world) == before


def test_several_are_simulated_together() -> None:
    gang = Gang("g", 2)
    both = simulate(world_of(4, 4), [ask("g1", 4, gang=gang), ask("g2", 4, gang=gang)], POLICY, NOW)
    assert [one.runs_now for one in both] == [True, True]
    one, *_ = simulate(world_of(4, 4), [ask("g1", 4, gang=gang)], POLICY, NOW)
    assert one.waits is not None
    assert one.waits.reason.why is Why.GANG_INCOMPLETE


def test_a_copy_decides_as_its_world_does() -> None:
    world = world_of(8, 4, 2, labels={"rack": "r"})
    placed(world, ask("r", 2, labels={"app": "x"}), "n0", (0, 1), ends_in=300)
    apart = Where(apart=(Company("kubernetes.io/hostname", parse("app=x")),))
    waiting(world, *(ask(f"a{index}", 1 + index % 4, submitted_at=NOW - index) for index in range(30)))
    waiting(world, ask("lonely", where=apart), *(ask(f"g{index}", gang=Gang("g", 3)) for index in range(3)))
    twin = twin_of(world)
    theirs, ours = decide(twin, POLICY, NOW), decide(world, POLICY, NOW)
    assert theirs.bindings == ours.bindings
    assert theirs.reasons == ours.reasons
    assert snapshot(twin) == snapshot(world)
    assert np.array_equal(twin.fleet.now.whole, world.fleet.now.whole)


def test_a_copy_has_all_that_its_world_has() -> None:
    world = limited(world_of(4, 2), hard=100, bound=1)
    world.tenants, world.profiles = {"physics": ShareOf("physics")}, {"default": "ml"}
    world.boosts["team", "train"] = Boost(5, NOW + 60)
    world.probes.refused(ask("broke"))
    placed(world, ask("r", 3, priority=50), "n0", (0, 1, 2), ends_in=600)
    placed(world, ask("low", 2), "n1", (0, 1))
    waiting(world, ask("large", 4, preempts=False), ask("g", gang=Gang("g", 2)), ask("high", 2, priority=9))
    decide(world, POLICY, NOW)
    twin = twin_of(world)
    compared = {one.name for one in fields(World) if one.init} - {"fleet", "running", "limits", "promises"}
    assert {name for name in compared if getattr(twin, name) != getattr(world, name)} == set()
    untouched = World()
    assert {name for name in compared if getattr(world, name) == getattr(untouched, name)} <= {"habits"}, (
        "what is not used here is not compared"
    )
