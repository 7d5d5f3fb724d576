"""Upkeep: what must be done now and then, and may be done by anybody: all of it is idempotent.

Namespaces that end are emptied, usage is sampled, room is made in the feed; old requests, changes and measures are
dropped; the key that signs what is granted to nodes is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import structlog

from bursar.core.objects.object import Key, Origin
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.selector import parse_fields
from bursar.ops.credit.billing import load_credit_policy
from bursar.ops.lifecycle.dispatch import delete_command
from bursar.ops.lifecycle.namespace import TellWaiting
from bursar.ops.nodes.signing import rotate_old
from bursar.ops.objects import object as object_ops
from bursar.ops.objects.object import DeleteObject, DeletePreconditions
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.command import Written
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

UPKEEP = Origin("system:upkeep", "delete", "its namespace is being deleted")
BATCH = 200
PATIENCE = timedelta(minutes=10)  # before a namespace that was deleted says what it waits for
REST_PER_LOOK = 20.0  # so long is a namespace that is not empty left alone for each second that looking took


@dataclass(frozen=True, slots=True)
class Retention:
    markers: timedelta = timedelta(hours=1)
    answers: timedelta = timedelta(days=7)
    watch: int = 1_000_000  # revisions that can still be watched from
    audit: int = 10_000_000  # revisions whose changes are kept
    samples: timedelta = timedelta(days=400)  # also of what allocations have used
    hours: timedelta = timedelta(days=100)  # what tenants used, by the hour; by the day it is kept for good
    records: timedelta | None = None  # of what ran; None: as long as the settings say


async def run_upkeep(runtime: Runtime, retention: Retention | None = None) -> None:
    """For ever: each duty at its own pace. A database that is away is waited for."""
    retention = retention or Retention()
    rests: dict[str, float] = {}
    await asyncio.gather(
        _every(1.0, "namespaces", lambda: finish_namespaces(runtime, rests=rests)),
        _every(60.0, "usage", lambda: sample_usage(runtime)),
        _every(10.0, "partitions", lambda: free_capacity(runtime)),
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
            log.info("upkeep waits for the database", duty=duty, error=repr(error))
        except Exception:
            log.exception("upkeep failed", duty=duty)
        await asyncio.sleep(seconds)


async def finish_namespaces(
    runtime: Runtime, patience: timedelta = PATIENCE, rests: dict[str, float] | None = None
) -> int:
    """Empty the namespaces that are ending, and remove those that are empty; how many were removed. `rests` remembers
    until when those are left alone in which there is much."""
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
        reply = await object_ops.submit(runtime, DeleteObject(key=key, origin=UPKEEP), tenant="")
        removed += not isinstance(reply, Refusal)
    return removed


@dataclass(slots=True)
class Left:
    """What is in a namespace that should be empty; the first that has finalizers, and which."""

    count: int = 0
    held: str = ""


def _waited(doc: bytes) -> timedelta:
    return now() - datetime.fromisoformat(deleted_at(doc))


async def _tell_waiting(runtime: Runtime, key: Key, left: Left, own: Sequence[str]) -> None:
    what = f"finalizers of the namespace itself: {', '.join(own)}" if not left.count else left.held
    message = f"waits for {what or 'work that has not stopped'}"
    reply = await object_ops.submit(runtime, TellWaiting(key=key, origin=UPKEEP, message=message), tenant="")
    if isinstance(reply, Written):
        log.warning("a namespace that was deleted is not gone", namespace=key.name, why=message)


async def _empty(runtime: Runtime, namespace: str) -> Left:
    """Delete what lives in a namespace; what is left of it."""
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
    """Whether an object is gone; what runs is told to stop, once, and waited for."""
    found = await object_ops.get(runtime, key)
    if isinstance(found, Refusal) or is_ending(found.doc):
        return isinstance(found, Refusal)
    command = delete_command(kind, found, UPKEEP, preconditions=DeletePreconditions())
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
    """What allocations used long ago, when nodes were heard that are no more, and input that nobody reads any more."""
    async with runtime.database.reader() as db:
        forgotten = await heartbeat.forget_gone(db) + await stdin.forget(db)
        while count := await heartbeat.forget_usage(db, now() - retention.samples):
            forgotten += count
    return forgotten


async def keep_hours(runtime: Runtime, retention: Retention) -> list[str]:
    """Room for the records of coming months; hours and records of long ago are dropped. Which months those were."""
    async with runtime.database.reader() as db:
        await usage_records.ensure_partitions(db, now())
        await usage_levels.forget_hours(db, now() - retention.hours)
        kept = retention.records or timedelta(days=await load_record_days(db))
        return await usage_records.drop_records(db, now() - kept)


async def change_keys(runtime: Runtime) -> bool:
    """Whether there is a new key. Those that nobody believes any more are removed."""
    policy = await load_credit_policy(runtime)
    return await rotate_old(runtime.database, policy.key_days, by="system:upkeep")


async def free_capacity(runtime: Runtime) -> None:
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
    """Tenants may name any dimension; those that are gone leave no rows behind."""
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
