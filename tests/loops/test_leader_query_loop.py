"""The scheduler at work, asked about what it does by another process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from bursar.core.objects.object import Key
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.scheduling.explain.explain_types import ExplainAnswer, Figures
from bursar.core.values.refusal import Refusal
from bursar.loops.schedule import run_schedule
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import leader_query as inquiry_ops
from bursar.ops.scheduling.leader_query import Draft, LeaderQueries, LookQuestion, Simulate
from bursar.store.db.database import Database
from support.api.site import eventually
from support.runtime.runtime import allocation, document, namespace, node, tenant
from support.scheduling.schedulers import term

GPU = "nvidia.com/gpu"


@asynccontextmanager
async def asked(runtime: Runtime, database_url: str) -> AsyncIterator[LeaderQueries]:
    """A leader that schedules and answers, and somebody elsewhere who asks."""
    database = await Database.open(database_url)
    asker = LeaderQueries(database)
    task = asyncio.create_task(run_schedule(runtime, await term(runtime)))
    try:
        yield asker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asker.close()
        await database.close()


async def test_why_what_if_and_how_many(runtime: Runtime, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry_ops, "ESTIMATE_SECONDS_MAX", 60.0)
    await tenant(runtime, "physics")
    await namespace(runtime, "team", "physics")
    await node(runtime, "n0", cpu=8, memory="64Gi", gpu=4)
    async with asked(runtime, database_url) as asker:
        await allocation(runtime, "team", "runs", spec={"ttl": "1h"}, gpu=3)
        await eventually(lambda: in_phase(runtime, "runs", "Scheduled"))
        uid = document(await allocation(runtime, "team", "waits", gpu=2))["metadata"]["uid"]
        await eventually(lambda: is_reason(runtime, "waits", f"no_capacity_{GPU}"))

        found = await asker.explain(uid)
        assert isinstance(found, ExplainAnswer)
        assert (found.reason.why, found.reason.short[0].has, found.position) == (ReasonCode.NO_CAPACITY, 1000, 1)
        assert found.starts_at is not None, "what runs ends within the hour"
        seen = await asker.estimate(LookQuestion(uid))
        assert seen is not None
        assert seen.position == 1

        drafts = [draft("small", 1), draft("large", 4)]
        outlooks = await asker.simulate(Simulate(drafts, {}))
        assert not isinstance(outlooks, Refusal)
        assert [(one.name, one.runs_now) for one in outlooks] == [("small", True), ("large", False)]
        assert outlooks[0].places[0].node == "n0"

        figures = await asker.figures()
        assert isinstance(figures, Figures)
        assert (figures.waiting, figures.waiting_by_reason) == (1, {f"no_capacity_{GPU}": 1})
        assert figures.latency.count == 1
        default = next(one for one in figures.queues if one.name == "default")
        assert (default.depth, default.wait.count) == (1, 1)
        assert await in_phase(runtime, "waits", "Pending"), "a question places nothing"


def draft(name: str, gpus: int) -> Draft:
    doc = {
        "metadata": {"name": name, "namespace": "team", "creationTimestamp": "2030-01-01T00:00:00Z"},
        "spec": {"resources": {"requests": {GPU: str(gpus)}}, "ttl": "60s"},
    }
    return Draft(f"sim-{name}", "physics", {}, msgspec.Raw(msgspec.json.encode(doc)))


async def in_phase(runtime: Runtime, name: str, phase: str) -> bool:
    one = await object_ops.get(runtime, Key("Allocation", "team", name))
    return not isinstance(one, Refusal) and one.fields.get("status.phase") == phase


async def is_reason(runtime: Runtime, name: str, reason: str) -> bool:
    one = await object_ops.get(runtime, Key("Allocation", "team", name))
    return not isinstance(one, Refusal) and msgspec.json.decode(one.status).get("reason") == reason
