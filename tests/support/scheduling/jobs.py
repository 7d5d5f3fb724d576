"""Short words for what tests do with jobs."""

from typing import Any

import msgspec

from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin, Stored
from bursar.ops.runtime.command import Reply
from bursar.ops.runtime.runtime import Office
from bursar.ops.workloads import job as job_ops
from bursar.store.db.idempotency import Claim
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
    office: Office,
    name: str = "train",
    *,
    gpu: int = 1,
    template: dict[str, Any] | None = None,
    claimed: Claim | None = None,
    where: str = "lab",
    **spec: Any,
) -> Reply:
    body = {"resources": {"requests": {GPU: str(gpu)}}, **(template or {})}
    # Nobody waits between tries, unless that is what is looked at.
    wishes = {"template": {"spec": body}, "backoffSeconds": 0, **spec}
    whole = {"metadata": {"name": name, "namespace": where}, "spec": wishes}
    return await create(office, "Job", whole, claimed=claimed)


def key(name: str = "train") -> Key:
    return Key("Job", "lab", name)


async def stored(office: Office, name: str = "train") -> Stored:
    return await get(office, "Job", "lab", name)


async def status(office: Office, name: str = "train") -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((await stored(office, name)).status)
    return found


async def phases(office: Office) -> dict[str, str]:
    async with office.database.reader() as db:
        page = await load_page(db, Query("Allocation", "lab"))
    return {one.name: msgspec.json.decode(one.status)["phase"] for one in page.items}


async def run(office: Office, *names: str) -> None:
    assert code(await bind_unit(office, "lab", dict.fromkeys(names, ("n1",)))) == "ok"
    for name in names:
        assert code(await end(office, "lab", name, Phase.RUNNING)) == "ok"


async def finish(office: Office, *names: str, phase: Phase = Phase.SUCCEEDED) -> None:
    for name in names:
        assert code(await end(office, "lab", name, phase)) == "ok"


async def cancel(office: Office, name: str = "train", grace: int = 60) -> Reply:
    origin = Origin("user:lab/ann", "cancel", "superseded")
    return await job_ops.cancel(office, await stored(office, name), origin, grace_seconds=grace)


async def eight_gpus(office: Office) -> Office:
    """A tenant with room for eight GPUs, and a node that has them."""
    await tenant(office, "lab", limits={GPU: 8})
    await namespace(office, "lab", "lab")
    await node(office, "n1", gpu=8, cpu=64)
    return office
