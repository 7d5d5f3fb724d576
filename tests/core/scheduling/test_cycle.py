"""One cycle: the order in which things are looked at, limits, reasons, and what holds for every plan."""

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.nodes.node import EXCLUSIVE, WHOLE
from bursar.core.objects.ask import Ask, Spread, Taint, Where
from bursar.core.objects.pending_reason import UNPAID, ReasonCode, Short
from bursar.core.quota.tenant_tree import ResourceQuota, Tenant
from bursar.core.scheduling.cycle.plan import Plan
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from support.scheduling.cluster_states import (
    FPGA,
    GPU,
    HOST,
    NOW,
    ZONE,
    Machine,
    apart,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    limit,
    machine,
    members,
    near,
    place,
    put,
    reasons,
    recount,
    run,
    running,
    spread,
    submit,
    why,
)
from support.scheduling.random_states import asks, machines, some_limits

# Order.


def first_of(cluster: ClusterState, *asks: Ask) -> str:
    return next(iter(place(cluster, *asks)))


def test_the_higher_priority_comes_first_inside_a_tenant() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    low, high = ask("low", gpus=1, preempts=False), ask("high", gpus=1, priority=1000, at=NOW - 1, preempts=False)
    assert first_of(cluster, low, high) == "high"


def test_who_waits_longer_comes_first_among_equals() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    assert first_of(cluster, ask("a-new", gpus=1, memory=0), ask("z-old", gpus=1, cpu=0, at=NOW - 9000)) == "z-old"


@pytest.mark.parametrize(("until", "expected"), [(NOW + 1, "boosted"), (NOW, "high")])
def test_a_boost_wins_until_it_expires(until: float, expected: str) -> None:
    cluster = cluster_of(machine("a", gpus=1))
    cluster.boosts["n", "j"] = ActiveBoost(1000, until)
    boosted, high = ask("boosted", gpus=1, job="j", preempts=False), ask("high", gpus=1, priority=10, preempts=False)
    assert first_of(cluster, boosted, high) == expected


def test_a_queue_s_profile_decides_what_counts() -> None:
    """Where only priority counts a long wait does not help."""
    for profile, expected in (("sensitive", "high"), ("interactive", "old")):
        cluster = cluster_of(machine("a", gpus=1), profiles={"q": profile})
        old = ask("old", gpus=1, queue="q", at=NOW - 40 * 3600, preempts=False)
        high = ask("high", gpus=1, queue="q", priority=300, preempts=False)
        assert first_of(cluster, old, high) == expected


def test_two_tenants_alternate_inside_one_cycle() -> None:
    cluster = cluster_of(machine("a", gpus=8), tenants=[ShareOf("t"), ShareOf("u")])
    mine = [ask(f"t{n}", gpus=1, at=NOW - 5000) for n in range(9)]
    other = [ask(f"u{n}", gpus=1, tenant="u", namespace="m") for n in range(9)]
    order = list(place(cluster, *mine, *other))
    assert sorted(one[0] for one in order) == ["t"] * 4 + ["u"] * 4
    assert {one[0] for one in order[:2]} == {"t", "u"}


def test_shares_are_kept_inside_one_cycle() -> None:
    cluster = cluster_of(machine("a", gpus=10), tenants=[ShareOf("t", weight=4), ShareOf("u", weight=1)])
    mine = [ask(f"t{n}", gpus=1) for n in range(20)]
    other = [ask(f"u{n}", gpus=1, tenant="u", namespace="m", at=NOW - 9000) for n in range(20)]
    order = list(place(cluster, *mine, *other))
    assert sum(one.startswith("t") for one in order) == 8


def test_what_runs_already_counts_for_the_share() -> None:
    cluster = cluster_of(machine("a", gpus=4), tenants=[ShareOf("t"), ShareOf("u")])
    run(cluster, ask("old", gpus=2), "a")
    mine, other = ask("mine", gpus=2, at=NOW - 9000), ask("other", gpus=2, tenant="u", namespace="m")
    assert list(place(cluster, mine, other)) == ["other"]


