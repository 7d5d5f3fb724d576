"""What could never run on the machines there are, however empty."""

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.nodes.node import WHOLE, Fit, NodeCapacity, device_list, fit, give
from bursar.core.quota.satisfiable import Ceiling, Demand, ceiling_of, copies, refusal
from bursar.core.values.quantity import amount
from bursar.core.values.refusal import Code, Refusal

GPU = "nvidia.com/gpu"


def amounts(**written: str) -> dict[str, int]:
    named = {name.replace("gpu", GPU): text for name, text in written.items()}
    return {name: amount(name, text) for name, text in named.items()}


SMALL = amounts(cpu="96", memory="1152Gi", gpu="8", pods="110")


def refused(demand: Demand, ceiling: Ceiling) -> Refusal:
    found = refusal(demand, ceiling)
    assert found is not None
    assert found.code is Code.UNSATISFIABLE
    assert found.hint
    assert found.causes
    return found


def test_equal_nodes_are_counted_not_listed() -> None:
    ceiling = ceiling_of([dict(SMALL) for _ in range(5000)] + [amounts(cpu="4")])
    assert len(ceiling.kinds) == 2
    assert ceiling.nodes == 5001
    assert ceiling == ceiling_of([amounts(cpu="4")] + [dict(reversed(SMALL.items())) for _ in range(5000)])


def test_without_nodes_everything_is_accepted() -> None:
    assert refusal(Demand(amounts(gpu="1000"), nodes=1000, members=1000), Ceiling()) is None


def test_more_than_the_largest_node_has_is_named_with_its_numbers() -> None:
    ceiling = ceiling_of([SMALL, amounts(gpu="4", cpu="8", memory="1Gi")])
    found = refused(Demand(amounts(gpu="16", cpu="1")), ceiling)
    assert found.message == "nvidia.com/gpu 16 requested, the largest node has 8"
    (cause,) = found.causes
    assert (cause.dimension, cause.requested_delta, cause.limit, cause.scope) == (GPU, "16", "8", "node")
    assert cause.field == "spec.resources.requests[nvidia.com/gpu]"
    assert "at most nvidia.com/gpu 8" in found.hint
    assert refusal(Demand(amounts(gpu="8", cpu="96", memory="1152Gi")), ceiling) is None


def test_every_resource_that_is_too_much_is_a_cause() -> None:
    found = refused(Demand(amounts(gpu="9", cpu="97", memory="2Ti", tpu="1")), ceiling_of([SMALL]))
    assert [cause.dimension for cause in found.causes] == ["cpu", "memory", GPU, "tpu"]
    assert "tpu 1 requested, the largest node has 0" in found.message
    assert "memory 2Ti requested, the largest node has 1152Gi" in found.message


def test_for_a_resource_that_no_node_offers_those_that_there_are_are_told() -> None:
    found = refused(Demand(amounts(tpu="1")), ceiling_of([{**SMALL, "pods": 110_000}]))
    assert found.message == "tpu 1 requested, the largest node has 0"
    assert found.hint == "No node offers tpu; nodes offer cpu, memory, nvidia.com/gpu."
    both = refused(Demand(amounts(gpu="16", tpu="1")), ceiling_of([SMALL]))
    assert both.hint.startswith(
        "No node offers tpu; nodes offer cpu, memory, nvidia.com/gpu. Request at most nvidia.com/gpu 8"
    )


def test_all_of_it_must_be_on_one_node() -> None:
    ceiling = ceiling_of([amounts(cpu="64", gpu="2"), amounts(cpu="8", gpu="8")])
    found = refused(Demand(amounts(cpu="64", gpu="8")), ceiling)
    assert found.message.startswith("cpu 64 requested, no single node has all that is requested: the nearest one has 8")
    assert refusal(Demand(amounts(cpu="64", gpu="2")), ceiling) is None


@pytest.mark.parametrize(("share", "fits"), [("500m", True), ("1", True), ("999m", True), ("2", False)])
def test_a_share_of_a_device_needs_one_device(share: str, fits: bool) -> None:
    assert (refusal(Demand(amounts(gpu=share)), ceiling_of([amounts(gpu="1")])) is None) is fits


