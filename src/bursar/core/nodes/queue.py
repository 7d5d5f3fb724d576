"""Queues for sensitive work: such a queue cannot be deleted or changed while it has work that it makes sensitive."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.core.nodes.node_claim import SENSITIVE
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.core.values.wording import counted


@dataclass(frozen=True, slots=True)
class InQueue:
    """The counts of allocations and jobs in a queue that have not ended."""

    waiting: int = 0
    placed: int = 0
    jobs: int = 0

    @property
    def total(self) -> int:
        return self.waiting + self.placed + self.jobs


def bares_its_work(before: str, after: str | None) -> bool:
    """Whether a new profile would end the protection of a queue's sensitive work; None: the queue is deleted."""
    return before == SENSITIVE != after


def still_sensitive(name: str, there: InQueue, *, deleted: bool) -> Refusal | None:
    """Refuse a change of a queue whose work would no longer be sensitive, and could share nodes with other users."""
    if not there.total:
        return None
    parts = (
        (there.waiting, "pending allocation"),
        (there.placed, "placed allocation"),
        (there.jobs, "unfinished job"),
    )
    told = ", ".join(counted(count, what) for count, what in parts if count)
    what = "deleted" if deleted else f"given another profile than {SENSITIVE}"
    message = f'queues "{name}" cannot be {what}: its work would no longer be sensitive ({told})'
    look = f"bursar get allocations,jobs -A --field-selector spec.queue={name}"
    hint = f"Delete that work, or wait until it has ended, and submit new work to another queue. To list it: {look}"
    return Refusal(Code.IN_USE, message, hint, (Cause("in_use", told, scope=name, current_usage=str(there.total)),))
