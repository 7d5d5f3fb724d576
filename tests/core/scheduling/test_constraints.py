"""Where one allocation may go: each constraint by itself, in tables."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Ask, Effect, InterPodTerm, Requirement, Spread, Taint, Toleration, Where
from bursar.core.objects.ask import Operator as Is
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.wire.to_scheduler.ask import ask_of
from support.scheduling.cluster_states import (
    FPGA,
    GPU,
    HOST,
    RACK,
    ZONE,
    Machine,
    apart,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    labelled,
    machine,
    near,
    place,
    put,
    requires,
    run,
    shape,
    spread,
    submit,
    why,
)


def fits(one: Ask, *machines: Machine) -> bool:
    return one.uid in place(cluster_of(*machines), one)


# Requests.


@pytest.mark.parametrize(
    ("asked", "offered", "expected"),
    [
        pytest.param({"gpus": 2}, {"gpus": 2}, True, id="exactly what there is"),
        pytest.param({"gpus": 3}, {"gpus": 2}, False, id="one device too many"),
        pytest.param({"cpu": 4, "memory": 10}, {"cpu": 4, "memory": 9}, False, id="one resource of two is short"),
        pytest.param({"cpu": 1, "gpus": 1}, {"cpu": 1}, False, id="a resource that nobody offers"),
        pytest.param({"cpu": 1}, {"cpu": 1, "pods": 0}, False, id="no pods at all"),
        pytest.param({"cpu": 1}, {"cpu": 1, "pods": 1}, True, id="one pod"),
        pytest.param({}, {"cpu": 1}, True, id="nothing asked"),
        pytest.param({"gpus": 0.5}, {"gpus": 1}, True, id="a part of a device"),
        pytest.param({"gpus": 0.5}, {"cpu": 1}, False, id="a part of a device that is not there"),
        pytest.param({"gpus": 2, "exclusive": True}, {"gpus": 2}, True, id="the whole node, of the right size"),
        pytest.param({"gpus": 3, "exclusive": True}, {"gpus": 2}, False, id="the whole node, too small"),
    ],
)
def test_requests_against_what_a_node_offers(asked: dict[str, Any], offered: dict[str, Any], expected: bool) -> None:
    assert fits(ask("x", **asked), machine("a", **offered)) is expected


def test_what_runs_already_counts() -> None:
    cluster = cluster_of(machine("a", gpus=2, cpu=4))
    run(cluster, ask("old", gpus=1, cpu=3), "a")
    assert place(cluster, ask("big", gpus=2), ask("hungry", gpus=1, cpu=2), ask("x", gpus=1, cpu=1)) == {"x": ("a",)}


def test_pods_are_counted_one_by_one_and_where_nothing_limits_them_any_number_goes() -> None:
    cluster = cluster_of(machine("few", cpu=100, pods=2))
    assert len(place(cluster, *(ask(f"x{number}", cpu=1) for number in range(5)))) == 2
    put(cluster, machine("many", cpu=100))
    assert len(bound(cluster, cycle(cluster))) == 3


def test_a_node_that_has_less_than_it_gave_gives_nothing_more_and_stops_nothing() -> None:
    cluster = cluster_of(machine("a", gpus=4, cpu=8))
    run(cluster, ask("old", gpus=3, cpu=6), "a")
    put(cluster, machine("a", gpus=2, cpu=4))
    assert place(cluster, ask("x", cpu=1), ask("y", gpus=1)) == {}
    assert place(cluster, ask("idle")) == {"idle": ("a",)}, "what asks for nothing still fits"
    end(cluster, "old")
    assert set(bound(cluster, cycle(cluster))) == {"x", "y"}


def test_a_resource_that_a_new_node_offers_is_found_at_once() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    assert place(cluster, ask("x", wants={FPGA: WHOLE})) == {}
    put(cluster, machine("b", offers={FPGA: 2 * WHOLE}))
    assert bound(cluster, cycle(cluster)) == {"x": ("b",)}


def test_pods_that_are_limited_later_count_what_runs_already() -> None:
    cluster = cluster_of(machine("a", cpu=8))
    run(cluster, ask("old", cpu=1), "a")
    put(cluster, machine("a", cpu=8, pods=1))
    assert place(cluster, ask("x", cpu=1)) == {}


# Labels.


NODES_BY_LABEL = (
    machine("a", cpu=4, disk="ssd", size="8"),
    machine("b", cpu=4, disk="hdd", size="16"),
    machine("c", cpu=4, size="many"),
    machine("d", cpu=4),
)


def test_the_node_selector_wants_all_its_labels() -> None:
    one = ask("x", cpu=1, where=Where(node_labels=(("disk", "hdd"), ("size", "16"))))
    assert place(cluster_of(*NODES_BY_LABEL), one) == {"x": ("b",)}
    assert not fits(ask("x", where=Where(node_labels=(("disk", "hdd"), ("size", "8")))), *NODES_BY_LABEL)


@pytest.mark.parametrize(
    ("operator", "label", "values", "right"),
    [
        ("In", "disk", "ssd,nvme", "a"),
        ("NotIn", "disk", "ssd", "bcd"),
        ("Exists", "size", "", "abc"),
        ("DoesNotExist", "size", "", "d"),
        ("Gt", "size", "8", "b"),
        ("Lt", "size", "16", "a"),
        ("Gte", "size", "8", "ab"),
        ("Lte", "size", "16", "ab"),
        ("Lte", "size", "7", ""),
    ],
)
def test_required_affinity_with_each_operator(operator: str, label: str, values: str, right: str) -> None:
    """As many allocations as there are matching nodes fit when each takes a node for itself."""
    cluster = cluster_of(*NODES_BY_LABEL)
    where = requires(((label, operator, values),))
    placed = place(cluster, *(ask(f"x{number}", exclusive=True, where=where) for number in range(5)))
    assert "".join(sorted(node for nodes in placed.values() for node in nodes)) == right


def test_one_of_several_terms_is_enough_and_each_term_must_hold_whole() -> None:
    where = requires(
        (("disk", "In", "ssd"), ("size", "Gt", "100")),
        (("disk", "In", "hdd"), ("size", "Gt", "10")),
    )
    cluster = cluster_of(*NODES_BY_LABEL)
    placed = place(cluster, *(ask(f"x{number}", exclusive=True, where=where) for number in range(3)))
    assert list(placed.values()) == [("b",)]


def test_a_label_that_changes_changes_what_is_right() -> None:
    cluster = cluster_of(machine("a", cpu=1))
    assert place(cluster, ask("x", where=Where(node_labels=(("disk", "ssd"),)))) == {}
    put(cluster, machine("a", cpu=1, disk="ssd"))
    assert bound(cluster, cycle(cluster)) == {"x": ("a",)}


@pytest.mark.parametrize("wanted", ["empty", "full"])
def test_what_is_preferred_counts_for_more_than_how_well_things_pack(wanted: str) -> None:
    preferred = ((10, (Requirement(HOST, Is.IN, (wanted,)),)), (1, (Requirement(HOST, Is.EXISTS),)))
    cluster = cluster_of(machine("empty", gpus=8, cpu=8), machine("full", gpus=8, cpu=8))
    run(cluster, ask("old", gpus=6, cpu=6), "full")
    for gpus in (8, 1, 0.5):
        cluster.memory.arrival_mix.learn(shape(gpus=gpus), 100)  # so that empty nodes are worth keeping
    assert place(cluster, ask("x", gpus=1, where=Where(preferred=preferred))) == {"x": (wanted,)}


# Taints.


@pytest.mark.parametrize(
    ("taint", "toleration", "expected"),
    [
        (Taint("k", "v"), None, False),
        (Taint("k", "v", Effect.NO_EXECUTE), None, False),
        (Taint("k", "v", Effect.PREFER_NO_SCHEDULE), None, True),
        (Taint("k", "v"), Toleration("k", value="v"), True),
        (Taint("k", "v"), Toleration("k", value="w"), False),
        (Taint("k", "v"), Toleration("k", exists=True), True),
        (Taint("k", "v"), Toleration("other", exists=True), False),
        (Taint("k", "v"), Toleration(exists=True), True),
        (Taint("k", "v"), Toleration("k", exists=True, effect="NoExecute"), False),
        (Taint("k", "v", Effect.NO_EXECUTE), Toleration("k", exists=True, effect="NoExecute"), True),
    ],
)
def test_taints_keep_off_what_does_not_tolerate_them(
    taint: Taint, toleration: Toleration | None, expected: bool
) -> None:
    where = Where(tolerations=(toleration,) if toleration else ())
    assert fits(ask("x", cpu=1, where=where), machine("a", cpu=1, taints=(taint,))) is expected


def test_a_node_that_is_rather_not_used_is_used_last() -> None:
    unwelcome = machine("a", cpu=4, taints=(Taint("k", "", Effect.PREFER_NO_SCHEDULE),))
    cluster = cluster_of(unwelcome, machine("b", cpu=4))
    run(cluster, ask("old", cpu=3), "a")
    placed = place(cluster, ask("x", cpu=1), ask("y", cpu=3), ask("z", cpu=1))
    assert sorted(placed.values()) == [("a",), ("b",), ("b",)]


def test_asking_for_an_extended_resource_tolerates_the_taint_of_that_name() -> None:
    spec = {"resources": {"requests": {GPU: "1"}}}
    doc = msgspec.json.encode({"metadata": {"name": "x", "namespace": "n"}, "spec": spec})
    form = ask_of(doc, uid="x", tenant="t", labels={}, priorities={}).shape
    reserved = machine("a", gpus=1, cpu=1, taints=(Taint(GPU, "present"),))
    assert fits(replace(ask("x"), shape=form), reserved)
    assert not fits(ask("y", cpu=1), reserved)


# State.


@pytest.mark.parametrize("state", [{"ready": False}, {"cordoned": True}])
def test_nodes_that_are_cordoned_or_not_ready_take_nothing_new(state: dict[str, Any]) -> None:
    cluster = cluster_of(replace(machine("a", cpu=4), **state), machine("b", cpu=1))
    assert place(cluster, ask("x", cpu=1), ask("y", cpu=1)) == {"x": ("b",)}
    put(cluster, machine("a", cpu=4))
    assert bound(cluster, cycle(cluster)) == {"y": ("a",)}


# Pod affinity.


RACKS = (
    machine("a1", cpu=4, rack="a"),
    machine("a2", cpu=4, rack="a"),
    machine("b1", cpu=4, rack="b"),
    machine("bare", cpu=4),
)


def beside(cluster: ClusterState, *names: str, **labels: str) -> None:
    for name in names:
        run(cluster, ask(f"old-{name}", cpu=1, labels=labels), name)


def placeable(cluster: ClusterState, one: Ask) -> str:
    """The nodes that one may go to, found by taking the others away in turn."""
    found = []
    for name in sorted(cluster.fleet.row_of):
        here = replace(one, shape=replace(one.shape, where=replace(one.shape.where, node_labels=((HOST, name),))))
        if place(cluster, here):
            found.append(name)
        cluster.forget(one.uid)
    return " ".join(found)


def test_affinity_goes_where_matching_pods_are_in_the_same_domain() -> None:
    cluster = cluster_of(*RACKS)
    beside(cluster, "a1", app="db")
    assert placeable(cluster, ask("x", cpu=1, where=near(RACK, app="db"))) == "a1 a2"
    assert placeable(cluster, ask("x", cpu=1, where=near(HOST, app="db"))) == "a1"


def test_affinity_without_matching_pods_waits_for_them() -> None:
    cluster = cluster_of(*RACKS)
    submit(cluster, ask("x", cpu=1, where=near(RACK, app="db")))
    plan = cycle(cluster)
    assert why(cluster, plan, "x").why is ReasonCode.AFFINITY
    run(cluster, ask("db", cpu=1, labels={"app": "db"}), "b1")
    assert bound(cluster, cycle(cluster)) == {"x": ("b1",)}


def test_the_first_of_those_who_want_to_be_near_each_other_may_go_where_the_topology_is() -> None:
    cluster = cluster_of(*RACKS)
    assert placeable(cluster, ask("x", cpu=1, where=near(RACK, app="db"), labels={"app": "db"})) == "a1 a2 b1"


def test_affinity_looks_into_its_own_namespace_unless_told_otherwise() -> None:
    cluster = cluster_of(*RACKS)
    run(cluster, ask("old", cpu=1, labels={"app": "db"}, namespace="other"), "a1")
    assert placeable(cluster, ask("x", where=near(HOST, app="db"))) == ""
    there = Where(near=(InterPodTerm(HOST, labelled(app="db"), ("other",)),))
    assert placeable(cluster, ask("x", where=there)) == "a1"


def test_anti_affinity_stays_out_of_the_domain_and_may_go_where_there_is_none() -> None:
    cluster = cluster_of(*RACKS)
    beside(cluster, "a1", app="db")
    assert placeable(cluster, ask("x", cpu=1, where=apart(RACK, app="db"))) == "b1 bare"
    assert placeable(cluster, ask("x", cpu=1, where=apart(HOST, app="db"))) == "a2 b1 bare"


def test_anti_affinity_holds_the_other_way_as_well() -> None:
    cluster = cluster_of(*RACKS)
    run(cluster, ask("old", cpu=1, where=apart(RACK, app="web")), "a1")
    run(cluster, ask("lost", cpu=1, where=apart(RACK, app="web")), "bare")
    assert placeable(cluster, ask("x", cpu=1, labels={"app": "web"})) == "b1 bare"
    assert placeable(cluster, ask("x", cpu=1, labels={"app": "db"})) == "a1 a2 b1 bare"
    assert placeable(cluster, ask("x", cpu=1, labels={"app": "web"}, namespace="other")) == "a1 a2 b1 bare"
    end(cluster, "old")
    assert placeable(cluster, ask("x", cpu=1, labels={"app": "web"})) == "a1 a2 b1 bare"


def test_pod_affinity_neither_attracts_nor_repels_other_tenants() -> None:
    cluster = cluster_of(machine("a1", cpu=9, rack="a"), machine("b1", cpu=9, rack="b"))
    run(cluster, ask("theirs", cpu=1, tenant="u", namespace="m", labels={"app": "db"}), "a1")
    run(cluster, ask("mine", cpu=1, namespace="o", labels={"app": "db"}), "b1")
    both = (InterPodTerm(RACK, labelled(app="db"), ("m", "o")),)
    assert placeable(cluster, ask("x", cpu=1, where=Where(near=both))) == "b1"
    assert placeable(cluster, ask("x", cpu=1, where=Where(apart=both))) == "a1"
    run(cluster, ask("hostile", cpu=1, where=Where(apart=(InterPodTerm(RACK, namespaces=("m",)),))), "a1")
    assert placeable(cluster, ask("x", cpu=1, tenant="u", namespace="m")) == "a1 b1"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Where(rather_near=((100, InterPodTerm(RACK, labelled(app="db"))),)), {"a1", "a2"}),
        (Where(rather_apart=((100, InterPodTerm(RACK, labelled(app="db"))),)), {"b1", "bare"}),
    ],
)
def test_preferred_pod_affinity_decides_between_nodes_and_keeps_nothing_off(where: Where, expected: set[str]) -> None:
    cluster = cluster_of(*RACKS)
    beside(cluster, "a1", app="db")
    placed = place(cluster, *(ask(f"x{number}", cpu=1, where=where) for number in range(14)))
    assert len(placed) == 14
    assert {node for nodes in list(placed.values())[: 3 * len(expected)] for node in nodes} <= expected


# Spread.


def test_a_spread_fills_the_domains_evenly_and_then_waits() -> None:
    cluster = cluster_of(machine("a", cpu=9, zone="a"), machine("b", cpu=9, zone="b"), machine("bare", cpu=9))
    where = spread(ZONE, app="web")
    placed = place(cluster, *(ask(f"x{number}", cpu=1, where=where, labels={"app": "web"}) for number in range(6)))
    assert sorted(placed.values()) == [("a",)] * 3 + [("b",)] * 3
    put(cluster, machine("b", cpu=9, zone="b", cordoned=True))
    again = ask("x6", cpu=1, where=where, labels={"app": "web"})
    last = ask("x7", cpu=1, where=where, labels={"app": "web"})
    assert place(cluster, again, last) == {"x6": ("a",)}
    assert why(cluster, cycle(cluster), "x7").why is ReasonCode.SPREAD


def test_a_larger_skew_allows_more_in_one_domain() -> None:
    cluster = cluster_of(machine("a", cpu=9, zone="a"), machine("b", cpu=9, zone="b", cordoned=True))
    where = spread(ZONE, 3, app="web")
    assert len(place(cluster, *(ask(f"x{n}", cpu=1, where=where, labels={"app": "web"}) for n in range(5)))) == 3


def test_domains_that_the_node_selector_rules_out_do_not_count_as_empty() -> None:
    where = replace(spread(ZONE, app="web"), node_labels=(("disk", "ssd"),))
    cluster = cluster_of(machine("a", cpu=9, zone="a", disk="ssd"), machine("b", cpu=9, zone="b"))
    assert len(place(cluster, *(ask(f"x{n}", cpu=1, where=where, labels={"app": "web"}) for n in range(3)))) == 3


def test_a_soft_spread_prefers_the_emptiest_domain_and_keeps_nothing_off() -> None:
    cluster = cluster_of(machine("a", cpu=2, zone="a"), machine("b", cpu=9, zone="b"))
    where = spread(ZONE, hard=False, app="web")
    placed = place(cluster, *(ask(f"x{n}", cpu=1, where=where, labels={"app": "web"}) for n in range(8)))
    assert len(placed) == 8
    assert sorted(list(placed.values())[:4]) == [("a",)] * 2 + [("b",)] * 2


def test_a_spread_without_a_selector_counts_the_job() -> None:
    cluster = cluster_of(machine("a", cpu=9, zone="a"), machine("b", cpu=1, zone="b"))
    where = spread(ZONE)
    mine = [ask(f"mine{n}", cpu=1, job="mine", where=where) for n in range(3)]
    other = ask("other", cpu=1, job="other", where=where)
    assert len(place(cluster, *mine)) == 3
    assert place(cluster, ask("mine4", cpu=1, job="mine", where=where), other) == {"other": ("a",)}


def test_a_spread_without_selector_gang_or_job_asks_for_nothing() -> None:
    cluster = cluster_of(machine("a", cpu=9, zone="a"), machine("b", cpu=0, memory=1, zone="b"))
    assert len(place(cluster, *(ask(f"x{n}", cpu=1, where=Where(spreads=(Spread(ZONE),))) for n in range(4)))) == 4


# Whole nodes, several nodes, parts of devices.


def test_exclusive_work_takes_an_empty_node_and_keeps_it_for_itself() -> None:
    cluster = cluster_of(machine("a", cpu=4), machine("b", cpu=4))
    run(cluster, ask("old", cpu=1), "a")
    assert place(cluster, ask("x", cpu=1, exclusive=True)) == {"x": ("b",)}
    assert place(cluster, ask("y", cpu=1, exclusive=True), ask("z", cpu=3)) == {"z": ("a",)}
    end(cluster, "x")
    assert bound(cluster, cycle(cluster)) == {"y": ("b",)}


def test_several_nodes_are_different_ones() -> None:
    cluster = cluster_of(machine("a", gpus=8), machine("b", gpus=2))
    assert sorted(place(cluster, ask("x", gpus=2, nodes=2))["x"]) == ["a", "b"]
    assert place(cluster, ask("y", gpus=1, nodes=2)) == {}
    put(cluster, machine("c", gpus=1))
    assert sorted(bound(cluster, cycle(cluster))["y"]) == ["a", "c"]


def test_parts_share_a_device_and_whole_ones_take_whole_devices() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    assert len(place(cluster, ask("h1", gpus=0.5), ask("h2", gpus=0.5), ask("whole", gpus=1))) == 3
    devices = {uid: one.spots[0].devices[0][1] for uid, one in cluster.placed.items()}
    assert devices["h1"] == devices["h2"] != devices["whole"]


def test_a_part_does_not_fit_where_two_devices_have_a_little_left_each() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("o1", gpus=0.6), "a", devices=(0,))
    run(cluster, ask("o2", gpus=0.6), "a", devices=(1,))
    submit(cluster, ask("x", gpus=0.5))
    assert why(cluster, cycle(cluster), "x").code == f"no_capacity_{GPU}"
    assert place(cluster, ask("y", gpus=0.4)) == {"y": ("a",)}


def test_a_part_left_of_a_device_is_no_whole_one() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("o1", gpus=0.1), "a")
    assert place(cluster, ask("x", gpus=2)) == {}
    assert place(cluster, ask("y", gpus=1)) == {"y": ("a",)}