def test_a_tenant_that_has_used_up_its_budget_comes_last() -> None:
    cluster = cluster_of(machine("a", gpus=1), tenants=[ShareOf("t", penalty=0.05), ShareOf("u")])
    mine = ask("mine", gpus=1, at=NOW - 900_000, priority=100, preempts=False)
    assert first_of(cluster, mine, ask("other", gpus=1, tenant="u", namespace="m", preempts=False)) == "other"
    assert place(cluster_of(machine("a", gpus=1), tenants=[ShareOf("t", penalty=0.05)]), mine), "but it is not refused"


def test_no_more_than_a_plan_may_hold_is_placed_and_the_rest_follows() -> None:
    cluster = cluster_of(machine("a", gpus=100))
    submit(cluster, *(ask(f"x{n}", gpus=1) for n in range(10)))
    plan = cycle(cluster, placements_max=4)
    assert (len(plan.bindings), plan.more) == (4, True)
    assert len(cycle(cluster, placements_max=4).bindings) == 4
    last = cycle(cluster, placements_max=4)
    assert (len(last.bindings), last.more) == (2, False)


# Limits.


def test_a_tenant_s_limit_blocks_with_its_numbers_and_unblocks_when_capacity_comes_back() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    limit(cluster, Tenant("t", limits={GPU: 2 * WHOLE}))
    run(cluster, ask("old", gpus=1), "a")
    submit(cluster, ask("x", gpus=1), ask("y", gpus=1, at=NOW))
    plan = cycle(cluster)
    assert bound(cluster, plan) == {"x": ("a",)}
    reason = why(cluster, plan, "y")
    assert reason.code == "quota_exceeded"
    assert reason.limits == (("tenant:t", GPU, 2 * WHOLE, 2 * WHOLE, WHOLE),)
    assert cycle(cluster, NOW + 1).tried == 0, "nothing has changed"
    end(cluster, "old")
    assert bound(cluster, cycle(cluster, NOW + 2)) == {"y": ("a",)}


def test_the_limit_of_an_ancestor_holds_for_all_below_it() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    tenants = Tenant("p", limits={GPU: 3 * WHOLE}), Tenant("t", "p"), Tenant("u", "p")
    limit(cluster, *tenants, namespaces={"n": "t", "m": "u"})
    mine = [ask(f"t{n}", gpus=1) for n in range(3)]
    other = [ask(f"u{n}", gpus=1, tenant="u", namespace="m") for n in range(3)]
    assert len(place(cluster, *mine, *other)) == 3


def test_a_namespace_s_quota_holds_for_that_namespace() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    limit(cluster, Tenant("t"), quotas=[ResourceQuota("n", "q", {GPU: WHOLE})], namespaces={"n": "t", "m": "t"})
    placed = place(cluster, *(ask(f"{where}{n}", gpus=1, namespace=where) for where in "nm" for n in range(3)))
    assert sorted(placed) == ["m0", "m1", "m2", "n0"]
    assert why(cluster, cycle(cluster), "n1").limits[0][0] == "quota:n/q"


def test_the_nearest_limit_is_told_first() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    none = {GPU: 0}
    limit(cluster, Tenant("p", limits=none), Tenant("t", "p", limits=none), quotas=[ResourceQuota("n", "q", none)])
    submit(cluster, ask("x", gpus=1))
    assert [one[0] for one in why(cluster, cycle(cluster), "x").limits] == ["quota:n/q", "tenant:t", "tenant:p"]


def test_nodes_are_counted_by_the_dominant_part_of_the_node() -> None:
    cluster = cluster_of(machine("a", gpus=4, cpu=100))
    limit(cluster, Tenant("t", limits={"nodes": WHOLE}))
    placed = place(cluster, *(ask(f"x{n}", gpus=1, cpu=50) for n in range(2)), ask("small", gpus=1, at=NOW))
    assert len(placed) == 2
    assert why(cluster, cycle(cluster), "small").limits == (("tenant:t", "nodes", 1000, 1000, 250),)


def test_the_limit_of_nodes_holds_for_many_that_are_alike_and_placed_at_once() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    limit(cluster, Tenant("t", limits={"nodes": 500}))
    assert len(place(cluster, *(ask(f"x{n}", gpus=1) for n in range(8)))) == 4


