"""Events over HTTP: chosen by every term, and told only to those who may see what they are about."""

import pytest

from bursar.api.objects.event import event_of
from bursar.core.objects.object import Key
from bursar.ops.runtime.clock import now
from bursar.store.objects.change import AuditLine
from support.api.site import TABLE, Site, allocation, node
from support.runtime.runtime import bind

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_events_are_chosen_by_every_term(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/allocations"
    for name in ("one", "two"):
        await site.post(path, allocation(name, cpu=1))
    await site.patch(f"{path}/one", {"metadata": {"labels": {"a": "b"}}})
    await site.delete(f"{path}/two")

    async def chosen(selector: str) -> list[tuple[str, str]]:
        reply = await site.get(f"namespaces/{team}/events", fieldSelector=selector)
        assert reply.status == 200, reply
        return [(one["involvedObject"]["name"], one["reason"]) for one in reply.body["items"]]

    everything = [("one", "Created"), ("two", "Created"), ("one", "Changed"), ("two", "Deleted")]
    assert await chosen("") == everything
    assert await chosen("reason=Created") == everything[:2]
    assert await chosen("reason!=Created") == everything[2:]
    assert await chosen("type=Warning") == []
    assert await chosen("type!=Warning,involvedObject.name!=two") == [("one", "Created"), ("one", "Changed")]
    assert await chosen("involvedObject.name=two,reason=Deleted") == [("two", "Deleted")]
    assert await chosen("involvedObject.kind=Node") == []
    assert await chosen("involvedObject.name=one,involvedObject.namespace=elsewhere") == []
    (event, *_) = (await site.get(f"namespaces/{team}/events")).body["items"]
    assert await chosen(f"metadata.name={event['metadata']['name']}") == everything[:1]
    assert await chosen("metadata.namespace=elsewhere") == []


async def test_the_events_of_settings_are_for_those_who_see_everything(site: Site) -> None:
    team, worker = await site.namespace(), await node(site)
    name = worker["metadata"]["name"]
    reply = await site.post("settings", {"metadata": {"name": site.name("settings")}, "spec": {}})
    assert reply.status in (201, 409, 400), reply
    settings = (await site.get("settings")).names
    if not settings:
        pytest.skip("there are no settings to hide")
    viewer = await site.token("viewer", tenant=team, user="vic")
    for token, told in ((viewer, False), (site.admin, True)):
        reply = await site.get("events", token=token, fieldSelector=f"involvedObject.name={settings[0]}")
        kinds = {one["involvedObject"]["kind"] for one in reply.body["items"]}
        assert ("Settings" in kinds) is told
        reply = await site.get("events", token=token, fieldSelector=f"involvedObject.name={name}")
        assert {one["involvedObject"]["kind"] for one in reply.body["items"]} == {"Node"}


async def test_a_placement_is_an_event_of_kubernetes_with_its_age(site: Site) -> None:
    team, worker = await site.namespace(), await node(site)
    name = worker["metadata"]["name"]
    other = (await node(site))["metadata"]["name"]
    await site.post(f"namespaces/{team}/allocations", allocation("one", cpu=1))
    await site.post(f"namespaces/{team}/allocations", allocation("wide", spec={"nodes": 2}, cpu=1))
    await bind(site.context.runtime, team, "one", name)
    await bind(site.context.runtime, team, "wide", name, other)
    chosen = {"fieldSelector": "involvedObject.name=wide,reason=Scheduled"}
    (event,) = (await site.get(f"namespaces/{team}/events", **chosen)).body["items"]
    assert event["message"] == f"placed on 2 nodes: {name}, {other}"
    chosen = {"fieldSelector": "involvedObject.name=one,reason=Scheduled"}
    (event,) = (await site.get(f"namespaces/{team}/events", **chosen)).body["items"]
    assert (event["message"], event["type"]) == (f"placed on {name}", "Normal")
    table = await site.get(f"namespaces/{team}/events", headers={"accept": TABLE}, **chosen)
    age, *rest = table.body["rows"][0]["cells"]
    assert age.endswith("s")
    assert rest == ["Normal", "Scheduled", "allocation/one", f"placed on {name}"]


async def test_work_that_was_drained_says_why_it_waits_now() -> None:
    status = """{"phase": "Pending", "reason": "Drained", "message": "Node n1 is being drained",
        "conditions": [{"type": "Scheduled", "status": "False", "reason": "NoRoom", "message": "no GPU is free"}]}"""
    key = Key("Allocation", "lab", "one")
    line = AuditLine(7, key, "alloc-1", "lab", "MODIFIED", "system:scheduler", "note", "", now(), status)
    event = event_of(line)
    assert (event["reason"], event["message"]) == ("FailedScheduling", "no GPU is free")
