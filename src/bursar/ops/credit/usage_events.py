"""Usage events of jobs: each is stored once, and added to the sum of its lease in the same commit.

An event is identified by its job and number. A repetition changes nothing and is answered as such; another body under
the same number is refused. An event that arrives after the reconciliation of its lease has it reconciled again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from bursar.core.credit.usage_events import UsageEvent, amount, check, lease_of_event, reused
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime import metrics
from bursar.ops.runtime.lane import put_all, raise_first
from bursar.store.credit import usage_events as store
from bursar.store.credit.usage_events import EventKey, MeteredEvent
from bursar.store.db.database import Connection

if TYPE_CHECKING:
    from bursar.ops.runtime.runtime import Runtime

EVENTS_MAX = 512


class Measure(Struct, frozen=True):
    """An event and its sender's access: the visible `tenants` (None: all), or the `node` whose leases it may report."""

    event: UsageEvent
    tenants: Collection[str] | None = None
    node: str = ""


class Noted(Struct, frozen=True):
    """A stored event: its lease, whether it is a repetition, and whether the lease had been reconciled before."""

    lease: int
    duplicate: bool = False
    late: bool = False


Answer: TypeAlias = Noted | Refusal


async def note_usage(runtime: Runtime, events: Sequence[Measure], tenant: str = "") -> list[Answer]:
    """Store these events; each is answered once it is committed. If a full lane sheds some, the error is raised after
    the others are stored, and all may be sent again."""
    answers: list[Answer | BaseException] = await put_all(runtime.measuring, events, tenant)
    return raise_first(answers)


async def measure(db: Connection, commands: Sequence[Measure]) -> list[Answer]:
    """Store one batch, in a transaction."""
    answers: dict[int, Answer] = {}
    lines: dict[int, MeteredEvent] = {}
    payers = await store.load_payers(db, {one.event.job for one in commands})
    for index, one in enumerate(commands):
        found = check(one.event) or lease_of_event(
            one.event, payers.get(one.event.job, ()), tenants=one.tenants, node=one.node
        )
        if isinstance(found, Refusal):
            answers[index] = found
        else:
            lines[index] = MeteredEvent(one.event, found)
    if lines:
        answers |= await _write(db, lines)
    for answer in answers.values():
        metrics.USAGE_EVENTS.labels(_outcome(answer)).inc()
    return [answers[index] for index in range(len(commands))]


async def _write(db: Connection, lines: dict[int, MeteredEvent]) -> dict[int, Answer]:
    """Store and sum the new events; of one that comes twice in a batch, the first."""
    first: dict[EventKey, int] = {}
    for index, line in lines.items():
        first.setdefault(line.key, index)
    new = await store.save(db, [lines[index] for index in first.values()])
    before = await store.load(db, sorted(first.keys() - new)) if len(new) < len(first) else {}
    before |= {key: (lines[first[key]].payer.id, lines[first[key]].event) for key in new}
    late: set[int] = set()
    if new:
        added = [lines[first[key]] for key in new]
        await store.add_up(db, store.sums_of((line, amount(*line)) for line in added))
        late = await store.reopen(db, (line.payer.id for line in added))
    answers: dict[int, Answer] = {}
    for index, line in lines.items():
        lease, event = before[line.key]
        if event.body != line.event.body:
            answers[index] = reused(line.event)
        elif line.key in new and first[line.key] == index:
            answers[index] = Noted(lease, late=lease in late)
        else:
            answers[index] = Noted(lease, duplicate=True)
    return answers


def _outcome(answer: Answer) -> str:
    if isinstance(answer, Refusal):
        return "refused"
    return "duplicate" if answer.duplicate else "late" if answer.late else "new"


async def forget_events(runtime: Runtime) -> int:
    """Delete events that can no longer change anything, and return their number."""
    forgotten = 0
    async with runtime.database.reader() as db:
        while count := await store.forget(db):
            forgotten += count
    return forgotten
