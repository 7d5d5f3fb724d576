"""Short words for what tests do with jobs."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads import job as job_ops
from bursar.store.objects.listing import Query, load_page
from support.runtime.runtime import (
    GPU,
    bind_unit,
    code,
    create,
    end,
    get,
    namespace,
    node,
    tenant,
)


async def job(
    runtime: Runtime,
    name: str = "train",
    *,
    gpu: int = 1,
    template: dict[str, Any] | None = None,
    claimed: IdempotencyKey | None = None,
    where: str = "lab",
    **spec: Any,
) -> Reply:
    body = {"resources": {"requests": {GPU: str(gpu)}}, **(template or {})}
    # Nobody waits between tries, unless that is what is looked at.
    wishes = {"template": {"spec": body}, "backoffSeconds": 0, **spec}
    whole = {"metadata": {"name": name, "namespace": where}, "spec": wishes}
    return await create(runtime, "Job", whole, claimed=claimed)


def key(name: str = "train") -> Key:
    return Key("Job", "lab", name)


async def stored(runtime: Runtime, name: str = "train") -> Stored:
    return await get(runtime, "Job", "lab", name)


async def status(runtime: Runtime, name: str = "train") -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored(runtime, name)).status)
    return found


async def phases(runtime: Runtime) -> dict[str, str]:
    async with runtime.database.reader() as db:
        page = await load_page(db, Query("Allocation", "lab"))
    return {one.name: msgspec.json.decode(one.status)["phase"] for one in page.items}


async def run(runtime: Runtime, *names: str) -> None:
    assert code(await bind_unit(runtime, "lab", dict.fromkeys(names, ("n1",)))) == "ok"
    for name in names:
        assert code(await end(runtime, "lab", name, Phase.RUNNING)) == "ok"


async def finish(runtime: Runtime, *names: str, phase: Phase = Phase.SUCCEEDED) -> None:
    for name in names:
        assert code(await end(runtime, "lab", name, phase)) == "ok"


async def cancel(runtime: Runtime, name: str = "train", grace: int = 60) -> Reply:
    origin = Origin("user:lab/ann", "cancel", "superseded")
    return await job_ops.cancel(runtime, await stored(runtime, name), origin, grace_seconds=grace)


async def eight_gpus(runtime: Runtime) -> Runtime:
    """A tenant with a quota of eight GPUs, and a node that has them."""
    await tenant(runtime, "lab", limits={GPU: 8})
    await namespace(runtime, "lab", "lab")
    await node(runtime, "n1", gpu=8, cpu=64)
    return runtime