def test_whole_nodes_are_counted_whole() -> None:
    cluster = cluster_of(machine("a", gpus=8), machine("b", gpus=8))
    limit(cluster, Tenant("t", limits={"nodes": WHOLE}))
    assert len(place(cluster, *(ask(f"x{n}", exclusive=True) for n in range(2)))) == 1
    assert place(cluster, ask("wide", exclusive=True, nodes=2)) == {}


def test_a_gang_is_counted_as_a_set() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    limit(cluster, Tenant("t", limits={"allocations": 3 * WHOLE}))
    submit(cluster, *members("g", 4, gpus=1))
    plan = cycle(cluster)
    assert not plan.bindings
    assert why(cluster, plan, "g-0").limits == (("tenant:t", "allocations", 3000, 0, 4000),)


def test_what_a_quota_blocks_is_tried_again_after_the_backoff_whatever_happens() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    limit(cluster, Tenant("t", limits={GPU: 0}))
    submit(cluster, ask("x", gpus=1))
    tried = [cycle(cluster, NOW + second).tried for second in (0, 10, 29, 30, 31, 60)]
    assert tried == [1, 0, 0, 1, 0, 1]


# Reasons.


def one_reason(cluster: ClusterState, one: Ask) -> tuple[str, dict[str, int]]:
    submit(cluster, one)
    reason = why(cluster, cycle(cluster, preemption=False), one.uid)
    return reason.code, dict(reason.excluded)


def test_no_nodes_at_all_and_none_that_is_active() -> None:
    assert one_reason(cluster_of(), ask("x")) == ("no_nodes_active", {})
    idle = cluster_of(machine("a", cpu=1, ready=False), machine("b", cpu=1, cordoned=True))
    assert one_reason(idle, ask("x"))[0] == "no_nodes_active"


def test_no_matching_nodes_counts_what_each_constraint_keeps_out() -> None:
    cluster = cluster_of(
        machine("a", cpu=1, disk="ssd", taints=(Taint("k"),)),
        machine("b", cpu=1, taints=(Taint("k"),)),
        machine("c", cpu=1),
        machine("d", cpu=1, disk="ssd", cordoned=True),
    )
    code, excluded = one_reason(cluster, ask("x", where=Where(node_labels=(("disk", "ssd"),))))
    assert code == "no_matching_nodes"
    assert excluded == {"not_ready_or_cordoned": 1, "labels": 2, "taints": 2}


def test_no_capacity_names_the_resource_that_is_short_on_most_nodes() -> None:
    cluster = cluster_of(machine("a", gpus=1, cpu=1), machine("b", gpus=2, cpu=8), machine("c", gpus=2, cpu=8))
    submit(cluster, ask("x", gpus=4, cpu=4))
    reason = why(cluster, cycle(cluster), "x")
    assert reason.code == f"no_capacity_{GPU}"
    assert [(one.resource, one.needs, one.has, one.nodes) for one in reason.short] == [
        (GPU, 4000, 2000, 3),
        ("cpu", 4000, 8000, 1),
    ]


@pytest.mark.parametrize(
    ("asked", "resource", "has"),
    [
        pytest.param({"gpus": 0.5}, GPU, 400, id="the largest part left of a device, not the sum of them"),
        pytest.param({"gpus": 1}, GPU, 0, id="whole devices, not parts"),
        pytest.param({"wants": {FPGA: WHOLE}}, FPGA, 0, id="what nobody offers"),
    ],
)
def test_the_numbers_are_those_that_decide(asked: dict[str, Any], resource: str, has: int) -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("o1", gpus=0.6), "a", devices=(0,))
    run(cluster, ask("o2", gpus=0.6), "a", devices=(1,))
    submit(cluster, ask("x", **asked))
    short: Short = why(cluster, cycle(cluster), "x").short[0]
    assert (short.resource, short.has) == (resource, has)


def test_pods_that_are_used_up_are_named() -> None:
    cluster = cluster_of(machine("a", cpu=8, pods=1))
    run(cluster, ask("old", cpu=1), "a")
    assert one_reason(cluster, ask("x", cpu=1))[0] == "no_capacity_pods"


