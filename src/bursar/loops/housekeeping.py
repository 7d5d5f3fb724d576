"""Housekeeping: periodic, idempotent duties that any controller may run.

Empty ending namespaces, sample usage, create partitions of the feed, drop old requests, changes and measurements, and
rotate the key that signs grants to nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import structlog

from bursar.commands.command import Written
from bursar.commands.lifecycle.dispatch import delete_command
from bursar.commands.objects.namespace import NoteRemaining
from bursar.commands.objects.object import DeleteObject, DeletePreconditions
from bursar.core.objects.object import Key, Origin
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.selector import parse_fields
from bursar.ops.credit.credit import load_credit_policy
from bursar.ops.nodes.signing import rotate_old
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import load_record_days
from bursar.store.db import idempotency
from bursar.store.db.database import AWAY
from bursar.store.nodes import heartbeat
from bursar.store.objects import change, listing, stdin
from bursar.store.objects.listing import Query
from bursar.store.quota import quota, tenant_tree
from bursar.store.usage import usage_levels, usage_records
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.document import deleted_at, finalizers_of, is_ending
from bursar.wire.shared.kind import Kind

log = structlog.get_logger()

HOUSEKEEPING = Origin("system:upkeep", "delete", "its namespace is being deleted")
BATCH = 200
PATIENCE = timedelta(minutes=10)  # before a deleted namespace reports the remaining obstacle
REST_PER_LOOK = 20.0  # seconds of rest for a namespace that is not empty, per second spent on it


@dataclass(frozen=True, slots=True)
class Retention:
    markers: timedelta = timedelta(hours=1)
    answers: timedelta = timedelta(days=7)
    watch: int = 1_000_000  # revisions that can still be watched from
    audit: int = 10_000_000  # revisions whose changes are kept
    samples: timedelta = timedelta(days=400)  # also of the usage of allocations
    hours: timedelta = timedelta(days=100)  # hourly usage of tenants; daily usage is kept forever
    records: timedelta | None = None  # usage records; None: as the settings say


async def run_housekeeping(runtime: Runtime, retention: Retention | None = None) -> None:
    """Run each duty forever at its own interval; wait while the database is away."""
    retention = retention or Retention()
    rests: dict[str, float] = {}
    await asyncio.gather(
        _every(1.0, "namespaces", lambda: finish_namespaces(runtime, rests=rests)),
        _every(60.0, "usage", lambda: sample_usage(runtime)),
        _every(10.0, "partitions", lambda: _ensure_partitions(runtime)),
        _every(60.0, "requests", lambda: forget_requests(runtime, retention)),
        _every(600.0, "changes", lambda: drop_changes(runtime, retention)),
        _every(3600.0, "counters", lambda: prune_counters(runtime)),
        _every(3600.0, "samples", lambda: forget_samples(runtime, retention)),
        _every(3600.0, "measures", lambda: forget_measures(runtime, retention)),
        _every(3600.0, "hours", lambda: keep_hours(runtime, retention)),
        _every(600.0, "keys", lambda: change_keys(runtime)),
    )


async def _every(seconds: float, duty: str, do: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await do()
        except AWAY as error:
            log.info("housekeeping_waits", message="housekeeping waits for the database", duty=duty, error=repr(error))
        except Exception:
            log.exception("housekeeping_failed", message="housekeeping failed and is tried again", duty=duty)
        await asyncio.sleep(seconds)


async def finish_namespaces(
    runtime: Runtime, patience: timedelta = PATIENCE, rests: dict[str, float] | None = None
) -> int:
    """Empty the ending namespaces, and remove the empty ones; return the number removed. `rests` holds the time until
    which large namespaces are skipped."""
    rests = {} if rests is None else rests
    clock = asyncio.get_running_loop().time
    ending = parse_fields("status.phase=Terminating", ("status.phase",))
    async with runtime.database.reader() as db:
        page = await listing.load_page(db, Query("Namespace", fields=ending))
    removed = 0
    for item in page.items:
        began, key = clock(), Key("Namespace", "", item.name)
        if began < rests.get(item.name, began):
            continue
        left = await _empty(runtime, item.name)
        if left.count or finalizers_of(item.doc):
            rests[item.name] = clock() + REST_PER_LOOK * (clock() - began)
            if _waited(item.doc) > patience:
                await _tell_waiting(runtime, key, left, finalizers_of(item.doc))
            continue
        rests.pop(item.name, None)
        reply = await object_ops.submit(runtime, DeleteObject(key=key, origin=HOUSEKEEPING), tenant="")
        removed += not isinstance(reply, Refusal)
    return removed


@dataclass(slots=True)
class Left:
    """The number of objects left in an ending namespace, and the finalizers of the first that has any."""

    count: int = 0
    held: str = ""


def _waited(doc: bytes) -> timedelta:
    return now() - datetime.fromisoformat(deleted_at(doc))


async def _tell_waiting(runtime: Runtime, key: Key, left: Left, own: Sequence[str]) -> None:
    what = f"finalizers of the namespace itself: {', '.join(own)}" if not left.count else left.held
    message = f"waits for {what or 'work that has not stopped'}"
    reply = await object_ops.submit(runtime, NoteRemaining(key=key, origin=HOUSEKEEPING, message=message), tenant="")
    if isinstance(reply, Written):
        log.warning(
            "namespace_not_empty",
            message="a deleted namespace could not be removed yet",
            namespace=key.name,
            error=message,
        )


async def _empty(runtime: Runtime, namespace: str) -> Left:
    """Delete the objects of a namespace; return those that are left."""
    left = Left()
    for kind in (one for one in KINDS if one.namespaced):
        query: Query | None = Query(kind.name, namespace, limit=BATCH)
        while query is not None:
            async with runtime.database.reader() as db:
                page = await listing.load_page(db, query)
            for item in page.items:
                if is_ending(item.doc) or not await _delete(runtime, kind, Key(kind.name, item.namespace, item.name)):
                    left.count += 1
                    if (names := finalizers_of(item.doc)) and not left.held:
                        left.held = f"finalizers of {kind.singular} {item.name}: {', '.join(names)}"
            query = replace(query, after=(namespace, page.items[-1].name)) if page.more else None
    return left


async def _delete(runtime: Runtime, kind: Kind, key: Key) -> bool:
    """Delete an object; true if it is gone. Running work is asked to stop once, and is then awaited."""
    found = await object_ops.get(runtime, key)
    if isinstance(found, Refusal) or is_ending(found.doc):
        return isinstance(found, Refusal)
    command = delete_command(kind, found, HOUSEKEEPING, preconditions=DeletePreconditions())
    reply = await object_ops.submit(runtime, command, tenant=found.tenant)
    return getattr(reply, "deleted", False) or (isinstance(reply, Refusal) and reply.code is Code.NOT_FOUND)


async def sample_usage(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await quota.save_sample(db, now())


async def forget_samples(runtime: Runtime, retention: Retention) -> int:
    forgotten = 0
    async with runtime.database.reader() as db:
        while count := await quota.forget_samples(db, now() - retention.samples):
            forgotten += count
    return forgotten


async def forget_measures(runtime: Runtime, retention: Retention) -> int:
    """Drop old usage of allocations, heartbeats of removed nodes, and stdin that no process reads any more."""
    async with runtime.database.reader() as db:
        forgotten = await heartbeat.forget_gone(db) + await stdin.forget(db)
        while count := await heartbeat.forget_usage(db, now() - retention.samples):
            forgotten += count
    return forgotten


async def keep_hours(runtime: Runtime, retention: Retention) -> list[str]:
    """Create partitions for the records of coming months, and drop old ones; return the dropped months."""
    async with runtime.database.reader() as db:
        await usage_records.ensure_partitions(db, now())
        await usage_levels.forget_hours(db, now() - retention.hours)
        kept = retention.records or timedelta(days=await load_record_days(db))
        return await usage_records.drop_records(db, now() - kept)


async def change_keys(runtime: Runtime) -> bool:
    """Rotate the signing key if it is old, and remove expired keys; true if there is a new key."""
    policy = await load_credit_policy(runtime)
    return await rotate_old(runtime.database, policy.key_days, by="system:upkeep")


async def _ensure_partitions(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await change.ensure_partitions(db)


async def forget_requests(runtime: Runtime, retention: Retention) -> int:
    forgotten = 0
    async with runtime.database.reader() as db:
        while count := await idempotency.expire(
            db, markers_before=now() - retention.markers, answers_before=now() - retention.answers
        ):
            forgotten += count
    return forgotten


async def prune_counters(runtime: Runtime) -> int:
    """Remove counters of dimensions that no limit or charge names any more."""
    async with runtime.database.reader() as db, db.transaction():
        await tenant_tree.lock_exclusive(db)
        pruned = await quota.prune(db)
        if pruned:
            await tenant_tree.bump(db)
    return pruned


async def drop_changes(runtime: Runtime, retention: Retention) -> list[str]:
    async with runtime.database.reader() as db:
        position = await change.load_position(db)
        await change.raise_floor(db, position.revision - retention.watch)
        return await change.drop_before(db, position.revision - retention.audit)
