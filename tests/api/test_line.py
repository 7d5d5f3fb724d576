"""What is submitted says where in line it stands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from bursar.api import depth
from bursar.api.depth import Depths
from bursar.core.answer import Figures
from bursar.core.refusal import Refusal
from bursar.loops.schedule import run_schedule
from bursar.ops.inquiry import NO_LEADER, Inquiries
from bursar.ops.leader import resign, stand
from houses import Site, allocation, eventually
from offices import node

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"


@asynccontextmanager
async def scheduled(site: Site) -> AsyncIterator[None]:
    database = site.house.database
    fence = await stand(database, "test", 60.0)
    assert fence is not None
    site.house.inquiries._silent_until = site.house.depths._asked_at = float("-inf")
    task = asyncio.create_task(run_schedule(site.house.office, fence.number))
    try:
        await eventually(lambda: answers(site))
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await resign(database, "test")


async def answers(site: Site) -> bool:
    return not isinstance(await site.house.inquiries.figures(), Refusal)


async def depth_of(site: Site, queue: str) -> int:
    found = await site.house.inquiries.figures()
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
    monkeypatch.setattr(depth, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(depth, "WAIT_SECONDS_MAX", 30.0)


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


async def test_a_job_has_its_place_and_the_estimate_of_its_start(site: Site) -> None:
    team = await site.namespace()
    await node(site.house.office, "line-1", cpu=8, memory="64Gi", gpu=1)
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


async def test_where_nobody_leads_nothing_is_said_and_nobody_waits(site: Site) -> None:
    team = await site.namespace()
    site.house.depths._asked_at = site.house.depths._read_at = float("-inf")
    assert "queuePosition" not in await submit(site, team, "a")


async def test_the_leader_is_asked_once_a_second_and_a_silent_one_is_not_waited_for(site: Site) -> None:
    class Silent(Inquiries):
        asked = 0

        async def figures(self, seconds: float = 0.0) -> Figures | Refusal:
            self.asked += 1
            await asyncio.sleep(depth.FRESH_SECONDS / 2)
            return NO_LEADER

    silent = Silent(site.house.database)
    depths = Depths(silent)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(100):
        depths.look()
        assert await depths.last_place("default", 1) is None
    assert loop.time() - began < depth.FRESH_SECONDS
    assert silent.asked == 1
    await depths.close()
