"""Preemptions by an administrator, and what nodes are told of evictions, over the API."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bursar.core.objects.allocation import Phase
from support.api.site import Reply, Site, allocation, eventually
from support.runtime.runtime import assert_counters_equal_charges, bind, end, node

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def running(site: Site, namespace: str, name: str, *nodes: str, spec: Any = None, **requests: Any) -> None:
    made = await site.post(
        f"namespaces/{namespace}/allocations", allocation(name, spec=spec, **(requests or {"gpu": 1}))
    )
    assert made.status == 201, made
    await bind(site.context.runtime, namespace, name, *nodes)


async def preempt(site: Site, namespace: str, name: str, **more: Any) -> Reply:
    options = {one: more.pop(one) for one in ("token", "headers", "dryRun") if one in more}
    return await site.post(f"namespaces/{namespace}/preemptions", {"targetAllocation": name, **more}, **options)


async def shown(site: Site, namespace: str, name: str) -> Any:
    return (await site.get(f"namespaces/{namespace}/allocations/{name}")).body


@asynccontextmanager
async def notices(site: Site, node_name: str, token: str = "", accept: str = "") -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a node's stream of evictions."""
    headers = {"authorization": f"Bearer {token or site.admin}", **({"accept": accept} if accept else {})}
    url = f"{site.url}/api/v1/nodes/{node_name}/evictions"
    async with site.http.stream("GET", url, params={"watch": "true"}, headers=headers) as answer:
        assert answer.status_code == 200
        async with asyncio.timeout(20):
            yield answer.aiter_lines()


# Preempting.


async def test_an_administrator_preempts_and_the_work_waits_again(site: Site) -> None:
    team = await site.namespace()
    await node(site.context.runtime, site.name("n"), gpu=1)
    where = site.name("n")
    await node(site.context.runtime, where, cpu=64, memory="256Gi", gpu=8)
    await running(site, team, "low", where, cpu=16, memory="64Gi", gpu=4)
    made = await preempt(
        site, team, "low", reason="production incident", gracePeriodSeconds=45, initiatedBy="oncall@example.com"
    )
    assert made.status == 201, made
    assert set(made.body) == {"preemptionId", "targetAllocation", "status", "gracePeriodEnds", "resourcesFreed"}
    assert made.body["preemptionId"].startswith("preempt-")
    assert (made.body["targetAllocation"], made.body["status"]) == ("low", "Initiated")
    assert made.body["resourcesFreed"] == {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "4"}
    status = (await shown(site, team, "low"))["status"]
    assert (status["phase"], status["reason"]) == ("Terminating", "Preempted")
    assert status["eviction"]["deadline"] == made.body["gracePeriodEnds"]
    assert status["message"] == "Preempted by oncall@example.com: production incident"
    await end(site.context.runtime, team, "low", Phase.FAILED)
    again = (await shown(site, team, "low"))["status"]
    assert (again["phase"], again["reason"], again["message"]) == ("Pending", "Preempted", status["message"])
    await assert_counters_equal_charges(site.context.runtime)


