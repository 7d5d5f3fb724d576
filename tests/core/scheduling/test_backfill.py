"""Reservations and backfill: work that jumps ahead never delays the unit that capacity is reserved for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.cycle.plan import Plan, SchedulingPolicy
from bursar.core.scheduling.explain.queue_position import order_queue
from bursar.core.scheduling.state.cluster_state import ClusterState, Nomination
from bursar.core.scheduling.state.placed_columns import NEVER
from bursar.core.scheduling.state.scheduler_memory import Reservation
from support.scheduling.cluster_states import (
    GPU,
    HOST,
    NOW,
    Machine,
    apart,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    end_what_is_due,
    machine,
    members,
    place,
    put,
    run,
    submit,
    why,
)


def reserved(cluster: ClusterState) -> Reservation:
    assert cluster.memory.reservation is not None
    return cluster.memory.reservation


def busy(*ends: float, gpus: int = 4) -> ClusterState:
    """Node `a` full of one-GPU work, one for each end; `b` has one GPU that is free."""
    cluster = cluster_of(machine("a", gpus=gpus), machine("b", gpus=1))
    for number, ends_in in enumerate(ends):
        run(cluster, ask(f"old{number}", gpus=1), "a", ends_in=ends_in)
    return cluster


LARGE = ask("large", gpus=4, priority=100, preempts=False)


# What is reserved.


def test_the_reservation_starts_when_enough_will_have_ended() -> None:
    cluster = busy(100, 300, 200, 400)
    submit(cluster, LARGE)
    cycle(cluster)
    assert reserved(cluster).start == NOW + 400
    assert [(one.uid, cluster.fleet.names[row]) for one, row in reserved(cluster).slots] == [("large", "a")]


def test_it_starts_no_later_than_needed() -> None:
    cluster = busy(100, 300, 200, 400)
    submit(cluster, ask("two", gpus=2, priority=100, preempts=False))
    cycle(cluster)
    assert reserved(cluster).start == NOW + 200


def test_what_has_no_known_end_is_not_counted_on() -> None:
    cluster = busy(100, 200, 300, NEVER)
    submit(cluster, LARGE)
    plan = cycle(cluster)
    assert cluster.memory.reservation is None
    assert why(cluster, plan, "large").code == f"no_capacity_{GPU}"
    assert place(cluster, ask("long", gpus=1)) == {"long": ("b",)}


def test_a_gang_is_reserved_for_as_a_whole() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    run(cluster, ask("o1", gpus=2), "a", ends_in=100)
    run(cluster, ask("o2", gpus=1), "b", ends_in=300)
    submit(cluster, *members("g", 4, gpus=1, preempts=False))
    cycle(cluster)
    assert reserved(cluster).start == NOW + 300
    assert sorted(cluster.fleet.names[row] for _, row in reserved(cluster).slots) == ["a", "a", "b", "b"]


def test_several_whole_nodes_are_reserved_together() -> None:
    cluster = cluster_of(*(machine(name, gpus=2) for name in "abc"))
    for name, ends_in in (("a", 100.0), ("b", 200.0), ("c", 300.0)):
        run(cluster, ask(f"o{name}", gpus=1), name, ends_in=ends_in)
    submit(cluster, ask("x", nodes=2, exclusive=True, preempts=False))
    cycle(cluster)
    assert reserved(cluster).start == NOW + 200
    assert {cluster.fleet.names[row] for _, row in reserved(cluster).slots} == {"a", "b"}


def test_only_the_first_that_is_blocked_gets_one() -> None:
    cluster = busy(100, 100, 100, 100)
    submit(cluster, LARGE, ask("second", gpus=4, preempts=False, at=NOW - 5))
    cycle(cluster)
    assert {one.uid for one, _ in reserved(cluster).slots} == {"large"}


def test_what_is_overdue_may_end_any_moment() -> None:
    cluster = busy(-50, 100, -10, -1)
    submit(cluster, ask("three", gpus=3, priority=100, preempts=False))
    cycle(cluster)
    assert reserved(cluster).start == NOW
    assert place(cluster, ask("tiny", gpus=1, ttl=1)) == {"tiny": ("b",)}


def test_a_unit_kept_out_by_pod_affinity_gets_no_reservation_and_holds_up_nobody() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2, cordoned=True))
    run(cluster, ask("old", gpus=1, labels={"app": "x"}), "a")
    run(cluster, ask("brief", cpu=0), "b", ends_in=50)
    submit(cluster, ask("shy", gpus=1, priority=100, preempts=False, where=apart(HOST, app="x")))
    plan = cycle(cluster)
    assert why(cluster, plan, "shy").why is ReasonCode.ANTI_AFFINITY
    assert cluster.memory.reservation is None
    assert place(cluster, ask("long", gpus=1)) == {"long": ("a",)}


# Who may jump ahead.


@pytest.mark.parametrize(
    ("ttl", "gpus", "expected"),
    [
        pytest.param(100, 1, True, id="a short one, for it has ended by then"),
        pytest.param(400, 1, True, id="one that ends at that very moment"),
        pytest.param(401, 1, False, id="one that ends a moment too late"),
        pytest.param(0, 1, False, id="one that nobody knows the end of"),
        pytest.param(50, 2, False, id="a short one that does not fit now"),
    ],
)
def test_others_jump_ahead_only_if_they_cannot_delay_it(ttl: int, gpus: int, expected: bool) -> None:
    cluster = cluster_of(machine("a", gpus=4))
    for number, ends_in in enumerate((100, 200, 400)):
        run(cluster, ask(f"old{number}", gpus=1), "a", ends_in=ends_in)
    assert ("x" in place(cluster, LARGE, ask("x", gpus=gpus, ttl=ttl))) is expected
    if not expected and gpus == 1:
        assert why(cluster, cycle(cluster), "x").why is ReasonCode.HELD


def test_a_long_one_may_go_where_it_fits_beside() -> None:
    cluster = cluster_of(machine("a", gpus=4), machine("b", gpus=1))
    run(cluster, ask("old", gpus=2), "a", ends_in=100)
    submit(cluster, ask("three", gpus=3, priority=100, preempts=False))
    submit(cluster, ask("l1", gpus=1, at=NOW - 9), ask("l2", gpus=1), ask("l3", gpus=1, at=NOW - 1))
    assert sorted(bound(cluster, cycle(cluster)).values()) == [("a",), ("b",)], "one beside it, one elsewhere, no third"


def test_beside_means_on_devices_that_stay_free() -> None:
    """Two halves are free now; the whole one that is coming needs the device on which one of them is."""
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("half", gpus=0.5), "a", devices=(0,), ends_in=NEVER)
    run(cluster, ask("brief", gpus=0.5), "a", devices=(1,), ends_in=100)
    submit(cluster, ask("whole", gpus=1, priority=100, preempts=False))
    submit(cluster, ask("long", gpus=0.5), ask("longer", gpus=0.5, at=NOW - 1))
    assert set(bound(cluster, cycle(cluster))) == {"long"}
    assert cluster.placed["long"].spots[0].devices[0][1] == (0,)


def test_nobody_goes_beside_one_that_wants_the_whole_node() -> None:
    cluster = cluster_of(machine("a", cpu=8))
    run(cluster, ask("old", cpu=1), "a", ends_in=100)
    placed = place(
        cluster, ask("alone", exclusive=True, priority=100, preempts=False), ask("l", cpu=1), ask("s", cpu=1, ttl=99)
    )
    assert set(placed) == {"s"}


def test_without_backfill_nothing_is_kept() -> None:
    cluster = busy(100, 100, 100, 100)
    assert set(place(cluster, LARGE, ask("long", gpus=1), backfill=False)) == {"long"}
    assert cluster.memory.reservation is None


def test_capacity_that_is_being_cleared_for_somebody_is_not_reserved_for_another() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    run(cluster, ask("victim", gpus=1), "a", ends_in=30, ending=True)
    run(cluster, ask("other", gpus=1), "a", ends_in=200)
    cluster.wait(ask("nominee", gpus=1), Nomination(("a",), NOW + 90))
    submit(cluster, ask("x", gpus=1, preempts=False))
    cycle(cluster)
    assert {one.uid for one, _ in reserved(cluster).slots} == {"x"}
    assert reserved(cluster).start == NOW + 200


def test_who_jumps_ahead_delays_neither_the_reserved_one_nor_one_that_starts_before_it() -> None:
    """A reservation for later, and on the same node capacity cleared for other work sooner: both must find theirs."""
    cluster = cluster_of(machine("a", gpus=6))
    run(cluster, ask("victim", gpus=1), "a")
    run(cluster, ask("big", gpus=4, priority=1000), "a", ends_in=1000)
    submit(cluster, ask("reserved", gpus=2, priority=9000, preempts=False))
    submit(cluster, ask("urgent", gpus=2, priority=500, ttl=100), ask("filler", gpus=1, priority=-500, ttl=500))
    plan = cycle(cluster)
    assert reserved(cluster).start == NOW + 1000
    assert set(cluster.nominated) == {"urgent"}
    assert bound(cluster, plan) == {}, "the one GPU that is free is what the urgent one is waiting for"


# Over several cycles.


def test_the_reservation_stands_while_others_come_and_go() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    for number, ends_in in enumerate((100, 200, 400)):
        run(cluster, ask(f"old{number}", gpus=1), "a", ends_in=ends_in)
    submit(cluster, LARGE)
    for second in range(0, 400, 7):
        now = NOW + second
        end_what_is_due(cluster, now)
        submit(cluster, ask(f"long{second}", gpus=1, at=now), ask(f"short{second}", gpus=1, ttl=30, at=now))
        cycle(cluster, now)
        assert reserved(cluster).start <= NOW + 400
        assert not any(uid.startswith("long") for uid in cluster.placed)
    end_what_is_due(cluster, NOW + 400)
    assert "large" in bound(cluster, cycle(cluster, NOW + 400))


def test_when_the_reserved_one_goes_away_the_next_blocked_one_is_kept_capacity_for() -> None:
    cluster = cluster_of(machine("a", gpus=4))
    run(cluster, ask("old", gpus=3), "a", ends_in=400)
    second = ask("second", gpus=4, priority=50, preempts=False)
    submit(cluster, LARGE, second)
    cycle(cluster)
    end(cluster, "large")
    assert place(cluster, ask("long", gpus=1), now=NOW + 1) == {}
    assert {one.uid for one, _ in reserved(cluster).slots} == {"second"}


def test_capacity_that_comes_early_is_used_early() -> None:
    cluster = busy(100, 300, 200, 400)
    submit(cluster, LARGE)
    cycle(cluster)
    end(cluster, *(f"old{number}" for number in range(4)))
    assert bound(cluster, cycle(cluster, NOW + 1)) == {"large": ("a",)}


def test_a_node_that_comes_brings_the_start_forward() -> None:
    cluster = busy(100, 300, 200, 400)
    submit(cluster, LARGE)
    cycle(cluster)
    put(cluster, machine("c", gpus=4))
    assert bound(cluster, cycle(cluster, NOW + 1)) == {"large": ("c",)}


# The promise.


# So far from one another that nothing else decides the order.
PRIORITIES = (30_000, 3_000, 1_000, 300, 0, -300, -1_000, -3_000)
LAST = -30_000


@st.composite
def contested(draw: st.DrawFn) -> tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]]:
    """Nodes, their work and its ends, and pending work, of one tenant in the order of priority."""
    nodes = [machine(name, gpus=draw(st.integers(1, 4)), cpu=4) for name in "abc"[: draw(st.integers(1, 3))]]
    free = {one.name: one.offers[GPU] // 1000 for one in nodes}
    residents = []
    for number in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(free)))
        gpus = draw(st.sampled_from([0.5, 1, 1, 2]))
        if free[name] >= gpus + (gpus % 1):
            free[name] -= int(gpus + gpus % 1)
            resident = ask(f"old{number}", gpus=gpus, cpu=draw(st.sampled_from([0, 1])))
            residents.append((resident, name, float(draw(st.sampled_from([50, 100, 200, 400, NEVER])))))
    waiting = [
        ask(
            f"w{number}",
            gpus=draw(st.sampled_from([0.5, 1, 1, 2, 3])),
            cpu=draw(st.sampled_from([0, 1, 2])),
            nodes=draw(st.sampled_from([1, 1, 1, 2])),
            exclusive=draw(st.integers(0, 7)) == 0,
            ttl=draw(st.sampled_from([0, 30, 100, 150, 300])),
            priority=PRIORITIES[number],
            preempts=False,
            queue="by-priority",
        )
        for number in range(draw(st.integers(2, 8)))
    ]
    return nodes, residents, waiting


def ready(case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]]) -> ClusterState:
    nodes, residents, waiting = case
    cluster = cluster_of(*nodes, profiles={"by-priority": "sensitive"})
    for one, name, ends_in in residents:
        cpu = cluster.fleet.column_of["cpu"]
        if cluster.fleet.now.free[cpu, cluster.fleet.row_of[name]] >= dict(one.shape.requests).get("cpu", 0):
            run(cluster, one, name, ends_in=ends_in)
    submit(cluster, *waiting)
    return cluster


@settings(max_examples=300)
@given(contested())
def test_a_reservation_is_never_delayed_by_what_jumped_ahead(
    case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]],
) -> None:
    cluster = ready(case)
    cycle(cluster)
    if cluster.memory.reservation is None:
        return
    found = reserved(cluster)
    owners = {one.uid for one, _ in found.slots}
    end_what_is_due(cluster, found.start)
    cycle(cluster, found.start)
    assert owners <= set(cluster.placed)


@settings(max_examples=150)
@given(contested())
def test_nor_by_all_the_cycles_in_between(
    case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]],
) -> None:
    """A cycle at every end, and new work that is less urgent arriving at each of them."""
    cluster = ready(case)
    cycle(cluster)
    if cluster.memory.reservation is None:
        return
    found = reserved(cluster)
    owners = {one.uid for one, _ in found.slots}
    number = 0
    while cluster.placed and (now := min(one.ends_at for one in cluster.placed.values())) <= found.start:
        end_what_is_due(cluster, now)
        for ttl in (0, 40):
            number += 1
            late = ask(f"new{number}", gpus=1, ttl=ttl, priority=LAST, preempts=False, queue="by-priority", at=now)
            submit(cluster, late)
        cycle(cluster, now)
        if owners <= set(cluster.placed):
            return
        assert cluster.memory.reservation is not None
        assert reserved(cluster).start <= found.start or not owners <= set(cluster.waiting)
        assert now < found.start, f"{owners} should have begun by {found.start - NOW}"


# Whose turn it is, once a reservation stands.


def four_nodes(*ends: float, tenant: str = "t") -> ClusterState:
    """Each full of work that ends then."""
    names = "abcd"[: len(ends)]
    cluster = cluster_of(*(machine(name, gpus=8, rack=f"r{place // 2}") for place, name in enumerate(names)))
    for name, ends_in in zip(names, ends, strict=True):
        run(cluster, ask(f"old-{name}", gpus=8, tenant=tenant), name, ends_in=ends_in)
    return cluster


BIG = ask("big", gpus=8, nodes=4, ttl=5, preempts=False)


def test_small_work_that_scores_higher_does_not_take_what_is_reserved() -> None:
    cluster = four_nodes(40, 40, 40, 40)
    submit(cluster, BIG)
    cycle(cluster)
    end(cluster, "old-a")
    late = ask("late", gpus=4, ttl=600, at=NOW, preempts=False)
    plan = cycle_with(cluster, late)
    assert why(cluster, plan, "late").why is ReasonCode.HELD
    assert reserved(cluster).start == NOW + 40
    end_what_is_due(cluster, NOW + 40)
    assert "big" in bound(cluster, cycle(cluster, NOW + 40))


def cycle_with(cluster: ClusterState, *asks: Ask, now: float = NOW) -> Plan:
    submit(cluster, *asks)
    return cycle(cluster, now)


def test_nor_does_the_work_of_a_tenant_whose_share_has_just_come_free() -> None:
    """All that ran was another tenant's: when it has ended, neither holds anything."""
    cluster = four_nodes(40, 40, 40, 40, tenant="u")
    submit(cluster, BIG)
    cycle(cluster)
    submit(cluster, ask("s600", gpus=2, ttl=600, tenant="u", at=NOW - 30, preempts=False))
    cycle(cluster, NOW + 1)
    assert {one.uid for one, _ in reserved(cluster).slots} == {"big"}
    end_what_is_due(cluster, NOW + 40)
    assert list(bound(cluster, cycle(cluster, NOW + 40))) == ["big"]


