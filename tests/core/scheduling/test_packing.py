"""Where things are put, so that what is left is of use to what usually comes."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.nodes.node import WHOLE, Fit, NodeCapacity, fit
from bursar.core.objects.ask import ANYWHERE, Operator, Requirement, Shape, Taint, Toleration, Where
from bursar.core.scheduling.state import arrival_history as learned
from bursar.core.scheduling.state.arrival_history import Typical, typical_of
from bursar.core.scheduling.state.fleet import Fleet, NodeColumns
from bursar.core.scheduling.state.packing import (
    ALIKE_MIN,
    REPEATED,
    ArrivalMix,
    PackingOutlook,
    choose_devices,
    rate,
    state_key,
)

GPU = "nvidia.com/gpu"
GIB = 1 << 30


def asks(gpus: float = 0, cpu: int = 1, memory: int = 1, *, where: Where = ANYWHERE, exclusive: bool = False) -> Shape:
    amounts = {"cpu": cpu * WHOLE, "memory": memory * GIB, GPU: round(gpus * WHOLE)}
    return Shape(tuple(sorted((name, one) for name, one in amounts.items() if one)), where=where, exclusive=exclusive)


def fleet_of(*nodes: tuple[int, int], memory: int = 512, model: Sequence[str] = ()) -> Fleet:
    """Nodes n0, n1 … by (GPUs, cpu)."""
    fleet = Fleet()
    for index, (gpus, cpu) in enumerate(nodes):
        labels = {"model": model[index]} if model else {}
        amounts = {"cpu": cpu * WHOLE, "memory": memory * GIB, GPU: gpus * WHOLE}
        fleet.put(f"n{index}", amounts, labels=labels)
    return fleet


def habits_of(*shapes: Shape | tuple[Shape, int]) -> ArrivalMix:
    arrival_mix = ArrivalMix()
    for one in shapes:
        shape, count = one if isinstance(one, tuple) else (one, 1)
        for _ in range(count):
            arrival_mix.learn(shape)
    return arrival_mix


def place(fleet: Fleet, arrival_mix: ArrivalMix, row: int, shape: Shape) -> None:
    fleet.now.take(row, fleet.need(shape), choose_devices(fleet, fleet.now, row, shape, arrival_mix))


def fitting(fleet: Fleet, shape: Shape) -> np.ndarray:
    return np.flatnonzero(fleet.now.fits(fleet.need(shape), fleet.allocatable)[: fleet.size])


def best(fleet: Fleet, arrival_mix: ArrivalMix, shape: Shape) -> str:
    rows = fitting(fleet, shape)
    return fleet.names[int(rows[rate(fleet, fleet.now, shape, rows, arrival_mix).argmax()])]


# Nodes.


def test_before_anything_is_learned_the_tightest_node_is_taken() -> None:
    assert best(fleet_of((8, 96), (2, 16), (4, 32)), ArrivalMix(), asks(1, cpu=4)) == "n1"


def test_without_devices_the_tightest_node_is_taken() -> None:
    arrival_mix = habits_of((asks(0, cpu=4), 50))
    assert arrival_mix.typical == ()
    assert best(fleet_of((0, 96), (0, 8), (0, 32)), arrival_mix, asks(0, cpu=4)) == "n1"


def test_work_without_devices_goes_where_cpu_is_left_over() -> None:
    """The first node has just the cpu that its devices will need."""
    arrival_mix = habits_of((asks(1, cpu=8), 20))
    assert best(fleet_of((4, 32), (2, 64)), arrival_mix, asks(0, cpu=8)) == "n1"


def test_whole_nodes_are_kept_for_those_that_need_whole_nodes() -> None:
    arrival_mix = habits_of((asks(8, cpu=64), 5), (asks(1, cpu=8), 5))
    fleet = fleet_of((8, 64), (8, 64))
    place(fleet, arrival_mix, 1, asks(1, cpu=8))
    assert best(fleet, arrival_mix, asks(1, cpu=8)) == "n1"


def test_nodes_that_only_some_may_use_are_taken_by_these() -> None:
    """Anything may run on the second node, only what tolerates its taint on the first."""
    dear = Where(tolerations=(Toleration("dedicated", exists=True),))
    fleet = Fleet()
    for name, taints in (("plain", ()), ("dear", (Taint("dedicated"),))):
        fleet.put(name, {"cpu": 32 * WHOLE, GPU: 4 * WHOLE}, labels={}, taints=taints)
    tolerant = Shape((("cpu", 8 * WHOLE), (GPU, WHOLE)), where=dear)
    arrival_mix = habits_of((Shape((("cpu", 8 * WHOLE), (GPU, WHOLE))), 20), (tolerant, 2))
    assert best(fleet, arrival_mix, tolerant) == "dear"


def test_a_model_that_is_asked_for_is_kept_from_those_who_do_not_care() -> None:
    scarce = Where(required=((Requirement("model", Operator.IN, ("A100",)),),))
    arrival_mix = habits_of((asks(1, cpu=8), 20), (asks(1, cpu=8, where=scarce), 10))
    fleet = fleet_of((4, 32), (4, 32), model=("A100", "T4"))
    assert best(fleet, arrival_mix, asks(1, cpu=8)) == "n1"
    assert (
        best(fleet, habits_of((asks(1, cpu=8), 20)), asks(1, cpu=8)) == "n0"
    )  # Nobody asks for it: the first of equals.


def test_a_scarce_model_is_kept_even_when_its_cpu_is_left_over() -> None:
    """A fifth of the work insists on a ninth of the devices: they are kept for it, though cpu is scarcer elsewhere."""
    scarce = Where(node_labels=(("model", "A100"),))
    arrival_mix = habits_of((asks(1, cpu=8), 40), (asks(1, cpu=8, where=scarce), 10))
    fleet = fleet_of((2, 64), (8, 64), (8, 64), model=("A100", "T4", "T4"))
    hungry = asks(1, cpu=24)
    assert best(fleet, arrival_mix, hungry) == "n1"
    careless = PackingOutlook(fleet, arrival_mix.typical, pressing=False)
    careless_loss = careless.loss(fleet.now, fleet.need(hungry), np.arange(fleet.size))
    assert careless_loss.argmin() == 0


def test_exclusive_work_takes_the_node_that_is_worth_least() -> None:
    arrival_mix = habits_of((asks(1, cpu=8), 20))
    assert best(fleet_of((8, 64), (4, 64), (8, 64)), arrival_mix, asks(1, exclusive=True)) == "n1"


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_rating_is_between_zero_and_one_and_depends_on_the_state_only(data: st.DataObject) -> None:
    fleet, arrival_mix = data.draw(cluster_states(nodes=ALIKE_MIN + 8))
    shape = data.draw(st.sampled_from(SHAPES))
    rows = fitting(fleet, shape)
    together = rate(fleet, fleet.now, shape, rows, arrival_mix) if rows.size else np.zeros(0)
    assert ((together > 0) & (together <= 1)).all()
    by_state: dict[object, float] = {}
    for row, score in zip(rows.tolist(), together.tolist(), strict=True):
        alone = float(rate(fleet, fleet.now, shape, np.array([row]), arrival_mix)[0])
        assert alone == pytest.approx(score, abs=1e-12)
        assert by_state.setdefault(state_key(fleet, fleet.now, row, arrival_mix), alone) == pytest.approx(
            alone, abs=1e-12
        )


def test_nodes_with_as_much_left_in_other_parts_are_told_apart() -> None:
    """Half of the nodes have one device left, half have two halves; whole devices are what comes."""
    arrival_mix = habits_of((asks(1), 20))
    fleet = fleet_of(*[(2, 64)] * (2 * ALIKE_MIN))
    for row in range(fleet.size):
        for device in (0, 0) if row % 2 else (0, 1):
            fleet.now.take(row, fleet.need(asks(0.5)), [(0, (device,))])
    scores = rate(fleet, fleet.now, asks(0.5), np.arange(fleet.size), arrival_mix)
    assert set(scores[::2].tolist()).isdisjoint(scores[1::2].tolist())
    assert best(fleet, arrival_mix, asks(0.5)) == "n0"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_worth_is_lost_as_a_slow_reckoning_says(data: st.DataObject) -> None:
    fleet, arrival_mix = data.draw(cluster_states(nodes=3))
    shape = data.draw(st.sampled_from(SHAPES))
    for row in fitting(fleet, shape).tolist():
        before = slow_worth(fleet, fleet.now, row, arrival_mix.typical)
        after = []
        for devices in ways(fleet, row, shape):
            columns = fleet.now.copy()
            columns.take(row, fleet.need(shape), devices)
            after.append(0.0 if shape.exclusive else slow_worth(fleet, columns, row, arrival_mix.typical))
        lost = PackingOutlook(fleet, arrival_mix.typical).loss(fleet.now, fleet.need(shape), np.array([row]))[0]
        assert lost == pytest.approx(before - max(after), abs=1e-9)
        assert lost >= -1e-9
        if not shape.exclusive:
            columns = fleet.now.copy()
            columns.take(row, fleet.need(shape), choose_devices(fleet, fleet.now, row, shape, arrival_mix))
            assert slow_worth(fleet, columns, row, arrival_mix.typical) == pytest.approx(max(after), abs=1e-8)


def test_what_is_known_of_nodes_follows_their_description() -> None:
    scarce = Where(node_labels=(("model", "A100"),))
    arrival_mix = habits_of((asks(1, cpu=8), 20), (asks(1, cpu=8, where=scarce), 10))
    fleet = fleet_of((4, 32), (4, 32), model=("T4", "A100"))
    assert best(fleet, arrival_mix, asks(1, cpu=8)) == "n0"
    amounts = {"cpu": 32 * WHOLE, "memory": 512 * GIB, GPU: 4 * WHOLE}
    fleet.put("n0", amounts, labels={"model": "A100"})
    fleet.put("n1", amounts, labels={"model": "T4"})
    assert best(fleet, arrival_mix, asks(1, cpu=8)) == "n1"


# Devices.


def test_a_share_goes_where_it_fills_a_device_up() -> None:
    arrival_mix = habits_of((asks(0.5), 20), (asks(1), 5))
    fleet = fleet_of((3, 64))
    place(fleet, arrival_mix, 0, asks(0.3))
    place(fleet, arrival_mix, 0, asks(0.5))
    assert fleet.now.devices[0][0, :3].tolist() == [200, WHOLE, WHOLE]


def test_a_share_leaves_a_remainder_that_others_can_use() -> None:
    """Beside 0.5, where 0.2 would be left, or beside 0.2, where 0.5 would be: halves are what comes."""
    arrival_mix = habits_of((asks(0.5), 20))
    fleet = fleet_of((2, 64))
    need = fleet.need
    fleet.now.take(0, need(asks(0.5)), [(0, (0,))])
    fleet.now.take(0, need(asks(0.2)), [(0, (1,))])
    assert choose_devices(fleet, fleet.now, 0, asks(0.3), arrival_mix) == [(0, (1,))]


def test_before_anything_is_learned_a_share_goes_on_the_fullest_device() -> None:
    fleet = fleet_of((3, 64))
    fleet.now.take(0, fleet.need(asks(0.2)), [(0, (1,))])
    fleet.now.take(0, fleet.need(asks(0.6)), [(0, (2,))])
    assert choose_devices(fleet, fleet.now, 0, asks(0.3), ArrivalMix()) == [(0, (2,))]


def test_whole_devices_are_taken_from_the_left() -> None:
    fleet = fleet_of((4, 64))
    fleet.now.take(0, fleet.need(asks(0.2)), [(0, (1,))])
    assert choose_devices(fleet, fleet.now, 0, asks(2), ArrivalMix()) == [(0, (0, 2))]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_chosen_devices_are_such_as_a_node_gives(data: st.DataObject) -> None:
    fleet, arrival_mix = data.draw(cluster_states(nodes=2))
    shape = data.draw(st.sampled_from([one for one in SHAPES if not one.exclusive]))
    for row in fitting(fleet, shape).tolist():
        chosen = choose_devices(fleet, fleet.now, row, shape, arrival_mix)
        wanted = {GPU: indices} if (indices := chosen[0][1] if chosen else ()) else {}
        assert isinstance(fit(capacity_of(fleet, row), dict(shape.requests), exclusive=False, wanted=wanted), Fit)


# Habits.


def test_weights_are_how_often_shapes_came_and_those_without_devices_do_not_count() -> None:
    found = typical_of({asks(1): 30, asks(0.5): 10, asks(0): 1000})
    assert {one.shape: one.weight for one in found} == {asks(1): 0.75, asks(0.5): 0.25}


def test_preferences_and_pod_affinity_make_no_other_shape() -> None:
    rather = Where(preferred=((1, (Requirement("zone", Operator.EXISTS),)),))
    assert typical_of({asks(1): 1, asks(1, where=rather): 2}) == (Typical(asks(1), 1.0),)


def test_large_work_is_typical_even_when_it_is_rare() -> None:
    """Small shares of a hundred sizes fill the list; work for eight devices is among them all the same."""
    counts = {asks(index / 1000): 30 for index in range(100, 200)} | {asks(8): 10}
    assert asks(8) in {one.shape for one in typical_of(counts)}
    assert len(typical_of(counts)) == learned.TYPICAL_MAX


def test_more_of_the_same_changes_nothing() -> None:
    arrival_mix = habits_of((asks(1), 10))
    version = arrival_mix.version
    for _ in range(1000):
        arrival_mix.learn(asks(1))
    assert arrival_mix.version == version


def test_what_is_new_is_noticed_once_it_is_a_good_part() -> None:
    arrival_mix = habits_of((asks(1), 100))
    version = arrival_mix.version
    for _ in range(100):
        arrival_mix.learn(asks(2))
    assert arrival_mix.version > version
    assert {one.shape for one in arrival_mix.typical} == {asks(1), asks(2)}


def test_an_allocation_of_several_nodes_counts_for_each() -> None:
    several = Shape(asks(8).requests, nodes=3)
    assert habits_of(several).counts == {several: 3}


def test_old_habits_fade() -> None:
    arrival_mix = ArrivalMix()
    arrival_mix.learn(asks(1), learned.SEEN_MAX - 1)
    for _ in range(4):
        arrival_mix.learn(asks(2), learned.SEEN_MAX // 2)
    weights = {one.shape: one.weight for one in arrival_mix.typical}
    assert weights[asks(1)] < 0.2 < weights[asks(2)]


def test_the_number_of_shapes_that_are_counted_is_bounded() -> None:
    arrival_mix = ArrivalMix()
    for index in range(3 * learned.COUNTED_MAX):
        arrival_mix.learn(asks(1, cpu=1 + index))
        arrival_mix.learn(asks(2))
    assert len(arrival_mix.counts) <= learned.COUNTED_MAX + 1
    assert asks(2) in arrival_mix.counts


# Worlds, and the slow reckoning.

MODELS = ("A100", "T4")
SHAPES = [
    asks(0, cpu=4),
    asks(0.25, cpu=2),
    asks(0.5, cpu=3, memory=40),
    asks(0.81, cpu=1),
    asks(1, cpu=8),
    asks(1, cpu=2, where=Where(node_labels=(("model", "A100"),))),
    asks(2, cpu=6, memory=30),
    asks(4, cpu=16),
    asks(1, exclusive=True),
]


@st.composite
def cluster_states(draw: st.DrawFn, nodes: int) -> tuple[Fleet, ArrivalMix]:
    """A few kinds of nodes with something on them, and habits."""
    kinds = st.tuples(st.sampled_from((0, 1, 2, 4)), st.sampled_from((8, 16, 40)))
    models = [MODELS[index % 2] for index in range(nodes)]
    fleet = fleet_of(*draw(st.lists(kinds, min_size=nodes, max_size=nodes)), memory=128, model=models)
    arrived = draw(st.lists(st.sampled_from(SHAPES), max_size=12))
    arrival_mix = habits_of(*arrived)
    for shape in draw(st.lists(st.sampled_from(SHAPES[:-1]), max_size=3 * nodes)):
        if (rows := fitting(fleet, shape)).size:
            place(fleet, arrival_mix, int(draw(st.sampled_from(rows.tolist()))), shape)
    return fleet, arrival_mix


def ways(fleet: Fleet, row: int, shape: Shape) -> list[list[tuple[int, tuple[int, ...]]]]:
    """All the devices that a shape could be given on a node, as far as it matters which."""
    need = fleet.need(shape)
    line = fleet.now.devices[0][row].tolist()
    if need.shared:
        return [[(0, (index,))] for index, left in enumerate(line) if left >= need.shared[0][1]]
    count = need.whole[0][1] if need.whole else 0
    return [[(0, tuple(index for index, left in enumerate(line) if left == WHOLE)[:count])] if count else []]


def slow_worth(fleet: Fleet, columns: NodeColumns, row: int, typical: Sequence[Typical]) -> float:
    parts = [left / WHOLE for left in columns.devices[0][row].tolist() if left > 0]
    total = 0.0
    for one in typical:
        asked = dict(one.shape.requests)
        if one.shape.exclusive or any(fleet.labels[row].get(k) != v for k, v in one.shape.where.node_labels):
            continue
        gpus = asked[GPU] / WHOLE
        useful = [part for part in parts if part >= min(gpus, 1)]
        usable = sum(useful) if len(useful) >= gpus else 0.0
        times = min(int(columns.free[fleet.column_of[name], row]) / amount for name, amount in asked.items())
        may = [r for r in range(fleet.size) if all(fleet.labels[r].get(k) == v for k, v in one.shape.where.node_labels)]
        offered = fleet.allocatable[fleet.column_of[GPU]]
        pressure = offered.sum() / max(1, offered[may].sum())
        total += (
            pressure
            * one.weight
            * ((1 - REPEATED) * (usable if times >= 1 else 0) + REPEATED * min(usable, times * gpus))
        )
    return total


def capacity_of(fleet: Fleet, row: int) -> NodeCapacity:
    amounts = {name: int(fleet.allocatable[column, row]) for name, column in fleet.column_of.items()}
    taken = {
        name: amount - int(fleet.now.free[column, row])
        for (name, column), amount in zip(fleet.column_of.items(), amounts.values(), strict=True)
    }
    used = tuple(WHOLE - left for left in fleet.now.devices[0][row].tolist() if left >= 0)
    return NodeCapacity(fleet.names[row], 1, True, amounts, taken, {GPU: used})