def test_nodes_that_others_have_for_themselves() -> None:
    cluster = cluster_of(machine("a", cpu=8))
    run(cluster, ask("old", cpu=1), "a")
    assert one_reason(cluster, ask("x", exclusive=True))[0] == "no_capacity_nodes"


COMPANY = {
    "pod_affinity": near(HOST, app="none"),
    "pod_anti_affinity": apart(HOST, app="old"),
    "topology_spread": spread(ZONE, app="old"),
}


@pytest.mark.parametrize("code", COMPANY)
@pytest.mark.parametrize("capacity", [8, 2])
def test_pod_affinity_comes_before_capacity(code: str, capacity: int) -> None:
    cluster = cluster_of(machine("a", cpu=capacity, zone="z1"), machine("b", cpu=1, zone="z2", cordoned=True))
    for number in range(2):
        run(cluster, ask(f"old{number}", cpu=1, labels={"app": "old"}), "a")
    assert one_reason(cluster, ask("x", cpu=1, where=COMPANY[code], labels={"app": "old"})) == (
        code, {"not_ready_or_cordoned": 1, code: 1}
    )  # fmt: skip


def test_a_quota_comes_before_what_the_nodes_say_and_an_incomplete_gang_before_both() -> None:
    cluster = cluster_of()
    limit(cluster, Tenant("t", limits={"allocations": 0}))
    assert one_reason(cluster, ask("x"))[0] == "quota_exceeded"
    assert one_reason(cluster, members("g", 1, least=2)[0])[0] == "gang_incomplete"
    order = [one for one in ReasonCode if one not in UNPAID]
    nodes = [ReasonCode.NO_NODES_ACTIVE, ReasonCode.NO_CLAIMED_NODES, ReasonCode.NO_MATCHING_NODES]
    assert order[:6] == [ReasonCode.AWAITING_APPROVAL, ReasonCode.GANG_INCOMPLETE, ReasonCode.QUOTA_EXCEEDED, *nodes]
    assert set(list(ReasonCode)[3:9]) == UNPAID  # what cannot be paid for comes right after quota


def test_something_that_could_help_is_noticed() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    run(cluster, ask("old", gpus=1), "a")
    submit(cluster, ask("x", gpus=1, preempts=False))
    assert cycle(cluster).tried == 1
    assert cycle(cluster, NOW + 1).tried == 0
    put(cluster, machine("b", gpus=1))
    assert bound(cluster, cycle(cluster, NOW + 2)) == {"x": ("b",)}


# What holds for every plan.


def cluster_with(those: Iterable[Machine], wanted: Iterable[Ask]) -> ClusterState:
    cluster = cluster_of(*those, tenants=[ShareOf("t", weight=2), ShareOf("u")])
    some_limits(cluster)
    submit(cluster, *wanted)
    return cluster


def is_even(cluster: ClusterState, one: Ask, rule: Spread) -> bool:
    """Whether a hard spread holds, over the domains of its topology."""
    counted = [other for other in cluster.placed.values() if is_counted(one, rule, other.ask)]
    if any(
        (each.ask.shape.where, each.ask.gang, each.ask.job) != (one.shape.where, one.gang, one.job) for each in counted
    ):
        return True  # others that are counted and do not care may have upset it since
    domains = {labels[rule.topology_key]: 0 for labels in cluster.fleet.labels if rule.topology_key in labels}
    for other in counted:
        for spot in other.spots:
            domains[cluster.fleet.labels[spot.row][rule.topology_key]] += 1
    return max(domains.values(), default=0) - min(domains.values(), default=0) <= rule.skew_max


def is_counted(one: Ask, rule: Spread, other: Ask) -> bool:
    if rule.selector is not None:
        return other.namespace == one.namespace and other.labels.get("app") == "web"
    alike = other.gang == one.gang if one.gang is not None else one.job and other.job == one.job
    return bool(alike) and other.namespace == one.namespace and bool(other.shape.where.spreads)


