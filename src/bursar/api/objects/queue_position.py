"""Queue position and start estimate, shown in the response to a submission and when a single object is read.

A read asks the leader. The response to a submission shows the last position of its queue, because it may be one of
thousands; only a job, which represents many allocations, asks the leader as well.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from bursar.api.http.route import Call
from bursar.commands.command import Written
from bursar.core.objects.approval import AWAITING_APPROVAL
from bursar.core.objects.object import Stored
from bursar.core.scheduling.explain.explain_types import QueueEstimate
from bursar.core.values.instant import timestamp
from bursar.core.values.replace import replace
from bursar.ops.scheduling.leader_query import LookQuestion
from bursar.wire.shared.document import encode
from bursar.wire.shared.kind import Kind, Object

WAITING = ("Pending", "Queued")


async def with_estimate(call: Call, one: Stored) -> Stored:
    """Add the position and the estimate to a pending object, if the leader answers in time."""
    look = _LOOKS.get((one.key.kind, one.fields.get("status.phase", "")))
    seen = await call.context.leader_queries.estimate(look(one)) if look is not None else None
    return one if seen is None else replace(one, status=_shown(msgspec.json.decode(one.status), seen))


async def with_place(call: Call, kind: Kind, submitted: Object, one: Written) -> Written:
    """Add the position to a submitted object. The leader does not order members of an incomplete gang, so they too get
    the last position of the queue."""
    if kind.queue is None:
        return one
    status = msgspec.json.decode(one.status)
    if status.get("phase") not in WAITING or status.get("reason") == AWAITING_APPROVAL:
        return one
    is_job, stored = one.key.kind == "Job", one.revision > 0
    last = await call.context.depths.last_place(
        kind.queue(submitted), one.revision if stored else None, status.get("active", 1) if is_job else 1
    )
    seen = None
    if is_job and stored:
        look = LookQuestion(namespace=one.key.namespace, job=one.key.name, revision=one.revision)
        seen = await call.context.leader_queries.estimate(look)
    if seen is None or seen.position is None:
        seen = QueueEstimate(last, seen.starts_at if seen is not None else None)
    return msgspec.structs.replace(one, status=_shown(status, seen))


def _shown(status: dict[str, Any], seen: QueueEstimate) -> bytes:
    if seen.position is not None:
        status["queuePosition"] = seen.position
    if seen.starts_at is not None:
        status["estimatedStartTime"] = timestamp(datetime.fromtimestamp(seen.starts_at, UTC))
    return encode(status)


_LOOKS: dict[tuple[str, str], Callable[[Stored], LookQuestion]] = {
    ("Allocation", "Pending"): lambda one: LookQuestion(one.uid),
    ("Job", "Queued"): lambda one: LookQuestion(namespace=one.key.namespace, job=one.key.name),
}