def test_a_stream_of_small_work_does_not_keep_the_large_from_starting() -> None:
    cluster = four_nodes(10, 20, 30, 40)
    submit(cluster, BIG)
    cycle(cluster)
    started, now = None, NOW
    for second in range(120):
        now = NOW + second
        end_what_is_due(cluster, now)
        for number in range(4):
            submit(cluster, ask(f"s{second}-{number}", gpus=4, ttl=12, at=now, preempts=False))
        cycle(cluster, now)
        if "big" in cluster.placed:
            started = second
            break
    assert started == 40


def test_the_more_urgent_of_the_same_tenant_goes_before_it() -> None:
    cluster = four_nodes(40, 40, 40, 40)
    submit(cluster, BIG)
    cycle(cluster)
    end(cluster, "old-a")
    urgent = ask("urgent", gpus=4, ttl=600, at=NOW, priority=10, preempts=False)
    assert bound(cluster, cycle_with(cluster, urgent)) == {"urgent": ("a",)}
    cycle(cluster, NOW + 2)
    assert reserved(cluster).start == NOW + 600, "what was reserved is found anew, for its room was taken"


def test_a_tenant_further_behind_its_share_goes_before_it() -> None:
    cluster = four_nodes(40, 40, 40, 40)
    submit(cluster, BIG)
    cycle(cluster)
    end(cluster, "old-a")
    behind = ask("behind", gpus=4, ttl=600, at=NOW, tenant="u", preempts=False)
    assert bound(cluster, cycle_with(cluster, behind)) == {"behind": ("a",)}