async def test_who_preempted_and_why_is_in_the_audit(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    await preempt(site, team, "low", reason="because")
    events = await site.get(f"namespaces/{team}/events", fieldSelector="involvedObject.name=low")
    assert any(
        one["source"]["component"] == "user:admin" and "because" in one["message"] for one in events.body["items"]
    ), events.body


async def test_what_cannot_be_preempted_is_refused_and_nothing_changes(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await site.post(f"namespaces/{team}/allocations", allocation("waiting", gpu=1))
    await running(site, team, "done", where)
    await end(site.context.runtime, team, "done")
    before = await site.state()
    assert (await preempt(site, team, "nobody")).status == 404
    assert (await preempt(site, "no-such-namespace", "waiting")).status == 404
    for name in ("waiting", "done"):
        refused = await preempt(site, team, name)
        assert (refused.status, refused.body["details"]["code"]) == (409, "stale")
        assert "Scheduled or Running" in refused.body["details"]["hint"]
    faulty: list[Any] = [
        {},
        {"targetAllocation": ""},
        {"targetAllocation": 7},
        {"targetAllocation": "done", "gracePeriodSeconds": -1},
        {"targetAllocation": "done", "gracePeriodSeconds": "soon"},
        {"targetAllocation": "done", "colour": "red"},
        {"targetAllocation": "done", "reason": "x" * 5000},
        [],
    ]
    for body in faulty:
        refused = await site.post(f"namespaces/{team}/preemptions", body)
        assert refused.status == 400, (body, refused)
    assert await site.state() == before


async def test_only_system_admins_preempt(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    for role, whose in (
        ("tenant-admin", {"tenant": team}),
        ("user", {"tenant": team}),
        ("node", {"node": where, "single_use": False}),
    ):
        token = await site.token(role, user="x", **whose)
        assert (await preempt(site, team, "low", token=token)).status == 403
    assert (await shown(site, team, "low"))["status"]["phase"] == "Scheduled"


async def test_a_repeated_request_has_one_answer_also_when_all_is_over(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    first = await preempt(site, team, "low", request_id="again")
    assert (await preempt(site, team, "low", request_id="again")).body == first.body
    assert (await preempt(site, team, "low", request_id="again", reason="other")).status == 422
    await end(site.context.runtime, team, "low", Phase.CANCELLED)
    assert (await preempt(site, team, "low", request_id="again")).body == first.body
    assert (await preempt(site, team, "low")).status == 409
    await site.delete(f"namespaces/{team}/allocations/low")
    assert (await preempt(site, team, "low", request_id="again")).body == first.body


async def test_preempting_twice_is_one_preemption(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    first = await preempt(site, team, "low", gracePeriodSeconds=30)
    assert (await preempt(site, team, "low", gracePeriodSeconds=300)).body == first.body


async def test_a_dry_run_tells_and_changes_nothing(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    before = await site.state()
    assert (await preempt(site, team, "low", dryRun="All")).status == 201
    assert await site.state() == before


# What nodes are told.


async def test_a_node_is_told_first_what_is_open_and_then_what_is_new(site: Site) -> None:
    team, where, elsewhere = await site.namespace(), site.name("n"), site.name("n")
    for name in (where, elsewhere):
        await node(site.context.runtime, name, gpu=8)
    for name in ("one", "two"):
        await running(site, team, name, where)
    await running(site, team, "other", elsewhere)
    await preempt(site, team, "one", reason="first")
    token = await site.token("node", node=where, single_use=False)
    async with notices(site, where, token) as lines:
        first = json.loads(await anext(lines))
        uid = (await shown(site, team, "one"))["metadata"]["uid"]
        deadline = (await shown(site, team, "one"))["status"]["eviction"]["deadline"]
        assert first == {
            "type": "EVICTION",
            "namespace": team,
            "allocation": "one",
            "uid": uid,
            "reason": "Preempted by user:admin: first",
            "gracePeriodSeconds": 30,
            "deadline": deadline,
        }
        await preempt(site, team, "other")
        await preempt(site, team, "two", gracePeriodSeconds=60)
        second = json.loads(await anext(lines))
        assert (second["allocation"], second["gracePeriodSeconds"]) == ("two", 60)
        await preempt(site, team, "two", gracePeriodSeconds=5)
        sooner = json.loads(await anext(lines))
        assert (sooner["allocation"], sooner["deadline"] < second["deadline"]) == ("two", True)


async def test_what_comes_back_and_is_evicted_again_is_told_again(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    async with notices(site, where) as lines:
        await preempt(site, team, "low", gracePeriodSeconds=500)
        assert json.loads(await anext(lines))["gracePeriodSeconds"] == 500
        await end(site.context.runtime, team, "low", Phase.CANCELLED)
        await bind(site.context.runtime, team, "low", where)
        await preempt(site, team, "low", gracePeriodSeconds=600)
        assert json.loads(await anext(lines))["gracePeriodSeconds"] == 600


async def test_notices_come_as_server_sent_events_when_asked(site: Site) -> None:
    team, where = await site.namespace(), site.name("n")
    await node(site.context.runtime, where, gpu=8)
    await running(site, team, "low", where)
    await preempt(site, team, "low")
    async with notices(site, where, accept="text/event-stream") as lines:
        assert (await anext(lines)).startswith("id: ")
        data = await anext(lines)
        assert json.loads(data.removeprefix("data: "))["allocation"] == "low"


async def test_open_notices_are_listed_until_the_node_has_spoken(site: Site) -> None:
    team, one, two = await site.namespace(), site.name("n"), site.name("n")
    for name in (one, two):
        await node(site.context.runtime, name, gpu=8)
    await running(site, team, "wide", one, two, spec={"nodes": 2})
    await running(site, team, "deleted", one)
    assert (await site.get(f"nodes/{one}/evictions")).body["items"] == []
    await site.delete(f"namespaces/{team}/allocations/deleted")
    await preempt(site, team, "wide")
    for name in (one, two):
        listed = (await site.get(f"nodes/{name}/evictions")).body
        assert [one["allocation"] for one in listed["items"]] == ["wide"]
    token = await site.token("node", node=one, single_use=False)
    path = f"namespaces/{team}/allocations/wide/status"
    ended = await site.patch(path, {"status": {"phase": "Failed"}}, token=token)
    assert (ended.status, ended.body["status"]["phase"]) == (200, "Terminating")
    assert (await site.get(f"nodes/{one}/evictions")).body["items"] == []
    assert len((await site.get(f"nodes/{two}/evictions")).body["items"]) == 1
    last = await site.patch(
        path, {"status": {"phase": "Failed"}}, token=await site.token("node", node=two, single_use=False)
    )
    assert (last.body["status"]["phase"], last.body["status"]["reason"]) == ("Pending", "Preempted")
    assert (await site.get(f"nodes/{two}/evictions")).body["items"] == []


async def test_nobody_hears_of_another_nodes_evictions(site: Site) -> None:
    where, elsewhere, team = site.name("n"), site.name("n"), await site.namespace()
    for name in (where, elsewhere):
        await node(site.context.runtime, name, gpu=8)
    other = await site.token("node", node=elsewhere, single_use=False)
    assert (await site.get(f"nodes/{where}/evictions", token=other)).status == 403
    assert (await site.get(f"nodes/{where}/evictions", token=other, watch="true")).status == 403
    assert (
        await site.get(f"nodes/{where}/evictions", token=await site.token("user", tenant=team, user="u"))
    ).status == 403
    assert (await site.get("nodes/nowhere/evictions")).status == 404
    assert (await site.get(f"nodes/{where}/evictions", watch="true", timeoutSeconds="soon")).status == 400


async def test_a_stream_of_notices_gives_its_seat_back(site: Site) -> None:
    where = site.name("n")
    await node(site.context.runtime, where, gpu=8)
    seats = site.context.watches.total()
    async with notices(site, where):
        await eventually(lambda: _holds(site.context.watches.total() == seats + 1))
    await eventually(lambda: _holds(site.context.watches.total() == seats))


async def _holds(fact: bool) -> bool:
    return fact
