"""Where in line something stands that waits: shown with it when it is submitted, and when it is read by itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from bursar.api.http.route import Call
from bursar.core.objects.object import Stored
from bursar.core.scheduling.explain.explain_types import Glimpse
from bursar.core.values.replace import replace
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.command import Written
from bursar.ops.scheduling.leader_query import LookQuestion
from bursar.wire.kinds.allocation import Allocation
from bursar.wire.kinds.job import Job, allocation_spec
from bursar.wire.shared.document import encode

QUEUED = frozenset({"Allocation", "Job"})
WAITING = ("Pending", "Queued")


async def with_glimpse(call: Call, one: Stored) -> Stored:
    """What waits is shown with its place in line and the estimate of its start, if the scheduler is quick to tell."""
    look = _LOOKS.get((one.key.kind, one.fields.get("status.phase", "")))
    seen = await call.context.leader_queries.glimpse(look(one)) if look is not None else None
    return one if seen is None else replace(one, status=_shown(msgspec.json.decode(one.status), seen))


async def with_place(call: Call, one: Written, queue: str) -> Written:
    """The same of what was just submitted. Of an allocation the scheduler is not asked, for it may be one of thousands:
    it is last in its queue, but for what its priority and its tenant's share change about that. So is what does not
    stand in line yet: a member of a gang that is not complete."""
    status = msgspec.json.decode(one.status)
    if status.get("phase") not in WAITING:
        return one
    is_job, stored = one.key.kind == "Job", one.revision > 0
    last = await call.context.depths.last_place(
        queue, one.revision if stored else None, status.get("active", 1) if is_job else 1
    )
    seen = None
    if is_job and stored:
        look = LookQuestion(namespace=one.key.namespace, job=one.key.name, revision=one.revision)
        seen = await call.context.leader_queries.glimpse(look)
    if seen is None or seen.position is None:
        seen = Glimpse(last, seen.starts_at if seen is not None else None)
    return msgspec.structs.replace(one, status=_shown(status, seen))


def queue_of(one: Allocation | Job) -> str:
    """The queue that it waits in, or its allocations do."""
    spec = one.spec if isinstance(one, Allocation) else allocation_spec(one.metadata.name or "", one.spec)
    return spec.queue or "default"


def _shown(status: dict[str, Any], seen: Glimpse) -> bytes:
    if seen.position is not None:
        status["queuePosition"] = seen.position
    if seen.starts_at is not None:
        status["estimatedStartTime"] = timestamp(datetime.fromtimestamp(seen.starts_at, UTC))
    return encode(status)


_LOOKS: dict[tuple[str, str], Callable[[Stored], LookQuestion]] = {
    ("Allocation", "Pending"): lambda one: LookQuestion(one.uid),
    ("Job", "Queued"): lambda one: LookQuestion(namespace=one.key.namespace, job=one.key.name),
}
