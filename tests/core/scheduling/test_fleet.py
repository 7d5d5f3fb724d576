"""The nodes as columns: the same answers as the rules by which commits are decided, node by node."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.nodes.node import WHOLE, NodeCapacity, Shortage, device_list, dominant_fraction, fit, give, take_back
from bursar.core.objects.ask import Operator as Is
from bursar.core.objects.ask import Requirement, Shape, Taint, Where
from bursar.core.scheduling.cycle.placer import fit_counts
from bursar.core.scheduling.state.fleet import NOWHERE, Fleet
from bursar.core.scheduling.state.node_filter import NodeFilters
from bursar.core.scheduling.state.node_reservation import free_devices
from bursar.core.scheduling.state.placed_columns import DeviceSets
from support.scheduling.cluster_states import FPGA, GPU, shape

# The same arithmetic.


@st.composite
def offers(draw: st.DrawFn) -> dict[str, int]:
    found = {"cpu": draw(st.integers(0, 4)) * WHOLE, GPU: draw(st.integers(0, 3)) * WHOLE}
    if draw(st.booleans()):
        found["pods"] = draw(st.integers(0, 3)) * WHOLE
    if draw(st.integers(0, 3)) == 0:
        found[FPGA] = WHOLE
    return found


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return shape(
        gpus=draw(st.sampled_from([0, 0.3, 0.5, 0.7, 1, 2])),
        cpu=draw(st.sampled_from([0, 0.5, 1, 2])),
        exclusive=draw(st.integers(0, 4)) == 0,
        wants={FPGA: draw(st.sampled_from([500, WHOLE]))} if draw(st.integers(0, 4)) == 0 else None,
    )


def capacity_of(name: str, amounts: dict[str, int]) -> NodeCapacity:
    return NodeCapacity(name, 1, True, amounts, {}, device_list(amounts, {}))


@settings(max_examples=200)
@given(
    st.lists(offers(), min_size=1, max_size=4), st.lists(st.tuples(shapes(), st.integers(0, 3)), max_size=12), st.data()
)
def test_columns_say_what_the_rules_of_a_node_say(
    nodes: list[dict[str, int]], wanted: list[tuple[Shape, int]], data: st.DataObject
) -> None:
    fleet = Fleet()
    capacities = [capacity_of(f"n{number}", amounts) for number, amounts in enumerate(nodes)]
    for capacity in capacities:
        fleet.put(capacity.name, capacity.allocatable, labels={})
    given_away: list[tuple[Shape, int, DeviceSets]] = []
    for form, number in wanted:
        need, row = fleet.need(form), number % len(nodes)
        requests = dict(form.requests)
        fits = fleet.now.fits(need, fleet.allocatable)
        for other, capacity in enumerate(capacities):
            expected = not isinstance(fit(capacity, requests, exclusive=form.exclusive), Shortage)
            assert fits[other] == expected == fleet.now.fits_at(need, fleet.allocatable, other)
        assert not fits[len(nodes) :].any()
        assert fit_counts(fleet, fleet.now, need)[row] == how_many(capacities[row], form)
        assert fleet.node_part(row, form) == (WHOLE if form.exclusive else dominant_fraction(capacities[row], requests))
        if fits[row]:
            devices = free_devices(fleet.now, row, need)
            fleet.now.take(row, need, devices)
            capacities[row] = taken_from(capacities[row], form, devices, fleet)
            given_away.append((form, row, devices))
        elif len(given_away) > 0 and data.draw(st.booleans()):
            old, row, devices = given_away.pop(data.draw(st.integers(0, len(given_away) - 1)))
            fleet.now.give_back(row, fleet.need(old), devices)
            capacities[row] = back(capacities[row], old, devices, fleet)
        agree(fleet, capacities)


def how_many(capacity: NodeCapacity, form: Shape) -> int:
    """By allocating one after another until the capacity is used up."""
    count = 0
    while count < 100:
        taken = fit(capacity, dict(form.requests), exclusive=form.exclusive)
        if isinstance(taken, Shortage):
            return count
        capacity = give(capacity, taken, dict(form.requests))
        count += 1
    return 1 << 40  # nothing limits it


def names_of(fleet: Fleet, devices: DeviceSets) -> dict[str, tuple[int, ...]]:
    names = {column: name for name, column in fleet.device_column_of.items()}
    return {names[column]: tuple(indices) for column, indices in devices}


def taken_from(capacity: NodeCapacity, form: Shape, devices: DeviceSets, fleet: Fleet) -> NodeCapacity:
    wanted = names_of(fleet, devices)
    taken = fit(capacity, dict(form.requests), exclusive=form.exclusive, wanted=wanted)
    assert not isinstance(taken, Shortage)
    return give(capacity, taken, dict(form.requests))


def back(capacity: NodeCapacity, form: Shape, devices: DeviceSets, fleet: Fleet) -> NodeCapacity:
    if form.exclusive:
        return capacity_of(capacity.name, dict(capacity.allocatable))
    requests = dict(form.requests)
    return take_back(capacity, {**requests, "pods": WHOLE}, names_of(fleet, devices), requests)


def agree(fleet: Fleet, capacities: Sequence[NodeCapacity]) -> None:
    for row, capacity in enumerate(capacities):
        if fleet.now.exclusive[row]:
            continue
        for name, column in fleet.column_of.items():
            if name in capacity.allocatable:
                assert fleet.now.free[column, row] == capacity.allocatable[name] - capacity.allocated.get(name, 0)
        for name, column in fleet.device_column_of.items():
            used = capacity.devices.get(name, ())
            left = [WHOLE - part for part in used]
            assert fleet.now.devices[column][row].tolist()[: len(used)] == left
            assert fleet.now.whole[column, row] == left.count(WHOLE)
            assert fleet.now.widest[column, row] == max(left, default=0)


# What a node is.


def test_labels_are_numbered_and_follow_the_nodes() -> None:
    fleet = Fleet()
    for name, zone in (("a", "z1"), ("b", "z2"), ("c", "z1")):
        fleet.put(name, {}, labels={"zone": zone})
    fleet.put("d", {}, labels={})
    column = fleet.label("zone")
    assert column.codes[:4].tolist() == [0, 1, 0, NOWHERE]
    before = column.changed
    fleet.put("a", {}, labels={"zone": "z1"})
    assert fleet.label("zone").changed == before, "nothing has moved"
    fleet.put("a", {}, labels={"zone": "z3"})
    fleet.remove("b")
    assert fleet.label("zone").codes[:4].tolist() == [2, NOWHERE, 0, NOWHERE]
    assert fleet.label("zone").changed > before


def test_rows_of_nodes_that_are_gone_are_used_again() -> None:
    fleet = Fleet()
    for name in "abc":
        fleet.put(name, {"cpu": WHOLE}, labels={})
    fleet.remove("b")
    assert len(fleet) == 2
    assert fleet.put("d", {"cpu": 2 * WHOLE}, labels={}) == 1
    assert (len(fleet), fleet.size) == (3, 3)
    assert fleet.now.free[fleet.column_of["cpu"], :3].tolist() == [WHOLE, 2 * WHOLE, WHOLE]


def test_columns_grow_and_keep_what_is_in_them() -> None:
    fleet = Fleet()
    for number in range(150):
        fleet.put(f"n{number}", {"cpu": number, GPU: 12 * WHOLE}, labels={"zone": f"z{number}"}, taints=(Taint("k"),))
        if not number:
            fleet.now.take(0, fleet.need(shape(gpus=2)), ((0, (3, 11)),))
    assert fleet.now.free[fleet.column_of["cpu"], :150].tolist() == list(range(150))
    assert (fleet.now.devices[0][0] == WHOLE).sum() == 10
    assert len(fleet.label("zone").values) == 150
    assert not NodeFilters(fleet).of(Where()).allowed.any()


def test_a_copy_is_not_changed_by_what_comes_after() -> None:
    fleet = Fleet()
    fleet.put("a", {"cpu": 2 * WHOLE, GPU: WHOLE}, labels={})
    trial = fleet.now.copy()
    fleet.now.take(0, fleet.need(shape(cpu=1, gpus=1)), ((0, (0,)),))
    assert trial.free[fleet.column_of["cpu"], 0] == 2 * WHOLE
    assert trial.devices[0][0, 0] == WHOLE
    assert trial.placed[0] == 0


def test_a_node_filter_is_computed_anew_when_a_node_changes() -> None:
    fleet = Fleet()
    node_filters = NodeFilters(fleet)
    where = Where(required=((Requirement("gen", Is.AT_LEAST, ("3",)),),))
    fleet.put("a", {}, labels={"gen": "2"})
    assert not node_filters.of(where).allowed.any()
    fleet.put("a", {}, labels={"gen": "3"})
    assert np.flatnonzero(node_filters.of(where).allowed).tolist() == [0]
    fleet.put("a", {}, labels={"gen": "3"}, taints=(Taint("k"),))
    node_filter = node_filters.of(where)
    assert node_filter.selected[0]
    assert not node_filter.allowed[0]
