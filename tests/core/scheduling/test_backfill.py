"""Reservations and who may jump ahead: nobody who does delays the one for whom room is kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import Why
from bursar.core.scheduling.cycle.plan import Plan, Policy
from bursar.core.scheduling.explain.queue_position import line_up
from bursar.core.scheduling.state.cluster_state import Nomination, Reservation, World
from bursar.core.scheduling.state.placed_columns import NEVER
from support.scheduling.cluster_states import (
    GPU,
    HOST,
    NOW,
    Machine,
    apart,
    ask,
    bound,
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
    world_of,
)


def reserved(world: World) -> Reservation:
    assert world.reservation is not None
    return world.reservation


def busy(*ends: float, gpus: int = 4) -> World:
    """Node `a` full of one-GPU work, one for each end; `b` has one GPU that is free."""
    world = world_of(machine("a", gpus=gpus), machine("b", gpus=1))
    for number, ends_in in enumerate(ends):
        run(world, ask(f"old{number}", gpus=1), "a", ends_in=ends_in)
    return world


LARGE = ask("large", gpus=4, priority=100, preempts=False)


# What is reserved.


def test_the_reservation_starts_when_enough_will_have_ended() -> None:
    world = busy(100, 300, 200, 400)
    submit(world, LARGE)
    cycle(world)
    assert reserved(world).start == NOW + 400
    assert [(one.uid, world.fleet.names[row]) for one, row in reserved(world).slots] == [("large", "a")]


def test_it_starts_no_later_than_needed() -> None:
    world = busy(100, 300, 200, 400)
    submit(world, ask("two", gpus=2, priority=100, preempts=False))
    cycle(world)
    assert reserved(world).start == NOW + 200


def test_what_has_no_known_end_is_not_counted_on() -> None:
    world = busy(100, 200, 300, NEVER)
    submit(world, LARGE)
    plan = cycle(world)
    assert world.reservation is None
    assert why(world, plan, "large").code == f"no_capacity_{GPU}"
    assert place(world, ask("long", gpus=1)) == {"long": ("b",)}


def test_a_gang_is_reserved_for_as_a_whole() -> None:
    world = world_of(machine("a", gpus=2), machine("b", gpus=2))
    run(world, ask("o1", gpus=2), "a", ends_in=100)
    run(world, ask("o2", gpus=1), "b", ends_in=300)
    submit(world, *members("g", 4, gpus=1, preempts=False))
    cycle(world)
    assert reserved(world).start == NOW + 300
    assert sorted(world.fleet.names[row] for _, row in reserved(world).slots) == ["a", "a", "b", "b"]


def test_several_whole_nodes_are_reserved_together() -> None:
    world = world_of(*(machine(name, gpus=2) for name in "abc"))
    for name, ends_in in (("a", 100.0), ("b", 200.0), ("c", 300.0)):
        run(world, ask(f"o{name}", gpus=1), name, ends_in=ends_in)
    submit(world, ask("x", nodes=2, exclusive=True, preempts=False))
    cycle(world)
    assert reserved(world).start == NOW + 200
    assert {world.fleet.names[row] for _, row in reserved(world).slots} == {"a", "b"}


def test_only_the_first_that_is_blocked_gets_one() -> None:
    world = busy(100, 100, 100, 100)
    submit(world, LARGE, ask("second", gpus=4, preempts=False, at=NOW - 5))
    cycle(world)
    assert {one.uid for one, _ in reserved(world).slots} == {"large"}


def test_what_is_overdue_may_end_any_moment() -> None:
    world = busy(-50, 100, -10, -1)
    submit(world, ask("three", gpus=3, priority=100, preempts=False))
    cycle(world)
    assert reserved(world).start == NOW
    assert place(world, ask("tiny", gpus=1, ttl=1)) == {"tiny": ("b",)}


def test_a_unit_kept_out_by_company_gets_no_reservation_and_holds_up_nobody() -> None:
    world = world_of(machine("a", gpus=2), machine("b", gpus=2, cordoned=True))
    run(world, ask("old", gpus=1, labels={"app": "x"}), "a")
    run(world, ask("brief", cpu=0), "b", ends_in=50)
    submit(world, ask("shy", gpus=1, priority=100, preempts=False, where=apart(HOST, app="x")))
    plan = cycle(world)
    assert why(world, plan, "shy").why is Why.ANTI_AFFINITY
    assert world.reservation is None
    assert place(world, ask("long", gpus=1)) == {"long": ("a",)}


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
    world = world_of(machine("a", gpus=4))
    for number, ends_in in enumerate((100, 200, 400)):
        run(world, ask(f"old{number}", gpus=1), "a", ends_in=ends_in)
    assert ("x" in place(world, LARGE, ask("x", gpus=gpus, ttl=ttl))) is expected
    if not expected and gpus == 1:
        assert why(world, cycle(world), "x").why is Why.HELD


def test_a_long_one_may_go_where_it_fits_beside() -> None:
    world = world_of(machine("a", gpus=4), machine("b", gpus=1))
    run(world, ask("old", gpus=2), "a", ends_in=100)
    submit(world, ask("three", gpus=3, priority=100, preempts=False))
    submit(world, ask("l1", gpus=1, at=NOW - 9), ask("l2", gpus=1), ask("l3", gpus=1, at=NOW - 1))
    assert sorted(bound(world, cycle(world)).values()) == [("a",), ("b",)], "one beside it, one elsewhere, no third"


def test_beside_means_on_devices_that_stay_free() -> None:
    """Two halves are free now; the whole one that is coming needs the device on which one of them is."""
    world = world_of(machine("a", gpus=2))
    run(world, ask("half", gpus=0.5), "a", devices=(0,), ends_in=NEVER)
    run(world, ask("brief", gpus=0.5), "a", devices=(1,), ends_in=100)
    submit(world, ask("whole", gpus=1, priority=100, preempts=False))
    submit(world, ask("long", gpus=0.5), ask("longer", gpus=0.5, at=NOW - 1))
    assert set(bound(world, cycle(world))) == {"long"}
    assert world.placed["long"].spots[0].devices[0][1] == (0,)


def test_nobody_goes_beside_one_that_wants_the_whole_node() -> None:
    world = world_of(machine("a", cpu=8))
    run(world, ask("old", cpu=1), "a", ends_in=100)
    placed = place(
        world, ask("alone", exclusive=True, priority=100, preempts=False), ask("l", cpu=1), ask("s", cpu=1, ttl=99)
    )
    assert set(placed) == {"s"}


def test_without_backfill_nothing_is_kept() -> None:
    world = busy(100, 100, 100, 100)
    assert set(place(world, LARGE, ask("long", gpus=1), backfill=False)) == {"long"}
    assert world.reservation is None


def test_room_that_is_being_cleared_for_somebody_is_not_reserved_for_another() -> None:
    world = world_of(machine("a", gpus=2))
    run(world, ask("victim", gpus=1), "a", ends_in=30, ending=True)
    run(world, ask("other", gpus=1), "a", ends_in=200)
    world.wait(ask("nominee", gpus=1), Nomination(("a",), NOW + 90))
    submit(world, ask("x", gpus=1, preempts=False))
    cycle(world)
    assert {one.uid for one, _ in reserved(world).slots} == {"x"}
    assert reserved(world).start == NOW + 200


def test_who_jumps_ahead_delays_neither_the_reserved_one_nor_one_that_starts_before_it() -> None:
    """A reservation for later, and on the same node room cleared for somebody sooner: both must find theirs."""
    world = world_of(machine("a", gpus=6))
    run(world, ask("victim", gpus=1), "a")
    run(world, ask("big", gpus=4, priority=1000), "a", ends_in=1000)
    submit(world, ask("reserved", gpus=2, priority=9000, preempts=False))
    submit(world, ask("urgent", gpus=2, priority=500, ttl=100), ask("filler", gpus=1, priority=-500, ttl=500))
    plan = cycle(world)
    assert reserved(world).start == NOW + 1000
    assert set(world.nominated) == {"urgent"}
    assert bound(world, plan) == {}, "the one GPU that is free is what the urgent one is waiting for"


# Over several cycles.


def test_the_reservation_stands_while_others_come_and_go() -> None:
    world = world_of(machine("a", gpus=4))
    for number, ends_in in enumerate((100, 200, 400)):
        run(world, ask(f"old{number}", gpus=1), "a", ends_in=ends_in)
    submit(world, LARGE)
    for second in range(0, 400, 7):
        now = NOW + second
        end_what_is_due(world, now)
        submit(world, ask(f"long{second}", gpus=1, at=now), ask(f"short{second}", gpus=1, ttl=30, at=now))
        cycle(world, now)
        assert reserved(world).start <= NOW + 400
        assert not any(uid.startswith("long") for uid in world.placed)
    end_what_is_due(world, NOW + 400)
    assert "large" in bound(world, cycle(world, NOW + 400))


def test_when_the_reserved_one_goes_away_the_next_blocked_one_is_kept_room_for() -> None:
    world = world_of(machine("a", gpus=4))
    run(world, ask("old", gpus=3), "a", ends_in=400)
    second = ask("second", gpus=4, priority=50, preempts=False)
    submit(world, LARGE, second)
    cycle(world)
    end(world, "large")
    assert place(world, ask("long", gpus=1), now=NOW + 1) == {}
    assert {one.uid for one, _ in reserved(world).slots} == {"second"}


def test_room_that_comes_early_is_used_early() -> None:
    world = busy(100, 300, 200, 400)
    submit(world, LARGE)
    cycle(world)
    end(world, *(f"old{number}" for number in range(4)))
    assert bound(world, cycle(world, NOW + 1)) == {"large": ("a",)}


def test_a_node_that_comes_brings_the_start_forward() -> None:
    world = busy(100, 300, 200, 400)
    submit(world, LARGE)
    cycle(world)
    put(world, machine("c", gpus=4))
    assert bound(world, cycle(world, NOW + 1)) == {"large": ("c",)}


# The promise.


# So far from one another that nothing else decides the order.
PRIORITIES = (30_000, 3_000, 1_000, 300, 0, -300, -1_000, -3_000)
LAST = -30_000


@st.composite
def contested(draw: st.DrawFn) -> tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]]:
    """Nodes, what runs on them and until when, and what waits, of one tenant in the order of priority."""
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


def ready(case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]]) -> World:
    nodes, residents, waiting = case
    world = world_of(*nodes, profiles={"by-priority": "sensitive"})
    for one, name, ends_in in residents:
        cpu = world.fleet.column_of["cpu"]
        if world.fleet.now.free[cpu, world.fleet.row_of[name]] >= dict(one.shape.requests).get("cpu", 0):
            run(world, one, name, ends_in=ends_in)
    submit(world, *waiting)
    return world


@settings(max_examples=300)
@given(contested())
def test_a_reservation_is_never_delayed_by_what_jumped_ahead(
    case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]],
) -> None:
    world = ready(case)
    cycle(world)
    if world.reservation is None:
        return
    found = reserved(world)
    owners = {one.uid for one, _ in found.slots}
    end_what_is_due(world, found.start)
    cycle(world, found.start)
    assert owners <= set(world.placed)


@settings(max_examples=150)
@given(contested())
def test_nor_by_all_the_cycles_in_between(
    case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]],
) -> None:
    """A cycle at every end, and new work that is less urgent arriving at each of them."""
    world = ready(case)
    cycle(world)
    if world.reservation is None:
        return
    found = reserved(world)
    owners = {one.uid for one, _ in found.slots}
    number = 0
    while world.placed and (now := min(one.ends_at for one in world.placed.values())) <= found.start:
        end_what_is_due(world, now)
        for ttl in (0, 40):
            number += 1
            late = ask(f"new{number}", gpus=1, ttl=ttl, priority=LAST, preempts=False, queue="by-priority", at=now)
            submit(world, late)
        cycle(world, now)
        if owners <= set(world.placed):
            return
        assert world.reservation is not None
        assert reserved(world).start <= found.start or not owners <= set(world.waiting)
        assert now < found.start, f"{owners} should have begun by {found.start - NOW}"


# Whose turn it is, once a reservation stands.


def four_nodes(*ends: float, tenant: str = "t") -> World:
    """Each full of work that ends then."""
    names = "abcd"[: len(ends)]
    world = world_of(*(machine(name, gpus=8, rack=f"r{place // 2}") for place, name in enumerate(names)))
    for name, ends_in in zip(names, ends, strict=True):
        run(world, ask(f"old-{name}", gpus=8, tenant=tenant), name, ends_in=ends_in)
    return world


BIG = ask("big", gpus=8, nodes=4, ttl=5, preempts=False)


def test_small_work_that_scores_higher_does_not_take_what_is_reserved() -> None:
    world = four_nodes(40, 40, 40, 40)
    submit(world, BIG)
    cycle(world)
    end(world, "old-a")
    late = ask("late", gpus=4, ttl=600, at=NOW, preempts=False)
    plan = cycle_with(world, late)
    assert why(world, plan, "late").why is Why.HELD
    assert reserved(world).start == NOW + 40
    end_what_is_due(world, NOW + 40)
    assert "big" in bound(world, cycle(world, NOW + 40))


def cycle_with(world: World, *asks: Ask, now: float = NOW) -> Plan:
    submit(world, *asks)
    return cycle(world, now)


def test_nor_does_the_work_of_a_tenant_whose_share_has_just_come_free() -> None:
    """All that ran was another tenant's: when it has ended, neither holds anything."""
    world = four_nodes(40, 40, 40, 40, tenant="u")
    submit(world, BIG)
    cycle(world)
    submit(world, ask("s600", gpus=2, ttl=600, tenant="u", at=NOW - 30, preempts=False))
    cycle(world, NOW + 1)
    assert {one.uid for one, _ in reserved(world).slots} == {"big"}
    end_what_is_due(world, NOW + 40)
    assert list(bound(world, cycle(world, NOW + 40))) == ["big"]


