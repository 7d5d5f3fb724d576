"""Why it waits, with scores and shares: asked of small worlds."""

from dataclasses import replace

import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask, Company, Requirement, Spread, Taint, Where
from bursar.core.objects.ask import Operator as Op
from bursar.core.objects.charge import Charge
from bursar.core.objects.pending_reason import Short, Why
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import explain
from bursar.core.scheduling.state.cluster_state import World
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.values.selector import parse
from support.scheduling.questions import (
    GPU,
    NOW,
    POLICY,
    ask,
    charged,
    limited,
    placed,
    snapshot,
    told,
    waiting,
    world_of,
)

OFFERED = {"cpu": 64_000, "memory": 256 << 30, GPU: 8000, "pods": 110_000}
APART = Company("host", parse("g=g"))
ONE, TWO = Short("members", 3, 1, 2), Short("members", 3, 2, 2)


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


def test_matching_nodes_that_take_no_work_are_named() -> None:
    world = world_of(4)
    world.put_node("closed", {"cpu": 8000, GPU: 8000}, labels={}, cordoned=True)
    world.put_node("silent", {"cpu": 8000, GPU: 8000}, labels={}, ready=False)
    world.put_node("other", {"cpu": 8000, GPU: 8000}, labels={}, taints=(Taint("keep-off"),), cordoned=True)
    found = told(waiting(world, ask("a", 8)), "a").reason
    assert found.closed == (("closed", "cordoned"), ("silent", "not ready"))


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


def test_what_is_known_of_data_and_energy_is_in_the_score() -> None:
    world = waiting(world_of(8), ask("a", queue="q", data_ready=0.25), ask("b", queue="q"))
    world.profiles["q"] = "service"

    def terms(uid: str, energy_price: float | None) -> dict[str, tuple[float, float]]:
        found = explain(world, uid, replace(POLICY, energy_price=energy_price), NOW)
        assert found is not None
        assert found.score is not None
        return {one.factor: (one.value, one.weight) for one in found.score.terms}

    assert (terms("a", 0.2)["data"], terms("a", 0.2)["energy"]) == ((0.25, 0.1), (0.8, 0.1))
    assert (terms("b", None)["data"], terms("b", None)["energy"]) == ((0.5, 0.1), (0.5, 0.1))


def test_the_share_of_the_tenant_is_told() -> None:
    world = world_of(8)
    world.tenants = {"physics": ShareOf("physics", target=0.5, penalty=0.4), "biology": ShareOf("biology")}
    placed(world, ask("r", 2), "n0", (0, 1))
    share = told(waiting(world, ask("a")), "a").share
    assert share is not None
    assert (share.tenant, share.actual, share.target, share.penalty) == ("physics", 0.25, 0.5, 0.4)
    assert share.deficit == pytest.approx(0.5)
