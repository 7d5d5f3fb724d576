"""Why it waits, with scores and shares: asked of small worlds."""

from dataclasses import replace

import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask, InterPodTerm, Requirement, Spread, Taint, Where
from bursar.core.objects.ask import Operator as Op
from bursar.core.objects.charge import Charge
from bursar.core.objects.pending_reason import ReasonCode, Short
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import explain
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.values.selector import parse
from support.scheduling.questions import (
    GPU,
    NOW,
    POLICY,
    ask,
    charged,
    cluster_of,
    limited,
    placed,
    snapshot,
    told,
    waiting,
)

OFFERED = {"cpu": 64_000, "memory": 256 << 30, GPU: 8000, "pods": 110_000}
APART = InterPodTerm("host", parse("g=g"))
ONE, TWO = Short("members", 3, 1, 2), Short("members", 3, 2, 2)


# Reasons.


def test_what_does_not_wait_has_nothing_to_explain() -> None:
    cluster = cluster_of(8)
    placed(cluster, ask("runs"), "n0", (0,))
    assert explain(cluster, "runs", POLICY, NOW) is None
    assert explain(cluster, "nobody", POLICY, NOW) is None


def test_no_nodes_at_all_and_none_that_takes_work() -> None:
    assert told(waiting(ClusterState(), ask("a")), "a").reason.why is ReasonCode.NO_NODES_ACTIVE
    cordoned = told(waiting(cluster_of(8, 8, cordoned=True), ask("a")), "a")
    assert (cordoned.reason.why, cordoned.reason.nodes) == (ReasonCode.NO_NODES_ACTIVE, 2)


def test_short_of_gpus_says_how_many_are_needed_how_many_there_are_and_where() -> None:
    cluster = cluster_of(4, 4, 4)
    placed(cluster, ask("r0", 2), "n0", (0, 1))
    placed(cluster, ask("r1", 4), "n1", (0, 1, 2, 3))
    placed(cluster, ask("r2", 2), "n2", (0, 1))
    found = told(waiting(cluster, ask("a", 4)), "a")
    assert (found.reason.code, found.reason.matching) == (f"no_capacity_{GPU}", 3)
    assert found.reason.short == (Short(GPU, 4000, 2000, 3, 2),)


def test_matching_nodes_that_take_no_work_are_named() -> None:
    cluster = cluster_of(4)
    cluster.put_node("closed", {"cpu": 8000, GPU: 8000}, labels={}, cordoned=True)
    cluster.put_node("silent", {"cpu": 8000, GPU: 8000}, labels={}, ready=False)
    cluster.put_node("other", {"cpu": 8000, GPU: 8000}, labels={}, taints=(Taint("keep-off"),), cordoned=True)
    found = told(waiting(cluster, ask("a", 8)), "a").reason
    assert found.closed == (("closed", "cordoned"), ("silent", "not ready"))


def test_what_could_be_placed_at_once_has_not_been_tried_yet() -> None:
    found = told(waiting(cluster_of(8), ask("a")), "a")
    assert (found.reason.why, found.others, found.starts_at) == (ReasonCode.NOT_TRIED, (), NOW)


def test_each_constraint_on_nodes_is_named_with_the_nodes_that_it_keeps_out() -> None:
    cluster = cluster_of(8, 8, labels={"zone": "a"})
    cluster.put_node("far", {"cpu": 64_000, GPU: 8000}, labels={"zone": "b"}, taints=(Taint("keep-off"),))
    where = Where(node_labels=(("zone", "b"),), required=((Requirement("gpu-memory", Op.AT_LEAST, ("80",)),),))
    found = told(waiting(cluster, ask("a", where=where)), "a")
    assert found.reason.why is ReasonCode.NO_MATCHING_NODES
    assert dict(found.reason.excluded) == {
        "nodeSelector zone=b": 2,
        "node affinity gpu-memory Gte (80)": 3,
        "taint keep-off:NoSchedule": 1,
    }
    assert found.starts_at is None


def test_quota_is_told_apart_from_capacity_and_both_are_told() -> None:
    cluster = limited(cluster_of(4), hard=100, bound=98)
    placed(cluster, ask("r", 2), "n0", (0, 1))
    found = told(waiting(cluster, charged("a", 4)), "a")
    assert found.reason.why is ReasonCode.QUOTA_EXCEEDED
    assert found.reason.limits == (("tenant:physics", GPU, 100_000, 98_000, 4000),)
    assert [one.why for one in found.others] == [ReasonCode.NO_CAPACITY]
    assert found.starts_at is None