@settings(max_examples=250)
@given(st.data())
def test_no_plan_overfills_splits_or_breaks_what_was_asked(data: st.DataObject) -> None:
    those, wanted = data.draw(machines()), data.draw(asks(14))
    cluster = cluster_with(those, wanted)
    plan = cycle(cluster)
    capacities = recount(cluster, those)
    for capacity in capacities.values():
        here = [
            one
            for one in cluster.placed.values()
            if any(cluster.fleet.names[s.row] == capacity.name for s in one.spots)
        ]
        assert EXCLUSIVE not in capacity.allocated or len(here) == 1
    for binding in plan.bindings:
        for one, spots in binding.members:
            assert len({spot.row for spot in spots}) == one.shape.nodes
    for gang in cluster.gangs.values():
        assert not gang.placed or len(gang.placed) >= gang.min_members
    for cell in cluster.limits.cells.values():
        assert cell.bound <= cell.hard, cell.row
    for one in wanted:
        for rule in one.shape.where.spreads:
            assert one.uid not in cluster.placed or not rule.hard or is_even(cluster, one, rule)


def shown(cluster: ClusterState, plan: Plan) -> object:
    victims = [(one.asks, one.victims, one.nominations) for one in plan.preemptions]
    return plan.bindings, victims, plan.failed, reasons(cluster, plan), cluster.memory.reservation


@settings(max_examples=100)
@given(st.data())
def test_the_same_cluster_state_gives_the_same_plan(data: st.DataObject) -> None:
    those, wanted = data.draw(machines()), data.draw(asks(14))
    cluster, again = cluster_with(those, wanted), cluster_with(those, wanted)
    assert shown(cluster, cycle(cluster)) == shown(again, cycle(again))


@settings(max_examples=150)
@given(st.data())
def test_deciding_again_changes_nothing(data: st.DataObject) -> None:
    those, wanted = data.draw(machines()), data.draw(asks(14))
    cluster = cluster_with(those, wanted)
    # Work that is placed may satisfy the affinity of other work; each reason is that of the moment of the attempt.
    while cycle(cluster).bindings:
        pass
    before = reasons(cluster, cycle(cluster))
    for second in (0.0, 0.5):
        plan = cycle(cluster, NOW + second)
        assert not plan.bindings
        assert not plan.preemptions
        assert reasons(cluster, plan) == before


# Fairness over time.


@pytest.mark.parametrize(
    ("tenants", "expected"),
    [
        pytest.param(
            [ShareOf("a", weight=50), ShareOf("b", weight=30), ShareOf("c", weight=20)],
            {"a": 0.5, "b": 0.3, "c": 0.2},
            id="by weight",
        ),
        pytest.param(
            [
                ShareOf("x", weight=60),
                ShareOf("y", weight=40),
                ShareOf("a", "x", weight=1),
                ShareOf("b", "x", weight=2),
                ShareOf("c", "y"),
            ],
            {"a": 0.2, "b": 0.4, "c": 0.4},
            id="in a tree",
        ),
        pytest.param(
            [ShareOf("a", target=0.5), ShareOf("b", target=0.3), ShareOf("c")],
            {"a": 0.5, "b": 0.3, "c": 0.2},
            id="by target",
        ),
    ],
)
def test_under_permanent_contention_everybody_holds_its_share(
    tenants: list[ShareOf], expected: dict[str, float]
) -> None:
    random, serial = Random(5), iter(range(1_000_000))
    cluster = cluster_of(*(machine(f"n{number}", gpus=10) for number in range(20)), tenants=tenants)
    held, now = dict.fromkeys(expected, 0), NOW
    for tick in range(90):
        now += 10
        for uid in sorted(cluster.placed):
            if random.random() < 0.08:
                cluster.forget(uid)
        for tenant, backlog in zip(expected, (40, 80, 160), strict=True):
            while sum(one.key.tenant == tenant for one in cluster.waiting.values()) < backlog:
                gpus = random.choice([1, 1, 2, 4])
                name = f"{tenant}{next(serial)}"
                submit(cluster, ask(name, tenant=tenant, namespace=tenant, gpus=gpus, at=now, preempts=False))
        cycle(cluster, now)
        if tick >= 30:
            for tenant in expected:
                held[tenant] += cluster.used[tenant][GPU]
    total = sum(held.values())
    assert {tenant: amount / total for tenant, amount in held.items()} == pytest.approx(expected, rel=0.05)
    assert len(running(cluster)) > 50