def test_a_full_cluster_does_not_put_who_needs_several_nodes_behind_everybody() -> None:
    cluster = four_nodes(40, 40, 40, 40)
    submit(cluster, ask("crit", gpus=8, nodes=4, priority=1_000_000, preempts=False))
    submit(cluster, ask("low", gpus=1, at=NOW - 59, preempts=False))
    line = order_queue(cluster, SchedulingPolicy(), NOW)
    positions = {uid: line.position(group.members[uid], group) for uid, group in cluster.waiting.items()}
    assert {uid: one.overall for uid, one in positions.items() if one is not None} == {"crit": 1, "low": 2}


@settings(max_examples=150)
@given(contested(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.sampled_from([0, 5, 40])), max_size=12))
def test_nor_by_work_that_is_just_as_urgent_and_comes_later(
    case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]], stream: list[tuple[int, int, int]]
) -> None:
    """Of the same tenant, in whatever queue: whatever its score, it waits."""
    cluster = ready(case)
    cycle(cluster)
    if cluster.memory.reservation is None:
        return
    found = reserved(cluster)
    owners = {one.uid for one, _ in found.slots}
    urgency = min(one.priority for one, _ in found.slots)
    moments = sorted({one.ends_at for one in cluster.placed.values() if one.ends_at <= found.start} | {found.start})
    for now in moments:
        end_what_is_due(cluster, now)
        for number, (queue, gpus, ttl) in enumerate(stream):
            name, profile = f"new{now}-{number}", ["", "hpc", "interactive", "service"][queue]
            cluster.profiles[f"q{queue}"] = profile or "default"
            submit(cluster, ask(name, gpus=gpus, ttl=ttl, priority=urgency, queue=f"q{queue}", at=now, preempts=False))
        cycle(cluster, now)
        if owners <= set(cluster.placed):
            return
    raise AssertionError(f"{owners} should have begun by {found.start - NOW}")
