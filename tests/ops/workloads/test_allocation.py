"""Allocations on a real database: accepted, bound, ended; counters and nodes follow exactly."""

from bursar.commands.command import Written
from bursar.core.objects.allocation import Phase
from bursar.core.values.quantity import format_amount
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import node as node_store
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    claim,
    code,
    counters,
    delete,
    document,
    end,
    namespace,
    node,
    quota,
    refusal,
    tenant,
)


async def test_an_accepted_allocation_is_charged_and_pending(runtime: Runtime) -> None:
    reply = await allocation(runtime, "default", "one", cpu=4, gpu=2)
    assert document(reply)["status"]["phase"] == "Pending"
    rows = await counters(runtime)
    assert rows["tenant:default", "nvidia.com/gpu"].accepted == 2000
    assert rows["tenant:default", "nvidia.com/gpu"].bound == 0
    assert rows["tenant:default", "allocations"].accepted == 1000
    await assert_counters_equal_charges(runtime)


async def test_the_limit_of_a_quota_is_exact(runtime: Runtime) -> None:
    await quota(runtime, "default", "small", hard={"nvidia.com/gpu": "3"})
    assert code(await allocation(runtime, "default", "one", gpu=2)) == "ok"
    refused = await allocation(runtime, "default", "two", gpu=2)
    assert code(refused) == "quota_exceeded"
    assert refusal(refused).message == "exceeded quota: nvidia.com/gpu limit 3, requested 2, used 2"
    assert code(await allocation(runtime, "default", "three", gpu=1)) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_bind_and_end_move_capacity_and_counters_there_and_back(runtime: Runtime) -> None:
    await node(runtime, "n1", cpu=8, memory="32Gi", gpu=4, pods=10)
    await allocation(runtime, "default", "one", cpu=4, memory="8Gi", gpu=2)
    placed = document(await bind(runtime, "default", "one", "n1"))
    assert placed["status"]["phase"] == "Scheduled"
    assert placed["status"]["nodes"] == [{"name": "n1", "devices": {"nvidia.com/gpu": [0, 1]}}]
    rows = await counters(runtime)
    assert rows["tenant:default", "nvidia.com/gpu"].bound == 2000
    assert format_amount("nodes", rows["tenant:default", "nodes"].bound) == "500m"
    await assert_counters_equal_charges(runtime)
    assert document(await end(runtime, "default", "one"))["status"]["phase"] == "Succeeded"
    rows = await counters(runtime)
    assert all(one.bound == one.accepted == 0 for one in rows.values())
    async with runtime.database.reader() as db:
        (capacity,) = (await node_store.load(db, ["n1"])).values()
    assert capacity.allocated == {}
    assert capacity.devices == {"nvidia.com/gpu": (0, 0, 0, 0)}


async def test_a_node_is_never_overfilled(runtime: Runtime) -> None:
    await node(runtime, "n1", cpu=8, gpu=4)
    for name in ("one", "two", "three"):
        await allocation(runtime, "default", name, gpu=2)
    assert code(await bind(runtime, "default", "one", "n1")) == "ok"
    assert code(await bind(runtime, "default", "two", "n1")) == "ok"
    refused = await bind(runtime, "default", "three", "n1")
    assert code(refused) == "no_capacity"
    assert refusal(refused).message == "node n1 has 0 nvidia.com/gpu free, 2 needed"


async def test_fractions_share_a_device_and_whole_ones_take_their_own(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    for name in ("half", "other-half"):
        await allocation(runtime, "default", name, gpu="500m")
        await bind(runtime, "default", name, "n1")
    await allocation(runtime, "default", "whole", gpu=1)
    assert document(await bind(runtime, "default", "whole", "n1"))["status"]["nodes"][0]["devices"] == {
        "nvidia.com/gpu": [1]
    }


async def test_deleting_what_runs_waits_for_its_end(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await allocation(runtime, "default", "one", gpu=2)
    await bind(runtime, "default", "one", "n1")
    stopping = document(await delete(runtime, "Allocation", "default", "one"))
    assert stopping["status"]["phase"] == "Terminating"
    assert stopping["metadata"]["deletionGracePeriodSeconds"] == 30
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].bound == 2000
    gone = await end(runtime, "default", "one", Phase.CANCELLED)
    assert isinstance(gone, Written)
    assert gone.deleted
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].bound == 0
    assert code(await end(runtime, "default", "one")) == "not_found"


async def test_a_repeated_request_has_one_effect_and_one_answer(runtime: Runtime) -> None:
    first = await allocation(runtime, "default", "one", gpu=1, claimed=claim("r1", "a"))
    again = await allocation(runtime, "default", "one", gpu=1, claimed=claim("r1", "a"))
    assert again == first
    assert code(await allocation(runtime, "default", "other", gpu=1, claimed=claim("r1", "b"))) == "request_id_reused"
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].accepted == 1000


async def test_a_gang_is_charged_as_a_set_once_it_is_complete(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={"nvidia.com/gpu": 4})
    await namespace(runtime, "lab", "lab")
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
    for name in ("a", "b"):
        assert code(await allocation(runtime, "lab", name, spec=gang, gpu=2)) == "ok"
    assert ("tenant:lab", "nvidia.com/gpu") in await counters(runtime)
    assert (await counters(runtime))["tenant:lab", "nvidia.com/gpu"].accepted == 0
    assert code(await allocation(runtime, "lab", "c", spec=gang, gpu=2)) == "quota_exceeded"
    assert (await counters(runtime))["tenant:lab", "nvidia.com/gpu"].accepted == 0
    assert code(await allocation(runtime, "lab", "c", spec=gang, gpu=0)) == "ok"
    assert (await counters(runtime))["tenant:lab", "nvidia.com/gpu"].accepted == 4000
    await assert_counters_equal_charges(runtime)
