"""What is alike is taken to a node several at a time, and all is as if each had been taken by itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.cycle.placer import Choice, Placer
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.fleet import NodeColumns
from bursar.core.scheduling.state.node_reservation import NodeReservations
from bursar.core.scheduling.state.placed_columns import Spot
from support.scheduling.cluster_states import (
    NOW,
    ZONE,
    ask,
    cluster_of,
    cycle,
    machine,
    members,
    place,
    put,
    run,
    spread,
    submit,
)


def columns(now: NodeColumns) -> list[object]:
    arrays: list[np.ndarray[Any, Any]] = [now.free, now.whole, now.widest, now.placed, *now.devices]
    return [one.tolist() for one in arrays]


def placer(cluster: ClusterState) -> Placer:
    return Placer(cluster, NodeReservations(cluster.fleet, cluster.placed, cluster.running), NOW)


def one_by_one(cluster: ClusterState, asks: Sequence[Ask]) -> Choice | None:
    """The best node for each, as it is when those before it are there."""
    found = placer(cluster)
    taken: Choice = []
    for slot in found.slots(asks):
        row = found.free_row(slot, ())
        if row is None:
            return None
        spot = found.at(slot, row)
        found.take(slot, spot)
        taken.append((slot.ask, (spot,)))
    return taken


@given(st.data())
def test_a_gang_goes_where_its_members_would_go_one_by_one(data: st.DataObject) -> None:
    gpus = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))
    cluster_states = [
        cluster_of(*(machine(f"n{row}", gpus=count, cpu=16) for row, count in enumerate(gpus))) for _ in "ab"
    ]
    for number in range(data.draw(st.integers(0, 4))):
        resident = ask(f"old{number}", gpus=data.draw(st.sampled_from([0.5, 1, 2])), cpu=1)
        for cluster in cluster_states:
            place(cluster, resident)
    size, each, cpu = (data.draw(st.integers(*span)) for span in ((2, 10), (0, 3), (1, 4)))
    gang = members("g", size, gpus=each, cpu=cpu)
    for cluster in cluster_states:
        submit(cluster, *gang)
    together = placer(cluster_states[0])
    before = columns(cluster_states[0].fleet.now)
    assert together.choose(gang) == one_by_one(cluster_states[1], gang)
    assert columns(cluster_states[0].fleet.now) == before


def test_what_is_taken_at_once_is_given_back_at_once() -> None:
    cluster = cluster_of(machine("a", gpus=4, cpu=8, pods=10))
    run(cluster, ask("resident", gpus=0.5, cpu=1), "a")
    now, need = cluster.fleet.now, cluster.fleet.need(ask("x", gpus=1, cpu=2).shape)
    before = columns(now)
    now.take_many(0, need, [(0, (1, 3))], 2)
    assert now.devices[0][0].tolist()[:4] == [500, 0, 1000, 0]
    assert now.free[cluster.fleet.column_of["cpu"], 0] == 3000
    now.give_back_many(0, need, [(0, (1, 3))], 2)
    assert columns(now) == before


def test_a_gang_that_is_entered_at_once_is_entered_as_one_by_one() -> None:
    cluster_states = [cluster_of(machine("a", gpus=8, cpu=16, pods=20)) for _ in "ab"]
    gang = members("g", 3, gpus=2, cpu=1, ttl=60)
    spots = [(Spot(0, ((0, (2 * number, 2 * number + 1)),)),) for number in range(3)]
    for cluster in cluster_states:
        submit(cluster, *gang)
    cluster_states[0].assume_many(gang, spots, NOW)
    for one, at in zip(gang, spots, strict=True):
        cluster_states[1].assume(one, at, NOW)
    for name in ("placed", "waiting", "groups", "gangs", "used", "nominated"):
        assert getattr(cluster_states[0], name) == getattr(cluster_states[1], name), name
    assert columns(cluster_states[0].fleet.now) == columns(cluster_states[1].fleet.now)
    assert cluster_states[0].running.on_row == cluster_states[1].running.on_row
    for name in ("row", "ends_at", "since"):
        lines = [getattr(cluster.running.lines, name) for cluster in cluster_states]
        assert np.array_equal(*lines), name
    assert cluster_states[0].has_begun(("n", "g"))


def test_a_gang_fills_the_best_node_before_the_next() -> None:
    cluster = cluster_of(machine("a", gpus=8, cpu=64), machine("b", gpus=4, cpu=64))
    submit(cluster, *members("g", 6, gpus=1, cpu=1))
    binding = cycle(cluster).bindings[0]
    where = [(cluster.fleet.names[spots[0].row], spots[0].devices[0][1]) for _, spots in binding.members]
    assert where == [*(("b", (device,)) for device in range(4)), ("a", (0,)), ("a", (1,))]


def test_a_node_that_moves_to_another_zone_is_found_there_by_the_next_decision() -> None:
    """What a spread says of the zones is kept for when it says it again, but not beyond a change of what they hold."""
    cluster = cluster_of(
        machine("a", gpus=4, zone="z1"), machine("b", gpus=1, zone="z2"), machine("c", gpus=1, zone="z1")
    )
    web: dict[str, Any] = {"labels": {"app": "web"}, "where": spread(ZONE, 1, app="web"), "gpus": 1}
    run(cluster, ask("one", **web), "a")
    assert place(cluster, ask("two", **web)) == {"two": ("b",)}  # only z2 will do
    put(cluster, machine("c", gpus=1, zone="z2"))
    run(cluster, ask("three", **web), "a")
    assert place(cluster, ask("four", **web)) == {"four": ("c",)}  # again only z2, and there is another node in it now
