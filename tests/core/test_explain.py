"""Why it waits, what if, and the figures: asked of small worlds."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from bursar.core.allocation import Gang
from bursar.core.answer import Explanation
from bursar.core.ask import Ask, Company, Requirement, Shape, Spread, Taint, Where
from bursar.core.ask import Operator as Op
from bursar.core.charge import Charge
from bursar.core.cycle import decide
from bursar.core.explain import explain, figures, glimpse, queues, simulate, waiting_by_reason
from bursar.core.lineup import Lineup, Lineups, line_up, line_up_boosted
from bursar.core.plan import Policy
from bursar.core.quota import Counter
from bursar.core.reason import Short, Why
from bursar.core.running import Spot
from bursar.core.selector import parse
from bursar.core.share import ShareOf
from bursar.core.tree import Namespace, Tenant, Tree
from bursar.core.twin import twin_of
from bursar.core.waits import Waits
from bursar.core.world import Boost, World

GPU = "nvidia.com/gpu"
NOW = 1_000_000.0
POLICY = Policy()


OFFERED = {"cpu": 64_000, "memory": 256 << 30, GPU: 8000, "pods": 110_000}
APART = Company("host", parse("g=g"))
ONE, TWO = Short("members", 3, 1, 2), Short("members", 3, 2, 2)


def world_of(*nodes: int, labels: Mapping[str, str] | None = None, **options: Any) -> World:
    """Nodes n0, n1, … with so many GPUs each."""
    world = World()
    for index, gpus in enumerate(nodes):
        offered = {"cpu": 64_000, "memory": 256 << 30, GPU: gpus * 1000, "pods": 110_000}
        world.put_node(f"n{index}", offered, labels=dict(labels or {}), **options)
    return world


def ask(
    name: str, gpus: int = 1, *, nodes: int = 1, exclusive: bool = False, where: Where | None = None, **more: Any
) -> Ask:
    requests = tuple(sorted({"cpu": 1000, GPU: gpus * 1000}.items()))
    shape = Shape(requests, nodes, exclusive, where or Where())
    more.setdefault("submitted_at", NOW - 60)
    return Ask(name, "team", name, more.pop("tenant", "physics"), shape, **more)


def placed(world: World, one: Ask, node: str, devices: tuple[int, ...], *, ends_in: float = float("inf")) -> None:
    row = world.fleet.row_of[node]
    spot = Spot(row, ((world.fleet.device_column_of[GPU], devices),))
    world.place(one, [spot], since=NOW - 10_000, ends_at=NOW + ends_in)


def told(world: World, uid: str) -> Explanation:
    found = explain(world, uid, POLICY, NOW)
    assert found is not None
    return found


def waiting(world: World, *asks: Ask) -> World:
    for one in asks:
        world.wait(one)
    return world


def snapshot(world: World) -> Any:
    """Everything that a question must leave as it was."""
    now = world.fleet.now
    return (
        now.free.copy().tolist(),
        [one.copy().tolist() for one in now.devices],
        now.placed.tolist(),
        dict(world.placed),
        {uid: (one.ending, one.ends_at) for uid, one in world.placed.items()},
        world.running.ends().tolist(),
        {uid: sorted(group.members) for uid, group in world.waiting.items()},
        dict(world.nominated),
        dict(world.blocked),
        world.reservation,
        world.reserved_for,
        {tenant: dict(used) for tenant, used in world.used.items()},
        {row: (cell.hard, cell.bound) for row, cell in world.limits.cells.items()},
        dict(world.boosts),
        {kin: dict(rows) for kin, rows in world.tallies.rows.items()},
    )


# Reasons.


def test_what_does_not_wait_has_nothing_to_explain() -> None:
    world = world_of(8)
    placed(world, ask("runs"), "n0", (0,))
    assert explain(world, "runs", POLICY, NOW) is None
    assert explain(world, "nobody", POLICY, NOW) is None


def test_no_nodes_at_all_and_none_that_takes_work() -> None:
    assert told(waiting(World(), ask("a")), "a").reason.why is Why.NO_NODES_ACTIVE
    cordoned = told(waiting(world_of(8, 8, cordoned=True), ask("a")), "a")
    assert (cordoned.reason.why, cordoned.reason.nodes) == (Why.NO_NODES_ACTIVE, 2)


def test_short_of_gpus_says_how_many_are_needed_how_many_there_are_and_where() -> None:
    world = world_of(4, 4, 4)
    placed(world, ask("r0", 2), "n0", (0, 1))
    placed(world, ask("r1", 4), "n1", (0, 1, 2, 3))
    placed(world, ask("r2", 2), "n2", (0, 1))
    found = told(waiting(world, ask("a", 4)), "a")
    assert (found.reason.code, found.reason.matching) == (f"no_capacity_{GPU}", 3)
    assert found.reason.short == (Short(GPU, 4000, 2000, 3, 2),)


def test_what_could_be_placed_at_once_has_not_been_tried_yet() -> None:
    found = told(waiting(world_of(8), ask("a")), "a")
    assert (found.reason.why, found.others, found.starts_at) == (Why.NOT_TRIED, (), NOW)


def test_each_constraint_on_nodes_is_named_with_the_nodes_that_it_keeps_out() -> None:
    world = world_of(8, 8, labels={"zone": "a"})
    world.put_node("far", {"cpu": 64_000, GPU: 8000}, labels={"zone": "b"}, taints=(Taint("keep-off"),))
    where = Where(node_labels=(("zone", "b"),), required=((Requirement("gpu-memory", Op.AT_LEAST, ("80",)),),))
    found = told(waiting(world, ask("a", where=where)), "a")
    assert found.reason.why is Why.NO_MATCHING_NODES
    assert dict(found.reason.excluded) == {
        "nodeSelector zone=b": 2,
        "node affinity gpu-memory Gte (80)": 3,
        "taint keep-off:NoSchedule": 1,
    }
    assert found.starts_at is None


def limited(world: World, hard: int, bound: int) -> World:
    tree = Tree(tenants={"physics": Tenant("physics")}, namespaces={"team": Namespace("team", "physics")})
    world.limits.load(tree, {("tenant:physics", GPU): Counter(hard=hard * 1000, bound=bound * 1000)})
    return world


def charged(name: str, gpus: int) -> Ask:
    return ask(name, gpus, charge=Charge(accepted={GPU: gpus * 1000}))


def test_quota_is_told_apart_from_capacity_and_both_are_told() -> None:
    world = limited(world_of(4), hard=100, bound=98)
    placed(world, ask("r", 2), "n0", (0, 1))
    found = told(waiting(world, charged("a", 4)), "a")
    assert found.reason.why is Why.QUOTA_EXCEEDED
    assert found.reason.limits == (("tenant:physics", GPU, 100_000, 98_000, 4000),)
    assert [one.why for one in found.others] == [Why.NO_CAPACITY]
    assert found.starts_at is None


def test_part_of_a_gang_waits_for_the_others_and_stands_in_no_line() -> None:
    gang = Gang("g", 4, 300)
    found = told(waiting(world_of(8), ask("a", gang=gang), ask("b", gang=gang)), "a")
    assert (found.reason.why, found.reason.members, found.reason.members_min) == (Why.GANG_INCOMPLETE, 2, 4)
    assert found.reason.until == NOW - 60 + 300
    assert (found.position, found.position_overall, found.starts_at) == (None, None, None)


def test_a_complete_gang_that_has_no_room_together_says_where_one_would_fit() -> None:
    gang = Gang("g", 3)
    found = told(waiting(world_of(4, 4), *(ask(name, 4, gang=gang) for name in "abc")), "c")
    assert found.reason.why is Why.NO_CAPACITY
    assert dict(found.reason.excluded)["together"] == 2
    assert found.reason.short == (Short("members", 3, 2, 0),)


@pytest.mark.parametrize(
    ("asks", "short"),
    [
        ([ask(name, 2, gang=Gang("g", 6)) for name in "abcdef"], Short("members", 6, 5, 1)),
        ([ask(name, gpus, gang=Gang("g", 3)) for name, gpus in zip("abc", (8, 4, 2), strict=True)], TWO),
        ([ask(name, gpus, gang=Gang("g", 3)) for name, gpus in zip("abc", (8, 4, 4), strict=True)], ONE),
        ([ask("a", 2, nodes=3)], Short("nodes", 3, 2, 1)),
        ([ask(name, 1, nodes=2, gang=Gang("g", 7)) for name in "abcdefg"], Short("nodes", 14, 9, 1)),
        (
            [ask(name, gang=Gang("g", 3), labels={"g": "g"}, where=Where(apart=(APART,))) for name in "abc"],
            Short("members", 3, 2, 1),
        ),
    ],
)
def test_what_is_short_of_a_whole_is_how_many_of_it_fit_together(asks: list[Ask], short: Short) -> None:
    world = waiting(world_of(), *asks)
    for name, gpus in (("n0", 8), ("n1", 2), ("n2", 0)):
        world.put_node(name, {**OFFERED, GPU: gpus * 1000}, labels={"host": name})
    before = snapshot(world)
    found = told(world, "a").reason
    assert found.why is Why.NO_CAPACITY
    assert found.short == (short,)
    assert snapshot(world) == before


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Where(near=(Company("rack", parse("app=other")),)), Why.AFFINITY),
        (Where(apart=(Company("rack", parse("app=train")),)), Why.ANTI_AFFINITY),
        (Where(spreads=(Spread("rack", 1, selector=parse("app=train")),)), Why.SPREAD),
    ],
)
def test_company_that_keeps_it_out(where: Where, expected: Why) -> None:
    world = world_of(8, labels={"rack": "r1"})
    world.put_node("n1", {"cpu": 0, GPU: 0, "pods": 0}, labels={"rack": "r2"})
    placed(world, ask("r", labels={"app": "train"}), "n0", (0,))
    if expected is Why.SPREAD:
        world.put_node("n1", {"cpu": 8000, GPU: 8000}, labels={"rack": "r2"}, cordoned=True)
        placed(world, ask("r2", labels={"app": "train"}), "n0", (1,))
    elif expected is Why.ANTI_AFFINITY:
        world.remove_node("n1")
    found = told(waiting(world, ask("a", where=where, labels={"app": "train"})), "a")
    assert found.reason.why is expected
    assert found.starts_at is None, "who will be where by then is not foreseen"


def test_company_that_is_nowhere_is_told_apart_from_company_without_room() -> None:
    world = world_of(1, 1, labels={"rack": "r1"})
    placed(world, ask("r", labels={"app": "train"}), "n0", (0,))
    world.put_node("n1", OFFERED, labels={"rack": "r2"})
    waiting(world, ask("near", where=Where(near=(Company("rack", parse("app=train")),))))
    waiting(world, ask("lost", where=Where(near=(Company("rack", parse("app=nobody")),))))
    waiting(world, ask("wide", where=Where(near=(Company("hall", parse("app=train")),))))
    near, lost, wide = told(world, "near").reason, told(world, "lost").reason, told(world, "wide").reason
    assert (near.why, near.absent) == (Why.NO_CAPACITY, "")
    assert (lost.why, lost.absent) == (Why.AFFINITY, "rack")
    assert (wide.why, wide.absent) == (Why.AFFINITY, "hall"), "it runs, but where no node has the label"
    plan = decide(world, POLICY, NOW)
    assert {reason.absent for reason in plan.reasons.values() if reason.why is Why.AFFINITY} == {"rack", "hall"}


def test_all_other_reasons_come_in_their_order() -> None:
    world = limited(world_of(4, labels={"rack": "r1"}), hard=2, bound=2)
    placed(world, ask("r", 4, labels={"app": "train"}), "n0", (0, 1, 2, 3))
    near = Where(near=(Company("rack", parse("app=nobody")),))
    asked = ask("a", 1, where=near, charge=Charge(accepted={GPU: 1000}))
    found = told(waiting(world, asked), "a")
    assert [found.reason.why, *(one.why for one in found.others)] == [
        Why.QUOTA_EXCEEDED,
        Why.AFFINITY,
        Why.NO_CAPACITY,
    ]


def test_room_that_is_kept_for_one_who_waited_longer() -> None:
    world = world_of(4)
    placed(world, ask("r", 2), "n0", (0, 1), ends_in=600)
    waiting(world, ask("large", 4, submitted_at=NOW - 5000, preempts=False), ask("small", 2, preempts=False))
    decide(world, POLICY, NOW)
    large, small = told(world, "large"), told(world, "small")
    assert large.reservation is not None
    assert (large.reservation.nodes, large.reservation.at, large.starts_at) == (("n0",), NOW + 600, NOW + 600)
    assert small.reason.why is Why.HELD
    assert small.starts_at is None, "what it waits for has no known end"


def test_room_that_is_being_made() -> None:
    world = world_of(4)
    placed(world, ask("low", 4, priority=0), "n0", (0, 1, 2, 3))
    waiting(world, ask("high", 4, priority=100))
    decide(world, POLICY, NOW)
    found = told(world, "high")
    assert found.reason.why is Why.MAKING_ROOM
    assert found.nomination is not None
    assert found.nomination.nodes == ("n0",)
    assert found.starts_at == NOW + POLICY.grace_seconds
    assert (found.position, found.position_overall) == (1, 1)


def test_the_dominant_reason_is_the_one_that_the_cycle_gives() -> None:
    world = limited(world_of(4, 2, labels={"zone": "a"}), hard=10, bound=9)
    placed(world, ask("r", 4), "n0", (0, 1, 2, 3))
    waiting(
        world,
        charged("over", 2),
        ask("elsewhere", where=Where(node_labels=(("zone", "b"),))),
        ask("large", 3, preempts=False),
    )
    plan = decide(world, POLICY, NOW)
    for uid in ("over", "elsewhere", "large"):
        assert told(world, uid).reason.why is plan.reasons[world.waiting[uid].key].why


# Scores and shares.


def test_the_score_is_told_with_its_nine_terms() -> None:
    found = told(waiting(world_of(8), ask("a", priority=1000)), "a").score
    assert found is not None
    assert [one.factor for one in found.terms] == [
        "priority", "waiting", "deficit", "topology", "data", "backlog", "energy", "checkpoint", "conformance",
    ]  # fmt: skip
    assert found.total == pytest.approx(found.penalty * sum(one.value * one.weight for one in found.terms))
    assert (found.profile, found.terms[0].value) == ("default", 0.75)


def test_the_share_of_the_tenant_is_told() -> None:
    world = world_of(8)
    world.tenants = {"physics": ShareOf("physics", target=0.5, penalty=0.4), "biology": ShareOf("biology")}
    placed(world, ask("r", 2), "n0", (0, 1))
    share = told(waiting(world, ask("a")), "a").share
    assert share is not None
    assert (share.tenant, share.actual, share.target, share.penalty) == ("physics", 0.25, 0.5, 0.4)
    assert share.deficit == pytest.approx(0.5)


# The line.


def place(world: World, line: Lineup, uid: str) -> int:
    group = world.waiting[uid]
    found = line.position(group.members[uid], group)
    assert found is not None
    return found.overall


def in_order(world: World, line: Lineup) -> list[str]:
    return sorted(world.waiting, key=lambda uid: place(world, line, uid))


def test_positions_count_within_the_queue_and_overall() -> None:
    world = waiting(
        world_of(1),
        ask("first", queue="a", submitted_at=NOW - 900),
        ask("second", queue="b", submitted_at=NOW - 800),
        ask("third", 2, queue="a", submitted_at=NOW - 700),
    )
    found = told(world, "third")
    assert (found.queue, found.position, found.position_overall) == ("a", 2, 3)
    assert (found.ahead.allocations, found.ahead.amounts) == (2, {"cpu": 2000, GPU: 2000})


def test_tenants_take_turns_in_the_line() -> None:
    world = world_of(*[8] * 10)
    many = [ask(f"p{index:02}", 8, submitted_at=NOW - 9000 + index) for index in range(20)]
    waiting(world, *many, ask("one", 8, tenant="biology"))
    line = line_up(world, POLICY, NOW)
    order = in_order(world, line)
    assert order.index("one") <= 1, "a long backlog takes nothing from others"
    assert [uid for uid in order if uid != "one"] == [one.uid for one in many]


def test_members_of_a_gang_stand_together() -> None:
    gang = Gang("g", 2)
    world = waiting(
        world_of(8),
        ask("alone", submitted_at=NOW - 500),
        ask("g1", gang=gang, submitted_at=NOW - 900),
        ask("g2", gang=gang, submitted_at=NOW - 100),
    )
    order = in_order(world, line_up(world, POLICY, NOW))
    assert abs(order.index("g1") - order.index("g2")) == 1


def test_far_behind_the_front_the_order_of_submission_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.lineup.WALK_MAX", 5)
    asks = [ask(f"a{index:03}", 1 + index % 3, submitted_at=NOW - 9000 + index) for index in range(50)]
    world = waiting(world_of(1), *asks, ask("gone", submitted_at=NOW - 9999))
    world.forget("gone")
    line = line_up(world, POLICY, NOW)
    assert in_order(world, line) == [one.uid for one in asks]
    assert [place(world, line, one.uid) for one in asks] == list(range(1, 51))
    last = line.position(asks[-1], world.waiting[asks[-1].uid])
    assert last is not None
    assert (last.ahead.allocations, last.ahead.amounts["cpu"], len(line)) == (49, 49_000, 50)


def test_of_very_many_groups_the_oldest_and_the_most_urgent_come_to_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.lineup.GROUPS_MAX", 3)
    asks = [ask(f"a{index:03}", job=f"j{index}", submitted_at=NOW - 900 + index) for index in range(40)]
    world = waiting(world_of(1), *asks, ask("urgent", priority=100_000, submitted_at=NOW))
    assert in_order(world, line_up(world, POLICY, NOW)) == ["urgent", *(one.uid for one in asks)]


def test_a_boost_moves_a_job_to_the_front_and_the_question_changes_nothing() -> None:
    world = waiting(world_of(1), ask("other", submitted_at=NOW - 90), ask("mine", job="train"))
    before = snapshot(world)
    assert place(world, line_up(world, POLICY, NOW), "mine") == 2
    assert place(world, line_up_boosted(world, POLICY, NOW, ("team", "train"), 100_000), "mine") == 1
    assert snapshot(world) == before


def test_a_line_is_kept_for_a_second_and_made_anew_for_a_newcomer() -> None:
    world, lines = waiting(world_of(1), ask("a")), Lineups()
    first = lines.of(world, POLICY, NOW)
    assert lines.of(world, POLICY, NOW + 0.9, "a") is first
    waiting(world, ask("b"))
    assert place(world, lines.of(world, POLICY, NOW + 0.9, "b"), "b") == 2
    assert lines.of(world, POLICY, NOW + 5) is not first


# Estimates.


def test_the_start_is_estimated_from_the_ends_of_what_runs() -> None:
    world = world_of(4)
    placed(world, ask("r1", 2), "n0", (0, 1), ends_in=600)
    placed(world, ask("r2", 2), "n0", (2, 3), ends_in=1200)
    waiting(world, ask("two", 2, submitted_at=NOW - 900))
    assert told(world, "two").starts_at == NOW + 600
    waiting(world, ask("next", 2))
    assert told(world, "next").starts_at == NOW + 1200, "what stands before it takes the first room"


def test_what_has_no_known_end_gives_no_estimate() -> None:
    world = world_of(4)
    placed(world, ask("r", 4), "n0", (0, 1, 2, 3))
    assert told(waiting(world, ask("a")), "a").starts_at is None


def test_those_ahead_that_want_other_nodes_do_not_count() -> None:
    world = world_of(4, labels={"zone": "a"})
    world.put_node("b0", {"cpu": 64_000, GPU: 4000}, labels={"zone": "b"})
    placed(world, ask("r", 4), "n0", (0, 1, 2, 3), ends_in=600)
    there, here = (Where(node_labels=(("zone", zone),)) for zone in "ab")
    waiting(world, ask("far", 4, where=there, submitted_at=NOW - 900), ask("near", 4, where=here))
    assert told(world, "near").starts_at == NOW


def test_a_glimpse_is_the_position_and_the_estimate() -> None:
    world = world_of(4)
    placed(world, ask("r", 4), "n0", (0, 1, 2, 3), ends_in=600)
    waiting(world, one := ask("a", 4))
    position = line_up(world, POLICY, NOW).position(one, world.waiting["a"])
    found = glimpse(world, "a", POLICY, NOW, position)
    assert (found.position, found.starts_at) == (1, NOW + 600)


# What if.


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


# Figures.


def test_queues_tell_their_depth_their_oldest_and_how_long_one_waits() -> None:
    world, waits = world_of(1), Waits()
    world.profiles = {"default": "default", "gpu-training": "ml"}
    waiting(world, ask("a", submitted_at=NOW - 100), ask("b", submitted_at=NOW - 50), ask("c", queue="odd"))
    waits.bound("default", NOW - 40, NOW - 10)
    waits.bound("default", NOW - 20, NOW - 10)
    waits.bound("default", NOW - 9000, NOW - 8000)
    found = {one.name: one for one in queues(world, waits, NOW)}
    assert list(found) == ["default", "gpu-training", "odd"]
    assert (found["default"].depth, found["default"].oldest_at) == (2, NOW - 100)
    assert (found["default"].wait.count, found["default"].wait.avg_seconds) == (2, 20)
    assert (found["default"].wait.p50_seconds, found["default"].wait.p99_seconds) == (10, 30)
    assert (found["gpu-training"].depth, found["gpu-training"].oldest_at) == (0, None)


def test_the_oldest_may_be_one_for_whom_room_is_being_made() -> None:
    world = world_of(4)
    placed(world, ask("low", 4), "n0", (0, 1, 2, 3))
    waiting(world, ask("high", 4, priority=100, submitted_at=NOW - 70), ask("later", 4, submitted_at=NOW - 7))
    decide(world, POLICY, NOW)
    assert queues(world, Waits(), NOW)[0].oldest_at == NOW - 70


def test_what_waits_is_counted_by_its_reason() -> None:
    world = limited(world_of(4), hard=2, bound=0)
    placed(world, ask("low", 4), "n0", (0, 1, 2, 3))
    waiting(world, charged("q1", 3), charged("q2", 3), ask("g", gang=Gang("g", 2)), ask("high", 4, priority=9))
    decide(world, POLICY, NOW)
    waiting(world, ask("new", 2, queue="other"))
    assert waiting_by_reason(world) == {
        "gang_incomplete": 1,
        "not_yet_tried": 1,
        "quota_exceeded": 2,
        "waiting_for_preemption": 1,
    }


def test_rates_and_preemptions_of_late() -> None:
    waits = Waits()
    for second in range(200):
        for _ in range(3):
            waits.bound("q", NOW - second - 1, NOW - 200 + second)
    waits.preempted(NOW - 4000)
    waits.preempted(NOW - 10)
    found = figures(World(), waits, NOW)
    assert found.per_second == pytest.approx(3.0, abs=0.1)
    assert (found.preemptions, found.latency.count, found.waiting) == (1, 600, 0)


def test_only_so_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.waits.QUEUES_MAX", 2)
    waits = Waits()
    for index, queue in enumerate(("old", "middle", "new")):
        waits.bound(queue, NOW - 10 + index, NOW + index)
    assert waits.queue("old", NOW).count == 0
    assert waits.queue("new", NOW).count == 1
