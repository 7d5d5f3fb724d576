"""Units on a real database: all their members are placed or none, and what was only said while they waited is gone."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply, Written
from bursar.commands.scheduling.bind import Bind, BindMember, NotePending
from bursar.core.nodes.bind_check import Target
from bursar.core.nodes.node import Placement
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime import lane
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader import stand
from bursar.ops.scheduling.placement import bind as bind_all
from bursar.ops.scheduling.placement import note
from bursar.store.nodes import node as node_store
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    bind_unit,
    code,
    counters,
    document,
    end,
    get,
    member,
    node,
    refusal,
)

GPU = "nvidia.com/gpu"
GANG = {"gangScheduling": {"groupId": "g", "minMembers": 3}}


async def gang(runtime: Runtime, where: str = "default", **requests: Any) -> None:
    for name in ("a", "b", "c"):
        assert code(await allocation(runtime, where, name, spec=GANG, **(requests or {"gpu": 1}))) == "ok"


async def found(runtime: Runtime, name: str, where: str = "default") -> BindMember:
    one = await member(runtime, where, name)
    assert isinstance(one, BindMember)
    return one


async def status(runtime: Runtime, name: str, where: str = "default") -> dict[str, Any]:
    stored = await object_ops.get(runtime, Key("Allocation", where, name))
    assert not isinstance(stored, Refusal)
    shown: dict[str, Any] = msgspec.json.decode(stored.status)
    return shown


async def placed(runtime: Runtime, *nodes: str) -> list[Placement]:
    async with runtime.database.reader() as db:
        return await node_store.load_placements_on(db, nodes)


async def everything(runtime: Runtime) -> list[Any]:
    """All that a bind could have written."""
    tables = ("object", "node", "placement", "gang", "revision")
    async with runtime.database.reader() as db:
        rows = [await db.fetch(f"SELECT * FROM {table} ORDER BY 1, 2, 3") for table in tables]
    used = {row: one for row, one in (await counters(runtime)).items() if one.accepted or one.bound}
    return [*([tuple(row) for row in some] for some in rows), used]


# Whole or not at all.


async def test_a_gang_is_placed_whole(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await node(runtime, "n2", gpu=2)
    await gang(runtime)
    reply = await bind_unit(runtime, "default", {"a": ("n1",), "b": ("n1",), "c": ("n2",)})
    assert isinstance(reply, tuple)
    assert [one.key.name for one in reply] == ["a", "b", "c"]
    assert [one.revision for one in reply] == list(range(reply[0].revision, reply[0].revision + 3))
    assert {document(one)["status"]["phase"] for one in reply} == {"Scheduled"}
    # Each bind saw the capacity that those before it had left.
    given = [(one.node, one.name, one.devices[GPU]) for one in await placed(runtime, "n1", "n2")]
    assert sorted(given) == [("n1", "a", (0,)), ("n1", "b", (1,)), ("n2", "c", (0,))]
    assert (await counters(runtime))["tenant:default", GPU].bound == 3000
    await assert_counters_equal_charges(runtime)


async def test_a_node_without_capacity_for_the_last_member_refuses_them_all(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=2)
    await gang(runtime)
    before = await everything(runtime)
    refused = refusal(await bind_unit(runtime, "default", dict.fromkeys("abc", ("n1",))))
    assert refused.code == "no_capacity"
    assert refused.message == "c: node n1 has 0 nvidia.com/gpu free, 1 needed"
    assert refused.causes[0].field == "members[2]"
    assert await everything(runtime) == before


async def test_a_refused_unit_leaves_its_neighbours_what_it_did_not_take(runtime: Runtime) -> None:
    """In one batch: what the first two members of the refused unit would have taken is free for the next unit."""
    await node(runtime, "n1", gpu=2)
    await gang(runtime)
    await allocation(runtime, "default", "other", gpu=2)
    here = (Target("n1"),)
    unit = [replace(await found(runtime, name), targets=here) for name in "abc"]
    other = replace(await found(runtime, "other"), targets=here)
    replies = await bind_all(runtime, [Bind.unit(unit, TEST), Bind.unit([other], TEST)])
    assert [code(one) for one in replies] == ["no_capacity", "ok"]
    assert [one.name for one in await placed(runtime, "n1")] == ["other"]
    await assert_counters_equal_charges(runtime)


# What is told of the placement.


async def test_binding_tells_where_and_when_and_drops_what_was_said_of_the_wait(runtime: Runtime) -> None:
    made = await node(runtime, "n1", gpu=2)
    await allocation(runtime, "default", "a", gpu=1)
    waiting = await status(runtime, "a")
    waiting |= {"reason": "no_capacity", "message": "full", "queuePosition": 3}
    waiting["nominated"] = [{"node": "n1", "until": "2030-01-01T00:00:00Z"}]
    async with runtime.database.reader() as db:
        await db.execute("UPDATE object SET status = $1 WHERE name = 'a'", msgspec.json.encode(waiting))
    told = document(await bind(runtime, "default", "a", "n1"))["status"]
    assert not {"reason", "message", "queuePosition", "nominated"} & set(told)
    (condition,) = told["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Scheduled", "True", "Bound")
    assert told["scheduledTime"] == condition["lastTransitionTime"]
    assert told["nodeId"] == document(made)["metadata"]["uid"]
    assert told["nodes"] == [{"name": "n1", "devices": {GPU: [0]}}]
    assert told["allocatedResources"] == {GPU: "1"}


async def test_work_on_several_nodes_tells_all_of_them_and_what_it_holds_there(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=2)
    await allocation(runtime, "default", "a", spec={"nodes": 2}, gpu=2)
    told = document(await bind(runtime, "default", "a", "n1", "n2"))["status"]
    assert told["allocatedResources"] == {GPU: "4"}
    assert told["conditions"][0]["message"] == "Placed on 2 nodes: n1, n2"


async def test_each_placement_has_a_higher_epoch(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=2)
    await allocation(runtime, "default", "a", gpu=1)
    for epoch in (1, 2, 3):
        where = f"n{epoch % 2 + 1}"
        told = document(await bind(runtime, "default", "a", where))["status"]
        assert told["epoch"] == epoch
        assert [(one.node, one.epoch) for one in await placed(runtime, "n1", "n2")] == [(where, epoch)]
        waiting = document(await end(runtime, "default", "a", Phase.PENDING))["status"]
        assert waiting["epoch"] == epoch
        assert "scheduledTime" not in waiting


# Notes.


def why(one: BindMember, reason: str, message: str = "", **rest: Any) -> NotePending:
    given: dict[str, Any] = {"key": one.key, "origin": TEST, "uid": one.uid, "reason": reason, "message": message}
    return NotePending(**(given | rest))


async def noted(runtime: Runtime, command: NotePending) -> Reply:
    (reply,) = await note(runtime, [command])
    return reply


async def test_a_reason_is_written_once(runtime: Runtime) -> None:
    await allocation(runtime, "default", "a", gpu=1)
    one = await found(runtime, "a")
    first = await noted(runtime, why(one, "no_capacity", "needs 1, largest has 0"))
    told = document(first)["status"]
    assert (told["phase"], told["reason"], told["message"]) == ("Pending", "no_capacity", "needs 1, largest has 0")
    (condition,) = told["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Scheduled", "False", "no_capacity")
    before = await everything(runtime)
    assert await noted(runtime, why(one, "no_capacity", "needs 1, largest has 0.5")) == first
    assert await everything(runtime) == before
    other = await noted(runtime, why(one, "quota_exceeded", "waiting for quota headroom"))
    assert isinstance(first, Written)
    assert isinstance(other, Written)
    assert other.revision == first.revision + 1
    assert document(other)["status"]["reason"] == "quota_exceeded"
    await assert_counters_equal_charges(runtime)


async def test_notes_carry_the_fence_too(runtime: Runtime) -> None:
    await allocation(runtime, "default", "a", gpu=1)
    one = await found(runtime, "a")
    fence = await stand(runtime.database, "leader", 3600)
    assert fence is not None
    assert code(await noted(runtime, why(one, "no_capacity", fence=fence.number - 1))) == "stale"
    assert "reason" not in await status(runtime, "a")
    assert code(await noted(runtime, why(one, "no_capacity", fence=fence.number))) == "ok"


# Plans.


async def test_a_plan_longer_than_what_is_fed_at_once_is_answered_in_its_order(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "FEED_MAX", 7)
    await node(runtime, "n1", gpu=8)
    await node(runtime, "n2", gpu=100)
    names = [f"job-{number}" for number in range(30)]
    await asyncio.gather(*(allocation(runtime, "default", name, gpu=1) for name in names))
    # Every third goes to the small node, which takes eight of them.
    unit = [
        replace(await found(runtime, name), targets=(Target("n1" if number % 3 == 0 else "n2"),))
        for number, name in enumerate(names)
    ]
    replies = await bind_all(runtime, [Bind.unit([one], TEST) for one in unit])
    refused = [index for index, reply in enumerate(replies) if code(reply) != "ok"]
    assert refused == [24, 27]
    stored = [await get(runtime, "Allocation", "default", name) for name in names]
    assert [reply[0] for reply in replies if isinstance(reply, tuple)] == [
        one.revision for index, one in enumerate(stored) if index not in refused
    ]
    await assert_counters_equal_charges(runtime)


async def test_who_did_it_may_be_called_anything(runtime: Runtime) -> None:
    """Columns travel as texts: what stands in one must not shift the others."""
    await node(runtime, "n1", gpu=8)
    for name in ("a", "b", "c"):
        await allocation(runtime, "default", name, gpu=1)
    odd = Origin("user:\x1fodd\x1f", "bind", "because\x1f, 'so' \"there\" \\ {}, NULL")
    origins = [TEST, odd, Origin("", "", "")]
    unit = [replace(await found(runtime, name), targets=(Target("n1"),)) for name in "abc"]
    replies = await bind_all(runtime, [Bind.unit([one], origin) for one, origin in zip(unit, origins, strict=True)])
    assert [code(one) for one in replies] == ["ok"] * 3
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT name, actor, verb, reason FROM change ORDER BY revision DESC LIMIT 3")
    told = {row["name"]: (row["actor"], row["verb"], row["reason"]) for row in rows}
    assert told["a"] == (TEST.actor, TEST.verb, TEST.reason)
    assert told["b"] == ("user: odd ", "bind", "because , 'so' \"there\" \\ {}, NULL")
    assert told["c"] == ("", "", "")


async def test_what_is_not_sent_again_is_fed_as_it_stands(runtime: Runtime) -> None:
    """The feed shows document and labels whole, and what was before, though a bind sends neither."""
    await node(runtime, "n1", gpu=8)
    await allocation(runtime, "default", "a", gpu=1)
    before = await object_ops.get(runtime, Key("Allocation", "default", "a"))
    assert not isinstance(before, Refusal)
    await bind(runtime, "default", "a", "n1")
    async with runtime.database.reader() as db:
        row = await db.fetchrow("SELECT * FROM change ORDER BY revision DESC LIMIT 1")
    assert row["doc"] == before.doc
    assert msgspec.json.decode(row["labels"]) == msgspec.json.decode(row["before_labels"]) == dict(before.labels)
    assert msgspec.json.decode(row["before_fields"]) == dict(before.fields)
    assert msgspec.json.decode(row["fields"])["status.nodeName"] == "n1"
    assert (row["type"], row["before_tenant"]) == ("MODIFIED", before.tenant)
