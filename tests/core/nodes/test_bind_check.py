"""Placing an allocation: capacity on all its nodes, and its charge."""

from datetime import UTC, datetime

import pytest
from msgspec import structs

from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.nodes.bind_check import BindCheck, Target, bound_charge, place, unplace
from bursar.core.nodes.node import EXCLUSIVE, WHOLE, NodeCapacity, Placement, device_list
from bursar.core.objects.allocation import ResourceRequest
from bursar.core.objects.charge import Charge, Facts
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.quota import Counters
from bursar.core.quota.tenant_tree import Tree
from bursar.core.values.refusal import Code, Refusal

GPU = "nvidia.com/gpu"
ONE_GPU = ResourceRequest({GPU: WHOLE})
CHARGE = Charge(Facts(scoped=True), {GPU: WHOLE, "allocations": WHOLE})


def capacity(name: str, gpus: int = 4, *, generation: int = 1, schedulable: bool = True) -> NodeCapacity:
    amounts = {GPU: gpus * WHOLE}
    return NodeCapacity(name, generation, schedulable, amounts, {}, device_list(amounts, {}))


def capacities(*those: NodeCapacity) -> dict[str, NodeCapacity]:
    return {one.name: one for one in those}


def placed(answer: BindCheck | Refusal) -> BindCheck:
    assert isinstance(answer, BindCheck), answer
    return answer


def test_shared_work_is_charged_its_part_of_the_node() -> None:
    placing = placed(place(capacities(capacity("a")), ONE_GPU, [Target("a")], CHARGE))
    assert placing.charge.bound == {GPU: WHOLE, "allocations": WHOLE, "nodes": 250}
    assert placing.charge.accepted == {GPU: WHOLE, "allocations": WHOLE, "nodes": 250}
    assert placing.capacities[0].devices == {GPU: (WHOLE, 0, 0, 0)}


def test_each_node_of_several_gives_the_same_and_the_parts_add_up() -> None:
    request = ResourceRequest({GPU: WHOLE}, nodes=2)
    placing = placed(place(capacities(capacity("a", 4), capacity("b", 2)), request, [Target("a"), Target("b")], CHARGE))
    assert placing.charge.bound["nodes"] == 250 + 500
    assert [one.name for one in placing.capacities] == ["a", "b"]


def test_exclusive_work_is_charged_whole_nodes() -> None:
    request = ResourceRequest({GPU: WHOLE}, nodes=2, exclusive=True)
    charge = Charge(Facts(scoped=True), {GPU: 2 * WHOLE, "nodes": 2 * WHOLE})
    placing = placed(place(capacities(capacity("a"), capacity("b")), request, [Target("b"), Target("a")], charge))
    assert placing.charge.bound == {GPU: 2 * WHOLE, "nodes": 2 * WHOLE}
    assert all(one.allocated[EXCLUSIVE] == WHOLE for one in placing.capacities)


def test_what_was_accepted_is_never_lowered_by_placing() -> None:
    """Work that is placed again on a larger node keeps what it was accepted for."""
    charge = Charge(Facts(scoped=True), {GPU: WHOLE, "nodes": 500})
    assert bound_charge(charge, 250) == Charge(
        Facts(scoped=True), {GPU: WHOLE, "nodes": 500}, {GPU: WHOLE, "nodes": 250}
    )


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([], "the plan names 0 nodes, the allocation asks for 1"),
        ([Target("a"), Target("b")], "the plan names 2 nodes, the allocation asks for 1"),
        ([Target("gone")], "node gone is gone"),
        ([Target("a", generation=1)], "node a has changed since the plan was made"),
        ([Target("closed")], "node closed takes no new work"),
    ],
)
def test_a_plan_that_the_cluster_state_has_overtaken_is_stale(targets: list[Target], message: str) -> None:
    there = capacities(capacity("a", generation=2), capacity("b"), capacity("closed", schedulable=False))
    assert place(there, ONE_GPU, targets, CHARGE) == Refusal(Code.STALE, message)


def test_two_nodes_means_two_different_nodes() -> None:
    refusal = place(
        capacities(capacity("a")), ResourceRequest({GPU: WHOLE}, nodes=2), [Target("a"), Target("a")], CHARGE
    )
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.STALE


def test_a_node_without_capacity_is_told_with_its_numbers() -> None:
    refusal = place(
        capacities(capacity("a", 4), capacity("b", 1)),
        ResourceRequest({GPU: 2 * WHOLE}, 2),
        [Target("a"), Target("b")],
        CHARGE,
    )
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.message) == (Code.NO_CAPACITY, "node b has 1 nvidia.com/gpu free, 2 needed")
    (cause,) = refusal.causes
    assert (cause.reason, cause.scope, cause.limit, cause.requested_delta) == (
        "no_capacity_nvidia.com/gpu", "b", "1", "2",
    )  # fmt: skip


def test_the_devices_that_a_plan_names_are_given_or_the_plan_fails() -> None:
    wanted = [Target("a", devices={GPU: (3,)})]
    placing = placed(place(capacities(capacity("a")), ONE_GPU, wanted, CHARGE))
    assert placing.fits[0].devices == {GPU: (3,)}
    assert isinstance(place(capacities(*placing.capacities), ONE_GPU, wanted, CHARGE), Refusal)


def test_unplacing_returns_all_nodes_and_skips_those_that_are_gone() -> None:
    request = ResourceRequest({GPU: 500}, nodes=2)
    there = capacities(capacity("a"), capacity("b"))
    placing = placed(place(there, request, [Target("a"), Target("b")], CHARGE))
    placements = [
        Placement(node, "u", "n", "one", "t", 1, False, taken.resources, taken.devices)
        for node, taken in zip("ab", placing.fits, strict=True)
    ]
    after = capacities(*placing.capacities)
    there = {name: structs.replace(one, dirty=True) for name, one in there.items()}
    assert capacities(*unplace(after, request, placements)) == there
    del after["b"]
    assert unplace(after, request, placements) == [there["a"]]


# The sheet on which a batch is decided.


def batch() -> UnitOfWork:
    return UnitOfWork(datetime(2031, 1, 1, tzinfo=UTC), Tree(), Counters(Tree(), {}), str)


def placement(node: str) -> Placement:
    return Placement(node, "u1", "n", "one", "t", 1, False, {GPU: WHOLE}, {GPU: (0,)})


def test_what_is_placed_again_in_one_batch_leaves_its_old_place() -> None:
    page = batch()
    page.placements["u1"] = (placement("a"),)
    assert page.lift("u1") == (placement("a"),)
    page.place([placement("b")])
    assert page.lifted == {("a", "u1")}  # the row on node a must go, before the one on node b comes
    assert page.placed == {("b", "u1"): placement("b")}


def test_what_is_placed_and_gone_in_one_batch_is_nowhere() -> None:
    page = batch()
    page.place([placement("a")])
    assert page.lift("u1") == (placement("a"),)
    assert page.placed == {}
    assert page.lift("u1") == ()


def test_recharging_what_was_written_in_the_batch_goes_with_its_write() -> None:
    page = batch()
    key = Key("Allocation", "n", "one")
    write = page.put(Stored(key, "u1", "t", {}, {}, b"{}", b"{}"), Origin("user", "create"))
    page.recharge(Stored(key, "u1", "t", {}, {}, b"{}", b"{}", CHARGE))
    assert write.after is not None
    assert write.after.charge == CHARGE
    assert page.recharged == {}