def test_nodes_are_counted_by_what_each_could_hold() -> None:
    ceiling = ceiling_of([SMALL] * 4 + [amounts(cpu="8")] * 10)
    assert refusal(Demand(amounts(gpu="8"), nodes=4), ceiling) is None
    found = refused(Demand(amounts(gpu="8"), nodes=5), ceiling)
    assert found.message == "5 nodes requested, the cluster has 4 large enough for nvidia.com/gpu 8"
    assert (found.causes[0].field, found.causes[0].limit) == ("spec.nodes", "4")
    assert refusal(Demand({}, nodes=14, exclusive=True), ceiling) is None
    assert refused(Demand({}, nodes=15, exclusive=True), ceiling).message == (
        "15 nodes requested, the cluster has 14 registered"
    )


def test_one_of_what_fits_is_written_in_the_singular() -> None:
    one = ceiling_of([amounts(gpu="4")])
    assert "at most 1 node," in refused(Demand(amounts(gpu="4"), nodes=2), one).hint
    assert "at most 1 member," in refused(Demand(amounts(gpu="4"), members=2), one).hint


def test_a_gang_must_fit_the_empty_cluster() -> None:
    four = Demand(amounts(gpu="4"), members=4)
    assert refused(four, ceiling_of([SMALL])).message == (
        "a gang of 4 requested, each with nvidia.com/gpu 4; the cluster holds 2 when it is empty"
    )
    assert refusal(four, ceiling_of([SMALL] * 2)) is None
    whole = Demand({}, exclusive=True, members=3)
    assert refusal(whole, ceiling_of([SMALL] * 3)) is None
    assert "on a node of its own" in refused(whole, ceiling_of([SMALL] * 2)).message
    assert "at most 2 members" in refused(whole, ceiling_of([SMALL] * 2)).hint


def test_pods_count_where_a_node_says_how_many_it_takes() -> None:
    assert refusal(Demand({}, members=5000), ceiling_of([amounts(cpu="1")])) is None
    assert refused(Demand({}, members=111), ceiling_of([SMALL])).causes[0].limit == "110"
    none = refused(Demand({}), ceiling_of([amounts(cpu="1", pods="0")]))
    assert none.message == "pods 1 requested, the largest node has 0"


def test_members_of_several_nodes_take_each_node_once() -> None:
    ceiling = ceiling_of([amounts(gpu="8"), amounts(gpu="1")])
    assert refusal(Demand(amounts(gpu="1"), nodes=2), ceiling) is None
    found = refused(Demand(amounts(gpu="1"), nodes=2, members=5), ceiling)
    assert "the cluster holds 1 when it is empty" in found.message
    assert "on each of 2 nodes" in found.message


_capacities = st.fixed_dictionaries(
    {"cpu": st.integers(0, 6000)},
    optional={GPU: st.integers(0, 4).map(WHOLE.__mul__), "pods": st.integers(0, 5).map(WHOLE.__mul__)},
)
_requests = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.integers(1, 4000),
        GPU: st.one_of(st.integers(1, 999), st.integers(1, 3).map(WHOLE.__mul__)),
    },
)


@given(_capacities, _requests, st.booleans())
def test_copies_are_what_an_empty_node_takes_one_after_another(
    offered: Mapping[str, int], requests: Mapping[str, int], exclusive: bool
) -> None:
    capacity = NodeCapacity("n", 1, True, offered, {}, device_list(offered, {}))
    taken = 0
    while taken < 50 and isinstance(found := fit(capacity, requests, exclusive=exclusive), Fit):
        capacity = give(capacity, found, requests)
        taken += 1
    assert min(copies(offered, Demand(requests, exclusive=exclusive)), 50) == taken


def _can_seat(each: tuple[int, ...], members: int, nodes: int) -> bool:
    """Try everything: each member in turn takes some set of so many nodes with a place left."""
    if not members:
        return True
    for chosen in product((False, True), repeat=len(each)):
        if sum(chosen) == nodes and all(left for left, taken in zip(each, chosen, strict=True) if taken):
            rest = tuple(left - taken for left, taken in zip(each, chosen, strict=True))
            if _can_seat(rest, members - 1, nodes):
                return True
    return False


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_a_gang_over_several_nodes_is_refused_exactly_when_no_seating_exists(
    each: list[int], members: int, nodes: int
) -> None:
    ceiling = ceiling_of([{GPU: places * WHOLE} for places in each])
    demand = Demand({GPU: WHOLE}, nodes, members=members)
    assert (refusal(demand, ceiling) is None) is _can_seat(tuple(each), members, nodes)
