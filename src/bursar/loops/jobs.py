"""The job controller: advances a job whenever it or one of its allocations changes.

Changes come from the feed, and time itself from the agenda. Any number of processes may run this: a step is committed
by one of them. Its memory can be lost at any moment: it begins with all jobs that are not settled, and looks at them
again from time to time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

import structlog

from bursar.core.objects.allocation import ENDED
from bursar.core.objects.object import Key
from bursar.core.values.selector import Op, Selector, SelectorTerm
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.feed import FedChange, Feed, FeedLagging, Follower
from bursar.ops.runtime.lane import Overloaded
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.job_controller import TROUBLE_SECONDS, Stepped, step
from bursar.store.db.database import AWAY
from bursar.store.objects import listing
from bursar.store.objects.listing import Query
from bursar.wire.kinds.job import JOB, JOB_LABEL

log = structlog.get_logger()

AT_ONCE = 64
# A job that could not create allocations tries again after this, or when its tenant frees quota.
BLOCKED_SECONDS = 30.0
RESYNC_SECONDS = 300.0
LISTEN_SECONDS = 60.0

LOST: tuple[type[Exception], ...] = (FeedLagging, *AWAY)
BUSY: tuple[type[Exception], ...] = (Overloaded, *AWAY)

_UNSETTLED = Selector((SelectorTerm("status.settled", Op.NOT_IN, ("true",)),))


async def run_jobs(runtime: Runtime) -> None:
    """Run forever; wait while the database is away."""
    while True:
        try:
            await _follow(runtime)
        except* LOST as errors:
            log.info(
                "jobs_restarted",
                message="the job controller lost the database and starts again",
                errors=repr(errors.exceptions),
            )
        except* Exception:
            log.exception("jobs_failed", message="the job controller failed and starts again")
        await asyncio.sleep(TROUBLE_SECONDS)


async def _follow(runtime: Runtime) -> None:
    """Advance jobs as they change, until the feed is lost."""
    feed, agenda = Feed(runtime.database), Agenda()
    runtime.on_commit.append(feed.nudge)
    try:
        # Listen before the first read, so that no change is missed.
        jobs, allocations = await feed.follow(JOB.name), await feed.follow("Allocation")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_listen(jobs, agenda))
            tasks.create_task(_listen(allocations, agenda))
            tasks.create_task(_resync(runtime, agenda))
            tasks.create_task(_work(runtime, agenda))
    finally:
        runtime.on_commit.remove(feed.nudge)
        await feed.close()


# The agenda.


@dataclass(slots=True)
class Agenda:
    """The jobs that are due, now or later; and jobs that wait for quota, by tenant."""

    due: dict[Key, None] = field(default_factory=dict)
    later: dict[Key, datetime] = field(default_factory=dict)
    blocked: dict[str, set[Key]] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    looks: int = 0
    freed_in: dict[str, int] = field(default_factory=dict)  # the round in which a tenant last freed quota
    _heap: list[tuple[datetime, Key]] = field(default_factory=list)

    def call(self, keys: Iterable[Key]) -> None:
        self.due.update(dict.fromkeys(keys))
        self.wake.set()

    def call_later(self, key: Key, at: datetime) -> None:
        if self.later.get(key) != at:
            self.later[key] = at
            heapq.heappush(self._heap, (at, key))

    def freed(self, tenant: str) -> None:
        """Wake the jobs of a tenant that wait for quota, because some was freed."""
        self.freed_in[tenant] = self.looks
        if waiting := self.blocked.pop(tenant, None):
            self.call(waiting)

    def begin(self) -> int:
        self.looks += 1
        return self.looks

    def note(self, key: Key, stepped: Stepped | None, at: datetime, look: int = 0) -> None:
        """Note the outcome of a step of a job."""
        if stepped is None:
            self.later.pop(key, None)
            return
        looks = [stepped.look_at] if stepped.look_at is not None else []
        if stepped.blocked and self.freed_in.get(stepped.tenant, -1) >= look > 0:
            # Quota was freed since it was refused.
            self.call((key,))
        elif stepped.blocked:
            self.blocked.setdefault(stepped.tenant, set()).add(key)
            looks.append(at + timedelta(seconds=BLOCKED_SECONDS))
        if looks:
            self.call_later(key, min(looks))
        else:
            self.later.pop(key, None)

    def take(self, at: datetime, count_max: int) -> list[Key]:
        """Take the jobs that are due."""
        while self._heap and self._heap[0][0] <= at:
            when, key = heapq.heappop(self._heap)
            if self.later.get(key) == when:
                del self.later[key]
                self.due[key] = None
        taken = list(islice(self.due, count_max))
        for key in taken:
            del self.due[key]
        return taken

    def seconds_left(self, at: datetime) -> float:
        """The seconds until the next job is due."""
        if self.due:
            return 0.0
        return max(0.0, (self._heap[0][0] - at).total_seconds()) if self._heap else LISTEN_SECONDS


# Fill the agenda.


async def _listen(follower: Follower, agenda: Agenda) -> None:
    while True:
        for fed in await follower.wait(LISTEN_SECONDS):
            hear(fed, agenda)


def hear(fed: FedChange, agenda: Agenda) -> None:
    """Wake the jobs that a change concerns."""
    change = fed.change
    if change.key.kind == JOB.name:
        if change.type != "DELETED" and fed.fields.get("status.settled") != "true":
            agenda.call((change.key,))
        return
    gone = change.type == "DELETED" or fed.fields.get("status.phase") in ENDED
    if gone:
        agenda.freed(change.tenant)
    moved = fed.before_fields is not None and fed.fields.get("status.phase") != fed.before_fields.get("status.phase")
    if gone or moved:
        names = {labels[JOB_LABEL] for labels in (fed.labels, fed.before_labels or {}) if JOB_LABEL in labels}
        agenda.call(Key(JOB.name, change.key.namespace, name) for name in names)


async def _resync(runtime: Runtime, agenda: Agenda) -> None:
    """Wake all jobs that are not settled: at first, and then periodically, in case a change was missed."""
    while True:
        agenda.call(await unsettled(runtime))
        await asyncio.sleep(RESYNC_SECONDS)


async def unsettled(runtime: Runtime) -> list[Key]:
    keys: list[Key] = []
    async with runtime.database.reader() as db:
        async for page in listing.load_all(db, Query(JOB.name, fields=_UNSETTLED)):
            keys += [Key(JOB.name, one.namespace, one.name) for one in page.items]
    return keys


# Process the agenda.


async def _work(runtime: Runtime, agenda: Agenda) -> None:
    while True:
        agenda.wake.clear()
        if keys := agenda.take(now(), AT_ONCE):
            await asyncio.gather(*(_look(runtime, agenda, key) for key in keys))
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(agenda.seconds_left(now())):
                await agenda.wake.wait()


async def _look(runtime: Runtime, agenda: Agenda, key: Key) -> None:
    look = agenda.begin()
    try:
        agenda.note(key, await step(runtime, key), now(), look)
    except BUSY as error:
        log.info(
            "job_waits",
            message="a job waits for the database",
            job=key.name,
            namespace=key.namespace,
            error=repr(error),
        )
        agenda.call_later(key, now() + timedelta(seconds=TROUBLE_SECONDS))
    except Exception:
        # A job that cannot be advanced must not delay the others.
        log.exception("job_step_failed", message="a job could not be advanced", job=key.name, namespace=key.namespace)
        agenda.call_later(key, now() + timedelta(seconds=BLOCKED_SECONDS))
