"""Hours begin when work runs and end when it is confirmed gone, in the same transaction, whatever ends it."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Command
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin
from bursar.core.values.refusal import Refusal
from bursar.ops.lifecycle.create import create_command
from bursar.ops.nodes.fence import fence
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.registry import BY_NAME
from support.nodes.liveness import silence
from support.runtime.runtime import TEST, allocation, bind, code, create, delete, end, node
from support.scheduling.evictions import assert_books_balance, key, running, says, status, stop
from support.usage.hourly import assert_hours_agree, opened_now, records

GPU = "nvidia.com/gpu"


def when(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def test_shared_work_counts_what_it_has_and_its_part_of_the_node(runtime: Runtime) -> None:
    await create(
        runtime,
        "Node",
        {
            "metadata": {"name": "a", "labels": {"gpu-type": "h100"}},
            "spec": {"capacity": {GPU: "8", "cpu": "64", "memory": "512Gi", "pods": "110"}},
        },
    )
    await running(runtime, "one", "a", gpu=2, cpu=8, memory="64Gi")
    (open_,) = await opened_now(runtime)
    assert open_["amounts"] == {GPU: 2000, "cpu": 8000, "memory": 64 << 30, "nodes": 250}
    assert (open_["class"], open_["tenant"], open_["namespace"], open_["name"]) == ("h100", "default", "default", "one")
    assert open_["started_at"] == when((await status(runtime, "one"))["startTime"])
    assert code(await says(runtime, "a", "one", Phase.SUCCEEDED)) == "ok"
    (record,) = await records(runtime)
    assert record["ended_at"] == when((await status(runtime, "one"))["endTime"])
    assert (record["started_at"], record["phase"], record["amounts"]) == (
        open_["started_at"], "Succeeded", open_["amounts"],
    )  # fmt: skip
    assert await opened_now(runtime) == []
    await assert_books_balance(runtime)


async def test_exclusive_work_counts_whole_nodes_and_all_their_gpus(runtime: Runtime) -> None:
    for name in ("a", "b"):
        await node(runtime, name, gpu=8, cpu=64)
    await running(runtime, "wide", "a", "b", spec={"nodes": 2, "exclusive": True}, gpu=1)
    assert [(one["node"], one["amounts"]) for one in await opened_now(runtime)] == [
        ("a", {GPU: 8000, "cpu": 64000, "nodes": 1000}),
        ("b", {GPU: 8000, "cpu": 64000, "nodes": 1000}),
    ]
    await assert_hours_agree(runtime)


async def test_work_counts_for_who_submitted_it_and_work_of_nobody_for_nobody(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    document = {"metadata": {"name": "hers", "namespace": "default"}, "spec": {"resources": {"requests": {GPU: "1"}}}}
    one = msgspec.convert(document, BY_NAME["Allocation"].type)
    command = create_command(BY_NAME["Allocation"], one, Origin("user:default/ada", "create"))
    assert code(await object_ops.submit(runtime, command, tenant="default")) == "ok"
    await bind(runtime, "default", "hers", "a")
    await says(runtime, "a", "hers", Phase.RUNNING)
    assert [one["username"] for one in await opened_now(runtime)] == ["default/ada"]
    assert code(await object_ops.submit(runtime, _unsigned(document), tenant="default")) == "ok"
    await bind(runtime, "default", "nobodys", "a")
    await says(runtime, "a", "nobodys", Phase.RUNNING)
    assert [one["username"] for one in await opened_now(runtime)] == ["default/ada", "-"]


def _unsigned(document: dict[str, Any]) -> Command:
    metadata = {"name": "nobodys", "namespace": "default"}
    one = msgspec.convert({**document, "metadata": metadata}, BY_NAME["Allocation"].type)
    return create_command(BY_NAME["Allocation"], one, Origin("", "create"))


async def test_what_waits_or_is_only_bound_counts_nothing(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await allocation(runtime, "default", "one", gpu=1)
    await bind(runtime, "default", "one", "a")
    assert await opened_now(runtime) == []
    assert code(await end(runtime, "default", "one", Phase.FAILED)) == "ok"
    assert (await opened_now(runtime), await records(runtime)) == ([], [])


async def test_what_ended_before_it_was_heard_to_run_counts_as_its_node_measured(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await allocation(runtime, "default", "quick", gpu=1)
    await bind(runtime, "default", "quick", "a")
    await _bound_ago(runtime, "quick", timedelta(seconds=100))
    assert code(await says(runtime, "a", "quick", Phase.SUCCEEDED, measured=42_000_000)) == "ok"
    (record,) = await records(runtime)
    assert record["ended_at"] - record["started_at"] == timedelta(seconds=42)
    await assert_hours_agree(runtime)


async def test_nothing_counts_for_longer_than_it_was_bound(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await allocation(runtime, "default", "quick", gpu=1)
    await bind(runtime, "default", "quick", "a")
    assert code(await says(runtime, "a", "quick", Phase.SUCCEEDED, measured=3_600_000_000)) == "ok"
    (record,) = await records(runtime)
    assert record["ended_at"] - record["started_at"] < timedelta(seconds=10)


async def _bound_ago(runtime: Runtime, name: str, ago: timedelta) -> None:
    found = await status(runtime, name)
    at = when(found["scheduledTime"]) - ago
    found["scheduledTime"] = at.isoformat()
    async with runtime.database.reader() as db:
        await db.execute("UPDATE object SET status = $2 WHERE name = $1", name, msgspec.json.encode(found))


async def test_a_report_that_is_repeated_begins_and_ends_nothing_again(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await running(runtime, "one", "a")
    before = await opened_now(runtime)
    assert code(await says(runtime, "a", "one", Phase.RUNNING)) == "ok"
    assert await opened_now(runtime) == before
    for _ in range(2):
        await says(runtime, "a", "one", Phase.SUCCEEDED)
    assert len(await records(runtime)) == 1


async def test_what_is_evicted_counts_until_it_is_gone_and_anew_when_it_runs_again(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await running(runtime, "one", "a")
    assert code(await stop(runtime, "one")) == "ok"
    assert len(await opened_now(runtime)) == 1  # It still runs.
    assert code(await says(runtime, "a", "one", Phase.FAILED)) == "ok"
    assert await opened_now(runtime) == []
    assert code(await bind(runtime, "default", "one", "a")) == "ok"
    assert code(await says(runtime, "a", "one", Phase.RUNNING)) == "ok"
    assert [one["epoch"] for one in await opened_now(runtime)] == [2]
    assert [(one["epoch"], one["reason"]) for one in await records(runtime)] == [(1, "Preempted")]
    await assert_books_balance(runtime)


async def test_of_work_on_several_nodes_each_part_counts_until_it_is_gone(runtime: Runtime) -> None:
    for name in ("a", "b"):
        await node(runtime, name, gpu=8)
    await running(runtime, "wide", "a", "b", spec={"nodes": 2}, gpu=4)
    assert code(await says(runtime, "a", "wide", Phase.SUCCEEDED)) == "ok"
    assert [one["node"] for one in await opened_now(runtime)] == ["b"]
    assert [one["node"] for one in await records(runtime)] == ["a"]
    assert code(await says(runtime, "b", "wide", Phase.FAILED)) == "ok"
    assert [(one["node"], one["phase"]) for one in await records(runtime)] == [("a", "Succeeded"), ("b", "Failed")]
    await assert_hours_agree(runtime)


async def test_a_record_outlives_its_object(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await running(runtime, "one", "a")
    assert code(await delete(runtime, "Allocation", "default", "one")) == "ok"
    assert len(await opened_now(runtime)) == 1  # It was asked to stop, and has not said that it did.
    assert code(await says(runtime, "a", "one", Phase.CANCELLED)) == "ok"
    assert isinstance(await object_ops.get(runtime, key("one")), Refusal)
    assert [one["phase"] for one in await records(runtime)] == ["Cancelled"]
    await assert_hours_agree(runtime)


async def test_the_work_of_a_fenced_node_counts_no_longer(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await running(runtime, "one", "a")
    await silence(runtime, "a", seconds=600)
    assert code(await fence(runtime, "a", TEST, "burnt")) == "ok"
    assert await opened_now(runtime) == []
    assert [one["reason"] for one in await records(runtime)] == ["NodeLost"]
    await assert_hours_agree(runtime)


async def test_on_a_claimed_node_the_claim_counts_and_not_the_work(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await allocation(runtime, "default", "one", gpu=1)
    await bind(runtime, "default", "one", "a")
    claim = {"id": "claim-1", "tenant": "default", "user": "ada", "since": "", "by": "ada"}
    async with runtime.database.reader() as db:
        await db.execute("UPDATE node SET claim = $1", msgspec.json.encode(claim))
    assert code(await says(runtime, "a", "one", Phase.RUNNING)) == "ok"
    assert await opened_now(runtime) == []
    await assert_hours_agree(runtime)


async def test_a_dry_run_counts_nothing(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=8)
    await allocation(runtime, "default", "one", gpu=1)
    await bind(runtime, "default", "one", "a")
    report = Report(key=Key("Allocation", "default", "one"), origin=TEST, phase=Phase.RUNNING, node="a")
    await runtime.trying.submit(report, "default")
    assert await opened_now(runtime) == []


@pytest.mark.parametrize("amounts", [{"gpu": 1}, {"cpu": "250m"}, {"gpu": "0.5", "memory": "1Gi"}])
async def test_what_began_is_what_ends(runtime: Runtime, amounts: dict[str, Any]) -> None:
    await node(runtime, "a", gpu=8, cpu=64, memory="64Gi")
    await running(runtime, "one", "a", **amounts)
    await assert_hours_agree(runtime)
    await end(runtime, "default", "one")
    await assert_hours_agree(runtime)
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT sum(delta) FROM usage_step") == 0
