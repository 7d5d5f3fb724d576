"""Values of environment variables are shown by the object itself and by nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog

from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.values.redaction import HIDDEN, LAST_APPLIED
from bursar.loops.leader_query import Answering
from bursar.ops.scheduling.leader import resign, stand
from bursar.ops.scheduling.leader_query import Draft, Simulate, encode
from support.api.site import JSON_PATCH, MERGE, STRATEGIC, TABLE, Document, Site, allocation

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "hunter2"
ENV = {"PASSWORD": SECRET}


def work(name: str) -> Document:
    """An allocation as `kubectl apply` creates it."""
    body = allocation(name, spec={"command": ["train"], "env": ENV}, cpu=1)
    body["metadata"]["annotations"] = {LAST_APPLIED: json.dumps(body), "note": "mine"}
    return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def team(site: Site) -> str:
    name = await site.namespace()
    assert (await site.post(f"namespaces/{name}/allocations", work("job"))).status == 201
    return name


async def test_the_object_shows_what_its_tenant_gave(site: Site, team: str) -> None:
    viewer = await site.token("viewer", tenant=team, user="vic")
    shown = await site.get(f"namespaces/{team}/allocations/job", token=viewer)
    assert shown.body["spec"]["env"] == ENV
    assert SECRET in shown.body["metadata"]["annotations"][LAST_APPLIED]


@pytest.mark.parametrize("accept", ["application/json", TABLE])
async def test_a_pod_is_shown_without_the_manifest_it_was_made_of(site: Site, team: str, accept: str) -> None:
    """Roles that do not see allocations see pods."""
    biller = await site.token("billing-admin", user="bill")
    assert (await site.get(f"namespaces/{team}/allocations/job", token=biller)).status == 403
    for token in (biller, site.admin):
        for path in ("pods", f"namespaces/{team}/pods", f"namespaces/{team}/pods/job"):
            reply = await site.get(path, token=token, headers={"accept": accept})
            assert reply.status == 200
            assert "mine" in json.dumps(reply.body), "other annotations are shown"
            assert SECRET not in json.dumps(reply.body), path


@pytest_asyncio.fixture(loop_scope="module")
async def silent_leader(site: Site) -> AsyncIterator[None]:
    """Somebody who leads and never answers."""
    assert await stand(site.context.database, "silent", 60.0) is not None
    site.context.leader_queries._silent_until = float("-inf")
    yield
    await resign(site.context.database, "silent")


@pytest.mark.usefixtures("silent_leader")
async def test_a_simulation_tells_the_scheduler_no_values(site: Site, team: str) -> None:
    job = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": work("j")["spec"]}}}
    asking = asyncio.create_task(
        site.post(f"namespaces/{team}/allocations/simulate", {"items": [work("what-if"), job]})
    )
    try:
        async with asyncio.timeout(20), site.context.database.reader() as db:
            while (question := await db.fetchval("SELECT question FROM inquiry ORDER BY id DESC LIMIT 1")) is None:
                assert not asking.done(), asking
                await asyncio.sleep(0.01)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    drafts = json.loads(question)["drafts"]
    assert [one["doc"]["spec"]["env"] for one in drafts] == [{"PASSWORD": HIDDEN}] * 2
    assert SECRET not in str(question)


async def test_a_question_that_cannot_be_answered_is_not_logged() -> None:
    draft = Draft("u", "t", {}, msgspec.Raw(msgspec.json.encode({"metadata": {"name": SECRET}})))
    answering = Answering(ClusterState, SchedulingPolicy)
    with structlog.testing.capture_logs() as logged:
        answer = answering.answer(encode(Simulate([draft], {})), ClusterState())
    assert answer is not None
    assert json.loads(answer)["error"], "a draft without a spec"
    (line,) = logged
    assert line["question"] == "Simulate"
    assert SECRET not in str({name: value for name, value in line.items() if name != "exc_info"})


FAULTY: tuple[Any, ...] = (
    {"PASSWORD": [SECRET]},
    {f"PASSWORD={SECRET}": ""},
    {f"PASSWORD={SECRET}": 1},
    [f"PASSWORD={SECRET}"],
    [{"name": "A", "value": {SECRET: SECRET}}],
    [{"name": f"PASSWORD={SECRET}"}],
    [{"name": f"PASSWORD={SECRET}"}, {"name": f"PASSWORD={SECRET}"}],
    f"PASSWORD={SECRET}",
    {"PASSWORD": f"{SECRET}\0"},
    {f"PASSWORD={SECRET}\0": ""},
)


@pytest.mark.parametrize("env", FAULTY)
async def test_a_refusal_does_not_quote_a_variable(site: Site, team: str, env: Any) -> None:
    body = {**work("other"), "metadata": {"name": "other"}}
    body["spec"] = {**body["spec"], "env": env}
    job = {"metadata": {"name": "j"}, "spec": {"template": {"spec": body["spec"]}}}
    path = f"namespaces/{team}/allocations"
    operations = [{"op": "test", "path": "/spec/env", "value": env}, {"op": "add", "path": "/spec/env", "value": env}]
    for reply in (
        await site.post(path, body),
        await site.post(path, json.dumps(body).encode(), media="application/yaml"),
        await site.post(f"{path}/simulate", {"items": [body]}),
        await site.post(f"namespaces/{team}/jobs", job),
        await site.put(f"{path}/job", {**body, "metadata": {"name": "job"}}),
        await site.patch(f"{path}/job", {"spec": {"env": env}}, MERGE),
        await site.patch(f"{path}/job", {"spec": {"env": env}}, STRATEGIC),
        await site.patch(f"{path}/job", operations, JSON_PATCH),
        await site.patch(f"{path}/job", operations[1:], JSON_PATCH),
    ):
        assert reply.status in (400, 409, 422), reply
        assert SECRET not in json.dumps(reply.body), reply.message


async def test_events_tell_of_changes_and_not_of_values(site: Site, team: str) -> None:
    path = f"namespaces/{team}/allocations/told"
    assert (await site.post(f"namespaces/{team}/allocations", work("told"))).status == 201
    assert (await site.patch(path, {"metadata": {"annotations": {"note": "yours"}}})).status == 200
    assert (await site.delete(path)).status == 200
    events = await site.get(f"namespaces/{team}/events", fieldSelector="involvedObject.name=told")
    assert [one["reason"] for one in events.body["items"]] == ["Created", "Changed", "Deleted"]
    assert SECRET not in json.dumps(events.body)
