"""The effective priority of allocations: their job's boost, their own, or that of their class.

Classes and boosts change, so it is not stored with the allocation. It is computed on display, from classes and boosts
cached for a second, so that a watch does not query the database for every change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bursar.ops.runtime.clock import now
from bursar.store.db.database import Connection, Database
from bursar.store.objects import job as job_store
from bursar.store.objects import listing
from bursar.store.objects.job import BoostedJob
from bursar.store.objects.listing import Query
from bursar.wire.to_scheduler.ask import PriorityClassView, global_default, priority_class_of

AGE_SECONDS_MAX = 1.0

JobKey = tuple[str, str, str]  # (namespace, name, uid)


class Priorities:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._classes: Mapping[str, PriorityClassView] = {}
        self._boosts: dict[JobKey, BoostedJob | None] = {}  # None: the job has no boost
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()

    async def of(self, allocations: Sequence[Mapping[str, Any]]) -> list[int]:
        """The effective priority of each of these documents."""
        jobs = [_job_of(one) for one in allocations]
        async with self._lock:
            await self._read({job for job in jobs if job is not None})
            classes, boosts = self._classes, self._boosts
        at = now()
        return [
            _in_force(one, classes, boosts.get(job) if job else None, at)
            for one, job in zip(allocations, jobs, strict=True)
        ]

    async def _read(self, jobs: set[JobKey]) -> None:
        at = asyncio.get_running_loop().time()
        stale = at - self._read_at > AGE_SECONDS_MAX
        if not stale and jobs <= self._boosts.keys():
            return
        async with self._database.reader() as db:
            if stale:
                self._classes, self._boosts, self._read_at = await load_classes(db), {}, at
            missing = sorted(jobs - self._boosts.keys())
            self._boosts |= dict.fromkeys(missing) | await job_store.load_boosts(db, missing)


async def load_classes(db: Connection) -> dict[str, PriorityClassView]:
    page = await listing.load_page(db, Query("PriorityClass"))
    return {item.name: priority_class_of(item.doc) for item in page.items}


def _in_force(
    document: Mapping[str, Any], classes: Mapping[str, PriorityClassView], boost: BoostedJob | None, at: datetime
) -> int:
    if boost is not None and datetime.fromisoformat(boost.expires) > at:
        return boost.priority
    spec = document.get("spec") or {}
    if (own := spec.get("priority")) is not None:
        return int(own)
    return (classes.get(spec.get("priorityClass") or "") or global_default(classes)).value


def _job_of(document: Mapping[str, Any]) -> JobKey | None:
    """The job that created an allocation. Its label alone is not trusted."""
    metadata = document["metadata"]
    owners: Iterable[Mapping[str, Any]] = metadata.get("ownerReferences") or ()
    found = next(((one["name"], one.get("uid", "")) for one in owners if one["kind"] == "Job"), None)
    return (metadata.get("namespace", ""), *found) if found is not None else None
