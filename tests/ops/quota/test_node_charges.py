"""What nodes give on a real database: whole nodes and parts, and what comes back when work is put back or ends."""

import asyncio
from typing import Any

import msgspec

from bursar.commands.command import Written
from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.scheduling.bind import Bind
from bursar.commands.workloads.allocation import request_in
from bursar.commands.workloads.report import Report
from bursar.core.nodes.bind_check import Target
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.quota import Counter
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.store.nodes import node as node_store
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    GPU,
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    counters,
    delete,
    document,
    end,
    get,
    gpus,
    namespace,
    node,
    refusal,
    tenant,
)

# Nodes.


async def test_exclusive_work_counts_whole_nodes_at_submission(runtime: Runtime) -> None:
    await tenant(runtime, "physics", limits={"nodes": 3})
    await namespace(runtime, "physics", "physics")
    for name in ("n1", "n2"):
        await node(runtime, name, cpu=8, gpu=4)
    pair = {"exclusive": True, "nodes": 2}
    assert code(await allocation(runtime, "physics", "pair", spec=pair, gpu=1)) == "ok"
    refused = refusal(await allocation(runtime, "physics", "other", spec=pair, gpu=1))
    assert refused.message == (
        'allocation rejected: tenant "physics" would exceed max_nodes quota (current: 2, requested: 2, limit: 3)'
    )
    assert code(await bind(runtime, "physics", "pair", "n1")) == "stale"
    assert code(await bind(runtime, "physics", "pair", "n1", "n1")) == "stale"
    placed = document(await bind(runtime, "physics", "pair", "n1", "n2"))
    assert placed["status"]["nodes"] == [
        {"name": name, "devices": {GPU: [0, 1, 2, 3]}} for name in ("n1", "n2")
    ]  # fmt: skip
    row = (await counters(runtime))["tenant:physics", "nodes"]
    assert (row.accepted, row.bound) == (2000, 2000)
    await allocation(runtime, "default", "small", cpu=1)
    assert code(await bind(runtime, "default", "small", "n2")) == "no_capacity"
    await end(runtime, "physics", "pair")
    assert code(await bind(runtime, "default", "small", "n2")) == "ok"
    await allocation(runtime, "physics", "whole", spec={"exclusive": True})
    assert code(await bind(runtime, "physics", "whole", "n2")) == "no_capacity"
    await assert_counters_equal_charges(runtime)


async def test_shared_work_over_several_nodes_adds_up_its_parts(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={"nodes": 1})
    await namespace(runtime, "lab", "lab")
    for name, size in (("n1", 4), ("n2", 2), ("n3", 8)):
        await node(runtime, name, gpu=size)
    await allocation(runtime, "lab", "a", spec={"nodes": 2}, gpu=2)
    assert (await counters(runtime))["tenant:lab", GPU].accepted == 4000
    assert code(await bind(runtime, "lab", "a", "n1", "n2")) == "quota_exceeded"  # half of one, all of the other
    assert code(await bind(runtime, "lab", "a", "n1", "n3")) == "ok"
    row = (await counters(runtime))["tenant:lab", "nodes"]
    assert (row.accepted, row.bound) == (750, 750)
    await assert_counters_equal_charges(runtime)
    await end(runtime, "lab", "a")
    assert (await counters(runtime))["tenant:lab", "nodes"] == Counter(1000, None, 0, 0)


