"""A queue for sensitive work: what is in it is sensitive because it is there, so it cannot go while anything is."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.core.nodes.node_claim import SENSITIVE
from bursar.core.values.refusal import Cause, Code, Refusal


@dataclass(frozen=True, slots=True)
class InQueue:
    """What is in a queue and has not ended."""

    waiting: int = 0
    placed: int = 0
    jobs: int = 0

    @property
    def total(self) -> int:
        return self.waiting + self.placed + self.jobs


def bares_its_work(before: str, after: str | None) -> bool:
    """Whether work that a queue's profile made sensitive would be plain with its next one; None: the queue is gone."""
    return before == SENSITIVE != after


def still_sensitive(name: str, there: InQueue, *, deleted: bool) -> Refusal | None:
    """Why a queue for sensitive work stays one: what is in it would go to nodes that it shares with others."""
    if not there.total:
        return None
    parts = (
        (there.waiting, "allocation that waits", "allocations that wait"),
        (there.placed, "allocation that is placed", "allocations that are placed"),
        (there.jobs, "job that has not ended", "jobs that have not ended"),
    )
    told = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)
    what = "deleted" if deleted else f"given another profile than {SENSITIVE}"
    message = f'queues "{name}" cannot be {what}: its work would no longer be sensitive ({told})'
    look = f"bursar get allocations,jobs -A --field-selector spec.queue={name}"
    hint = f"Delete that work, or wait until it has ended; other work wants another queue. To see it: {look}"
    return Refusal(Code.IN_USE, message, hint, (Cause("in_use", told, scope=name, current_usage=str(there.total)),))
