"""Nodes that fall silent, over the API: what is shown of them, their own heartbeats, and fencing."""

import asyncio
from typing import Any

import pytest

from bursar.loops.node_liveness import look_after
from support.api.site import STRATEGIC, TABLE, Site, allocation
from support.nodes.liveness import hear, silence, watch
from support.runtime.runtime import assert_counters_equal_charges, bind, node

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def loaded(site: Site, **spec: Any) -> tuple[str, str]:
    """A namespace, and a node on which its allocation `w` is placed."""
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    body = allocation("w", gpu=1, spec=spec)
    assert (await site.post(f"namespaces/{team}/allocations", body)).status == 201
    await bind(site.context.runtime, team, "w", where)
    return team, where


async def lose(site: Site, name: str) -> None:
    """The node is silent, and has been looked at. Others are heard, so that it is not one of many."""
    runtime = site.context.runtime
    await silence(runtime, name)
    await look_after(runtime, watch())


async def test_a_silent_node_and_its_work_show_it(site: Site) -> None:
    team, where = await loaded(site)
    await lose(site, where)
    shown = (await site.get(f"nodes/{where}")).body["status"]
    assert shown["phase"] == "Lost"
    (ready,) = [one for one in shown["conditions"] if one["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("Unknown", "NodeLost")
    work = (await site.get(f"namespaces/{team}/allocations/w")).body["status"]
    assert (work["phase"], work["reason"]) == ("Scheduled", "NodeLost")
    assert [
        one["metadata"]["name"] for one in (await site.get("nodes", fieldSelector="status.phase=Lost")).body["items"]
    ]
    table = (await site.get(f"nodes/{where}", headers={"accept": TABLE})).body
    assert table["rows"][0]["cells"][1] == "Lost"
    events = (await site.get("events", fieldSelector=f"involvedObject.name={where}")).body["items"]
    assert any(one["message"] == "mark by system:nodes: Lost" for one in events)


async def test_a_status_from_the_node_itself_brings_it_back(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    body = {"metadata": {"name": where}, "spec": {"capacity": {"nvidia.com/gpu": 8}}}
    token = (await site.post("nodes", body)).body["status"]["token"]
    await site.post(f"namespaces/{team}/allocations", allocation("w", gpu=1))
    await bind(site.context.runtime, team, "w", where)
    await lose(site, where)
    assert (await site.get(f"namespaces/{team}/allocations/w")).body["status"]["reason"] == "NodeLost"
    said = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    reply = await site.patch(f"nodes/{where}/status", said, STRATEGIC, token=token)
    assert reply.status == 200, reply
    assert reply.body["status"]["phase"] == "Ready"
    assert "silentSince" not in reply.body["status"]
    assert "reason" not in (await site.get(f"namespaces/{team}/allocations/w")).body["status"]


async def test_an_administrator_who_changes_its_status_does_not_bring_it_back(site: Site) -> None:
    _, where = await loaded(site)
    await lose(site, where)
    reply = await site.patch(f"nodes/{where}/status", {"status": {"phase": "Ready", "silentSince": None}})
    assert (reply.status, reply.body["status"]["phase"]) == (200, "Lost")
    forged = {"status": {"silentSince": "2020-01-01T00:00:00Z", "fence": {"by": "me"}}}
    _, other = await loaded(site)
    reply = await site.patch(f"nodes/{other}/status", forged)
    assert reply.status == 200
    assert not {"silentSince", "fence"} & reply.body["status"].keys()


async def test_a_node_is_fenced_and_its_work_waits_again(site: Site) -> None:
    team, where = await loaded(site)
    await lose(site, where)
    body = {"reason": "switched off"}
    tried = await site.post(f"nodes/{where}/fence", body, dryRun="All")
    one = {"requeued": 1, "failed": 0, "stopping": 0, "left": 0}
    assert (tried.status, tried.body) == (200, {"status": "Fenced", "node": where, "allocations": one})
    assert "fence" not in (await site.get(f"nodes/{where}")).body["status"]
    done = await site.post(f"nodes/{where}/fence", body)
    assert (done.status, done.body["allocations"]) == (200, one)
    shown = (await site.get(f"nodes/{where}")).body["status"]
    assert (shown["phase"], shown["fence"]["by"], shown["fence"]["reason"]) == ("Lost", "user:admin", "switched off")
    table = (await site.get(f"nodes/{where}", headers={"accept": TABLE})).body
    assert table["rows"][0]["cells"][1] == "Lost,Fenced"
    work = (await site.get(f"namespaces/{team}/allocations/w")).body["status"]
    assert (work["phase"], work["reason"], work["message"]) == ("Pending", "NodeLost", f"Node {where} was fenced")
    events = (await site.get("events", fieldSelector=f"involvedObject.name={where}")).body["items"]
    assert any(one["message"] == "fence by user:admin: switched off" for one in events), "who and why is recorded"
    again = (await site.post(f"nodes/{where}/fence", body)).body["allocations"]
    assert set(again.values()) == {0}
    await assert_counters_equal_charges(site.context.runtime)


async def test_a_fence_is_taken_back(site: Site) -> None:
    _, where = await loaded(site)
    refused = await site.delete(f"nodes/{where}/fence")
    assert (refused.status, "is not fenced" in refused.message) == (409, True)
    assert (await site.post(f"nodes/{where}/fence", {"reason": "off"})).status == 200
    back = await site.delete(f"nodes/{where}/fence")
    assert (back.status, back.body["status"]["phase"]) == (200, "Ready")


async def test_what_cannot_be_fenced(site: Site) -> None:
    _, where = await loaded(site)
    for body in ({}, {"reason": " "}, {"reason": "x" * 2000}, {"reason": "off", "grace": 3}):
        reply = await site.post(f"nodes/{where}/fence", body)
        assert reply.status == 400, body
    await hear(site.context.runtime, where)
    alive = await site.post(f"nodes/{where}/fence", {"reason": "off"})
    assert (alive.status, "it is alive" in alive.message) == (409, True)
    assert (await site.post("nodes/nowhere/fence", {"reason": "off"})).status == 404


async def test_only_administrators_of_the_system_fence(site: Site) -> None:
    team, where = await loaded(site)
    for role, whose in (
        ("tenant-admin", {"tenant": team}),
        ("user", {"tenant": team}),
        ("service", {"user": "bot"}),
        ("node", {"node": where}),
    ):
        token = await site.token(role, **whose)
        for reply in await asyncio.gather(
            site.post(f"nodes/{where}/fence", {"reason": "off"}, token=token),
            site.delete(f"nodes/{where}/fence", token=token),
        ):
            assert reply.status == 403, role


async def test_the_figures_tell_how_nodes_stand(site: Site) -> None:
    _, where = await loaded(site)
    await node(site.context.runtime, site.name("n"), gpu=1)
    await lose(site, where)
    text = (await site.get("/metrics")).body
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("bursar_nodes"))
    assert float(figures['bursar_nodes{phase="Lost"}']) >= 1
    assert float(figures['bursar_nodes{phase="Ready"}']) >= 1
    assert float(figures["bursar_nodes_alarm"]) == 0.0
    runtime, some = site.context.runtime, [site.name("m") for _ in range(3)]
    for name in some:
        await node(runtime, name, gpu=1)
    async with runtime.database.reader() as db:
        await db.execute("DELETE FROM node_seen")
    await hear(runtime, *some)
    await silence(runtime, *some[:2], seconds=20)
    text = (await site.get("/metrics")).body
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("bursar_nodes"))
    assert float(figures["bursar_nodes_silent_fraction"]) == pytest.approx(2 / 3)
    assert float(figures["bursar_nodes_alarm"]) == 1.0


async def test_settings_of_nodes_must_fit_together(site: Site) -> None:
    refused = await site.patch("settings/system", {"spec": {"nodes": {"lostSeconds": 10}}})
    assert refused.status == 400
    assert "spec.nodes.lostSeconds" in refused.message
    assert (await site.patch("settings/system", {"spec": {"nodes": {"lostSeconds": 90}}})).status == 200
    assert (await site.patch("settings/system", {"spec": {"nodes": None}})).status == 200