def test_a_stream_of_small_work_does_not_keep_the_large_from_starting() -> None:
    world = four_nodes(10, 20, 30, 40)
    submit(world, BIG)
    cycle(world)
    started, now = None, NOW
    for second in range(120):
        now = NOW + second
        end_what_is_due(world, now)
        for number in range(4):
            submit(world, ask(f"s{second}-{number}", gpus=4, ttl=12, at=now, preempts=False))
        cycle(world, now)
        if "big" in world.placed:
            started = second
            break
    assert started == 40


def test_the_more_urgent_of_the_same_tenant_goes_before_it() -> None:
    world = four_nodes(40, 40, 40, 40)
    submit(world, BIG)
    cycle(world)
    end(world, "old-a")
    urgent = ask("urgent", gpus=4, ttl=600, at=NOW, priority=10, preempts=False)
    assert bound(world, cycle_with(world, urgent)) == {"urgent": ("a",)}
    cycle(world, NOW + 2)
    assert reserved(world).start == NOW + 600, "what was reserved is found anew, for its room was taken"


def test_a_tenant_further_behind_its_share_goes_before_it() -> None:
    world = four_nodes(40, 40, 40, 40)
    submit(world, BIG)
    cycle(world)
    end(world, "old-a")
    behind = ask("behind", gpus=4, ttl=600, at=NOW, tenant="u", preempts=False)
    assert bound(world, cycle_with(world, behind)) == {"behind": ("a",)}


