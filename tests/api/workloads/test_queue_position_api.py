"""What is submitted says where in line it stands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
import pytest

from bursar.core.scheduling.explain.explain_types import Figures, QueueFigures
from bursar.core.values.refusal import Refusal
from bursar.loops.schedule import run_schedule
from bursar.ops.scheduling import leader_query, queue_depth
from bursar.ops.scheduling.leader import resign, stand
from bursar.ops.scheduling.leader_query import NO_LEADER, LeaderAnswer, LeaderQueries, encode
from bursar.ops.scheduling.queue_depth import QueueDepths
from bursar.store.scheduling import leader_query as inquiry_store
from support.api.site import Site, allocation, eventually
from support.runtime.runtime import node

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"


@asynccontextmanager
async def scheduled(site: Site) -> AsyncIterator[None]:
    database = site.context.database
    fence = await stand(database, "test", 60.0)
    assert fence is not None
    site.context.leader_queries._silent_until = site.context.depths._asked_at = float("-inf")
    task = asyncio.create_task(run_schedule(site.context.runtime, fence.number))
    try:
        await eventually(lambda: answers(site))
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await resign(database, "test")


async def answers(site: Site) -> bool:
    return not isinstance(await site.context.leader_queries.figures(), Refusal)


async def depth_of(site: Site, queue: str) -> int:
    found = await site.context.leader_queries.figures()
    assert isinstance(found, Figures)
    return next((one.depth for one in found.queues if one.name == queue), 0)


async def submit(site: Site, team: str, name: str, **spec: Any) -> dict[str, Any]:
    body = allocation(name, gpu=1)
    body["spec"] |= spec
    made = await site.post(f"namespaces/{team}/allocations", body)
    assert made.status == 201, made
    status: dict[str, Any] = made.body["status"]
    return status


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every submission asks how many wait, and waits for the answer."""
    monkeypatch.setattr(queue_depth, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(queue_depth, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(queue_depth, "LEADER_SECONDS_MAX", 30.0)
    monkeypatch.setattr(queue_depth, "WAIT_SECONDS_MAX", 30.0)


@pytest.mark.usefixtures("watchful")
async def test_an_allocation_is_last_in_its_queue(site: Site) -> None:
    team = await site.namespace()
    async with scheduled(site):
        for number in range(3):
            assert (await submit(site, team, f"a{number}"))["queuePosition"] == number + 1
            await eventually(partial(is_depth, site, "default", number + 1))
        assert (await submit(site, team, "b", queue="gpu-training"))["queuePosition"] == 1
        listed = (await site.get(f"namespaces/{team}/allocations")).body["items"]
    assert all("queuePosition" not in one["status"] for one in listed), "it is shown, and not stored"
    assert (await site.ask("DELETE", f"namespaces/{team}/allocations")).status == 200


async def is_depth(site: Site, queue: str, depth: int) -> bool:
    return await depth_of(site, queue) == depth


async def test_a_job_has_its_place_and_the_estimate_of_its_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_query, "ESTIMATE_SECONDS_MAX", 60.0)
    team = await site.namespace()
    await node(site.context.runtime, "line-1", cpu=8, memory="64Gi", gpu=1)
    async with scheduled(site):
        await submit(site, team, "runs", ttl="1h", nodeSelector={"kubernetes.io/hostname": "line-1"})
        await eventually(lambda: is_bound(site, team, "runs"))
        template = {"spec": {"resources": {"requests": {GPU: "1"}}, "ttl": "1h"}}
        body = {"metadata": {"name": "sweep"}, "spec": {"template": template, "parallelism": 2}}
        made = await site.post(f"namespaces/{team}/jobs", body)
    assert made.status == 201, made
    status = made.body["status"]
    assert (status["phase"], status["queuePosition"]) == ("Queued", 1)
    starts = datetime.fromisoformat(status["estimatedStartTime"]).timestamp()
    created = datetime.fromisoformat(made.body["metadata"]["creationTimestamp"]).timestamp()
    assert 3500 <= starts - created <= 3600


async def is_bound(site: Site, team: str, name: str) -> bool:
    one = await site.get(f"namespaces/{team}/allocations/{name}")
    return bool(one.body["status"]["phase"] == "Scheduled")


async def test_members_of_a_gang_that_is_not_complete_have_a_place(site: Site) -> None:
    team = await site.namespace()
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
    # Nothing runs there, and nothing is refused as too large.
    await node(site.context.runtime, "line-large", cpu=8, memory="64Gi", gpu=8)
    assert (await site.patch("nodes/line-large", {"spec": {"unschedulable": True}})).status == 200
    async with scheduled(site):
        queue = {"queue": "gpu-training", **gang}
        places = [(await submit(site, team, f"m{number}", **queue))["queuePosition"] for number in range(2)]
        assert 1 <= places[0] < places[1]
        body = allocation("tried", gpu=1)
        body["spec"] |= queue
        tried = await site.post(f"namespaces/{team}/allocations", body, dryRun="All")
        assert (tried.status, tried.body["status"]["queuePosition"]) == (201, places[1] + 1)
    assert (await site.ask("DELETE", f"namespaces/{team}/allocations")).status == 200


async def test_where_nobody_leads_what_waits_is_counted(site: Site) -> None:
    team = await site.namespace()
    where = f"namespaces/{team}"
    assert (await site.post("queues", {"metadata": {"name": team}, "spec": {}})).status == 201
    site.context.depths._asked_at = site.context.depths._read_at = float("-inf")
    places = [(await submit(site, team, f"a{number}", queue=team))["queuePosition"] for number in range(3)]
    assert places == [1, 2, 3]
    template = {"spec": {"resources": {"requests": {GPU: "1"}}}}
    body = {"metadata": {"name": "sweep"}, "spec": {"template": template, "parallelism": 5, "queue": team}}
    made = await site.post(f"{where}/jobs", body)
    assert (made.status, made.body["status"]["queuePosition"]) == (201, 4)
    assert (await submit(site, team, "last", queue=team))["queuePosition"] == 9
    assert (await site.get(f"{where}/allocations/a0")).body["status"].get("queuePosition") is None


class Silent(LeaderQueries):
    """Asks a leader that never answers in time, and remembers how often."""

    asked = 0

    async def figures(self, seconds: float = 0.0) -> Figures | Refusal:
        self.asked += 1
        return NO_LEADER


async def test_the_leader_is_asked_once_a_second_however_many_submit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_depth, "FRESH_SECONDS", 3600.0)
    monkeypatch.setattr(queue_depth, "STALE_SECONDS", 3600.0)
    monkeypatch.setattr(queue_depth, "WAIT_SECONDS_MAX", 30.0)
    silent = Silent(site.context.database)
    depths = QueueDepths(silent, site.context.database)
    newest = 1 << 60
    places = []
    for number in range(100):
        depths.look()
        places.append(await depths.last_place("nobody-waits-here", newest + number))
    assert places == list(range(1, 101))
    assert silent.asked == 1
    assert await depths.last_place("nobody-waits-here", newest) == 1
    assert await depths.last_place("nobody-waits-here", None) == 101
    await depths.close()


