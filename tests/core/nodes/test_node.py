"""A node's free capacity: nothing is allocated twice, and exactly what was allocated is released."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from bursar.core.nodes.node import (
    EXCLUSIVE,
    WHOLE,
    Fit,
    NodeCapacity,
    NodeGate,
    Shortage,
    choose_devices,
    device_list,
    dominant_fraction,
    fit,
    give,
    take_back,
)

GPU = "nvidia.com/gpu"


def unsoiled(node: NodeCapacity) -> NodeCapacity:
    """A node without what work may have left behind: that is not given back."""
    return structs.replace(node, dirty=False)


def capacity(**allocatable: int) -> NodeCapacity:
    amounts = {name.replace("gpu", GPU): value for name, value in allocatable.items()}
    return NodeCapacity("n1", 1, True, amounts, {}, device_list(amounts, {}))


@pytest.mark.parametrize(
    ("used", "amount", "wanted", "given_devices"),
    [
        ([0, 0, 0], 2000, None, (0, 1)),
        ([1000, 0, 0], 2000, None, (1, 2)),
        ([1, 0, 0], 2000, None, (1, 2)),
        ([1000, 0, 1], 2000, None, None),
        ([0, 500, 300], 400, None, (1,)),  # the fullest node with free capacity
        ([0, 700, 300], 400, None, (2,)),
        ([0, 300, 300], 400, None, (1,)),  # the leftmost of equals
        ([1000, 700], 400, None, None),
        ([0, 0, 0], 2000, (2, 0), (0, 2)),
        ([0, 0, 1000], 2000, (2, 0), None),
        ([0, 0, 0], 2000, (1, 1), None),  # the same device twice
        ([0, 0, 0], 2000, (1,), None),
        ([0, 0, 0], 2000, (0, 7), None),
        ([0, 600], 400, (1,), (1,)),
        ([0, 700], 400, (1,), None),
        ([0, 0], 400, (0, 1), None),
    ],
)
def test_which_devices_are_given(
    used: list[int], amount: int, wanted: tuple[int, ...] | None, given_devices: tuple[int, ...] | None
) -> None:
    assert choose_devices(used, amount, wanted) == given_devices


def test_the_first_resource_that_is_short_is_told_with_its_numbers() -> None:
    node = capacity(cpu=4000, gpu=2000)
    assert fit(node, {"cpu": 5000}, exclusive=False) == Shortage("cpu", 5000, 4000)
    assert fit(node, {GPU: 3000}, exclusive=False) == Shortage(GPU, 3000, 2000)
    assert fit(node, {"tpu": 1}, exclusive=False) == Shortage("tpu", 1, 0)


def test_free_fractions_on_several_devices_are_no_whole_device() -> None:
    node = capacity(gpu=2000)
    for device in (0, 1):
        half = fit(node, {GPU: 600}, exclusive=False, wanted={GPU: (device,)})
        assert isinstance(half, Fit)
        node = give(node, half, {GPU: 600})
    assert fit(node, {GPU: 700}, exclusive=False) == Shortage(GPU, 700, 800)
    assert fit(node, {GPU: 1000}, exclusive=False) == Shortage(GPU, 1000, 800)


def test_pods_are_counted_where_the_node_counts_them() -> None:
    node = capacity(cpu=4000, pods=1000)
    first = fit(node, {"cpu": 1}, exclusive=False)
    assert first == Fit({"cpu": 1, "pods": WHOLE}, {})
    assert fit(give(node, first, {"cpu": 1}), {"cpu": 1}, exclusive=False) == Shortage("pods", WHOLE, 0)


def test_a_whole_node_is_given_only_when_empty_and_then_to_nobody_else() -> None:
    node = capacity(cpu=4000, gpu=2000)
    whole = fit(node, {GPU: 1000}, exclusive=True)
    assert whole == Fit({"cpu": 4000, GPU: 2000, EXCLUSIVE: WHOLE}, {GPU: (0, 1)})
    held = give(node, whole, {GPU: 1000})
    for exclusive in (False, True):
        assert fit(held, {"cpu": 0}, exclusive=exclusive) == Shortage(EXCLUSIVE, WHOLE, 0)
    assert unsoiled(take_back(held, whole.resources, whole.devices, {GPU: 1000})) == node
    part = fit(node, {"cpu": 1}, exclusive=False)
    assert isinstance(part, Fit)
    assert fit(give(node, part, {"cpu": 1}), {}, exclusive=True) == Shortage(EXCLUSIVE, WHOLE, 0)
    assert fit(node, {"cpu": 5000}, exclusive=True) == Shortage("cpu", 5000, 4000)


@pytest.mark.parametrize(
    ("gate", "dirty"),
    [
        pytest.param(None, True, id="an agent that isolates nothing, or none at all"),
        pytest.param(NodeGate(isolated=True), True, id="a sandbox that shares directories"),
        pytest.param(NodeGate(isolated=True, traceless=True), False, id="a sandbox that leaves nothing"),
    ],
)
def test_work_soils_a_node_unless_all_it_writes_goes_with_it(gate: NodeGate | None, dirty: bool) -> None:
    node = structs.replace(capacity(cpu=4000), gate=gate)
    taken = fit(node, {"cpu": 1}, exclusive=False)
    assert isinstance(taken, Fit)
    busy = give(node, taken, {"cpu": 1})
    assert (busy.dirty, take_back(busy, taken.resources, taken.devices, {"cpu": 1}).dirty) == (dirty, dirty)
    assert give(structs.replace(node, dirty=True), taken, {"cpu": 1}).dirty


def test_a_node_that_lost_a_gpu_keeps_what_it_gave_and_gives_no_more() -> None:
    node = capacity(gpu=2000)
    both = fit(node, {GPU: 2000}, exclusive=False)
    assert isinstance(both, Fit)
    full = give(node, both, {GPU: 2000})
    less = {GPU: 1000}
    lost = NodeCapacity("n1", 2, True, less, full.allocated, device_list(less, full.devices))
    assert lost.devices == {GPU: (1000, 1000)}
    assert fit(lost, {GPU: 1000}, exclusive=False) == Shortage(GPU, 1000, 0)
    empty = take_back(lost, both.resources, both.devices, {GPU: 2000})
    assert empty.allocated == {}
    assert fit(empty, {GPU: 1000}, exclusive=False) == Fit({GPU: 1000, "pods": WHOLE}, {GPU: (0,)})
    assert fit(empty, {GPU: 2000}, exclusive=False) == Shortage(GPU, 2000, 1000)


@pytest.mark.parametrize(
    ("allocatable", "before", "after"),
    [
        ({GPU: 2000}, {}, {GPU: (0, 0)}),
        ({GPU: 3000}, {GPU: (500,)}, {GPU: (500, 0, 0)}),
        ({GPU: 1000}, {GPU: (0, 0, 0)}, {GPU: (0,)}),
        ({GPU: 1000}, {GPU: (0, 0, 7)}, {GPU: (0, 0, 7)}),
        ({}, {GPU: (0, 1000)}, {GPU: (0, 1000)}),  # gone, but something still runs on it
        ({}, {GPU: (0, 0)}, {}),
        ({"cpu": 4000, "memory": 1 << 30}, {}, {}),
    ],
)
def test_the_list_of_devices_follows_the_node(
    allocatable: dict[str, int], before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]
) -> None:
    assert device_list(allocatable, before) == after


@pytest.mark.parametrize(
    ("requests", "thousandths"),
    [
        ({"cpu": 2000}, 500),
        ({"cpu": 1000, GPU: 2000}, 1000),
        ({"cpu": 1}, 1),  # rounded up: nothing that runs counts as nothing
        ({"cpu": 1333}, 334),
        ({"tpu": 5}, 1),
        ({}, 1),
        ({"cpu": 9000}, 1000),
    ],
)
def test_the_dominant_fraction_of_a_node(requests: dict[str, int], thousandths: int) -> None:
    assert dominant_fraction(capacity(cpu=4000, gpu=2000), requests) == thousandths


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.integers(0, 3000),
        GPU: st.one_of(st.integers(0, 3).map(lambda count: count * WHOLE), st.integers(1, 999)),
        "amd.com/gpu": st.integers(0, 2).map(lambda count: count * WHOLE),
    },
)
STEPS = st.lists(st.tuples(st.booleans(), REQUESTS, st.booleans(), st.integers(0, 7)), max_size=30)


@given(st.integers(0, 4), STEPS)
@settings(max_examples=200)
def test_devices_are_never_given_twice_and_what_comes_back_is_exact(
    gpus: int, steps: list[tuple[bool, dict[str, int], bool, int]]
) -> None:
    """Whatever is given and taken back: every device carries what runs on it, never more than a whole."""
    amounts = {"cpu": 8000, GPU: gpus * WHOLE, "amd.com/gpu": 2 * WHOLE, "pods": 8 * WHOLE}
    empty = NodeCapacity("n1", 1, True, amounts, {}, device_list(amounts, {}))
    node, running = empty, list[tuple[Fit, dict[str, int]]]()
    for come, requests, exclusive, which in steps:
        if come:
            taken = fit(node, requests, exclusive=exclusive)
            if isinstance(taken, Fit):
                after = give(node, taken, requests)
                assert unsoiled(take_back(after, taken.resources, taken.devices, requests)) == unsoiled(node)
                node = after
                running.append((taken, requests))
        elif running:
            gone, asked = running.pop(which % len(running))
            node = take_back(node, gone.resources, gone.devices, asked)
        _check(node, running)
    for taken, requests in running:
        node = take_back(node, taken.resources, taken.devices, requests)
    assert unsoiled(node) == empty


def _check(node: NodeCapacity, running: list[tuple[Fit, dict[str, int]]]) -> None:
    for resource, amount in node.allocatable.items():
        assert node.allocated.get(resource, 0) == sum(taken.resources.get(resource, 0) for taken, _ in running)
        assert node.allocated.get(resource, 0) <= amount
    for resource, used in node.devices.items():
        carried = [0] * len(used)
        for taken, requests in running:
            shared = 0 < requests.get(resource, 0) < WHOLE and EXCLUSIVE not in taken.resources
            for index in taken.devices.get(resource, ()):
                carried[index] += requests[resource] if shared else WHOLE
        assert tuple(carried) == used
        assert max(used, default=0) <= WHOLE