def test_a_full_cluster_does_not_put_who_needs_several_nodes_behind_everybody() -> None:
    world = four_nodes(40, 40, 40, 40)
    submit(world, ask("crit", gpus=8, nodes=4, priority=1_000_000, preempts=False))
    submit(world, ask("low", gpus=1, at=NOW - 59, preempts=False))
    line = line_up(world, Policy(), NOW)
    positions = {uid: line.position(group.members[uid], group) for uid, group in world.waiting.items()}
    assert {uid: one.overall for uid, one in positions.items() if one is not None} == {"crit": 1, "low": 2}


@settings(max_examples=150)
@given(contested(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.sampled_from([0, 5, 40])), max_size=12))
def test_nor_by_work_that_is_just_as_urgent_and_comes_later(
    case: tuple[list[Machine], list[tuple[Ask, str, float]], list[Ask]], stream: list[tuple[int, int, int]]
) -> None:
    """Of the same tenant, in whatever queue: whatever its score, it waits."""
    world = ready(case)
    cycle(world)
    if world.reservation is None:
        return
    found = reserved(world)
    owners = {one.uid for one, _ in found.slots}
    urgency = min(one.priority for one, _ in found.slots)
    moments = sorted({one.ends_at for one in world.placed.values() if one.ends_at <= found.start} | {found.start})
    for now in moments:
        end_what_is_due(world, now)
        for number, (queue, gpus, ttl) in enumerate(stream):
            name, profile = f"new{now}-{number}", ["", "hpc", "interactive", "service"][queue]
            world.profiles[f"q{queue}"] = profile or "default"
            submit(world, ask(name, gpus=gpus, ttl=ttl, priority=urgency, queue=f"q{queue}", at=now, preempts=False))
        cycle(world, now)
        if owners <= set(world.placed):
            return
    raise AssertionError(f"{owners} should have begun by {found.start - NOW}")