async def test_what_was_told_up_to_a_revision_is_counted_once(site: Site) -> None:
    depths = QueueDepths(site.context.leader_queries, site.context.database)
    depths._learn({"q": 2}, 10, asyncio.get_running_loop().time())
    assert [await depths.last_place("q", revision) for revision in (12, 11, 13)] == [3, 3, 5]
    depths._learn({"q": 4}, 12, asyncio.get_running_loop().time())
    assert await depths.last_place("q", 12) == 4, "it is among those that were told of"
    assert await depths.last_place("q", 14) == 6
    assert await depths.last_place("q", 12, 3) == 2, "the first of its members"
    assert [await depths.last_place("q", 15, 3) for _ in range(2)] == [7, 7], "a repeated request is counted once"
    assert await depths.last_place("q", None) == 10
    await depths.close()


async def test_whose_term_is_over_answers_nothing(site: Site) -> None:
    database = site.context.database
    former = await stand(database, "former", 60.0)
    assert former is not None
    asking = asyncio.create_task(site.context.leader_queries.figures(30.0))
    await eventually(lambda: is_asked(site))
    assert await resign(database, "former")
    present = await stand(database, "present", 60.0)
    assert present is not None
    async with database.reader() as db:
        (question,) = await inquiry_store.load_unanswered(db, 10, 60.0)
        for fence, depth_told in ((former, 77), (present, 1)):
            told = Figures(queues=(QueueFigures("default", depth_told),))
            answer = LeaderAnswer(msgspec.Raw(encode(told)))
            await inquiry_store.answer(db, [(question.id, encode(answer))], fence.number)
    found = await asking
    await resign(database, "present")
    assert isinstance(found, Figures)
    assert found.queues[0].depth == 1


async def is_asked(site: Site) -> bool:
    async with site.context.database.reader() as db:
        return bool(await inquiry_store.load_unanswered(db, 10, 60.0))
