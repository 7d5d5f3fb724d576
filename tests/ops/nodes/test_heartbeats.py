"""Heartbeats in batches, and reports on placements other than the present one."""

import asyncio
from typing import Any

from bursar.commands.command import Written
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.ops.nodes.heartbeat import Heartbeat, HeartbeatHeard
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import report
from bursar.store.nodes.heartbeat import NodeSession, UsageRow
from support.runtime.runtime import TEST, allocation, bind, code, delete, document, end, node


def heartbeat(name: str, session: str, *, first: bool = False, asked: tuple[str, ...] = (), **seen: Any) -> Heartbeat:
    usages = tuple(UsageRow(uid, 1, name, 1.0, 0.5, 10, 20, 0.0) for uid in asked)
    return Heartbeat(NodeSession(name, session, seen.pop("generation", 0), 120, **seen), first, asked, usages)


async def together(runtime: Runtime, *heartbeats: Heartbeat) -> list[HeartbeatHeard | None]:
    """Put at once: the first goes alone, the others wait for it and go as one batch."""
    answers = await asyncio.gather(
        runtime.heartbeating.put(heartbeat("nobody", "-")), *(runtime.heartbeating.put(one) for one in heartbeats)
    )
    return answers[1:]


async def test_a_batch_hears_every_node_for_itself(runtime: Runtime) -> None:
    for name in ("n1", "n2"):
        await node(runtime, name, cpu=8)
    await allocation(runtime, "default", "a", cpu=1)
    uid = document(await bind(runtime, "default", "a", "n1"))["metadata"]["uid"]
    one, two, ghost, late = await together(
        runtime,
        heartbeat("n1", "s1", first=True, asked=(uid, "alloc-unknown")),
        heartbeat("n2", "s2", first=True, asked=(uid,)),
        heartbeat("ghost", "s3", first=True),
        heartbeat("n1", "older"),
    )
    assert one is not None
    assert two is not None
    assert (ghost, late) == (None, None)
    assert one.standing == two.standing == "Ready"
    assert [(claim.key.name, claim.epoch, claim.phase) for claim in one.claims.values()] == [("a", 1, "Scheduled")]
    assert two.claims == {}
    async with runtime.database.reader() as db:
        assert [row["node"] for row in await db.fetch("SELECT node FROM node_seen ORDER BY 1")] == ["n1", "n2"]
        used = await db.fetch("SELECT uid, node FROM allocation_usage")
    assert [tuple(row) for row in used] == [(uid, "n1")]


async def test_of_two_streams_in_one_batch_the_later_is_the_nodes(runtime: Runtime) -> None:
    await node(runtime, "n1", cpu=8)
    older, younger = await together(runtime, heartbeat("n1", "s1", first=True), heartbeat("n1", "s2", first=True))
    assert older is None
    assert younger is not None
    heard = await together(runtime, heartbeat("n1", "s2"), heartbeat("n1", "s1"), heartbeat("n1", "s0"))
    assert [one is not None for one in heard] == [True, False, False]


async def test_a_certificate_of_another_generation_is_not_heard(runtime: Runtime) -> None:
    await node(runtime, "n1", cpu=8)
    async with runtime.database.reader() as db:
        await db.execute("INSERT INTO node_identity (node, generation) VALUES ('n1', 2)")
    old, new = await together(
        runtime, heartbeat("n1", "s1", first=True, generation=1), heartbeat("n1", "s1", generation=2)
    )
    assert (old, new) == (None, None)
    (new,) = await together(runtime, heartbeat("n1", "s1", first=True, generation=2))
    assert new is not None
    assert await together(runtime, heartbeat("n1", "s1", generation=1)) == [None]
    assert await together(runtime, heartbeat("n1", "s1", generation=2)) != [None]


async def test_what_is_wanted_of_many_nodes(runtime: Runtime) -> None:
    names = [f"n{index}" for index in range(3)]
    for name in names:
        await node(runtime, name, cpu=8)
    for index in range(4):
        await allocation(runtime, "default", f"a{index}", cpu=1)
        await bind(runtime, "default", f"a{index}", names[index % 2])
    last = await delete(runtime, "Allocation", "default", "a2")
    assert isinstance(last, Written)
    sets = await asyncio.gather(*(runtime.recalling.submit(name) for name in (*names, "ghost")))
    told = [[(one.key.name, one.wanted) for one in some.places] for some in sets]
    assert told == [[("a0", True), ("a2", False)], [("a1", True), ("a3", True)], [], []]
    assert {some.revision for some in sets} == {last.revision}


async def test_what_is_said_of_another_epoch_is_stale(runtime: Runtime) -> None:
    await node(runtime, "n1", cpu=8)
    await allocation(runtime, "default", "a", cpu=1)
    await bind(runtime, "default", "a", "n1")

    async def said(phase: Phase, epoch: int | None, **more: Any) -> str:
        key = Key("Allocation", "default", "a")
        return code(await report(runtime, Report(key=key, origin=TEST, phase=phase, node="n1", epoch=epoch, **more)))

    assert await said(Phase.SUCCEEDED, 0) == "stale"
    assert await said(Phase.RUNNING, 2) == "stale"
    assert await said(Phase.RUNNING, 1) == "ok"
    assert await said(Phase.RUNNING, None) == "ok"
    await end(runtime, "default", "a")
    assert await said(Phase.SUCCEEDED, 2) == "stale"
    assert await said(Phase.SUCCEEDED, 1) == "ok", "said again, it is no news"