def test_part_of_a_gang_waits_for_the_others_and_stands_in_no_line() -> None:
    gang = Gang("g", 4, 300)
    found = told(waiting(cluster_of(8), ask("a", gang=gang), ask("b", gang=gang)), "a")
    assert (found.reason.why, found.reason.members, found.reason.members_min) == (ReasonCode.GANG_INCOMPLETE, 2, 4)
    assert found.reason.until == NOW - 60 + 300
    assert (found.position, found.position_overall, found.starts_at) == (None, None, None)


def test_a_complete_gang_that_has_no_capacity_together_says_where_one_would_fit() -> None:
    gang = Gang("g", 3)
    found = told(waiting(cluster_of(4, 4), *(ask(name, 4, gang=gang) for name in "abc")), "c")
    assert found.reason.why is ReasonCode.NO_CAPACITY
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
    cluster = waiting(cluster_of(), *asks)
    for name, gpus in (("n0", 8), ("n1", 2), ("n2", 0)):
        cluster.put_node(name, {**OFFERED, GPU: gpus * 1000}, labels={"host": name})
    before = snapshot(cluster)
    found = told(cluster, "a").reason
    assert found.why is ReasonCode.NO_CAPACITY
    assert found.short == (short,)
    assert snapshot(cluster) == before


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Where(near=(InterPodTerm("rack", parse("app=other")),)), ReasonCode.AFFINITY),
        (Where(apart=(InterPodTerm("rack", parse("app=train")),)), ReasonCode.ANTI_AFFINITY),
        (Where(spreads=(Spread("rack", 1, selector=parse("app=train")),)), ReasonCode.SPREAD),
    ],
)
def test_pod_affinity_that_keeps_it_out(where: Where, expected: ReasonCode) -> None:
    cluster = cluster_of(8, labels={"rack": "r1"})
    cluster.put_node("n1", {"cpu": 0, GPU: 0, "pods": 0}, labels={"rack": "r2"})
    placed(cluster, ask("r", labels={"app": "train"}), "n0", (0,))
    if expected is ReasonCode.SPREAD:
        cluster.put_node("n1", {"cpu": 8000, GPU: 8000}, labels={"rack": "r2"}, cordoned=True)
        placed(cluster, ask("r2", labels={"app": "train"}), "n0", (1,))
    elif expected is ReasonCode.ANTI_AFFINITY:
        cluster.remove_node("n1")
    found = told(waiting(cluster, ask("a", where=where, labels={"app": "train"})), "a")
    assert found.reason.why is expected
    assert found.starts_at is None, "who will be where by then is not foreseen"


def test_pod_affinity_that_is_nowhere_is_told_apart_from_pod_affinity_without_capacity() -> None:
    cluster = cluster_of(1, 1, labels={"rack": "r1"})
    placed(cluster, ask("r", labels={"app": "train"}), "n0", (0,))
    cluster.put_node("n1", OFFERED, labels={"rack": "r2"})
    waiting(cluster, ask("near", where=Where(near=(InterPodTerm("rack", parse("app=train")),))))
    waiting(cluster, ask("lost", where=Where(near=(InterPodTerm("rack", parse("app=nobody")),))))
    waiting(cluster, ask("wide", where=Where(near=(InterPodTerm("hall", parse("app=train")),))))
    near, lost, wide = told(cluster, "near").reason, told(cluster, "lost").reason, told(cluster, "wide").reason
    assert (near.why, near.absent) == (ReasonCode.NO_CAPACITY, "")
    assert (lost.why, lost.absent) == (ReasonCode.AFFINITY, "rack")
    assert (wide.why, wide.absent) == (ReasonCode.AFFINITY, "hall"), "it runs, but where no node has the label"
    plan = decide(cluster, POLICY, NOW)
    assert {reason.absent for reason in plan.reasons.values() if reason.why is ReasonCode.AFFINITY} == {"rack", "hall"}