async def test_a_node_that_loses_a_gpu_stops_nothing_and_gives_no_more(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    for name in ("a", "b", "c"):
        await allocation(runtime, "default", name, gpu=1)
    await bind(runtime, "default", "a", "n1")
    await bind(runtime, "default", "b", "n1")

    def lose(before: Stored, text: dict[str, Any]) -> Any:
        text["spec"]["capacity"] = {GPU: "1"}
        text["status"]["allocatable"] = {GPU: "1"}
        one = msgspec.convert(text, BY_NAME["Node"].type)
        return change_command(BY_NAME["Node"], before, one, TEST, spec_changed=True)

    assert code(await object_ops.change(runtime, Key("Node", "", "n1"), lose, tenant="test")) == "ok"
    assert await capacity(runtime, "n1") == {GPU: (1000, 1000)}
    assert code(await bind(runtime, "default", "c", "n1")) == "no_capacity"
    assert (await get(runtime, "Allocation", "default", "b")).fields["status.phase"] == "Scheduled"
    await end(runtime, "default", "a")  # device 0 is free again, and is the one that is left
    assert await capacity(runtime, "n1") == {GPU: (0, 1000)}
    assert code(await bind(runtime, "default", "c", "n1")) == "no_capacity"  # still one of one given
    await end(runtime, "default", "b")
    assert code(await bind(runtime, "default", "c", "n1")) == "ok"
    assert await capacity(runtime, "n1") == {GPU: (1000, 0)}


async def capacity(runtime: Runtime, name: str) -> dict[str, tuple[int, ...]]:
    async with runtime.database.reader() as db:
        return dict((await node_store.load(db, [name]))[name].devices)


async def test_a_plan_for_a_node_that_has_changed_is_stale(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await allocation(runtime, "default", "a", gpu=1)
    stored = await get(runtime, "Allocation", "default", "a")
    command = Bind.one(key=stored.key, origin=TEST, targets=(Target("n1", 1),), request=request_in(stored.doc))
    await change(runtime, "Node", "", "n1", unschedulable=False)
    (answer,) = await placement_ops.bind(runtime, [command])
    assert (code(answer), refusal(answer).message) == ("stale", "node n1 has changed since the plan was made")
    again = Bind.one(key=stored.key, origin=TEST, targets=(Target("n1", 2),), request=request_in(stored.doc))
    (answer,) = await placement_ops.bind(runtime, [again])
    assert code(answer) == "ok"


async def test_a_node_in_use_is_not_deleted(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await allocation(runtime, "default", "a", gpu=1)
    await bind(runtime, "default", "a", "n1")
    assert code(await delete(runtime, "Node", "", "n1")) == "in_use"
    await end(runtime, "default", "a")
    assert code(await delete(runtime, "Node", "", "n1")) == "ok"
    await allocation(runtime, "default", "b", gpu=1)
    assert code(await bind(runtime, "default", "b", "n1")) == "stale"


# Requeued.


async def test_requeued_work_keeps_what_was_accepted_and_gives_back_what_was_bound(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={GPU: 2})
    await namespace(runtime, "lab", "lab")
    await node(runtime, "n1", gpu=4)
    await allocation(runtime, "lab", "a", gpu=2)
    await bind(runtime, "lab", "a", "n1")
    waiting = document(await end(runtime, "lab", "a", Phase.PENDING))
    assert waiting["status"]["phase"] == "Pending"
    assert "nodeName" not in waiting["status"]
    assert await gpus(runtime, "tenant:lab") == (2, 0)
    assert await capacity(runtime, "n1") == {GPU: (0, 0, 0, 0)}
    assert code(await allocation(runtime, "lab", "b", gpu=1)) == "quota_exceeded"  # its place is kept
    assert code(await bind(runtime, "lab", "a", "n1")) == "ok"
    assert await gpus(runtime, "tenant:lab") == (2, 2)
    await assert_counters_equal_charges(runtime)
    await end(runtime, "lab", "a")
    assert await gpus(runtime, "tenant:lab") == (0, 0)


async def test_work_requeued_and_placed_elsewhere_in_one_batch_is_in_one_place(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=2)
    await allocation(runtime, "default", "a", gpu=1)
    await bind(runtime, "default", "a", "n1")
    stored = await get(runtime, "Allocation", "default", "a")
    again = Bind.one(key=stored.key, origin=TEST, targets=(Target("n2"),), request=request_in(stored.doc))
    requeued, placed = await asyncio.gather(
        runtime.binding.submit(Report(key=stored.key, origin=TEST, phase=Phase.PENDING)),
        runtime.binding.submit(again),
    )
    assert (code(requeued), code(placed)) == ("ok", "ok")
    assert isinstance(requeued, Written)
    assert isinstance(placed, tuple)
    assert placed[0].revision == requeued.revision + 1  # one batch
    async with runtime.database.reader() as db:
        placements = await node_store.load_placements_on(db, ["n1", "n2"])
    assert [one.node for one in placements] == ["n2"]
    await assert_counters_equal_charges(runtime)
    assert code(await end(runtime, "default", "a")) == "ok"
    assert await capacity(runtime, "n2") == {GPU: (0, 0)}


async def test_work_placed_and_ended_in_one_batch_is_nowhere(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await allocation(runtime, "default", "a", gpu=1)
    stored = await get(runtime, "Allocation", "default", "a")
    bound, ended = await asyncio.gather(
        runtime.binding.submit(
            Bind.one(key=stored.key, origin=TEST, targets=(Target("n1"),), request=request_in(stored.doc))
        ),
        runtime.binding.submit(Report(key=stored.key, origin=TEST, phase=Phase.FAILED)),
    )
    assert (code(bound), code(ended)) == ("ok", "ok")
    async with runtime.database.reader() as db:
        assert await node_store.load_placements_on(db, ["n1"]) == []
    assert await capacity(runtime, "n1") == {GPU: (0, 0)}
    assert await gpus(runtime, "tenant:default") == (0, 0)
