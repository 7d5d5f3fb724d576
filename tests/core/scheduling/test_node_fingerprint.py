"""Nodes with the same fingerprint have the same free capacity, at any time and after any history."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import Shape
from bursar.core.scheduling.state.arrival_history import Typical
from bursar.core.scheduling.state.fleet import ROWS_START, Fleet, NodeColumns
from bursar.core.scheduling.state.node_filter import NodeFilters
from bursar.core.scheduling.state.node_fingerprint import NodeFingerprints, fingerprints_of
from bursar.core.scheduling.state.node_scores import NO, NodeScoreCache
from bursar.core.scheduling.state.packing import ArrivalMix, TakenCapacity, choose_devices, rate

GPU = "nvidia.com/gpu"
Resident = tuple[int, Shape, TakenCapacity]
SHAPES = (
    Shape((("cpu", WHOLE), (GPU, WHOLE))),
    Shape((("cpu", WHOLE), (GPU, WHOLE // 2))),
    Shape((("cpu", 2 * WHOLE),)),
)


def capacity(columns: NodeColumns, row: int) -> tuple[object, ...]:
    devices = [tuple(sorted(lines[row].tolist())) for lines in columns.devices]
    return (*columns.free[:, row].tolist(), *devices)


def put(fleet: Fleet, number: int, gpus: int, **others: int) -> None:
    fleet.put(f"n{number}", {"cpu": 16 * WHOLE, GPU: gpus * WHOLE, **others}, labels={})


def new_number(fleet: Fleet) -> int:
    return 1 + max((int(name[1:]) for name in fleet.row_of), default=0)


def happen(data: st.DataObject, fleet: Fleet, placed: list[Resident]) -> None:
    """One thing after another that changes nodes: work comes and goes, nodes come, go and are described anew."""
    match data.draw(st.sampled_from(["place", "place", "end", "come", "change", "go", "resource"])):
        case "place":
            shape = data.draw(st.sampled_from(SHAPES))
            rows = np.flatnonzero(fleet.now.fits(fleet.need(shape), fleet.allocatable))
            if rows.size:
                row = int(data.draw(st.sampled_from(rows.tolist())))
                devices = choose_devices(fleet, fleet.now, row, shape, ArrivalMix())
                fleet.now.take(row, fleet.need(shape), devices)
                placed.append((row, shape, devices))
        case "end" if placed:
            row, shape, devices = placed.pop(data.draw(st.integers(0, len(placed) - 1)))
            fleet.now.give_back(row, fleet.need(shape), devices)
        case "come":
            put(fleet, new_number(fleet), data.draw(st.integers(0, 4)))
        case "change" | "go" as what if fleet.row_of:
            name = data.draw(st.sampled_from(sorted(fleet.row_of)))
            placed[:] = [one for one in placed if one[0] != fleet.row_of[name]]
            if what == "go":
                fleet.remove(name)
            else:
                put(fleet, int(name[1:]), data.draw(st.integers(0, 12)))
        case "resource":
            put(fleet, new_number(fleet), 1, **{data.draw(st.sampled_from(["example.com/fpga", "disk"])): 3 * WHOLE})


@given(st.data())
def test_marks_that_are_kept_are_those_that_would_be_made_anew(data: st.DataObject) -> None:
    fleet = Fleet()
    for number in range(ROWS_START - 2):  # Some more, and the columns grow.
        put(fleet, number, 4)
    kept = NodeFingerprints(fleet)
    placed: list[Resident] = []
    for _ in range(data.draw(st.integers(1, 20))):
        happen(data, fleet, placed)
        if data.draw(st.booleans()):
            rows = np.arange(fleet.size)
            fingerprints = kept.of(rows)
            assert fingerprints.tolist() == fingerprints_of(fleet.now, rows).tolist()
            capacities = [capacity(fleet.now, row) for row in range(fleet.size)]
            assert (
                len(set(capacities))
                == len(set(zip(capacities, fingerprints.tolist(), strict=True)))
                == len(set(fingerprints.tolist()))
            )
        if data.draw(st.integers(0, 4)) == 0:
            kept.forget_log()
            fleet.now.touched.clear()


def test_the_order_in_which_devices_lie_makes_no_difference() -> None:
    fleet = Fleet()
    put(fleet, 0, 4)
    put(fleet, 1, 4)
    whole = fleet.need(SHAPES[0])
    fleet.now.take(0, whole, [(0, (0,))])
    fleet.now.take(1, whole, [(0, (3,))])
    first, second = NodeFingerprints(fleet).of(np.arange(2)).tolist()
    assert first == second


def test_a_device_that_is_used_up_is_not_one_that_is_not_there() -> None:
    fleet = Fleet()
    put(fleet, 0, 2)
    put(fleet, 1, 1)
    fleet.now.take(0, fleet.need(SHAPES[0]), [(0, (0,))])
    fleet.now.free[:, 1] = fleet.now.free[:, 0]
    first, second = NodeFingerprints(fleet).of(np.arange(2)).tolist()
    assert first != second


@given(st.data())
def test_a_view_of_all_nodes_is_what_each_would_be_rated_by_itself(data: st.DataObject) -> None:
    fleet, arrival_mix = Fleet(), ArrivalMix()
    arrival_mix.typical, arrival_mix.version = (Typical(SHAPES[0], 0.7), Typical(SHAPES[1], 0.3)), 1
    for number in range(40):
        put(fleet, number, number % 5)
    seen = NodeScoreCache(fleet, arrival_mix, NodeFilters(fleet))
    placed: list[Resident] = []
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.sampled_from([3, 40]))):
            happen(data, fleet, placed)
        shape = data.draw(st.sampled_from(SHAPES))
        score = seen.of(shape).score
        for row in range(fleet.size):
            fits = fleet.now.fits_at(fleet.need(shape), fleet.allocatable, row)
            alone = float(rate(fleet, fleet.now, shape, np.array([row]), arrival_mix)[0]) if fits else NO
            assert score[row] == alone