def test_all_other_reasons_come_in_their_order() -> None:
    cluster = limited(cluster_of(4, labels={"rack": "r1"}), hard=2, bound=2)
    placed(cluster, ask("r", 4, labels={"app": "train"}), "n0", (0, 1, 2, 3))
    near = Where(near=(InterPodTerm("rack", parse("app=nobody")),))
    asked = ask("a", 1, where=near, charge=Charge(accepted={GPU: 1000}))
    found = told(waiting(cluster, asked), "a")
    assert [found.reason.why, *(one.why for one in found.others)] == [
        ReasonCode.QUOTA_EXCEEDED,
        ReasonCode.AFFINITY,
        ReasonCode.NO_CAPACITY,
    ]


def test_capacity_that_is_kept_for_one_who_waited_longer() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("r", 2), "n0", (0, 1), ends_in=600)
    waiting(cluster, ask("large", 4, submitted_at=NOW - 5000, preempts=False), ask("small", 2, preempts=False))
    decide(cluster, POLICY, NOW)
    large, small = told(cluster, "large"), told(cluster, "small")
    assert large.reservation is not None
    assert (large.reservation.nodes, large.reservation.at, large.starts_at) == (("n0",), NOW + 600, NOW + 600)
    assert small.reason.why is ReasonCode.HELD
    assert small.starts_at is None, "what it waits for has no known end"


def test_capacity_that_is_being_made() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("low", 4, priority=0), "n0", (0, 1, 2, 3))
    waiting(cluster, ask("high", 4, priority=100))
    decide(cluster, POLICY, NOW)
    found = told(cluster, "high")
    assert found.reason.why is ReasonCode.PREEMPTING
    assert found.nomination is not None
    assert found.nomination.nodes == ("n0",)
    assert found.starts_at == NOW + POLICY.grace_seconds
    assert (found.position, found.position_overall) == (1, 1)


def test_the_dominant_reason_is_the_one_that_the_cycle_gives() -> None:
    cluster = limited(cluster_of(4, 2, labels={"zone": "a"}), hard=10, bound=9)
    placed(cluster, ask("r", 4), "n0", (0, 1, 2, 3))
    waiting(
        cluster,
        charged("over", 2),
        ask("elsewhere", where=Where(node_labels=(("zone", "b"),))),
        ask("large", 3, preempts=False),
    )
    plan = decide(cluster, POLICY, NOW)
    for uid in ("over", "elsewhere", "large"):
        assert told(cluster, uid).reason.why is plan.reasons[cluster.waiting[uid].key].why


# Scores and shares.


def test_the_score_is_told_with_its_nine_terms() -> None:
    found = told(waiting(cluster_of(8), ask("a", priority=1000)), "a").score
    assert found is not None
    assert [one.factor for one in found.terms] == [
        "priority", "waiting", "deficit", "topology", "data", "backlog", "energy", "checkpoint", "conformance",
    ]  # fmt: skip
    assert found.total == pytest.approx(found.penalty * sum(one.value * one.weight for one in found.terms))
    assert (found.profile, found.terms[0].value) == ("default", 0.75)


def test_what_is_known_of_data_and_energy_is_in_the_score() -> None:
    cluster = waiting(cluster_of(8), ask("a", queue="q", data_ready=0.25), ask("b", queue="q"))
    cluster.profiles["q"] = "service"

    def terms(uid: str, energy_price: float | None) -> dict[str, tuple[float, float]]:
        found = explain(cluster, uid, replace(POLICY, energy_price=energy_price), NOW)
        assert found is not None
        assert found.score is not None
        return {one.factor: (one.value, one.weight) for one in found.score.terms}

    assert (terms("a", 0.2)["data"], terms("a", 0.2)["energy"]) == ((0.25, 0.1), (0.8, 0.1))
    assert (terms("b", None)["data"], terms("b", None)["energy"]) == ((0.5, 0.1), (0.5, 0.1))


def test_the_share_of_the_tenant_is_told() -> None:
    cluster = cluster_of(8)
    cluster.tenants = {"physics": ShareOf("physics", target=0.5, penalty=0.4), "biology": ShareOf("biology")}
    placed(cluster, ask("r", 2), "n0", (0, 1))
    share = told(waiting(cluster, ask("a")), "a").share
    assert share is not None
    assert (share.tenant, share.actual, share.target, share.penalty) == ("physics", 0.25, 0.5, 0.4)
    assert share.deficit == pytest.approx(0.5)
